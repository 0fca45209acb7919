//! What goes into the core.

use alloc::vec::Vec;

use crate::close::{CallId, CallResult, CloseMode, CloseReason};
use crate::decision::Scope;
use crate::decisions::DecisionsWanted;
use crate::ids::{
    AuditNo, CloseId, CloseNo, Issue, Label, LeaseId, RowNo, RunId, SessionId, SessionNo, StepNo,
    TicketId,
};
use crate::reading::Round;
use crate::settings::SettingsChange;
use crate::tally::LocalBypass;
use crate::ticket::Sent;
use crate::units::Span;

/// One input. The shell hands in what arrived; the core decides.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Command {
    /// Ask for a lease.
    Acquire(Acquire),
    /// One open call of a waiting ticket ends by its own time-out; answered at the end of the turn (TIC2).
    Leave(TicketId),
    /// The caller of one open call of a waiting ticket went away.
    Gone(TicketId),
    /// The answer that carried the decision of `ticket` was written whole to an open connection (TIC4).
    Delivered(Delivery),
    /// The answer that carried the decision of `ticket` could not be written (TIC4).
    Undelivered(Delivery),
    /// One more open call for each ticket that waits; the others are answered (`POST /v1/wait`).
    Watch(Vec<TicketId>),
    /// Give a lease back.
    Release(LeaseId),
    /// Begin a lease's life anew.
    Renew {
        /// Which.
        lease: LeaseId,
        /// New life; `None` keeps the present one.
        ttl: Option<Span>,
    },
    /// Withdraw a ticket in whatever state.
    Cancel(TicketId),
    /// End a session: a close intent, or the one that runs already (CLO2).
    Close(CloseRequest),
    /// Send a close once more to the engines where it failed.
    RetryClose(CloseId),
    /// Calls to engines ended.
    Called(Vec<(CallId, CallResult)>),
    /// A reading round ended.
    Round(Round),
    /// An operator acts: handled as the plain command, and kept in the audit when it changed something.
    Operate(Operation),
    /// Callers report what they decided by themselves.
    LocalBypasses(Vec<(LocalBypass, u64)>),
    /// Read one lease.
    ReadLease(LeaseId),
    /// Read what an acquire of the ticket would be answered, without side effects.
    ReadTicket(TicketId),
    /// Read a slice of the held leases, in the order of their grants.
    ListLeases(Slice<Issue>),
    /// Read a slice of the queue, from the head.
    ListQueue(Slice<RowNo>),
    /// Read one close intent.
    ReadClose(CloseId),
    /// Read one session.
    ReadSession(SessionId),
    /// Read a slice of the sessions, in the order of first sight.
    ListSessions(Slice<SessionNo>),
    /// Read a slice of the close intents, newest first: `from` is the highest number looked at.
    ListCloses(Slice<CloseNo>),
    /// The report of a run's step, which begins a new window; asked again, the same (REP1).
    TakeStep {
        /// The run.
        run: RunId,
        /// The step.
        step: u64,
    },
    /// Look at the window of a run without draining it.
    PeekStep(RunId),
    /// Read a slice of the step reports, newest first: `from` is the highest number looked at.
    ListSteps(Slice<StepNo>),
    /// Read a slice of the audit, newest first: `from` is the highest number looked at.
    ListAudit(Slice<AuditNo>),
    /// Read decisions, oldest first.
    ListDecisions(DecisionsWanted),
    /// Read the epochs, newest first.
    ListEpochs,
    /// Read everything that a restart would bring back, for a copy of the store. The only read whose
    /// cost grows with what is kept.
    ReadImage,
}

/// Something that an operator does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Operation {
    /// Who, by name.
    pub who: Label,
    /// What.
    pub act: Act,
}

/// What an operator does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Act {
    /// Change settings.
    Configure(SettingsChange),
    /// Take a lease away.
    Revoke(LeaseId),
    /// Withdraw a ticket in whatever state.
    Cancel(TicketId),
    /// End a session.
    Close(CloseRequest),
    /// Send a close once more to the engines where it failed.
    RetryClose(CloseId),
}

/// Ask for a lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Acquire {
    /// Idempotency key (ID1).
    pub ticket: TicketId,
    /// The program it belongs to.
    pub session: SessionId,
    /// Numbers as sent. Their sum was checked by the caller of the core (TOK2).
    pub sent: Sent,
    /// Training or evaluation.
    pub scope: Scope,
    /// Protected work never waits (DEC1).
    pub protected: bool,
    /// Lease life, in range (LEA1).
    pub ttl: Span,
    /// Name of the caller.
    pub client: Option<Label>,
    /// Id of the engine request.
    pub request_id: Option<Label>,
    /// Whether the call stays open while the ticket waits. When it does not, it is answered at the
    /// end of the turn, and its caller counts as away from then on (TIC2).
    pub stays: bool,
}

/// End a session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CloseRequest {
    /// Which; it need not be known (CLO1).
    pub session: SessionId,
    /// Whether running work is aborted.
    pub mode: CloseMode,
    /// What the caller says of it.
    pub reason: Option<CloseReason>,
}

/// Names the decision whose answer was written, or was not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Delivery {
    /// The ticket that was answered.
    pub ticket: TicketId,
    /// The lease of a grant; `None` for a bypass.
    pub lease: Option<LeaseId>,
}

/// A bounded part of a list: what is looked at, not what is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slice<K> {
    /// First key looked at.
    pub from: K,
    /// Rows looked at, at most [`SLICE_MAX`].
    pub rows: usize,
}

/// Rows that one read may look at: about a millisecond of the writer's time.
pub const SLICE_MAX: usize = 1_000;
