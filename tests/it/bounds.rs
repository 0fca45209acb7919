//! The bounds of section 9 of the rules and of the calls, each filled to its last place.
//!
//! | bound | held by |
//! |---|---|
//! | queue (`--max-waiting`) | [`the_queue_has_a_bound`], the flag [`the_bound_of_the_queue_is_a_flag`], `scenarios::decision::dec1_queue_full` |
//! | 20,000 open waiting calls | [`open_waiting_calls_have_a_bound`] |
//! | 15,000 open waiting calls of one peer | the bound itself `transport::waiting_calls_of_a_peer_have_a_bound`, `http::shares::tests` |
//! | bodies and answers on their way, 128 and 256 MiB | `transport::large_bodies_on_their_way_have_a_bound`, `transport::answers_on_their_way_have_a_bound`, the real binary `process::floods` |
//! | finished tickets: 10 min, 262,144 | `scenarios::durable::dur2_finished_tickets_*` |
//! | 10,000 epochs and starts | in the core `scenarios::fleet::cap8_epochs_are_bounded`, `scenarios::durable::id2_starts_are_bounded`; on disk [`epochs_and_starts_on_disk_have_a_bound`] |
//! | decisions of a turn | `scenarios::decision::dec3_decisions_in_a_turn_are_bounded` |
//! | inbox | `api_contract::a_full_inbox_is_overloaded`, by batches [`batches_fill_the_inbox_by_their_commands`] |
//! | connections | `api_security::the_oldest_silent_connection_is_shed`, `api_security::busy_connections_are_not_shed`, half a request and slow readers `transport::stalled_bodies_are_shed`, `http::server::tests`, by file descriptors `process::floods::few_file_descriptors_are_told_and_shared` |
//! | bodies of 1 MiB, batches of 4 MiB | `api_bad_input::bodies_must_be_plain_json_of_a_bounded_size`, [`calls_may_be_as_large_as_their_bounds`] |
//! | 1,000 operations, tickets of a wait, rows of a list | over it `api_bad_input::parameters_and_bounds_are_checked`, up to it [`the_queue_has_a_bound`] |
//! | ids of 512 bytes | over it `api_bad_input::id1_bad_ids_are_named`, up to it [`calls_may_be_as_large_as_their_bounds`] |
//! | heads of 32 KiB | [`heads_have_a_bound`] |
//! | bad entries of a router, rows of a list | `fleet::rows::tests`, over HTTP [`bad_entries_of_a_router_are_shown_up_to_a_bound`] |
//! | metrics of 32 MiB | over it `fleet_http::cap2_bodies_are_bounded`, up to it [`metrics_may_be_as_large_as_their_bound`] |

use std::time::Duration;

use kvgate::demo::{Behaviour, FakeFleet, FleetSpec};
use kvgate::gate::{GateError, INBOX_MAX, WAITING_CALLS_MAX};
use kvgate::store;
use kvgate_core::command::Command;
use kvgate_core::effect::Outcome;
use kvgate_core::ids::{EngineId, Epoch, Issue, Seq, Term, TicketId};
use kvgate_core::policy::{EPOCHS_MAX, Policy, STARTS_MAX};
use kvgate_core::record::Record;
use kvgate_core::state::{EpochCause, EpochEntry, Start};
use kvgate_core::store::{Commit, Store};
use kvgate_core::units::{Span, Timestamp};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use crate::support::app::{Builder, SOON, TestApp, asking, parse_raw, post_bytes};
use crate::support::process::Kvgate;
use crate::support::store::{Mood, Switch};

/// DEC1, TIC2, section 9: a queue of 1,000 filled by one batch of 1,000: one call waits for all of them, one list
/// shows all of them, the next ticket bypasses `queue_full`, and there is room again when one left.
#[tokio::test]
async fn the_queue_has_a_bound() {
    let app = Builder {
        policy: Policy {
            max_waiting: 1_000,
            ..Builder::default().policy
        },
        ..Builder::default()
    }
    .start()
    .await;
    let held = app.acquire("held", 1_000).await;
    let names: Vec<String> = (0..1_000).map(|number| format!("t-{number}")).collect();
    let operations: Vec<Value> = names
        .iter()
        .map(|name| json!({"op": "acquire", "ticket_id": name, "session_id": "s", "reservation_tokens": 1}))
        .collect();
    let answer = app
        .post("/v1/batch", &json!({"operations": operations}))
        .await;
    let results = answer.json()["results"].clone();
    let results = results.as_array().unwrap();
    assert_eq!(results.len(), 1_000);
    assert!(results.iter().all(|result| result["status"] == 202));
    assert_eq!(app.acquire("late", 1).await["reason"], "queue_full");
    assert_eq!(
        app.acquire("t-7", 1).await["position"],
        8,
        "it has its place"
    );
    let state = app.get("/v1/state").await.json();
    assert_eq!(state["queue"]["waiting"], 1_000);

    let rows = app.get("/v1/queue?limit=1000").await.json();
    assert_eq!(rows["items"].as_array().unwrap().len(), 1_000);
    assert_eq!(
        (&rows["total"], &rows["next"]),
        (&json!(1_000), &Value::Null)
    );

    app.delete("/v1/tickets/t-0").await;
    assert_eq!(app.acquire("later", 1).await["position"], 1_000);
    assert_eq!(app.acquire("latest", 1).await["reason"], "queue_full");
    app.delete(&format!(
        "/v1/leases/{}",
        held["lease_id"].as_str().unwrap()
    ))
    .await;
    let wait = app
        .post("/v1/wait", &json!({"ticket_ids": names, "wait_s": 60}))
        .await
        .json();
    let results = wait["results"].as_array().unwrap();
    assert_eq!(results.len(), 1_000);
    assert_eq!(results[0]["action"], "cancelled");
    assert!(
        results[1..]
            .iter()
            .all(|result| result["action"] == "admit")
    );
}

/// DEC1: `--max-waiting` is that bound.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bound_of_the_queue_is_a_flag() {
    let fleet = FakeFleet::start(FleetSpec::uniform(1, 1_000))
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
            "--max-waiting",
            "2",
        ],
    );
    gate.acquire("held", 900).await.lease();
    let actions = ["a", "b", "c"].map(|name| gate.acquire(name, 1));
    let [a, b, c] = actions;
    assert_eq!((a.await.action(), b.await.action()), ("wait", "wait"));
    let c = c.await;
    assert_eq!(
        (c.action(), &c.body["reason"]),
        ("bypass", &json!("queue_full"))
    );
}

/// TIC2, section 9: 20,000 calls wait; the next one is told its place at once, and keeps it; a wait for many is
/// answered at once too. When a call ended another may wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_waiting_calls_have_a_bound() {
    let switch = Switch::default();
    let opened = switch.clone();
    let app = Builder {
        policy: Policy {
            max_wait: Span::from_secs(3_600),
            ..Builder::default().policy
        },
        ..Builder::default()
    }
    .start_on(move || opened.open())
    .await;
    app.acquire("held", 1_000).await;
    let mut calls = JoinSet::new();
    for number in 0..WAITING_CALLS_MAX {
        let gate = app.gate.clone();
        calls.spawn(async move {
            let ask = asking(&format!("t-{number}"), 1, true);
            let answered = gate.acquire(ask, Duration::from_secs(3_600)).await;
            answered.unwrap().value.unwrap().answer.outcome
        });
    }
    app.until(|view| view.waiting == WAITING_CALLS_MAX as u64)
        .await;
    assert_eq!(app.gate.waiting_calls(), WAITING_CALLS_MAX);

    let ask =
        json!({"ticket_id": "more", "session_id": "s", "reservation_tokens": 1, "wait_s": 60});
    let answer = app.post("/v1/leases", &ask).await;
    assert_eq!(answer.status, 202);
    assert_eq!(answer.json()["position"], WAITING_CALLS_MAX + 1);
    let many = json!({"ticket_ids": ["more", "t-0"], "wait_s": 60});
    assert_eq!(
        app.post("/v1/wait", &many).await.json()["results"],
        json!([])
    );
    assert_eq!(
        calls.len(),
        WAITING_CALLS_MAX,
        "nobody who waits was disturbed"
    );

    assert_eq!(
        app.delete("/v1/tickets/t-5").await.json()["outcome"],
        "withdrawn"
    );
    assert!(matches!(
        calls.join_next().await.unwrap().unwrap(),
        Outcome::Cancelled(_)
    ));
    let mut waits = app.connect().await;
    waits
        .write_all(&post_bytes("/v1/leases", &ask))
        .await
        .unwrap();
    while app.gate.waiting_calls() < WAITING_CALLS_MAX {
        tokio::task::yield_now().await;
    }
    app.delete("/v1/tickets/more").await;
    let mut bytes = Vec::new();
    tokio::time::timeout(SOON, waits.read_to_end(&mut bytes))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(parse_raw(&bytes).json()["reason"], "cancelled");
}

/// The inbox is bounded by commands, so that batches cannot fill the memory: while the writer is held up, 66 batches
/// of 1,000 are taken and the next call is told `overloaded`. What was taken is done when the writer goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_fill_the_inbox_by_their_commands() {
    let switch = Switch::default();
    let opened = switch.clone();
    let app = Builder::default().start_on(move || opened.open()).await;
    switch.set(Mood::Holding);
    let gate = app.gate.clone();
    let held = tokio::spawn(async move { gate.cancel(TicketId::new("first").unwrap()).await });
    let waits = switch.clone();
    tokio::task::spawn_blocking(move || waits.wait_until_held())
        .await
        .unwrap();
    let batch = |number: usize| {
        (0..1_000)
            .map(|n| Command::Cancel(TicketId::new(&format!("{number}-{n}")).unwrap()))
            .collect::<Vec<_>>()
    };
    let full = INBOX_MAX.div_ceil(1_000);
    let mut taken = Vec::new();
    for number in 0..full {
        let mut call = Box::pin(app.gate.batch(batch(number)));
        assert!(
            futures_util::poll!(&mut call).is_pending(),
            "batch {number} is taken"
        );
        taken.push(call);
    }
    assert_eq!(
        app.gate.batch(batch(full)).await.unwrap_err(),
        GateError::Overloaded
    );
    let ask = json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 1});
    app.post("/v1/leases", &ask)
        .await
        .is_problem(503, "overloaded");
    switch.set(Mood::Good);
    held.await.unwrap().unwrap();
    for call in taken {
        let replies = call.await.unwrap();
        assert!(replies.len() == 1_000 && replies.iter().all(Result::is_ok));
    }
    assert_eq!(app.post("/v1/leases", &ask).await.json()["action"], "admit");
}

/// CAP8, ID2, section 9: the tables keep 10,000 epochs and starts, the newest, also over an opening.
#[test]
fn epochs_and_starts_on_disk_have_a_bound() {
    let directory = tempfile::tempdir().unwrap();
    let at = Timestamp::from_millis(1_700_000_000_000);
    let commit = |store: &mut store::RedbStore, records: &[Record]| {
        let term = records.iter().rev().find_map(|record| match record {
            Record::Started(term, _) => Some(*term),
            _ => None,
        });
        store
            .commit(Commit {
                term: term.unwrap(),
                seq: Seq(1),
                now: at,
                next_issue: 1,
                records,
            })
            .unwrap();
    };
    let some = |from: u64, to: u64| -> Vec<Record> {
        (from..to)
            .flat_map(|number| {
                let start = Start {
                    first_issue: Issue(number),
                    salt: number,
                    at,
                };
                let epoch = EpochEntry {
                    epoch: Epoch(number),
                    at,
                    cause: EpochCause::Restarted(EngineId::new("http://engine-1:30000")),
                };
                [Record::Started(Term(number), start), Record::Epoch(epoch)]
            })
            .collect()
    };
    let max = EPOCHS_MAX as u64;
    assert_eq!(EPOCHS_MAX, STARTS_MAX);
    let mut store = store::open(directory.path()).unwrap().store;
    commit(&mut store, &some(1, max));
    commit(&mut store, &some(max, max + 4));
    drop(store);
    for (opening, oldest) in [(0, 4), (1, 5)] {
        let opened = store::open(directory.path()).unwrap();
        let image = opened.image;
        assert_eq!(
            (image.starts.len(), image.epochs.len()),
            (STARTS_MAX, EPOCHS_MAX)
        );
        assert_eq!(image.starts.first().unwrap().first_issue, Issue(oldest));
        assert_eq!(image.epochs.first().unwrap().epoch, Epoch(oldest));
        assert_eq!(image.epochs.last().unwrap().epoch, Epoch(max + 3 + opening));
        // The bound is known after an opening as well.
        let mut store = opened.store;
        commit(&mut store, &some(max + 4 + opening, max + 5 + opening));
    }
}

/// ID1: ids of 512 bytes in bodies and, escaped, in paths; a batch of 4 MiB.
#[tokio::test]
async fn calls_may_be_as_large_as_their_bounds() {
    let app = TestApp::start().await;
    let id = "é".repeat(256);
    let ask = json!({"ticket_id": id, "session_id": id, "client": id, "request_id": id, "reservation_tokens": 1});
    let held = app.post("/v1/leases", &ask).await.json();
    assert_eq!(
        (&held["ticket_id"], &held["session_id"]),
        (&json!(id), &json!(id))
    );
    let path: String = id.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let read = app.get(&format!("/v1/tickets/{path}")).await.json();
    assert_eq!(read["lease_id"], held["lease_id"]);
    assert_eq!(
        app.delete(&format!("/v1/tickets/{path}")).await.json()["outcome"],
        "released"
    );
    let operations = json!({"operations": [{"op": "cancel", "ticket_id": "t"}]}).to_string();
    let padded = format!("{operations}{}", " ".repeat((4 << 20) - operations.len()));
    let answer = app.post_text("/v1/batch", padded).await;
    assert_eq!(
        answer.json()["results"][0]["status"],
        200,
        "{}",
        answer.text
    );
}

/// A head of 31 KiB is read, one of more than 32 KiB is 431.
#[tokio::test]
async fn heads_have_a_bound() {
    let app = TestApp::start().await;
    for (bytes, status) in [(31 << 10, 200), ((32 << 10) + 1, 431)] {
        let begin = "GET /v1/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Pad: ";
        let head = format!("{begin}{}\r\n\r\n", "a".repeat(bytes - begin.len() - 4));
        assert_eq!(head.len(), bytes);
        assert_eq!(app.raw(head.as_bytes()).await.status, status, "{bytes}");
    }
}

/// CAP1, section 9: a router that lists a good engine among 40 bad entries: the engine counts, 16 of the others
/// are shown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_entries_of_a_router_are_shown_up_to_a_bound() {
    let fleet = FakeFleet::start(FleetSpec::uniform(1, 1_000))
        .await
        .unwrap();
    let mut workers: Vec<Value> = (0..40)
        .map(|number| json!({"url": format!("http://bad host {number}/{}", "x".repeat(400))}))
        .collect();
    workers.insert(20, json!({"url": fleet.engine_url(0)}));
    let list = json!({"workers": workers}).to_string();
    fleet
        .router()
        .behave("/workers", Behaviour::Raw(list.into_bytes()));
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let gate = Kvgate::serve(data.path(), &["--router", &router, "--program-admission"]);
    let engines = gate.get("/v1/engines").await;
    assert_eq!(engines["items"].as_array().unwrap().len(), 1, "{engines}");
    let bad = engines["router"]["bad_entries"].as_array().unwrap();
    assert_eq!(bad.len(), 16);
    assert!(
        engines.to_string().len() < 16 << 10,
        "and none of them whole"
    );
    assert_eq!(gate.acquire("t", 900).await.action(), "admit");
}

/// CAP2: metrics of exactly 32 MiB are read; a byte more is a failed reading.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_may_be_as_large_as_their_bound() {
    for (bytes, ceiling) in [(32 << 20, 900), ((32 << 20) + 1, 0)] {
        let fleet = FakeFleet::start(FleetSpec::uniform(1, 1)).await.unwrap();
        let gauges = "sglang:max_total_num_tokens 1000\nsglang:token_usage 0.0\n# ";
        let mut body = gauges.as_bytes().to_vec();
        body.resize(bytes, b'.');
        let engine = fleet.engine(0);
        engine.behave("/v1/loads", Behaviour::Status(404, String::new()));
        engine.behave("/metrics", Behaviour::Raw(body));
        let data = tempfile::tempdir().unwrap();
        let router = fleet.router_url();
        let gate = Kvgate::serve(data.path(), &["--router", &router, "--program-admission"]);
        assert_eq!(
            gate.get("/v1/state").await["budget"]["ceiling"],
            ceiling,
            "{bytes}"
        );
    }
}
