//! What is kept: past-tense facts, applied to the live state and to the store alike.

use alloc::boxed::Box;

use crate::close::CloseIntent;
use crate::ids::{CloseNo, EngineId, RowNo, SessionId, Term};
use crate::state::{EngineRow, EpochEntry, Start};
use crate::tally::Tally;
use crate::ticket::Ticket;
use crate::units::Timestamp;

/// One fact. A turn's records are one store transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Record {
    /// A process took over the writing.
    Started(Term, Start),
    /// A ticket came to a new stage: it was enqueued, granted, renewed, graced or ended. Its row is
    /// turned over.
    Ticket(Ticket),
    /// An ended ticket was forgotten.
    Forgotten(RowNo),
    /// The worker set advanced to a new generation (CAP8).
    Epoch(EpochEntry),
    /// What is remembered of a member changed (CAP7).
    Engine(EngineRow),
    /// An engine left the member set.
    EngineLeft(EngineId),
    /// A close intent came to a new state. Its row is turned over.
    Close(Box<CloseIntent>),
    /// A finished close intent was forgotten.
    CloseForgotten(CloseNo),
    /// A session was last used at this time; kept only while idle sessions are closed (CLO11).
    SessionUsed(SessionId, Timestamp),
    /// The last use of a session is of no more interest.
    SessionForgotten(SessionId),
    /// The counters stand thus.
    Tally(Box<Tally>),
}
