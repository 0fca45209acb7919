//! Cases of gauges that are read and of metrics that are shown, as `/metrics` shows them.

use kvgate::demo::{Behaviour, FakeFleet, FleetSpec};
use kvgate_core::command::{Acquire, Command};
use kvgate_core::decision::Scope;
use kvgate_core::effect::{Outcome, Reply};
use kvgate_core::ids::{SessionId, TicketId};
use serde_json::{Value, json};

use crate::support::app::{Builder, asking};
use crate::support::process::Kvgate;
use crate::support::scrape::Scrape;
use crate::support::store::Switch;

/// P01: 50,000 sessions and 200,000 tickets leave the series as they were, below 100 KiB, and no id in
/// any of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn p01_sessions_and_tickets_make_no_series() {
    let store = Switch::default();
    let app = Builder {
        engines: vec![("http://engine-1:30000", 1_000_000)],
        ..Builder::default()
    }
    .start_on(move || store.open())
    .await;
    app.get("/metrics").await;
    let before = Scrape::read(&app.get("/metrics").await.text);
    for group in 0..200 {
        let acquires = (0..1_000).map(|number| {
            let number = group * 1_000 + number;
            Command::Acquire(Acquire {
                ticket: TicketId::new(&format!("ticket-{number}")).unwrap(),
                session: SessionId::new(&format!("session-{}", number % 50_000)).unwrap(),
                scope: Scope::ALL[number % 2],
                ..asking("t", 10, false)
            })
        });
        let replies = app.gate.batch(acquires.collect()).await.unwrap();
        let lease = |reply| match reply {
            Ok((_, Reply::Acquire(Ok(answer)))) => match answer.outcome {
                Outcome::Admit { lease, .. } => Some(Command::Release(lease)),
                _ => None,
            },
            other => panic!("{other:?}"),
        };
        let releases = replies.into_iter().filter_map(lease).collect();
        app.gate.batch(releases).await.unwrap();
    }
    let text = app.get("/metrics").await.text;
    let after = Scrape::read(&text);
    assert_eq!(before.series(), after.series());
    assert!(after.bytes < 100 << 10, "{} bytes", after.bytes);
    assert!(!text.contains("ticket-") && !text.contains("session-"));
    assert_eq!(
        after.sum(&["kvgate_reservation_tokens_count"]),
        200_000.0,
        "each of them was counted"
    );
    assert_eq!(
        after.value("kvgate_leases_ended_total{how=\"released\"}"),
        100_000.0,
        "scope eval is not selected"
    );
}

/// P02: no doubled suffix, no colon, HELP and TYPE on each, and the content type of what is sent.
#[tokio::test]
async fn p02_names_and_formats() {
    let app = Builder::default().start().await;
    let answer = app.get("/metrics").await;
    let kind = answer.header("content-type").unwrap();
    assert!(
        kind.starts_with("application/openmetrics-text; version=1.0.0"),
        "{kind}"
    );
    let scrape = Scrape::read(&answer.text);
    for (name, family) in &scrape.families {
        assert!(name.starts_with("kvgate_"), "{name}");
        assert!(!name.contains(':') && !name.contains("_total"), "{name}");
        assert!(family.help.len() > 8, "{name}: {}", family.help);
    }
    assert!(!answer.text.contains("_total_total"));
    let plain = app
        .client
        .get(app.url("/metrics"))
        .header("accept", "text/plain");
    let plain = app.send(plain).await;
    assert_eq!(
        plain.header("content-type"),
        Some("text/plain; version=0.0.4; charset=utf-8")
    );
    assert!(!plain.text.contains("# EOF") && !plain.text.contains("_total_total"));
    assert!(
        plain
            .text
            .contains("# TYPE kvgate_leases_ended_total counter\n"),
        "a linter of the older format finds the names as they stand"
    );
}

/// An engine that answers with these gauges and has no `/v1/loads`.
fn shows(fleet: &FakeFleet, place: usize, gauges: &str) {
    let engine = fleet.engine(place);
    engine.behave("/v1/loads", Behaviour::Status(404, String::new()));
    engine.behave("/metrics", Behaviour::Raw(gauges.as_bytes().to_vec()));
}

fn fixture(name: &str) -> String {
    let path = format!("{}/tests/fixtures/cases/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

async fn scraped(gate: &Kvgate) -> Scrape {
    let answer = gate.http.get(gate.url("/metrics")).send().await.unwrap();
    Scrape::read(&answer.text().await.unwrap())
}

/// A gate in front of one engine for each of these bodies, which is read.
struct Shows {
    gate: Kvgate,
    fleet: FakeFleet,
    _data: tempfile::TempDir,
}

impl Shows {
    async fn start(files: &[&str]) -> Self {
        let fleet = FakeFleet::start(FleetSpec::uniform(files.len(), 1))
            .await
            .unwrap();
        for (place, file) in files.iter().enumerate() {
            shows(&fleet, place, &fixture(file));
        }
        let data = tempfile::tempdir().unwrap();
        let router = fleet.router_url();
        let gate = Kvgate::serve(data.path(), &["--router", &router, "--program-admission"]);
        Self {
            gate,
            fleet,
            _data: data,
        }
    }

    /// One figure of an engine in `/metrics`.
    async fn metric(&self, place: usize, name: &str) -> Option<f64> {
        let engine = self.fleet.engine_url(place);
        let scrape = scraped(&self.gate).await;
        scrape.get(&format!("kvgate_engine_{name}{{engine=\"{engine}\"}}"))
    }

    /// An engine in `/v1/engines`.
    async fn engine(&self, place: usize) -> Value {
        let url = self.fleet.engine_url(place);
        let engines = self.gate.get("/v1/engines").await;
        let rows = engines["items"].as_array().unwrap();
        rows.iter().find(|row| row["url"] == *url).unwrap().clone()
    }

    async fn ceiling(&self) -> u64 {
        let state = self.gate.get("/v1/state").await;
        state["budget"]["ceiling"].as_u64().unwrap()
    }
}

/// M01, CAP2: four TP ranks that repeat each gauge are one pool.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m01_tp_ranks_repeat_the_same_gauge() {
    let shows = Shows::start(&["M01-metrics.txt"]).await;
    assert_eq!(shows.metric(0, "capacity_tokens").await, Some(500_000.0));
    assert_eq!(shows.metric(0, "token_usage_ratio").await, Some(0.4));
    assert_eq!(shows.engine(0).await["ranks"], 1);
    assert_eq!(shows.ceiling().await, 450_000);
}

/// M02, CAP2, CAP5: four DP ranks own a pool each, and the fullest one makes new requests wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m02_dp_ranks_own_separate_pools() {
    let shows = Shows::start(&["M02-metrics.txt"]).await;
    assert_eq!(shows.metric(0, "capacity_tokens").await, Some(1_000_000.0));
    assert_eq!(shows.metric(0, "token_usage_ratio").await, Some(0.95));
    assert_eq!(shows.engine(0).await["ranks"], 4);
    assert_eq!(shows.ceiling().await, 900_000);
    let answer = shows.gate.acquire("t1", 1_000).await;
    assert_eq!(
        (answer.action(), &answer.body["reason"]),
        ("wait", &json!("pressure_guard"))
    );
}

/// M03, CAP2: engines of both spellings in one fleet are read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m03_metric_prefix_colon_or_underscore() {
    let shows = Shows::start(&["M03-a.txt", "M03-b.txt"]).await;
    for place in [0, 1] {
        assert_eq!(
            shows.metric(place, "capacity_tokens").await,
            Some(500_000.0)
        );
    }
    assert_eq!(shows.ceiling().await, 900_000);
}

/// M04, CAP5: gauges of idle engines that stand at 0.95 for ever keep nobody waiting, and are shown as they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m04_a_gauge_keeps_its_last_value_when_idle() {
    let shows = Shows::start(&["M04-metrics.txt", "M04-metrics.txt"]).await;
    let answer = shows.gate.acquire("t1", 1_000).await;
    assert_eq!(answer.action(), "admit", "{answer:?}");
    let engine = shows.engine(0).await;
    assert_eq!(
        (&engine["usage"], &engine["running"], &engine["queued"]),
        (&json!(0.95), &json!(0), &json!(0))
    );
    let state = shows.gate.get("/v1/state").await;
    assert_eq!(
        state["pressure"]["engine"],
        Value::Null,
        "idle engines exert no pressure: {state}"
    );
}

/// M05, CAP2, CAP5: a pool that is full of evictable KV is no pressure and is not called free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m05_token_usage_does_not_count_evictable_kv() {
    let shows = Shows::start(&["M05-metrics.txt", "M05-metrics.txt"]).await;
    let answer = shows.gate.acquire("t1", 1_000).await;
    assert_eq!(answer.action(), "admit", "{answer:?}");
    for (name, value) in [
        ("token_usage_ratio", 0.02),
        ("used_tokens", 10_000.0),
        ("evictable_tokens", 350_000.0),
    ] {
        assert_eq!(shows.metric(0, name).await, Some(value), "{name}");
    }
    let engine = shows.engine(0).await;
    assert_eq!(
        [&engine["used"], &engine["evictable"], &engine["available"]],
        [10_000, 350_000, 140_000]
    );
}

/// M06, CAP2: NaN is a gauge that is missing: no pressure, no number anywhere, and nothing breaks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m06_a_usage_gauge_is_nan() {
    let shows = Shows::start(&["M06-a.txt", "M06-b.txt"]).await;
    assert_eq!(shows.metric(0, "capacity_tokens").await, Some(500_000.0));
    assert_eq!(shows.metric(0, "token_usage_ratio").await, None);
    assert_eq!(shows.metric(1, "token_usage_ratio").await, Some(0.1));
    assert_eq!(shows.engine(0).await["usage"], Value::Null, "unknown");
    let state = shows.gate.get("/v1/state").await;
    assert_eq!(state["pressure"]["usage_max"], json!(0.1));
    assert_eq!(shows.gate.acquire("t1", 1_000).await.action(), "admit");
    for path in ["/v1/state", "/v1/engines", "/metrics", "/"] {
        let answer = shows.gate.http.get(shows.gate.url(path)).send().await;
        let text = answer.unwrap().text().await.unwrap();
        assert!(!text.contains("NaN"), "{path}: {text}");
    }
}

/// M07, CAP2: everything that the format allows in one body, and nothing of what only looks like it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m07_hard_but_legal_exposition_text() {
    let shows = Shows::start(&["M07-metrics.txt"]).await;
    assert_eq!(shows.metric(0, "capacity_tokens").await, Some(500_000.0));
    assert_eq!(shows.metric(0, "token_usage_ratio").await, Some(0.4));
    let engine = shows.engine(0).await;
    assert_eq!(
        (&engine["running"], &engine["fresh"]),
        (&json!(4), &json!(true))
    );
    assert_eq!(shows.ceiling().await, 450_000);
}

/// M08: an engine without metrics and one that wants a key are down with the result `status`; the good
/// one alone makes the ceiling.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m08_one_engine_started_without_metrics() {
    let fleet = FakeFleet::start(FleetSpec::uniform(3, 500_000))
        .await
        .unwrap();
    for (place, status) in [(1, 404), (2, 401)] {
        let engine = fleet.engine(place);
        engine.behave("/v1/loads", Behaviour::Status(404, String::new()));
        engine.behave("/metrics", Behaviour::Status(status, String::new()));
    }
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let gate = Kvgate::serve(
        data.path(),
        &[
            "--router",
            &router,
            "--program-admission",
            "--session-lifecycle",
        ],
    );
    let scrape = scraped(&gate).await;
    let up = |place: usize| {
        let engine = fleet.engine_url(place);
        scrape.value(&format!("kvgate_engine_up{{engine=\"{engine}\"}}"))
    };
    assert_eq!([up(0), up(1), up(2)], [1.0, 0.0, 0.0]);
    for place in [1, 2] {
        let engine = fleet.engine_url(place);
        let refused = ["kvgate_engine_readings_total", &engine, "\"status\""];
        assert!(scrape.sum(&refused) >= 1.0);
        let capacity = format!("kvgate_engine_capacity_tokens{{engine=\"{engine}\"}}");
        assert_eq!(scrape.get(&capacity), None, "unknown is not 0");
    }
    assert_eq!(scrape.value("kvgate_budget_ceiling_tokens"), 450_000.0);
    assert_eq!(scrape.value("kvgate_budget_degraded"), 0.0);
    let engines = gate.get("/v1/engines").await;
    let why = |place: usize| {
        let url = fleet.engine_url(place);
        let rows = engines["items"].as_array().unwrap();
        let row = rows.iter().find(|row| row["url"] == *url).unwrap();
        row["last_error"].as_str().unwrap().to_owned()
    };
    assert!(why(1).contains("404"), "{engines}");
    assert!(why(2).contains("401"), "{engines}");
    // A close goes to all three: what an engine tells of itself does not matter for that.
    let close = gate
        .post("/v1/sessions/s/close?wait_s=30", &json!({}))
        .await;
    assert_eq!(close.body["counts"]["delivered"], 3, "{close:?}");
}

/// M09: with empty answers everywhere the ledger is degraded, requests bypass and are counted as such.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m09_empty_metrics_are_degraded() {
    let fleet = FakeFleet::start(FleetSpec::uniform(2, 500_000))
        .await
        .unwrap();
    shows(&fleet, 0, "");
    shows(&fleet, 1, "");
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let gate = Kvgate::serve(data.path(), &["--router", &router, "--program-admission"]);
    let answer = gate.acquire("t1", 1_000).await;
    assert_eq!(answer.body["reason"], json!("degraded"));
    let bypasses =
        "kvgate_admission_decisions_total{outcome=\"bypass\",reason=\"degraded\",scope=\"train\"}";
    // Stored within a second, and shown then.
    let scrape = loop {
        let scrape = scraped(&gate).await;
        if scrape.value(bypasses) == 1.0 {
            break scrape;
        }
    };
    assert_eq!(scrape.value("kvgate_budget_degraded"), 1.0);
    assert_eq!(scrape.get("kvgate_kv_token_usage_mean_ratio"), None);
    let missing = scrape.sum(&["kvgate_engine_readings_total", "\"missing\""]);
    assert!(missing >= 2.0, "{missing}");
    assert_eq!(scrape.sum(&["kvgate_waiting{"]), 0.0);
}
