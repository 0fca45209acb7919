//! Cases of access: who reaches the service, from where, and what a web page of others can make a browser do.

use std::fs;

use kvgate::demo::FakeFleet;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::fleet;
use crate::api_rights::operations;
use crate::support::process::{Kvgate, command};

const TOKEN: &str = "token-of-the-case-0123456789";

/// X01: it listens on loopback by default; on all addresses only with tokens or with the word; and with tokens nothing
/// but what says that it is alive is answered without one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x01_open_to_the_network_without_a_key() {
    let printed = command(&["serve", "--print-config"]).output().unwrap();
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(
        text.contains("listen = [\"127.0.0.1:7070\"]  # default"),
        "{text}"
    );

    let data = tempfile::tempdir().unwrap();
    let directory = data.path().to_str().unwrap();
    let all = ["serve", "--listen", "0.0.0.0:0", "--data", directory];
    let refused = command(&all).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        said.contains("--token-file") && said.contains("--insecure-no-auth"),
        "{said}"
    );
    assert!(!data.path().join("kvgate.redb").exists());

    let mut open = Kvgate::listen(
        data.path(),
        &["--listen", "0.0.0.0:0", "--insecure-no-auth"],
    );
    open.wait_for_log(
        "open to the network without tokens: whoever reaches the port has every right",
    );
    drop(open);

    let tokens = data.path().join("tokens");
    fs::write(&tokens, format!("ops:admin:{TOKEN}\n")).unwrap();
    let gate = Kvgate::serve(
        data.path(),
        &[
            "--listen",
            "0.0.0.0:0",
            "--token-file",
            tokens.to_str().unwrap(),
            "--metrics-auth",
        ],
    );
    for (method, path) in operations() {
        let request = || gate.http.request(method.clone(), gate.url(&path));
        let without = request().send().await.unwrap().status();
        let with = request().bearer_auth(TOKEN).send().await.unwrap().status();
        let is_open = ["/healthz", "/readyz", "/version", "/problems/x"].contains(&path.as_str());
        assert_eq!(without == 401, !is_open, "{method} {path}: {without}");
        assert_ne!(with, 401, "{method} {path}");
    }
    assert_eq!(
        gate.http.get(gate.url("/")).send().await.unwrap().status(),
        401
    );
}

async fn ask(gate: &Kvgate, request: &str) -> u16 {
    let mut stream = TcpStream::connect(gate.address()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

/// X02: a foreign name that leads to loopback is refused on every route, pages and `/metrics` among them; loopback names
/// and a configured one are served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x02_a_web_page_reaches_the_loopback_port() {
    let data = tempfile::tempdir().unwrap();
    let gate = Kvgate::serve(data.path(), &["--allowed-host", "gate.example"]);
    let port = gate.address().port();
    let reads = operations()
        .into_iter()
        .filter(|(method, _)| method.as_str() == "GET");
    let pages = ["/", "/login", "/static/app.css", "/nothing"].map(str::to_owned);
    for path in reads.map(|(_, path)| path).chain(pages) {
        let under = |host: &str| {
            format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
        };
        for host in [
            "rebind.attacker.example",
            &format!("rebind.attacker.example:{port}"),
        ] {
            assert_eq!(ask(&gate, &under(host)).await, 421, "{path} under {host}");
        }
        let own = format!(
            "127.0.0.1:{port} localhost:{port} [::1]:{port} gate.example gate.example:{port}"
        );
        for host in own.split(' ') {
            assert_ne!(ask(&gate, &under(host)).await, 421, "{path} under {host}");
        }
    }
    assert!(
        gate.log_text()
            .contains("a request under a foreign host name was refused")
    );
}

/// A service that holds a lease, has a waiter, and closes sessions.
async fn busy(fleet: &FakeFleet, data: &std::path::Path) -> (Kvgate, String) {
    let router = fleet.router_url();
    let arguments = [
        "--router",
        &router,
        "--program-admission",
        "--session-lifecycle",
    ];
    let gate = Kvgate::serve(data, &arguments);
    let lease = gate.acquire("held", 900_000).await.lease();
    assert_eq!(gate.acquire("waits", 1).await.action(), "wait");
    (gate, lease)
}

/// X03: a page of another origin presses every button there is: 403, nothing changes, and a line in the log. The same
/// calls without a browser, or from a page of the service, work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x03_another_site_presses_a_dashboard_button() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let (gate, lease) = busy(&fleet, data.path()).await;
    let before = (
        gate.list("/v1/leases").await.len(),
        gate.list("/v1/queue").await.len(),
    );
    let actions = [
        ("POST", "/v1/sessions/s/close".to_owned()),
        ("POST", format!("/v1/leases/{lease}/release")),
        ("DELETE", "/v1/tickets/waits".to_owned()),
        ("PATCH", "/v1/settings".to_owned()),
    ];
    let attacks = [
        ("application/x-www-form-urlencoded", "session_id=s1"),
        ("text/plain", "{\"session_id\":\"s1\",\"x\":\"=\"}"),
    ];
    for (method, path) in &actions {
        for (kind, body) in attacks {
            for (origin, site) in [
                ("http://attacker.example", "cross-site"),
                ("null", "cross-site"),
                ("http://localhost:1", "same-site"),
            ] {
                let request = gate.http.request(method.parse().unwrap(), gate.url(path));
                let request = request
                    .header("origin", origin)
                    .header("sec-fetch-site", site);
                let answer = request
                    .header("content-type", kind)
                    .body(body)
                    .send()
                    .await
                    .unwrap();
                assert_eq!(answer.status(), 403, "{method} {path}");
                let problem: Value = answer.json().await.unwrap();
                assert_eq!(problem["code"], "forbidden");
            }
        }
    }
    assert_eq!(
        (
            gate.list("/v1/leases").await.len(),
            gate.list("/v1/queue").await.len()
        ),
        before
    );
    assert_eq!(gate.get("/v1/state").await["closes"]["pending"], 0);
    assert!(gate.log_text().contains("a cross-site write was refused"));

    // Reads by links of other sites change nothing either.
    for (_, path) in &actions {
        gate.http.get(gate.url(path)).send().await.unwrap();
    }
    assert_eq!(
        (
            gate.list("/v1/leases").await.len(),
            gate.list("/v1/queue").await.len()
        ),
        before
    );

    let own = format!("http://{}", gate.address());
    let request = gate.http.delete(gate.url("/v1/tickets/waits"));
    let request = request
        .header("origin", &own)
        .header("sec-fetch-site", "same-origin");
    assert_eq!(request.send().await.unwrap().status(), 200);
    assert_eq!(
        gate.post("/v1/sessions/s/close", &json!({})).await.status,
        202
    );
}
