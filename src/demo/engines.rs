//! A fake engine: the endpoints of SGLang that kvgate and the demo's agents use, over the model of
//! `kvgate-sim`, with gauges that a test may script in place of the model's.
//!
//! Promises: answers are shaped as recorded; an engine that restarts has a new start time, counters
//! from zero and an empty cache; a client that leaves aborts its request. Model time runs with the
//! tokio clock, times the speed of the fleet.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::{any, get, post};
use kvgate_core::units::Span;
use kvgate_sim::engine::{
    Counters, Engine, EngineSpec, FinishReason, Finished, Gauges, Request, SharedPrefix,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::serve::{Behaviour, Door, RecordedRequest, cut_answer, lock};
use super::shapes::{self, EngineFace, EngineVersion, RankGauges};

/// How often the model moves on.
const TICK: Duration = Duration::from_millis(20);
/// Model time between two reports of the gauges while requests decode, in milliseconds: 40 tokens.
const REPORT_BUSY_MS: u64 = 667;
/// The same of an engine without work.
const REPORT_IDLE_MS: u64 = 30_000;
/// Most model time of one tick in milliseconds, so that a suspended machine does not leap.
const TICK_MODEL_MS_MAX: u64 = 2_000;

/// One engine of a fleet.
#[derive(Clone, PartialEq, Debug)]
pub struct EngineSetup {
    /// The pool and the rates; what a close does is the version's.
    pub model: EngineSpec,
    /// Whose answers it imitates.
    pub version: EngineVersion,
    /// Name of the model in labels.
    pub model_name: String,
    /// Key that its API asks for.
    pub api_key: Option<String>,
    /// Key that aborts ask for in place of the API key.
    pub admin_key: Option<String>,
    /// Whether session close is enabled.
    pub session_close: bool,
    /// Whether `/metrics` is on.
    pub metrics: bool,
    /// Whether `/v1/loads` exists; not at a vLLM.
    pub loads: bool,
    /// Whether the gauges of `/metrics` keep their values until work refreshes them, or 30 s without
    /// work, as those of SGLang 0.5.15 do: a close is seen late in them.
    pub stale_gauges: bool,
}

impl EngineSetup {
    /// An engine with a pool of so many tokens, all features on, no keys.
    #[must_use]
    pub fn with_pool(pool_tokens: u64) -> Self {
        Self {
            model: EngineSpec {
                pool_tokens,
                ..EngineSpec::default()
            },
            version: EngineVersion::default(),
            model_name: "demo-model".to_owned(),
            api_key: None,
            admin_key: None,
            session_close: true,
            metrics: true,
            loads: true,
            stale_gauges: false,
        }
    }

    /// The same engine of another version.
    #[must_use]
    pub fn of(self, version: EngineVersion) -> Self {
        Self { version, ..self }
    }
}

/// Gauges in place of the model's. `None` leaves the model's value.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Script {
    /// Values of the only rank.
    pub rank: RankGauges,
    /// Whole rows, one per DP rank, in place of everything else.
    pub ranks: Option<Vec<RankGauges>>,
    /// TP ranks that repeat the constants in `/metrics`; 0 counts as 1.
    pub tp: u32,
    /// Prompt and generation tokens since the start.
    pub counters: Option<(u64, u64)>,
}

/// A request under way, from the shape that the demo's agents send.
#[derive(Deserialize)]
struct GenerateBody {
    rid: Option<String>,
    session_id: Option<String>,
    /// Length of the prompt in place of the prompt itself.
    prompt_tokens: Option<u64>,
    input_ids: Option<Vec<u32>>,
    #[serde(default)]
    sampling_params: SamplingParams,
    /// What the model will write, which a real engine finds out by itself.
    #[serde(default)]
    demo: DemoFields,
}

#[derive(Deserialize, Default)]
struct SamplingParams {
    max_new_tokens: Option<u64>,
}

#[derive(Deserialize, Default)]
struct DemoFields {
    decode_tokens: Option<u64>,
    prefix_id: Option<String>,
    prefix_tokens: Option<u64>,
}

struct Model {
    engine: Engine,
    /// What `/metrics` shows when its gauges are stale.
    reported: Report,
    /// Model time since the start of this incarnation.
    passed_ms: u64,
    waiting: BTreeMap<String, oneshot::Sender<Finished>>,
    /// Start of this incarnation in milliseconds since the Unix epoch.
    started_ms: u64,
    rids: u64,
}

/// The gauges at one moment.
#[derive(Clone, Copy, Default)]
struct Report {
    gauges: Gauges,
    at_ms: u64,
    /// Prompt tokens that were computed or found by then: more of them are another prefill.
    prefilled: u64,
}

impl Model {
    fn new(setup: &EngineSetup, started_ms: u64) -> Self {
        let engine = Engine::new(EngineSpec {
            family: setup.version.family(),
            ..setup.model
        });
        Self {
            reported: Report {
                gauges: engine.gauges(),
                ..Report::default()
            },
            engine,
            passed_ms: 0,
            waiting: BTreeMap::new(),
            started_ms,
            rids: 0,
        }
    }

    fn step(&mut self, span: Span) {
        let finished = self.engine.step(span);
        self.passed_ms = self.passed_ms.saturating_add(span.millis());
        let counters = self.engine.counters();
        let now = Report {
            gauges: self.engine.gauges(),
            at_ms: self.passed_ms,
            prefilled: counters.prefill_compute + counters.prefill_cache,
        };
        let every_ms = if now.gauges.running > 0 {
            REPORT_BUSY_MS
        } else {
            REPORT_IDLE_MS
        };
        let last = self.reported;
        if now.prefilled != last.prefilled || now.at_ms - last.at_ms >= every_ms {
            self.reported = now;
        }
        for one in finished {
            if let Some(waiting) = self.waiting.remove(&*one.rid) {
                // Nobody listens when the client left just now.
                let _left = waiting.send(one);
            }
        }
    }
}

struct Core {
    setup: EngineSetup,
    /// Milliseconds since the Unix epoch when the fleet started, and that moment on our clock.
    wall_start_ms: u64,
    began: Instant,
    model: Mutex<Model>,
    script: Mutex<Script>,
    /// Sent after every change of the model.
    changes: watch::Sender<()>,
}

impl Core {
    fn now_ms(&self) -> u64 {
        let elapsed = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.wall_start_ms.saturating_add(elapsed)
    }

    fn ranks(&self, gauges: &Gauges, script: &Script) -> Vec<RankGauges> {
        if let Some(ranks) = &script.ranks {
            return ranks.clone();
        }
        let set = &script.rank;
        let capacity = set.capacity.unwrap_or(gauges.capacity);
        let by_usage = set
            .usage
            .filter(|usage| usage.is_finite() && *usage >= 0.0)
            .map(|usage| (usage * capacity as f64).round() as u64);
        let used = set.used.or(by_usage).unwrap_or(gauges.used);
        let evictable = set
            .evictable
            .unwrap_or_else(|| gauges.evictable.min(capacity.saturating_sub(used)));
        let available = set
            .available
            .unwrap_or_else(|| capacity.saturating_sub(used).saturating_sub(evictable));
        let usage = set
            .usage
            .unwrap_or_else(|| used as f64 / capacity.max(1) as f64);
        vec![RankGauges {
            capacity: Some(capacity),
            usage: Some(usage),
            used: Some(used),
            evictable: Some(evictable),
            available: Some(available),
            running: Some(set.running.unwrap_or(gauges.running)),
            queued: Some(set.queued.unwrap_or(gauges.queued)),
            queued_tokens: Some(set.queued_tokens.unwrap_or(gauges.queued_tokens)),
        }]
    }

    fn with_face<T>(&self, stale: bool, write: impl FnOnce(&EngineFace<'_>) -> T) -> T {
        let script = lock(&self.script).clone();
        let (gauges, mut counters, started_ms) = {
            let model = lock(&self.model);
            let engine = &model.engine;
            let gauges = if stale {
                model.reported.gauges
            } else {
                engine.gauges()
            };
            (gauges, engine.counters(), model.started_ms)
        };
        if let Some((prompt, generation)) = script.counters {
            counters = Counters {
                prompt_tokens: prompt,
                generation_tokens: generation,
                ..counters
            };
        }
        let ranks = self.ranks(&gauges, &script);
        write(&EngineFace {
            version: self.setup.version,
            model_name: &self.setup.model_name,
            now_ms: self.now_ms(),
            started_ms,
            ranks: &ranks,
            tp: script.tp.max(1),
            counters,
            session_close: self.setup.session_close,
            metrics: self.setup.metrics,
            running_max: u64::try_from(self.setup.model.running_max).unwrap_or(u64::MAX),
        })
    }

    fn allows(&self, headers: &HeaderMap, key: Option<&String>) -> bool {
        let Some(key) = key else {
            return true;
        };
        let expected = format!("Bearer {key}");
        headers
            .get(header::AUTHORIZATION)
            .is_some_and(|given| given.as_bytes() == expected.as_bytes())
    }

    /// Moves the model on and hands finished requests to those who wait for them.
    fn step(&self, span: Span) {
        lock(&self.model).step(span);
        self.changes.send_replace(());
    }

    fn abort(&self, rid: &str) {
        let mut model = lock(&self.model);
        model.engine.abort(rid);
        // What was queued has ended already.
        model.step(Span::ZERO);
        drop(model);
        self.changes.send_replace(());
    }
}

/// The handle of a fake engine.
#[derive(Clone)]
pub struct FakeEngine {
    core: Arc<Core>,
    door: Arc<Door>,
}

impl FakeEngine {
    pub(super) async fn start(
        setup: EngineSetup,
        speed: f64,
        wall_start_ms: u64,
        stop: &CancellationToken,
    ) -> io::Result<Self> {
        let core = Arc::new(Core {
            wall_start_ms,
            began: Instant::now(),
            model: Mutex::new(Model::new(&setup, wall_start_ms)),
            script: Mutex::default(),
            changes: watch::Sender::new(()),
            setup,
        });
        let door = Door::open(routes(Arc::clone(&core)), stop.clone()).await?;
        tokio::spawn(run_model(Arc::clone(&core), speed, stop.clone()));
        Ok(Self { core, door })
    }

    /// Its base address, `http://127.0.0.1:port`; the same for its whole life.
    #[must_use]
    pub fn url(&self) -> String {
        self.door.url()
    }

    /// Shows a pool of so many tokens.
    pub fn set_capacity(&self, tokens: u64) {
        self.script(|script| script.rank.capacity = Some(tokens));
    }

    /// Shows this usage, 0 to 1, and as many used tokens.
    pub fn set_usage(&self, usage: f64) {
        self.script(|script| script.rank.usage = Some(usage));
    }

    /// Shows so many running requests.
    pub fn set_running(&self, requests: u64) {
        self.script(|script| script.rank.running = Some(requests));
    }

    /// Shows so many queued requests.
    pub fn set_queued(&self, requests: u64) {
        self.script(|script| script.rank.queued = Some(requests));
    }

    /// Shows so many evictable and available tokens.
    pub fn set_cache(&self, evictable: u64, available: u64) {
        self.script(|script| {
            script.rank.evictable = Some(evictable);
            script.rank.available = Some(available);
        });
    }

    /// Shows so many prompt and generation tokens since the start.
    pub fn set_counters(&self, prompt_tokens: u64, generation_tokens: u64) {
        self.script(|script| script.counters = Some((prompt_tokens, generation_tokens)));
    }

    /// Shows these rows, one per DP rank; an empty list is shown as it is.
    pub fn set_ranks(&self, ranks: Vec<RankGauges>) {
        self.script(|script| script.ranks = Some(ranks));
    }

    /// Changes the script in any way.
    pub fn script(&self, change: impl FnOnce(&mut Script)) {
        change(&mut lock(&self.core.script));
    }

    /// Shows the model's gauges again.
    pub fn unscript(&self) {
        *lock(&self.core.script) = Script::default();
    }

    /// The gauges of the model, whatever is shown.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        lock(&self.core.model).engine.gauges()
    }

    /// Waits until the gauges of the model meet `condition`, and returns them. Never times out.
    pub async fn wait_for_gauges(&self, mut condition: impl FnMut(&Gauges) -> bool) -> Gauges {
        let mut changes = self.core.changes.subscribe();
        loop {
            changes.borrow_and_update();
            let gauges = self.gauges();
            if condition(&gauges) || changes.changed().await.is_err() {
                return gauges;
            }
        }
    }

    /// From now on `path` behaves so (`*`: every path without a rule of its own).
    pub fn behave(&self, path: &str, behaviour: Behaviour) {
        self.door.behave(path, behaviour, None);
    }

    /// The next `times` requests to `path` behave so, then it is normal again.
    pub fn behave_times(&self, path: &str, times: u64, behaviour: Behaviour) {
        self.door.behave(path, behaviour, Some(times));
    }

    /// The next requests to `path` meet one behaviour each, in this order; then it is normal again.
    pub fn behave_in_turn(&self, path: &str, behaviours: Vec<Behaviour>) {
        self.door.behave_in_turn(path, behaviours);
    }

    /// Most requests to `path` that were under way at the same time.
    #[must_use]
    pub fn peak(&self, path: &str) -> usize {
        self.door.peak(path)
    }

    /// The session ids of the closes that came in, whatever they were answered, the oldest first.
    #[must_use]
    pub fn closes(&self) -> Vec<String> {
        named(&self.door.requests(), "/close_session", "session_id")
    }

    /// The request ids of the aborts that came in, likewise.
    #[must_use]
    pub fn aborts(&self) -> Vec<String> {
        named(&self.door.requests(), "/abort_request", "rid")
    }

    /// Waits until `count` closes came in, and returns their session ids. Never times out.
    pub async fn wait_for_closes(&self, count: usize) -> Vec<String> {
        let path = "/close_session";
        let closes = self
            .door
            .wait_for(|requests| requests.iter().filter(|one| one.path == path).count() >= count);
        named(&closes.await, path, "session_id")
    }

    /// A new incarnation at the same address: connections are cut, requests lost, cache and counters
    /// empty, the start time new. Scripted gauges stay, scripted counters go. A stopped engine stays
    /// stopped.
    ///
    /// # Errors
    /// The address cannot be taken again.
    pub async fn restart(&self) -> io::Result<()> {
        let listened = self.door.is_open().await;
        self.door.shut().await;
        self.forget();
        if listened {
            self.door.start().await?;
        }
        Ok(())
    }

    /// Stops listening and cuts every connection: refused from now on. The incarnation stays, as
    /// when only the network is gone; call [`FakeEngine::restart`] meanwhile for a new one.
    pub async fn stop(&self) {
        self.door.shut().await;
    }

    /// Listens at the same address again.
    ///
    /// # Errors
    /// The address cannot be taken again.
    pub async fn start_again(&self) -> io::Result<()> {
        self.door.start().await
    }

    /// The requests so far, the oldest first (the last 16,384).
    #[must_use]
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.door.requests()
    }

    /// Waits until the recorded requests meet `condition`, and returns them. Never times out.
    pub async fn wait_for(
        &self,
        condition: impl FnMut(&[RecordedRequest]) -> bool,
    ) -> Vec<RecordedRequest> {
        self.door.wait_for(condition).await
    }

    /// Whether it listens.
    pub async fn is_up(&self) -> bool {
        self.door.is_open().await
    }

    fn forget(&self) {
        let now_ms = self.core.now_ms();
        let mut model = lock(&self.core.model);
        let started_ms = now_ms.max(model.started_ms.saturating_add(1));
        // Those who wait for an answer of the old one get none.
        *model = Model {
            rids: model.rids,
            ..Model::new(&self.core.setup, started_ms)
        };
        drop(model);
        self.script(|script| script.counters = None);
        self.core.changes.send_replace(());
    }
}

/// One text field of the bodies that came to `path`.
fn named(requests: &[RecordedRequest], path: &str, field: &str) -> Vec<String> {
    requests
        .iter()
        .filter(|request| request.path == path)
        .filter_map(|request| request.json().get(field)?.as_str().map(str::to_owned))
        .collect()
}

async fn run_model(core: Arc<Core>, speed: f64, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut last = Instant::now();
    let mut rest_ms = 0.0;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            now = ticks.tick() => {
                let passed = now.saturating_duration_since(last);
                last = now;
                let model_ms = passed.as_secs_f64() * 1_000.0 * speed.max(0.0) + rest_ms;
                let whole = model_ms.floor();
                rest_ms = model_ms - whole;
                core.step(Span::from_millis((whole as u64).min(TICK_MODEL_MS_MAX)));
            }
        }
    }
}

fn routes(core: Arc<Core>) -> Router {
    let both = Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics));
    let sglang = Router::new()
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/v1/loads", get(loads))
        .route("/generate", post(generate))
        .route("/close_session", get(close_session).post(close_session))
        .route("/abort_request", any(abort_request));
    let known = if core.setup.version.is_sglang() {
        both.merge(sglang)
    } else {
        both
    };
    known
        .method_not_allowed_fallback(method_not_allowed)
        .fallback(not_found)
        .with_state(core)
}

fn empty(status: StatusCode) -> Response<Body> {
    let mut answer = Response::new(Body::empty());
    *answer.status_mut() = status;
    answer
}

fn json_answer(status: StatusCode, value: &Value) -> Response<Body> {
    let mut answer = Response::new(Body::from(value.to_string()));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    answer
}

fn unauthorized() -> Response<Body> {
    json_answer(StatusCode::UNAUTHORIZED, &json!({"error": "Unauthorized"}))
}

fn bad_request(message: &str) -> Response<Body> {
    json_answer(
        StatusCode::BAD_REQUEST,
        &json!({"object": "error", "message": message, "type": "Bad Request", "param": null, "code": 400}),
    )
}

async fn method_not_allowed() -> Response<Body> {
    json_answer(
        StatusCode::METHOD_NOT_ALLOWED,
        &json!({"detail": "Method Not Allowed"}),
    )
}

async fn not_found() -> Response<Body> {
    json_answer(StatusCode::NOT_FOUND, &json!({"detail": "Not Found"}))
}

async fn health() -> StatusCode {
    StatusCode::OK
}

async fn server_info(State(core): State<Arc<Core>>, headers: HeaderMap) -> Response<Body> {
    if !core.allows(&headers, core.setup.api_key.as_ref()) {
        return unauthorized();
    }
    json_answer(StatusCode::OK, &core.with_face(false, shapes::server_info))
}

async fn loads(
    State(core): State<Arc<Core>>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response<Body> {
    if !core.allows(&headers, core.setup.api_key.as_ref()) {
        return unauthorized();
    }
    if !core.setup.loads {
        return not_found().await;
    }
    let include = query
        .as_deref()
        .unwrap_or_default()
        .split('&')
        .find_map(|pair| pair.strip_prefix("include="))
        .unwrap_or("core");
    if include.split(',').any(|name| name != "core") {
        return bad_request("this engine shows the core section only");
    }
    json_answer(StatusCode::OK, &core.with_face(false, shapes::loads))
}

async fn metrics(State(core): State<Arc<Core>>) -> Response<Body> {
    if !core.setup.metrics {
        return not_found().await;
    }
    let text = core.with_face(core.setup.stale_gauges, shapes::exposition);
    let kind = [(
        header::CONTENT_TYPE,
        "text/plain; version=0.0.4; charset=utf-8",
    )];
    (kind, text).into_response()
}

fn is_json(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"))
}

async fn close_session(
    State(core): State<Arc<Core>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    if !core.allows(&headers, core.setup.api_key.as_ref()) {
        return unauthorized();
    }
    let body: Option<Value> = serde_json::from_slice(&body)
        .ok()
        .filter(|_| is_json(&headers));
    let session = body.as_ref().and_then(|body| body.get("session_id"));
    let Some(session) = session.and_then(Value::as_str) else {
        return bad_request("1 validation error:\n  {'type': 'missing', 'loc': ('body',)}");
    };
    if core.setup.session_close {
        lock(&core.model).engine.close_session(session);
        core.changes.send_replace(());
    }
    empty(StatusCode::OK)
}

async fn abort_request(
    State(core): State<Arc<Core>>,
    method: Method,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    if method != Method::POST {
        let mut answer = method_not_allowed().await;
        let allow = HeaderValue::from_static("POST");
        answer.headers_mut().insert(header::ALLOW, allow);
        return answer;
    }
    let key = core.setup.admin_key.as_ref();
    if !core.allows(&headers, key.or(core.setup.api_key.as_ref())) {
        return unauthorized();
    }
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    if body.get("abort_all").and_then(Value::as_bool) == Some(true) {
        core.abort("");
    } else if let Some(rid) = body.get("rid").and_then(Value::as_str) {
        // The front knows exact ids only; behind it the match is by prefix.
        let known = lock(&core.model).waiting.contains_key(rid);
        if known {
            core.abort(rid);
        }
    }
    empty(StatusCode::OK)
}

/// Aborts a request whose client left.
struct AbortOnDrop {
    core: Arc<Core>,
    rid: Option<String>,
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if let Some(rid) = self.rid.take() {
            let left = lock(&self.core.model).waiting.remove(&rid).is_some();
            if left {
                self.core.abort(&rid);
            }
        }
    }
}

async fn generate(
    State(core): State<Arc<Core>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    if !core.allows(&headers, core.setup.api_key.as_ref()) {
        return unauthorized();
    }
    let body: GenerateBody = match serde_json::from_slice(&body) {
        Ok(body) => body,
        Err(error) => return bad_request(&error.to_string()),
    };
    let (rid, answer) = match submit(&core, body) {
        Ok(submitted) => submitted,
        Err(message) => return bad_request(&message),
    };
    let mut guard = AbortOnDrop {
        core: Arc::clone(&core),
        rid: Some(rid),
    };
    let Ok(finished) = answer.await else {
        // The engine restarted under the request.
        guard.rid = None;
        return cut_answer();
    };
    guard.rid = None;
    json_answer(StatusCode::OK, &generated(&finished))
}

fn submit(
    core: &Core,
    body: GenerateBody,
) -> Result<(String, oneshot::Receiver<Finished>), String> {
    let given = body.input_ids.map(|ids| ids.len() as u64);
    let Some(prompt_tokens) = body.prompt_tokens.or(given) else {
        return Err("prompt_tokens or input_ids is missing".to_owned());
    };
    let max_new_tokens = body.sampling_params.max_new_tokens.unwrap_or(128);
    let mut model = lock(&core.model);
    model.rids += 1;
    let rid = body
        .rid
        .unwrap_or_else(|| format!("{:032x}", u128::from(model.rids)));
    if model.waiting.contains_key(&rid) {
        return Err(format!("Duplicate request ID detected: {rid}"));
    }
    let prefix = body.demo.prefix_id.map(|id| SharedPrefix {
        id: Arc::from(id),
        tokens: body.demo.prefix_tokens.unwrap_or(0),
    });
    let request = Request {
        rid: Arc::from(rid.as_str()),
        session: Arc::from(body.session_id.unwrap_or_default()),
        prefix,
        prompt_tokens,
        max_new_tokens,
        decode_tokens: body.demo.decode_tokens.unwrap_or(max_new_tokens),
    };
    model.engine.submit(request).map_err(|long| {
        format!(
            "The input of {} tokens is longer than the pool of {} tokens.",
            long.tokens, long.pool_tokens
        )
    })?;
    let (done, answer) = oneshot::channel();
    model.waiting.insert(rid.clone(), done);
    drop(model);
    core.changes.send_replace(());
    Ok((rid, answer))
}

fn generated(finished: &Finished) -> Value {
    let reason = match finished.reason {
        FinishReason::Stop => json!({"type": "stop", "matched": 0}),
        FinishReason::Length => {
            json!({"type": "length", "length": finished.completion_tokens})
        }
        FinishReason::Abort => json!({"type": "abort", "message": "Aborted"}),
    };
    json!({
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": &*finished.rid,
            "finish_reason": reason,
            "prompt_tokens": finished.prompt_tokens,
            "weight_version": "default",
            "num_retractions": finished.retractions,
            "queue_time": finished.queued.millis() as f64 / 1_000.0,
            "completion_tokens": finished.completion_tokens,
            "cached_tokens": finished.cached_tokens,
            "dp_rank": null,
            "e2e_latency": finished.took.millis() as f64 / 1_000.0,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::super::{FakeFleet, FleetSpec, http_client};
    use super::*;

    async fn fleet(setup: EngineSetup) -> FakeFleet {
        let spec = FleetSpec {
            engines: vec![setup],
            speed: 1_000.0,
            ..FleetSpec::uniform(0, 0)
        };
        FakeFleet::start(spec).await.unwrap()
    }

    async fn get_json(url: &str) -> Value {
        let answer = http_client().unwrap().get(url).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{url}");
        answer.json().await.unwrap()
    }

    async fn post(url: &str, key: Option<&str>, body: Value) -> (u16, String) {
        let mut request = http_client().unwrap().post(url).json(&body);
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    fn turn(rid: &str, session: &str, prompt: u64, decode: u64) -> Value {
        json!({
            "rid": rid, "session_id": session, "prompt_tokens": prompt,
            "sampling_params": {"max_new_tokens": 4_000}, "demo": {"decode_tokens": decode},
        })
    }

    #[tokio::test]
    async fn a_request_runs_and_leaves_its_kv_until_the_close() {
        let mut setup = EngineSetup::with_pool(10_000);
        setup.version = EngineVersion::V0_5_15Post1;
        let fleet = fleet(setup).await;
        let url = fleet.engine_url(0);
        let (status, text) = post(
            &format!("{url}/generate"),
            None,
            turn("r1", "s1", 3_000, 100),
        )
        .await;
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        let meta = &answer["meta_info"];
        assert_eq!(meta["id"], "r1");
        assert_eq!(meta["prompt_tokens"], 3_000);
        assert_eq!(meta["completion_tokens"], 100);
        assert_eq!(meta["finish_reason"]["type"], "stop");

        let loads = get_json(&format!("{url}/v1/loads?include=core")).await;
        assert_eq!(loads["loads"][0]["max_total_num_tokens"], 10_000);
        assert_eq!(loads["loads"][0]["token_usage"], 0.0);
        assert_eq!(fleet.engine(0).gauges().evictable, 3_100);

        let close = format!("{url}/close_session");
        let (status, text) = post(&close, None, json!({"session_id": "s1", "extra": 1})).await;
        assert_eq!((status, text.as_str()), (200, ""));
        assert_eq!(fleet.engine(0).gauges().evictable, 0);
        for bad in [json!({}), json!({"session_id": 7}), json!("s1")] {
            let (status, text) = post(&close, None, bad).await;
            assert_eq!(status, 400);
            let error: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(error["type"], "Bad Request");
            assert_eq!(error["object"], "error");
        }
    }

    #[tokio::test]
    async fn aborts_need_a_known_id_and_match_by_prefix() {
        let mut spec = FleetSpec::uniform(1, 100_000);
        spec.speed = 1.0;
        let fleet = FakeFleet::start(spec).await.unwrap();
        let url = fleet.engine_url(0);
        let generate = format!("{url}/generate");
        let one = post(&generate, None, turn("r1", "s1", 1_000, 4_000));
        let ten = post(&generate, None, turn("r10", "s2", 1_000, 4_000));
        let aborts = async {
            let engine = fleet.engine(0);
            engine
                .wait_for_gauges(|gauges| gauges.running + gauges.queued == 2)
                .await;
            let abort = format!("{url}/abort_request");
            let (status, text) = post(&abort, None, json!({"rid": "r"})).await;
            assert_eq!(
                (status, text.as_str()),
                (200, ""),
                "unknown ids are accepted"
            );
            let gauges = engine.gauges();
            assert_eq!(gauges.running + gauges.queued, 2, "and abort nothing");
            let (status, _) = post(&abort, None, json!({"rid": "r1"})).await;
            assert_eq!(status, 200);
        };
        let ((_, one), (_, ten), ()) = tokio::join!(one, ten, aborts);
        for text in [one, ten] {
            let answer: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(answer["meta_info"]["finish_reason"]["type"], "abort");
        }
        let get = http_client().unwrap();
        let get = get
            .get(format!("{url}/abort_request"))
            .send()
            .await
            .unwrap();
        assert_eq!(get.status(), 405);
        assert_eq!(get.headers()["allow"], "POST");
        assert_eq!(
            get.text().await.unwrap(),
            "{\"detail\":\"Method Not Allowed\"}"
        );
    }

    #[tokio::test]
    async fn keys_are_asked_for_as_recorded() {
        let mut setup = EngineSetup::with_pool(10_000);
        setup.api_key = Some("userkey".to_owned());
        setup.admin_key = Some("adminkey".to_owned());
        let fleet = fleet(setup).await;
        let url = fleet.engine_url(0);
        let close = format!("{url}/close_session");
        let abort = format!("{url}/abort_request");
        let refused = (401, "{\"error\":\"Unauthorized\"}".to_owned());
        let session = json!({"session_id": "s1"});
        assert_eq!(post(&close, None, session.clone()).await, refused);
        assert_eq!(
            post(&close, Some("adminkey"), session.clone()).await,
            refused
        );
        assert_eq!(post(&close, Some("userkey"), session).await.0, 200);
        let rid = json!({"rid": "s1"});
        assert_eq!(post(&abort, Some("userkey"), rid.clone()).await, refused);
        assert_eq!(post(&abort, Some("adminkey"), rid).await.0, 200);
        let http = http_client().unwrap();
        for (path, status) in [
            ("/server_info", 401),
            ("/v1/loads", 401),
            ("/metrics", 200),
            ("/health", 200),
        ] {
            let answer = http.get(format!("{url}{path}")).send().await.unwrap();
            assert_eq!(answer.status(), status, "{path}");
        }
        let keys: Vec<Option<String>> = fleet
            .requests(0)
            .into_iter()
            .map(|request| request.authorization)
            .collect();
        assert_eq!(keys[0], None);
        assert_eq!(keys[1].as_deref(), Some("Bearer adminkey"));
    }

    #[tokio::test]
    async fn scripted_gauges_are_shown_in_both_answers() {
        let fleet = fleet(EngineSetup::with_pool(10_000)).await;
        let engine = fleet.engine(0);
        engine.set_capacity(200_000);
        engine.set_usage(0.93);
        engine.set_running(12);
        engine.set_queued(3);
        engine.set_counters(1_000, 50);
        let url = engine.url();
        let loads = get_json(&format!("{url}/v1/loads?include=core")).await;
        let row = &loads["loads"][0];
        assert_eq!(row["max_total_num_tokens"], 200_000);
        assert_eq!(row["token_usage"], 0.93);
        assert_eq!(row["num_used_tokens"], 186_000);
        assert_eq!(row["num_running_reqs"], 12);
        assert_eq!(row["num_waiting_reqs"], 3);
        let http = http_client().unwrap();
        let answer = http.get(format!("{url}/metrics")).send().await.unwrap();
        assert_eq!(
            answer.headers()["content-type"],
            "text/plain; version=0.0.4; charset=utf-8"
        );
        let text = answer.text().await.unwrap();
        assert!(text.contains("tp_rank=\"0\"} 0.93\n"), "{text}");
        assert!(text.contains("sglang:kv_available_tokens{engine_type=\"unified\",model_name=\"demo-model\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"} 14000.0\n"));
        assert!(text.contains("sglang:generation_tokens_total{engine_type=\"unified\",is_streaming=\"false\",model_name=\"demo-model\"} 50.0\n"));
        engine.set_ranks(vec![RankGauges::default(); 2]);
        let loads = get_json(&format!("{url}/v1/loads")).await;
        assert_eq!(loads["loads"].as_array().unwrap().len(), 2);
        engine.unscript();
        let loads = get_json(&format!("{url}/v1/loads")).await;
        assert_eq!(loads["loads"][0]["max_total_num_tokens"], 10_000);
        let answer = http
            .get(format!("{url}/v1/loads?include=everything"))
            .send()
            .await
            .unwrap();
        assert_eq!(answer.status(), 400);
    }

    #[tokio::test]
    async fn a_vllm_shows_its_own_metrics_and_has_no_close() {
        let fleet = fleet(EngineSetup::with_pool(9_600).of(EngineVersion::Vllm)).await;
        let url = fleet.engine_url(0);
        let http = http_client().unwrap();
        let text = http.get(format!("{url}/metrics")).send().await.unwrap();
        let text = text.text().await.unwrap();
        assert!(text.contains("kv_cache_size_tokens=\"9600\",num_gpu_blocks=\"300\"} 1.0\n"));
        assert!(
            text.contains("vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"demo-model\"} 0.0")
        );
        assert!(!text.contains("sglang"));
        for path in [
            "/close_session",
            "/abort_request",
            "/v1/loads",
            "/server_info",
        ] {
            let (status, text) = post(&format!("{url}{path}"), None, json!({})).await;
            assert_eq!(
                (status, text.as_str()),
                (404, "{\"detail\":\"Not Found\"}"),
                "{path}"
            );
        }
    }

    #[tokio::test]
    async fn stale_gauges_show_a_close_with_the_next_work() {
        let mut setup = EngineSetup::with_pool(10_000).of(EngineVersion::V0_5_15Post1);
        setup.stale_gauges = true;
        let spec = FleetSpec {
            engines: vec![setup],
            speed: 1.0,
            ..FleetSpec::uniform(0, 0)
        };
        let fleet = FakeFleet::start(spec).await.unwrap();
        let url = fleet.engine_url(0);
        let http = http_client().unwrap();
        let evictable = async || -> f64 {
            let text = http.get(format!("{url}/metrics")).send().await.unwrap();
            let text = text.text().await.unwrap();
            let row = "sglang:kv_evictable_tokens{";
            let line = text.lines().find(|line| line.starts_with(row)).unwrap();
            line.rsplit_once(' ').unwrap().1.parse().unwrap()
        };
        let generate = format!("{url}/generate");
        for (rid, session) in [("r1", "s1"), ("r2", "s2")] {
            post(&generate, None, turn(rid, session, 3_000, 1)).await;
        }
        let before = evictable().await;
        assert!(
            before >= 3_001.0,
            "s1 was in the cache when s2 began: {before}"
        );
        let close = format!("{url}/close_session");
        for session in ["s1", "s2"] {
            post(&close, None, json!({"session_id": session})).await;
        }
        assert_eq!(fleet.engine(0).gauges().evictable, 0);
        assert_eq!(evictable().await, before, "no work since");
        post(&generate, None, turn("r3", "s3", 10, 1)).await;
        assert!(evictable().await <= 11.0);
    }

    #[tokio::test]
    async fn calls_that_came_in_are_told_by_their_ids() {
        let fleet = fleet(EngineSetup::with_pool(10_000)).await;
        let engine = fleet.engine(0);
        let close = format!("{}/close_session", engine.url());
        engine.behave_in_turn(
            "/close_session",
            vec![Behaviour::Status(503, String::new())],
        );
        for status in [503, 200] {
            let answer = post(&close, None, json!({"session_id": "s/1"})).await;
            assert_eq!(answer.0, status);
        }
        let abort = format!("{}/abort_request", engine.url());
        assert_eq!(post(&abort, None, json!({"rid": "r1"})).await.0, 200);
        assert_eq!(engine.wait_for_closes(2).await, ["s/1", "s/1"]);
        assert_eq!(engine.aborts(), ["r1"]);
        assert_eq!(engine.peak("/close_session"), 1);
    }

    #[tokio::test]
    async fn a_restart_is_a_new_incarnation_and_a_stop_is_not() {
        let fleet = fleet(EngineSetup::with_pool(10_000)).await;
        let engine = fleet.engine(0);
        let url = engine.url();
        let generate = format!("{url}/generate");
        post(&generate, None, turn("r1", "s1", 3_000, 10)).await;
        let info = format!("{url}/server_info");
        let before = get_json(&info).await["startup_time"].clone();
        assert!(before.is_f64());

        engine.stop().await;
        assert!(!engine.is_up().await);
        let http = http_client().unwrap();
        let refused = http.get(&info).send().await.unwrap_err();
        assert!(refused.is_connect(), "{refused:?}");
        engine.start_again().await.unwrap();
        assert_eq!(engine.url(), url);
        assert_eq!(get_json(&info).await["startup_time"], before);
        assert_eq!(engine.gauges().evictable, 3_010);

        engine.restart().await.unwrap();
        assert_ne!(get_json(&info).await["startup_time"], before);
        assert_eq!(engine.gauges().evictable, 0);
        let text = http.get(format!("{url}/metrics")).send().await.unwrap();
        let text = text.text().await.unwrap();
        assert!(text.contains("is_streaming=\"false\",model_name=\"demo-model\"} 0.0\n"));
    }

    #[tokio::test]
    async fn a_client_that_leaves_aborts_its_request() {
        let mut spec = FleetSpec::uniform(1, 100_000);
        spec.speed = 1.0;
        let fleet = FakeFleet::start(spec).await.unwrap();
        let engine = fleet.engine(0);
        let left = CancellationToken::new();
        let client = {
            let generate = format!("{}/generate", fleet.router_url());
            let left = left.clone();
            async move {
                let call = post(&generate, None, turn("r1", "s1", 1_000, 4_000));
                left.run_until_cancelled(call).await
            }
        };
        let client = tokio::spawn(client);
        engine.wait_for_gauges(|gauges| gauges.running == 1).await;
        left.cancel();
        assert!(client.await.unwrap().is_none());
        engine.wait_for_gauges(|gauges| gauges.running == 0).await;
        assert_eq!(lock(&engine.core.model).engine.counters().aborted, 1);
    }
}
