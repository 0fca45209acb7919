//! The last decisions and ends of leases, each with the figures of its moment. Kept in memory only
//! (section 9).

use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;

use crate::command::SLICE_MAX;
use crate::decision::{BypassReason, Scope, WaitReason};
use crate::ids::{Epoch, Label, SessionId, TicketId};
use crate::policy::DECISIONS_KEPT;
use crate::tally::{CancelledHow, LeaseEnd};
use crate::units::{Ppm, Span, Timestamp, Tokens};

/// What was decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decided {
    /// A lease was granted.
    Admit,
    /// It was put in line.
    Wait(WaitReason),
    /// It goes ahead without a lease.
    Bypass(BypassReason),
    /// It was withdrawn, or its grant was taken back.
    Cancelled(CancelledHow),
    /// Its lease ended, after it was claimed.
    Ended(LeaseEnd),
}

/// The figures of the moment, before the decision changed them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Moment {
    /// Sum of the held leases.
    pub reserved: Tokens,
    /// Admission ceiling.
    pub ceiling: Tokens,
    /// Ceiling over all members (CAP4).
    pub full_ceiling: Tokens,
    /// Waiters in line.
    pub waiting: u64,
    /// Fleet pressure (CAP5).
    pub pressure: Option<Ppm>,
    /// Its threshold.
    pub threshold: Ppm,
    /// Admission was paced after pressure (CAP6).
    pub paced: bool,
    /// Worker-set generation.
    pub epoch: Epoch,
}

/// One decision.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DecisionEntry {
    /// Rises by one with each; over restarts it only grows.
    pub number: u64,
    /// When.
    pub at: Timestamp,
    /// About which ticket.
    pub ticket: TicketId,
    /// Of which session; `None` for a bare cancel marker.
    pub session: Option<SessionId>,
    /// Who asked.
    pub client: Option<Label>,
    /// What kind of work.
    pub scope: Scope,
    /// How many tokens.
    pub reservation: Tokens,
    /// Time in line until then.
    pub waited: Span,
    /// How long the lease was held that ended; `None` for all others.
    pub held: Option<Span>,
    /// What was decided.
    pub decided: Decided,
    /// From what.
    pub moment: Moment,
}

/// Which decisions a reader wants. What is `None` or empty leaves nothing out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DecisionsWanted {
    /// Those after or before a number.
    pub place: DecisionsPlace,
    /// How many at most; never more than [`SLICE_MAX`].
    pub most: usize,
    /// Those that came to one of these.
    pub decided: Vec<Decided>,
    /// Those about this ticket.
    pub ticket: Option<TicketId>,
    /// Those of this session.
    pub session: Option<SessionId>,
    /// Those with this text in ticket, session or client.
    pub part: Option<String>,
}

/// From where decisions are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecisionsPlace {
    /// The first ones after a number.
    After(u64),
    /// The last ones before a number.
    Before(u64),
}

impl DecisionsWanted {
    /// The last ones, whatever they are.
    #[must_use]
    pub const fn last(most: usize) -> Self {
        Self {
            place: DecisionsPlace::Before(u64::MAX),
            most,
            decided: Vec::new(),
            ticket: None,
            session: None,
            part: None,
        }
    }

    fn takes(&self, entry: &DecisionEntry) -> bool {
        let has = |text: &str| self.part.as_deref().is_none_or(|part| text.contains(part));
        (self.decided.is_empty() || self.decided.contains(&entry.decided))
            && self
                .ticket
                .as_ref()
                .is_none_or(|ticket| *ticket == entry.ticket)
            && (self.session.is_none() || self.session == entry.session)
            && (has(entry.ticket.as_str())
                || entry
                    .session
                    .as_ref()
                    .is_some_and(|session| has(session.as_str()))
                || entry
                    .client
                    .as_ref()
                    .is_some_and(|client| has(client.as_str())))
    }
}

/// The last decisions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Decisions {
    ring: VecDeque<DecisionEntry>,
    next: u64,
}

/// Numbers of one millisecond: a start goes on above all numbers of the starts before it, and every
/// number is one that JSON readers keep exact.
const NUMBERS_PER_MILLISECOND: u64 = 1 << 10;

impl Decisions {
    pub(crate) const fn new(now: Timestamp) -> Self {
        Self {
            ring: VecDeque::new(),
            next: now.millis().saturating_mul(NUMBERS_PER_MILLISECOND),
        }
    }

    /// Keeps a decision; its number is given here.
    pub(crate) fn note(&mut self, entry: DecisionEntry) {
        self.next = self.next.saturating_add(1);
        if self.ring.len() >= DECISIONS_KEPT {
            self.ring.pop_front();
        } else if self.ring.len() == self.ring.capacity() {
            // Doubling would go beyond what is ever kept.
            let more = self.ring.len().clamp(64, DECISIONS_KEPT);
            let room = DECISIONS_KEPT.saturating_sub(self.ring.len());
            self.ring.reserve_exact(more.min(room));
        }
        self.ring.push_back(DecisionEntry {
            number: self.next,
            ..entry
        });
    }

    pub(crate) fn len(&self) -> usize {
        self.ring.len()
    }

    /// Those that are wanted, oldest first, and whether there are more on that side.
    pub(crate) fn read(&self, wanted: &DecisionsWanted) -> (Vec<DecisionEntry>, bool) {
        let most = wanted.most.min(SLICE_MAX);
        match wanted.place {
            DecisionsPlace::After(number) => {
                let from = self.ring.partition_point(|entry| entry.number <= number);
                let mut rest = self.ring.range(from..).filter(|entry| wanted.takes(entry));
                let entries = rest.by_ref().take(most).cloned().collect();
                (entries, rest.next().is_some())
            }
            DecisionsPlace::Before(number) => {
                let until = self.ring.partition_point(|entry| entry.number < number);
                let looked_at = self.ring.range(..until).rev();
                let mut rest = looked_at.filter(|entry| wanted.takes(entry));
                let mut entries: Vec<DecisionEntry> = rest.by_ref().take(most).cloned().collect();
                entries.reverse();
                (entries, rest.next().is_some())
            }
        }
    }
}
