//! X04 and X05: a fleet that leads elsewhere, and heads that never end.

use std::time::Duration;

use futures_util::future::join_all;
use kvgate::demo::{Behaviour, FakeFleet, FleetSpec};
use kvgate::http::Limits;
use kvgate_core::close::CallResult;
use kvgate_core::policy::Policy;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::interval;

use crate::support::app::{Builder, EngineCalls, SOON, TestApp, parse_raw, post_bytes};
use crate::support::process::Kvgate;

/// The fleet of the case: an engine whose gauges are elsewhere, one whose close is, and entries that
/// are no engines.
async fn fleet_that_leads_elsewhere(trap: &FakeFleet) -> FakeFleet {
    let fleet = FakeFleet::start(FleetSpec::uniform(2, 500_000))
        .await
        .unwrap();
    let to_trap = |path: &str| Behaviour::Redirect(format!("{}{path}", trap.engine_url(0)));
    let (a, b) = (fleet.engine_url(0), fleet.engine_url(1));
    fleet
        .engine(0)
        .behave("/metrics", to_trap("/latest/meta-data"));
    fleet
        .engine(0)
        .behave("/v1/loads", Behaviour::Status(404, String::new()));
    fleet
        .engine(1)
        .behave("/close_session", to_trap("/close_session"));
    let urls = [
        a.clone(),
        b,
        "file:///etc/hostname".to_owned(),
        "http://169.254.169.254/latest".to_owned(),
        trap.engine_url(0).replace("http://", "ftp://"),
        format!("{a}/admin/x?y=1"),
    ];
    let workers: Vec<Value> = urls.iter().map(|url| json!({"url": url})).collect();
    let list = json!({"workers": workers}).to_string();
    fleet
        .router()
        .behave("/workers", Behaviour::Raw(list.into_bytes()));
    fleet
}

/// X04, CAP1, CLO5: redirects are failures that are shown and not followed, other schemes and
/// link-local addresses are not contacted, and an engine has no path. The trap hears nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x04_nobody_is_led_elsewhere() {
    let trap = FakeFleet::start(FleetSpec::uniform(1, 1)).await.unwrap();
    let fleet = fleet_that_leads_elsewhere(&trap).await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let features = ["--program-admission", "--session-lifecycle"];
    let gate = Kvgate::serve(
        data.path(),
        &[&["--router", &router], features.as_slice()].concat(),
    );
    let close = gate.post("/v1/sessions/s/close", &json!({})).await.body;
    let close = format!("/v1/closes/{}", close["close_id"].as_str().unwrap());
    let ended = async { while gate.get(&close).await["state"] != "done" {} };
    tokio::time::timeout(SOON, ended).await.unwrap();
    let close = gate.get(&close).await;
    assert_eq!(close["counts"]["delivered"], 1, "{close}");
    assert_eq!(close["counts"]["refused"], 1, "{close}");
    assert!(close.to_string().contains("307"), "{close}");

    let engines = gate.get("/v1/engines").await;
    let rows = engines["items"].as_array().unwrap();
    assert_eq!(rows.len(), 3, "the path names no other engine: {engines}");
    let row = |url: &str| {
        let row = rows.iter().find(|row| row["url"] == *url);
        row.unwrap_or_else(|| panic!("{url}: {engines}"))
            .to_string()
    };
    assert!(row(&fleet.engine_url(0)).contains("307"), "{engines}");
    assert!(
        row("http://169.254.169.254").contains("network"),
        "{engines}"
    );
    let bad = engines["router"]["bad_entries"].as_array().unwrap();
    assert_eq!(bad.len(), 2, "{engines}");
    let paths: Vec<String> = fleet
        .engine(0)
        .requests()
        .into_iter()
        .map(|request| request.path)
        .collect();
    assert!(
        paths.iter().all(|path| !path.contains("admin")),
        "{paths:?}"
    );
    let heard = trap.engine(0).requests();
    assert!(heard.is_empty(), "{heard:?}");
}

/// X04, CAP1: with `--engine-network` an engine outside is not contacted, whatever its router says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x04_engines_outside_the_networks_are_not_contacted() {
    let fleet = FakeFleet::start(FleetSpec::uniform(2, 500_000))
        .await
        .unwrap();
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let gate = Kvgate::serve(
        data.path(),
        &[
            "--router",
            &router,
            "--program-admission",
            "--session-lifecycle",
            "--engine-network",
            "10.0.0.0/8",
            "--close-attempts",
            "1",
        ],
    );
    let close = gate.post("/v1/sessions/s/close", &json!({})).await.body;
    let close = format!("/v1/closes/{}", close["close_id"].as_str().unwrap());
    let ended = async { while gate.get(&close).await["state"] != "done" {} };
    tokio::time::timeout(SOON, ended).await.unwrap();
    assert_eq!(gate.get(&close).await["counts"]["failed"], 2);
    for engine in 0..2 {
        assert!(fleet.engine(engine).requests().is_empty());
    }
    assert!(!fleet.router().requests().is_empty());
}

/// Sends the bytes of a head that never ends, one at a time, until the server has had enough.
async fn drips(mut stream: TcpStream) {
    let head = b"GET /v1/state HTTP/1.1\r\nHost: localhost\r\nX-Slow: ";
    let mut ticks = interval(Duration::from_millis(20));
    let (mut from, mut to) = stream.split();
    let drips = async {
        for byte in head.iter().chain(std::iter::repeat(&b'a')) {
            ticks.tick().await;
            if to.write_all(&[*byte]).await.is_err() {
                return;
            }
        }
    };
    let mut answer = [0];
    tokio::select! {
        () = drips => {}
        // A reset is an end as well; there is no answer to half a head.
        read = from.read(&mut answer) => assert!(matches!(read, Ok(0) | Err(_))),
    }
}

/// X05: 500 connections that send their heads byte by byte are closed at the time for a head, however
/// many bytes came; 20 clients take and give back leases all the while, and a long wait stays open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x05_slow_heads_are_closed() {
    let app = Builder {
        policy: Policy {
            session_lifecycle: true,
            ..Builder::default().policy
        },
        limits: Limits {
            head: Duration::from_secs(1),
            ..Limits::default()
        },
        ..Builder::default()
    }
    .start()
    .await;
    let mut engines = EngineCalls::of(&app);
    let mut waiting = app.connect().await;
    let close = post_bytes("/v1/sessions/closing/close?wait_s=60", &json!({}));
    waiting.write_all(&close).await.unwrap();
    let call = engines.next().await;

    let mut slow = JoinSet::new();
    for _ in 0..500 {
        slow.spawn(drips(app.connect().await));
    }
    let mut round = 0;
    while !slow.is_empty() {
        clients(&app, round).await;
        round += 1;
        while let Some(ended) = slow.try_join_next() {
            ended.unwrap();
        }
    }
    assert_eq!(app.gate.waiting_calls(), 1, "the long wait was not cut");
    let done = CallResult::Status {
        code: 200,
        text: None,
    };
    engines.answer(&call, done);
    let mut bytes = Vec::new();
    tokio::time::timeout(SOON, waiting.read_to_end(&mut bytes))
        .await
        .expect("no answer came")
        .unwrap();
    assert_eq!(parse_raw(&bytes).json()["state"], "done");
}

/// Twenty clients take a lease and give it back.
async fn clients(app: &TestApp, round: u64) {
    let calls = (0..20).map(|client| async move {
        let admit = app.acquire(&format!("{round}-{client}"), 1).await;
        let lease = admit["lease_id"].as_str().unwrap();
        let released = app.delete(&format!("/v1/leases/{lease}")).await;
        assert_eq!(released.status, 200, "{}", released.text);
    });
    join_all(calls).await;
}
