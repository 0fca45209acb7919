//! Sessions and closes over HTTP, as docs/API.md says. What engines answer, the tests say.

use std::collections::BTreeSet;

use kvgate::gate::Phase;
use kvgate_core::close::{CallFailure, CallResult, CallWhat};
use kvgate_core::command::{CloseRequest, Command};
use kvgate_core::effect::{CloseReply, Reply};
use kvgate_core::ids::{CloseId, SessionId};
use kvgate_core::policy::{CLOSES_OPEN_MAX, Policy};
use kvgate_core::units::Span;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::support::app::{Answer, Builder, EngineCalls, SOON, TestApp, post_bytes};
use crate::support::store::{Mood, Switch};

const ENGINE: &str = "http://engine-1:30000";

/// Session closes on, beside the usual settings of the tests.
fn lifecycle() -> Builder {
    let usual = Builder::default();
    Builder {
        policy: Policy {
            session_lifecycle: true,
            ..usual.policy
        },
        ..usual
    }
}

async fn start() -> TestApp {
    lifecycle().start().await
}

fn encoded(id: &str) -> String {
    percent_encoding::utf8_percent_encode(id, percent_encoding::NON_ALPHANUMERIC).to_string()
}

fn keys(body: &Value) -> BTreeSet<&str> {
    body.as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect()
}

fn set(names: &'static str) -> BTreeSet<&'static str> {
    names.split_whitespace().collect()
}

fn text<'a>(body: &'a Value, field: &str) -> &'a str {
    body[field].as_str().unwrap()
}

/// The same but for the time of the request: times are shown by the present clock (TIM1), which may
/// round to the next millisecond.
#[track_caller]
fn same(one: &Value, other: &Value) {
    let timeless = |close: &Value| {
        let mut close = close.clone();
        close.as_object_mut().unwrap().remove("requested_at");
        close
    };
    assert_eq!(timeless(one), timeless(other));
}

async fn close(app: &TestApp, session: &str, body: &Value) -> Answer {
    let path = format!("/v1/sessions/{}/close", encoded(session));
    let answer = app.post(&path, body).await;
    assert_eq!(answer.status, 202, "{}", answer.text);
    answer
}

async fn read(app: &TestApp, close: &Value) -> Value {
    let path = format!("/v1/closes/{}", text(close, "close_id"));
    let answer = app.get(&path).await;
    assert_eq!((answer.status, answer.seq()), (200, None));
    answer.json()
}

/// Waits until a close is done, and reads it.
async fn done(app: &TestApp, close: &Value) -> Value {
    app.until(|view| view.closes_pending == 0).await;
    let read = read(app, close).await;
    assert_eq!(read["state"], "done", "{read}");
    read
}

async fn acquire(app: &TestApp, ticket: &str, session: &str, tokens: u64) -> Value {
    let body = json!({"ticket_id": ticket, "session_id": session, "reservation_tokens": tokens, "wait_s": 0});
    app.post("/v1/leases", &body).await.json()
}

async fn release(app: &TestApp, admit: &Value) {
    let path = format!("/v1/leases/{}", text(admit, "lease_id"));
    assert_eq!(app.delete(&path).await.json()["outcome"], "released");
}

/// CLO1, CLO2, CLO4, CLO7: a close of an unknown session is promised at once, with all of its fields;
/// it goes to the engine, and what is told of it in the end is that it was delivered.
#[tokio::test]
async fn clo2_a_close_has_all_fields() {
    let app = start().await;
    let mut engines = EngineCalls::of(&app);
    // Without a body and without a content type.
    let empty = app.client.post(app.url("/v1/sessions/s%2F1/close"));
    let answer = app.send(empty).await;
    assert_eq!(answer.status, 202, "{}", answer.text);
    assert!(answer.seq().is_some(), "a promise is a change");
    assert_eq!(answer.header("kvgate-epoch"), Some("1"));
    let promised = answer.json();
    let fields = set("close_id session_id mode reason state requested_at engines counts");
    assert_eq!(keys(&promised), fields);
    assert_eq!(
        (&promised["session_id"], &promised["mode"]),
        (&json!("s/1"), &json!("join"))
    );
    assert_eq!(promised["reason"], Value::Null);
    let at = text(&promised, "requested_at");
    assert_eq!(at.len(), "2026-01-01T00:00:00.000Z".len());
    let pending = json!([{"url": ENGINE, "state": "pending", "attempts": 0, "last_status": null, "last_error": null}]);
    assert_eq!(promised["engines"], pending);
    assert_eq!(promised["counts"], json!({"pending": 1}));

    let call = engines.next().await;
    assert_eq!(call.engine.as_str(), ENGINE);
    let session = SessionId::new("s/1").unwrap();
    assert_eq!(call.what, CallWhat::Close(session));
    let state = app.get("/v1/state").await.json();
    assert_eq!(state["closes"], json!({"pending": 1, "failed": 0}));
    assert_eq!(read(&app, &promised).await["state"], "delivering");
    let accepted = CallResult::Status {
        code: 200,
        text: None,
    };
    engines.answer(&call, accepted);
    let done = done(&app, &promised).await;
    assert_eq!(keys(&done), fields);
    assert_eq!(
        (&done["engines"], &done["counts"]),
        (&json!([]), &json!({"delivered": 1}))
    );
    let state = app.get("/v1/state").await.json();
    assert_eq!(state["closes"], json!({"pending": 0, "failed": 0}));
    let session = app.get("/v1/sessions/s%2F1").await.json();
    same(&session["closes"][0], &done);
    let mut session = session;
    session["closes"][0] = Value::Null;
    assert_eq!(
        session,
        json!({"session_id": "s/1", "last_use_at": null, "leases": [], "waiting": [], "closes": [null]})
    );
}

/// CLO2: a second close joins the running one and changes nothing; `abort` upgrades it, and nothing
/// takes that back; after `done` a close is a new one.
#[tokio::test]
async fn clo2_a_second_close_joins_the_first() {
    let app = start().await;
    let mut engines = EngineCalls::of(&app);
    let held = acquire(&app, "t", "s", 10).await;
    let first = close(&app, "s", &json!({"reason": "terminal"})).await;
    let id = first.json()["close_id"].clone();
    assert_eq!(first.json()["reason"], "terminal");
    let cases = [
        (json!({}), "join", false),
        (json!({"mode": "join", "reason": "dropped"}), "join", false),
        (json!({"mode": "abort"}), "abort", true),
        (json!({"mode": "abort"}), "abort", false),
        (json!({"mode": "join"}), "abort", false),
    ];
    for (body, mode, changes) in cases {
        let again = close(&app, "s", &body).await;
        assert_eq!(again.seq().is_some(), changes, "{body}");
        let again = again.json();
        assert_eq!(
            (&again["close_id"], &again["mode"]),
            (&id, &json!(mode)),
            "{body}"
        );
        assert_eq!(
            (&again["state"], &again["reason"]),
            (&json!("joining"), &json!("terminal"))
        );
    }
    assert!(
        engines.are_none(),
        "the lease is held, and names no request"
    );
    release(&app, &held).await;
    engines.answer_next(200, None).await;
    done(&app, &first.json()).await;
    let next = close(&app, "s", &json!({})).await;
    assert!(next.seq().is_some());
    assert_ne!(next.json()["close_id"], id);
    assert_eq!(next.json()["mode"], "join");
}

/// CLO3: `abort` ends the requests of held leases, but none that begins the name of another session's.
#[tokio::test]
async fn clo3_what_is_not_aborted_is_shown() {
    let app = start().await;
    let mut engines = EngineCalls::of(&app);
    for (ticket, session, request) in [
        ("t-1", "s", "rid-1"),
        ("t-2", "s", "rid-2"),
        ("u", "other", "rid-2-longer"),
    ] {
        let body = json!({"ticket_id": ticket, "session_id": session, "reservation_tokens": 1, "request_id": request});
        app.post("/v1/leases", &body).await;
    }
    let aborting = close(&app, "s", &json!({"mode": "abort"})).await.json();
    assert_eq!(aborting["not_aborted"], json!(["rid-2"]));
    let call = engines.next().await;
    assert!(matches!(&call.what, CallWhat::Abort(request) if request.as_str() == "rid-1"));
    assert!(engines.are_none());
}

/// CLO3: the waiters of a closed session are told so on their open calls and on later ones.
#[tokio::test]
async fn clo3_waiters_are_withdrawn() {
    let app = start().await;
    acquire(&app, "holder", "other", 1_000).await;
    let body = json!({"ticket_id": "w", "session_id": "s", "reservation_tokens": 1, "wait_s": 60});
    let call = tokio::spawn(app.client.post(app.url("/v1/leases")).json(&body).send());
    app.until(|view| view.waiting == 1).await;
    close(&app, "s", &json!({})).await;
    let told = Answer::of(call.await.unwrap().unwrap()).await.json();
    let again = app.post("/v1/leases", &body).await.json();
    for answer in [told, again] {
        assert_eq!(
            (&answer["action"], &answer["reason"]),
            (&json!("cancelled"), &json!("session_closed"))
        );
        assert_eq!(
            answer["session_reopened"], false,
            "a ticket that was there before the close opens nothing"
        );
    }
}

/// `?wait_s` ends when the close is done, also for who joined it; one that does not end is answered as
/// it stands.
#[tokio::test]
async fn wait_s_waits_for_done() {
    let app = start().await;
    let mut engines = EngineCalls::of(&app);
    let held = acquire(&app, "t", "s", 10).await;
    let short = app
        .post("/v1/sessions/s/close?wait_s=0.05", &json!({}))
        .await;
    assert!(short.status == 202 && short.seq().is_some());
    assert_eq!(short.json()["state"], "joining");
    let calls: Vec<_> = (0..3)
        .map(|_| {
            let path = app.url("/v1/sessions/s/close?wait_s=60");
            tokio::spawn(app.client.post(path).send())
        })
        .collect();
    while app.gate.waiting_calls() < 3 {
        tokio::task::yield_now().await;
    }
    release(&app, &held).await;
    engines.answer_next(200, None).await;
    for call in calls {
        let answer = Answer::of(call.await.unwrap().unwrap()).await;
        assert_eq!((answer.status, answer.seq()), (202, None), "joined");
        let done = answer.json();
        assert_eq!(done["close_id"], short.json()["close_id"]);
        assert_eq!(
            (&done["state"], &done["counts"]),
            (&json!("done"), &json!({"delivered": 1}))
        );
    }
    engines.accept_all();
    let at_once = app.post("/v1/sessions/t/close?wait_s=60", &json!({})).await;
    assert!(at_once.seq().is_some(), "the number of its promise");
    assert_eq!(at_once.json()["state"], "done");
    assert_eq!(app.gate.waiting_calls(), 0);
}

/// Whoever waits for a close and goes away takes nothing with it.
#[tokio::test]
async fn a_caller_that_goes_away_leaves_its_close() {
    let app = start().await;
    let mut engines = EngineCalls::of(&app);
    let held = acquire(&app, "t", "s", 10).await;
    let mut stream = app.connect().await;
    let request = post_bytes("/v1/sessions/s/close?wait_s=60", &json!({}));
    stream.write_all(&request).await.unwrap();
    while app.gate.waiting_calls() == 0 {
        tokio::task::yield_now().await;
    }
    drop(stream);
    while app.gate.waiting_calls() > 0 {
        tokio::task::yield_now().await;
    }
    release(&app, &held).await;
    engines.answer_next(200, None).await;
    app.until(|view| view.closes_pending == 0).await;
    let session = app.get("/v1/sessions/s").await.json();
    assert_eq!(session["closes"][0]["state"], "done");
    assert!(session["last_use_at"].as_str().unwrap().ends_with('Z'));
}

/// With the lifecycle feature off nothing is kept and nothing is sent, and the answer says so.
#[tokio::test]
async fn closes_are_off_by_default() {
    let app = TestApp::start().await;
    let mut engines = EngineCalls::of(&app);
    acquire(&app, "t", "s", 10).await;
    let before = app.picture().await;
    for path in ["/v1/sessions/s/close", "/v1/sessions/never/close?wait_s=60"] {
        let answer = app.post(path, &json!({"mode": "abort"})).await;
        assert_eq!((answer.status, answer.seq()), (200, None));
        assert_eq!(answer.json(), json!({"state": "disabled"}));
    }
    let batch = json!({"operations": [{"op": "close", "session_id": "s"}]});
    let answer = app.post("/v1/batch", &batch).await;
    assert_eq!(
        (answer.json(), answer.seq()),
        (
            json!({"results": [{"status": 200, "body": {"state": "disabled"}}]}),
            None
        )
    );
    app.get("/v1/sessions/never")
        .await
        .is_problem(404, "session_not_found");
    assert_eq!(app.get("/v1/closes").await.json()["total"], 0);
    assert_eq!(app.picture().await, before);
    assert!(engines.are_none());
}

/// Turned off, what was taken before is read, and a retry says that nothing is sent.
#[tokio::test]
async fn a_retry_while_closes_are_off_says_so() {
    let app = start().await;
    let mut engines = EngineCalls::of(&app);
    let refused = close(&app, "s", &json!({})).await.json();
    engines.answer_next(400, None).await;
    done(&app, &refused).await;
    let off = json!({"session_lifecycle": false});
    let answer = app.patch("/v1/settings", &off).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let path = format!("/v1/closes/{}", text(&refused, "close_id"));
    let answer = app.post(&format!("{path}/retry"), &json!({})).await;
    assert_eq!((answer.status, answer.seq()), (200, None));
    assert_eq!(answer.json(), json!({"state": "disabled"}));
    assert_eq!(app.get(&path).await.json()["counts"], json!({"refused": 1}));
    assert!(engines.are_none());
}

/// CLO5, CLO9: each engine shows its own state, with the engine's own words or with why it did not
/// answer; the close failed once, and the engines that took it are not listed in the end.
#[tokio::test]
async fn clo5_each_engine_shows_its_own_state() {
    let urls = ["http://a:1", "http://b:1", "http://c:1", "http://d:1"];
    let usual = lifecycle();
    let app = Builder {
        engines: urls.map(|url| (url, 100)).to_vec(),
        policy: Policy {
            close_attempts: 1,
            ..usual.policy
        },
        ..usual
    }
    .start()
    .await;
    let mut engines = EngineCalls::of(&app);
    let taken = close(&app, "s", &json!({})).await.json();
    assert_eq!(taken["counts"], json!({"pending": 4}));
    for _ in urls {
        let call = engines.next().await;
        let result = match call.engine.as_str() {
            "http://a:1" => CallResult::Status {
                code: 200,
                text: None,
            },
            "http://b:1" => CallResult::Status {
                code: 400,
                text: Some("<b>session</b> closes are off".into()),
            },
            "http://c:1" => CallResult::Failed(CallFailure::Timeout),
            _ => CallResult::Failed(CallFailure::NotAllowed),
        };
        engines.answer(&call, result);
    }
    let ended = done(&app, &taken).await;
    assert_eq!(
        ended["engines"],
        json!([
            {"url": "http://b:1", "state": "refused", "attempts": 1, "last_status": 400, "last_error": "<b>session</b> closes are off"},
            {"url": "http://c:1", "state": "failed", "attempts": 1, "last_status": null, "last_error": "no answer within the time-out"},
            {"url": "http://d:1", "state": "failed", "attempts": 1, "last_status": null, "last_error": "outside the allowed engine networks"},
        ])
    );
    let counts = json!({"delivered": 1, "refused": 1, "failed": 2});
    assert_eq!(ended["counts"], counts);
    let state = app.get("/v1/state").await.json();
    assert_eq!(state["closes"], json!({"pending": 0, "failed": 1}));
}

/// Section 9: of a finished close at most 16 exceptions are listed; the counts know all engines.
#[tokio::test]
async fn a_finished_close_lists_few_exceptions() {
    let usual = lifecycle();
    let urls: Vec<String> = (0..20).map(|n| format!("http://engine-{n}:1")).collect();
    let engines: Vec<(&'static str, u64)> = urls
        .iter()
        .map(|url| (&*String::leak(url.clone()), 100))
        .collect();
    let app = Builder { engines, ..usual }.start().await;
    let mut calls = EngineCalls::of(&app);
    let taken = close(&app, "s", &json!({})).await.json();
    assert_eq!(taken["engines"].as_array().unwrap().len(), 20);
    for number in 0..20 {
        let code = if number == 0 { 204 } else { 403 };
        calls.answer_next(code, None).await;
    }
    let ended = done(&app, &taken).await;
    assert_eq!(ended["engines"].as_array().unwrap().len(), 16);
    assert_eq!(ended["counts"], json!({"delivered": 1, "refused": 19}));
    assert_eq!(ended["engines"][0]["last_error"], Value::Null);
    // Not all that failed are listed, so all are asked.
    let path = format!("/v1/closes/{}/retry", text(&taken, "close_id"));
    let again = app.post(&path, &json!({})).await.json();
    assert_eq!(again["counts"], json!({"pending": 20}));
}

/// A retry sends to the failed engines once more, and is counted no second time (CLO9).
#[tokio::test]
async fn clo9_a_retry_sends_to_failed_engines() {
    let usual = lifecycle();
    let app = Builder {
        engines: vec![("http://a:1", 100), ("http://b:1", 100)],
        ..usual
    }
    .start()
    .await;
    let mut engines = EngineCalls::of(&app);
    let taken = close(&app, "s", &json!({})).await.json();
    let path = format!("/v1/closes/{}/retry", text(&taken, "close_id"));
    for _ in 0..2 {
        let call = engines.next().await;
        let code = if call.engine.as_str() == "http://a:1" {
            200
        } else {
            400
        };
        engines.answer(&call, CallResult::Status { code, text: None });
    }
    done(&app, &taken).await;
    let retried = app.send(app.client.post(app.url(&path))).await;
    assert!(retried.status == 202 && retried.seq().is_some());
    let retried = retried.json();
    assert_eq!(retried["close_id"], taken["close_id"]);
    assert_eq!(retried["state"], "delivering");
    assert_eq!(retried["counts"], json!({"delivered": 1, "pending": 1}));
    assert_eq!(retried["engines"][0]["url"], "http://b:1");
    let call = engines.answer_next(200, None).await;
    assert_eq!(call.engine.as_str(), "http://b:1");
    let ended = done(&app, &taken).await;
    assert_eq!(
        (&ended["engines"], &ended["counts"]),
        (&json!([]), &json!({"delivered": 2}))
    );
    let nothing = app.post(&path, &json!({})).await;
    assert_eq!((nothing.status, nothing.seq()), (202, None));
    same(&nothing.json(), &ended);
    let tally = &app.gate.view().tally;
    assert_eq!((tally.closes, tally.close_failures), (1, 1));
    assert!(engines.are_none());
}

/// CLO8: a retry that would hit a newer use of the session, or comes beside a newer close, is refused.
#[tokio::test]
async fn clo8_a_late_retry_is_refused() {
    let app = start().await;
    let mut engines = EngineCalls::of(&app);
    let retry = |close: &Value| format!("/v1/closes/{}/retry", text(close, "close_id"));
    let used = close(&app, "used", &json!({})).await.json();
    engines.answer_next(400, None).await;
    done(&app, &used).await;
    acquire(&app, "t", "used", 1).await;
    let closed = close(&app, "closed", &json!({})).await.json();
    engines.answer_next(400, None).await;
    done(&app, &closed).await;
    close(&app, "closed", &json!({})).await;
    engines.answer_next(400, None).await;
    app.until(|view| view.closes_pending == 0).await;
    let before = app.picture().await;
    for close in [used, closed] {
        app.post(&retry(&close), &json!({}))
            .await
            .is_problem(409, "close_superseded");
    }
    assert_eq!(app.picture().await, before);
    assert!(engines.are_none());
}

/// ID2: what was never a close is not found, whatever its bytes; a session that is not known neither.
#[tokio::test]
async fn unknown_closes_and_sessions_are_not_found() {
    let app = start().await;
    close(&app, "s", &json!({})).await;
    for id in [
        "1-0000000000000000",
        "99999-0000000000000000",
        "nonsense",
        "%00",
        "%zz",
        "%ff",
        "a%2Fb",
    ] {
        let path = format!("/v1/closes/{id}");
        app.get(&path).await.is_problem(404, "close_not_found");
        app.post(&format!("{path}/retry"), &json!({}))
            .await
            .is_problem(404, "close_not_found");
    }
    app.get("/v1/sessions/S")
        .await
        .is_problem(404, "session_not_found");
}

/// Bad input is refused with its place, and changes nothing.
#[tokio::test]
async fn bad_input_of_closes_is_named() {
    let app = start().await;
    let before = app.picture().await;
    let bodies = [
        (json!({"mode": "kill"}), "/mode"),
        (json!({"mode": "Join"}), "/mode"),
        (json!({"mode": 1}), "/mode"),
        (json!({"reason": "idle"}), "/reason"),
        (json!({"reason": "other"}), "/reason"),
        (json!({"session_id": "s"}), "/session_id"),
        (json!({"wait_s": 1}), "/wait_s"),
        (json!([]), ""),
    ];
    for (body, pointer) in &bodies {
        let answer = app.post("/v1/sessions/s/close", body).await;
        let problem = answer.is_problem(422, "invalid_request");
        assert_eq!(problem["errors"][0]["pointer"], *pointer, "{body}");
    }
    for (query, pointer) in [
        ("wait_s=-1", "?wait_s"),
        ("wait_s=60.001", "?wait_s"),
        ("wait_s=", "?wait_s"),
        ("wait_s=soon", "?wait_s"),
        ("wait_s=NaN", "?wait_s"),
        ("wait_s=inf", "?wait_s"),
        ("wait_s=1&wait_s=1", "?wait_s"),
        ("mode=abort", "?mode"),
    ] {
        let path = format!("/v1/sessions/s/close?{query}");
        let problem = app.post(&path, &json!({})).await;
        let problem = problem.is_problem(422, "invalid_request");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{query}");
    }
    app.post_text("/v1/sessions/s/close", "{")
        .await
        .is_problem(400, "invalid_json");
    let plain = app.client.post(app.url("/v1/sessions/s/close")).body("{}");
    app.send(plain)
        .await
        .is_problem(415, "unsupported_media_type");
    for (path, pointer) in [
        ("/v1/closes?state=open", "?state"),
        ("/v1/closes?state=", "?state"),
        ("/v1/closes?scope=train", "?scope"),
        ("/v1/closes?limit=1001", "?limit"),
        ("/v1/closes?cursor=7", "?cursor"),
        ("/v1/sessions?state=done", "?state"),
        ("/v1/sessions?client=c", "?client"),
        ("/v1/sessions?limit=0", "?limit"),
        ("/v1/sessions?session_id=a&session_id=b", "?session_id"),
        ("/v1/sessions/s?x=1", "?x"),
        ("/v1/closes/1-0000000000000000?x=1", "?x"),
    ] {
        let problem = app.get(path).await.is_problem(422, "invalid_request");
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{path}");
    }
    let retry = "/v1/closes/1-0000000000000000/retry";
    app.post(retry, &json!({"engines": []}))
        .await
        .is_problem(422, "invalid_request");
    app.post(&format!("{retry}?wait_s=1"), &json!({}))
        .await
        .is_problem(422, "invalid_request");
    for id in ["%2e", "%2e%2e", "%00", "%zz", "%", "%ff", &"a".repeat(513)] {
        for request in [
            format!("GET /v1/sessions/{id}"),
            format!("POST /v1/sessions/{id}/close"),
        ] {
            let request = format!(
                "{request} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            );
            app.raw(request.as_bytes())
                .await
                .is_problem(400, "invalid_id");
        }
    }
    let operations: Vec<Value> = bodies
        .iter()
        .filter(|(body, pointer)| body.is_object() && *pointer != "/session_id")
        .map(|(body, _)| {
            let mut operation = json!({"op": "close", "session_id": "s"});
            let fields = operation.as_object_mut().unwrap();
            fields.extend(body.as_object().unwrap().clone());
            operation
        })
        .chain([
            json!({"op": "close"}),
            json!({"op": "close", "session_id": 7}),
        ])
        .collect();
    let pointers = [
        "/mode",
        "/mode",
        "/mode",
        "/reason",
        "/reason",
        "/wait_s",
        "/session_id",
        "/session_id",
    ];
    let batch = app
        .post("/v1/batch", &json!({"operations": operations}))
        .await
        .json();
    let results = batch["results"].as_array().unwrap();
    for (result, pointer) in results.iter().zip(pointers) {
        assert_eq!(result["status"], 422, "{result}");
        assert_eq!(result["body"]["errors"][0]["pointer"], pointer, "{result}");
    }
    let bad_id = json!({"operations": [{"op": "close", "session_id": ".."}]});
    let bad_id = app.post("/v1/batch", &bad_id).await.json();
    assert_eq!(bad_id["results"][0]["body"]["code"], "invalid_id");
    assert_eq!(app.picture().await, before);
    assert_eq!(app.get("/v1/sessions").await.json()["total"], 0);
}

/// DUR4: without a store a close is refused, and is not applied later; whoever waits for a close that
/// was promised before gets that promise.
#[tokio::test]
async fn dur4_a_close_that_was_refused_is_not_applied_later() {
    let switch = Switch::default();
    let opened = switch.clone();
    let app = lifecycle().start_on(move || opened.open()).await;
    acquire(&app, "t", "s", 10).await;
    let path = app.url("/v1/sessions/s/close?wait_s=2");
    let waiting = tokio::spawn(app.client.post(path).send());
    while app.gate.waiting_calls() == 0 {
        tokio::task::yield_now().await;
    }
    let promised = app.get("/v1/closes").await.json()["items"][0].clone();
    switch.set(Mood::Failing);
    for _ in 0..2 {
        app.post("/v1/sessions/lost/close", &json!({}))
            .await
            .is_problem(503, "store_unavailable");
    }
    let retry = format!("/v1/closes/{}/retry", text(&promised, "close_id"));
    app.post(&retry, &json!({}))
        .await
        .is_problem(503, "store_unavailable");
    let operations = json!({"operations": [{"op": "close", "session_id": "lost"}, {"op": "cancel", "ticket_id": "x"}]});
    let batch = app.post("/v1/batch", &operations).await.json();
    for result in batch["results"].as_array().unwrap() {
        assert_eq!(
            (&result["status"], &result["body"]["code"]),
            (&json!(503), &json!("store_unavailable"))
        );
    }
    for path in [
        "/v1/closes",
        "/v1/sessions",
        "/v1/sessions?session_id=s",
        "/v1/sessions/s",
        "/v1/closes/1-0000000000000000",
    ] {
        app.get(path).await.is_problem(503, "store_unavailable");
    }
    let answer = Answer::of(waiting.await.unwrap().unwrap()).await;
    assert_eq!(
        answer.status, 202,
        "it was promised before the store failed"
    );
    same(&answer.json(), &promised);
    switch.set(Mood::Good);
    let mut phases = app.gate.phases();
    let back = phases.wait_for(|phase| *phase != Phase::Unavailable);
    tokio::time::timeout(SOON, back).await.unwrap().unwrap();
    app.get("/v1/sessions/lost")
        .await
        .is_problem(404, "session_not_found");
    assert_eq!(app.get("/v1/closes").await.json()["total"], 1);
    assert_eq!(read(&app, &promised).await["state"], "joining");
}

/// A drain refuses closes, answers reads, and ends the calls that wait for a close with its promise.
#[tokio::test]
async fn a_drain_ends_the_calls_that_wait_for_a_close() {
    let app = start().await;
    acquire(&app, "t", "s", 10).await;
    let path = app.url("/v1/sessions/s/close?wait_s=60");
    let waiting = tokio::spawn(app.client.post(path).send());
    while app.gate.waiting_calls() == 0 {
        tokio::task::yield_now().await;
    }
    app.gate.begin_drain();
    let answer = Answer::of(waiting.await.unwrap().unwrap()).await;
    assert_eq!(answer.status, 202);
    assert_eq!(answer.json()["state"], "joining");
    let retry = format!("/v1/closes/{}/retry", text(&answer.json(), "close_id"));
    for path in ["/v1/sessions/s/close", &retry] {
        app.post(path, &json!({})).await.is_problem(503, "draining");
    }
    same(&read(&app, &answer.json()).await, &answer.json());
    for path in ["/v1/sessions/s", "/v1/sessions", "/v1/closes"] {
        assert_eq!(app.get(path).await.status, 200, "{path}");
    }
}

/// A drain ends the calls too that come to wait for a close in the very turn in which it begins.
#[tokio::test]
async fn a_drain_ends_the_calls_that_come_with_it() {
    let switch = Switch::default();
    let opened = switch.clone();
    let app = lifecycle().start_on(move || opened.open()).await;
    acquire(&app, "t", "s", 10).await;
    let promised = close(&app, "s", &json!({})).await.json();
    let id = CloseId::parse(text(&promised, "close_id")).unwrap();
    switch.set(Mood::Holding);
    let held = tokio::spawn(app.client.delete(app.url("/v1/tickets/marker")).send());
    let waits = switch.clone();
    tokio::task::spawn_blocking(move || waits.wait_until_held())
        .await
        .unwrap();
    let gate = app.gate.clone();
    let call = tokio::spawn(async move { gate.close_done(id, SOON * 100).await });
    while app.gate.waiting_calls() == 0 {
        tokio::task::yield_now().await;
    }
    app.gate.begin_drain();
    switch.set(Mood::Good);
    assert_eq!(held.await.unwrap().unwrap().status(), 200);
    let ended = tokio::time::timeout(SOON, call).await.unwrap();
    assert_eq!(ended.unwrap(), None);
}

/// DUR4: whoever waits for a close hears of its end, although the store failed when it was written.
#[tokio::test]
async fn dur4_a_close_that_ended_as_the_store_failed_is_told() {
    let switch = Switch::default();
    let opened = switch.clone();
    let app = lifecycle().start_on(move || opened.open()).await;
    let mut engines = EngineCalls::of(&app);
    let promised = close(&app, "s", &json!({})).await.json();
    let id = CloseId::parse(text(&promised, "close_id")).unwrap();
    let gate = app.gate.clone();
    let call = tokio::spawn(async move { gate.close_done(id, SOON * 100).await });
    while app.gate.waiting_calls() == 0 {
        tokio::task::yield_now().await;
    }
    // The writer has taken it when it answers what came later.
    read(&app, &promised).await;
    let asked = engines.next().await;
    switch.set(Mood::FailingAfterwards);
    let accepted = CallResult::Status {
        code: 200,
        text: None,
    };
    engines.answer(&asked, accepted);
    let mut phases = app.gate.phases();
    let failed = phases.wait_for(|phase| *phase == Phase::Unavailable);
    tokio::time::timeout(SOON, failed).await.unwrap().unwrap();
    switch.set(Mood::Good);
    let done = tokio::time::timeout(SOON, call).await.unwrap().unwrap();
    assert!(done.unwrap().is_done());
}

/// Section 9: more open closes than are kept are refused, and nothing changes; those that run are joined.
#[tokio::test]
async fn too_many_open_closes_are_overloaded() {
    let switch = Switch::default();
    let opened = switch.clone();
    let builder = Builder {
        engines: Vec::new(),
        ..lifecycle()
    };
    let app = builder.start_on(move || opened.open()).await;
    let command = |number: usize| {
        Command::Close(CloseRequest {
            session: SessionId::new(&format!("s-{number}")).unwrap(),
            mode: kvgate_core::close::CloseMode::Join,
            reason: None,
        })
    };
    for first in (0..CLOSES_OPEN_MAX).step_by(1_000) {
        let commands = (first..first + 1_000).map(command).collect();
        for reply in app.gate.batch(commands).await.unwrap() {
            assert!(matches!(
                reply.unwrap().1,
                Reply::Close(CloseReply::Taken(_))
            ));
        }
    }
    let full = app.post("/v1/sessions/one-more/close", &json!({})).await;
    full.is_problem(503, "overloaded");
    assert_eq!(full.seq(), None);
    let operations = json!({"operations": [{"op": "close", "session_id": "one-more"}, {"op": "close", "session_id": "s-7"}]});
    let batch = app.post("/v1/batch", &operations).await.json();
    assert_eq!(batch["results"][0]["status"], 503);
    assert_eq!(batch["results"][0]["body"]["code"], "overloaded");
    assert_eq!(batch["results"][1]["status"], 202);
    app.get("/v1/sessions/one-more")
        .await
        .is_problem(404, "session_not_found");
    let page = app.get("/v1/closes?state=joining&limit=1").await.json();
    assert_eq!(page["total"], CLOSES_OPEN_MAX);
    // The lists look at more than one slice, in both orders.
    for (list, first) in [("closes", "s-99999"), ("sessions", "s-9999")] {
        let page = app
            .get(&format!("/v1/{list}?q=s-9999&limit=2"))
            .await
            .json();
        assert_eq!(
            (&page["total"], &page["items"][0]["session_id"]),
            (&json!(11), &json!(first))
        );
        let next = page["next"].as_str().unwrap();
        let rest = format!("/v1/{list}?q=s-9999&cursor={next}");
        let rest = app.get(&rest).await.json();
        assert_eq!(rest["items"].as_array().unwrap().len(), 9);
    }
}

/// Lists: filters, pages, and the number of all that match.
#[tokio::test]
async fn sessions_and_closes_are_filtered_and_paged() {
    let app = start().await;
    let mut engines = EngineCalls::of(&app);
    // Three are done, one is on its way, two wait for a lease.
    for number in 0..3 {
        let taken = close(&app, &format!("done {number}"), &json!({})).await;
        engines.answer_next(200, None).await;
        done(&app, &taken.json()).await;
    }
    close(&app, "under way", &json!({})).await;
    engines.next().await;
    for number in 0..2 {
        let body = json!({"ticket_id": format!("ticket-{number}"), "session_id": format!("held-{number}"),
                          "reservation_tokens": 500, "client": format!("client-{number}")});
        app.post("/v1/leases", &body).await;
        close(&app, &format!("held-{number}"), &json!({})).await;
    }
    acquire(&app, "waits-here", "waiting", 5).await;
    let newest = app.get("/v1/closes?limit=1").await.json()["items"][0].clone();
    let newest_id = encoded(text(&newest, "close_id"));
    let lease = app.get("/v1/leases?session_id=held-0").await.json()["items"][0].clone();
    let cases = [
        ("/v1/closes".to_owned(), 6),
        ("/v1/closes?state=done".to_owned(), 3),
        ("/v1/closes?state=delivering".to_owned(), 1),
        ("/v1/closes?state=joining".to_owned(), 2),
        ("/v1/closes?session_id=held-1".to_owned(), 1),
        ("/v1/closes?session_id=held".to_owned(), 0),
        ("/v1/closes?q=held".to_owned(), 2),
        ("/v1/closes?q=done+1&state=done".to_owned(), 1),
        ("/v1/closes?q=done+1&state=joining".to_owned(), 0),
        (format!("/v1/closes?q={newest_id}"), 1),
        ("/v1/sessions".to_owned(), 7),
        ("/v1/sessions?session_id=under+way".to_owned(), 1),
        ("/v1/sessions?session_id=under".to_owned(), 0),
        ("/v1/sessions?session_id=.".to_owned(), 0),
        ("/v1/sessions?session_id=held-0&q=ticket-0".to_owned(), 1),
        ("/v1/sessions?session_id=held-0&q=ticket-1".to_owned(), 0),
        ("/v1/sessions?q=done".to_owned(), 3),
        ("/v1/sessions?q=ticket-".to_owned(), 2),
        ("/v1/sessions?q=client-1".to_owned(), 1),
        ("/v1/sessions?q=waits-here".to_owned(), 1),
        (
            format!(
                "/v1/sessions?session_id=held-0&q={}",
                encoded(text(&lease, "lease_id"))
            ),
            1,
        ),
        (format!("/v1/sessions?q={newest_id}"), 1),
        ("/v1/sessions?q=nothing".to_owned(), 0),
    ];
    for (path, total) in cases {
        let list = app.get(&path).await;
        assert_eq!((list.status, list.seq()), (200, None), "{}", list.text);
        let list = list.json();
        assert_eq!(keys(&list), set("items next total"));
        assert_eq!(
            (&list["total"], &list["next"]),
            (&json!(total), &Value::Null),
            "{path}"
        );
        assert_eq!(list["items"].as_array().unwrap().len(), total, "{path}");
    }
    let closes = app.get("/v1/closes").await.json();
    let order: Vec<&str> = closes["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|close| text(close, "session_id"))
        .collect();
    assert_eq!(
        order,
        [
            "held-1",
            "held-0",
            "under way",
            "done 2",
            "done 1",
            "done 0"
        ],
        "newest first"
    );
    let held = app.get("/v1/sessions?session_id=held-0").await.json()["items"][0].clone();
    assert_eq!(
        keys(&held),
        set("session_id last_use_at leases waiting closes")
    );
    assert_eq!(held["leases"][0]["lease_id"], lease["lease_id"]);
    assert_eq!(held["closes"][0]["state"], "joining");
    let waiting = app.get("/v1/sessions/waiting").await.json();
    let waiter = app.get("/v1/queue").await.json()["items"][0].clone();
    assert_eq!(waiting["waiting"][0]["ticket_id"], waiter["ticket_id"]);
    assert_eq!(keys(&waiting["waiting"][0]), keys(&waiter));
    for (list, limit) in [
        ("/v1/closes", 1),
        ("/v1/closes", 4),
        ("/v1/closes?state=done", 2),
        ("/v1/sessions", 3),
        ("/v1/sessions", 7),
    ] {
        let separator = if list.contains('?') { '&' } else { '?' };
        let name = |item: &Value| text(item, "session_id").to_owned();
        let all = app.get(list).await.json();
        let expected: Vec<String> = all["items"].as_array().unwrap().iter().map(name).collect();
        let mut seen = Vec::new();
        let mut path = format!("{list}{separator}limit={limit}");
        loop {
            let page = app.get(&path).await.json();
            assert_eq!(page["total"], all["total"], "of all pages");
            let items = page["items"].as_array().unwrap();
            assert!(items.len() <= limit);
            seen.extend(items.iter().map(name));
            match page["next"].as_str() {
                Some(next) => {
                    path = format!("{list}{separator}limit={limit}&cursor={next}");
                }
                None => break,
            }
        }
        assert_eq!(seen, expected, "{list}");
    }
}

/// A batch is one turn in order: a release before a close is over for it, an acquire behind a close
/// opens the session anew.
#[tokio::test]
async fn a_batch_closes_in_order() {
    let app = start().await;
    let mut engines = EngineCalls::of(&app);
    let held = acquire(&app, "t-1", "s", 10).await;
    let batch = json!({"operations": [
        {"op": "release", "lease_id": held["lease_id"]},
        {"op": "close", "session_id": "s", "mode": "abort", "reason": "dropped"},
        {"op": "close", "session_id": "s"},
        {"op": "acquire", "ticket_id": "t-2", "session_id": "r", "reservation_tokens": 10},
        {"op": "close", "session_id": "r"},
        {"op": "close", "session_id": "u"},
        {"op": "acquire", "ticket_id": "t-3", "session_id": "u", "reservation_tokens": 10},
    ]});
    let answer = app.post("/v1/batch", &batch).await;
    assert!(answer.seq().is_some());
    let results = answer.json()["results"].clone();
    let statuses: Vec<&Value> = results
        .as_array()
        .unwrap()
        .iter()
        .map(|result| &result["status"])
        .collect();
    assert_eq!(statuses, [200, 202, 202, 200, 202, 202, 200], "{results}");
    let body = |at: usize| &results[at]["body"];
    assert_eq!(
        (&body(1)["mode"], &body(1)["reason"]),
        (&json!("abort"), &json!("dropped"))
    );
    assert_eq!(body(2)["close_id"], body(1)["close_id"], "joined");
    assert_eq!(body(3)["session_reopened"], false);
    assert_eq!(body(4)["state"], "joining");
    assert_eq!(
        (&body(6)["action"], &body(6)["session_reopened"]),
        (&json!("admit"), &json!(true))
    );
    let call = engines.next().await;
    let closed = SessionId::new("s").unwrap();
    assert_eq!(call.what, CallWhat::Close(closed));
    assert!(
        engines.are_none(),
        "one session holds a lease, the other was used anew"
    );
    let superseded = read(&app, body(5)).await;
    assert_eq!(
        (&superseded["state"], &superseded["counts"]),
        (&json!("done"), &json!({"superseded": 1}))
    );
}

/// CLO8: the first acquire after a close says that the session is used anew, whatever it is answered;
/// repeats, later acquires and watches do not.
#[tokio::test]
async fn clo8_reopened_sessions_are_told() {
    let app = start().await;
    EngineCalls::of(&app).accept_all();
    let ask = async |ticket: &str, session: &str, fields: Value| {
        let mut body = json!({"ticket_id": ticket, "session_id": session, "reservation_tokens": 10, "wait_s": 0});
        let object = body.as_object_mut().unwrap();
        object.extend(fields.as_object().unwrap().clone());
        app.post("/v1/leases", &body).await
    };
    let closed = async |session: &str| {
        let path = format!("/v1/sessions/{session}/close?wait_s=60");
        assert_eq!(app.post(&path, &json!({})).await.json()["state"], "done");
    };
    let told = |answer: &Answer, action: &str| {
        let body = answer.json();
        assert_eq!(body["action"], action, "{body}");
        body["session_reopened"].as_bool().unwrap()
    };
    // An admit; then its repeat, another ticket, and the ticket read.
    assert!(!told(&ask("a-0", "a", json!({})).await, "admit"));
    app.delete("/v1/tickets/a-0").await;
    closed("a").await;
    let finished = ask("a-0", "a", json!({})).await;
    assert!(
        !told(&finished, "cancelled"),
        "a finished ticket uses nothing"
    );
    let first = ask("a-1", "a", json!({})).await;
    assert!(told(&first, "admit") && first.seq().is_some());
    assert!(!told(&ask("a-1", "a", json!({})).await, "admit"));
    assert!(!told(&ask("a-2", "a", json!({})).await, "admit"));
    assert!(!told(&app.get("/v1/tickets/a-1").await, "admit"));
    let notices = app.get("/v1/state").await.json()["notices"].clone();
    assert_eq!(notices[0]["code"], "session_reopened");
    assert!(text(&notices[0], "text").contains("a-1"), "{notices}");
    // A bypass.
    closed("b").await;
    let protected = json!({"protected": true});
    let bypass = ask("b-1", "b", protected.clone()).await;
    assert!(told(&bypass, "bypass"));
    assert!(
        bypass.seq().is_some(),
        "that it was used anew is kept, so it is a change"
    );
    assert!(!told(&ask("b-1", "b", protected.clone()).await, "bypass"));
    assert!(!told(&ask("b-2", "b", protected).await, "bypass"));
    // A wait that is told again, watched, and admitted in the end.
    ask("holder", "other", json!({"reservation_tokens": 980})).await;
    closed("c").await;
    assert!(told(&ask("c-1", "c", json!({})).await, "wait"));
    assert!(!told(&ask("c-1", "c", json!({})).await, "wait"));
    // An open call that is parked and admitted: one acquire, one answer.
    closed("d").await;
    let body =
        json!({"ticket_id": "d-1", "session_id": "d", "reservation_tokens": 5, "wait_s": 60});
    let parked = tokio::spawn(app.client.post(app.url("/v1/leases")).json(&body).send());
    app.until(|view| view.waiting == 2).await;
    let watch = json!({"ticket_ids": ["c-1"], "wait_s": 60});
    let watch = tokio::spawn(app.client.post(app.url("/v1/wait")).json(&watch).send());
    while app.gate.waiting_calls() < 2 {
        tokio::task::yield_now().await;
    }
    app.delete("/v1/tickets/holder").await;
    let parked = Answer::of(parked.await.unwrap().unwrap()).await;
    assert!(told(&parked, "admit"));
    let watched = Answer::of(watch.await.unwrap().unwrap()).await.json();
    assert_eq!(watched["results"][0]["session_reopened"], false);
    // Closed again and used again.
    app.delete("/v1/tickets/d-1").await;
    closed("d").await;
    let batch = json!({"operations": [
        {"op": "acquire", "ticket_id": "d-2", "session_id": "d", "reservation_tokens": 1},
        {"op": "acquire", "ticket_id": "d-3", "session_id": "d", "reservation_tokens": 1},
    ]});
    let results = app.post("/v1/batch", &batch).await.json()["results"].clone();
    assert_eq!(results[0]["body"]["session_reopened"], true);
    assert_eq!(results[1]["body"]["session_reopened"], false);
    assert_eq!(app.gate.view().tally.sessions_reopened, 5);
}

/// CLO2: while no member is known a close waits for one until its deadline; then it failed.
#[tokio::test]
async fn clo2_without_engines_a_close_fails_at_its_deadline() {
    let usual = lifecycle();
    let app = Builder {
        engines: Vec::new(),
        policy: Policy {
            close_deadline: Span::from_millis(200),
            ..usual.policy
        },
        ..usual
    }
    .start()
    .await;
    let taken = app
        .post("/v1/sessions/s/close?wait_s=60", &json!({}))
        .await
        .json();
    assert_eq!(
        (&taken["state"], &taken["engines"], &taken["counts"]),
        (&json!("done"), &json!([]), &json!({}))
    );
    let state = app.get("/v1/state").await.json();
    assert_eq!(state["closes"], json!({"pending": 0, "failed": 1}));
}

/// CLO5: an engine without session closes is told as such, was not asked, and is no failure.
#[tokio::test]
async fn clo5_an_engine_without_closes_is_no_failure() {
    let usual = lifecycle();
    let app = Builder {
        engines: vec![("http://a:1", 100), ("grpc://b:1", 100)],
        ..usual
    }
    .start()
    .await;
    EngineCalls::of(&app).accept_all();
    let path = "/v1/sessions/s/close?wait_s=60";
    let ended = app.post(path, &json!({})).await.json();
    assert_eq!(
        ended["engines"],
        json!([{"url": "grpc://b:1", "state": "unsupported", "attempts": 0, "last_status": null, "last_error": null}])
    );
    let counts = json!({"delivered": 1, "unsupported": 1});
    assert_eq!(
        (&ended["state"], &ended["counts"]),
        (&json!("done"), &counts)
    );
    let state = app.get("/v1/state").await.json();
    assert_eq!(state["closes"], json!({"pending": 0, "failed": 0}));
}

/// CLO11: a session that was closed for its idleness says so; callers cannot give that reason.
#[tokio::test]
async fn clo11_an_idle_close_names_its_reason() {
    let usual = lifecycle();
    let app = Builder {
        policy: Policy {
            session_idle_close: Some(Span::from_millis(1)),
            ..usual.policy
        },
        ..usual
    }
    .start()
    .await;
    EngineCalls::of(&app).accept_all();
    let admit = acquire(&app, "t", "s", 1).await;
    release(&app, &admit).await;
    app.until(|view| view.tally.closes == 1 && view.closes_pending == 0)
        .await;
    let session = app.get("/v1/sessions/s").await.json();
    let close = &session["closes"][0];
    assert_eq!(
        (&close["reason"], &close["mode"], &close["state"]),
        (&json!("idle"), &json!("join"), &json!("done"))
    );
}

/// S04, ID1: the ids of sessions are decoded once where they stand in a path, reach the engine as they
/// are, and stay apart in every list.
#[tokio::test]
async fn id1_session_ids_of_any_script_are_closed() {
    let app = start().await;
    let mut engines = EngineCalls::of(&app);
    let ids = [
        "task/42/try 1",
        "a%2Fb",
        "a/b",
        "../../etc",
        "会话-七",
        "naïve",
        "x y+z&q=1?#frag",
        "\u{202e}abc",
        "'; DROP",
        "{\"k\":1}",
        "%00",
        "close",
        "s/close",
    ];
    let mut closes = BTreeSet::new();
    for id in ids {
        let admit = acquire(&app, id, id, 1).await;
        release(&app, &admit).await;
        let taken = close(&app, id, &json!({})).await.json();
        assert_eq!(taken["session_id"], id);
        assert!(
            closes.insert(text(&taken, "close_id").to_owned()),
            "{id} fell together with another"
        );
        let call = engines.answer_next(200, None).await;
        assert!(matches!(&call.what, CallWhat::Close(session) if session.as_str() == id));
        assert_eq!(done(&app, &taken).await["session_id"], id);
    }
    for id in ids {
        let session = app.get(&format!("/v1/sessions/{}", encoded(id))).await;
        assert_eq!(
            (session.status, &session.json()["session_id"]),
            (200, &json!(id))
        );
        assert_eq!(session.json()["closes"].as_array().unwrap().len(), 1);
        for list in ["sessions", "closes"] {
            let path = format!("/v1/{list}?session_id={}", encoded(id));
            let list = app.get(&path).await.json();
            assert_eq!(
                (&list["total"], &list["items"][0]["session_id"]),
                (&json!(1), &json!(id)),
                "{path}"
            );
        }
    }
    assert_eq!(app.get("/v1/sessions").await.json()["total"], ids.len());
    // The twelfth id of the case is one that clients rewrite in paths, so none may have it (ID1).
    let dot = json!({"ticket_id": "t", "session_id": ".", "reservation_tokens": 1});
    app.post("/v1/leases", &dot)
        .await
        .is_problem(400, "invalid_id");
    let request = "POST /v1/sessions/%2E/close HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
    app.raw(request.as_bytes())
        .await
        .is_problem(400, "invalid_id");
}

/// The examples of the page are what the wire types read and write.
#[test]
fn the_examples_of_the_page_are_true() {
    fn again<T: serde::de::DeserializeOwned + serde::Serialize>(text: &str) -> Option<Value> {
        let read: T = serde_json::from_str(text).ok()?;
        Some(serde_json::to_value(read).unwrap())
    }
    let page = include_str!("../../docs/API.md");
    let part = page
        .split("\n## ")
        .find(|part| part.starts_with("Sessions and closes"));
    let examples: Vec<&str> = part
        .unwrap()
        .split("```json\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect();
    assert_eq!(examples.len(), 4);
    for example in examples {
        let written = again::<kvgate_api::CloseAnswer>(example)
            .or_else(|| again::<kvgate_api::Session>(example))
            .or_else(|| again::<kvgate_api::CloseRequest>(example));
        let value: Value = serde_json::from_str(example).unwrap();
        assert_eq!(written, Some(value));
    }
}
