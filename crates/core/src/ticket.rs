//! One ticket's row: what was asked, and how far it has come. The unit that the store keeps.

use crate::decision::{EndHow, Scope};
use crate::ids::{Epoch, Issue, Label, LeaseId, RowNo, SessionId, TicketId};
use crate::units::{Span, Timestamp, Tokens};

/// The numbers as the caller sent them; what a repeat is compared with (TIC1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sent {
    /// Prefix and completion budget; the decode cap applies to the second (TOK1).
    Parts {
        /// Processor-expanded training prefix.
        prompt: Tokens,
        /// Remaining completion budget.
        max_new: Tokens,
    },
    /// The caller did the sum itself; no cap applies (TOK1).
    Sum(Tokens),
}

impl Sent {
    /// The reservation under a decode cap; `None` when the sum is above the largest count (TOK2).
    #[must_use]
    pub fn reservation(self, decode_cap: Option<Tokens>) -> Option<Tokens> {
        match self {
            Self::Sum(tokens) => Some(tokens),
            Self::Parts { prompt, max_new } => {
                let completion = decode_cap.map_or(max_new, |cap| max_new.min(cap));
                prompt.checked_add(completion)
            }
        }
    }
}

/// What an acquire asked for besides its numbers. The first stands; repeats change nothing (TIC1).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Tokens charged when granted.
    pub reservation: Tokens,
    /// Training or evaluation.
    pub scope: Scope,
    /// Lease life since grant or last renewal, in range (LEA1).
    pub ttl: Span,
    /// Name of the caller.
    pub client: Option<Label>,
    /// Id of the engine request.
    pub request_id: Option<Label>,
}

/// A ticket and how far it has come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// Key of the row; place in line while it waits.
    pub row: RowNo,
    /// The caller's idempotency key.
    pub id: TicketId,
    /// What was asked; `None` for a bare cancel marker.
    pub asked: Option<Asked>,
    /// How far it has come.
    pub stage: Stage,
}

/// What the first acquire of a ticket sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Asked {
    /// The program it belongs to.
    pub session: SessionId,
    /// Its numbers.
    pub sent: Sent,
    /// The rest.
    pub terms: Terms,
}

/// Where a ticket stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stage {
    /// In line.
    Waiting {
        /// First enqueue of this ticket: the max-wait clock and all ages run from here (TIC3).
        since: Timestamp,
    },
    /// Holds a lease.
    Held(Lease),
    /// Ended; remembered for a while.
    Ended(Ended),
}

/// A granted reservation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lease {
    /// Fencing token (ID2).
    pub id: LeaseId,
    /// Worker-set generation it was granted in (CAP8).
    pub epoch: Epoch,
    /// When it was granted.
    pub granted_at: Timestamp,
    /// Whole time in the queue; `None` when it never waited.
    pub waited: Option<Span>,
    /// Life since grant or last renewal (LEA1).
    pub ttl: Span,
    /// When it is reclaimed unless renewed.
    pub ends_at: Timestamp,
    /// The restart grace was given since the last renewal (LEA4).
    pub graced: bool,
}

/// A ticket that ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ended {
    /// When.
    pub at: Timestamp,
    /// How.
    pub how: EndHow,
    /// The lease it held.
    pub lease: Option<LeaseId>,
    /// First enqueue, which a dropped ticket keeps (TIC3).
    pub since: Option<Timestamp>,
    /// Whole time in the queue.
    pub waited: Span,
    /// Worker-set generation of the decision.
    pub epoch: Epoch,
}

impl Ticket {
    /// The issue number of the lease it holds or held.
    #[must_use]
    pub fn issue(&self) -> Option<Issue> {
        match &self.stage {
            Stage::Waiting { .. } => None,
            Stage::Held(lease) => Some(lease.id.issue),
            Stage::Ended(ended) => ended.lease.map(|lease| lease.issue),
        }
    }
}
