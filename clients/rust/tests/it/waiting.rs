//! Waiting tickets: how they ask again, and when they stop.

use std::time::Duration;

use kvgate_client::{Action, CloseMode, Gate, GateConfig, Lease, TicketCancelled};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::fake::{Behaviour, Fake, soon};
use crate::{ALL, ask, config, gate, hold_all, quick};

/// By itself, and in shared calls.
const WAYS: [usize; 2] = [1_000, 1];

type Waiting = JoinHandle<Result<Lease, TicketCancelled>>;

fn waits(gate: &Gate, number: usize, tokens: u64) -> Waiting {
    tokio::spawn(gate.acquire(ask(number, tokens)))
}

async fn one_waits(fake: &Fake) {
    fake.until("it waits", |book| book.attended().contains("t1"))
        .await;
}

#[tokio::test]
async fn a_waiting_ticket_asks_again_with_the_same_body() {
    let fake = Fake::start();
    let gate = Gate::new(GateConfig {
        window: Duration::from_millis(100),
        ..config(&fake)
    })
    .unwrap();
    let held = hold_all(&gate).await;
    let waiting = waits(&gate, 1, ALL);
    fake.until("it asked again", |book| {
        book.bodies("/v1/leases").len() >= 6
    })
    .await;
    drop(held);
    let lease = soon(waiting).await.unwrap().unwrap();
    assert_eq!(lease.action(), Action::Admit);
    assert_eq!(lease.waited(), Duration::from_millis(250));
    let mut bodies = fake.look(|book| book.bodies("/v1/leases"));
    bodies.remove(0);
    for body in &mut bodies {
        body["wait_s"] = 0.into();
    }
    assert!(bodies.iter().all(|body| *body == bodies[0]));
}

#[tokio::test]
async fn many_waiting_tickets_share_calls_and_keep_their_order() {
    let fake = Fake::start();
    let gate = Gate::new(GateConfig {
        window: Duration::from_millis(500),
        ..config(&fake)
    })
    .unwrap();
    let held = hold_all(&gate).await;
    let waiting: Vec<Waiting> = (0..200).map(|number| waits(&gate, number, ALL)).collect();
    fake.until("all wait", |book| book.waiting.len() == 200)
        .await;
    let queue = fake.look(|book| book.waiting_tickets());
    fake.until("they share calls", |book| {
        book.bodies("/v1/wait").len() >= 10
    })
    .await;
    drop(held);
    for waiting in waiting {
        // Each is given back at once, and makes room for the next.
        tokio::spawn(async move { drop(waiting.await.unwrap().unwrap()) });
    }
    fake.until("all were granted", |book| {
        book.granted.len() == 201 && book.reserved() == 0
    })
    .await;
    let (granted, shared, single) = fake.look(|book| {
        let shared = book.bodies("/v1/wait");
        let most = shared
            .iter()
            .map(|body| body["ticket_ids"].as_array().unwrap().len());
        let single: std::collections::BTreeSet<String> = book
            .bodies("/v1/leases")
            .iter()
            .map(|body| body["ticket_id"].as_str().unwrap().to_owned())
            .collect();
        (book.granted.clone(), most.max(), single.len())
    });
    assert_eq!(granted[1..], queue);
    assert!(shared > Some(32));
    assert!(single < 80, "most tickets never had a call of their own");
}

#[tokio::test]
async fn few_waiting_tickets_ask_each_by_itself() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let held = hold_all(&gate).await;
    let waiting: Vec<Waiting> = (0..31).map(|number| waits(&gate, number, 1)).collect();
    fake.until("all wait", |book| book.waiting.len() == 31)
        .await;
    drop(held);
    for waiting in waiting {
        drop(soon(waiting).await.unwrap().unwrap());
    }
    assert_eq!(fake.look(|book| book.count("POST", "/v1/wait")), 0);
}

#[tokio::test]
async fn a_ticket_that_the_gate_forgot_is_acquired_again() {
    for wait_calls_from in WAYS {
        let fake = Fake::start();
        let gate = Gate::new(GateConfig {
            wait_calls_from,
            ..quick(&fake)
        })
        .unwrap();
        let held = hold_all(&gate).await;
        let waiting = waits(&gate, 1, ALL);
        one_waits(&fake).await;
        fake.change(|book| book.forget("t1"));
        one_waits(&fake).await;
        drop(held);
        let lease = soon(waiting).await.unwrap().unwrap();
        assert_eq!(lease.action(), Action::Admit);
    }
}

#[tokio::test]
async fn a_session_close_cancels_its_waiting_tickets() {
    for wait_calls_from in WAYS {
        let fake = Fake::start();
        let gate = Gate::new(GateConfig {
            wait_calls_from,
            ..config(&fake)
        })
        .unwrap();
        let _held = hold_all(&gate).await;
        let waiting = waits(&gate, 1, ALL);
        one_waits(&fake).await;
        gate.close_session("s1", CloseMode::Join).await;
        let cancelled = soon(waiting).await.unwrap().unwrap_err();
        assert_eq!(cancelled.reason, "session_closed");
        assert_eq!(
            (cancelled.ticket_id.as_str(), cancelled.session_id.as_str()),
            ("t1", "s1")
        );
        // What was decided is not cancelled behind.
        assert!(gate.flush().await);
        assert_eq!(fake.look(|book| book.count("DELETE", "/v1/tickets")), 0);
    }
}

#[tokio::test]
async fn a_place_outlives_a_restart_of_the_gate() {
    for wait_calls_from in WAYS {
        let mut fake = Fake::start();
        let gate = Gate::new(GateConfig {
            wait_calls_from,
            ..config(&fake)
        })
        .unwrap();
        let held = hold_all(&gate).await;
        let waiting: Vec<Waiting> = (0..100).map(|number| waits(&gate, number, 10)).collect();
        fake.until("all wait", |book| book.attended().len() == 100)
            .await;
        let queue = fake.look(|book| book.waiting_tickets());
        fake.stop().await;
        fake.behave(Behaviour::Problem(503, "recovering"));
        let seen = fake.look(|book| book.requests.len());
        fake.resume();
        fake.until("they came back while it recovers", |book| {
            book.requests.len() > seen
        })
        .await;
        fake.behave(Behaviour::Normal);
        drop(held);
        for waiting in waiting {
            let lease = soon(waiting).await.unwrap().unwrap();
            assert_eq!(lease.action(), Action::Admit);
        }
        fake.until("all is given back", |book| book.reserved() == 0)
            .await;
        assert_eq!(fake.look(|book| book.granted[1..].to_vec()), queue);
    }
}

#[tokio::test]
async fn a_waiting_ticket_goes_on_when_its_grace_is_over() {
    let troubles = [
        None,
        Some(Behaviour::Hang),
        Some(Behaviour::Cut),
        Some(Behaviour::Garbage),
        Some(Behaviour::Says("{}")),
        Some(Behaviour::Problem(503, "draining")),
    ];
    let mut ways = tokio::task::JoinSet::new();
    for wait_calls_from in WAYS {
        for trouble in troubles {
            ways.spawn(goes_on_in(trouble, wait_calls_from));
        }
    }
    ways.join_all().await;
}

/// None is a gate that is not there.
async fn goes_on_in(trouble: Option<Behaviour>, wait_calls_from: usize) {
    let mut fake = Fake::start();
    fake.change(|book| book.claim_grace_s = 1.0);
    let gate = Gate::new(GateConfig {
        wait_calls_from,
        ..quick(&fake)
    })
    .unwrap();
    let _held = hold_all(&gate).await;
    let waiting = waits(&gate, 1, ALL);
    one_waits(&fake).await;
    let began = Instant::now();
    match trouble {
        None => fake.stop().await,
        Some(behaviour) => fake.behave(behaviour),
    }
    let lease = soon(waiting).await.unwrap().unwrap();
    let took = began.elapsed();
    assert_eq!(
        (lease.action(), lease.reason()),
        (Action::Bypass, "unreachable")
    );
    // Its last answer was at most one window before.
    assert!(took > Duration::from_millis(500), "{trouble:?}: {took:?}");
    assert!(took < Duration::from_secs(10), "{trouble:?}: {took:?}");
    if trouble.is_none() {
        fake.resume();
    }
    fake.behave(Behaviour::Normal);
    fake.until("the ticket is cancelled behind it", |book| {
        book.waiting.is_empty()
    })
    .await;
}

#[tokio::test]
async fn the_hard_bound_holds_whatever_the_gate_says() {
    let mut ways = tokio::task::JoinSet::new();
    for wait_calls_from in WAYS {
        ways.spawn(goes_on_at_the_bound(wait_calls_from));
    }
    ways.join_all().await;
}

async fn goes_on_at_the_bound(wait_calls_from: usize) {
    let fake = Fake::start();
    // It says that it would bypass soon, and never does.
    fake.change(|book| book.bypass_in_s = 0.2);
    let gate = Gate::new(GateConfig {
        wait_calls_from,
        window: Duration::from_secs(60),
        ..config(&fake)
    })
    .unwrap();
    let _held = hold_all(&gate).await;
    let began = Instant::now();
    let waiting = waits(&gate, 1, ALL);
    one_waits(&fake).await;
    fake.change(|book| book.bypass_in_s = 0.0);
    let lease = soon(waiting).await.unwrap().unwrap();
    assert_eq!(
        (lease.action(), lease.reason()),
        (Action::Bypass, "unreachable")
    );
    assert!(began.elapsed() > Duration::from_secs(5));
    assert!(began.elapsed() < Duration::from_secs(10));
    fake.until("the ticket is cancelled", |book| book.waiting.is_empty())
        .await;
}

#[tokio::test]
async fn a_gate_without_shared_calls_is_asked_for_each_ticket() {
    let fake = Fake::start();
    fake.change(|book| {
        book.only = "/v1/wait";
        book.behaviour = Behaviour::Problem(404, "not_found");
    });
    let gate = Gate::new(GateConfig {
        wait_calls_from: 1,
        ..config(&fake)
    })
    .unwrap();
    let held = hold_all(&gate).await;
    let waiting: Vec<Waiting> = (0..40).map(|number| waits(&gate, number, 10)).collect();
    fake.until("all wait in calls of their own", |book| {
        let bodies = book.bodies("/v1/leases");
        bodies.iter().filter(|body| body["wait_s"] != 0.0).count() == 40
    })
    .await;
    drop(held);
    for waiting in waiting {
        assert_eq!(
            soon(waiting).await.unwrap().unwrap().action(),
            Action::Admit
        );
    }
}

#[tokio::test]
async fn a_gate_with_too_many_calls_is_not_asked_in_a_hurry() {
    for wait_calls_from in WAYS {
        let fake = Fake::start();
        // It answers `wait` at once, whatever the call says it may wait.
        fake.change(|book| book.never_waits = true);
        let gate = Gate::new(GateConfig {
            wait_calls_from,
            ..config(&fake)
        })
        .unwrap();
        let held = hold_all(&gate).await;
        let began = Instant::now();
        let waiting = waits(&gate, 1, ALL);
        fake.until("it asked some times", |book| {
            book.count("POST", "/v1/leases") + book.count("POST", "/v1/wait") >= 5
        })
        .await;
        // Two acquires and a first wait are at once; before each of the other two is a rest.
        assert!(began.elapsed() > Duration::from_millis(500));
        drop(held);
        drop(soon(waiting).await.unwrap().unwrap());
    }
}

#[tokio::test]
async fn a_gate_that_forgets_all_the_time_is_not_asked_in_a_hurry() {
    let fake = Fake::start();
    fake.change(|book| {
        book.only = "/v1/wait";
        book.behaviour =
            Behaviour::Says(r#"{"results": [{"ticket_id": "t1", "action": "unknown"}]}"#);
    });
    let gate = Gate::new(GateConfig {
        wait_calls_from: 1,
        ..config(&fake)
    })
    .unwrap();
    let held = hold_all(&gate).await;
    let began = Instant::now();
    let waiting = waits(&gate, 1, ALL);
    fake.until("it was acquired some times", |book| {
        book.bodies("/v1/leases").len() >= 6
    })
    .await;
    // The first time at once; before each of the other three is a pause.
    assert!(began.elapsed() > Duration::from_millis(500));
    drop(held);
    drop(soon(waiting).await.unwrap().unwrap());
}

#[tokio::test]
async fn a_dropped_future_withdraws_its_ticket() {
    for wait_calls_from in WAYS {
        let fake = Fake::start();
        let gate = Gate::new(GateConfig {
            wait_calls_from,
            ..config(&fake)
        })
        .unwrap();
        let held = hold_all(&gate).await;
        let waiting = waits(&gate, 1, ALL);
        one_waits(&fake).await;
        waiting.abort();
        fake.until("the ticket is withdrawn", |book| book.waiting.is_empty())
            .await;
        held.release(kvgate_client::Usage::default()).await;
        assert_eq!(fake.look(|book| book.granted.clone()), ["holder"]);
    }
}

#[tokio::test]
async fn a_flush_knows_of_the_ticket_of_a_dropped_future() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let _held = hold_all(&gate).await;
    let mut waiting = Box::pin(gate.acquire(ask(1, ALL)));
    tokio::select! {
        biased;
        _ = &mut waiting => panic!("there is no room"),
        () = one_waits(&fake) => {}
    }
    drop(waiting);
    assert!(gate.flush().await);
    assert_eq!(fake.look(|book| book.waiting.len()), 0);
}

#[tokio::test]
async fn a_ticket_refused_in_its_wait_goes_on() {
    for wait_calls_from in WAYS {
        let fake = Fake::start();
        let gate = Gate::new(GateConfig {
            wait_calls_from,
            ..quick(&fake)
        })
        .unwrap();
        let _held = hold_all(&gate).await;
        let waiting = waits(&gate, 1, ALL);
        one_waits(&fake).await;
        fake.behave(Behaviour::Problem(401, "unauthorized"));
        let lease = soon(waiting).await.unwrap().unwrap();
        assert_eq!(
            (lease.action(), lease.reason()),
            (Action::Bypass, "refused")
        );
        assert!(!lease.is_held());
    }
}

#[tokio::test]
async fn a_ticket_refused_in_its_wait_is_cancelled_behind() {
    let fake = Fake::start();
    let gate = Gate::new(quick(&fake)).unwrap();
    let _held = hold_all(&gate).await;
    let waiting = waits(&gate, 1, ALL);
    one_waits(&fake).await;
    fake.change(|book| {
        book.only = "/v1/leases";
        book.behaviour = Behaviour::Problem(403, "forbidden");
    });
    let lease = soon(waiting).await.unwrap().unwrap();
    assert_eq!(lease.reason(), "refused");
    fake.until("the ticket is cancelled", |book| book.waiting.is_empty())
        .await;
}
