//! Attacks, as a table: host names that lead here, cross-site writes, tokens in addresses, requests that two readers
//! would take apart differently, and connections that hold on. What they come to is told in docs/SECURITY.md.

use std::net::Ipv4Addr;
use std::time::Duration;

use kvgate::http::Limits;
use reqwest::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::api_rights::operations;
use crate::support::app::{Answer, Builder, SOON, TestApp, asking, parse_raw, post_bytes};

async fn under_host(app: &TestApp, path: &str, host: &str) -> Answer {
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    app.raw(request.as_bytes()).await
}

/// X02: a page whose name was rebound to loopback is refused on every route.
#[tokio::test]
async fn foreign_host_names_are_refused() {
    let app = Builder {
        allowed_hosts: vec!["gate.example", "other.example:8080"],
        ..Builder::default()
    }
    .start()
    .await;
    let port = app.address.port();
    let foreign = [
        "rebind.attacker.example",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example",
        "user@localhost",
        "other.example",
        "other.example:1",
        "127.0.0.2",
        "[::2]",
        "0.0.0.0",
        "169.254.169.254",
    ];
    for host in foreign {
        for path in [
            "/v1/state",
            "/healthz",
            "/version",
            "/openapi.json",
            "/problems/draining",
            "/nothing",
            "/metrics",
            "/",
        ] {
            under_host(&app, path, host)
                .await
                .is_problem(421, "host_not_allowed");
        }
    }
    let own = [
        "127.0.0.1".to_owned(),
        format!("127.0.0.1:{port}"),
        "localhost".to_owned(),
        format!("localhost:{port}"),
        format!("localhost.:{port}"),
        "LOCALHOST".to_owned(),
        "[::1]".to_owned(),
        format!("[::1]:{port}"),
        "gate.example".to_owned(),
        "Gate.Example:443".to_owned(),
        "other.example:8080".to_owned(),
    ];
    for host in own {
        let answer = under_host(&app, "/v1/state", &host).await;
        assert_eq!(answer.status, 200, "{host}: {}", answer.text);
    }
    // An address in the request line counts as much as the header.
    let absolute = b"GET http://attacker.example/v1/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    app.raw(absolute).await.is_problem(421, "host_not_allowed");
}

/// X02: there is no route, page or method without the rule, and nothing of the service is told.
#[tokio::test]
async fn foreign_host_names_are_refused_on_every_route() {
    let app = TestApp::start().await;
    let before = app.picture().await;
    let mut asked = operations();
    for page in [
        "/",
        "/login",
        "/static/app.css",
        "/static/icon.svg",
        "/nothing",
    ] {
        asked.push((Method::GET, page.to_owned()));
    }
    for page in ["/login", "/logout", "/"] {
        asked.push((Method::POST, page.to_owned()));
    }
    asked.push((Method::OPTIONS, "/v1/leases".to_owned()));
    asked.push((Method::HEAD, "/v1/state".to_owned()));
    for (method, path) in asked {
        let what = format!("{method} {path}");
        let request = app.client.request(method, app.url(&path));
        let request = request.header("host", "rebind.attacker.example");
        let answer = app.send(request.json(&json!({}))).await;
        assert_eq!(answer.status, 421, "{what}: {}", answer.text);
        assert!(!answer.text.contains("attacker"), "{what}");
    }
    assert_eq!(app.picture().await, before);
}

/// X03: every method that writes, with every content type that a page can send: from another origin nothing changes.
#[tokio::test]
async fn each_method_and_content_type_is_refused_across_sites() {
    let app = TestApp::start().await;
    app.acquire("held", 1).await;
    let before = app.picture().await;
    // What a form of another site can send without being asked for leave, and what a script could.
    let bodies = [
        (
            "application/x-www-form-urlencoded",
            "session_id=s&mode=abort",
        ),
        ("text/plain", "{\"mode\":\"abort\",\"x\":\"=\"}"),
        (
            "multipart/form-data; boundary=b",
            "--b\r\n\r\n{}\r\n--b--\r\n",
        ),
        ("application/json", "{}"),
        ("application/csp-report", "{}"),
        ("", ""),
    ];
    let from_elsewhere = [
        &[("origin", "http://attacker.example")][..],
        &[
            ("origin", "https://attacker.example"),
            ("sec-fetch-site", "cross-site"),
        ],
        &[("origin", "null")],
        &[("origin", "null"), ("sec-fetch-site", "same-origin")],
        &[("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "same-site")],
        &[("sec-fetch-site", "")],
        &[("sec-fetch-site", "Same-Origin")],
        &[("sec-fetch-site", "none"), ("sec-fetch-site", "cross-site")],
        &[("origin", "http://localhost")],
    ];
    let writes = operations()
        .into_iter()
        .filter(|(method, _)| *method != Method::GET);
    let others = [Method::PUT, Method::PATCH, Method::OPTIONS, Method::TRACE];
    let others = others
        .into_iter()
        .map(|method| (method, "/v1/leases".to_owned()));
    let forms = [
        (Method::POST, "/login".to_owned()),
        (Method::POST, "/logout".to_owned()),
    ];
    let mut count = 0;
    for (method, path) in writes.chain(others).chain(forms) {
        for (kind, body) in bodies {
            for headers in from_elsewhere {
                let mut request = app.client.request(method.clone(), app.url(&path));
                for (name, value) in headers {
                    request = request.header(*name, *value);
                }
                if !kind.is_empty() {
                    request = request.header("content-type", kind);
                }
                let answer = app.send(request.body(body)).await;
                answer.is_problem(403, "forbidden");
                count += 1;
            }
        }
    }
    assert!(count > 500, "{count}");
    assert_eq!(app.picture().await, before);
}

/// A browser is let write only what is marked as JSON, so that no plain form of an old one gets through.
#[tokio::test]
async fn json_is_taken_as_json_only() {
    let app = TestApp::start().await;
    let before = app.picture().await;
    for (method, path) in operations() {
        if method != Method::POST {
            continue;
        }
        for kind in [
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/jsonp",
            "text/json; a=application/json",
        ] {
            let request = app.client.post(app.url(&path)).header("content-type", kind);
            let answer = app.send(request.body("{\"a\":\"=\"}")).await;
            answer.is_problem(415, "unsupported_media_type");
        }
    }
    assert_eq!(app.picture().await, before);
}

/// Reads change nothing, whatever they carry.
#[tokio::test]
async fn no_read_changes_anything() {
    let app = TestApp::start().await;
    app.acquire("held", 1).await;
    let before = app.picture().await;
    for (_, path) in operations() {
        for method in [Method::GET, Method::HEAD] {
            let request = app.client.request(method, app.url(&path));
            app.send(request.json(&json!({"session_id": "s", "mode": "abort"})))
                .await;
        }
    }
    assert_eq!(app.picture().await, before);
}

/// A page of the service posts forms and JSON; its origin and what browsers say of it pass.
#[tokio::test]
async fn forms_of_our_own_pages_pass() {
    let app = TestApp::start().await;
    let own = format!("http://{}", app.address);
    let form = app.form("/login", &[("token", "x")]);
    let form = form
        .header("origin", &own)
        .header("sec-fetch-site", "same-origin");
    assert_eq!(app.send(form).await.status, 303);
    let json = app.client.post(app.url("/v1/sessions/s/close"));
    let json = json
        .header("origin", &own)
        .header("sec-fetch-site", "same-origin");
    assert_eq!(app.send(json.json(&json!({}))).await.status, 200);
}

/// Requests that a proxy and the service might take apart differently: one answer, then the connection ends, and what
/// was hidden behind the first request is never read as a second one.
#[tokio::test]
async fn hidden_requests_are_never_served() {
    let app = TestApp::start().await;
    let hidden = "DELETE /v1/tickets/held HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let length = hidden.len();
    let forms = [
        (
            "two lengths",
            format!("Content-Length: 0\r\nContent-Length: {length}\r\n\r\n"),
        ),
        (
            "a list of lengths",
            format!("Content-Length: 0, {length}\r\n\r\n"),
        ),
        (
            "length and chunks",
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_owned(),
        ),
        (
            "chunks and length",
            format!("Transfer-Encoding: chunked\r\nContent-Length: {length}\r\n\r\n0\r\n\r\n"),
        ),
        (
            "chunks that are none",
            "Transfer-Encoding: xchunked\r\n\r\n".to_owned(),
        ),
        (
            "chunks before another coding",
            "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n".to_owned(),
        ),
        (
            "chunks twice",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n".to_owned(),
        ),
        (
            "a blank before the colon",
            "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n".to_owned(),
        ),
        (
            "a folded line",
            "X-A: b\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_owned(),
        ),
        (
            "a folded value",
            "Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n".to_owned(),
        ),
        (
            "a sign before the length",
            "Content-Length: +0\r\n\r\n".to_owned(),
        ),
        (
            "a length in hexadecimal",
            "Content-Length: 0x0\r\n\r\n".to_owned(),
        ),
        ("a negative length", "Content-Length: -1\r\n\r\n".to_owned()),
        ("no length at all", "Content-Length: \r\n\r\n".to_owned()),
        (
            "a length beyond all numbers",
            "Content-Length: 99999999999999999999999\r\n\r\n".to_owned(),
        ),
        (
            "a chunk size that is none",
            "Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n".to_owned(),
        ),
        (
            "a chunk size beyond all numbers",
            "Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\n\r\n".to_owned(),
        ),
        (
            "two hosts",
            "Host: localhost\r\nConnection: close\r\n\r\n".to_owned(),
        ),
        ("a zero byte", "X-A: b\0c\r\n\r\n".to_owned()),
        (
            "a lone carriage return",
            "X-A: b\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".to_owned(),
        ),
        ("a line without a colon", "X-A\r\n\r\n".to_owned()),
        ("a name that is none", "X A: b\r\n\r\n".to_owned()),
    ];
    app.acquire("held", 1).await;
    for (what, rest) in forms {
        let request =
            format!("POST /v1/sessions/s/close HTTP/1.1\r\nHost: localhost\r\n{rest}{hidden}");
        let mut stream = app.connect().await;
        stream.write_all(request.as_bytes()).await.unwrap();
        let answer = String::from_utf8(reads_to_the_end(&mut stream).await).unwrap();
        let answers = answer.matches("HTTP/1.1 ").count();
        assert_eq!(answers, 1, "{what}: {answer}");
        assert_eq!(app.gate.view().leases, 1, "{what}: {answer}");
    }
    let first_line = [
        "GET /v1/state HTTP/1.1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET  /v1/state HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /v1/state HTTP/2.0\r\nHost: localhost\r\n\r\n",
        "GET /v1/state\r\n\r\n",
        "GET v1/state HTTP/1.1\r\nHost: localhost\r\n\r\n",
        " GET /v1/state HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /v1/state HTTP/1.1\r\nHost: localhost\r\nHost: attacker.example\r\nConnection: close\r\n\r\n",
        "GET /v1/state HTTP/1.1\r\nConnection: close\r\n\r\n",
        "GET /v1/state HTTP/1.1\r\nHost: local host\r\nConnection: close\r\n\r\n",
        "GET /v1/state HTTP/1.1\r\nHost: localhost:99999\r\nConnection: close\r\n\r\n",
        "GET /v1/state HTTP/1.1\r\nHost: localhost/v1\r\nConnection: close\r\n\r\n",
    ];
    for request in first_line {
        let answer = app.raw(request.as_bytes()).await;
        assert_eq!(answer.status, 400, "{request:?}");
        answer.is_problem(400, "invalid_request");
    }
    // Who begins with HTTP/2 gets no answer at all.
    let preface = app.raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    assert_eq!((preface.status, preface.text.as_str()), (0, ""));
    // The address in the request line and the header must both be ours, and neither hides the other.
    for (line, host) in [
        ("http://attacker.example/v1/state", "localhost"),
        ("http://localhost/v1/state", "attacker.example"),
        ("http://user@localhost/v1/state", "localhost"),
        ("https://attacker.example/", "localhost"),
    ] {
        let request = format!("GET {line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        app.raw(request.as_bytes())
            .await
            .is_problem(421, "host_not_allowed");
    }
    let proxied =
        b"CONNECT attacker.example:80 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let answer = app.raw(proxied).await;
    assert!(answer.status >= 400, "{}", answer.text);
}

/// What every answer tells a browser, whatever the answer is.
#[tokio::test]
async fn every_answer_keeps_browsers_in_their_place() {
    let app = Builder {
        tokens: Some("wall:view:view-token-of-the-wall-1"),
        ..Builder::default()
    }
    .start()
    .await;
    let head = "Host: localhost\r\nConnection: close\r\nAuthorization: Bearer view-token-of-the-wall-1\r\n\r\n";
    let asked = [
        (format!("GET /v1/state HTTP/1.1\r\n{head}"), 200, false),
        (format!("GET /v1/nothing HTTP/1.1\r\n{head}"), 404, false),
        (format!("GET /metrics HTTP/1.1\r\n{head}"), 200, false),
        (
            format!("GET /static/app.css HTTP/1.1\r\n{head}"),
            200,
            false,
        ),
        (format!("GET / HTTP/1.1\r\n{head}"), 200, true),
        (format!("GET /login HTTP/1.1\r\n{head}"), 200, true),
        (
            format!("GET /problems/draining HTTP/1.1\r\n{head}"),
            200,
            true,
        ),
        (
            "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_owned(),
            401,
            true,
        ),
        (
            "GET /v1/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".to_owned(),
            401,
            false,
        ),
        (
            "GET / HTTP/1.1\r\nHost: attacker.example\r\nConnection: close\r\n\r\n".to_owned(),
            421,
            false,
        ),
        ("NONSENSE\r\n\r\n".to_owned(), 400, false),
    ];
    for (request, status, is_page) in asked {
        let answer = app.raw(request.as_bytes()).await;
        assert_eq!(answer.status, status, "{request}");
        let policy = answer.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'"), "{policy}");
        assert!(policy.contains("frame-ancestors 'none'"), "{policy}");
        assert!(
            !policy.contains("unsafe") && !policy.contains('*'),
            "{policy}"
        );
        assert_eq!(policy.contains("form-action 'self'"), is_page, "{request}");
        let referrer = if is_page {
            "same-origin"
        } else {
            "no-referrer"
        };
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("x-frame-options", "DENY"),
            ("cross-origin-resource-policy", "same-origin"),
            ("cross-origin-opener-policy", "same-origin"),
            ("referrer-policy", referrer),
        ] {
            let found: Vec<_> = answer.headers.get_all(name).iter().collect();
            assert_eq!(found, [value], "{name} of {request}");
        }
        assert!(
            answer
                .header("permissions-policy")
                .unwrap()
                .contains("camera=()")
        );
        assert_eq!(answer.header("access-control-allow-origin"), None);
        assert_eq!(answer.header("server"), None, "nobody is told what to try");
    }
}

/// X03: another site cannot write, whatever it sends; the service's own pages and plain clients can.
#[tokio::test]
async fn cross_site_writes_are_refused() {
    let app = TestApp::start().await;
    let admit = app.acquire("held", 1).await;
    let lease = format!("/v1/leases/{}", admit["lease_id"].as_str().unwrap());
    let before = app.picture().await;
    let own = format!("http://{}", app.address);
    let foreign = [
        ("origin", "http://attacker.example".to_owned()),
        ("origin", "null".to_owned()),
        ("origin", format!("https://{}", app.address)),
        (
            "origin",
            format!("http://127.0.0.1:{}", app.address.port() ^ 1),
        ),
        (
            "origin",
            format!("http://{}.attacker.example", Ipv4Addr::LOCALHOST),
        ),
        ("origin", String::new()),
        ("sec-fetch-site", "cross-site".to_owned()),
        ("sec-fetch-site", "same-site".to_owned()),
    ];
    for (name, value) in &foreign {
        let delete = app.client.delete(app.url(&lease)).header(*name, value);
        app.send(delete).await.is_problem(403, "forbidden");
        let form = app
            .client
            .post(app.url(&format!("{lease}/release")))
            .header(*name, value)
            .header("content-type", "application/x-www-form-urlencoded")
            .body("a=b");
        app.send(form).await.is_problem(403, "forbidden");
        let read = app.client.get(app.url("/v1/state")).header(*name, value);
        assert_eq!(
            app.send(read).await.status,
            200,
            "reads are not kept from pages by this"
        );
    }
    let mixed = app
        .client
        .delete(app.url(&lease))
        .header("origin", &own)
        .header("sec-fetch-site", "cross-site");
    app.send(mixed).await.is_problem(403, "forbidden");
    assert_eq!(app.picture().await, before);
    let localhost = format!("http://localhost:{}", app.address.port());
    for (origin, site) in [(&own, "same-origin"), (&localhost, "none")] {
        let write = app
            .client
            .delete(app.url("/v1/tickets/x"))
            .header("origin", origin)
            .header("sec-fetch-site", site);
        assert_eq!(app.send(write).await.status, 200, "{origin}");
    }
}

/// A token in an address is refused, in whatever spelling, also beside a good header.
#[tokio::test]
async fn tokens_in_addresses_are_refused() {
    let app = TestApp::start().await;
    for path in [
        "/v1/state?token=x",
        "/v1/leases?access_token=x",
        "/healthz?token",
        "/v1/state?%74oken=x",
        "/nothing?a=b&token=x",
    ] {
        app.get(path).await.is_problem(400, "invalid_request");
    }
    let beside = app
        .client
        .get(app.url("/v1/state?token=x"))
        .header("authorization", "Bearer x");
    app.send(beside).await.is_problem(400, "invalid_request");
}

fn impatient() -> Limits {
    Limits {
        head: Duration::from_millis(200),
        idle: Duration::from_millis(200),
        ..Limits::default()
    }
}

async fn reads_to_the_end(stream: &mut tokio::net::TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is an end as well.
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut bytes))
        .await
        .expect("the connection was left open");
    bytes
}

/// X05: connections that send nothing, send a head byte by byte, or are idle, are closed; a long wait is not.
#[tokio::test]
async fn slow_heads_and_idle_connections_are_closed() {
    let app = Builder {
        limits: impatient(),
        ..Builder::default()
    }
    .start()
    .await;
    app.acquire("holder", 1_000).await;
    let body = json!({"ticket_id": "w", "session_id": "s", "reservation_tokens": 1, "wait_s": 60})
        .to_string();
    let mut waiting = app.connect().await;
    let request = format!(
        "POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    waiting.write_all(request.as_bytes()).await.unwrap();
    app.until(|view| view.waiting == 1).await;
    let mut silent = app.connect().await;
    let mut slow = app.connect().await;
    slow.write_all(b"GET /v1/state HTTP/1.1\r\nHost: local")
        .await
        .unwrap();
    let mut idle = app.connect().await;
    idle.write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await
        .unwrap();
    assert_eq!(reads_to_the_end(&mut silent).await, b"");
    reads_to_the_end(&mut slow).await;
    assert_eq!(
        parse_raw(&reads_to_the_end(&mut idle).await).status,
        200,
        "answered, then closed"
    );
    assert_eq!(app.gate.view().waiting, 1);
    app.delete("/v1/tickets/w").await;
    assert_eq!(
        parse_raw(&reads_to_the_end(&mut waiting).await).status,
        200,
        "the long wait was not cut"
    );
}

/// At the bound of connections the oldest silent one is shed, so that callers get through. A caller that
/// pauses between two requests is older here, and keeps its connection.
#[tokio::test]
async fn the_oldest_silent_connection_is_shed() {
    let app = Builder {
        limits: Limits {
            connections: 4,
            ..Limits::default()
        },
        ..Builder::default()
    }
    .start()
    .await;
    let get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut caller = app.connect().await;
    let mut status = [0; 12];
    caller.write_all(get).await.unwrap();
    caller.read_exact(&mut status).await.unwrap();
    assert_eq!(&status, b"HTTP/1.1 200");
    let mut silent = Vec::new();
    for _ in 0..3 {
        silent.push(app.connect().await);
    }
    for _ in 0..5 {
        let mut stream = app.connect().await;
        stream
            .write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        assert_eq!(parse_raw(&reads_to_the_end(&mut stream).await).status, 200);
    }
    assert_eq!(reads_to_the_end(&mut silent[0]).await, b"");
    caller
        .write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let answers = reads_to_the_end(&mut caller).await;
    let text = String::from_utf8_lossy(&answers);
    assert_eq!(text.matches("HTTP/1.1 200").count(), 1, "{text}");
}

/// Section 9: connections that wait for an answer are not silent: at the bound they stay, and a further one is
/// served when one of them ended.
#[tokio::test]
async fn busy_connections_are_not_shed() {
    let app = Builder {
        limits: Limits {
            connections: 3,
            ..Limits::default()
        },
        ..Builder::default()
    }
    .start()
    .await;
    let held = app.gate.clone();
    // In process, so that it takes no connection.
    let answer = held
        .acquire(asking("held", 1_000, false), Duration::ZERO)
        .await
        .unwrap();
    answer.value.unwrap().receipt.unwrap().written();
    let mut busy = Vec::new();
    for number in 0..3_u64 {
        let mut call = app.connect().await;
        let body = json!({"ticket_id": format!("w-{number}"), "session_id": "s", "reservation_tokens": 1, "wait_s": 60});
        call.write_all(&post_bytes("/v1/leases", &body))
            .await
            .unwrap();
        app.until(|view| view.waiting == number + 1).await;
        busy.push(call);
    }
    let mut further = app.connect().await;
    further
        .write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    held.cancel(kvgate_core::ids::TicketId::new("w-1").unwrap())
        .await
        .unwrap();
    let mut bytes = Vec::new();
    tokio::time::timeout(SOON, further.read_to_end(&mut bytes))
        .await
        .expect("no room was made")
        .unwrap();
    assert_eq!(parse_raw(&bytes).status, 200);
    assert_eq!(app.gate.view().waiting, 2, "the others still wait");
    held.cancel(kvgate_core::ids::TicketId::new("held").unwrap())
        .await
        .unwrap();
    for place in [0, 2] {
        let mut bytes = Vec::new();
        tokio::time::timeout(SOON, busy[place].read_to_end(&mut bytes))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(parse_raw(&bytes).json()["action"], "admit");
    }
}
