//! What is kept: past-tense facts, applied to the live state and to the store alike.

use alloc::boxed::Box;

use crate::audit::AuditEntry;
use crate::close::CloseIntent;
use crate::ids::{AuditNo, CloseNo, EngineId, RowNo, RunId, SessionId, StepNo, Term};
use crate::report::{StepReport, Window};
use crate::settings::Overrides;
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
    /// A step report was taken (REP1).
    Step(Box<StepReport>),
    /// A step report was forgotten.
    StepForgotten(StepNo),
    /// The window of a run, or of runs that are new, stands thus.
    Window(Option<RunId>, Window),
    /// The window of a run was forgotten.
    WindowForgotten(RunId),
    /// What was set at run time stands thus.
    Settings(Box<Overrides>),
    /// An operator did something.
    Audit(Box<AuditEntry>),
    /// An entry of the audit was forgotten.
    AuditForgotten(AuditNo),
    /// The counters stand thus.
    Tally(Box<Tally>),
}
