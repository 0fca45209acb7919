//! [`Gate`]: leases, closes and step reports, and the way of an acquire through the client.
//!
//! All work runs in the runtime in which the gate object was made; a caller only waits for it. So a future that is
//! dropped, and a fault of the client itself, end in one place each: the ticket is withdrawn.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvgate_api::{
    AcquireRequest, BatchOperation, CloseMode, CloseOperation, CloseRequest, EndedAs,
    RenewOperation, State,
};
use serde_json::json;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::answer::{Acquired, Action, Close, CloseStatus, Decision, StepReport, TicketCancelled};
use crate::ask::{Ask, Asking};
use crate::config::{GateConfig, GateError};
use crate::courier::Courier;
use crate::fail_open::{
    BREAKER, Breaker, Dice, LocalBypasses, OnceWarnings, Pause, REFUSED, UNREACHABLE, lock,
};
use crate::guard::Lease;
use crate::room::{News, Room, Seat};
use crate::session::Session;
use crate::turns::{Awaited, BACKGROUND_LANES, LANES, Tracked, Turns};
use crate::wire::{Call, Reply, Trouble, Wire, segment};

/// The gate's own bound of a close's `wait_s`.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(60);

/// A gate. Clones share everything; one object serves a whole process.
#[derive(Clone)]
pub struct Gate {
    pub(crate) inner: Arc<Inner>,
}

/// What all parts of a client use.
#[derive(Debug)]
pub struct Shared {
    pub config: GateConfig,
    pub handle: Handle,
    pub dice: Dice,
    pub breaker: Breaker,
    pub bypasses: LocalBypasses,
    pub warnings: OnceWarnings,
    pub wire: Wire,
}

/// The parts of a client.
#[derive(Debug)]
pub struct Inner {
    pub shared: Arc<Shared>,
    pub turns: Arc<Turns>,
    pub courier: Arc<Courier>,
    room: Arc<Room>,
    run: String,
}

impl Gate {
    /// A client with these settings, which works in the runtime of the caller. Nothing is sent.
    ///
    /// # Errors
    ///
    /// For settings that cannot be right, and outside of a tokio runtime. Whether there is a gate is not looked at.
    pub fn new(config: GateConfig) -> Result<Self, GateError> {
        let config = config.checked()?;
        let handle = Handle::try_current().map_err(|_| GateError::NoRuntime)?;
        let dice = Dice::new()?;
        let run = config.run.clone().unwrap_or_else(|| dice.id());
        let shared = Arc::new(Shared {
            handle,
            breaker: Breaker::new(config.breaker_failures, config.breaker_open),
            bypasses: LocalBypasses::default(),
            warnings: OnceWarnings::default(),
            wire: Wire::new(&config)?,
            dice,
            config,
        });
        let background = Turns::new(Arc::clone(&shared), BACKGROUND_LANES);
        let inner = Inner {
            turns: Turns::new(Arc::clone(&shared), LANES),
            courier: Courier::new(Arc::clone(&shared), background),
            room: Room::new(Arc::clone(&shared)),
            shared,
            run,
        };
        Ok(Self {
            inner: Arc::new(inner),
        })
    }

    /// Waits until the request may start. Trouble with the gate is no error but a lease without a grant
    /// ([`Action::Bypass`]). A future that is dropped withdraws its ticket.
    ///
    /// # Errors
    ///
    /// [`TicketCancelled`] when the gate says that the request must not start.
    pub fn acquire(
        &self,
        ask: Ask,
    ) -> impl Future<Output = Result<Lease, TicketCancelled>> + Send + 'static + use<> {
        let inner = Arc::clone(&self.inner);
        async move { inner.acquire(ask).await }
    }

    /// One multi-turn program, which is closed at its end.
    pub fn session(&self, session_id: impl Into<String>) -> Session {
        Session::new(Arc::clone(&self.inner), session_id.into())
    }

    /// Lets the engines drop the session's KV. The close is on its way when this returns, also when the future is
    /// dropped; one that is not answered is tried again in the background.
    pub fn close_session(
        &self,
        session_id: &str,
        mode: CloseMode,
    ) -> impl Future<Output = Close> + Send + use<> {
        self.inner.close(session_id, mode, EndedAs::Terminal)
    }

    /// The same, and waits for the end of the close, but not longer than this (the gate takes up to 60 s).
    pub async fn close_session_within(
        &self,
        session_id: &str,
        mode: CloseMode,
        time: Duration,
    ) -> Close {
        let close = self.close_session(session_id, mode).await;
        if !matches!(close.status, CloseStatus::Joining | CloseStatus::Delivering) {
            return close;
        }
        let wait = time.min(CLOSE_WAIT_MAX);
        let (session, wait_s) = (segment(session_id), wait.as_secs_f64());
        let path = format!("/v1/sessions/{session}/close?wait_s={wait_s}");
        // A close that runs is joined.
        let body = CloseRequest { mode, reason: None };
        let reply = self.ask_within(Call::post(path, &body), wait).await;
        reply
            .good()
            .map_or(close, |body| Close::read(body, session_id))
    }

    /// The `agentic_kv/...` values since this run's last step; the same step again gives the same report. None when the
    /// gate has none to give. Without a `run` it is that of the configuration. One process of a run should report.
    pub async fn report(&self, run: Option<&str>, step: u64) -> Option<StepReport> {
        let run = run.unwrap_or(&self.inner.run);
        let body = json!({"run": run, "step": step});
        let reply = self.ask(Call::post("/v1/steps".to_owned(), &body)).await;
        self.read_report(&reply, run, Some(step))
    }

    /// The values of the step that is under way, without ending it.
    pub async fn peek(&self, run: Option<&str>) -> Option<StepReport> {
        let run = run.unwrap_or(&self.inner.run);
        let path = format!("/v1/steps/current?run={}", segment(run));
        let reply = self.ask(Call::get(path)).await;
        self.read_report(&reply, run, None)
    }

    /// Budget, queue, leases and features; none when the gate does not answer in the words of this version.
    pub async fn state(&self) -> Option<State> {
        let reply = self.ask(Call::get("/v1/state".to_owned())).await;
        serde_json::from_value(reply.good()?.clone()).ok()
    }

    /// What was decided without the gate since the last acquire that got through: reason to count.
    #[must_use]
    pub fn local_bypasses(&self) -> BTreeMap<String, u64> {
        self.inner.shared.bypasses.peek()
    }

    /// Waits a while for releases, cancels and closes that are still to be delivered; whether none is left. A program
    /// that ends without it may leave leases to their TTL, since the runtime's end is the end of its work.
    pub async fn flush(&self) -> bool {
        let courier = Arc::clone(&self.inner.courier);
        let time = self.inner.shared.config.flush;
        let flushing = async move { courier.flushed(time).await };
        self.inner.run(flushing).await.unwrap_or(false)
    }

    async fn ask(&self, call: Call) -> Reply {
        self.ask_within(call, Duration::ZERO).await
    }

    /// A call that the gate may keep open for this long.
    async fn ask_within(&self, call: Call, open: Duration) -> Reply {
        let shared = Arc::clone(&self.inner.shared);
        if !shared.breaker.allows(Instant::now(), &shared.dice) {
            return Reply::Silent(Trouble::Refused);
        }
        let asking = async move {
            let ends_at = Instant::now() + open + shared.config.call_timeout;
            let reply = shared.wire.call(&call, ends_at).await;
            shared.note(&reply, 1);
            reply
        };
        let reply = self.inner.run(asking).await;
        reply.unwrap_or(Reply::Silent(Trouble::Cut))
    }

    fn read_report(&self, reply: &Reply, run: &str, step: Option<u64>) -> Option<StepReport> {
        let report = reply
            .good()
            .and_then(|body| StepReport::read(body, run, step));
        if report.is_none() {
            let warnings = &self.inner.shared.warnings;
            warnings.warn("report", format_args!("no step report: {reply}"));
        }
        report
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("config", &self.inner.shared.config)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Keeps the breaker informed. A 4xx shows a gate that is well; what it refuses is the caller's.
    pub fn note(&self, reply: &Reply, calls: u32) {
        if reply.fails_over() {
            self.breaker.failed(calls, Instant::now(), &self.dice);
        } else {
            self.breaker.succeeded();
        }
    }
}

impl Inner {
    /// Runs `work` in the gate's runtime; dropped, it is stopped. None when it could not come to its end.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let mut task = Stopping(self.shared.handle.spawn(work));
        (&mut task.0).await.ok()
    }

    pub async fn renew(&self, lease_id: &str, ttl_s: Option<f64>) -> Reply {
        let renewal = BatchOperation::Renew(RenewOperation {
            lease_id: lease_id.to_owned(),
            ttl_s,
        });
        let patience = self.shared.config.call_timeout;
        self.turns.ask(renewal, patience).await
    }

    pub fn close(
        &self,
        session_id: &str,
        mode: CloseMode,
        reason: EndedAs,
    ) -> impl Future<Output = Close> + Send + use<> {
        let session_id = session_id.to_owned();
        let delivery = self.courier.deliver(BatchOperation::Close(CloseOperation {
            session_id: session_id.clone(),
            mode,
            reason: Some(reason),
        }));
        async move {
            match delivery.await {
                Some(reply) if reply.is_final() => match reply.good() {
                    Some(body) => Close::read(body, &session_id),
                    None => Close::without_answer(&session_id, CloseStatus::Refused),
                },
                _ => Close::unanswered(&session_id),
            }
        }
    }

    // ---- acquire ------------------------------------------------------------------------------------------------

    pub async fn acquire(self: Arc<Self>, ask: Ask) -> Result<Lease, TicketCancelled> {
        let shared = &self.shared;
        let asking = Arc::new(Asking::new(ask, &shared.config, &shared.dice));
        if let Some(fault) = asking.fault() {
            let text = format_args!("a request goes on without a lease: {fault}");
            shared.warnings.warn("fault", text);
            return Ok(self.alone(&asking, REFUSED));
        }
        if !shared.breaker.allows(Instant::now(), &shared.dice) {
            return Ok(self.alone(&asking, BREAKER));
        }
        let withdrawal = Withdrawal::new(&self, &asking.request.ticket_id);
        let _caller = OnLeave(Arc::clone(&withdrawal));
        let deciding = Arc::clone(&self).decide(Arc::clone(&asking), withdrawal);
        match self.run(deciding).await {
            Some(decided) => decided,
            // A fault of the client must not reach a rollout. The ticket was withdrawn with the task.
            None => Ok(self.alone(&asking, UNREACHABLE)),
        }
    }

    /// Asks until there is a decision, or reason to go on without one.
    async fn decide(
        self: Arc<Self>,
        asking: Arc<Asking>,
        withdrawal: Arc<Withdrawal>,
    ) -> Result<Lease, TicketCancelled> {
        let request = &asking.request;
        let _task = OnLeave(Arc::clone(&withdrawal));
        let patience = self.shared.config.call_timeout;
        let mut reply = self.ask_at_once(request, patience, &withdrawal).await;
        let mut seat: Option<Arc<Seat>> = None;
        let mut pauses = Pauses::new();
        loop {
            let read = reply.good().map_or(Acquired::Nothing, |body| {
                let (ticket, session) = (&request.ticket_id, &request.session_id);
                Acquired::read(body, ticket, session, asking.reservation_tokens)
            });
            let next = match (read, &seat) {
                (Acquired::Decided(decision), _) => {
                    withdrawal.settle();
                    return Ok(Lease::new(self, &asking, decision));
                }
                (Acquired::Cancelled(cancelled), _) => {
                    withdrawal.settle();
                    return Err(cancelled);
                }
                (Acquired::Wait(times), _) => {
                    let now = Instant::now();
                    let seat = seat.get_or_insert_with(|| Seat::new(&request.ticket_id, now));
                    seat.told(now, times);
                    pauses.trouble.reset();
                    self.attend(seat, request, &mut pauses).await
                }
                (Acquired::Nothing, Some(seat)) if reply.fails_over() || !reply.is_refusal() => {
                    let pause = pauses.trouble.next(&self.shared.dice);
                    again_within(seat.grace_ends_at(), pause).await
                }
                (Acquired::Nothing, seat) => {
                    return Ok(self.without(&asking, &withdrawal, &reply, seat.is_some()));
                }
            };
            reply = match (next, &seat) {
                (Next::Read(reply), _) => reply,
                (Next::Ask, Some(seat)) => {
                    let left = seat.bound_at().duration_since(Instant::now());
                    self.ask_at_once(request, patience.min(left), &withdrawal)
                        .await
                }
                (Next::Ask, None) | (Next::GoOn, _) => {
                    let silence = Reply::Silent(Trouble::Timeout);
                    return Ok(self.without(&asking, &withdrawal, &silence, true));
                }
            };
        }
    }

    /// Waits for news of a ticket that has a place.
    async fn attend(
        &self,
        seat: &Arc<Seat>,
        request: &AcquireRequest,
        pauses: &mut Pauses,
    ) -> Next {
        if seat.bound_at() <= Instant::now() {
            return Next::GoOn;
        }
        match self.room.attend(seat, request).await {
            News::Reply(reply) => Next::Read(reply),
            News::Unknown => {
                let pause = pauses.after_unknown(&self.shared.dice);
                again_within(seat.bound_at(), pause).await
            }
            News::GoOn => Next::GoOn,
        }
    }

    /// Never waits: a ticket that has to is told so at once.
    async fn ask_at_once(
        &self,
        request: &AcquireRequest,
        patience: Duration,
        withdrawal: &Withdrawal,
    ) -> Reply {
        let operation = BatchOperation::Acquire(Box::new(AcquireRequest {
            wait_s: Some(0.0),
            ..request.clone()
        }));
        let awaited = self.turns.put(operation, patience);
        withdrawal.asks(&awaited);
        awaited.outcome().await
    }

    /// Goes on without the gate.
    fn without(
        self: Arc<Self>,
        asking: &Asking,
        withdrawal: &Withdrawal,
        reply: &Reply,
        has_place: bool,
    ) -> Lease {
        let is_refusal = reply.is_refusal();
        let kind = match reply.status() {
            Some(status) => format!("acquire/{status}"),
            None => "acquire".to_owned(),
        };
        let text = format_args!("a request goes on without a lease: {reply}");
        self.shared.warnings.warn(&kind, text);
        // The gate may have granted it. A ticket that was refused at once may be another caller's.
        if is_refusal && !reply.fails_over() && !has_place {
            withdrawal.settle();
        }
        self.alone(asking, if is_refusal { REFUSED } else { UNREACHABLE })
    }

    /// A lease without a grant.
    fn alone(self: &Arc<Self>, asking: &Asking, reason: &str) -> Lease {
        self.shared.bypasses.add(reason);
        let decision = Decision {
            action: Action::Bypass,
            reason: reason.to_owned(),
            ticket_id: asking.request.ticket_id.clone(),
            session_id: asking.request.session_id.clone(),
            lease_id: None,
            reservation_tokens: asking.reservation_tokens,
            epoch: 0,
            ttl: Duration::ZERO,
            waited: Duration::ZERO,
            repeated: false,
            session_reopened: false,
            local: true,
        };
        Lease::new(Arc::clone(self), asking, decision)
    }
}

/// What an acquire that waits does next.
enum Next {
    /// Takes the answer for what it says.
    Read(Reply),
    /// Asks anew: the gate forgot the ticket, or could not answer.
    Ask,
    /// Goes on without the gate: nothing was heard for too long.
    GoOn,
}

async fn again_within(ends_at: Instant, pause: Duration) -> Next {
    let left = ends_at.duration_since(Instant::now());
    if left.is_zero() {
        return Next::GoOn;
    }
    sleep(pause.min(left)).await;
    Next::Ask
}

/// The pauses of one acquire.
struct Pauses {
    /// After an answer that is none.
    trouble: Pause,
    /// After a ticket was forgotten, but for the first time: a gate that forgets all the time is not asked in a hurry.
    unknown: Option<Pause>,
}

impl Pauses {
    const fn new() -> Self {
        Self {
            trouble: Pause::of_place(),
            unknown: None,
        }
    }

    fn after_unknown(&mut self, dice: &Dice) -> Duration {
        let pause = self.unknown.as_mut().map(|pause| pause.next(dice));
        if pause.is_none() {
            self.unknown = Some(Pause::of_place());
        }
        pause.unwrap_or_default()
    }
}

/// A task that ends with its owner.
pub struct Stopping<T>(pub JoinHandle<T>);

impl<T> Drop for Stopping<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Cancels a ticket that is left before it is settled, in whatever way: the gate may have granted it.
///
/// Its two ends are the caller, whose future may be dropped, and the task that asks for it. What the caller's drop
/// cancels is on its way when the drop returns.
struct Withdrawal {
    courier: Arc<Courier>,
    ticket_id: String,
    asked: Mutex<Asked>,
}

/// How far the gate may know of a ticket.
#[derive(Default)]
struct Asked {
    /// The last acquire on its way.
    last: Option<Tracked>,
    was_seen: bool,
    is_settled: bool,
}

impl Asked {
    fn take_back(&mut self) {
        if let Some(last) = self.last.take()
            && !last.withdraw()
        {
            self.was_seen = true;
        }
    }
}

impl Withdrawal {
    fn new(inner: &Inner, ticket_id: &str) -> Arc<Self> {
        Arc::new(Self {
            courier: Arc::clone(&inner.courier),
            ticket_id: ticket_id.to_owned(),
            asked: Mutex::default(),
        })
    }

    fn asks(&self, awaited: &Awaited) {
        let mut asked = lock(&self.asked);
        asked.take_back();
        asked.last = Some(awaited.tracked());
    }

    /// There is nothing to cancel any more.
    fn settle(&self) {
        lock(&self.asked).is_settled = true;
    }

    fn withdraw(&self) {
        let mut asked = lock(&self.asked);
        asked.take_back();
        if std::mem::take(&mut asked.was_seen) && !asked.is_settled {
            self.courier.cancel(&self.ticket_id);
        }
    }
}

/// One end of a withdrawal.
struct OnLeave(Arc<Withdrawal>);

impl Drop for OnLeave {
    fn drop(&mut self) {
        self.0.withdraw();
    }
}
