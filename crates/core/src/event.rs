//! What a durable turn did that readers measure and the log tells. Nobody is answered with it, nothing
//! is kept of it, and a turn that failed leaves none.

use alloc::boxed::Box;

use crate::audit::AuditEntry;
use crate::decision::Scope;
use crate::ids::{LeaseId, SessionId, TicketId};
use crate::tally::LeaseEnd;
use crate::units::{Span, Tokens};

/// Something that a turn did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A new ticket was decided: how much it asked for.
    Asked {
        /// Training or evaluation.
        scope: Scope,
        /// Its reservation.
        reservation: Tokens,
    },
    /// A ticket that had stood in line was counted (CNT1).
    LeftQueue {
        /// As what.
        outcome: QueueEnd,
        /// Its whole time in the queue.
        waited: Span,
    },
    /// A counted lease ended.
    LeaseEnded {
        /// How.
        how: LeaseEnd,
        /// Time since its grant.
        held: Span,
    },
    /// The same of a lease that was reclaimed at its end: the log names it (LEA1).
    Expired {
        /// The lease.
        lease: LeaseId,
        /// Its ticket.
        ticket: TicketId,
        /// Its session.
        session: Option<SessionId>,
        /// What it had reserved.
        reservation: Tokens,
    },
    /// An operator did something: the log names who, and what.
    Operated(Box<AuditEntry>),
}

/// As what a ticket that had waited was counted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum QueueEnd {
    /// Granted, and told or claimed.
    Admit,
    /// Told to go on without a lease.
    Bypass,
    /// Withdrawn, or its grant taken back.
    Cancelled,
}

impl QueueEnd {
    /// All.
    pub const ALL: [Self; 3] = [Self::Admit, Self::Bypass, Self::Cancelled];
}
