//! Cases of gauges that are read and of metrics that are shown, as `/metrics` shows them.

use kvgate::demo::{Behaviour, FakeFleet, FleetSpec};
use kvgate_core::command::{Acquire, Command};
use kvgate_core::decision::Scope;
use kvgate_core::effect::{Outcome, Reply};
use kvgate_core::ids::{SessionId, TicketId};
use serde_json::json;

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

/// M01 to M07: what hard gauges come to stands in `/metrics`, which stays readable: no NaN, no sum over
/// repeated ranks, and no number where an engine told none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m01_to_m07_gauges_of_engines_as_they_are_shown() {
    let cases = [
        ("M01-metrics.txt", "capacity 500000"),
        ("M02-metrics.txt", "capacity 1000000"),
        ("M03-a.txt", "capacity 500000"),
        ("M04-metrics.txt", "usage 0.95"),
        ("M05-metrics.txt", "usage 0.02 evictable 350000 used 10000"),
        ("M06-a.txt", "capacity 500000 no-usage"),
        ("M06-b.txt", "usage 0.1"),
        ("M07-metrics.txt", "capacity 500000 usage 0.4"),
    ];
    let fleet = FakeFleet::start(FleetSpec::uniform(cases.len(), 1))
        .await
        .unwrap();
    for (place, (file, _)) in cases.iter().enumerate() {
        shows(&fleet, place, &fixture(file));
    }
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let gate = Kvgate::serve(data.path(), &["--router", &router, "--program-admission"]);
    let scrape = scraped(&gate).await;
    for (place, (file, expected)) in cases.iter().enumerate() {
        let engine = fleet.engine_url(place);
        let of = |name: &str| scrape.get(&format!("kvgate_engine_{name}{{engine=\"{engine}\"}}"));
        assert_eq!(of("up"), Some(1.0), "{file}");
        let words: Vec<&str> = expected.split(' ').collect();
        let expects = |word: &str| {
            let at = words.iter().position(|found| *found == word)?;
            words[at + 1].parse::<f64>().ok()
        };
        for (word, name) in [
            ("capacity", "capacity_tokens"),
            ("usage", "token_usage_ratio"),
            ("evictable", "evictable_tokens"),
            ("used", "used_tokens"),
        ] {
            if let Some(value) = expects(word) {
                assert_eq!(of(name), Some(value), "{file}: {name}");
            }
        }
        if words.contains(&"no-usage") {
            assert_eq!(of("token_usage_ratio"), None, "{file}: NaN is no number");
        }
    }
}

/// M08: an engine without metrics and one that wants a key are down with the result `status`; the good
/// one alone makes the ceiling.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m08_an_engine_without_metrics_is_shown_as_such() {
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
    let gate = Kvgate::serve(data.path(), &["--router", &router, "--program-admission"]);
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
