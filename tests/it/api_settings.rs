//! Settings at run time, the audit and revocations over HTTP, as docs/API.md says.

use std::path::Path;

use kvgate::config::{Config, Layer};
use kvgate::gate::Phase;
use kvgate_core::close::CloseMode;
use kvgate_core::command::{Act, CloseRequest, Command, Operation};
use kvgate_core::ids::{Label, SessionId, TicketId};
use kvgate_core::policy::Policy;
use serde_json::{Value, json};

use crate::support::app::{Builder, TestApp, asking};
use crate::support::store::{Mood, Switch};

/// Audit entries, newest first, each as action and detail.
async fn audit(app: &TestApp) -> Vec<(String, String)> {
    let list = app.get("/v1/audit").await.json();
    let items = list["items"].as_array().unwrap();
    let text = |item: &Value, name: &str| item[name].as_str().unwrap().to_owned();
    items
        .iter()
        .map(|item| (text(item, "action"), text(item, "detail")))
        .collect()
}

/// What the service is started with when it is configured so.
fn configured(file: &str, env: &[(&str, &str)], flags: Layer) -> Builder {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kvgate.toml");
    std::fs::write(&path, file).unwrap();
    let env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
    let config = Config::load(flags, env, Some(Path::new(&path))).unwrap();
    Builder {
        policy: config.policy,
        origins: config.origins,
        ..Builder::default()
    }
}

/// SET1: every value is shown with who set it, and what was set at run time wins.
#[tokio::test]
async fn set1_values_are_shown_with_who_set_them() {
    let flags = Layer {
        admission_headroom: Some(0.5),
        ..Layer::default()
    };
    let file = "program_admission = true\nadmission_headroom = 0.4\nadmission_max_wait_s = 12.5";
    let app = configured(file, &[("KVGATE_ADMISSION_SCOPE", "all")], flags)
        .start()
        .await;
    let expected = json!({
        "program_admission": {"value": true, "origin": "file"},
        "session_lifecycle": {"value": false, "origin": "default"},
        "paused": {"value": false, "origin": "default"},
        "headroom": {"value": 0.5, "origin": "flag"},
        "pressure_threshold": {"value": 0.92, "origin": "default"},
        "expected_decode_cap": {"value": "none", "origin": "default"},
        "max_wait_s": {"value": 12.5, "origin": "file"},
        "scope": {"value": "all", "origin": "env"},
    });
    assert_eq!(app.get("/v1/settings").await.json(), expected);
    let wanted = json!({
        "program_admission": false, "session_lifecycle": true, "paused": true, "headroom": 0.25,
        "pressure_threshold": 1, "expected_decode_cap": 4096, "max_wait_s": 0, "scope": "train",
    });
    let answer = app.patch("/v1/settings", &wanted).await;
    assert!(
        answer.status == 200 && answer.seq().is_some(),
        "{}",
        answer.text
    );
    let shown = answer.json();
    for (name, value) in wanted.as_object().unwrap() {
        assert_eq!(shown[name]["origin"], "run_time", "{name}");
        assert_eq!(shown[name]["value"].as_f64(), value.as_f64(), "{name}");
        assert_eq!(shown[name]["value"].as_bool(), value.as_bool(), "{name}");
        assert_eq!(shown[name]["value"].as_str(), value.as_str(), "{name}");
    }
    assert_eq!(app.get("/v1/settings").await.json(), shown);
    // What was shown may be sent back; nothing changes by it.
    let mut same = json!({});
    for (name, setting) in shown.as_object().unwrap() {
        same[name] = setting["value"].clone();
    }
    let again = app.patch("/v1/settings", &same).await;
    assert_eq!((again.status, again.seq()), (200, None));
    let nulls: Value = wanted
        .as_object()
        .unwrap()
        .keys()
        .map(|name| (name.clone(), Value::Null))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let answer = app.patch("/v1/settings", &nulls).await;
    assert!(answer.seq().is_some());
    assert_eq!(answer.json(), expected, "as configured again");
    assert_eq!(audit(&app).await.len(), 2);
}

/// SET1: a value that cannot be is refused with its place, and nothing changes, whatever stands beside it.
#[tokio::test]
async fn set1_a_bad_value_changes_nothing() {
    let app = TestApp::start().await;
    let before = app.get("/v1/settings").await.json();
    for (body, pointers) in [
        (json!({"headroom": 0}), vec!["/headroom"]),
        (json!({"headroom": 1.000001}), vec!["/headroom"]),
        (json!({"headroom": -1, "paused": true}), vec!["/headroom"]),
        (json!({"headroom": "0.5"}), vec!["/headroom"]),
        (
            json!({"headroom": 2, "pressure_threshold": 0, "expected_decode_cap": 0, "max_wait_s": -1}),
            vec![
                "/headroom",
                "/pressure_threshold",
                "/expected_decode_cap",
                "/max_wait_s",
            ],
        ),
        (
            json!({"expected_decode_cap": "off"}),
            vec!["/expected_decode_cap"],
        ),
        (
            json!({"expected_decode_cap": 1.5}),
            vec!["/expected_decode_cap"],
        ),
        (
            json!({"expected_decode_cap": 1_u64 << 53}),
            vec!["/expected_decode_cap"],
        ),
        (json!({"max_wait_s": 1e9}), vec!["/max_wait_s"]),
        (json!({"scope": "eval"}), vec!["/scope"]),
        (json!({"paused": 1}), vec!["/paused"]),
        (json!({"paused": true, "max_wait": 3}), vec!["/max_wait"]),
        (json!([]), vec![""]),
    ] {
        let problem = app
            .patch("/v1/settings", &body)
            .await
            .is_problem(422, "invalid_request");
        let errors = problem["errors"].as_array().unwrap();
        let found: Vec<&str> = errors
            .iter()
            .map(|error| error["pointer"].as_str().unwrap())
            .collect();
        assert_eq!(found, pointers, "{body}: {problem}");
        assert!(errors.iter().all(|error| error["detail"] != ""));
    }
    let twice = app
        .send(
            app.client
                .patch(app.url("/v1/settings"))
                .header("content-type", "application/json")
                .body(r#"{"paused":true,"paused":false}"#),
        )
        .await;
    twice.is_problem(422, "invalid_request");
    app.send(app.client.patch(app.url("/v1/settings")).body("{}"))
        .await
        .is_problem(415, "unsupported_media_type");
    assert_eq!(app.get("/v1/settings").await.json(), before);
    assert!(audit(&app).await.is_empty());
}

/// SET1: numbers are free while admission is off; it is not turned on with one that cannot be used.
#[tokio::test]
async fn set1_numbers_hold_when_admission_is_turned_on() {
    let file = "admission_headroom = 7.0\nadmission_expected_decode_cap = 0";
    let app = configured(file, &[], Layer::default()).start().await;
    let on = json!({"program_admission": true});
    let problem = app
        .patch("/v1/settings", &on)
        .await
        .is_problem(422, "invalid_request");
    assert_eq!(problem["errors"][0]["pointer"], "/headroom", "{problem}");
    let both = json!({"program_admission": true, "headroom": 0.9});
    let problem = app
        .patch("/v1/settings", &both)
        .await
        .is_problem(422, "invalid_request");
    assert_eq!(problem["errors"][0]["pointer"], "/expected_decode_cap");
    let all = json!({"program_admission": true, "headroom": 0.9, "expected_decode_cap": "none"});
    assert_eq!(app.patch("/v1/settings", &all).await.status, 200);
    assert_eq!(app.acquire("t", 900).await["action"], "admit");
    // What admission needs cannot be taken away from under it.
    let problem = app
        .patch("/v1/settings", &json!({"headroom": null}))
        .await
        .is_problem(422, "invalid_request");
    assert_eq!(problem["errors"][0]["pointer"], "/headroom");
}

/// SET2: a change is in force from its answer on, for whoever waits too.
#[tokio::test]
async fn set2_a_change_is_in_force_at_once() {
    let app = TestApp::start().await;
    app.acquire("held", 1_000).await;
    let gate = app.gate.clone();
    let waiting = tokio::spawn(async move {
        let asked = asking("waits", 10, true);
        gate.acquire(asked, std::time::Duration::from_secs(60))
            .await
    });
    app.until(|view| view.waiting == 1).await;
    let paused = app.patch("/v1/settings", &json!({"paused": true})).await;
    assert_eq!(
        paused.json()["paused"],
        json!({"value": true, "origin": "run_time"})
    );
    let answer = waiting.await.unwrap().unwrap().value.unwrap().answer;
    assert!(
        format!("{:?}", answer.outcome).contains("Disabled"),
        "{answer:?}"
    );
    assert_eq!(app.acquire("new", 1).await["reason"], "disabled");
    let state = app.get("/v1/state").await.json();
    assert_eq!(state["features"]["paused"], true);
    app.patch("/v1/settings", &json!({"paused": null, "headroom": 0.5}))
        .await;
    let state = app.get("/v1/state").await.json();
    assert_eq!(
        (&state["budget"]["ceiling"], &state["budget"]["headroom"]),
        (&json!(500), &json!(0.5))
    );
    let details = audit(&app).await;
    assert_eq!(details.len(), 2);
    assert_eq!(
        details[0].1,
        "Set paused from on back to the configured off; headroom from 1 to 0.5."
    );
    assert_eq!(details[1].1, "Set paused from off to on.");
}

/// Section 10: a run-time setting that hides what somebody configured is a notice while it does.
#[tokio::test]
async fn set1_a_hidden_setting_is_a_notice() {
    let file = "program_admission = true\nadmission_headroom = 0.4";
    let app = configured(file, &[], Layer::default()).start().await;
    let told = async || {
        let state = app.get("/v1/state").await.json();
        let notices = state["notices"].as_array().unwrap().clone();
        notices
            .into_iter()
            .find(|notice| notice["code"] == "setting_hidden")
    };
    app.patch("/v1/settings", &json!({"max_wait_s": 5, "headroom": 0.4}))
        .await;
    assert_eq!(
        told().await,
        None,
        "a default is not hidden, nor the same value"
    );
    app.patch("/v1/settings", &json!({"headroom": 0.5})).await;
    let notice = told().await.unwrap();
    let text = notice["text"].as_str().unwrap();
    assert!(text.contains("headroom is 0.5 (file: 0.4)"), "{text}");
    assert!(
        notice["since"].as_str().unwrap()
            >= app.get("/v1/state").await.json()["started_at"]
                .as_str()
                .unwrap()
    );
    app.patch("/v1/settings", &json!({"headroom": null})).await;
    assert_eq!(told().await, None);
}

/// TIC6, SET3: a revoked lease is gone for its holder, its tokens are free, and the audit names it.
#[tokio::test]
async fn set3_a_revocation() {
    let app = TestApp::start().await;
    let lease = app.acquire("t", 600).await["lease_id"]
        .as_str()
        .unwrap()
        .to_owned();
    let path = format!("/v1/leases/{lease}/revoke");
    let answer = app.post(&path, &json!({})).await;
    assert_eq!(answer.json(), json!({"outcome": "revoked"}));
    assert!(answer.status == 200 && answer.seq().is_some());
    app.post(&path, &json!({}))
        .await
        .is_problem(410, "lease_expired");
    app.post(&format!("/v1/leases/{lease}/release"), &json!({}))
        .await
        .is_problem(410, "lease_expired");
    let read = app.get("/v1/tickets/t").await.json();
    assert_eq!(
        read,
        json!({"action": "ended", "reason": "revoked", "ticket_id": "t"})
    );
    assert_eq!(app.acquire("next", 1_000).await["action"], "admit");
    for unknown in ["99-0123456789abcdef", "nonsense"] {
        app.post(&format!("/v1/leases/{unknown}/revoke"), &json!({}))
            .await
            .is_problem(404, "lease_not_found");
    }
    app.post(&path, &json!({"why": "so"}))
        .await
        .is_problem(422, "invalid_request");
    let released = app.acquire("gone", 0).await["lease_id"]
        .as_str()
        .unwrap()
        .to_owned();
    app.delete(&format!("/v1/leases/{released}")).await;
    app.post(&format!("/v1/leases/{released}/revoke"), &json!({}))
        .await
        .is_problem(410, "lease_released");
    let list = app.get("/v1/audit").await.json();
    assert_eq!(list["total"], 1);
    let entry = &list["items"][0];
    assert_eq!(
        (&entry["who"], &entry["action"]),
        (&json!("local"), &json!("lease_revoked"))
    );
    let detail =
        format!("Revoked lease {lease} of 600 tokens, held by ticket \"t\" of session \"s\".");
    assert_eq!(entry["detail"], detail);
    let at: jiff::Timestamp = entry["at"].as_str().unwrap().parse().unwrap();
    assert!(at <= jiff::Timestamp::now());
}

/// SET3: what operators did is listed newest first, page by page, each with its figures.
#[tokio::test]
async fn set3_the_audit_is_paged() {
    let app = Builder {
        policy: Policy {
            session_lifecycle: true,
            ..Builder::default().policy
        },
        ..Builder::default()
    }
    .start()
    .await;
    app.acquire("held", 1_000).await;
    app.acquire("waits", 10).await;
    let who = Label::new("anna").unwrap();
    let by_anna = |act| {
        let who = who.clone();
        Command::Operate(Operation { who, act })
    };
    let ticket = |name: &str| TicketId::new(name).unwrap();
    let acts = vec![
        by_anna(Act::Cancel(ticket("waits"))),
        by_anna(Act::Cancel(ticket("waits"))),
        by_anna(Act::Cancel(ticket("held"))),
        by_anna(Act::Cancel(ticket("never"))),
        by_anna(Act::Close(CloseRequest {
            session: SessionId::new("s").unwrap(),
            mode: CloseMode::Join,
            reason: None,
        })),
    ];
    let replies = app.gate.batch(acts).await.unwrap();
    assert_eq!(replies.len(), 5);
    let details: Vec<String> = audit(&app)
        .await
        .into_iter()
        .map(|(_, detail)| detail)
        .collect();
    assert!(
        details[0].starts_with("Closed session \"s\" with close 1-"),
        "{details:?}"
    );
    assert_eq!(
        details[1..],
        [
            "Cancelled ticket \"never\", which was not seen yet.",
            "Cancelled ticket \"held\" of session \"s\", which held a lease of 1000 tokens.",
            "Cancelled ticket \"waits\" of session \"s\", which waited for 10 tokens.",
        ]
    );
    let first = app.get("/v1/audit?limit=3").await.json();
    assert_eq!(
        (first["items"].as_array().unwrap().len(), &first["total"]),
        (3, &json!(4))
    );
    assert!(
        first["items"]
            .as_array()
            .unwrap()
            .iter()
            .all(|entry| entry["who"] == "anna")
    );
    let next = first["next"].as_str().unwrap();
    let last = app
        .get(&format!("/v1/audit?limit=3&cursor={next}"))
        .await
        .json();
    assert_eq!(last["items"].as_array().unwrap().len(), 1);
    assert_eq!(last["next"], Value::Null);
    app.get("/v1/audit?who=anna")
        .await
        .is_problem(422, "invalid_request");
    // Callers of the gate are no operators: what they do is in no audit.
    app.delete("/v1/tickets/other").await;
    assert_eq!(audit(&app).await.len(), 4);
}

/// SET2, SET3, DUR4: while the store is away nothing is changed, now or later; opened again, it has what
/// was set before, though the start had returned everything to what is configured.
#[tokio::test]
async fn set2_settings_and_a_store_that_fails() {
    let store = Switch::default();
    let opener = store.clone();
    let app = Builder {
        resets: true,
        ..Builder::default()
    }
    .start_on(move || opener.open())
    .await;
    let half = json!({"headroom": 0.5});
    assert_eq!(app.patch("/v1/settings", &half).await.status, 200);
    store.set(Mood::Failing);
    app.patch("/v1/settings", &json!({"headroom": 0.25}))
        .await
        .is_problem(503, "store_unavailable");
    store.set(Mood::Good);
    let opened = store.opened();
    let mut phases = app.gate.phases();
    phases
        .wait_for(|phase| *phase != Phase::Unavailable)
        .await
        .unwrap();
    assert!(store.opened() >= opened);
    app.feed(&[("http://engine-1:30000", 1_000)]).await;
    let shown = app.get("/v1/settings").await.json();
    assert_eq!(
        shown["headroom"],
        json!({"value": 0.5, "origin": "run_time"})
    );
    assert_eq!(audit(&app).await.len(), 1);
}
