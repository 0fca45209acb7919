//! Step reports and decisions over HTTP (REP1).

use std::collections::BTreeMap;
use std::path::Path;

use kvgate::store;
use kvgate_core::ids::EngineId;
use kvgate_core::policy::Policy;
use kvgate_core::reading::{Reading, Round};
use kvgate_core::units::{Ppm, Span, Tokens};
use serde_json::{Value, json};

use crate::support::app::{Builder, TestApp};

const ENGINE: &str = "http://engine-1:30000";

fn builder() -> Builder {
    let Builder { policy, .. } = Builder::default();
    Builder {
        policy: Policy {
            session_lifecycle: true,
            max_wait: Span::from_secs(600),
            ..policy
        },
        ..Builder::default()
    }
}

async fn on(directory: &Path) -> TestApp {
    let path = directory.to_owned();
    builder().start_on(move || store::open(&path)).await
}

/// A reading round in which the engine works at this usage.
async fn round(app: &TestApp, usage_millionths: u32) {
    let reading = Reading {
        usage: Ppm::new(usage_millionths),
        running: Some(1),
        ..Reading::idle(Tokens::new(1_000).unwrap())
    };
    let round = Round {
        began_at: app.gate.line().unwrap().now(),
        router: None,
        readings: vec![(EngineId::new(ENGINE), Ok(reading))],
        start_marks: Vec::new(),
    };
    app.gate.round(round).await.unwrap();
}

async fn step(app: &TestApp, run: &str, step: u64) -> Value {
    let answer = app
        .post("/v1/steps", &json!({"run": run, "step": step}))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.json()
}

fn metrics(report: &Value) -> BTreeMap<&str, f64> {
    let metrics = report["metrics"].as_object().unwrap();
    metrics
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_f64().unwrap()))
        .collect()
}

fn expected<'a>(pairs: &[(&'a str, f64)]) -> BTreeMap<&'a str, f64> {
    pairs.iter().copied().collect()
}

/// An acquire that is answered at once.
async fn acquire(app: &TestApp, fields: Value) -> Value {
    let mut body = json!({"session_id": "s", "wait_s": 0});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    app.post("/v1/leases", &body).await.json()
}

/// REP1, CNT1: every key of a step, against values worked out by hand, over a restart in the middle
/// of the step. Afterwards the window is empty, and the same step again is the same report.
#[tokio::test]
async fn rep1_a_scripted_step_key_by_key() {
    let directory = tempfile::tempdir().unwrap();
    let app = on(directory.path()).await;
    step(&app, "exp", 0).await;

    // Two admits, a bypass of each kind that can be had here, and two waiters.
    let first = acquire(&app, json!({"ticket_id": "t1", "reservation_tokens": 600})).await;
    assert_eq!(first["action"], "admit");
    acquire(&app, json!({"ticket_id": "t2", "reservation_tokens": 300})).await;
    acquire(
        &app,
        json!({"ticket_id": "p", "reservation_tokens": 1, "protected": true}),
    )
    .await;
    acquire(&app, json!({"ticket_id": "o", "reservation_tokens": 1_001})).await;
    acquire(
        &app,
        json!({"ticket_id": "e", "reservation_tokens": 1, "scope": "eval"}),
    )
    .await;
    acquire(&app, json!({"ticket_id": "w1", "reservation_tokens": 500})).await;
    acquire(
        &app,
        json!({"ticket_id": "w2", "reservation_tokens": 500, "session_id": "other"}),
    )
    .await;
    round(&app, 200_000).await;
    round(&app, 800_000).await;
    // The session of the second waiter ends: it is withdrawn, and its close finds no engine that
    // anybody calls here.
    let close = app.post("/v1/sessions/other/close", &json!({})).await;
    assert_eq!(close.status, 202, "{}", close.text);
    app.gate.begin_drain();
    app.gate.stop().await;
    drop(app);

    let app = on(directory.path()).await;
    round(&app, 500_000).await;
    // The waiter's place is kept; it is granted when the first lease is given back.
    let lease = first["lease_id"].as_str().unwrap();
    app.delete(&format!("/v1/leases/{lease}")).await;
    let granted = acquire(&app, json!({"ticket_id": "w1", "reservation_tokens": 500})).await;
    assert_eq!(granted["action"], "admit");
    let waited_s = granted["waited_s"].as_f64().unwrap();

    let report = step(&app, "exp", 1).await;
    assert_eq!(
        (&report["run"], &report["step"]),
        (&json!("exp"), &json!(1))
    );
    let usage_mean = (0.2 + 0.8 + 0.0 + 0.5) / 4.0;
    let mut said = metrics(&report);
    let mean = said
        .remove("agentic_kv/admission/wait_seconds_mean")
        .unwrap();
    assert!((mean - waited_s).abs() < 1e-9, "{mean} {waited_s}");
    // The start of the second process feeds one idle reading, at usage 0.
    let told_mean = said
        .remove("agentic_kv/budget/kv_token_usage_mean")
        .unwrap();
    assert!((told_mean - usage_mean).abs() < 1e-9, "{told_mean}");
    assert_eq!(
        said,
        expected(&[
            ("agentic_kv/session/lifecycle_enabled", 1.0),
            ("agentic_kv/session/close", 1.0),
            ("agentic_kv/session/close_failure", 0.0),
            ("agentic_kv/admission/admit", 3.0),
            ("agentic_kv/admission/bypass", 2.0),
            ("agentic_kv/admission/wait", 2.0),
            ("agentic_kv/admission/cancelled", 1.0),
            ("agentic_kv/admission/waiting", 0.0),
            ("agentic_kv/admission/bypass_protected", 1.0),
            ("agentic_kv/admission/bypass_oversize", 1.0),
            ("agentic_kv/admission/bypass_out_of_scope", 1.0),
            ("agentic_kv/admission/defer_rate", 2.0 / 7.0),
            ("agentic_kv/admission/degraded_rate", 0.0),
            ("agentic_kv/budget/ceiling", 1_000.0),
            ("agentic_kv/budget/reserved", 800.0),
            ("agentic_kv/budget/available_tokens", 200.0),
            ("agentic_kv/budget/reserved_utilization", 0.8),
            ("agentic_kv/budget/lease_count", 2.0),
            ("agentic_kv/budget/lease_expired", 0.0),
            ("agentic_kv/budget/kv_token_usage_max", 0.8),
            ("agentic_kv/budget/epoch", 1.0),
            ("agentic_kv/budget/degraded", 0.0),
        ])
    );

    assert_eq!(step(&app, "exp", 1).await, report, "the same step again");
    let next = step(&app, "exp", 2).await;
    let next = metrics(&next);
    for absent in [
        "admit",
        "bypass",
        "wait",
        "cancelled",
        "defer_rate",
        "wait_seconds_mean",
    ] {
        let key = format!("agentic_kv/admission/{absent}");
        assert!(!next.contains_key(key.as_str()), "{key}");
    }
    let listed = app.get("/v1/steps?run=exp&limit=2").await.json();
    let numbers: Vec<&Value> = listed["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| &item["step"])
        .collect();
    assert_eq!(numbers, [2, 1]);
    assert_eq!(listed["total"], 3);
    let cursor = listed["next"].as_str().unwrap();
    let rest = app.get(&format!("/v1/steps?run=exp&cursor={cursor}")).await;
    assert_eq!(rest.json()["items"][0]["step"], 0);
}

/// REP1: a look drains nothing, is no change, and has no step.
#[tokio::test]
async fn rep1_a_look_at_the_window() {
    let app = TestApp::start().await;
    app.acquire("t", 10).await;
    for _ in 0..2 {
        let look = app.get("/v1/steps/current?run=exp").await;
        assert_eq!((look.status, look.seq()), (200, None));
        let look = look.json();
        assert_eq!((&look["run"], &look["step"]), (&json!("exp"), &Value::Null));
        assert_eq!(look["metrics"]["agentic_kv/admission/admit"], 1.0);
    }
    let taken = app
        .post("/v1/steps", &json!({"run": "exp", "step": 3}))
        .await;
    assert!(taken.seq().is_some());
    assert_eq!(taken.json()["metrics"]["agentic_kv/admission/admit"], 1.0);
    let again = app
        .post("/v1/steps", &json!({"run": "exp", "step": 3}))
        .await;
    assert_eq!(again.seq(), None, "nothing changed");
    let unnamed = app.get("/v1/steps/current").await.json();
    assert_eq!(unnamed["run"], "");
}

/// Bad input gets a clear error and drains nothing.
#[tokio::test]
async fn rep1_bad_input_drains_nothing() {
    let app = TestApp::start().await;
    app.acquire("t", 10).await;
    for (body, status, code) in [
        (json!({}), 422, "invalid_request"),
        (json!({"step": -1}), 422, "invalid_request"),
        (json!({"step": 1.5}), 422, "invalid_request"),
        (json!({"step": 1_u64 << 53}), 422, "invalid_request"),
        (json!({"step": 1, "rnu": "x"}), 422, "invalid_request"),
        (json!({"step": 1, "run": "a\nb"}), 400, "invalid_id"),
        (
            json!({"step": 1, "run": "x".repeat(513)}),
            400,
            "invalid_id",
        ),
    ] {
        app.post("/v1/steps", &body).await.is_problem(status, code);
    }
    for query in ["?limit=0", "?limit=x", "?cursor=x", "?what=1"] {
        let answer = app.get(&format!("/v1/steps{query}")).await;
        answer.is_problem(422, "invalid_request");
    }
    let answer = app.get("/v1/steps/current?step=1").await;
    answer.is_problem(422, "invalid_request");
    let look = app.get("/v1/steps/current").await.json();
    assert_eq!(look["metrics"]["agentic_kv/admission/admit"], 1.0);
}

/// Each decision is explained with the figures of its moment; `after` continues where a reader was.
#[tokio::test]
async fn decisions_are_explained() {
    let app = TestApp::start().await;
    app.acquire("t1", 600).await;
    app.acquire("t2", 500).await;
    app.acquire("t3", 1).await;
    app.acquire("large", 2_000).await;
    app.delete("/v1/tickets/t3").await;
    let all = app.get("/v1/decisions").await.json();
    let said: Vec<(&str, &str, &str)> = all["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| {
            let word = |name: &str| item[name].as_str().unwrap();
            (word("ticket_id"), word("action"), word("reason"))
        })
        .collect();
    assert_eq!(
        said,
        [
            ("t1", "admit", "capacity_available"),
            ("t2", "wait", "capacity_exhausted"),
            ("t3", "wait", "behind_older"),
            ("large", "bypass", "oversize"),
            ("t3", "cancelled", "withdrawn"),
        ]
    );
    let explained = |index: usize| all["items"][index]["explanation"].as_str().unwrap();
    assert_eq!(explained(0), "600 + 0 reserved <= 1000 ceiling.");
    assert_eq!(
        explained(1),
        "500 + 600 reserved is 100 more than the ceiling of 1000."
    );
    assert_eq!(explained(2), "1 older waiter stands before it.");
    assert_eq!(
        (&all["more"], all["items"][1]["reserved"].as_u64()),
        (&json!(false), Some(600))
    );

    let number = |index: usize| all["items"][index]["number"].as_u64().unwrap();
    assert_eq!(all["next"], number(4));
    let part = app
        .get(&format!("/v1/decisions?after={}&limit=2", number(0)))
        .await;
    let part = part.json();
    let numbers = [&part["items"][0]["number"], &part["items"][1]["number"]];
    assert_eq!(
        numbers,
        [&all["items"][1]["number"], &all["items"][2]["number"]]
    );
    assert_eq!(
        (&part["next"], &part["more"]),
        (&json!(number(2)), &json!(true))
    );
    let none = app
        .get(&format!("/v1/decisions?after={}", number(4)))
        .await
        .json();
    assert_eq!(
        (&none["items"], &none["next"]),
        (&json!([]), &json!(number(4)))
    );
    for query in ["?after=x", "?after=-1", "?limit=1001", "?since=1"] {
        let answer = app.get(&format!("/v1/decisions{query}")).await;
        answer.is_problem(422, "invalid_request");
    }
}

/// Names, ranges and steps of history; without a sample every value is null.
#[tokio::test]
async fn history_is_asked_for_by_name_and_range() {
    let app = TestApp::start().await;
    let all = app.get("/v1/history").await.json();
    assert_eq!(
        (&all["step_s"], all["series"].as_object().unwrap().len()),
        (&json!(1), kvgate::history::Series::ALL.len())
    );
    let reserved = all["series"]["reserved"]["mean"].as_array().unwrap();
    assert_eq!(reserved.len(), 900);
    assert!(reserved.iter().all(Value::is_null));
    let hours = app.get("/v1/history?series=waiting&range=6h").await.json();
    assert_eq!(
        (&hours["step_s"], hours["series"].as_object().unwrap().len()),
        (&json!(10), 1)
    );
    let minutes = app
        .get("/v1/history?series=waiting&range=1h&step=60")
        .await
        .json();
    assert_eq!(
        minutes["series"]["waiting"]["max"]
            .as_array()
            .unwrap()
            .len(),
        60
    );
    for query in [
        "series=x", "series=", "range=8d", "range=0", "step=2", "from=1",
    ] {
        let answer = app.get(&format!("/v1/history?{query}")).await;
        answer.is_problem(422, "invalid_request");
    }
}
