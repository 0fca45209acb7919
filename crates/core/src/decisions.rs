//! The last decisions, each with the figures that it was made from. Kept in memory only (section 9).

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::decision::{BypassReason, Scope, WaitReason};
use crate::ids::{Epoch, Label, SessionId, TicketId};
use crate::policy::DECISIONS_KEPT;
use crate::tally::CancelledHow;
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
    /// What was decided.
    pub decided: Decided,
    /// From what.
    pub moment: Moment,
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
        }
        self.ring.push_back(DecisionEntry {
            number: self.next,
            ..entry
        });
    }

    /// The first ones after a number, oldest first, and whether more follow.
    pub(crate) fn after(&self, number: u64, most: usize) -> (Vec<DecisionEntry>, bool) {
        let from = self.ring.partition_point(|entry| entry.number <= number);
        let mut rest = self.ring.range(from..);
        let entries = rest.by_ref().take(most).cloned().collect();
        (entries, rest.next().is_some())
    }

    /// The last ones, oldest first.
    pub(crate) fn last(&self, most: usize) -> Vec<DecisionEntry> {
        let from = self.ring.len().saturating_sub(most);
        self.ring.range(from..).cloned().collect()
    }
}
