//! Trouble with the gate is no error for the rollout, and costs it next to nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use kvgate_client::{Action, Gate, GateConfig, Lease, Usage};
use tokio::time::Instant;

use crate::fake::{Behaviour, Fake, soon};
use crate::{ask, config, gate, quick};

/// One request without work.
async fn turn(gate: &Gate, number: usize) -> Lease {
    soon(gate.acquire(ask(number, 1))).await.unwrap()
}

#[tokio::test]
async fn a_new_ticket_goes_on_at_once() {
    let problem = Behaviour::Problem;
    let mut cases = tokio::task::JoinSet::new();
    for (behaviour, reason) in [
        (Behaviour::Hang, "unreachable"),
        (Behaviour::Mute, "unreachable"),
        (Behaviour::Cut, "unreachable"),
        (Behaviour::Garbage, "unreachable"),
        (Behaviour::Endless, "unreachable"),
        (Behaviour::Html(200), "unreachable"),
        (Behaviour::Html(302), "unreachable"),
        (Behaviour::Html(502), "unreachable"),
        (problem(500, "internal"), "unreachable"),
        (problem(503, "recovering"), "unreachable"),
        (problem(503, "draining"), "unreachable"),
        (problem(503, "overloaded"), "unreachable"),
        (problem(401, "unauthorized"), "refused"),
        (problem(403, "forbidden"), "refused"),
        (problem(409, "ticket_conflict"), "refused"),
        (problem(421, "host_not_allowed"), "refused"),
        (problem(422, "invalid_request"), "refused"),
        (problem(429, "too_many"), "refused"),
        (Behaviour::Html(404), "refused"),
    ] {
        cases.spawn(goes_on_at_once(behaviour, reason));
    }
    cases.join_all().await;
}

async fn goes_on_at_once(behaviour: Behaviour, reason: &str) {
    let fake = Fake::start();
    fake.behave(behaviour);
    let gate = Gate::new(GateConfig {
        breaker_open: Duration::from_secs(60),
        ..quick(&fake)
    })
    .unwrap();
    let began = Instant::now();
    for number in 0..10 {
        let lease = turn(&gate, number).await;
        assert_eq!(lease.action(), Action::Bypass, "{behaviour:?}");
        assert!(lease.decision().local && !lease.is_held());
        let by_breaker = number > 0 && lease.reason() == "breaker";
        let given = lease.reason();
        assert!(by_breaker || given == reason, "{behaviour:?}: {given}");
    }
    // Three time-outs at most, whatever the gate does; then the breaker is open.
    assert!(began.elapsed() < Duration::from_secs(6), "{behaviour:?}");
    let told = gate.local_bypasses();
    assert_eq!(told.values().sum::<u64>(), 10);
    let few = told[reason] <= 3 || reason == "refused";
    assert!(few, "{behaviour:?}: {told:?}");
}

#[tokio::test]
async fn what_the_gate_would_refuse_is_not_even_asked() {
    let fake = Fake::start();
    let gate = gate(&fake);
    for ask in [ask(1, 1 << 60), ask(1, 1).ticket_id("..")] {
        let lease = gate.acquire(ask).await.unwrap();
        assert_eq!(
            (lease.action(), lease.reason()),
            (Action::Bypass, "refused")
        );
    }
    assert!(gate.flush().await);
    assert_eq!(fake.look(|book| book.requests.len()), 0);
}

#[tokio::test]
async fn odd_answers_are_bypasses() {
    for answer in [
        r#"{"action": "admit"}"#,
        r#"{"action": "admit", "lease_id": 7}"#,
        r#"{"action": "wait"}"#,
        r#"{"action": "dance"}"#,
        "[]",
        "null",
        "",
    ] {
        let fake = Fake::start();
        fake.behave(Behaviour::Says(answer));
        let gate = Gate::new(quick(&fake)).unwrap();
        let lease = turn(&gate, 1).await;
        assert_eq!(
            (lease.action(), lease.reason()),
            (Action::Bypass, "unreachable")
        );
        assert_eq!(lease.decision().reservation_tokens, 1);
        assert_eq!(gate.report(None, 1).await, None);
        assert_eq!(gate.state().await, None);
    }
}

#[tokio::test]
async fn a_gate_that_is_not_there_costs_next_to_nothing() {
    let mut fake = Fake::start();
    fake.stop().await;
    let gate = gate(&fake);
    let asked: Vec<_> = (0..500)
        .map(|number| tokio::spawn(gate.acquire(ask(number, 1))))
        .collect();
    let began = Instant::now();
    for asked in asked {
        let lease = soon(asked).await.unwrap().unwrap();
        assert!(matches!(lease.reason(), "unreachable" | "breaker"));
    }
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(gate.local_bypasses().values().sum::<u64>(), 500);
}

#[tokio::test]
async fn local_bypasses_are_told_with_the_next_call_that_gets_through() {
    let fake = Fake::start();
    fake.behave(Behaviour::Problem(503, "recovering"));
    let gate = Gate::new(GateConfig {
        breaker_open: Duration::from_millis(50),
        ..quick(&fake)
    })
    .unwrap();
    for number in 0..6 {
        drop(turn(&gate, number).await);
    }
    fake.behave(Behaviour::Normal);
    // Asked by the trial of the breaker at the latest.
    let mut decided = gate.local_bypasses();
    let mut number = 6;
    let lease = loop {
        let lease = turn(&gate, number).await;
        if lease.action() == Action::Admit {
            break lease;
        }
        number += 1;
        decided = gate.local_bypasses();
    };
    assert_eq!(decided.values().sum::<u64>(), number as u64);
    assert_eq!(gate.local_bypasses(), BTreeMap::new());
    assert_eq!(fake.look(|book| book.local_bypasses.clone()), decided);
    drop(lease);
}

#[tokio::test]
async fn local_bypasses_are_told_inside_a_batch_too() {
    let mut fake = Fake::start();
    let gate = Gate::new(GateConfig {
        breaker_failures: 1_000,
        ..config(&fake)
    })
    .unwrap();
    fake.stop().await;
    for number in 0..5 {
        drop(turn(&gate, number).await);
    }
    fake.resume();
    let asked: Vec<_> = (10..110)
        .map(|number| tokio::spawn(gate.acquire(ask(number, 1))))
        .collect();
    for asked in asked {
        let lease = soon(asked).await.unwrap().unwrap();
        assert_eq!(lease.action(), Action::Admit);
    }
    let told = BTreeMap::from([("unreachable".to_owned(), 5)]);
    assert_eq!(fake.look(|book| book.local_bypasses.clone()), told);
    assert!(fake.look(|book| book.count("POST", "/v1/batch")) > 0);
}

#[tokio::test]
async fn one_bad_call_of_a_batch_does_not_spoil_the_others() {
    let fake = Fake::start();
    fake.change(|book| {
        book.only = "/v1/batch";
        book.behaviour = Behaviour::Problem(422, "invalid_request");
    });
    let gate = gate(&fake);
    let asked: Vec<_> = (0..100)
        .map(|number| tokio::spawn(gate.acquire(ask(number, 1))))
        .collect();
    for asked in asked {
        let lease = soon(asked).await.unwrap().unwrap();
        assert_eq!(lease.action(), Action::Admit);
    }
    fake.until("all is given back", |book| book.reserved() == 0)
        .await;
}

#[tokio::test]
async fn what_was_decided_without_an_answer_is_cancelled_behind() {
    let fake = Fake::start();
    // The gate grants, and its answer never comes.
    fake.behave(Behaviour::Mute);
    let gate = Gate::new(quick(&fake)).unwrap();
    let lease = turn(&gate, 1).await;
    assert_eq!(lease.reason(), "unreachable");
    assert_eq!(fake.look(|book| book.granted.clone()), ["t1"]);
    fake.behave(Behaviour::Normal);
    fake.until("no lease is left", |book| book.reserved() == 0)
        .await;
}

#[tokio::test]
async fn a_ticket_that_is_refused_at_once_is_left_alone() {
    let fake = Fake::start();
    fake.behave(Behaviour::Problem(409, "ticket_conflict"));
    let gate = gate(&fake);
    drop(turn(&gate, 1).await);
    assert!(gate.flush().await);
    // It may be another caller's.
    assert_eq!(fake.look(|book| book.count("DELETE", "/v1/tickets")), 0);
}

#[tokio::test]
async fn a_release_is_tried_until_it_arrives() {
    for explicitly in [false, true] {
        let mut fake = Fake::start();
        let gate = Gate::new(quick(&fake)).unwrap();
        let lease = turn(&gate, 1).await;
        fake.behave(Behaviour::Hang);
        let began = Instant::now();
        if explicitly {
            lease.release(Usage::default()).await;
        } else {
            drop(lease);
        }
        assert!(began.elapsed() < Duration::from_secs(2));
        fake.behave(Behaviour::Problem(503, "recovering"));
        fake.stop().await;
        fake.resume();
        fake.until("it is tried again", |book| {
            book.count("POST", "/release") >= 2
        })
        .await;
        assert_eq!(fake.look(|book| book.leases.len()), 1);
        fake.behave(Behaviour::Normal);
        fake.until("the release arrived", |book| book.leases.is_empty())
            .await;
        assert!(gate.flush().await);
    }
}

#[tokio::test]
async fn what_cannot_be_delivered_is_left_to_the_ttl() {
    let mut fake = Fake::start();
    let gate = Gate::new(GateConfig {
        retry_for: Duration::from_millis(300),
        ..quick(&fake)
    })
    .unwrap();
    let lease = turn(&gate, 1).await;
    fake.stop().await;
    drop(lease);
    assert!(gate.flush().await);
    fake.resume();
    assert_eq!(fake.look(|book| book.leases.len()), 1);
}

#[tokio::test]
async fn a_usage_report_that_is_refused_does_not_keep_the_lease() {
    let fake = Fake::start();
    fake.change(|book| book.refuses_usage = true);
    let gate = gate(&fake);
    let lease = turn(&gate, 1).await;
    lease
        .release(Usage {
            prompt_tokens: Some(1),
            ..Usage::default()
        })
        .await;
    fake.until("the lease is given back", |book| book.leases.is_empty())
        .await;
}

/// 40 callers for room for 8, through every kind of trouble: each of their requests starts, and nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_comes_through_all_of_it() {
    let mut fake = Fake::start();
    fake.change(|book| {
        book.capacity = 80;
        book.claim_grace_s = 1.0;
    });
    let gate = Gate::new(GateConfig {
        breaker_open: Duration::from_millis(200),
        ..quick(&fake)
    })
    .unwrap();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut sessions = tokio::task::JoinSet::new();
    for number in 0..40 {
        let (gate, stopped) = (gate.clone(), stopped.clone());
        sessions.spawn(async move {
            while !*stopped.borrow() {
                let ask = kvgate_client::Ask::reservation(format!("s{number}"), 10);
                let lease = gate.acquire(ask).await.unwrap();
                let work = std::future::pending::<()>();
                let _ = tokio::time::timeout(Duration::from_millis(3), work).await;
                lease.release(Usage::default()).await;
            }
        });
    }
    for trouble in [
        Behaviour::Hang,
        Behaviour::Mute,
        Behaviour::Slow(Duration::from_millis(400)),
        Behaviour::Cut,
        Behaviour::Garbage,
        Behaviour::Html(502),
        Behaviour::Problem(401, "unauthorized"),
        Behaviour::Problem(503, "recovering"),
    ] {
        let granted = fake.look(|book| book.granted.len());
        fake.until("the gate is used", |book| book.granted.len() > granted + 50)
            .await;
        let seen = fake.look(|book| book.requests.len());
        fake.behave(trouble);
        fake.until("the trouble is met", |book| book.requests.len() > seen + 20)
            .await;
        fake.behave(Behaviour::Normal);
        fake.stop().await;
        fake.resume();
    }
    stop.send_replace(true);
    while let Some(session) = soon(sessions.join_next()).await {
        session.unwrap();
    }
    fake.until("nothing is left", |book| {
        book.leases.is_empty() && book.waiting.is_empty()
    })
    .await;
    assert!(gate.flush().await);
}

#[tokio::test]
async fn a_breaker_costs_one_time_out_in_its_period() {
    let fake = Fake::start();
    fake.behave(Behaviour::Hang);
    let gate = Gate::new(GateConfig {
        breaker_open: Duration::from_secs(1),
        ..quick(&fake)
    })
    .unwrap();
    for number in 0..3 {
        drop(turn(&gate, number).await);
    }
    let mut number = 3;
    let began = Instant::now();
    let mut asked = 0;
    while began.elapsed() < Duration::from_secs(3) {
        asked += usize::from(turn(&gate, number).await.reason() != "breaker");
        number += 1;
        tokio::task::yield_now().await;
    }
    // One trial in each period of at least three quarters of a second.
    assert!(asked <= 4, "{asked} of {number} were asked");
    // Once it is back, the next trial closes the breaker.
    fake.behave(Behaviour::Normal);
    let back = async {
        while turn(&gate, number).await.action() == Action::Bypass {
            number += 1;
            tokio::task::yield_now().await;
        }
    };
    soon(back).await;
}
