//! What closes do to the KV of an engine, over HTTP: at the engine itself, and through the real binary.
//!
//! The same steps run against the fake engines of the demo, here, and against a real SGLang
//! (`real_engine.rs`), so that the fakes are held to what the real one does.

use std::time::Duration;

use kvgate::demo::{Agents, AgentsSpec, EngineSetup, EngineVersion, FakeFleet, FleetSpec};
use kvgate::fleet::close_support::CloseSupport;
use kvgate::fleet::dialect::{self, Gauges};
use kvgate::fleet::server_info;
use kvgate_core::ids::EngineId;
use kvgate_sim::workload::{Spread, WorkloadSpec};
use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::support::child::looks;
use crate::support::process::Kvgate;

/// For what an engine or the gate must come to: the gate reads `/metrics` every 10 s.
const PATIENCE: Duration = Duration::from_secs(60);
/// In tokens: what the small requests that refresh the gauges may leave in the cache, and that an
/// engine keeps a token less than it was given.
pub const SLACK: u64 = 100;
/// More tokens than any of these requests comes to before it is aborted.
const LONG: u64 = 6_000;

// ---------------------------------------------------------------------------------------------
// An engine
// ---------------------------------------------------------------------------------------------

/// An engine that is asked directly.
pub struct Engine {
    pub url: String,
    http: reqwest::Client,
}

/// What a request came to.
#[derive(Debug)]
pub struct Generated {
    pub prompt: u64,
    pub cached: u64,
    pub written: u64,
    pub ending: String,
    pub output: Vec<u32>,
    pub body: Value,
}

/// KV of an engine in tokens, from `/metrics`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kv {
    pub available: u64,
    pub evictable: u64,
    pub used: u64,
}

impl Engine {
    pub fn new(url: String) -> Self {
        // Every client of the process shares one provider; another test may have installed it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self {
            url,
            http: reqwest::Client::builder().no_proxy().build().unwrap(),
        }
    }

    /// Whether it is well.
    pub async fn is_up(&self) -> bool {
        let answer = self.http.get(format!("{}/health", self.url)).send().await;
        answer.is_ok_and(|answer| answer.status() == 200)
    }

    pub async fn get(&self, path: &str) -> (u16, String) {
        let url = format!("{}{path}", self.url);
        let answer = self.http.get(url).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    pub async fn post(&self, path: &str, body: &Value) -> (u16, String) {
        let url = format!("{}{path}", self.url);
        let answer = self.http.post(url).json(body).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    /// A call by method, path and any bytes, as JSON by its header.
    pub async fn call(&self, (method, path, body): (&str, &str, &str)) -> (u16, String) {
        let url = format!("{}{path}", self.url);
        let request = self
            .http
            .request(method.parse().unwrap(), url)
            .header(CONTENT_TYPE, "application/json")
            .body(body.to_owned());
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    /// One turn: so many new tokens on this prompt.
    pub async fn generate(
        &self,
        prompt: &[u32],
        new_tokens: u64,
        session: Option<&str>,
        rid: Option<&str>,
    ) -> Generated {
        let mut body = json!({
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": new_tokens, "ignore_eos": true, "temperature": 0},
        });
        if let Some(session) = session {
            body["session_id"] = json!(session);
        }
        if let Some(rid) = rid {
            body["rid"] = json!(rid);
        }
        let (status, text) = self.post("/generate", &body).await;
        assert_eq!(status, 200, "{text}");
        let body: Value = serde_json::from_str(&text).unwrap();
        let meta = &body["meta_info"];
        let number = |name: &str| meta[name].as_u64().unwrap();
        let output = body["output_ids"].as_array().unwrap().iter();
        Generated {
            prompt: number("prompt_tokens"),
            cached: number("cached_tokens"),
            written: number("completion_tokens"),
            ending: meta["finish_reason"]["type"].as_str().unwrap().to_owned(),
            output: output
                .map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
                .collect(),
            body,
        }
    }

    /// The KV as it is now. SGLang 0.5.15 refreshes its gauges with work only, or after 30 s, so small
    /// requests go first: two, as one is answered before its own refresh is seen for sure. They are
    /// the same each time, so that they leave no more in the cache.
    pub async fn kv(&self) -> Kv {
        for _ in 0..2 {
            self.generate(&[310, 4], 1, None, Some("tick-0000000001"))
                .await;
        }
        self.shown().await
    }

    /// The KV as it is shown.
    async fn shown(&self) -> Kv {
        let (status, text) = self.get("/metrics").await;
        assert_eq!(status, 200);
        let gauge = |name: &str| {
            let row = format!("sglang:kv_{name}_tokens{{");
            let line = text.lines().find(|line| line.starts_with(&row));
            let value = line.and_then(|line| line.rsplit_once(' ')).unwrap().1;
            value.strip_suffix(".0").unwrap().parse().unwrap()
        };
        Kv {
            available: gauge("available"),
            evictable: gauge("evictable"),
            used: gauge("used"),
        }
    }

    /// Looks until the KV is as wanted.
    pub async fn kv_until(&self, what: &str, wanted: impl Fn(&Kv) -> bool) -> Kv {
        let began = Instant::now();
        let mut looks = looks();
        loop {
            looks.tick().await;
            let kv = self.kv().await;
            if wanted(&kv) {
                return kv;
            }
            assert!(began.elapsed() < PATIENCE, "no {what}: {kv:?}");
        }
    }

    /// Waits until so many requests run there.
    async fn running(&self, requests: u64) {
        let began = Instant::now();
        let mut looks = looks();
        loop {
            looks.tick().await;
            let (status, text) = self.get("/v1/loads?include=core").await;
            assert_eq!(status, 200, "{text}");
            let loads: Value = serde_json::from_str(&text).unwrap();
            if loads["loads"][0]["num_running_reqs"] == requests {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "{requests} do not run: {text}");
        }
    }

    /// A request that runs until it is aborted, with something done to its session meanwhile.
    async fn interrupted(
        &self,
        prompt: &[u32],
        session: &str,
        rid: &str,
        meanwhile: impl Future<Output = ()>,
    ) -> Generated {
        let request = self.generate(prompt, LONG, Some(session), Some(rid));
        let others = async {
            self.running(1).await;
            meanwhile.await;
        };
        let (ended, ()) = tokio::join!(request, others);
        assert_eq!(ended.ending, "abort");
        ended
    }

    async fn close(&self, session: &str) {
        let answer = self
            .post("/close_session", &json!({"session_id": session}))
            .await;
        assert_eq!(answer, (200, String::new()));
    }

    async fn abort(&self, rid: &str) {
        let answer = self.post("/abort_request", &json!({"rid": rid})).await;
        assert_eq!(answer, (200, String::new()));
    }
}

/// A prompt of its own.
pub fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens)
        .map(|at| 3 + (seed * 7_919 + at * 31) % 300)
        .collect()
}

/// What a close does to the KV that only its session holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// SGLang 0.5.15 and 0.5.16: it is free at once.
    Frees,
    /// SGLang 0.5.17 and later: it stays cached, first in line for eviction.
    LetsGo,
}

/// Whether `after` differs from `before` by what closing a session of so many tokens does.
pub fn closed(effect: Effect, before: Kv, after: Kv, tokens: u64) -> bool {
    let freed = before.evictable.saturating_sub(after.evictable);
    let gained = after.available.saturating_sub(before.available);
    match effect {
        Effect::Frees => freed + SLACK >= tokens && gained + SLACK >= tokens,
        Effect::LetsGo => freed <= SLACK && gained <= SLACK,
    }
}

// ---------------------------------------------------------------------------------------------
// The engine itself
// ---------------------------------------------------------------------------------------------

/// The facts that the rules of closes rest on (section 11), seen at one engine.
pub async fn closes_at_the_engine(engine: &Engine, effect: Effect) {
    // A turn, and the next one finds it.
    let first = engine.generate(&prompt(1, 300), 8, Some("a"), None).await;
    let mut longer = prompt(1, 300);
    longer.extend(&first.output);
    longer.extend(prompt(2, 150));
    let second = engine.generate(&longer, 8, Some("a"), None).await;
    assert!(second.cached + SLACK >= first.prompt + first.written);
    let tokens = second.prompt + second.written;

    // An unknown id, the id itself and a repetition are answered alike.
    let before = engine.kv().await;
    engine.close("nobody").await;
    let kv = engine.kv().await;
    assert!(
        closed(Effect::LetsGo, before, kv, tokens),
        "{before:?} {kv:?}"
    );
    engine.close("a").await;
    let after = engine
        .kv_until("close of a", |kv| closed(effect, before, *kv, tokens))
        .await;
    engine.close("a").await;
    let kv = engine.kv().await;
    assert!(
        closed(Effect::LetsGo, after, kv, tokens),
        "{after:?} {kv:?}"
    );

    // Too early: it frees nothing, neither then nor when the request has ended.
    let before = engine.kv().await;
    let early = async {
        engine.close("b").await;
        engine.abort("rid-b-00000001").await;
    };
    let running = prompt(3, 400);
    let ended = engine
        .interrupted(&running, "b", "rid-b-00000001", early)
        .await;
    let tokens = ended.prompt + ended.written;
    let cached = |kv: &Kv| kv.used == 0 && kv.evictable + SLACK >= before.evictable + tokens;
    let kept = engine.kv_until("KV of b in the cache", cached).await;
    if effect == Effect::Frees {
        // And the id is spoilt: what the same session leaves from then on is never freed.
        engine.close("b").await;
        let kv = engine.kv().await;
        assert!(closed(Effect::LetsGo, kept, kv, tokens), "{kept:?} {kv:?}");
        let again = engine.generate(&prompt(4, 400), 8, Some("b"), None).await;
        let kept = engine.kv().await;
        engine.close("b").await;
        let kv = engine.kv().await;
        let tokens = again.prompt + again.written;
        assert!(closed(Effect::LetsGo, kept, kv, tokens), "{kept:?} {kv:?}");
    }

    // In order (abort, join, close) it does what it should.
    let ended = engine
        .interrupted(&prompt(5, 400), "c", "rid-c-00000001", async {
            engine.abort("rid-c-00000001").await;
        })
        .await;
    let before = engine.kv().await;
    engine.close("c").await;
    let tokens = ended.prompt + ended.written;
    engine
        .kv_until("close of c", |kv| closed(effect, before, *kv, tokens))
        .await;
}

// ---------------------------------------------------------------------------------------------
// Through the gate
// ---------------------------------------------------------------------------------------------

async fn lease(gate: &Kvgate, ticket: &str, session: &str, rid: &str) -> String {
    let body = json!({
        "ticket_id": ticket, "session_id": session, "prompt_tokens": 500, "max_new_tokens": 500,
        "request_id": rid,
    });
    let answer = gate.post("/v1/leases", &body).await;
    assert_eq!(answer.action(), "admit", "{answer:?}");
    answer.lease()
}

pub async fn release(gate: &Kvgate, lease: &str) {
    let path = format!("/v1/leases/{lease}/release");
    let answer = gate.post(&path, &json!({})).await;
    assert_eq!(answer.body["outcome"], "released", "{answer:?}");
}

/// Reads a close until it is done.
pub async fn done(gate: &Kvgate, close: &Value) -> Value {
    let path = format!("/v1/closes/{}", close["close_id"].as_str().unwrap());
    let began = Instant::now();
    let mut looks = looks();
    loop {
        looks.tick().await;
        let close = gate.get(&path).await;
        if close["state"] == "done" {
            return close;
        }
        assert!(began.elapsed() < PATIENCE, "not done: {close}");
    }
}

/// Looks at an engine as the gate shows it until it is as wanted.
pub async fn shown_until(gate: &Kvgate, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    let mut looks = looks();
    loop {
        looks.tick().await;
        let engines = gate.get("/v1/engines").await;
        let engine = &engines["items"][0];
        if wanted(engine) {
            return engine.clone();
        }
        assert!(began.elapsed() < PATIENCE, "no {what}: {engine}");
    }
}

/// CLO3, CLO4, CLO7: two turns of a session under leases, and its close, which is delivered and seen
/// in the engine's gauges; then the close of a session whose request runs, which is aborted, joined
/// and only then closed. Each step is told as it is done.
pub async fn closes_through_the_gate(
    gate: &Kvgate,
    engine: &Engine,
    effect: Effect,
    told: impl Fn(&str),
) {
    let shown = shown_until(gate, "reading of the engine", |shown| {
        shown["counted"] == true && shown["close_support"] == true
    })
    .await;
    told(&format!("the gate counts {} tokens", shown["capacity"]));

    let first_lease = lease(gate, "s-1/0", "s-1", "rid-s1-0000001").await;
    let first = engine
        .generate(&prompt(11, 300), 8, Some("s-1"), Some("rid-s1-0000001"))
        .await;
    release(gate, &first_lease).await;
    let second_lease = lease(gate, "s-1/1", "s-1", "rid-s1-0000002").await;
    let mut longer = prompt(11, 300);
    longer.extend(&first.output);
    longer.extend(prompt(12, 150));
    let second = engine
        .generate(&longer, 8, Some("s-1"), Some("rid-s1-0000002"))
        .await;
    assert!(second.cached + SLACK >= first.prompt + first.written);
    let tokens = second.prompt + second.written;
    let before = engine.kv().await;
    told(&format!(
        "two turns, {} of {} prompt tokens from the cache: {before:?}",
        second.cached, second.prompt
    ));
    let least = before.evictable;
    let seen = shown_until(gate, "KV of s-1", |shown| {
        shown["evictable"].as_u64().is_some_and(|now| now >= least)
    });
    told(&format!(
        "the gate shows {} evictable",
        seen.await["evictable"]
    ));

    // CLO3: the close waits for the lease.
    let path = "/v1/sessions/s-1/close";
    let body = json!({"mode": "join", "reason": "terminal"});
    let answer = gate.post(path, &body).await;
    assert_eq!(answer.status, 202, "{answer:?}");
    assert_eq!(answer.body["state"], "joining", "{answer:?}");
    let kv = engine.kv().await;
    assert!(
        closed(Effect::LetsGo, before, kv, tokens),
        "{before:?} {kv:?}"
    );
    release(gate, &second_lease).await;
    let close = done(gate, &answer.body).await;
    assert_eq!(close["counts"], json!({"delivered": 1}), "{close}");
    let after = engine
        .kv_until("close of s-1", |kv| closed(effect, before, *kv, tokens))
        .await;
    told(&format!("closed and delivered: {after:?}"));
    if effect == Effect::Frees {
        let most = before.evictable + SLACK - tokens;
        let seen = shown_until(gate, "drop of the evictable tokens", |shown| {
            shown["evictable"].as_u64().is_some_and(|now| now <= most)
        });
        told(&format!(
            "the gate shows {} evictable",
            seen.await["evictable"]
        ));
    }

    // CLO3: with abort the request is ended, then joined; the close goes out after the last lease.
    let held = lease(gate, "s-2/0", "s-2", "rid-s2-0000001").await;
    let began = engine.kv().await;
    let taken = std::cell::OnceCell::new();
    let close = async {
        let body = json!({"mode": "abort", "reason": "dropped"});
        let answer = gate.post("/v1/sessions/s-2/close", &body).await;
        assert_eq!(answer.status, 202, "{answer:?}");
        assert_eq!(answer.body["state"], "joining", "{answer:?}");
        taken.set(answer.body).unwrap();
    };
    let ended = engine
        .interrupted(&prompt(13, 400), "s-2", "rid-s2-0000001", close)
        .await;
    let tokens = ended.prompt + ended.written;
    let cached = |kv: &Kv| kv.used == 0 && kv.evictable + SLACK >= began.evictable + tokens;
    let before = engine.kv_until("KV of s-2 in the cache", cached).await;
    told(&format!(
        "aborted after {} tokens, still joined: {before:?}",
        ended.written
    ));
    release(gate, &held).await;
    let close = done(gate, taken.get().unwrap()).await;
    assert_eq!(close["counts"], json!({"delivered": 1}), "{close}");
    let after = engine
        .kv_until("close of s-2", |kv| closed(effect, before, *kv, tokens))
        .await;
    told(&format!("closed and delivered: {after:?}"));
}

/// The gate in front of one engine, with both features and more flags.
pub fn gate(data: &TempDir, engine: &Engine, more: &[&str]) -> Kvgate {
    let mut arguments = vec![
        "--engine",
        &engine.url,
        "--program-admission",
        "--session-lifecycle",
    ];
    arguments.extend(more);
    Kvgate::serve(data.path(), &arguments)
}

// ---------------------------------------------------------------------------------------------
// The fakes
// ---------------------------------------------------------------------------------------------

/// One fake engine in real time.
async fn fake(version: EngineVersion) -> (FakeFleet, Engine) {
    let setup = EngineSetup {
        stale_gauges: version == EngineVersion::V0_5_15Post1,
        ..EngineSetup::with_pool(8_192).of(version)
    };
    let spec = FleetSpec {
        engines: vec![setup],
        ..FleetSpec::uniform(0, 0)
    };
    let fleet = FakeFleet::start(spec).await.unwrap();
    let engine = Engine::new(fleet.engine_url(0));
    (fleet, engine)
}

/// CLO3, CLO7: the older version frees; what it does when a close comes too early is why order matters.
#[tokio::test]
async fn clo7_a_close_frees_at_the_older_version() {
    let (_fleet, engine) = fake(EngineVersion::V0_5_15Post1).await;
    closes_at_the_engine(&engine, Effect::Frees).await;
}

/// CLO7: the newer version only lets go: no gauge moves.
#[tokio::test]
async fn clo7_a_close_lets_go_at_the_newer_version() {
    let (_fleet, engine) = fake(EngineVersion::V0_5_23).await;
    closes_at_the_engine(&engine, Effect::LetsGo).await;
}

/// CLO7: what a close lets go is evicted first, and a session that was not closed keeps its KV,
/// although it was used before.
#[tokio::test]
async fn clo7_what_is_closed_is_evicted_first_at_the_newer_version() {
    let (_fleet, engine) = fake(EngineVersion::V0_5_23).await;
    for session in ["open", "closed"] {
        engine
            .generate(&prompt(31, 3_000), 8, Some(session), None)
            .await;
    }
    engine.close("closed").await;
    engine
        .generate(&prompt(32, 4_000), 8, Some("next"), None)
        .await;
    for (session, cached) in [("open", 3_000..=3_008), ("closed", 0..=1_500)] {
        let again = engine
            .generate(&prompt(31, 3_000), 1, Some(session), None)
            .await;
        assert!(cached.contains(&again.cached), "{session}: {again:?}");
    }
}

/// CLO3, CLO4, CLO7: see [`closes_through_the_gate`].
#[tokio::test]
async fn clo3_closes_through_the_gate_at_both_versions() {
    let at = async |version, effect| {
        let (fleet, engine) = fake(version).await;
        let data = TempDir::new().unwrap();
        let gate = gate(&data, &engine, &[]);
        closes_through_the_gate(&gate, &engine, effect, |_| {}).await;
        let calls = fleet.engine(0);
        assert_eq!(calls.closes(), ["s-1", "s-2"]);
        assert_eq!(calls.aborts(), ["rid-s2-0000001"]);
    };
    tokio::join!(
        at(EngineVersion::V0_5_15Post1, Effect::Frees),
        at(EngineVersion::V0_5_23, Effect::LetsGo)
    );
}

/// CLO2, CLO3, CLO7: the demo in small. Agents work through the gate on engines of both versions, and
/// close each session or give it up: at the older version nothing of them is left.
#[tokio::test]
async fn clo7_agents_that_close_their_sessions_leave_nothing_at_the_older_version() {
    const SPEED: f64 = 200.0;
    let fleet = FakeFleet::start(FleetSpec::demo(SPEED, 1_795_971_600_000))
        .await
        .unwrap();
    let data = TempDir::new().unwrap();
    let router = fleet.router_url();
    let arguments = [
        "--router",
        &router,
        "--program-admission",
        "--session-lifecycle",
    ];
    let gate = Kvgate::serve(data.path(), &arguments);
    let spec = AgentsSpec {
        slots: 4,
        sessions_max: Some(12),
        speed: SPEED,
        warm: false,
        gives_up_one_in: 3,
        reuses_one_in: 0,
        workload: WorkloadSpec {
            turns: Spread::new(3.0, 0.3, 2, 4),
            dies_one_in: 0,
            wave_one_in: 0,
            ..WorkloadSpec::default()
        },
        ..AgentsSpec::demo(&gate.url(""), &router)
    };
    let stop = CancellationToken::new();
    let agents = Agents::start(spec, &stop).unwrap();
    agents.finished().await;
    let tally = agents.tally();
    assert_eq!((tally.closed, tally.alone, tally.cancelled), (12, 0, 0));
    assert!(
        tally.given_up > 0 && tally.sessions + tally.given_up == 12,
        "{tally:?}"
    );

    let closes = gate.list("/v1/closes").await;
    assert_eq!(closes.len(), 12);
    for close in closes {
        let close = done(&gate, &close).await;
        assert_eq!(close["counts"], json!({"delivered": 4}), "{close}");
    }
    let evictable = |place: usize| fleet.engine(place).gauges().evictable;
    assert_eq!((evictable(0), evictable(2)), (0, 0), "0.5.15.post1 frees");
    assert!(evictable(1) + evictable(3) > 0, "0.5.23 lets go only");
}

// ---------------------------------------------------------------------------------------------
// What the real engine answered
// ---------------------------------------------------------------------------------------------

const CALLS: &str = include_str!("../fixtures/real-engine/sglang-0.5.15.post1-calls.json");
const SERVER_INFO: &str =
    include_str!("../fixtures/real-engine/sglang-0.5.15.post1-server_info.json");
const GENERATED: &str = include_str!("../fixtures/real-engine/sglang-0.5.15.post1-generate.json");
const OPEN: &str =
    include_str!("../fixtures/real-engine/sglang-0.5.15.post1-session_open-metrics.txt");
const CLOSED: &str =
    include_str!("../fixtures/real-engine/sglang-0.5.15.post1-session_closed-metrics.txt");

/// CLO7: the close of a session of 300 + 8 tokens as its gauges show it: evictable falls, available
/// rises, the usage stands still.
#[test]
fn clo7_the_recorded_gauges_show_a_close() {
    let read = |text| dialect::read(text, &EngineId::new("http://engine:30000")).unwrap();
    let (open, closed) = (read(OPEN), read(CLOSED));
    let evictable = |gauges: &Gauges| gauges.evictable.unwrap().get();
    let available = |gauges: &Gauges| gauges.available.unwrap().get();
    // Each look at the gauges was made after a small request of its own.
    assert!(evictable(&open) - evictable(&closed) >= 300);
    assert!(available(&closed) - available(&open) >= 300);
    assert_eq!((open.usage, open.used), (closed.usage, closed.used));
    assert_eq!(evictable(&closed) + available(&closed), 8_192);
}

/// CLO10: the whole body of the real engine: closes free there, and it tells no start time.
#[test]
fn clo10_the_recorded_server_info_says_that_closes_free() {
    let info = server_info::read(SERVER_INFO.as_bytes()).unwrap();
    assert_eq!(CloseSupport::of(&info), CloseSupport::Frees);
    assert_eq!(info.version.as_deref(), Some("0.5.15.post1"));
    assert_eq!(info.start_mark, None);
}

/// The fake answers turns, closes and aborts, good and bad, as the real engine did.
#[tokio::test]
async fn the_fake_answers_calls_as_recorded() {
    let (_fleet, engine) = fake(EngineVersion::V0_5_15Post1).await;
    let real: Value = serde_json::from_str(GENERATED).unwrap();
    let ours = engine.generate(&prompt(21, 300), 8, Some("a"), None).await;
    for (name, value) in ours.body["meta_info"].as_object().unwrap() {
        let real = real["meta_info"].get(name);
        let known = real.unwrap_or_else(|| panic!("{name} is not recorded"));
        assert!(
            value.is_number() == known.is_number(),
            "{name}: {value} {known}"
        );
    }
    assert_eq!(
        ours.body["meta_info"]["finish_reason"],
        real["meta_info"]["finish_reason"]
    );
    let calls: Vec<Value> = serde_json::from_str(CALLS).unwrap();
    assert_eq!(calls.len(), 13);
    for call in calls {
        let text = |name: &str| call[name].as_str().unwrap();
        let (status, ours) = engine
            .call((text("method"), text("path"), text("request")))
            .await;
        assert_eq!(call["status"], status, "{call}");
        let real: Value = serde_json::from_str(text("body")).unwrap_or_default();
        let ours: Value = serde_json::from_str(&ours).unwrap_or_default();
        for name in ["object", "type", "param", "code", "detail"] {
            assert_eq!(ours[name], real[name], "{name} of {call}");
        }
        assert_eq!(ours["message"].is_string(), real["message"].is_string());
    }
}
