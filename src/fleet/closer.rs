//! The closer: makes the calls to engines that the core wants made, and hands in what they came to
//! (CLO4).
//!
//! ```text
//!  Gate::take_calls ──> closer ──┬─ POST /close_session ──> engine
//!                                └─ POST /abort_request ──> engine
//!  Gate::called <── outcomes, in groups
//! ```
//!
//! Promises: a call goes directly to the engine's base address and never to a router; an engine that
//! hangs costs its own calls their time-out and nobody else's; keys and bodies are never logged. What
//! is sent, to whom, how often and how many at once is decided in the core. What is lost here, by a
//! stop or a crash, is sent again at the next start.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kvgate_core::close::{CallFailure, CallId, CallResult, CallWhat, EngineCall};
use kvgate_core::ids::EngineId;
use reqwest::Client;
use serde_json::json;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::address::{BaseUrl, Scheme};
use super::fetch::{self, Ask, FetchError};
use super::networks::Networks;
use super::secret::Secret;
use crate::gate::Gate;

/// Largest body of an answer, in bytes after unpacking (CAP2).
pub const ANSWER_BYTES_MAX: usize = 64 << 10;
/// Letters that are kept of the text of an answer that is not 2xx (section 10).
pub const ANSWER_LETTERS_MAX: usize = 200;
/// Calls at once to all engines together. The core lets 16 go to one engine, so 64 engines can be
/// busy at once; each call holds a file, beside those of 20,000 waiting calls.
pub const CALLS_AT_ONCE_MAX: usize = 1_024;
/// Outcomes that come within this time of the last group are handed in together. Each group is a
/// turn of the writer with a sync of the disk: a flood of closes costs 50 of them a second at most,
/// whatever the number of engines, and an engine that answers at once still takes 16 calls a turn,
/// 800 a second. A lone close does not wait.
pub const GROUP_WITHIN: Duration = Duration::from_millis(20);
/// Outcomes of one group, so that no turn grows without an end.
const GROUP_MAX: usize = 1_024;
/// How long a stop waits for the outcomes of calls under way. Those that come later are lost, and
/// their calls are made again at the next start.
pub const STOP_WITHIN: Duration = Duration::from_secs(1);

/// How engines are called.
#[derive(Clone, Debug)]
pub struct CloserConfig {
    /// Address of the router, which is never called.
    pub router: Option<EngineId>,
    /// Which addresses of engines may be contacted.
    pub networks: Networks,
    /// Bearer key for closes.
    pub engine_key: Option<Secret>,
    /// Bearer key for aborts, which some engines ask for in place of the other one; `None`: the same.
    pub admin_key: Option<Secret>,
    /// For a whole call; default 5 s.
    pub timeout: Duration,
}

impl Default for CloserConfig {
    fn default() -> Self {
        Self {
            router: None,
            networks: Networks::default(),
            engine_key: None,
            admin_key: None,
            timeout: Duration::from_secs(5),
        }
    }
}

/// The HTTP client cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP client for session closes cannot be set up")]
pub struct CloserError(#[from] reqwest::Error);

/// A running closer. Dropped, it stops at once.
#[derive(Debug)]
pub struct Closer {
    stop: CancellationToken,
    task: AbortOnDropHandle<()>,
    routers: watch::Sender<BTreeSet<EngineId>>,
}

impl Closer {
    /// Takes over the gate's calls. The process must have installed a rustls provider before.
    ///
    /// # Errors
    /// When the HTTP client cannot be made.
    pub fn start(config: CloserConfig, gate: Gate) -> Result<Self, CloserError> {
        let networks = Arc::new(config.networks);
        let (routers, known_routers) = watch::channel(BTreeSet::new());
        let caller = Caller {
            client: fetch::calls_client(Arc::clone(&networks))?,
            networks,
            router: config.router,
            routers: known_routers,
            admin_key: config.admin_key.or_else(|| config.engine_key.clone()),
            engine_key: config.engine_key,
            timeout: config.timeout,
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(run(Arc::new(caller), gate, stop.clone()));
        Ok(Self {
            stop,
            task: AbortOnDropHandle::new(task),
            routers,
        })
    }

    /// Who tells which addresses answer as routers: these are not called either.
    #[must_use]
    pub fn routers(&self) -> watch::Sender<BTreeSet<EngineId>> {
        self.routers.clone()
    }

    /// Begins no call any more, and returns when the calls under way have ended and their outcomes
    /// are handed in, or after [`STOP_WITHIN`].
    pub async fn stop(self) {
        self.stop.cancel();
        // A task that was cancelled with its runtime has nothing left to hand in.
        let _ended = self.task.await;
    }
}

async fn run(caller: Arc<Caller>, gate: Gate, stop: CancellationToken) {
    // Somebody else makes the calls of this gate.
    let Some(calls) = gate.take_calls() else {
        return;
    };
    let mut calls = Calls {
        caller,
        waiting: calls,
        under_way: JoinSet::new(),
        outcomes: Outcomes::new(Instant::now()),
        gate,
    };
    while calls.go_on(&stop).await {}
    calls.end().await;
}

/// Calls under way, and outcomes that were not handed in yet.
struct Calls {
    caller: Arc<Caller>,
    waiting: UnboundedReceiver<EngineCall>,
    under_way: JoinSet<(CallId, CallResult)>,
    outcomes: Outcomes,
    gate: Gate,
}

impl Calls {
    /// The next thing that happens. False when the closer is to end.
    async fn go_on(&mut self, stop: &CancellationToken) -> bool {
        let has_room = self.under_way.len() < CALLS_AT_ONCE_MAX;
        let due = self.outcomes.due();
        let group_is_due = async {
            match due {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => return false,
            call = self.waiting.recv(), if has_room => match call {
                Some(call) => self.begin(call),
                None => return false,
            },
            Some(ended) = self.under_way.join_next() => {
                self.outcomes.add(ended);
                while let Some(ended) = self.under_way.try_join_next() {
                    self.outcomes.add(ended);
                }
            }
            () = group_is_due => {}
        }
        let now = Instant::now();
        if self.outcomes.due().is_some_and(|at| at <= now) {
            self.hand_in(now);
        }
        true
    }

    fn begin(&mut self, call: EngineCall) {
        let caller = Arc::clone(&self.caller);
        self.under_way
            .spawn(async move { (call.id, caller.call(&call).await) });
    }

    fn hand_in(&mut self, now: Instant) {
        while let Some(group) = self.outcomes.take(now) {
            self.gate.called(group);
        }
    }

    /// Calls under way get a moment; those that wait are left to the next start.
    async fn end(mut self) {
        let rest = async {
            while let Some(ended) = self.under_way.join_next().await {
                self.outcomes.add(ended);
            }
        };
        if timeout(STOP_WITHIN, rest).await.is_err() {
            tracing::info!(
                calls = self.under_way.len(),
                "calls to engines did not end in time; the next start makes them again"
            );
        }
        self.hand_in(Instant::now());
    }
}

/// Outcomes until they are handed in.
#[derive(Debug)]
struct Outcomes {
    ended: VecDeque<(CallId, CallResult)>,
    /// When the next group may go.
    next_at: Instant,
}

impl Outcomes {
    const fn new(now: Instant) -> Self {
        Self {
            ended: VecDeque::new(),
            next_at: now,
        }
    }

    fn add(&mut self, ended: Result<(CallId, CallResult), JoinError>) {
        match ended {
            Ok(ended) => self.ended.push_back(ended),
            Err(error) => tracing::error!(%error, "a call to an engine ended in a fault of ours"),
        }
    }

    /// When what is there is to be handed in: a time that is over when the last group is a while ago.
    fn due(&self) -> Option<Instant> {
        (!self.ended.is_empty()).then_some(self.next_at)
    }

    fn take(&mut self, now: Instant) -> Option<Vec<(CallId, CallResult)>> {
        if self.ended.is_empty() {
            return None;
        }
        self.next_at = now + GROUP_WITHIN;
        let count = self.ended.len().min(GROUP_MAX);
        Some(self.ended.drain(..count).collect())
    }
}

/// How a call is made: the same for all of them.
struct Caller {
    client: Client,
    networks: Arc<Networks>,
    router: Option<EngineId>,
    routers: watch::Receiver<BTreeSet<EngineId>>,
    engine_key: Option<Secret>,
    admin_key: Option<Secret>,
    timeout: Duration,
}

impl Caller {
    async fn call(&self, call: &EngineCall) -> CallResult {
        let Some(base) = self.allowed(&call.engine) else {
            return CallResult::Failed(CallFailure::NotAllowed);
        };
        let (path, body, key) = match &call.what {
            CallWhat::Close(session) => (
                "/close_session",
                json!({"session_id": session.as_str()}),
                self.engine_key.as_ref(),
            ),
            CallWhat::Abort(request_id) => (
                "/abort_request",
                json!({"rid": request_id.as_str()}),
                self.admin_key.as_ref(),
            ),
        };
        let url = base.endpoint(path);
        let ask = Ask {
            url: &url,
            key,
            accept: "application/json",
        };
        let answer = fetch::post(&self.client, ask, body.to_string(), ANSWER_BYTES_MAX);
        let failure = match timeout(self.timeout, answer).await {
            Ok(Ok((code, body))) => {
                let text = (!(200..300).contains(&code)).then(|| shown(&body, key));
                let text = text.filter(|text| !text.is_empty());
                return CallResult::Status {
                    code,
                    text: text.map(Arc::from),
                };
            }
            Ok(Err(FetchError::NotAllowed(_))) => CallFailure::NotAllowed,
            // The engine is there; what it sends cannot be read within the bound.
            Ok(Err(FetchError::Unreadable)) => CallFailure::TooLarge,
            Ok(Err(FetchError::Refused(_) | FetchError::Status { .. })) => CallFailure::Refused,
            Err(_) => CallFailure::Timeout,
        };
        tracing::debug!(
            engine = call.engine.as_str(),
            path,
            ?failure,
            "a call failed"
        );
        CallResult::Failed(failure)
    }

    /// The address to call. Members may be older than the settings, so the rules for addresses are
    /// looked at again for each call.
    fn allowed(&self, engine: &EngineId) -> Option<BaseUrl> {
        let base = BaseUrl::parse(engine.as_str()).ok()?;
        let base = (base.scheme() != Scheme::Grpc).then_some(base)?;
        let outside = base.ip().is_some_and(|ip| !self.networks.allow(ip));
        let is_router =
            self.router.as_ref() == Some(engine) || self.routers.borrow().contains(engine);
        (!outside && !is_router).then_some(base)
    }
}

/// The beginning of an answer's text, without control characters and without the key.
fn shown(body: &[u8], key: Option<&Secret>) -> String {
    let text = String::from_utf8_lossy(body);
    let text = match key {
        Some(key) => key.taken_out_of(&text),
        None => text.into_owned(),
    };
    let letters = text.trim().chars().filter(|letter| !letter.is_control());
    letters.take(ANSWER_LETTERS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use kvgate_core::ids::Term;

    use super::*;

    /// CLO6: a lone outcome is handed in at once; a flood of them in groups, each a while after the
    /// other and none without an end.
    #[test]
    fn clo6_outcomes_go_in_groups() {
        let mut number = 0;
        let mut ended = || {
            number += 1;
            let id = CallId {
                term: Term(1),
                number,
            };
            Ok((id, CallResult::Failed(CallFailure::Timeout)))
        };
        let start = Instant::now();
        let mut outcomes = Outcomes::new(start);
        assert_eq!(outcomes.due(), None);
        outcomes.add(ended());
        assert_eq!(outcomes.due(), Some(start));
        assert_eq!(outcomes.take(start).map(|group| group.len()), Some(1));
        assert_eq!((outcomes.take(start), outcomes.due()), (None, None));

        for _ in 0..GROUP_MAX + 3 {
            outcomes.add(ended());
        }
        let due = start + GROUP_WITHIN;
        assert_eq!(outcomes.due(), Some(due));
        let mut numbers = Vec::new();
        for size in [GROUP_MAX, 3] {
            let group = outcomes.take(due).unwrap();
            assert_eq!(group.len(), size);
            numbers.extend(group.iter().map(|(id, _)| id.number));
        }
        assert_eq!(numbers, (2..GROUP_MAX as u64 + 5).collect::<Vec<u64>>());
        outcomes.add(ended());
        assert_eq!(outcomes.due(), Some(due + GROUP_WITHIN));
    }

    /// CLO5: at most 200 letters of an engine's text, without control characters and keys.
    #[test]
    fn clo5_text_of_an_answer() {
        let key = Secret::new("key-1").unwrap();
        assert_eq!(
            shown(b" {\"detail\":\"\x1b[31mbad\n\tkey-1\"}\r\n", Some(&key)),
            "{\"detail\":\"[31mbad***\"}"
        );
        let long = "\u{e4}\n".repeat(5_000);
        assert_eq!(shown(long.as_bytes(), None), "\u{e4}".repeat(200));
        assert_eq!(shown(b"\xff\x00", None), "\u{fffd}");
        assert_eq!(shown(b"\n", Some(&key)), "");
    }
}
