//! Commands that ask a running service: what they show, how they end, and what they make of services that
//! are away, foreign or closed to them.

use std::fs;
use std::process::{Output, Stdio};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Method, Request, Response, Uri};
use futures_util::stream;
use kvgate::demo::Behaviour;
use serde_json::{Value, json};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinHandle;

use super::commands::{stderr, stdout};
use super::fleet;
use crate::support::process::{Kvgate, command};

/// Runs a command against a service; a child of its own, so that the test's own tasks go on.
async fn ask(url: &str, arguments: &[&str]) -> Output {
    ask_with(url, arguments, &[]).await
}

async fn ask_with(url: &str, arguments: &[&str], env: &[(&str, &str)]) -> Output {
    let mut asking = command(arguments);
    asking.env("KVGATE_URL", url).envs(env.iter().copied());
    tokio::task::spawn_blocking(move || asking.output().unwrap())
        .await
        .unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn json_of(output: &Output) -> Value {
    assert_eq!(code(output), 0, "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The one line on stderr.
fn said(output: &Output) -> String {
    let text = stderr(output);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("kvgate: "), "{text}");
    text
}

fn rows(output: &Output) -> Vec<Vec<String>> {
    assert_eq!(code(output), 0, "{}", stderr(output));
    let text = stdout(output);
    assert!(!text.contains('\u{1b}'), "no colour in a pipe: {text:?}");
    let cells = |line: &str| line.split("  ").map(str::trim).map(str::to_owned).collect();
    let lines = text.lines().skip(1);
    lines
        .map(cells)
        .map(|cells: Vec<String>| cells.into_iter().filter(|cell| !cell.is_empty()).collect())
        .collect()
}

/// A gate that admits, over two engines of 500,000 tokens.
async fn gate(more: &[&str]) -> (kvgate::demo::FakeFleet, tempfile::TempDir, Kvgate) {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let mut arguments = vec![
        "--router",
        &router,
        "--program-admission",
        "--claim-grace-s",
        "60",
    ];
    arguments.extend(more);
    let gate = Kvgate::serve(data.path(), &arguments);
    (fleet, data, gate)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn state_is_a_page_or_what_the_api_answers() {
    let (_fleet, _data, gate) = gate(&[]).await;
    gate.acquire("t-1", 300_000).await;
    let url = gate.url("");
    let page = ask(&url, &["state"]).await;
    assert_eq!(code(&page), 0, "{}", stderr(&page));
    let text = stdout(&page);
    assert!(!text.contains('\u{1b}'), "{text:?}");
    for part in [
        "features      admission on, session closes off",
        "ceiling       900,000  tokens: 90.0 % of 1,000,000",
        "reserved      300,000   33.3 %  1 lease",
        "available     600,000   66.7 %",
        "queue         nobody waits",
        "epoch         1",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let body = json_of(&ask(&url, &["state", "-o", "json"]).await);
    assert_eq!(body["budget"]["reserved"], 300_000);
    // A slash at the end of an address is no other address.
    assert_eq!(code(&ask(&format!("{url}/"), &["state"]).await), 0);
}

/// 1,200 waiters: one page, all pages, and the filters.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_and_leases_are_filtered_and_paged() {
    let (_fleet, _data, gate) = gate(&["--admission-max-wait-s", "600"]).await;
    let url = gate.url("");
    assert_eq!(gate.acquire("first", 900_000).await.action(), "admit");
    for part in 0..2 {
        let operations: Vec<Value> = (0..600)
            .map(|number| {
                let number = part * 600 + number;
                json!({"op": "acquire", "ticket_id": format!("t-{number}"),
                    "session_id": format!("s-{}", number % 100), "reservation_tokens": 1_000,
                    "client": if number % 2 == 0 { "even" } else { "odd" }})
            })
            .collect();
        let answer = gate
            .post("/v1/batch", &json!({"operations": operations}))
            .await;
        assert_eq!(answer.status, 200);
    }
    let page = ask(&url, &["queue", "--limit", "2"]).await;
    let found = rows(&page);
    assert_eq!(found.len(), 2);
    assert_eq!(found[0][..4], ["1", "t-0", "s-0", "1,000"]);
    assert_eq!(found[0].len(), 7, "{found:?}");
    assert_eq!(found[1][6], "behind_older");
    assert!(said(&page).contains("2 of 1,200 rows are shown; --all"));

    let all = ask(&url, &["queue", "--all", "-o", "json"]).await;
    let body = json_of(&all);
    let items = body["items"].as_array().unwrap();
    assert_eq!(
        (items.len(), &body["total"], &body["next"]),
        (1_200, &json!(1_200), &Value::Null)
    );
    let places = items.iter().map(|item| item["position"].as_u64().unwrap());
    assert!(places.eq(1..=1_200), "in order, each once");
    assert_eq!(rows(&ask(&url, &["queue", "--all"]).await).len(), 1_200);

    let count = async |arguments: &[&str]| rows(&ask(&url, arguments).await).len();
    assert_eq!(count(&["queue", "--session", "s-7", "--all"]).await, 12);
    assert_eq!(count(&["queue", "--client", "odd", "--all"]).await, 600);
    assert_eq!(
        count(&["queue", "--q", "t-119", "--scope", "train"]).await,
        11
    );
    assert_eq!(count(&["queue", "--scope", "eval"]).await, 0);

    let leases = rows(&ask(&url, &["leases"]).await);
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0][1..4], ["first", "s", "900,000"]);
    let listed = rows(&ask(&url, &["leases", "list", "--session", "s"]).await);
    assert_eq!(listed[0][..5], leases[0][..5]);
    let body = json_of(&ask(&url, &["leases", "-o", "json"]).await);
    assert_eq!(body["items"][0]["lease_id"], leases[0][0].as_str());
}

/// A close that an engine refuses fails, is listed with the reason, and is sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closes_are_listed_and_sent_again() {
    let (fleet, _data, gate) = gate(&["--session-lifecycle"]).await;
    let url = gate.url("");
    let refusal = Behaviour::Status(400, "no such thing".to_owned());
    fleet.engine(1).behave("/close_session", refusal);
    let close = gate
        .post("/v1/sessions/s-1/close?wait_s=30", &json!({}))
        .await;
    let id = close.body["close_id"].as_str().unwrap().to_owned();
    let found = rows(&ask(&url, &["closes", "--state", "done", "--session", "s-1"]).await);
    assert_eq!(found[0][..3], [id.as_str(), "s-1", "done"]);
    assert_eq!(found[0][4], "1 delivered, 1 refused");
    let trouble = format!("{}: status 400, no such thing", fleet.engine_url(1));
    assert_eq!(found[0][5], trouble);
    assert_eq!(
        rows(&ask(&url, &["closes", "--state", "joining"]).await).len(),
        0
    );

    fleet.engine(1).behave("/close_session", Behaviour::Normal);
    let again = ask(&url, &["closes", "retry", &id]).await;
    assert_eq!(code(&again), 0, "{}{}", stdout(&again), stderr(&again));
    fleet.engine(1).wait_for_closes(2).await;

    let mixed = ask(&url, &["closes", "retry", &id, "c-0", "-o", "json"]).await;
    assert_eq!(code(&mixed), 1);
    assert!(
        said(&mixed).contains("1 of 2 were not done"),
        "{}",
        stderr(&mixed)
    );
    let outcomes: Vec<Value> = serde_json::from_slice(&mixed.stdout).unwrap();
    assert_eq!(outcomes[0]["close_id"], id.as_str());
    assert_eq!(outcomes[1]["outcome"], "close_not_found");
    assert_eq!(outcomes[1]["status"], 404);
}

/// While closes are off a retry sends nothing, and that is no success.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_while_closes_are_off_is_not_done() {
    let fake = Fake::start(&[(
        "POST /v1/closes/c-1/retry",
        ok(&json!({"state": "disabled"})),
    )])
    .await;
    let output = ask(&fake.url, &["closes", "retry", "c-1"]).await;
    assert_eq!(code(&output), 1);
    assert!(stdout(&output).contains("session closes are off"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_are_listed_and_the_window_is_left_alone() {
    let (_fleet, _data, gate) = gate(&[]).await;
    let url = gate.url("");
    gate.post("/v1/steps", &json!({"run": "exp-7", "step": 0}))
        .await;
    gate.acquire("t-1", 1_000).await;
    for _ in 0..2 {
        let current = ask(&url, &["steps", "current", "--run", "exp-7"]).await;
        assert_eq!(code(&current), 0, "{}", stderr(&current));
        let text = stdout(&current);
        let admit = text
            .lines()
            .find(|line| line.starts_with("agentic_kv/admission/admit "));
        assert!(admit.is_some_and(|line| line.ends_with(" 1")), "{text}");
    }
    gate.post("/v1/steps", &json!({"run": "exp-7", "step": 1}))
        .await;
    let found = rows(&ask(&url, &["steps", "--run", "exp-7"]).await);
    assert_eq!(found.len(), 2);
    let second = found.iter().find(|row| row[1] == "1").unwrap();
    assert_eq!((second[0].as_str(), second[3].as_str()), ("exp-7", "1"));
    assert_eq!(
        rows(&ask(&url, &["steps", "--run", "other"]).await).len(),
        0
    );
    let body = json_of(&ask(&url, &["steps", "-o", "json"]).await);
    assert_eq!(body["total"], 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_revoked_one_by_one() {
    let gone = problem(410, "lease_expired", "The lease has expired.");
    let fake = Fake::start(&[
        (
            "POST /v1/leases/1-a/revoke",
            ok(&json!({"outcome": "revoked"})),
        ),
        (
            "POST /v1/leases/2-a%2Fb%25/revoke",
            ok(&json!({"outcome": "revoked"})),
        ),
        ("POST /v1/leases/3-a/revoke", gone),
    ])
    .await;
    let good = ask(&fake.url, &["leases", "revoke", "1-a", "2-a/b%"]).await;
    assert_eq!(rows(&good), [["1-a", "revoked"], ["2-a/b%", "revoked"]]);
    let mixed = ask(&fake.url, &["leases", "revoke", "3-a", "1-a"]).await;
    assert_eq!(code(&mixed), 1);
    let text = stdout(&mixed);
    assert!(
        text.contains("lease_expired") && text.contains("The lease has expired."),
        "{text}"
    );
    assert!(said(&mixed).contains("1 of 2"));
    assert_eq!(
        fake.asked().len(),
        4,
        "one that fails does not end the others"
    );
    let none = ask(&fake.url, &["leases", "revoke"]).await;
    assert_eq!(code(&none), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_are_shown_set_and_reset() {
    let settings = json!({"headroom": {"value": 0.85, "origin": "run_time"},
        "expected_decode_cap": {"value": null, "origin": "default"},
        "paused": {"value": true, "origin": "flag"}});
    let fake = Fake::start(&[
        ("GET /v1/settings", ok(&settings)),
        ("PATCH /v1/settings", ok(&settings)),
    ])
    .await;
    let expected = [
        ["expected_decode_cap", "none", "default"],
        ["headroom", "0.85", "run_time"],
        ["paused", "on", "flag"],
    ];
    assert_eq!(rows(&ask(&fake.url, &["settings"]).await), expected);
    let set = ["settings", "set", "headroom=0.85", "paused=on", "scope=all"];
    assert_eq!(rows(&ask(&fake.url, &set).await), expected);
    assert_eq!(
        json_of(&ask(&fake.url, &["settings", "show", "-o", "json"]).await),
        settings
    );
    let reset = ["settings", "reset", "headroom", "max-wait-s"];
    assert_eq!(code(&ask(&fake.url, &reset).await), 0);
    let bodies: Vec<Value> = fake
        .asked()
        .iter()
        .filter(|asked| asked.line.starts_with("PATCH"))
        .map(|asked| serde_json::from_slice(&asked.body).unwrap())
        .collect();
    assert_eq!(
        bodies,
        [
            json!({"headroom": 0.85, "paused": true, "scope": "all"}),
            json!({"headroom": null, "max_wait_s": null}),
        ]
    );
    let wrong = ask(&fake.url, &["settings", "set", "headroom"]).await;
    assert_eq!(code(&wrong), 2);

    let refusal = json!({"type": "/problems/invalid_request", "title": "The request is not valid", "status": 422,
        "detail": "The settings do not go together.", "code": "invalid_request",
        "errors": [{"pointer": "/headroom", "detail": "must be above 0 and at most 1"}], "instance": "r"});
    let reply = Reply {
        status: 422,
        kind: "application/problem+json",
        body: refusal.to_string(),
        location: None,
    };
    fake.set("PATCH /v1/settings", reply);
    let refused = ask(&fake.url, &["settings", "set", "headroom=7"]).await;
    assert_eq!(code(&refused), 1);
    let line = said(&refused);
    for part in ["headroom: must be above 0", "(invalid_request)"] {
        assert!(line.contains(part), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_audit_is_listed() {
    let entries = json!({"items": [{"at": "2026-01-02T03:04:05.678Z", "who": "ops", "action": "settings_changed",
        "detail": "headroom 0.9 to 0.85"}], "next": null, "total": 1});
    let fake = Fake::start(&[("GET /v1/audit", ok(&entries))]).await;
    let found = rows(&ask(&fake.url, &["audit", "--limit", "5"]).await);
    let expected = [
        "2026-01-02T03:04:05.678Z",
        "ops",
        "settings_changed",
        "headroom 0.9 to 0.85",
    ];
    assert_eq!(found, [expected]);
    assert_eq!(fake.asked()[0].line, "GET /v1/audit?limit=5");
}

/// A token comes from the first line, a named line or the variable, and is never shown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_sent_and_never_shown() {
    let refused = problem(401, "unauthorized", "No token, or one that is not known.");
    let fake = Fake::start(&[("GET /v1/queue", refused)]).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens");
    fs::write(&file, "# callers\nview:view:look\nops:admin:hidden-1\n").unwrap();
    let path = file.to_str().unwrap();
    let sent = async |arguments: &[&str], env: &[(&str, &str)]| {
        let mut all = vec!["queue"];
        all.extend(arguments);
        let output = ask_with(&fake.url, &all, env).await;
        assert_eq!(code(&output), 1);
        let line = said(&output);
        assert!(
            line.contains("--token-file") && line.contains("(unauthorized)"),
            "{line}"
        );
        assert!(!line.contains("hidden") && stdout(&output).is_empty());
        fake.asked().last().unwrap().authorization.clone()
    };
    assert_eq!(sent(&[], &[]).await, None);
    let bearer = |token: &str| Some(format!("Bearer {token}"));
    assert_eq!(sent(&["--token-file", path], &[]).await, bearer("look"));
    let named = ["--token-file", path, "--token-name", "ops"];
    assert_eq!(sent(&named, &[]).await, bearer("hidden-1"));
    let variables = [("KVGATE_TOKEN_FILE", path), ("KVGATE_TOKEN_NAME", "ops")];
    assert_eq!(sent(&[], &variables).await, bearer("hidden-1"));
    assert_eq!(
        sent(&[], &[("KVGATE_TOKEN", "hidden-2")]).await,
        bearer("hidden-2")
    );
    // What stands on the command line goes before the environment, and there the token before its file.
    let both = [("KVGATE_TOKEN", "hidden-2"), ("KVGATE_TOKEN_FILE", path)];
    assert_eq!(sent(&[], &both).await, bearer("hidden-2"));
    assert_eq!(sent(&["--token-file", path], &both).await, bearer("look"));
    assert_eq!(
        sent(&["--token-name", "ops"], &both).await,
        bearer("hidden-1")
    );

    for (arguments, part) in [
        (
            &["state", "--token-file", path, "--token-name", "nobody"][..],
            "no line \"nobody\"",
        ),
        (
            &["state", "--token-file", "does-not-exist"],
            "cannot be read",
        ),
        (&["state", "--token-name", "ops"], "--token-file"),
    ] {
        let output = ask(&fake.url, arguments).await;
        assert_eq!(code(&output), 2);
        assert!(said(&output).contains(part), "{}", stderr(&output));
    }
}

/// Nobody there: 69. Somebody else there: 69 as well, and a redirect leads nowhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_is_away_or_foreign_is_told_in_one_sentence() {
    let elsewhere = Fake::start(&[]).await;
    let target = format!("{}/v1/state", elsewhere.url);
    let page = |status, body: &str| Reply {
        status,
        kind: "text/html",
        body: body.to_owned(),
        location: None,
    };
    let moved = Reply {
        location: Some(target.clone()),
        ..page(307, "")
    };
    for (reply, part) in [
        (page(502, "<html>Bad gateway</html>"), "status 502"),
        (page(200, "<html>Welcome</html>"), "not as kvgate does"),
        (page(200, "[1, 2]"), "not as kvgate does"),
        (page(401, "{\"error\": \"no\"}"), "not as kvgate does"),
        (page(200, ENDLESS), "larger than 64 MiB"),
        (moved, target.as_str()),
    ] {
        let fake = Fake::start(&[("GET /v1/state", reply)]).await;
        let output = ask(&fake.url, &["state"]).await;
        assert_eq!(code(&output), 69, "{part}: {}", stderr(&output));
        let line = said(&output);
        assert!(line.contains(part) && line.contains(&fake.url), "{line}");
        assert!(stdout(&output).is_empty());
    }
    assert!(elsewhere.asked().is_empty(), "a redirect is not followed");

    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let output = ask(&url, &["leases", "revoke", "1-a"]).await;
    assert_eq!(code(&output), 69);
    let line = said(&output);
    assert!(
        line.contains("cannot connect") && line.contains("--url"),
        "{line}"
    );
    let output = ask("nowhere", &["queue"]).await;
    assert_eq!(code(&output), 2);
    assert!(said(&output).contains("unix:PATH"));
}

/// A state of another version is told as that; `-o json` shows it all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_another_version_is_shown_as_json() {
    let fake = Fake::start(&[("GET /v1/state", ok(&json!({"budget": {}})))]).await;
    let output = ask(&fake.url, &["state"]).await;
    assert_eq!(code(&output), 1);
    assert!(said(&output).contains("-o json"));
    let body = json_of(&ask(&fake.url, &["state", "-o", "json"]).await);
    assert_eq!(body, json!({"budget": {}}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_on_a_unix_socket_is_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gate.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let app = Router::new().fallback(async |uri: Uri, headers: HeaderMap| {
        assert_eq!(headers["host"], "localhost");
        format!(
            "{{\"items\": [], \"next\": null, \"total\": 0, \"path\": \"{}\"}}",
            uri.path()
        )
    });
    let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    let url = format!("unix:{}", path.display());
    let body = json_of(&ask(&url, &["queue", "-o", "json"]).await);
    assert_eq!(body["total"], 0);
    server.abort();
    let gone = ask("unix:does-not-exist.sock", &["queue"]).await;
    assert_eq!(code(&gone), 69);
    assert!(said(&gone).contains("cannot connect to unix:does-not-exist.sock"));
}

/// `| head` is no error, whatever is written.
#[test]
fn a_reader_that_goes_away_is_no_error() {
    for arguments in [
        &["openapi"][..],
        &["completions", "bash"],
        &["serve", "--print-config"],
        &["check", "--engine", "http://127.0.0.1:9", "-o", "json"],
    ] {
        let mut writing = command(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(writing.stdout.take());
        let output = writing.wait_with_output().unwrap();
        let expected = i32::from(arguments[0] == "check");
        assert_eq!(
            code(&output),
            expected,
            "{arguments:?}: {}",
            stderr(&output)
        );
        assert!(!stderr(&output).contains("ipe"), "{}", stderr(&output));
    }
}

// ---- a stand-in for a service --------------------------------------------------------------------

/// A body without an end.
const ENDLESS: &str = "endless";

#[derive(Clone)]
struct Reply {
    status: u16,
    kind: &'static str,
    body: String,
    location: Option<String>,
}

fn ok(body: &Value) -> Reply {
    Reply {
        status: 200,
        kind: "application/json",
        body: body.to_string(),
        location: None,
    }
}

fn problem(status: u16, code: &str, detail: &str) -> Reply {
    let body = json!({"type": format!("/problems/{code}"), "title": "A title", "status": status, "detail": detail,
        "code": code, "instance": "r-1"});
    Reply {
        status,
        kind: "application/problem+json",
        body: body.to_string(),
        location: None,
    }
}

#[derive(Clone, Debug)]
struct Asked {
    line: String,
    authorization: Option<String>,
    body: Bytes,
}

#[derive(Default)]
struct Book {
    replies: Vec<(String, Reply)>,
    asked: Vec<Asked>,
}

struct Fake {
    url: String,
    book: Arc<Mutex<Book>>,
    server: JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Fake {
    /// Replies by method and path; everything else is a foreign 404.
    async fn start(replies: &[(&str, Reply)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let book = Arc::new(Mutex::new(Book::default()));
        let answering = Arc::clone(&book);
        let app = Router::new().fallback(async move |method: Method, request: Request<Body>| {
            let (head, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let mut book = answering.lock().unwrap();
            let authorization = head.headers.get("authorization");
            book.asked.push(Asked {
                line: format!("{method} {}", head.uri),
                authorization: authorization.map(|value| value.to_str().unwrap().to_owned()),
                body,
            });
            let wanted = format!("{method} {}", head.uri.path());
            let found = book.replies.iter().rev().find(|(path, _)| *path == wanted);
            answer(found.map(|(_, reply)| reply.clone()))
        });
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        let fake = Self { url, book, server };
        for (path, reply) in replies {
            fake.set(path, reply.clone());
        }
        fake
    }

    fn set(&self, path: &str, reply: Reply) {
        let mut book = self.book.lock().unwrap();
        book.replies.push((path.to_owned(), reply));
    }

    fn asked(&self) -> Vec<Asked> {
        self.book.lock().unwrap().asked.clone()
    }
}

fn answer(reply: Option<Reply>) -> Response<Body> {
    let Some(reply) = reply else {
        return Response::builder().status(404).body(Body::empty()).unwrap();
    };
    let mut response = Response::builder()
        .status(reply.status)
        .header("content-type", reply.kind);
    if let Some(location) = &reply.location {
        response = response.header("location", location);
    }
    let body = if reply.body == ENDLESS {
        let piece = Bytes::from(vec![b' '; 1 << 20]);
        let pieces = stream::repeat_with(move || Ok::<_, std::convert::Infallible>(piece.clone()));
        Body::from_stream(pieces)
    } else {
        Body::from(reply.body)
    };
    response.body(body).unwrap()
}
