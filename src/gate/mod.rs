//! The gate: one writer that owns the core and the store, and a handle to it.
//!
//! ```text
//!  Gate::acquire ──┐                       ┌── view (watch) ──> pages, state, epoch header
//!  Gate::release ──┼─ inbox ─> writer ─────┤
//!  Gate::round  ───┘           │    ▲      └── replies (oneshot, after the commit)
//!                        one turn = one store transaction
//! ```
//!
//! Everything that queued up while the last commit ran is the next turn; there is no window. A caller that is alone
//! does its turn itself instead of waking the writer's thread (decision 0015).
//! No reply leaves before its turn is durable (DUR1).

mod closings;
mod inbox;
mod news;
mod outage;
mod record;
mod stats;
#[cfg(test)]
mod tests;
mod waiters;
mod writer;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use kvgate_core::audit::AuditEntry;
use kvgate_core::close::{CallId, CallResult, CloseIntent, EngineCall};
use kvgate_core::command::{Acquire, Act, CloseRequest, Command, Delivery, Operation, Slice};
use kvgate_core::decisions::{DecisionEntry, DecisionsWanted};
use kvgate_core::effect::{
    AcquireRefused, Answer, CancelOutcome, CloseReply, LeaseGone, LeaseView, Outcome, Page,
    ReleaseOutcome, Reply, RetryRefused, SessionView, TicketView, WaiterView,
};
use kvgate_core::ids::{
    AuditNo, CloseId, CloseNo, Epoch, Issue, Label, LeaseId, RowNo, RunId, Seq, SessionId,
    SessionNo, StepNo, TicketId,
};
use kvgate_core::policy::PolicyError;
use kvgate_core::reading::Round;
use kvgate_core::report::StepReport;
use kvgate_core::settings::{Settings, SettingsChange};
use kvgate_core::state::EpochEntry;
use kvgate_core::tally::LocalBypass;
use kvgate_core::units::{Span, Timestamp};
use kvgate_core::view::View;
use tokio::runtime::RuntimeFlavor;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{oneshot, watch};

use crate::clock::Clock;
use crate::store::CopyPieces;

use inbox::Inbox;
pub use outage::KEPT_MAX;
pub use record::Recorder;
pub use stats::{CommitStats, Waits};
pub use waiters::SlotId;
pub use writer::{FirstOpen, WriterConfig, spawn};
use writer::{Turns, weight};

/// Commands that may stand in the inbox, those of a batch one by one. Beyond that callers are told
/// `overloaded` at once: a full inbox is several seconds of work, and a caller that goes on without
/// the gate loses nothing.
pub const INBOX_MAX: usize = 65_536;

/// Open waiting calls; beyond that a waiting acquire is answered at once (section 9).
pub const WAITING_CALLS_MAX: usize = 20_000;

/// Why the gate gives no decision. The shell says these by itself; everything else the core decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GateError {
    /// The inbox is full.
    #[error("too many commands are waiting for the writer")]
    Overloaded,
    /// The store could not promise durability (DUR4).
    #[error("the store is not available")]
    StoreUnavailable,
    /// The store is not loaded yet, or nothing was read yet (DUR3).
    #[error("the service is recovering")]
    Recovering,
    /// An orderly stop has begun.
    #[error("the service is draining")]
    Draining,
}

/// What the gate is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Opening the store, or waiting for the first reading round.
    Starting,
    /// Deciding.
    Ready,
    /// The store failed; it is being opened again.
    Unavailable,
    /// Stopping.
    Draining,
}

/// What is wrong with the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreTrouble {
    /// It failed and is being opened again, since this time.
    pub unavailable: Option<Timestamp>,
    /// The disk has little room left, since this time: new acquires bypass.
    pub low_space: Option<Timestamp>,
}

/// An answer and the number of the change it made (DUR6).
#[derive(Debug)]
pub struct Answered<T> {
    /// Number of the change; `None` when nothing changed.
    pub seq: Option<Seq>,
    /// The answer.
    pub value: T,
}

/// To an acquire that was taken: the decision, and who must hear whether it arrived.
#[derive(Debug)]
pub struct Decision {
    /// What the caller is told.
    pub answer: Answer,
    /// Set when the answer carries a decision for the first time.
    pub receipt: Option<Receipt>,
    /// The call was held open until there was an answer.
    pub held_open: bool,
}

/// To an acquire whose call may stay open.
#[derive(Debug)]
struct Taken {
    seq: Option<Seq>,
    answer: Result<Answer, AcquireRefused>,
    /// The call was parked.
    held_open: bool,
}

type Replied = Result<(Option<Seq>, Reply), GateError>;
type Sender<T> = oneshot::Sender<Result<T, GateError>>;
type Watch = Vec<(TicketId, Option<Answer>)>;

/// What stands in the writer's inbox.
#[derive(Debug)]
enum Message {
    /// A command of one caller.
    Command {
        command: Command,
        reply: oneshot::Sender<Replied>,
    },
    /// Commands of one caller: one turn, answered together.
    Commands {
        commands: Vec<Command>,
        reply: oneshot::Sender<Vec<Replied>>,
    },
    /// An acquire whose call stays open.
    Acquire {
        slot: SlotId,
        acquire: Acquire,
        reply: Sender<Taken>,
    },
    /// A call that waits for many tickets.
    Watch {
        slot: SlotId,
        tickets: Vec<TicketId>,
        reply: Sender<Watch>,
    },
    /// The call's own time is over: tell it where it stands.
    EndWait(SlotId),
    /// The caller went away.
    Gone(SlotId),
    /// Nobody waits for an answer.
    Signal(Command),
    /// Answer every waiting call with [`GateError::Draining`]; places stay on disk.
    RefuseWaiting,
    /// Tell when a close is done.
    CloseDone {
        close: CloseId,
        reply: oneshot::Sender<CloseIntent>,
    },
    /// Write what is left and close the store.
    Stop { done: oneshot::Sender<()> },
}

#[derive(Debug)]
struct Inner {
    inbox: Inbox<Message>,
    turns: Arc<dyn Turns>,
    inbox_len: AtomicUsize,
    next_slot: AtomicU64,
    waiting_calls: AtomicUsize,
    view: watch::Receiver<Arc<View>>,
    line: OnceLock<Clock>,
    phase: watch::Sender<Phase>,
    trouble: watch::Sender<StoreTrouble>,
    stats: CommitStats,
    /// Calls that the core wants made, until somebody takes them over.
    calls: Mutex<Option<UnboundedReceiver<EngineCall>>>,
}

/// The handle: cheap to clone, used by HTTP, by the poller and in process.
#[derive(Clone, Debug)]
pub struct Gate {
    inner: Arc<Inner>,
}

impl Gate {
    /// The picture as of the last committed turn.
    #[must_use]
    pub fn view(&self) -> Arc<View> {
        Arc::clone(&self.inner.view.borrow())
    }

    /// Generation of the worker set as of the last committed turn.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.inner.view.borrow().epoch
    }

    /// A receiver that is told of each new picture.
    #[must_use]
    pub fn views(&self) -> watch::Receiver<Arc<View>> {
        self.inner.view.clone()
    }

    /// What the gate is doing.
    #[must_use]
    pub fn phase(&self) -> Phase {
        *self.inner.phase.borrow()
    }

    /// A receiver that is told of each change of phase.
    #[must_use]
    pub fn phases(&self) -> watch::Receiver<Phase> {
        self.inner.phase.subscribe()
    }

    /// What is wrong with the store now.
    #[must_use]
    pub fn store_trouble(&self) -> StoreTrouble {
        *self.inner.trouble.borrow()
    }

    /// Figures of the store.
    #[must_use]
    pub fn stats(&self) -> &CommitStats {
        &self.inner.stats
    }

    /// Calls that wait now.
    #[must_use]
    pub fn waiting_calls(&self) -> usize {
        self.inner.waiting_calls.load(Ordering::Relaxed)
    }

    /// Asks for a lease and waits at most `wait` for the decision; then the answer is a wait with
    /// the ticket's place, which is kept for the claim grace (TIC2).
    ///
    /// # Errors
    /// See [`GateError`]. Dropping the future leaves the ticket to the claim grace.
    pub async fn acquire(
        &self,
        acquire: Acquire,
        wait: Duration,
    ) -> Result<Answered<Result<Decision, AcquireRefused>>, GateError> {
        let stays = acquire.stays && !wait.is_zero();
        let call = if stays { self.open_call() } else { None };
        let Some(call) = call else {
            let acquire = Acquire {
                stays: false,
                ..acquire
            };
            return match self.one(Command::Acquire(acquire)).await? {
                (seq, Reply::Acquire(answer)) => Ok(self.decision(Taken {
                    seq,
                    answer,
                    held_open: false,
                })),
                (_, other) => Err(unexpected(&other)),
            };
        };
        let (reply, mut answer) = self.awaited();
        self.send(Message::Acquire {
            slot: call.slot,
            acquire,
            reply,
        })?;
        let taken = match tokio::time::timeout(wait, answer.read()).await {
            Ok(answer) => answer,
            Err(_) => {
                self.signal(Message::EndWait(call.slot));
                answer.read().await
            }
        }
        .unwrap_or(Err(GateError::Draining))?;
        call.answered();
        Ok(self.decision(taken))
    }

    /// Waits until one of the tickets is decided, at most `wait`; then all that are, in the order
    /// asked, `None` for those that are not known. Empty when the time is over.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn watch(
        &self,
        tickets: Vec<TicketId>,
        wait: Duration,
    ) -> Result<Vec<(TicketId, Option<Decision>)>, GateError> {
        let call = self.open_call();
        let wait = if call.is_some() { wait } else { Duration::ZERO };
        let call = call.unwrap_or_else(|| self.call());
        let (reply, mut answer) = self.awaited();
        self.send(Message::Watch {
            slot: call.slot,
            tickets,
            reply,
        })?;
        let watched = match tokio::time::timeout(wait, answer.read()).await {
            Ok(answer) => answer,
            Err(_) => {
                self.signal(Message::EndWait(call.slot));
                answer.read().await
            }
        }
        .unwrap_or(Err(GateError::Draining))?;
        call.answered();
        Ok(watched
            .into_iter()
            .map(|(ticket, answer)| (ticket, answer.map(|answer| self.with_receipt(answer))))
            .collect())
    }

    /// Handles commands of one caller in one durable turn, in order; none of them waits.
    ///
    /// # Errors
    /// See [`GateError`]; each command can also fail by itself while the store is away.
    pub async fn batch(
        &self,
        commands: Vec<Command>,
    ) -> Result<Vec<Result<(Option<Seq>, Reply), GateError>>, GateError> {
        let (reply, mut answer) = self.awaited();
        self.send(Message::Commands { commands, reply })?;
        answer.read().await.ok_or(GateError::Draining)
    }

    /// Gives a lease back.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn release(
        &self,
        lease: LeaseId,
    ) -> Result<Answered<Result<ReleaseOutcome, LeaseGone>>, GateError> {
        match self.one(Command::Release(lease)).await? {
            (seq, Reply::Release(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Begins a lease's life anew.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn renew(
        &self,
        lease: LeaseId,
        ttl: Option<Span>,
    ) -> Result<Answered<Result<LeaseView, LeaseGone>>, GateError> {
        self.lease(Command::Renew { lease, ttl }).await
    }

    /// Reads a held lease.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn read_lease(
        &self,
        lease: LeaseId,
    ) -> Result<Answered<Result<LeaseView, LeaseGone>>, GateError> {
        self.lease(Command::ReadLease(lease)).await
    }

    async fn lease(
        &self,
        command: Command,
    ) -> Result<Answered<Result<LeaseView, LeaseGone>>, GateError> {
        match self.one(command).await? {
            (seq, Reply::Lease(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Withdraws a ticket in whatever state.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn cancel(&self, ticket: TicketId) -> Result<Answered<CancelOutcome>, GateError> {
        match self.one(Command::Cancel(ticket)).await? {
            (seq, Reply::Cancel(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads what an acquire of the ticket would be answered, without side effects.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn read_ticket(&self, ticket: TicketId) -> Result<Option<TicketView>, GateError> {
        match self.one(Command::ReadTicket(ticket)).await? {
            (_, Reply::Ticket(view)) => Ok(view),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads a slice of the held leases, in the order of their grants.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn list_leases(&self, slice: Slice<Issue>) -> Result<Page<LeaseView>, GateError> {
        match self.one(Command::ListLeases(slice)).await? {
            (_, Reply::Leases(page)) => Ok(page),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads a slice of the queue, from the head.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn list_queue(&self, slice: Slice<RowNo>) -> Result<Page<WaiterView>, GateError> {
        match self.one(Command::ListQueue(slice)).await? {
            (_, Reply::Queue(page)) => Ok(page),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Ends a session: takes a durable close intent, or joins the one that runs (CLO2).
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn close_session(
        &self,
        request: CloseRequest,
    ) -> Result<Answered<CloseReply>, GateError> {
        match self.one(Command::Close(request)).await? {
            (seq, Reply::Close(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Sends a close once more to the engines where it failed.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn retry_close(
        &self,
        close: CloseId,
    ) -> Result<Answered<Result<CloseIntent, RetryRefused>>, GateError> {
        match self.one(Command::RetryClose(close)).await? {
            (seq, Reply::RetryClose(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Waits until a close is done, at most `wait`; `None` when it is not done then, or not known.
    pub async fn close_done(&self, close: CloseId, wait: Duration) -> Option<CloseIntent> {
        // One of the waiting calls, which are bounded (section 9).
        let call = self.open_call()?;
        let (reply, done) = oneshot::channel();
        let sent = self.send(Message::CloseDone { close, reply });
        let done = match sent {
            Ok(()) => tokio::time::timeout(wait, done).await.ok()?.ok(),
            Err(_) => None,
        };
        call.answered();
        done
    }

    /// Reads a close intent.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn read_close(&self, close: CloseId) -> Result<Option<CloseIntent>, GateError> {
        match self.one(Command::ReadClose(close)).await? {
            (_, Reply::ReadClose(close)) => Ok(close),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads a session.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn read_session(&self, session: SessionId) -> Result<Option<SessionView>, GateError> {
        match self.one(Command::ReadSession(session)).await? {
            (_, Reply::Session(session)) => Ok(session),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads a slice of the sessions, in the order of first sight.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn list_sessions(
        &self,
        slice: Slice<SessionNo>,
    ) -> Result<Page<SessionView>, GateError> {
        match self.one(Command::ListSessions(slice)).await? {
            (_, Reply::Sessions(page)) => Ok(page),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads a slice of the close intents, newest first.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn list_closes(&self, slice: Slice<CloseNo>) -> Result<Page<CloseIntent>, GateError> {
        match self.one(Command::ListCloses(slice)).await? {
            (_, Reply::Closes(page)) => Ok(page),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// The calls to engines that the core wants made; whoever takes them hands in what they came to.
    /// `None` when they were taken before.
    #[must_use]
    pub fn take_calls(&self) -> Option<UnboundedReceiver<EngineCall>> {
        self.inner
            .calls
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// Hands in what calls to engines came to.
    pub fn called(&self, results: Vec<(CallId, CallResult)>) {
        self.signal(Message::Signal(Command::Called(results)));
    }

    /// The report of a run's step, which begins a new window; asked again, the same (REP1).
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn take_step(
        &self,
        run: RunId,
        step: u64,
    ) -> Result<Answered<Box<StepReport>>, GateError> {
        match self.one(Command::TakeStep { run, step }).await? {
            (seq, Reply::Step(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Looks at the window of a run without draining it.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn peek_step(&self, run: RunId) -> Result<Box<StepReport>, GateError> {
        match self.one(Command::PeekStep(run)).await? {
            (_, Reply::Step(report)) => Ok(report),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads a slice of the step reports, newest first.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn list_steps(&self, slice: Slice<StepNo>) -> Result<Page<StepReport>, GateError> {
        match self.one(Command::ListSteps(slice)).await? {
            (_, Reply::Steps(page)) => Ok(page),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads the decisions that are wanted, oldest first.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn decisions(
        &self,
        wanted: DecisionsWanted,
    ) -> Result<Page<DecisionEntry>, GateError> {
        match self.one(Command::ListDecisions(wanted)).await? {
            (_, Reply::Decisions(page)) => Ok(page),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Reads the epochs, newest first.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn epochs(&self) -> Result<Vec<EpochEntry>, GateError> {
        match self.one(Command::ListEpochs).await? {
            (_, Reply::Epochs(epochs)) => Ok(epochs),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// A logical copy of everything that is kept, as of one turn (DUR2). The writer takes the picture
    /// between two commands; the text is made by whoever reads the pieces.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn backup(&self) -> Result<CopyPieces, GateError> {
        match self.one(Command::ReadImage).await? {
            (_, Reply::Image(image)) => Ok(CopyPieces::new(*image)),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Hands in a reading round and waits until it was applied.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn round(&self, round: Round) -> Result<(), GateError> {
        self.one(Command::Round(round)).await.map(|_| ())
    }

    /// Changes settings as `who`: all values are checked together, and a change that is refused changes
    /// none. Answers the settings as they are then.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn configure(
        &self,
        who: Label,
        change: SettingsChange,
    ) -> Result<Answered<Result<Arc<Settings>, PolicyError>>, GateError> {
        match self.operate(who, Act::Configure(change)).await? {
            (seq, Reply::Settings(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Takes a lease away as `who`.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn revoke(
        &self,
        who: Label,
        lease: LeaseId,
    ) -> Result<Answered<Result<(), LeaseGone>>, GateError> {
        match self.operate(who, Act::Revoke(lease)).await? {
            (seq, Reply::Revoke(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// [`Gate::cancel`] as an operator.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn cancel_as(
        &self,
        who: Label,
        ticket: TicketId,
    ) -> Result<Answered<CancelOutcome>, GateError> {
        match self.operate(who, Act::Cancel(ticket)).await? {
            (seq, Reply::Cancel(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// [`Gate::close_session`] as an operator.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn close_as(
        &self,
        who: Label,
        request: CloseRequest,
    ) -> Result<Answered<CloseReply>, GateError> {
        match self.operate(who, Act::Close(request)).await? {
            (seq, Reply::Close(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// [`Gate::retry_close`] as an operator.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn retry_close_as(
        &self,
        who: Label,
        close: CloseId,
    ) -> Result<Answered<Result<CloseIntent, RetryRefused>>, GateError> {
        match self.operate(who, Act::RetryClose(close)).await? {
            (seq, Reply::RetryClose(value)) => Ok(Answered { seq, value }),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Does something as an operator: handled as the plain command, and kept in the audit when it
    /// changed something. Many at once go through [`Gate::batch`].
    async fn operate(&self, who: Label, act: Act) -> Result<(Option<Seq>, Reply), GateError> {
        self.one(Command::Operate(Operation { who, act })).await
    }

    /// Reads a slice of the audit, newest first.
    ///
    /// # Errors
    /// See [`GateError`].
    pub async fn list_audit(&self, slice: Slice<AuditNo>) -> Result<Page<AuditEntry>, GateError> {
        match self.one(Command::ListAudit(slice)).await? {
            (_, Reply::Audit(page)) => Ok(page),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Counts what a caller decided by itself.
    pub fn local_bypasses(&self, counts: Vec<(LocalBypass, u64)>) {
        self.signal(Message::Signal(Command::LocalBypasses(counts)));
    }

    /// Begins an orderly stop: waiting calls get [`GateError::Draining`] and their tickets keep
    /// their places; reads are answered until [`Gate::stop`].
    pub fn begin_drain(&self) {
        self.inner.phase.send_replace(Phase::Draining);
        self.signal(Message::RefuseWaiting);
    }

    /// Writes what is left and closes the store; returns when that is done.
    pub async fn stop(&self) {
        let (done, closed) = oneshot::channel();
        self.signal(Message::Stop { done });
        // The writer may be gone already: then there is nothing left to wait for.
        let _ = closed.await;
    }

    /// kvgate's own time line, once the store was loaded (TIM1).
    #[must_use]
    pub fn line(&self) -> Option<Clock> {
        self.inner.line.get().copied()
    }

    /// An answer with the receipt that its first delivery needs.
    #[must_use]
    pub fn with_receipt(&self, answer: Answer) -> Decision {
        let receipt = delivery(&answer).map(|delivery| Receipt {
            gate: self.clone(),
            delivery: Some(delivery),
        });
        Decision {
            answer,
            receipt,
            held_open: false,
        }
    }

    fn decision(&self, taken: Taken) -> Answered<Result<Decision, AcquireRefused>> {
        Answered {
            seq: taken.seq,
            value: taken.answer.map(|answer| Decision {
                held_open: taken.held_open,
                ..self.with_receipt(answer)
            }),
        }
    }

    async fn one(&self, command: Command) -> Result<(Option<Seq>, Reply), GateError> {
        let (reply, mut answer) = self.awaited();
        self.send(Message::Command { command, reply })?;
        answer.read().await.unwrap_or(Err(GateError::Draining))
    }

    /// Puts a bounded command into the inbox.
    fn send(&self, message: Message) -> Result<(), GateError> {
        let inner = &self.inner;
        let commands = weight(&message);
        if inner.inbox_len.fetch_add(commands, Ordering::Relaxed) >= INBOX_MAX {
            inner.inbox_len.fetch_sub(commands, Ordering::Relaxed);
            return Err(GateError::Overloaded);
        }
        // What many commands keep would be spread over the memory of all threads that did turns.
        let can = || commands == 1 && may_block();
        let loan = inner.inbox.put_or_borrow(message, can);
        if let Some(loan) = loan.map_err(|_| GateError::Draining)? {
            let look_in = tokio::task::block_in_place(|| inner.turns.turn());
            loan.give_back(look_in);
        }
        Ok(())
    }

    /// Puts a message into the inbox that the bound on open calls already bounds.
    fn signal(&self, message: Message) {
        self.inner
            .inbox_len
            .fetch_add(weight(&message), Ordering::Relaxed);
        // Without a writer nobody needs to know.
        let _ = self.inner.inbox.put(message);
    }

    /// Says which answers have arrived. Nobody waits for that, so it rides along with the next turn.
    fn delivered(&self, receipts: Vec<Receipt>) {
        let inner = &self.inner;
        inner.inbox_len.fetch_add(receipts.len(), Ordering::Relaxed);
        let deliveries = receipts.into_iter().filter_map(|mut receipt| {
            let delivery = receipt.delivery.take()?;
            Some(Message::Signal(Command::Delivered(delivery)))
        });
        inner.inbox.put_quietly(deliveries);
    }

    fn awaited<T: Unread>(&self) -> (oneshot::Sender<T>, Awaited<'_, T>) {
        let (sender, receiver) = oneshot::channel();
        let awaited = Awaited {
            gate: self,
            receiver,
        };
        (sender, awaited)
    }

    fn call(&self) -> Call<'_> {
        self.inner.waiting_calls.fetch_add(1, Ordering::Relaxed);
        Call {
            gate: self,
            slot: SlotId(self.inner.next_slot.fetch_add(1, Ordering::Relaxed)),
            open: true,
        }
    }

    /// `None` when too many calls wait already (section 9).
    fn open_call(&self) -> Option<Call<'_>> {
        (self.waiting_calls() < WAITING_CALLS_MAX).then(|| self.call())
    }
}

/// Whether the thread can do a turn: its other tasks go on with another thread meanwhile.
fn may_block() -> bool {
    tokio::runtime::Handle::try_current()
        .is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread)
}

/// An open waiting call. Dropped before its answer, it tells the writer that the caller went away.
struct Call<'a> {
    gate: &'a Gate,
    slot: SlotId,
    open: bool,
}

impl Call<'_> {
    fn answered(mut self) {
        self.open = false;
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.gate
            .inner
            .waiting_calls
            .fetch_sub(1, Ordering::Relaxed);
        if self.open {
            self.gate.signal(Message::Gone(self.slot));
        }
    }
}

/// The caller's end of an answer. When the caller goes away between the answer and its reading, the
/// answer would be lost without a trace; so whoever drops this end looks whether one has come.
///
/// Declared after the [`Call`], it is dropped first: the writer hears of the caller that went away
/// only when no answer can be sent to it any more.
struct Awaited<'a, T: Unread> {
    gate: &'a Gate,
    receiver: oneshot::Receiver<T>,
}

impl<T: Unread> Awaited<'_, T> {
    /// `None` when the writer is gone.
    async fn read(&mut self) -> Option<T> {
        (&mut self.receiver).await.ok()
    }
}

impl<T: Unread> Drop for Awaited<'_, T> {
    fn drop(&mut self) {
        self.receiver.close();
        if let Ok(unread) = self.receiver.try_recv() {
            for answer in unread.answers() {
                // Dropped, the receipt says that the answer did not arrive.
                drop(self.gate.with_receipt(answer));
            }
        }
    }
}

/// What may come to a caller that is not there any more.
trait Unread {
    /// The decisions in it.
    fn answers(self) -> Vec<Answer>;
}

impl Unread for Result<Taken, GateError> {
    fn answers(self) -> Vec<Answer> {
        self.into_iter()
            .filter_map(|taken| taken.answer.ok())
            .collect()
    }
}

impl Unread for Result<Watch, GateError> {
    fn answers(self) -> Vec<Answer> {
        self.into_iter()
            .flatten()
            .filter_map(|(_, answer)| answer)
            .collect()
    }
}

impl Unread for Replied {
    fn answers(self) -> Vec<Answer> {
        match self {
            Ok((_, Reply::Acquire(answer))) => answer.into_iter().collect(),
            Ok(_) | Err(_) => Vec::new(),
        }
    }
}

impl Unread for Vec<Replied> {
    fn answers(self) -> Vec<Answer> {
        self.into_iter().flat_map(Unread::answers).collect()
    }
}

/// Stands for an answer on its way to the caller. Whoever writes the answer says when it was
/// written whole; a receipt that is dropped before that says that it was not (TIC4).
#[derive(Debug)]
pub struct Receipt {
    gate: Gate,
    delivery: Option<Delivery>,
}

impl Receipt {
    /// The answer was written whole to a connection that is still open.
    pub fn written(self) {
        Self::all_written(vec![self]);
    }

    /// The same for all receipts of an answer.
    pub fn all_written(receipts: Vec<Self>) {
        if let Some(first) = receipts.first() {
            let gate = first.gate.clone();
            gate.delivered(receipts);
        }
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        if let Some(delivery) = self.delivery.take() {
            self.gate
                .signal(Message::Signal(Command::Undelivered(delivery)));
        }
    }
}

/// What must be heard of: a grant or a bypass that was not told before.
fn delivery(answer: &Answer) -> Option<Delivery> {
    let lease = match &answer.outcome {
        Outcome::Admit { lease, .. } => Some(*lease),
        Outcome::Bypass(_) => None,
        Outcome::Cancelled(_) | Outcome::Wait(_) => return None,
    };
    (!answer.repeated).then(|| Delivery {
        ticket: answer.ticket.clone(),
        lease,
    })
}

/// The writer answers each command in its own words; anything else is a fault of ours, and callers
/// go on without the gate.
fn unexpected(reply: &Reply) -> GateError {
    tracing::error!(
        ?reply,
        "the writer answered a command in the words of another"
    );
    GateError::Overloaded
}
