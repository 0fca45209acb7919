//! What comes out of a turn once it is durable: answers to commands and decisions of the queue.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::audit::AuditEntry;
use crate::close::{CloseIntent, EngineCall};
use crate::decision::{BypassReason, CancelReason, EndHow, WaitReason};
use crate::decisions::DecisionEntry;
use crate::ids::{Epoch, LeaseId, Seq, SessionId, SessionNo, TicketId};
use crate::policy::PolicyError;
use crate::report::StepReport;
use crate::settings::Settings;
use crate::state::EpochEntry;
use crate::store::Image;
use crate::ticket::{Lease, Terms};
use crate::units::{Span, Timestamp, Tokens};

/// Which command of the turn an answer belongs to: its number in the order of handling.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Tag(pub usize);

/// What the shell must now do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Answer a command.
    Reply {
        /// Which.
        tag: Tag,
        /// Number of the change it made (DUR6).
        seq: Option<Seq>,
        /// The answer.
        reply: Reply,
    },
    /// The acquire waits and its call stays open; a [`Effect::Decided`] or its own time-out ends it.
    Parked {
        /// Which.
        tag: Tag,
        /// Number of the enqueue, when this acquire made it.
        seq: Option<Seq>,
        /// It used a closed session anew; the answer to this call says so, whatever it is (CLO8).
        session_reopened: bool,
    },
    /// A waiting ticket was decided: tell every open call of it.
    Decided {
        /// Number of the change.
        seq: Seq,
        /// The decision; never a wait.
        answer: Answer,
    },
    /// Call an engine and hand in what it came to.
    Call(EngineCall),
    /// A close intent is done: tell whoever waits for it.
    CloseDone(CloseIntent),
}

/// Answer to a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// To an acquire.
    Acquire(Result<Answer, AcquireRefused>),
    /// To a watch: one entry for each ticket, in the order asked.
    Watch(Vec<(TicketId, Watched)>),
    /// To the end of a call: how the ticket stands when it still waits.
    Left(Option<Answer>),
    /// To a release.
    Release(Result<ReleaseOutcome, LeaseGone>),
    /// To a renewal or a read of a lease.
    Lease(Result<LeaseView, LeaseGone>),
    /// To a revocation.
    Revoke(Result<(), LeaseGone>),
    /// To a cancel.
    Cancel(CancelOutcome),
    /// To a read of a ticket; `None` when it is not known.
    Ticket(Option<TicketView>),
    /// To a list of leases.
    Leases(Page<LeaseView>),
    /// To a list of the queue.
    Queue(Page<WaiterView>),
    /// To a close.
    Close(CloseReply),
    /// To a retry of a close.
    RetryClose(Result<CloseIntent, RetryRefused>),
    /// To a read of a close; `None` when it is not known.
    ReadClose(Option<CloseIntent>),
    /// To a read of a session; `None` when it is not known.
    Session(Option<SessionView>),
    /// To a list of sessions.
    Sessions(Page<SessionView>),
    /// To a list of closes, newest first.
    Closes(Page<CloseIntent>),
    /// To a step or to a look at its window.
    Step(Box<StepReport>),
    /// To a list of steps, newest first.
    Steps(Page<StepReport>),
    /// To a change of the settings: as they are then.
    Settings(Result<Arc<Settings>, PolicyError>),
    /// To a list of the audit, newest first.
    Audit(Page<AuditEntry>),
    /// To a list of decisions, oldest first.
    Decisions(Page<DecisionEntry>),
    /// To a list of epochs, newest first.
    Epochs(Vec<EpochEntry>),
    /// To a read of everything that is kept.
    Image(Box<Image>),
    /// Nothing to say.
    Done,
}

/// Why an acquire changes nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AcquireRefused {
    /// The ticket was used with another session or other numbers (TIC1).
    #[error("the ticket was used before with another session or other numbers")]
    TicketConflict,
    /// The reservation is above the largest count (TOK2).
    #[error("the reservation is above 2^53-1 tokens")]
    TooManyTokens,
}

/// What an acquire is told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// The ticket.
    pub ticket: TicketId,
    /// Its session; `None` for a bare cancel marker read by ticket.
    pub session: Option<SessionId>,
    /// Its reservation.
    pub reservation: Tokens,
    /// Worker-set generation.
    pub epoch: Epoch,
    /// Whole time in the queue.
    pub waited: Span,
    /// This decision was delivered before (TIC1, TIC4).
    pub repeated: bool,
    /// This acquire used a closed session anew (CLO8).
    pub session_reopened: bool,
    /// The decision.
    pub outcome: Outcome,
}

/// The decision itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Hold this lease until the backend attempt ends.
    Admit {
        /// Fencing token.
        lease: LeaseId,
        /// Life since grant or last renewal.
        ttl: Span,
        /// When it is reclaimed.
        ends_at: Timestamp,
    },
    /// Go on without a lease.
    Bypass(BypassReason),
    /// Do not start.
    Cancelled(CancelReason),
    /// Ask again with the same ticket.
    Wait(WaitStatus),
}

/// Where a waiter stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WaitStatus {
    /// What holds it up now.
    pub reason: WaitReason,
    /// 1 for the head.
    pub position: u64,
    /// Reservations before it.
    pub tokens_ahead: Tokens,
    /// Tokens that must be given back before it fits.
    pub short: Tokens,
    /// Time since its first enqueue.
    pub age: Span,
    /// Time until the aging bypass.
    pub bypass_in: Span,
}

/// One ticket of a watch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Watched {
    /// It waits; the call counts as its caller's presence.
    Waiting,
    /// It was decided.
    Decided(Answer),
    /// Not known, or ended so that an acquire would be decided afresh.
    Unknown,
}

/// To a release (TIC6).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReleaseOutcome {
    /// Now.
    Released,
    /// Before.
    AlreadyReleased,
}

/// Why there is no such lease any more (TIC6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LeaseGone {
    /// Never issued.
    #[error("no lease with this id was ever issued")]
    NotFound,
    /// Given back.
    #[error("the lease was released")]
    Released,
    /// Expired, revoked, taken back, or ended so long ago that it is forgotten.
    #[error("the lease has expired or was revoked")]
    Expired,
}

/// To a cancel (TIC5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CancelOutcome {
    /// It waited.
    Withdrawn,
    /// It held a lease.
    Released,
    /// It had been told to bypass.
    Bypassed,
    /// It had ended.
    AlreadyFinished,
    /// It was not known; a marker stands now.
    Unknown,
}

/// To a close (CLO2).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CloseReply {
    /// The lifecycle feature is off: nothing is kept and nothing is sent.
    Disabled,
    /// Too many intents are open; nothing was changed.
    Full,
    /// The intent, new or joined.
    Taken(CloseIntent),
}

/// Why a close is not sent again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RetryRefused {
    /// No such intent, or it was forgotten.
    #[error("no close with this id is known")]
    NotFound,
    /// The session was used or closed anew since: a close that comes late would hit that use (CLO8).
    #[error("the session was used or closed anew since")]
    Superseded,
    /// The lifecycle feature is off.
    #[error("session closes are off")]
    Disabled,
}

/// A session for readers. Its lists are bounded as a page is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionView {
    /// Key in the book, for paging.
    pub number: SessionNo,
    /// The session.
    pub id: SessionId,
    /// Its last acquire, or the end of its last lease; `None` when it was only closed.
    pub last_use: Option<Timestamp>,
    /// Its held leases, in the order of their rows.
    pub leases: Vec<LeaseView>,
    /// Its waiters, from the head.
    pub waiting: Vec<WaiterView>,
    /// Its close intents that are remembered, newest first.
    pub closes: Vec<CloseIntent>,
}

/// A held lease for readers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseView {
    /// Its ticket.
    pub ticket: TicketId,
    /// Its session.
    pub session: SessionId,
    /// What was asked.
    pub terms: Terms,
    /// The lease.
    pub lease: Lease,
}

/// A ticket for readers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TicketView {
    /// What an acquire would be answered.
    Answer(Answer),
    /// An acquire would be decided afresh.
    Ended(EndHow),
}

/// A waiter for readers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WaiterView {
    /// Its ticket.
    pub ticket: TicketId,
    /// Its session.
    pub session: SessionId,
    /// What was asked.
    pub terms: Terms,
    /// Where it stands.
    pub status: WaitStatus,
    /// Key of the row, for paging.
    pub row: crate::ids::RowNo,
}

/// A slice of a list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Page<T> {
    /// The rows looked at.
    pub items: Vec<T>,
    /// Whether rows follow.
    pub more: bool,
    /// Rows of the whole list at this moment, whatever was asked for.
    pub total: u64,
}

impl<T> Page<T> {
    pub(crate) fn new(items: Vec<T>, more: bool, total: impl TryInto<u64>) -> Self {
        Self {
            items,
            more,
            total: total.try_into().unwrap_or(u64::MAX),
        }
    }
}
