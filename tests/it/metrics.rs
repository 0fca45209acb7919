//! `/metrics`: what is counted and measured, for any number of readers, over restarts.

use std::collections::BTreeMap;

use kvgate::demo::{Behaviour, FakeFleet, FleetSpec, WorkerRow};
use kvgate_core::command::{Acquire, Command};
use kvgate_core::ids::TicketId;
use kvgate_core::policy::{AdmissionScope, Policy};
use kvgate_core::tally::LocalBypass;
use kvgate_core::units::Span;
use serde_json::{Value, json};

use crate::support::app::{Builder, EngineCalls, SOON, TestApp, asking};
use crate::support::process::Kvgate;
use crate::support::scrape::Scrape;
use crate::support::store::{Mood, Switch};

async fn scrape(app: &TestApp) -> Scrape {
    let answer = app.get("/metrics").await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    Scrape::read(&answer.text)
}

async fn scraped(gate: &Kvgate) -> Scrape {
    let answer = gate.http.get(gate.url("/metrics")).send().await.unwrap();
    Scrape::read(&answer.text().await.unwrap())
}

fn decided(outcome: &str, reason: &str, scope: &str) -> String {
    format!(
        "kvgate_admission_decisions_total{{outcome=\"{outcome}\",reason=\"{reason}\",scope=\"{scope}\"}}"
    )
}

/// CNT1: decisions, loads, waits, sizes and ends, by scope, as they happened.
#[tokio::test]
async fn cnt1_decisions_and_loads_are_shown() {
    let app = Builder {
        policy: Policy {
            scope: AdmissionScope::All,
            ..Builder::default().policy
        },
        ..Builder::default()
    }
    .start()
    .await;
    let held = app.acquire("held", 900).await;
    let ask = |ticket: &str, tokens: u64, scope: &str| json!({"ticket_id": ticket, "session_id": "s", "reservation_tokens": tokens, "scope": scope, "wait_s": 0});
    app.post("/v1/leases", &ask("first", 300, "eval")).await;
    app.post("/v1/leases", &ask("second", 400, "train")).await;
    app.post("/v1/leases", &ask("huge", 5_000, "train")).await;
    let text = scrape(&app).await;
    assert_eq!(text.value("kvgate_budget_capacity_tokens"), 1_000.0);
    assert_eq!(text.value("kvgate_budget_reserved_tokens"), 900.0);
    assert_eq!(text.value("kvgate_budget_available_tokens"), 100.0);
    assert_eq!(text.value("kvgate_leases{scope=\"train\"}"), 1.0);
    assert_eq!(text.value("kvgate_waiting{scope=\"train\"}"), 1.0);
    assert_eq!(text.value("kvgate_waiting{scope=\"eval\"}"), 1.0);
    assert_eq!(text.value("kvgate_waiting_tokens{scope=\"train\"}"), 400.0);
    assert_eq!(text.value("kvgate_waiting_tokens{scope=\"eval\"}"), 300.0);
    let lease = held["lease_id"].as_str().unwrap();
    app.delete(&format!("/v1/leases/{lease}")).await;
    app.post("/v1/leases", &ask("first", 300, "eval")).await;
    app.delete("/v1/tickets/second").await;
    app.until(|view| view.durable_tally == view.tally).await;
    let text = scrape(&app).await;
    for (series, count) in [
        (decided("admit", "", "train"), 1.0),
        (decided("admit", "", "eval"), 1.0),
        (decided("wait", "capacity_exhausted", "eval"), 1.0),
        (decided("wait", "behind_older", "train"), 1.0),
        (decided("bypass", "oversize", "train"), 1.0),
        // Granted in a gap and cancelled before it was claimed.
        (decided("cancelled", "withdrawn", "train"), 1.0),
    ] {
        assert_eq!(text.value(&series), count, "{series}");
    }
    assert_eq!(
        text.value("kvgate_leases_ended_total{how=\"released\"}"),
        1.0
    );
    assert_eq!(
        text.value("kvgate_admission_wait_seconds_count{outcome=\"admit\"}"),
        1.0
    );
    assert_eq!(
        text.value("kvgate_admission_wait_seconds_count{outcome=\"cancelled\"}"),
        1.0
    );
    assert_eq!(text.value("kvgate_lease_held_seconds_count"), 1.0);
    let sizes = |part: &str, scope: &str| {
        text.value(&format!(
            "kvgate_reservation_tokens_{part}{{scope=\"{scope}\"}}"
        ))
    };
    assert_eq!(
        (sizes("count", "train"), sizes("sum", "train")),
        (3.0, 6_300.0)
    );
    assert_eq!((sizes("count", "eval"), sizes("sum", "eval")), (1.0, 300.0));
    assert_eq!(text.value("kvgate_store_up"), 1.0);
    let build = [
        "kvgate_build_info{",
        concat!("version=\"", env!("CARGO_PKG_VERSION"), "\""),
    ];
    assert_eq!(text.sum(&build), 1.0);
}

/// Routes are templates; what meets none is one series, whatever the address and the method; a call that
/// was held open is counted and not timed.
#[tokio::test]
async fn requests_are_counted_by_template() {
    let app = TestApp::start().await;
    for number in 0..20 {
        app.get(&format!("/v1/tickets/nobody-{number}")).await;
        app.get(&format!("/nowhere/{number}")).await;
        let method = reqwest::Method::from_bytes(format!("M{number}").as_bytes()).unwrap();
        app.send(app.client.request(method, app.url("/v1/state")))
            .await;
    }
    let held = app.acquire("held", 1_000).await;
    let ask = json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 1, "wait_s": 30});
    let waits = tokio::spawn(app.client.post(app.url("/v1/leases")).json(&ask).send());
    app.until(|view| view.waiting == 1).await;
    let open = scrape(&app).await;
    assert_eq!(open.value("kvgate_http_waiting_calls"), 1.0);
    let lease = held["lease_id"].as_str().unwrap();
    app.delete(&format!("/v1/leases/{lease}")).await;
    assert_eq!(waits.await.unwrap().unwrap().status(), 200);
    app.raw(b"nonsense\r\n\r\n").await;
    let text = scrape(&app).await;
    let requests = |route: &str, method: &str, status: u16| {
        text.value(&format!(
            "kvgate_http_requests_total{{route=\"{route}\",method=\"{method}\",status=\"{status}\"}}"
        ))
    };
    assert_eq!(requests("/v1/tickets/{ticket_id}", "GET", 404), 20.0);
    assert_eq!(requests("unmatched", "GET", 404), 20.0);
    assert_eq!(requests("/v1/state", "other", 405), 20.0);
    assert_eq!(requests("unmatched", "other", 400), 1.0);
    assert_eq!(requests("/v1/leases", "POST", 200), 2.0);
    assert_eq!(requests("/v1/leases/{lease_id}", "DELETE", 200), 1.0);
    assert_eq!(
        text.value("kvgate_http_request_seconds_count{route=\"/v1/leases\"}"),
        1.0,
        "the call that was held open is left out"
    );
    assert_eq!(text.value("kvgate_http_waiting_calls"), 0.0);
    let routes = text.sum(&["kvgate_http_requests_total", "nobody"]);
    assert_eq!(routes, 0.0);
}

/// REP1: readers do not disturb each other, nor the writer: no command, no commit, no number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rep1_readers_of_metrics_disturb_nobody() {
    let app = TestApp::start().await;
    app.acquire("t", 100).await;
    app.until(|view| view.durable_tally == view.tally).await;
    let before = (app.gate.stats().commits(), app.gate.view().seq);
    let reader = async || {
        let mut last: BTreeMap<String, f64> = BTreeMap::new();
        for _ in 0..50 {
            let scrape = scrape(&app).await;
            for (series, value) in scrape.cumulative() {
                let before = last.insert(series.to_owned(), value);
                assert!(before.is_none_or(|before| before <= value), "{series}");
            }
        }
    };
    tokio::join!(reader(), reader());
    assert_eq!(
        (app.gate.stats().commits(), app.gate.view().seq),
        before,
        "a scrape is no command"
    );
    let text = scrape(&app).await;
    assert_eq!(
        text.value(&decided("admit", "", "train")),
        1.0,
        "nothing is drained"
    );
}

/// REP1: the same while the gate is at work: no counter that any reader saw goes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rep1_readers_agree_while_the_gate_works() {
    let app = TestApp::start().await;
    let work = async {
        for number in 0..200 {
            let lease = app
                .acquire(&format!("t-{number}"), 10 + number % 3_000)
                .await;
            if let Some(lease) = lease["lease_id"].as_str() {
                app.delete(&format!("/v1/leases/{lease}")).await;
            }
        }
    };
    let reader = async {
        let mut last: BTreeMap<String, f64> = BTreeMap::new();
        for _ in 0..60 {
            for (series, value) in scrape(&app).await.cumulative() {
                let before = last.insert(series.to_owned(), value).unwrap_or(0.0);
                assert!(before <= value, "{series}: {before} to {value}");
            }
        }
    };
    tokio::join!(work, reader);
}

/// DUR2: counters go on over kill -9 and none that was shown goes back, immediate bypasses and what
/// callers report included; what the process measures by itself begins anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dur2_counters_go_on_over_a_kill() {
    let fleet = FakeFleet::start(FleetSpec::uniform(1, 1_000))
        .await
        .unwrap();
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let arguments = ["--router", &router, "--program-admission"];
    const DURABLE: [&str; 5] = [
        "kvgate_admission_decisions_total",
        "kvgate_leases_ended_total",
        "kvgate_client_bypasses_total",
        "kvgate_session",
        "kvgate_budget_epoch",
    ];
    let mut shown: BTreeMap<String, f64> = BTreeMap::new();
    for life in 0..5 {
        let gate = Kvgate::serve(data.path(), &arguments);
        let started = scraped(&gate).await;
        for (series, before) in &shown {
            let after = started.value(series);
            assert!(
                *before <= after,
                "life {life}: {series} from {before} to {after}"
            );
        }
        assert_eq!(started.value("kvgate_lease_held_seconds_count"), 0.0);
        assert!(started.value("kvgate_store_bytes") > 0.0);
        for number in 0..20 {
            let ticket = format!("{life}-{number}");
            let body = json!({
                "ticket_id": ticket, "session_id": "s", "wait_s": 0,
                "reservation_tokens": if number % 2 == 0 { 10 } else { 5_000 },
                "local_bypasses": {"unreachable": 1},
            });
            let answer = gate.post("/v1/leases", &body).await;
            if number % 4 == 0 {
                gate.delete(&format!("/v1/leases/{}", answer.lease())).await;
            }
        }
        let scrape = scraped(&gate).await;
        let durable = scrape.samples.into_iter().filter(|(series, _)| {
            DURABLE.iter().any(|name| series.starts_with(name))
                && !series.contains("store_unavailable")
        });
        shown = durable.collect();
        gate.kill();
    }
    let gate = Kvgate::serve(data.path(), &arguments);
    let text = scraped(&gate).await;
    assert_eq!(text.value(&decided("admit", "", "train")), 50.0);
    assert_eq!(
        text.value("kvgate_leases_ended_total{how=\"released\"}"),
        25.0
    );
}

/// An engine's series come with it and end with it, as does what the poller counted of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn series_of_an_engine_end_when_it_leaves() {
    let fleet = FakeFleet::start(FleetSpec::uniform(2, 1_000))
        .await
        .unwrap();
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let gate = Kvgate::serve(
        data.path(),
        &["--router", &router, "--poll-interval-s", "0.1"],
    );
    let (stays, leaves) = (fleet.engine_url(0), fleet.engine_url(1));
    let of = |scrape: &Scrape, engine: &str| {
        let series = scrape.samples.keys();
        series.filter(|series| series.contains(engine)).count()
    };
    let both = scraped(&gate).await;
    assert!(of(&both, &stays) > 10 && of(&both, &stays) == of(&both, &leaves));
    fleet
        .router()
        .set_rows(vec![WorkerRow::new("engine-a", &stays)]);
    let gone = async { while of(&scraped(&gate).await, &leaves) > 0 {} };
    tokio::time::timeout(SOON, gone)
        .await
        .expect("within a round");
    let one = scraped(&gate).await;
    assert_eq!(of(&one, &stays), of(&both, &stays));
    let ok = |scrape: &Scrape| {
        scrape.value(&format!(
            "kvgate_engine_readings_total{{engine=\"{stays}\",result=\"ok\"}}"
        ))
    };
    assert!(ok(&one) > ok(&both), "it goes on being read");
}

/// An engine that gives no reading is down, and its old gauges are not shown as present ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_gauges_are_not_shown() {
    let fleet = FakeFleet::start(FleetSpec::uniform(1, 1_000))
        .await
        .unwrap();
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let quick = [
        "--router",
        &router,
        "--poll-interval-s",
        "0.1",
        "--stale-after-s",
        "0.5",
    ];
    let gate = Kvgate::serve(data.path(), &quick);
    let engine = fleet.engine_url(0);
    let of = |scrape: &Scrape, name: &str| {
        scrape.get(&format!("kvgate_engine_{name}{{engine=\"{engine}\"}}"))
    };
    assert_eq!(of(&scraped(&gate).await, "capacity_tokens"), Some(1_000.0));
    fleet.engine(0).stop().await;
    let dark = async {
        loop {
            let scrape = scraped(&gate).await;
            if of(&scrape, "capacity_tokens").is_none() {
                return scrape;
            }
        }
    };
    let dark = tokio::time::timeout(SOON, dark).await.unwrap();
    assert_eq!(of(&dark, "up"), Some(0.0));
    assert_eq!(of(&dark, "counted"), Some(0.0));
    assert_eq!(of(&dark, "token_usage_ratio"), None);
    assert!(of(&dark, "reading_age_seconds").is_some_and(|age| age >= 0.5));
    let refused = format!("kvgate_engine_readings_total{{engine=\"{engine}\",result=\"refused\"}}");
    assert!(dark.value(&refused) >= 1.0);
}

/// DUR4: while the store is away the gate's bypasses are counted, and the picture says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dur4_bypasses_without_a_store_are_counted() {
    let store = Switch::default();
    let opened = store.clone();
    let app = Builder::default().start_on(move || opened.open()).await;
    app.acquire("held", 10).await;
    store.set_low_space(true);
    let full = async {
        while scrape(&app).await.value("kvgate_store_low_space") < 1.0 {
            app.get("/v1/tickets/t").await;
        }
    };
    tokio::time::timeout(SOON, full).await.unwrap();
    assert_eq!(app.acquire("a", 10).await["reason"], "store_unavailable");
    store.set(Mood::Failing);
    app.delete("/v1/tickets/held").await;
    assert_eq!(app.acquire("b", 10).await["reason"], "store_unavailable");
    let batch = json!({"operations": [
        {"op": "acquire", "ticket_id": "c", "session_id": "s", "reservation_tokens": 1, "scope": "eval"}
    ]});
    app.post("/v1/batch", &batch).await;
    let text = scrape(&app).await;
    assert_eq!(text.value("kvgate_store_up"), 0.0);
    assert_eq!(
        text.value(&decided("bypass", "store_unavailable", "train")),
        2.0
    );
    assert_eq!(
        text.value(&decided("bypass", "store_unavailable", "eval")),
        1.0
    );
    assert_eq!(
        text.value(&decided("admit", "", "train")),
        1.0,
        "the last good state"
    );
}

/// Nothing of a scrape grows with leases and waiters: the same series, and below 200 KB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scrape_does_not_grow_with_leases_and_waiters() {
    let store = Switch::default();
    let app = Builder {
        policy: Policy {
            max_waiting: 100_000,
            // Nobody is there for the waiters; they stay for as long as this takes.
            claim_grace: Span::from_secs(60),
            ..Builder::default().policy
        },
        engines: vec![("http://engine-1:30000", 100_000)],
        ..Builder::default()
    }
    .start_on(move || store.open())
    .await;
    scrape(&app).await;
    let few = scrape(&app).await;
    for group in 0..150 {
        let acquires = (0..1_000).map(|number| {
            Command::Acquire(Acquire {
                ticket: TicketId::new(&format!("{group}-{number}")).unwrap(),
                ttl: Span::from_secs(3_600),
                ..asking("t", 1, false)
            })
        });
        app.gate.batch(acquires.collect()).await.unwrap();
    }
    let many = scrape(&app).await;
    assert_eq!(many.value("kvgate_leases{scope=\"train\"}"), 100_000.0);
    assert_eq!(many.value("kvgate_waiting{scope=\"train\"}"), 50_000.0);
    assert_eq!(
        many.value("kvgate_waiting_tokens{scope=\"train\"}"),
        50_000.0
    );
    assert_eq!(few.series(), many.series());
    assert!(many.bytes < 200_000, "{} bytes", many.bytes);
}

/// What callers report is shown by reason.
#[tokio::test]
async fn reported_bypasses_are_shown() {
    let app = TestApp::start().await;
    app.gate
        .local_bypasses(vec![(LocalBypass::Breaker, 7), (LocalBypass::Timeout, 2)]);
    app.until(|view| view.durable_tally.reported(LocalBypass::Breaker) == 7)
        .await;
    let text = scrape(&app).await;
    assert_eq!(
        text.value("kvgate_client_bypasses_total{reason=\"breaker\"}"),
        7.0
    );
    assert_eq!(
        text.value("kvgate_client_bypasses_total{reason=\"timeout\"}"),
        2.0
    );
}

/// LEA1, DUR4: the log has one line for each change: features, an expiry by name, degraded and back, an
/// engine that is silent and back; a fault that repeats is told once and then by its number; and a line
/// that a request caused carries its id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lea1_the_log_tells_each_change_once() {
    let fleet = FakeFleet::start(FleetSpec::uniform(1, 1_000))
        .await
        .unwrap();
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let quick = [
        "--router",
        &router,
        "--program-admission",
        "--poll-interval-s",
        "0.1",
        "--stale-after-s",
        "0.5",
    ];
    let mut gate = Kvgate::serve(data.path(), &quick);
    let brief =
        json!({"ticket_id": "brief", "session_id": "s", "reservation_tokens": 7, "ttl_s": 1});
    let lease = gate.post("/v1/leases", &brief).await.lease();
    let mut foreign = None;
    for _ in 0..50 {
        let request = gate.http.get(gate.url("/v1/state"));
        let answer = request.header("host", "elsewhere.example").send().await;
        let answer = answer.unwrap();
        assert_eq!(answer.status(), 421);
        let id = answer.headers()["x-request-id"]
            .to_str()
            .unwrap()
            .to_owned();
        foreign.get_or_insert(id);
    }
    let line = gate.wait_for_log("a request under a foreign host name was refused");
    assert_eq!(line["request"].as_str(), foreign.as_deref(), "{line}");
    let line = gate.wait_for_log("a lease expired");
    let told = &line["fields"];
    assert_eq!(
        [
            &told["lease"],
            &told["ticket"],
            &told["session"],
            &told["tokens"]
        ],
        [&json!(lease), &json!("brief"), &json!("s"), &json!(7)]
    );
    fleet.engine(0).stop().await;
    let line = gate.wait_for_log("degraded: everything bypasses");
    assert_eq!(line["fields"]["reason"], "no_fresh_reading");
    let line = gate.wait_for_log("an engine gives no reading");
    assert_eq!(line["fields"]["engine"], json!(fleet.engine_url(0)));
    fleet.engine(0).start_again().await.unwrap();
    gate.wait_for_log("no longer degraded");
    gate.wait_for_log("an engine is read again");
    gate.signal("TERM");
    let line = gate.wait_for_log("repeated");
    assert_eq!(
        [&line["fields"]["fault"], &line["fields"]["times"]],
        [
            &json!("a request under a foreign host name was refused"),
            &json!(49)
        ]
    );
    gate.wait_for_log("stopped");
    let log = gate.log_text();
    let count = |message: &str| {
        let lines = log
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines
            .filter(|line| line["fields"]["message"] == message)
            .count()
    };
    for message in [
        "features",
        "a lease expired",
        "degraded: everything bypasses",
        "no longer degraded",
        "an engine gives no reading",
        "an engine is read again",
        "the worker set changed",
    ] {
        let expected = usize::from(message != "the worker set changed");
        assert_eq!(count(message), expected, "{message} in\n{log}");
    }
}

/// CLO8, CLO9: closes, their engines by how they ended, failures and reopened sessions are counted; a call
/// that waited for a close is not timed.
#[tokio::test]
async fn clo9_closes_are_shown() {
    let app = Builder {
        policy: Policy {
            session_lifecycle: true,
            ..Builder::default().policy
        },
        ..Builder::default()
    }
    .start()
    .await;
    let mut engines = EngineCalls::of(&app);
    let close = async |session: &str| {
        let path = format!("/v1/sessions/{session}/close");
        assert_eq!(app.post(&path, &json!({})).await.status, 202);
    };
    close("good").await;
    assert_eq!(
        scrape(&app).await.value("kvgate_session_closes_pending"),
        1.0
    );
    engines.answer_next(200, None).await;
    close("bad").await;
    engines.answer_next(400, None).await;
    app.until(|view| view.closes_pending == 0).await;
    let again = json!({"ticket_id": "t", "session_id": "good", "reservation_tokens": 1});
    app.post("/v1/leases", &again).await;
    let path = app.url("/v1/sessions/waits/close?wait_s=60");
    let waits = tokio::spawn(app.client.post(path).send());
    while app.gate.waiting_calls() < 1 {
        tokio::task::yield_now().await;
    }
    engines.answer_next(200, None).await;
    assert_eq!(waits.await.unwrap().unwrap().status(), 202);
    app.until(|view| view.durable_tally == view.tally).await;
    let text = scrape(&app).await;
    let deliveries = |result: &str| {
        text.value(&format!(
            "kvgate_session_close_deliveries_total{{result=\"{result}\"}}"
        ))
    };
    assert_eq!((deliveries("delivered"), deliveries("refused")), (2.0, 1.0));
    assert_eq!(text.value("kvgate_session_closes_total"), 3.0);
    assert_eq!(text.value("kvgate_session_close_failures_total"), 1.0);
    assert_eq!(text.value("kvgate_session_closes_pending"), 0.0);
    assert_eq!(text.value("kvgate_sessions_reopened_total"), 1.0);
    let route = "{route=\"/v1/sessions/{session_id}/close\"}";
    assert_eq!(
        text.value(&format!("kvgate_http_request_seconds_count{route}")),
        2.0
    );
}

/// CLO9: the log tells a close that failed with its session, and many of them by their number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clo9_failed_closes_are_told() {
    let fleet = FakeFleet::start(FleetSpec::uniform(1, 1_000))
        .await
        .unwrap();
    let refused = Behaviour::Status(400, "no".to_owned());
    fleet.engine(0).behave("/close_session", refused);
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let mut gate = Kvgate::serve(data.path(), &["--router", &router, "--session-lifecycle"]);
    for number in 0..5 {
        let path = format!("/v1/sessions/s-{number}/close?wait_s=60");
        assert_eq!(gate.post(&path, &json!({})).await.body["state"], "done");
    }
    let line = gate.wait_for_log("a close ended with engines failed or refused");
    let told = &line["fields"];
    assert_eq!(
        (&told["session"], &told["refused"]),
        (&json!("s-0"), &json!(1))
    );
    gate.signal("TERM");
    let line = gate.wait_for_log("repeated");
    assert_eq!(line["fields"]["times"], 4);
}
