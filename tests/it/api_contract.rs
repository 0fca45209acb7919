//! Every call with its answers, as docs/API.md says.

use std::collections::BTreeSet;

use kvgate_core::policy::Policy;
use kvgate_core::tally::LocalBypass;
use kvgate_core::units::{Ppm, Span};
use serde_json::{Value, json};

use crate::support::app::{Answer, Builder, SOON, TestApp};
use crate::support::store::{Mood, Switch};

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

/// TOK1, LEA1: an admit with all of its fields; times are RFC 3339 in UTC with milliseconds.
#[tokio::test]
async fn an_admit_has_all_fields() {
    let app = TestApp::start().await;
    let body = json!({
        "ticket_id": "t-1", "session_id": "s-1", "prompt_tokens": 100, "max_new_tokens": 50,
        "scope": "train", "protected": false, "wait_s": 25, "ttl_s": 60, "request_id": "r-1",
        "client": "c-1", "local_bypasses": {"unreachable": 3, "something_else": 1}
    });
    let answer = app.post("/v1/leases", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    assert_eq!(answer.header("kvgate-epoch"), Some("1"));
    assert!(answer.header("x-request-id").is_some() && answer.seq().is_some());
    let admit = answer.json();
    assert_eq!(
        keys(&admit),
        set(
            "action reason ticket_id session_id lease_id reservation_tokens epoch ttl_s expires_at expires_in_s waited_s \
             repeated session_reopened"
        )
    );
    assert_eq!(admit["action"], "admit");
    assert_eq!(admit["reason"], "capacity_available");
    assert_eq!(admit["reservation_tokens"], 150);
    assert_eq!(admit["ttl_s"], 60.0);
    assert_eq!(admit["repeated"], false);
    assert_eq!(admit["session_reopened"], false);
    let expires = admit["expires_at"].as_str().unwrap();
    assert!(
        expires.ends_with('Z') && expires.len() == "2026-01-01T00:00:00.000Z".len(),
        "{expires}"
    );
    app.until(|view| {
        view.tally.reported(LocalBypass::Unreachable) == 3
            && view.tally.reported(LocalBypass::Other) == 1
    })
    .await;

    let lease = format!("/v1/leases/{}", admit["lease_id"].as_str().unwrap());
    let read = app.get(&lease).await;
    assert_eq!(read.status, 200);
    assert_eq!(read.seq(), None, "a read changes nothing");
    let read = read.json();
    assert_eq!(
        keys(&read),
        set(
            "lease_id ticket_id session_id reservation_tokens epoch ttl_s granted_at expires_at expires_in_s scope client \
             request_id"
        )
    );
    assert_eq!(read["client"], "c-1");
    assert_eq!(read["request_id"], "r-1");
    assert_eq!(read["scope"], "train");
}

/// TIC1, DUR6: the same ticket again is the same lease, and changes nothing.
#[tokio::test]
async fn a_repeated_acquire_is_the_same_lease() {
    let app = TestApp::start().await;
    let first = app.acquire("t", 100).await;
    let before = app.picture().await;
    let again = app.acquire("t", 100).await;
    assert_eq!(again["lease_id"], first["lease_id"]);
    assert_eq!(again["repeated"], true);
    assert_eq!(app.picture().await["seq"], before["seq"]);
}

/// TIC1: another session or other numbers are a conflict, and nothing changes.
#[tokio::test]
async fn tic1_other_numbers_are_a_conflict() {
    let app = TestApp::start().await;
    app.acquire("t", 100).await;
    let before = app.picture().await;
    for body in [
        json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 101}),
        json!({"ticket_id": "t", "session_id": "S", "reservation_tokens": 100}),
        json!({"ticket_id": "t", "session_id": "s", "prompt_tokens": 100, "max_new_tokens": 0}),
    ] {
        let answer = app.post("/v1/leases", &body).await;
        answer.is_problem(409, "ticket_conflict");
    }
    assert_eq!(app.picture().await, before);
}

/// TIC6, TIC1: released, already released; reads and renewals of it are gone; its ticket is finished.
#[tokio::test]
async fn tic6_release_is_idempotent() {
    let app = TestApp::start().await;
    let admit = app.acquire("t", 100).await;
    let lease = format!("/v1/leases/{}", admit["lease_id"].as_str().unwrap());
    let usage = json!({"prompt_tokens": 90, "completion_tokens": 5, "cached_tokens": 80, "engine": "http://e:1"});
    let released = app.post(&format!("{lease}/release"), &usage).await;
    assert_eq!(
        (released.status, released.json()),
        (200, json!({"outcome": "released"}))
    );
    assert!(released.seq().is_some());
    // Without a body and without a content type, and by the other method.
    let empty = app.client.post(app.url(&format!("{lease}/release")));
    for again in [app.send(empty).await, app.delete(&lease).await] {
        assert_eq!(again.json(), json!({"outcome": "already_released"}));
        assert_eq!(again.seq(), None);
    }
    app.get(&lease).await.is_problem(410, "lease_released");
    let renew = app
        .post(&format!("{lease}/renew"), &json!({"ttl_s": 5}))
        .await;
    renew.is_problem(410, "lease_released");
    let late = app.acquire("t", 100).await;
    assert_eq!(
        (&late["action"], &late["reason"]),
        (&json!("cancelled"), &json!("ticket_finished"))
    );
    assert_eq!(late["session_reopened"], false);
    assert_eq!(app.gate.view().reserved.get(), 0);
}

/// TIC6, ID2: what was never issued is not found, whatever its bytes.
#[tokio::test]
async fn unknown_leases_are_not_found() {
    let app = TestApp::start().await;
    app.acquire("t", 100).await;
    for id in [
        "1-0000000000000000",
        "99999-0000000000000000",
        "nonsense",
        "%00",
        "%zz",
        "%ff",
        "a%2Fb",
    ] {
        let lease = format!("/v1/leases/{id}");
        app.get(&lease).await.is_problem(404, "lease_not_found");
        app.delete(&lease).await.is_problem(404, "lease_not_found");
        let renew = app
            .post(&format!("{lease}/renew"), &json!({"ttl_s": 60}))
            .await;
        renew.is_problem(404, "lease_not_found");
        let release = app.post(&format!("{lease}/release"), &json!({})).await;
        release.is_problem(404, "lease_not_found");
    }
}

/// LEA1, TIC6: a lease ends after its life; then it is expired for every call, and the ticket is decided afresh.
#[tokio::test]
async fn lea1_an_expired_lease_is_gone() {
    let app = TestApp::start().await;
    let body = json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 1, "ttl_s": 0.2});
    let admit = app.post("/v1/leases", &body).await.json();
    assert_eq!(
        admit["ttl_clamped"], true,
        "brought into range, and the answer says so"
    );
    assert_eq!(admit["ttl_s"], 1.0);
    app.until(|view| view.leases == 0).await;
    let lease = format!("/v1/leases/{}", admit["lease_id"].as_str().unwrap());
    app.get(&lease).await.is_problem(410, "lease_expired");
    app.delete(&lease).await.is_problem(410, "lease_expired");
    app.post(&format!("{lease}/renew"), &json!({}))
        .await
        .is_problem(410, "lease_expired");
    let ticket = app.get("/v1/tickets/t").await.json();
    assert_eq!(
        ticket,
        json!({"action": "ended", "reason": "expired", "ticket_id": "t"})
    );
    let afresh = app.acquire("t", 7).await;
    assert_ne!(afresh["lease_id"], admit["lease_id"]);
    app.delete(&lease).await.is_problem(410, "lease_expired");
    assert_eq!(
        app.gate.view().leases,
        1,
        "an old lease id never touches a newer lease"
    );
}

/// LEA1: a renewal begins the life anew; without a number the life stays as it is.
#[tokio::test]
async fn renewals_answer_the_lease() {
    let app = TestApp::start().await;
    let admit = app.acquire("t", 100).await;
    let renew = format!("/v1/leases/{}/renew", admit["lease_id"].as_str().unwrap());
    let renewed = app.post(&renew, &json!({"ttl_s": 90})).await.json();
    assert_eq!(
        (&renewed["ttl_s"], &renewed["lease_id"]),
        (&json!(90.0), &admit["lease_id"])
    );
    assert_eq!(renewed.get("ttl_clamped"), None);
    let clamped = app.post(&renew, &json!({"ttl_s": 1e300})).await.json();
    assert_eq!(
        (&clamped["ttl_s"], &clamped["ttl_clamped"]),
        (&json!(86_400.0), &json!(true))
    );
    let same = app.send(app.client.post(app.url(&renew))).await.json();
    assert_eq!(same["ttl_s"], 86_400.0);
}

/// TIC2: a wait with all of its fields; it is told again with the same place.
#[tokio::test]
async fn tic2_a_wait_has_all_fields() {
    let app = TestApp::start().await;
    app.acquire("holder", 900).await;
    let body = |wait: f64| json!({"ticket_id": "w", "session_id": "s", "reservation_tokens": 300, "wait_s": wait});
    let answer = app.post("/v1/leases", &body(0.0)).await;
    assert_eq!(answer.status, 202);
    assert!(answer.seq().is_some(), "a place in line is a change");
    let wait = answer.json();
    assert_eq!(
        keys(&wait),
        set(
            "action reason ticket_id session_id reservation_tokens epoch position tokens_ahead short_tokens age_s \
             bypass_in_s poll_after_s claim_grace_s session_reopened"
        )
    );
    assert_eq!(wait["reason"], "capacity_exhausted");
    assert_eq!(wait["position"], 1);
    assert_eq!(wait["short_tokens"], 200);
    assert_eq!(wait["claim_grace_s"], 10.0);
    assert_eq!(wait["poll_after_s"], 1.0);
    let behind = app.acquire("w2", 10).await;
    assert_eq!(
        (&behind["reason"], &behind["position"]),
        (&json!("behind_older"), &json!(2))
    );
    assert_eq!(behind["tokens_ahead"], 300);
    let out = app.post("/v1/leases", &body(0.05)).await;
    assert_eq!(
        (out.status, out.seq()),
        (202, None),
        "the same place, and no change"
    );
    assert_eq!(out.json()["position"], 1);
    assert_eq!(
        out.json()["poll_after_s"],
        0.0,
        "it waited its own time out"
    );
    let read = app.get("/v1/tickets/w").await;
    assert_eq!((read.status, &read.json()["action"]), (200, &json!("wait")));
}

/// TIC2: a waiting call is answered as soon as a release makes room.
#[tokio::test]
async fn a_waiting_call_is_answered_on_release() {
    let app = TestApp::start().await;
    let held = app.acquire("holder", 900).await;
    let waiting = tokio::spawn(
        app.client
            .post(app.url("/v1/leases"))
            .json(&json!({"ticket_id": "w", "session_id": "s", "reservation_tokens": 300, "wait_s": 60}))
            .send(),
    );
    app.until(|view| view.waiting == 1).await;
    let release = app
        .delete(&format!(
            "/v1/leases/{}",
            held["lease_id"].as_str().unwrap()
        ))
        .await;
    let answer = Answer::of(waiting.await.unwrap().unwrap()).await;
    assert_eq!(answer.status, 200);
    let admit = answer.json();
    assert_eq!(
        (&admit["action"], &admit["repeated"]),
        (&json!("admit"), &json!(false))
    );
    assert!(
        answer.seq() > release.seq(),
        "the grant comes after the release that made room"
    );
    // CNT1: the answer was written whole, so it counts as an admit.
    app.until(|view| view.tally.scope(kvgate_core::decision::Scope::Train).admit == 2)
        .await;
}

/// DEC1: the bypasses that need no queue, each with its reason; nothing is charged.
#[tokio::test]
async fn dec1_bypasses_name_their_reason() {
    let app = TestApp::start().await;
    let cases = [
        (json!({"scope": "eval"}), "out_of_scope"),
        (json!({"protected": true}), "protected"),
        (json!({"reservation_tokens": 1_001}), "oversize"),
    ];
    for (index, (fields, reason)) in cases.into_iter().enumerate() {
        let mut body =
            json!({"ticket_id": format!("t-{index}"), "session_id": "s", "reservation_tokens": 1});
        body.as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        let answer = app.post("/v1/leases", &body).await;
        assert_eq!((answer.status, answer.seq()), (200, None));
        let bypass = answer.json();
        assert_eq!(
            keys(&bypass),
            set(
                "action reason ticket_id session_id reservation_tokens epoch waited_s repeated session_reopened"
            )
        );
        assert_eq!(
            (&bypass["action"], &bypass["reason"]),
            (&json!("bypass"), &json!(reason))
        );
        let again = app.post("/v1/leases", &body).await.json();
        assert_eq!(again["repeated"], true);
    }
    assert_eq!(app.gate.view().leases, 0);
    let off = Builder {
        policy: Policy::default(),
        ..Builder::default()
    }
    .start()
    .await;
    assert_eq!(off.acquire("t", 1).await["reason"], "disabled");
    let blind = Builder {
        engines: Vec::new(),
        ..Builder::default()
    }
    .start()
    .await;
    assert_eq!(blind.acquire("t", 1).await["reason"], "degraded");
    let state = blind.get("/v1/state").await.json();
    assert_eq!(
        (&state["degraded"], &state["degraded_reason"]),
        (&json!(true), &json!("no_fleet"))
    );
}

/// TIC5: a cancel in every state of a ticket.
#[tokio::test]
async fn tic5_cancel_meets_every_state() {
    let app = TestApp::start().await;
    app.acquire("held", 900).await;
    app.acquire("waiting", 300).await;
    let protected = json!({"ticket_id": "bypassed", "session_id": "s", "reservation_tokens": 1, "protected": true});
    app.post("/v1/leases", &protected).await;
    let cases = [
        ("waiting", "withdrawn"),
        ("held", "released"),
        ("bypassed", "bypassed"),
        ("held", "already_finished"),
        ("never-seen", "unknown"),
        ("never-seen", "already_finished"),
    ];
    for (ticket, outcome) in cases {
        let answer = app.delete(&format!("/v1/tickets/{ticket}")).await;
        assert_eq!(
            (answer.status, answer.json()),
            (200, json!({"outcome": outcome})),
            "{ticket}"
        );
        assert_eq!(
            answer.seq().is_some(),
            outcome != "already_finished",
            "{ticket}"
        );
    }
    for ticket in ["waiting", "held", "never-seen"] {
        let late = app
            .acquire(ticket, if ticket == "held" { 900 } else { 300 })
            .await;
        assert_eq!(
            (&late["action"], &late["reason"]),
            (&json!("cancelled"), &json!("ticket_finished")),
            "{ticket}"
        );
        assert_eq!(late["session_id"], "s");
        let read = app.get(&format!("/v1/tickets/{ticket}")).await.json();
        assert_eq!(read["action"], "cancelled");
    }
    app.get("/v1/tickets/nobody")
        .await
        .is_problem(404, "ticket_not_found");
}

/// TIC5: an open call hears at once that its ticket was cancelled.
#[tokio::test]
async fn a_cancel_ends_the_open_call() {
    let app = TestApp::start().await;
    app.acquire("holder", 1_000).await;
    let waiting = tokio::spawn(
        app.client
            .post(app.url("/v1/leases"))
            .json(&json!({"ticket_id": "w", "session_id": "s", "reservation_tokens": 1, "wait_s": 60}))
            .send(),
    );
    app.until(|view| view.waiting == 1).await;
    app.delete("/v1/tickets/w").await;
    let answer = Answer::of(waiting.await.unwrap().unwrap()).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["reason"], "cancelled");
}

/// `POST /v1/wait`: decided and unknown ones at once, in the order asked; else as soon as one is decided; else empty.
#[tokio::test]
async fn wait_answers_with_all_that_are_decided() {
    let app = TestApp::start().await;
    let held = app.acquire("held", 1_000).await;
    app.acquire("w-1", 10).await;
    app.acquire("w-2", 10).await;
    let mixed = app
        .post(
            "/v1/wait",
            &json!({"ticket_ids": ["w-1", "nobody", "held"], "wait_s": 25}),
        )
        .await;
    assert_eq!(mixed.status, 200);
    let results = &mixed.json()["results"];
    assert_eq!(
        results[0],
        json!({"ticket_id": "nobody", "action": "unknown"})
    );
    assert_eq!(
        (&results[1]["ticket_id"], &results[1]["action"]),
        (&json!("held"), &json!("admit"))
    );
    assert_eq!(results.as_array().unwrap().len(), 2);
    let none = app
        .post(
            "/v1/wait",
            &json!({"ticket_ids": ["w-1", "w-2"], "wait_s": 0}),
        )
        .await;
    assert_eq!((none.status, none.json()), (202, json!({"results": []})));
    let waiting = tokio::spawn(
        app.client
            .post(app.url("/v1/wait"))
            .json(&json!({"ticket_ids": ["w-2", "w-1"], "wait_s": 60}))
            .send(),
    );
    // Both calls that asked once are away; the open call is the only presence there is.
    while app.gate.waiting_calls() == 0 {
        tokio::task::yield_now().await;
    }
    app.delete(&format!(
        "/v1/leases/{}",
        held["lease_id"].as_str().unwrap()
    ))
    .await;
    let answer = Answer::of(waiting.await.unwrap().unwrap()).await;
    let results = answer.json()["results"].clone();
    let tickets: Vec<&str> = results
        .as_array()
        .unwrap()
        .iter()
        .map(|result| result["ticket_id"].as_str().unwrap())
        .collect();
    assert_eq!(
        tickets,
        ["w-2", "w-1"],
        "all that are decided, in the order asked"
    );
    assert!(
        results
            .as_array()
            .unwrap()
            .iter()
            .all(|result| result["action"] == "admit")
    );
}

/// A batch is one turn in order; a bad operation spoils no other, and none of them waits.
#[tokio::test]
async fn a_batch_answers_each_operation() {
    let app = TestApp::start().await;
    let held = app.acquire("held", 900).await;
    let lease = held["lease_id"].as_str().unwrap();
    let batch = json!({"operations": [
        {"op": "acquire", "ticket_id": "w", "session_id": "s", "reservation_tokens": 500, "wait_s": 60},
        {"op": "renew", "lease_id": lease, "ttl_s": 30},
        {"op": "release", "lease_id": lease, "completion_tokens": 3},
        {"op": "acquire", "ticket_id": "a", "session_id": "s", "reservation_tokens": 500, "ttl_s": 0},
        {"op": "cancel", "ticket_id": "w"},
        {"op": "cancel", "ticket_id": "."},
        {"op": "release", "lease_id": "nonsense"},
        {"op": "acquire", "ticket_id": "b", "session_id": "s", "reservation_tokens": 1, "weight_s": 1},
        {"op": "acquire", "ticket_id": "b", "session_id": "s"},
        {"op": "close"},
        {"op": "explode"},
        17
    ]});
    let answer = app.post("/v1/batch", &batch).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let results = answer.json()["results"].clone();
    let statuses: Vec<u64> = results
        .as_array()
        .unwrap()
        .iter()
        .map(|result| result["status"].as_u64().unwrap())
        .collect();
    assert_eq!(
        statuses,
        [200, 200, 200, 200, 200, 400, 404, 422, 422, 422, 422, 422],
        "{results}"
    );
    // Acquires are answered at the end of the turn; by then this place in line was given up again.
    assert_eq!(results[0]["body"]["action"], "cancelled");
    assert_eq!(results[1]["body"]["ttl_s"], 30.0);
    assert_eq!(results[2]["body"]["outcome"], "released");
    assert_eq!(
        results[3]["body"]["action"], "admit",
        "nothing is before it at the end of the turn"
    );
    assert_eq!(results[3]["body"]["ttl_clamped"], true);
    assert_eq!(results[4]["body"]["outcome"], "withdrawn");
    assert_eq!(results[5]["body"]["code"], "invalid_id");
    assert_eq!(results[6]["body"]["code"], "lease_not_found");
    assert_eq!(results[7]["body"]["errors"][0]["pointer"], "/weight_s");
    assert_eq!(
        results[8]["body"]["errors"][0]["pointer"],
        "/reservation_tokens"
    );
    assert_eq!(results[9]["body"]["errors"][0]["pointer"], "/session_id");
    assert_eq!(
        results[7]["body"]["instance"].as_str(),
        answer.header("x-request-id")
    );
    assert_eq!(
        answer.seq(),
        Some(app.gate.view().seq.0),
        "the last number of the turn"
    );
    let empty = app.post("/v1/batch", &json!({"operations": []})).await;
    assert_eq!(
        (empty.status, empty.json(), empty.seq()),
        (200, json!({"results": []}), None)
    );
}

/// DUR6: every change has a number of its own, and they order all changing answers.
#[tokio::test]
async fn dur6_seqs_are_all_different_and_increase() {
    let app = TestApp::start().await;
    let mut seqs = Vec::new();
    for round in 0..5 {
        let admit = app
            .post("/v1/leases", &json!({"ticket_id": format!("t-{round}"), "session_id": "s", "reservation_tokens": 1}))
            .await;
        seqs.push(admit.seq().unwrap());
        let lease = admit.json()["lease_id"].as_str().unwrap().to_owned();
        let batch = json!({"operations": [{"op": "cancel", "ticket_id": format!("u-{round}")}, {"op": "release", "lease_id": lease}]});
        seqs.push(app.post("/v1/batch", &batch).await.seq().unwrap());
        seqs.push(
            app.delete(&format!("/v1/tickets/x-{round}"))
                .await
                .seq()
                .unwrap(),
        );
    }
    let calls = (0..20).map(|number| {
        app.client
            .delete(app.url(&format!("/v1/tickets/y-{number}")))
    });
    let calls: Vec<_> = calls.map(|call| tokio::spawn(call.send())).collect();
    let mut together: Vec<u64> = Vec::new();
    for call in calls {
        together.push(
            Answer::of(call.await.unwrap().unwrap())
                .await
                .seq()
                .unwrap(),
        );
    }
    assert!(seqs.is_sorted_by(|one, next| one < next), "{seqs:?}");
    let before = *seqs.last().unwrap();
    together.sort_unstable();
    assert!(
        together.is_sorted_by(|one, next| one < next),
        "{together:?}"
    );
    assert!(together.iter().all(|seq| *seq > before));
}

/// Lists: filters, pages, and the number of all that match.
#[tokio::test]
async fn lists_are_filtered_and_paged() {
    let app = TestApp::start().await;
    for number in 0..5 {
        let body = json!({"ticket_id": format!("held-{number}"), "session_id": format!("s-{}", number % 2),
                          "reservation_tokens": 200, "client": format!("c-{}", number % 2)});
        app.post("/v1/leases", &body).await;
    }
    for number in 0..3 {
        let body = json!({"ticket_id": format!("w {number}"), "session_id": "s-0", "reservation_tokens": 5, "wait_s": 0});
        app.post("/v1/leases", &body).await;
    }
    let cases = [
        ("/v1/leases", 5),
        ("/v1/leases?session_id=s-1", 2),
        ("/v1/leases?client=c-0", 3),
        ("/v1/leases?scope=train", 5),
        ("/v1/leases?scope=eval", 0),
        ("/v1/leases?q=eld-3", 1),
        ("/v1/leases?q=c-1&session_id=s-1", 2),
        ("/v1/leases?q=nothing", 0),
        ("/v1/queue", 3),
        ("/v1/queue?q=w+1", 1),
        ("/v1/queue?q=w%201", 1),
        ("/v1/queue?session_id=s-1", 0),
        ("/v1/queue?client=c-1", 0),
    ];
    for (path, total) in cases {
        let list = app.get(path).await;
        assert_eq!(list.status, 200, "{}", list.text);
        let list = list.json();
        assert_eq!(keys(&list), set("items next total"));
        assert_eq!(
            (&list["total"], &list["next"]),
            (&json!(total), &Value::Null),
            "{path}"
        );
        assert_eq!(list["items"].as_array().unwrap().len(), total, "{path}");
    }
    let waiter = app.get("/v1/queue").await.json()["items"][1].clone();
    assert_eq!(
        keys(&waiter),
        set(
            "ticket_id session_id reservation_tokens position reason age_s bypass_in_s scope client"
        )
    );
    assert_eq!(
        (&waiter["position"], &waiter["reason"]),
        (&json!(2), &json!("behind_older"))
    );
    for list in ["/v1/leases?limit=2", "/v1/queue?limit=2"] {
        let mut seen = Vec::new();
        let mut path = list.to_owned();
        loop {
            let page = app.get(&path).await.json();
            seen.extend(
                page["items"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|item| item["ticket_id"].clone()),
            );
            match page["next"].as_str() {
                Some(next) => path = format!("{list}&cursor={next}"),
                None => break,
            }
        }
        let expected: Vec<Value> = app.get(list.split('?').next().unwrap()).await.json()["items"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| item["ticket_id"].clone())
            .collect();
        assert_eq!(seen, expected, "{list}");
    }
}

/// CAP4, DEC5, TIM1: the state has every part; figures come from the fleet and the ledger.
#[tokio::test]
async fn state_has_every_part() {
    let app = Builder {
        policy: Policy {
            headroom: Ppm::clamped(900_000),
            ..Builder::default().policy
        },
        ..Builder::default()
    }
    .start()
    .await;
    app.acquire("t", 450).await;
    app.acquire("w", 600).await;
    app.notices.send_replace(vec![kvgate::http::ShellNotice {
        code: "router_key".to_owned(),
        severity: kvgate_api::Severity::Error,
        text: "the router asks for a key".to_owned(),
        since: app.gate.line().unwrap().now(),
    }]);
    let state = app.get("/v1/state").await.json();
    assert_eq!(
        keys(&state),
        set(
            "budget epoch degraded degraded_reason pressure queue leases closes features notices store version started_at"
        )
    );
    assert_eq!(
        state["budget"],
        json!({"ceiling": 900, "full_ceiling": 900, "capacity": 1000, "reserved": 450, "available": 450,
               "reserved_utilization": 0.5, "headroom": 0.9})
    );
    assert_eq!(
        keys(&state["pressure"]),
        set("usage_mean usage_max threshold engine")
    );
    assert_eq!(
        (&state["queue"]["waiting"], &state["queue"]["tokens"]),
        (&json!(1), &json!(600))
    );
    assert_eq!(state["leases"]["count"], 1);
    assert_eq!(state["closes"], json!({"pending": 0, "failed": 0}));
    assert_eq!(
        state["features"],
        json!({"program_admission": true, "session_lifecycle": false, "paused": false})
    );
    assert_eq!(state["store"]["state"], "ok");
    assert!(
        state["store"]["bytes"].as_u64().unwrap() > 0 && state["store"]["commit_p99_s"].is_f64()
    );
    assert_eq!(keys(&state["notices"][0]), set("code severity text since"));
    assert_eq!(state["notices"][0]["code"], "router_key");
    app.feed(&[("http://engine-1:30000", 100)]).await;
    app.acquire("big", 101).await;
    let codes: Vec<Value> = app.get("/v1/state").await.json()["notices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|notice| notice["code"].clone())
        .collect();
    assert_eq!(codes, ["larger_than_any_pool", "router_key"]);
}

/// CAP8: engines and epochs.
#[tokio::test]
async fn engines_and_epochs_are_listed() {
    let app = Builder {
        engines: vec![("http://a:1", 600), ("http://b:1", 400)],
        ..Builder::default()
    }
    .start()
    .await;
    let mut details = kvgate::http::FleetDetails {
        has_router: true,
        router_kind: Some("sglang".to_owned()),
        ..Default::default()
    };
    details
        .bad_entries
        .push(("::".to_owned(), "no address".to_owned()));
    details
        .engines
        .entry("http://a:1".to_owned())
        .or_default()
        .close_support = Some(true);
    app.fleet.send_replace(details.into());
    let engines = app.get("/v1/engines").await.json();
    assert_eq!(
        engines["router"]["bad_entries"][0],
        json!({"entry": "::", "reason": "no address"})
    );
    let engine = &engines["items"][0];
    assert_eq!(
        keys(engine),
        set(
            "url member counted healthy role kind capacity used evictable available usage running queued ranks source age_s \
             fresh last_error joined_epoch close_support"
        )
    );
    assert_eq!(
        (&engine["url"], &engine["capacity"], &engine["counted"]),
        (&json!("http://a:1"), &json!(600), &json!(true))
    );
    assert_eq!(
        (&engine["source"], &engine["close_support"]),
        (&json!("loads"), &json!(true))
    );
    assert_eq!(engines["items"].as_array().unwrap().len(), 2);
    let epochs = app.get("/v1/epochs").await.json();
    assert_eq!(
        (&epochs["total"], &epochs["next"]),
        (&json!(1), &Value::Null)
    );
    assert_eq!(
        (&epochs["items"][0]["epoch"], &epochs["items"][0]["cause"]),
        (&json!(1), &json!("first"))
    );
}

/// DUR3: the port is bound before the store is ready; until then only the calls of operation are served.
#[tokio::test]
async fn dur3_a_start_is_recovering() {
    let mut app = Builder {
        ready: false,
        engines: vec![("http://a:1", 10)],
        ..Builder::default()
    }
    .start()
    .await;
    for path in [
        "/healthz",
        "/version",
        "/openapi.json",
        "/problems/recovering",
        "/static/app.css",
    ] {
        assert_eq!(app.get(path).await.status, 200, "{path}");
    }
    app.get("/readyz").await.is_problem(503, "recovering");
    for path in ["/v1/state", "/v1/leases", "/v1/nothing"] {
        let answer = app.get(path).await;
        answer.is_problem(503, "recovering");
        assert_eq!(answer.header("retry-after"), Some("1"));
    }
    // People get a page, which asks again by itself.
    let page = app.get("/").await;
    assert_eq!(page.status, 503);
    assert_eq!(page.header("retry-after"), Some("1"));
    assert!(
        page.header("content-type")
            .unwrap()
            .starts_with("text/html")
    );
    assert!(page.text.contains("http-equiv=\"refresh\"") && page.text.contains(">recovering<"));
    let body = json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 1});
    app.post("/v1/leases", &body)
        .await
        .is_problem(503, "recovering");
    app.make_ready(&[("http://a:1", 10)]).await;
    assert_eq!(app.get("/readyz").await.status, 200);
    assert_eq!(
        app.post("/v1/leases", &body).await.json()["action"],
        "admit"
    );
    assert_eq!(app.get("/healthz").await.json(), json!({"status": "ok"}));
}

/// A drain ends waiting calls, refuses writes, answers reads, and the server stops although calls were open.
#[tokio::test]
async fn a_drain_ends_waiting_calls_and_the_server() {
    let mut app = TestApp::start().await;
    app.acquire("holder", 1_000).await;
    let calls: Vec<_> = [
        (
            "/v1/leases",
            json!({"ticket_id": "w", "session_id": "s", "reservation_tokens": 1, "wait_s": 60}),
        ),
        ("/v1/wait", json!({"ticket_ids": ["w"], "wait_s": 60})),
    ]
    .into_iter()
    .map(|(path, body)| tokio::spawn(app.client.post(app.url(path)).json(&body).send()))
    .collect();
    // The second call may find the ticket unknown when it comes first; then it is answered at once.
    app.until(|view| view.waiting == 1).await;
    app.gate.begin_drain();
    let mut calls = calls.into_iter();
    let waiting = Answer::of(calls.next().unwrap().await.unwrap().unwrap()).await;
    waiting.is_problem(503, "draining");
    calls.next().unwrap().await.unwrap().unwrap();
    let body = json!({"ticket_id": "late", "session_id": "s", "reservation_tokens": 1});
    app.post("/v1/leases", &body)
        .await
        .is_problem(503, "draining");
    app.post("/v1/wait", &json!({"ticket_ids": ["w"]}))
        .await
        .is_problem(503, "draining");
    app.delete("/v1/tickets/w")
        .await
        .is_problem(503, "draining");
    app.get("/readyz").await.is_problem(503, "draining");
    assert_eq!(app.get("/healthz").await.status, 200);
    assert_eq!(
        app.get("/v1/queue").await.json()["total"],
        1,
        "the place is kept"
    );
    let idle = app.connect().await;
    app.stop.cancel();
    let server = app.server.take().unwrap();
    tokio::time::timeout(crate::support::app::SOON, server)
        .await
        .expect("the server did not stop")
        .unwrap();
    drop(idle);
    app.gate.stop().await;
}

/// TIC2: with a max_wait that is over, the call that waits is told to go on.
#[tokio::test]
async fn an_aged_waiter_bypasses() {
    let app = Builder {
        policy: Policy {
            max_wait: Span::from_millis(300),
            ..Builder::default().policy
        },
        ..Builder::default()
    }
    .start()
    .await;
    app.acquire("holder", 1_000).await;
    let body = json!({"ticket_id": "w", "session_id": "s", "reservation_tokens": 1, "wait_s": 60});
    let answer = app.post("/v1/leases", &body).await;
    let bypass = answer.json();
    assert_eq!(
        (&bypass["action"], &bypass["reason"]),
        (&json!("bypass"), &json!("aged"))
    );
    assert!(
        answer.seq().is_some(),
        "a bypass that took a waiter out of line is a record"
    );
    assert!(bypass["waited_s"].as_f64().unwrap() >= 0.3);
}

/// The document describes every route that is served, and every described route is served.
#[tokio::test]
async fn the_document_and_the_routes_agree() {
    let app = TestApp::start().await;
    let answer = app.get("/openapi.json").await;
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let document = answer.json();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    assert_eq!(document["info"]["license"]["name"], "Apache-2.0");
    let described: BTreeSet<String> = document["paths"]
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(path, item)| {
            item.as_object()
                .unwrap()
                .keys()
                .map(move |method| format!("{} {path}", method.to_uppercase()))
        })
        .collect();
    let served: BTreeSet<String> = [
        "POST /v1/leases",
        "GET /v1/leases",
        "GET /v1/leases/{lease_id}",
        "DELETE /v1/leases/{lease_id}",
        "POST /v1/leases/{lease_id}/release",
        "POST /v1/leases/{lease_id}/renew",
        "POST /v1/leases/{lease_id}/revoke",
        "GET /v1/queue",
        "GET /v1/tickets/{ticket_id}",
        "DELETE /v1/tickets/{ticket_id}",
        "POST /v1/wait",
        "POST /v1/batch",
        "POST /v1/sessions/{session_id}/close",
        "GET /v1/sessions/{session_id}",
        "GET /v1/sessions",
        "GET /v1/closes/{close_id}",
        "POST /v1/closes/{close_id}/retry",
        "GET /v1/closes",
        "GET /v1/state",
        "GET /v1/engines",
        "GET /v1/epochs",
        "POST /v1/steps",
        "GET /v1/steps",
        "GET /v1/steps/current",
        "GET /v1/decisions",
        "GET /v1/history",
        "GET /v1/settings",
        "PATCH /v1/settings",
        "GET /v1/audit",
        "GET /v1/backup",
        "GET /healthz",
        "GET /readyz",
        "GET /version",
        "GET /metrics",
        "GET /openapi.json",
        "GET /problems/{code}",
    ]
    .map(str::to_owned)
    .into();
    assert_eq!(described, served);
    // The router itself says which methods an address takes.
    for path in document["paths"].as_object().unwrap().keys() {
        let concrete = path
            .replace("{lease_id}", "1-0000000000000000")
            .replace("{ticket_id}", "t")
            .replace("{session_id}", "s")
            .replace("{close_id}", "1-0000000000000000")
            .replace("{code}", "draining");
        let wrong = app.send(app.client.put(app.url(&concrete)).body("")).await;
        wrong.is_problem(405, "method_not_allowed");
        let allowed: BTreeSet<String> = wrong
            .header("allow")
            .unwrap()
            .split(',')
            .filter(|method| *method != "HEAD")
            .map(|method| format!("{method} {path}"))
            .collect();
        let expected: BTreeSet<String> = served
            .iter()
            .filter(|route| route.ends_with(&format!(" {path}")))
            .cloned()
            .collect();
        assert_eq!(allowed, expected);
    }
    let mut operations = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(operations.insert(id), "{id} names two operations");
            let parameters = operation["parameters"].as_array();
            let named: Vec<String> = parameters
                .into_iter()
                .flatten()
                .filter(|parameter| parameter["in"] == "path" && parameter["required"] == true)
                .map(|parameter| format!("{{{}}}", parameter["name"].as_str().unwrap()))
                .collect();
            let in_path: Vec<&str> = path
                .split('/')
                .filter(|part| part.starts_with('{'))
                .collect();
            assert_eq!(named, in_path, "{method} {path}");
            let responses = operation["responses"].as_object().unwrap();
            assert!(responses.contains_key("default"), "{method} {path}");
            for (status, response) in responses {
                let headers = keys(&response["headers"]);
                assert!(
                    headers.is_superset(&set("X-Request-Id Kvgate-Epoch")),
                    "{method} {path} {status}"
                );
                if !status.starts_with('2') {
                    let schema = &response["content"]["application/problem+json"]["schema"]["$ref"];
                    assert_eq!(
                        schema, "#/components/schemas/Problem",
                        "{method} {path} {status}"
                    );
                }
            }
        }
    }
    let close = &document["paths"]["/v1/sessions/{session_id}/close"]["post"];
    assert_eq!(
        (
            &close["parameters"][1]["name"],
            &close["parameters"][1]["schema"]["maximum"]
        ),
        (&json!("wait_s"), &json!(60))
    );
    let of = |status: &str| {
        let body = &close["responses"][status]["content"]["application/json"];
        body["schema"]["$ref"].as_str().unwrap().to_owned()
    };
    assert!(of("200").ends_with("/CloseDisabled") && of("202").ends_with("/Close"));
    let text = answer.text.as_str();
    for (_, reference) in text
        .match_indices("#/components/schemas/")
        .map(|(at, start)| (at, text[at + start.len()..].split('"').next().unwrap()))
    {
        assert!(
            !document["components"]["schemas"][reference].is_null(),
            "{reference} is not described"
        );
    }
}

/// While the store is away acquires bypass, everything else that writes is 503, and the service comes back by itself.
#[tokio::test]
async fn without_a_store_acquires_bypass() {
    let switch = Switch::default();
    let opened = switch.clone();
    let app = Builder::default().start_on(move || opened.open()).await;
    let held = app.acquire("held", 100).await;
    let lease = format!("/v1/leases/{}", held["lease_id"].as_str().unwrap());
    switch.set(Mood::Failing);
    let body = json!({"ticket_id": "t", "session_id": "s", "prompt_tokens": 7, "max_new_tokens": 3, "ttl_s": 0});
    // The first meets the failing commit, the second the store that is away.
    for _ in 0..2 {
        let answer = app.post("/v1/leases", &body).await;
        assert_eq!((answer.status, answer.seq()), (200, None));
        let bypass = answer.json();
        assert_eq!(
            (&bypass["action"], &bypass["reason"]),
            (&json!("bypass"), &json!("store_unavailable"))
        );
        assert_eq!(
            (&bypass["reservation_tokens"], &bypass["repeated"]),
            (&json!(10), &json!(false))
        );
        assert_eq!(
            (&bypass["ttl_clamped"], &bypass["session_reopened"]),
            (&json!(true), &json!(false))
        );
    }
    app.delete(&lease)
        .await
        .is_problem(503, "store_unavailable");
    app.delete("/v1/tickets/t")
        .await
        .is_problem(503, "store_unavailable");
    app.post("/v1/wait", &json!({"ticket_ids": ["t"]}))
        .await
        .is_problem(503, "store_unavailable");
    let operations = json!({"operations": [
        {"op": "acquire", "ticket_id": "b", "session_id": "s", "reservation_tokens": 1},
        {"op": "cancel", "ticket_id": "b"}
    ]});
    let batch = app.post("/v1/batch", &operations).await.json();
    assert_eq!(batch["results"][0]["body"]["reason"], "store_unavailable");
    assert_eq!(
        (
            &batch["results"][1]["status"],
            &batch["results"][1]["body"]["code"]
        ),
        (&json!(503), &json!("store_unavailable"))
    );
    app.get("/readyz").await.is_problem(503, "recovering");
    let metrics = app.get("/metrics").await;
    assert_eq!(metrics.status, 200);
    let text = &metrics.text;
    for line in [
        "kvgate_store_up 0",
        "kvgate_store_errors_total{kind=\"commit\"} 1",
        "kvgate_store_errors_total{kind=\"close\"} 0",
        "# TYPE kvgate_store_commit_seconds histogram",
        "# EOF",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
    assert_eq!(
        app.get("/healthz").await.status,
        200,
        "recovering is no reason to be killed"
    );
    assert_eq!(
        app.get("/v1/state").await.json()["store"]["state"],
        "unavailable"
    );
    switch.set(Mood::Good);
    let mut phases = app.gate.phases();
    let back = phases.wait_for(|phase| *phase != kvgate::gate::Phase::Unavailable);
    tokio::time::timeout(SOON, back).await.unwrap().unwrap();
    assert_eq!(
        app.delete(&lease).await.json()["outcome"],
        "already_released"
    );
}

/// A full inbox is said at once; callers go on without a lease.
#[tokio::test]
async fn a_full_inbox_is_overloaded() {
    let switch = Switch::default();
    let opened = switch.clone();
    let app = Builder::default().start_on(move || opened.open()).await;
    switch.set(Mood::Holding);
    let held = tokio::spawn(app.client.delete(app.url("/v1/tickets/marker")).send());
    let waits = switch.clone();
    tokio::task::spawn_blocking(move || waits.wait_until_held())
        .await
        .unwrap();
    for _ in 0..kvgate::gate::INBOX_MAX {
        app.gate.local_bypasses(vec![(LocalBypass::Other, 1)]);
    }
    let body = json!({"ticket_id": "t", "session_id": "s", "reservation_tokens": 1});
    app.post("/v1/leases", &body)
        .await
        .is_problem(503, "overloaded");
    app.post(
        "/v1/batch",
        &json!({"operations": [{"op": "cancel", "ticket_id": "t"}]}),
    )
    .await
    .is_problem(503, "overloaded");
    assert_eq!(
        app.get("/v1/state").await.status,
        200,
        "the picture needs no writer"
    );
    switch.set(Mood::Good);
    assert_eq!(held.await.unwrap().unwrap().status(), 200);
    app.until(|view| view.tally.reported(LocalBypass::Other) > 0)
        .await;
    assert_eq!(
        app.post("/v1/leases", &body).await.json()["action"],
        "admit"
    );
}
