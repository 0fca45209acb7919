//! Who may ask: host names, cross-site writes, tokens in addresses, and connections that hold on.

use std::net::Ipv4Addr;
use std::time::Duration;

use kvgate::http::Limits;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

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

/// At the bound of connections the oldest silent one is shed, so that callers get through.
#[tokio::test]
async fn the_oldest_silent_connection_is_shed() {
    let app = Builder {
        limits: Limits {
            connections: 3,
            ..Limits::default()
        },
        ..Builder::default()
    }
    .start()
    .await;
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
