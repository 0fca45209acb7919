//! A few hundred agent sessions as clients of the coordinator, over HTTP.
//!
//! Each turn acquires a lease, calls the router, renews while the work is long, releases with what
//! was really used, and lets its tool run. Gate trouble never stops a turn: whatever is not a good
//! answer is leave to go on (fail open), with the ticket cancelled behind it. A session that comes to
//! its end is closed; one that is given up in the middle of a turn is closed with abort. Now and then
//! a client dies without a release or a close, and some take the id of their last attempt again. The
//! sessions depend on the seed only; their timing on the coordinator.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::{Method, StatusCode};
use kvgate_sim::workload::{Pace, SessionPlan, Turn, Workload, WorkloadSpec};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::serve::lock;
use super::{DEMO_SPEED, DemoError, http_client};

/// Longest time for a call that does not wait.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Added to `wait_s` for a call that does.
const WAIT_SLACK: Duration = Duration::from_secs(5);
/// An open call this old has a place to lose.
const PLACE_AFTER: Duration = Duration::from_secs(2);
/// Grace that is assumed until the server told its own.
const CLAIM_GRACE: Duration = Duration::from_secs(10);
/// Added to the last `bypass_in_s`: the hard bound of a wait.
const BOUND_SLACK: Duration = Duration::from_secs(5);
/// First and longest pause between two attempts of a waiting ticket.
const AGAIN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));
/// First pause before a release, cancel or close is tried again; it doubles.
const RETRY_FIRST: Duration = Duration::from_millis(250);
/// Attempts of a release, cancel or close; then the TTL does the rest.
const RETRIES_MAX: u32 = 10;
/// Releases, cancels and closes that are tried again at the same time; beyond that they are left
/// to the TTL.
const BACKGROUND_MAX: usize = 512;
/// Failures in a row after which the gate is not asked for a while.
const BREAKER_FAILURES: u32 = 5;
/// How long that while is.
const BREAKER_OPEN: Duration = Duration::from_secs(2);
/// When a turn is given up, in model milliseconds after its request was sent.
const GIVES_UP_AFTER_MS: u64 = 1_000;

/// What the agents are and where they go.
#[derive(Clone, PartialEq, Debug)]
pub struct AgentsSpec {
    /// Base address of the coordinator.
    pub coordinator: String,
    /// Base address of the router.
    pub router: String,
    /// Goes in front of every session id. A coordinator that remembers an earlier run of the same
    /// seed would refuse its tickets, so give each run another name, such as its start time.
    pub run: String,
    /// Sessions at a time.
    pub slots: u64,
    /// Sessions in all; `None` goes on until it is stopped.
    pub sessions_max: Option<u64>,
    /// What the sessions look like.
    pub workload: WorkloadSpec,
    /// Model seconds per real second; the same as the fleet's.
    pub speed: f64,
    /// Lease life that is asked for, in real seconds.
    pub ttl_s: f64,
    /// Longest time of one acquire call, in real seconds.
    pub wait_s: f64,
    /// Whether the first session of each slot begins at a later turn, as if the agents had been at
    /// work for a while: the pool fills at once.
    pub warm: bool,
    /// Whether finished sessions are closed.
    pub close_sessions: bool,
    /// One in so many sessions is given up in the middle of a turn, and closed with abort; 0 for none.
    pub gives_up_one_in: u64,
    /// One in so many sessions goes through its turns once more under the same id after its close,
    /// which it should not; 0 for none.
    pub reuses_one_in: u64,
    /// Token for the coordinator.
    pub token: Option<String>,
}

impl AgentsSpec {
    /// The demo: 200 sessions at a time, without end. A dead client's lease is back after 20 s.
    #[must_use]
    pub fn demo(coordinator: &str, router: &str) -> Self {
        Self {
            coordinator: coordinator.trim_end_matches('/').to_owned(),
            router: router.trim_end_matches('/').to_owned(),
            run: String::new(),
            slots: 200,
            sessions_max: None,
            workload: WorkloadSpec::default(),
            speed: DEMO_SPEED,
            ttl_s: 20.0,
            wait_s: 25.0,
            warm: true,
            close_sessions: true,
            gives_up_one_in: 25,
            reuses_one_in: 50,
            token: None,
        }
    }
}

/// What the agents have done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Sessions that ended by themselves.
    pub sessions: u64,
    /// Turns that ended.
    pub turns: u64,
    /// Leases got.
    pub admitted: u64,
    /// Bypasses told by the coordinator.
    pub bypassed: u64,
    /// Answers that said `wait`.
    pub waited: u64,
    /// Answers that said not to start.
    pub cancelled: u64,
    /// Turns that went on without a good answer.
    pub alone: u64,
    /// Good renewals.
    pub renewed: u64,
    /// Good releases.
    pub released: u64,
    /// Closes that were promised.
    pub closed: u64,
    /// Sessions that were given up.
    pub given_up: u64,
    /// Answers that said that the session had been closed before.
    pub reopened: u64,
    /// Clients that died without a release.
    pub died: u64,
    /// Engine requests that failed.
    pub failed: u64,
}

/// Running agents. They stop with the token they were given, or when this is dropped.
pub struct Agents {
    tally: watch::Receiver<Tally>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

impl Agents {
    /// Starts the agents. The coordinator need not answer yet: they fail open.
    ///
    /// # Errors
    /// The workload makes no sense, or the HTTP client could not be made.
    pub fn start(spec: AgentsSpec, stop: &CancellationToken) -> Result<Self, DemoError> {
        let workload = Workload::new(spec.workload.clone()).map_err(|_bad| DemoError::Workload)?;
        let (tally, seen) = watch::channel(Tally::default());
        let stop = stop.child_token();
        let tracker = TaskTracker::new();
        let crew = Arc::new(Crew {
            workload,
            http: http_client()?,
            began: Instant::now(),
            tally,
            stop: stop.clone(),
            tracker: tracker.clone(),
            background: Arc::new(Semaphore::new(BACKGROUND_MAX)),
            failures: AtomicU32::new(0),
            closed_until: Mutex::new(None),
            local_bypasses: Mutex::default(),
            spec,
        });
        for slot in 0..crew.spec.slots {
            let crew = Arc::clone(&crew);
            let stop = stop.clone();
            tracker.spawn(async move {
                let work = run_slot(crew, slot);
                stop.run_until_cancelled(work).await;
            });
        }
        tracker.close();
        Ok(Self {
            tally: seen,
            tracker,
            stop,
        })
    }

    /// What they have done so far.
    #[must_use]
    pub fn tally(&self) -> Tally {
        *self.tally.borrow()
    }

    /// Waits until the tally meets `condition` or all agents are done, and returns it.
    pub async fn wait_for(&mut self, condition: impl FnMut(&Tally) -> bool) -> Tally {
        // An error says that all agents are done, and the last value stays.
        let seen = self.tally.wait_for(condition).await.map(|tally| *tally);
        seen.unwrap_or_else(|_done| self.tally())
    }

    /// Waits until every session is done, or the agents were stopped.
    pub async fn finished(&self) {
        self.tracker.wait().await;
    }

    /// Stops them and waits for their end. Leases that are held are left to their TTL.
    pub async fn stop(self) -> Tally {
        self.stop.cancel();
        self.tracker.wait().await;
        self.tally()
    }
}

impl Drop for Agents {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// What all agents share.
struct Crew {
    spec: AgentsSpec,
    workload: Workload,
    http: reqwest::Client,
    began: Instant,
    tally: watch::Sender<Tally>,
    stop: CancellationToken,
    tracker: TaskTracker,
    background: Arc<Semaphore>,
    /// Failures of the gate in a row.
    failures: AtomicU32,
    /// Until when the gate is not asked.
    closed_until: Mutex<Option<Instant>>,
    /// What was decided without the gate and not yet reported to it.
    local_bypasses: Mutex<BTreeMap<&'static str, u64>>,
}

/// The part of an acquire's answer that an agent looks at.
#[derive(Deserialize)]
struct AcquireAnswer {
    action: String,
    lease_id: Option<String>,
    ttl_s: Option<f64>,
    bypass_in_s: Option<f64>,
    poll_after_s: Option<f64>,
    claim_grace_s: Option<f64>,
    #[serde(default)]
    session_reopened: bool,
}

struct Lease {
    id: String,
    ttl: Duration,
}

/// How a turn may go on.
enum Leave {
    Lease(Lease),
    /// Without a lease: told so, or for want of a good answer.
    Free,
    /// Not at all.
    Cancelled,
}

/// What one acquire call brought.
enum Call {
    Decided(AcquireAnswer),
    Wait(AcquireAnswer),
    /// No answer, or one that says to come back.
    Silent,
    /// An answer that is none.
    Odd(&'static str),
}

/// The names of one turn.
struct Names {
    ticket: String,
    rid: String,
    client: String,
}

/// One way through the turns of a session.
#[derive(Clone, Copy)]
struct Attempt {
    index: u64,
    slot: u64,
    /// From 0; the same session again is the next one.
    number: u32,
    /// The turn in whose middle it is given up.
    gives_up_at: Option<usize>,
}

/// How a close treats what still runs, and why.
#[derive(Clone, Copy)]
enum Ending {
    /// The session came to its end.
    Terminal,
    /// It was given up.
    GivenUp,
}

async fn run_slot(crew: Arc<Crew>, slot: u64) {
    let mut index = slot;
    let mut free_at_ms = 0;
    while crew.spec.sessions_max.is_none_or(|max| index < max) {
        let start_ms = Pace::start(&crew.spec.workload, slot, free_at_ms);
        tokio::time::sleep_until(crew.began + crew.real(start_ms)).await;
        let mut plan = crew.workload.session(index);
        if crew.spec.warm && index == slot {
            warm_up(&mut plan, slot);
        }
        let lot = u64::from(hash(&plan.session));
        if !crew.spec.run.is_empty() {
            plan.session = format!("{}.{}", crew.spec.run, plan.session);
        }
        crew.session(&plan, lot, index, slot).await;
        index += crew.spec.slots;
        free_at_ms = crew.model_ms();
    }
}

/// Leaves out some first turns, another number in each slot, and never the last.
fn warm_up(plan: &mut SessionPlan, slot: u64) {
    let turns = u64::try_from(plan.turns.len()).unwrap_or(1).max(1);
    let skip = usize::try_from(slot.wrapping_mul(7) % turns).unwrap_or(0);
    plan.turns.drain(..skip);
}

impl Crew {
    /// Model milliseconds as real time.
    fn real(&self, model_ms: u64) -> Duration {
        Duration::from_millis(model_ms).div_f64(self.spec.speed.max(0.001))
    }

    /// Model milliseconds since the start, at least 1.
    fn model_ms(&self) -> u64 {
        let ms = self.began.elapsed().as_secs_f64() * 1_000.0 * self.spec.speed;
        (ms as u64).max(1)
    }

    fn count(&self, change: impl FnOnce(&mut Tally)) {
        self.tally.send_modify(change);
    }

    /// A session from its first turn to its close; `lot` says what is special about it.
    async fn session(self: &Arc<Self>, plan: &SessionPlan, lot: u64, index: u64, slot: u64) {
        let drawn = |one_in: u64| one_in > 0 && lot.is_multiple_of(one_in);
        let attempts = if drawn(self.spec.reuses_one_in) { 2 } else { 1 };
        for number in 0..attempts {
            // One that is to come back does not give up.
            let gives_up = attempts == 1 && drawn(self.spec.gives_up_one_in);
            let attempt = Attempt {
                index,
                slot,
                number,
                gives_up_at: gives_up.then_some(plan.turns.len() / 2),
            };
            if !self.attempt(plan, attempt).await {
                return;
            }
        }
    }

    /// One way through the turns; false when it ended before their end.
    async fn attempt(self: &Arc<Self>, plan: &SessionPlan, attempt: Attempt) -> bool {
        let Attempt { index, slot, .. } = attempt;
        let again = attempt.number;
        for (turn, number) in plan.turns.iter().zip(0_u32..) {
            let names = Names {
                ticket: format!("{}/{number}#{again}", plan.session),
                // Of one length, since engines match ids by prefix.
                rid: format!(
                    "{:08x}{index:011x}{again:x}{number:04x}",
                    hash(&plan.session)
                ),
                client: format!("rollout-{}", slot % 8),
            };
            let gives_up = attempt.gives_up_at == usize::try_from(number).ok();
            if !self.turn(plan, turn, &names, gives_up).await {
                return false;
            }
            tokio::time::sleep(self.real(turn.tool.millis())).await;
        }
        self.count(|tally| tally.sessions += 1);
        self.close(&plan.session, Ending::Terminal).await;
        true
    }

    /// One turn; false when the session ends here.
    async fn turn(
        self: &Arc<Self>,
        plan: &SessionPlan,
        turn: &Turn,
        names: &Names,
        gives_up: bool,
    ) -> bool {
        let lease = match self.acquire(plan, turn, names).await {
            Leave::Lease(lease) => Some(lease),
            Leave::Free => None,
            Leave::Cancelled => {
                self.count(|tally| tally.cancelled += 1);
                return false;
            }
        };
        let death = async {
            match turn.dies_after {
                Some(after) => tokio::time::sleep(self.real(after.millis())).await,
                None => std::future::pending().await,
            }
        };
        let usage = tokio::select! {
            biased;
            () = death => {
                self.count(|tally| tally.died += 1);
                return false;
            }
            usage = self.work(plan, turn, names, gives_up.then_some(lease.as_ref())) => usage,
            () = self.renew(lease.as_ref()) => None,
        };
        self.count(|tally| {
            tally.turns += 1;
            tally.failed += u64::from(usage.is_none() && !gives_up);
        });
        if let Some(lease) = lease {
            self.release(&lease, usage).await;
        }
        !gives_up
    }

    /// The engine request of a turn, to its end or until it is given up with the lease it has.
    async fn work(
        self: &Arc<Self>,
        plan: &SessionPlan,
        turn: &Turn,
        names: &Names,
        gives_up: Option<Option<&Lease>>,
    ) -> Option<Value> {
        let mut request = std::pin::pin!(self.generate(plan, turn, names));
        let Some(lease) = gives_up else {
            return request.await;
        };
        let ended = tokio::select! {
            biased;
            usage = &mut request => Some(usage),
            () = tokio::time::sleep(self.real(GIVES_UP_AFTER_MS)) => None,
        };
        self.count(|tally| tally.given_up += 1);
        self.close(&plan.session, Ending::GivenUp).await;
        match ended {
            Some(usage) => usage,
            // The coordinator has it aborted, and waits for the release.
            None if lease.is_some() => request.await,
            // It knows nothing of this one: our leaving ends it.
            None => None,
        }
    }

    /// Asks for a lease until there is a decision, or reason to go on without one.
    async fn acquire(self: &Arc<Self>, plan: &SessionPlan, turn: &Turn, names: &Names) -> Leave {
        if self.breaker_is_open() {
            self.go_alone("breaker");
            return Leave::Free;
        }
        let mut heard_at = Instant::now();
        let mut grace = CLAIM_GRACE;
        let mut bound: Option<Instant> = None;
        let mut pause = AGAIN.0;
        loop {
            let asked_at = Instant::now();
            let (wait, reason) = match self.ask(plan, turn, names).await {
                Call::Decided(answer) => {
                    self.count(|tally| tally.reopened += u64::from(answer.session_reopened));
                    self.failures.store(0, Ordering::Relaxed);
                    return self.decided(answer);
                }
                Call::Wait(answer) => {
                    self.failures.store(0, Ordering::Relaxed);
                    self.count(|tally| {
                        tally.waited += 1;
                        tally.reopened += u64::from(answer.session_reopened);
                    });
                    heard_at = Instant::now();
                    pause = AGAIN.0;
                    grace = answer.claim_grace_s.map_or(grace, seconds);
                    let bypass_in = answer.bypass_in_s.map_or(Duration::ZERO, seconds);
                    bound = Some(heard_at + bypass_in + BOUND_SLACK);
                    (seconds(answer.poll_after_s.unwrap_or(0.0)), None)
                }
                Call::Silent => {
                    let has_place = bound.is_some() || asked_at.elapsed() > PLACE_AFTER;
                    let wait = jittered(pause, &names.rid);
                    pause = (pause * 2).min(AGAIN.1);
                    let late = heard_at.elapsed() + wait >= grace;
                    (wait, (!has_place || late).then_some("unreachable"))
                }
                Call::Odd(reason) => (Duration::ZERO, Some(reason)),
            };
            let over = bound.is_some_and(|bound| Instant::now() >= bound);
            if let Some(reason) = reason.or(over.then_some("unreachable")) {
                self.gate_failed();
                self.go_alone(reason);
                let ticket = utf8_percent_encode(&names.ticket, NON_ALPHANUMERIC);
                let path = format!("/v1/tickets/{ticket}");
                self.in_background(Method::DELETE, path, Value::Null);
                return Leave::Free;
            }
            tokio::time::sleep(wait).await;
        }
    }

    async fn ask(&self, plan: &SessionPlan, turn: &Turn, names: &Names) -> Call {
        let mut body = json!({
            "ticket_id": names.ticket,
            "session_id": plan.session,
            "prompt_tokens": turn.prompt_tokens,
            "max_new_tokens": turn.max_new_tokens,
            "scope": if plan.eval { "eval" } else { "train" },
            "protected": plan.protected,
            "wait_s": self.spec.wait_s,
            "ttl_s": self.spec.ttl_s,
            "request_id": names.rid,
            "client": names.client,
        });
        let unreported = std::mem::take(&mut *lock(&self.local_bypasses));
        if let (false, Some(fields)) = (unreported.is_empty(), body.as_object_mut()) {
            fields.insert("local_bypasses".to_owned(), json!(unreported));
        }
        let timeout = seconds(self.spec.wait_s) + WAIT_SLACK;
        let answer = self.call(Method::POST, "/v1/leases", &body, timeout).await;
        let got_through = answer
            .as_ref()
            .is_some_and(|(status, _)| status.is_success());
        if !got_through {
            let mut kept = lock(&self.local_bypasses);
            for (reason, count) in unreported {
                *kept.entry(reason).or_insert(0) += count;
            }
        }
        understand(answer)
    }

    fn decided(&self, answer: AcquireAnswer) -> Leave {
        match (answer.action.as_str(), answer.lease_id) {
            ("admit", Some(id)) => {
                self.count(|tally| tally.admitted += 1);
                let ttl = seconds(answer.ttl_s.unwrap_or(self.spec.ttl_s));
                Leave::Lease(Lease { id, ttl })
            }
            ("cancelled", _) => Leave::Cancelled,
            _ => {
                self.count(|tally| tally.bypassed += 1);
                Leave::Free
            }
        }
    }

    /// The engine request of a turn; what it used, as the release reports it.
    async fn generate(&self, plan: &SessionPlan, turn: &Turn, names: &Names) -> Option<Value> {
        let body = json!({
            "rid": names.rid,
            "session_id": plan.session,
            "prompt_tokens": turn.prompt_tokens,
            "sampling_params": {"max_new_tokens": turn.max_new_tokens},
            "demo": {
                "decode_tokens": turn.decode_tokens,
                "prefix_id": &*plan.prefix.id,
                "prefix_tokens": plan.prefix.tokens,
            },
        });
        let url = format!("{}/generate", self.spec.router);
        let answer = self.http.post(url).json(&body).send().await.ok()?;
        let engine = answer
            .headers()
            .get("x-demo-engine")
            .and_then(|url| url.to_str().ok())
            .map(str::to_owned);
        let answer: Value = answer.error_for_status().ok()?.json().await.ok()?;
        let meta = answer.get("meta_info")?;
        let mut usage = json!({
            "prompt_tokens": meta.get("prompt_tokens")?,
            "completion_tokens": meta.get("completion_tokens")?,
            "cached_tokens": meta.get("cached_tokens")?,
        });
        if let (Some(engine), Some(fields)) = (engine, usage.as_object_mut()) {
            fields.insert("engine".to_owned(), engine.into());
        }
        Some(usage)
    }

    /// Renews at a third of the TTL, for as long as it is polled. Never ends.
    async fn renew(&self, lease: Option<&Lease>) {
        let Some(lease) = lease else {
            return std::future::pending().await;
        };
        let path = lease_path(lease, "/renew");
        let body = json!({"ttl_s": self.spec.ttl_s});
        loop {
            tokio::time::sleep(lease.ttl / 3).await;
            let answer = self.call(Method::POST, &path, &body, CALL_TIMEOUT).await;
            match answer {
                Some((status, _)) if status.is_success() => {
                    self.count(|tally| tally.renewed += 1);
                }
                // The lease is gone; running work is left to run.
                Some((status, _)) if status.is_client_error() => {
                    return std::future::pending().await;
                }
                _ => {}
            }
        }
    }

    async fn release(self: &Arc<Self>, lease: &Lease, usage: Option<Value>) {
        let path = lease_path(lease, "/release");
        let body = usage.unwrap_or_else(|| json!({}));
        let answer = self.call(Method::POST, &path, &body, CALL_TIMEOUT).await;
        match answer {
            Some((status, _)) if status.is_success() => self.count(|tally| tally.released += 1),
            Some((status, _)) if status.is_client_error() => {}
            _ => self.in_background(Method::POST, path, body),
        }
    }

    async fn close(self: &Arc<Self>, session: &str, ending: Ending) {
        if !self.spec.close_sessions {
            return;
        }
        let session = utf8_percent_encode(session, NON_ALPHANUMERIC);
        let path = format!("/v1/sessions/{session}/close");
        let body = match ending {
            Ending::Terminal => json!({"mode": "join", "reason": "terminal"}),
            Ending::GivenUp => json!({"mode": "abort", "reason": "dropped"}),
        };
        let answer = self.call(Method::POST, &path, &body, CALL_TIMEOUT).await;
        match answer {
            // 200 says that the feature is off.
            Some((status, _)) if status.is_success() => {
                let promised = u64::from(status == StatusCode::ACCEPTED);
                self.count(|tally| tally.closed += promised);
            }
            Some((status, _)) if status.is_client_error() => {}
            _ => self.in_background(Method::POST, path, body),
        }
    }

    /// One call of the coordinator; `None` for no answer.
    async fn call(
        &self,
        method: Method,
        path: &str,
        body: &Value,
        timeout: Duration,
    ) -> Option<(StatusCode, Vec<u8>)> {
        let url = format!("{}{path}", self.spec.coordinator);
        let mut request = self.http.request(method, url).timeout(timeout);
        if !body.is_null() {
            request = request.json(body);
        }
        if let Some(token) = &self.spec.token {
            request = request.bearer_auth(token);
        }
        let answer = request.send().await.ok()?;
        let status = answer.status();
        let body = answer.bytes().await.ok()?;
        Some((status, body.to_vec()))
    }

    /// Tries a release, cancel or close again and again, apart from the session.
    fn in_background(self: &Arc<Self>, method: Method, path: String, body: Value) {
        let Ok(permit) = Arc::clone(&self.background).try_acquire_owned() else {
            return;
        };
        let crew = Arc::clone(self);
        let stop = self.stop.clone();
        self.tracker.spawn(async move {
            let _permit = permit;
            let tries = async {
                let mut pause = RETRY_FIRST;
                for _ in 0..RETRIES_MAX {
                    let answer = crew.call(method.clone(), &path, &body, CALL_TIMEOUT).await;
                    if answer.is_some_and(|(status, _)| !status.is_server_error()) {
                        return;
                    }
                    tokio::time::sleep(jittered(pause, &path)).await;
                    pause *= 2;
                }
            };
            stop.run_until_cancelled(tries).await;
        });
    }

    fn go_alone(&self, reason: &'static str) {
        *lock(&self.local_bypasses).entry(reason).or_insert(0) += 1;
        self.count(|tally| tally.alone += 1);
    }

    fn gate_failed(&self) {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        if failures >= BREAKER_FAILURES {
            *lock(&self.closed_until) = Some(Instant::now() + BREAKER_OPEN);
        }
    }

    fn breaker_is_open(&self) -> bool {
        lock(&self.closed_until).is_some_and(|until| Instant::now() < until)
    }
}

fn understand(answer: Option<(StatusCode, Vec<u8>)>) -> Call {
    let Some((status, body)) = answer else {
        return Call::Silent;
    };
    let parsed = serde_json::from_slice::<AcquireAnswer>(&body);
    match (status, parsed) {
        (StatusCode::OK, Ok(answer)) => match answer.action.as_str() {
            "admit" if answer.lease_id.is_some() => Call::Decided(answer),
            "bypass" | "cancelled" => Call::Decided(answer),
            _ => Call::Odd("unreachable"),
        },
        (StatusCode::ACCEPTED, Ok(answer)) if answer.action == "wait" => Call::Wait(answer),
        (StatusCode::SERVICE_UNAVAILABLE, _) => {
            let problem: Value = serde_json::from_slice(&body).unwrap_or_default();
            match problem.get("code").and_then(Value::as_str) {
                Some("draining" | "recovering") => Call::Silent,
                _ => Call::Odd("unreachable"),
            }
        }
        (status, _) if status.is_client_error() => Call::Odd("refused"),
        _ => Call::Odd("unreachable"),
    }
}

fn lease_path(lease: &Lease, action: &str) -> String {
    let id = utf8_percent_encode(&lease.id, NON_ALPHANUMERIC);
    format!("/v1/leases/{id}{action}")
}

/// Seconds of an answer; nonsense is no time.
fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.min(86_400.0)).unwrap_or(Duration::ZERO)
}

/// Three quarters to five quarters of `pause`, spread by `name`.
fn jittered(pause: Duration, name: &str) -> Duration {
    pause * (75 + hash(name) % 51) / 100
}

/// A number for a name, the same on every machine.
fn hash(name: &str) -> u32 {
    name.bytes()
        .fold(7, |hash: u32, byte| hash.wrapping_mul(31) ^ u32::from(byte))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::atomic::AtomicU64;

    use axum::Router;
    use axum::extract::Path;
    use axum::response::{IntoResponse, Response};
    use axum::routing::{delete, post};
    use axum::{Json, http};
    use kvgate_sim::workload::Spread;

    use super::super::serve::Door;
    use super::super::{Behaviour, FakeFleet, FleetSpec};
    use super::*;

    /// How the stub answers acquires: so many times `wait`, then so many times that it drains, then
    /// a lease of this life.
    struct Stub {
        waits: AtomicU64,
        drains: AtomicU64,
        closes: AtomicU64,
        ttl_s: f64,
    }

    fn one_less(count: &AtomicU64) -> bool {
        let order = Ordering::SeqCst;
        let before = count.fetch_update(order, order, |left| left.checked_sub(1));
        before.is_ok()
    }

    fn problem(status: u16, code: &str) -> Behaviour {
        Behaviour::Status(status, json!({"code": code, "status": status}).to_string())
    }

    async fn stub(waits: u64, ttl_s: f64, stop: &CancellationToken) -> Arc<Door> {
        draining_stub(waits, 0, ttl_s, stop).await
    }

    async fn draining_stub(
        waits: u64,
        drains: u64,
        ttl_s: f64,
        stop: &CancellationToken,
    ) -> Arc<Door> {
        let stub = Arc::new(Stub {
            waits: AtomicU64::new(waits),
            drains: AtomicU64::new(drains),
            closes: AtomicU64::new(0),
            ttl_s,
        });
        let closing = Arc::clone(&stub);
        let acquire = move |Json(body): Json<Value>| {
            let stub = Arc::clone(&stub);
            async move { acquired(&stub, &body) }
        };
        let app = Router::new()
            .route("/v1/leases", post(acquire))
            .route(
                "/v1/leases/{id}/release",
                post(|| async { Json(json!({"outcome": "released"})) }),
            )
            .route(
                "/v1/leases/{id}/renew",
                post(|Path(id): Path<String>| async move { Json(json!({"lease_id": id})) }),
            )
            .route(
                "/v1/tickets/{id}",
                delete(|| async { Json(json!({"outcome": "unknown"})) }),
            )
            .route(
                "/v1/sessions/{id}/close",
                post(move || {
                    closing.closes.fetch_add(1, Ordering::SeqCst);
                    async { (http::StatusCode::ACCEPTED, Json(json!({"state": "done"}))) }
                }),
            );
        Door::open(app, stop.clone()).await.unwrap()
    }

    fn acquired(stub: &Stub, body: &Value) -> Response {
        if one_less(&stub.waits) {
            let answer = json!({
                "action": "wait", "reason": "capacity_exhausted", "ticket_id": body["ticket_id"],
                "position": 1, "bypass_in_s": 30.0, "poll_after_s": 0.0, "claim_grace_s": 10.0,
            });
            return (http::StatusCode::ACCEPTED, Json(answer)).into_response();
        }
        if one_less(&stub.drains) {
            let answer = json!({"code": "draining", "status": 503});
            return (http::StatusCode::SERVICE_UNAVAILABLE, Json(answer)).into_response();
        }
        let id = format!("{}:{}", body["session_id"].as_str().unwrap(), stub.ttl_s);
        Json(json!({
            "action": "admit", "reason": "capacity_available", "lease_id": id,
            "ttl_s": stub.ttl_s, "repeated": false,
        "session_reopened": stub.closes.load(Ordering::SeqCst) > 0,
        }))
        .into_response()
    }

    /// Short sessions, as fast as the machine goes.
    fn spec(coordinator: &Door, fleet: &FakeFleet, sessions: u64) -> AgentsSpec {
        AgentsSpec {
            slots: 4,
            sessions_max: Some(sessions),
            speed: 1_000.0,
            warm: false,
            gives_up_one_in: 0,
            reuses_one_in: 0,
            workload: WorkloadSpec {
                turns: Spread::new(2.0, 0.1, 2, 2),
                dies_one_in: 0,
                eval_one_in: 0,
                protected_one_in: 0,
                wave_one_in: 0,
                ..WorkloadSpec::default()
            },
            ..AgentsSpec::demo(&coordinator.url(), &fleet.router_url())
        }
    }

    async fn fleet() -> FakeFleet {
        let mut spec = FleetSpec::uniform(2, 400_000);
        spec.speed = 1_000.0;
        FakeFleet::start(spec).await.unwrap()
    }

    #[tokio::test]
    async fn a_turn_acquires_generates_and_releases_and_a_session_closes() {
        let stop = CancellationToken::new();
        let _guard = stop.clone().drop_guard();
        let gate = stub(3, 600.0, &stop).await;
        let fleet = fleet().await;
        let mut six = spec(&gate, &fleet, 6);
        six.run = "run-7".to_owned();
        let agents = Agents::start(six, &stop).unwrap();
        agents.finished().await;
        let tally = agents.tally();
        assert_eq!(tally.sessions, 6);
        assert_eq!(
            (tally.turns, tally.admitted, tally.released),
            (12, 12, 12),
            "{tally:?}"
        );
        assert_eq!((tally.waited, tally.closed, tally.alone), (3, 6, 0));
        assert_eq!(tally.failed, 0);

        let requests = gate.requests();
        let acquires: Vec<Value> = requests
            .iter()
            .filter(|request| request.path == "/v1/leases")
            .map(super::super::RecordedRequest::json)
            .collect();
        assert_eq!(acquires.len(), 12 + 3, "a wait is asked again");
        let first = &acquires[0];
        let names: Vec<&String> = first.as_object().unwrap().keys().collect();
        assert_eq!(
            names,
            [
                "client",
                "max_new_tokens",
                "prompt_tokens",
                "protected",
                "request_id",
                "scope",
                "session_id",
                "ticket_id",
                "ttl_s",
                "wait_s"
            ]
        );
        let release = requests
            .iter()
            .find(|request| request.path.ends_with("/release"))
            .unwrap();
        assert!(
            release.path.starts_with("/v1/leases/run%2D7%2Es%2D1%2D"),
            "ids are percent-encoded: {}",
            release.path
        );
        let usage = release.json();
        assert!(usage["completion_tokens"].as_u64().unwrap() > 0);
        let engine = usage["engine"].as_str().unwrap();
        assert!(fleet.engines().iter().any(|one| one.url() == engine));

        let generates = fleet.router().requests();
        let rids: Vec<Value> = generates
            .iter()
            .filter(|request| request.path == "/generate")
            .map(|request| request.json()["rid"].clone())
            .collect();
        assert_eq!(rids.len(), 12);
        assert!(rids.iter().all(|rid| rid.as_str().unwrap().len() == 24));
        assert!(
            acquires
                .iter()
                .all(|acquire| rids.contains(&acquire["request_id"]))
        );
    }

    #[tokio::test]
    async fn long_work_is_renewed_until_it_ends() {
        let stop = CancellationToken::new();
        let _guard = stop.clone().drop_guard();
        let gate = stub(0, 0.03, &stop).await;
        let fleet = fleet().await;
        fleet.router().behave("/generate", Behaviour::Hang);
        let mut agents = Agents::start(spec(&gate, &fleet, 1), &stop).unwrap();
        gate.wait_for(|requests| {
            let renewals = requests.iter().filter(|one| one.path.ends_with("/renew"));
            renewals.count() >= 3
        })
        .await;
        let tally = agents.wait_for(|tally| tally.renewed >= 3).await;
        assert_eq!((tally.admitted, tally.released), (1, 0));
        let last = agents.stop().await;
        assert_eq!(
            last.released, 0,
            "a stopped agent leaves its lease to the TTL"
        );
    }

    #[tokio::test]
    async fn odd_answers_fail_open_and_cancel_the_ticket() {
        for behaviour in [
            problem(500, "internal"),
            problem(422, "invalid_request"),
            problem(503, "overloaded"),
            Behaviour::Raw(b"{\"action\":\"admit\"}".to_vec()),
            Behaviour::Raw(b"no json".to_vec()),
            Behaviour::Cut,
            Behaviour::CutMidBody,
        ] {
            let stop = CancellationToken::new();
            let _guard = stop.clone().drop_guard();
            let gate = stub(0, 600.0, &stop).await;
            gate.behave("/v1/leases", behaviour.clone(), None);
            let fleet = fleet().await;
            let agents = Agents::start(spec(&gate, &fleet, 2), &stop).unwrap();
            agents.finished().await;
            let tally = agents.tally();
            assert_eq!(
                (tally.turns, tally.alone),
                (4, 4),
                "{behaviour:?}: {tally:?}"
            );
            assert_eq!((tally.failed, tally.admitted), (0, 0), "{behaviour:?}");
            let cancels = gate.requests();
            let cancels = cancels.iter().filter(|one| one.method == "DELETE").count();
            assert_eq!(cancels, 4, "{behaviour:?}: the server may have granted it");
        }
    }

    #[tokio::test]
    async fn a_gate_that_is_gone_costs_nobody_a_turn() {
        let stop = CancellationToken::new();
        let _guard = stop.clone().drop_guard();
        let gate = stub(0, 600.0, &stop).await;
        gate.shut().await;
        let fleet = fleet().await;
        let mut agents = Agents::start(spec(&gate, &fleet, 8), &stop).unwrap();
        let tally = agents.wait_for(|tally| tally.sessions == 8).await;
        assert_eq!((tally.turns, tally.alone), (16, 16), "{tally:?}");
        let asked = gate.requests().len();
        assert_eq!(asked, 0);
        agents.stop().await;
    }

    #[tokio::test]
    async fn a_waiting_ticket_comes_back_when_the_gate_restarts() {
        let stop = CancellationToken::new();
        let _guard = stop.clone().drop_guard();
        let gate = draining_stub(1, 2, 600.0, &stop).await;
        let fleet = fleet().await;
        let mut one = spec(&gate, &fleet, 1);
        one.workload.turns = Spread::new(1.0, 0.1, 1, 1);
        let agents = Agents::start(one, &stop).unwrap();
        agents.finished().await;
        let tally = agents.tally();
        assert_eq!(
            (tally.waited, tally.admitted, tally.alone),
            (1, 1, 0),
            "{tally:?}"
        );
        let requests = gate.requests();
        let asks = requests.iter().filter(|one| one.path == "/v1/leases");
        assert_eq!(asks.count(), 4, "one wait, two silences, one grant");
    }

    #[tokio::test]
    async fn local_bypasses_are_reported_with_the_next_call_that_gets_through() {
        let stop = CancellationToken::new();
        let _guard = stop.clone().drop_guard();
        let gate = stub(0, 600.0, &stop).await;
        gate.behave("/v1/leases", problem(500, "internal"), Some(1));
        let fleet = fleet().await;
        let mut one = spec(&gate, &fleet, 1);
        one.slots = 1;
        let agents = Agents::start(one, &stop).unwrap();
        agents.finished().await;
        let reports: Vec<Value> = gate
            .requests()
            .iter()
            .filter(|request| request.path == "/v1/leases")
            .map(|request| request.json()["local_bypasses"].clone())
            .collect();
        assert_eq!(reports, [Value::Null, json!({"unreachable": 1})]);
    }

    #[tokio::test]
    async fn a_session_that_is_given_up_is_closed_with_abort_and_then_released() {
        let stop = CancellationToken::new();
        let _guard = stop.clone().drop_guard();
        let gate = stub(0, 600.0, &stop).await;
        let fleet = fleet().await;
        // The request ends when the fleet's router lets it, as an abort would end it.
        fleet.router().behave("/generate", Behaviour::Hold);
        let mut one = spec(&gate, &fleet, 1);
        one.gives_up_one_in = 1;
        one.workload.turns = Spread::new(1.0, 0.1, 1, 1);
        let mut agents = Agents::start(one, &stop).unwrap();
        let tally = agents.wait_for(|tally| tally.closed == 1).await;
        assert_eq!((tally.given_up, tally.released, tally.turns), (1, 0, 0));
        fleet.router().behave("/generate", Behaviour::Normal);
        agents.finished().await;
        let tally = agents.tally();
        assert_eq!((tally.turns, tally.released, tally.failed), (1, 1, 0));
        assert_eq!((tally.sessions, tally.closed), (0, 1), "{tally:?}");
        let calls = gate.requests();
        let close = calls.iter().find(|one| one.path.ends_with("/close"));
        let body = json!({"mode": "abort", "reason": "dropped"});
        assert_eq!(close.unwrap().json(), body);
    }

    #[tokio::test]
    async fn a_session_may_come_back_under_its_id_with_other_tickets() {
        let stop = CancellationToken::new();
        let _guard = stop.clone().drop_guard();
        let gate = stub(0, 600.0, &stop).await;
        let fleet = fleet().await;
        let mut one = spec(&gate, &fleet, 1);
        one.reuses_one_in = 1;
        let agents = Agents::start(one, &stop).unwrap();
        agents.finished().await;
        let tally = agents.tally();
        assert_eq!((tally.sessions, tally.closed, tally.turns), (2, 2, 4));
        assert_eq!(tally.reopened, 2, "the stub says so after a close");
        let acquires: Vec<Value> = gate
            .requests()
            .iter()
            .filter(|request| request.path == "/v1/leases")
            .map(super::super::RecordedRequest::json)
            .collect();
        let different = |field: &str| {
            let values: BTreeSet<&str> = acquires
                .iter()
                .filter_map(|one| one[field].as_str())
                .collect();
            values.len()
        };
        assert_eq!(different("session_id"), 1);
        assert_eq!((different("ticket_id"), different("request_id")), (4, 4));
        let lengths: BTreeSet<usize> = acquires
            .iter()
            .map(|one| one["request_id"].as_str().unwrap().len())
            .collect();
        assert_eq!(lengths, BTreeSet::from([24]));
    }

    #[tokio::test]
    async fn a_dead_client_neither_releases_nor_closes() {
        let stop = CancellationToken::new();
        let _guard = stop.clone().drop_guard();
        let gate = stub(0, 600.0, &stop).await;
        let fleet = fleet().await;
        fleet.router().behave("/generate", Behaviour::Hang);
        let mut one = spec(&gate, &fleet, 3);
        one.workload.dies_one_in = 1;
        let agents = Agents::start(one, &stop).unwrap();
        agents.finished().await;
        let tally = agents.tally();
        assert_eq!((tally.died, tally.admitted), (3, 3), "{tally:?}");
        assert_eq!((tally.released, tally.closed, tally.sessions), (0, 0, 0));
        assert!(gate.requests().iter().all(|one| one.path == "/v1/leases"));
    }

    #[test]
    fn a_warm_start_leaves_each_session_a_turn() {
        let workload = Workload::new(WorkloadSpec::default()).unwrap();
        let mut left_out = 0;
        for slot in 0..200 {
            let cold = workload.session(slot);
            let mut warm = cold.clone();
            warm_up(&mut warm, slot);
            assert!(cold.turns.ends_with(&warm.turns) && !warm.turns.is_empty());
            left_out += cold.turns.len() - warm.turns.len();
        }
        assert!(left_out > 200, "{left_out}");
    }

    #[test]
    fn times_of_answers_are_taken_with_care() {
        assert_eq!(seconds(1.5), Duration::from_millis(1_500));
        assert_eq!(seconds(-1.0), Duration::ZERO);
        assert_eq!(seconds(f64::NAN), Duration::from_secs(86_400));
        assert_eq!(seconds(1e300), Duration::from_secs(86_400));
        let pause = Duration::from_secs(1);
        for name in ["a", "b", "rid-7"] {
            let spread = jittered(pause, name);
            assert!(spread >= pause * 3 / 4 && spread <= pause * 5 / 4);
        }
    }
}
