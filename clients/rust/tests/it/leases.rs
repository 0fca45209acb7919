//! Leases: held, renewed, given back, and lost.

use std::time::Duration;

use kvgate_client::{Action, Ask, Gate, GateConfig, GateError, Scope, Usage};
use serde_json::json;

use crate::fake::{Behaviour, Fake, soon};
use crate::{ALL, ask, config, gate, hold_all};

#[tokio::test]
async fn a_lease_is_given_back_when_it_is_dropped() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let lease = gate.acquire(Ask::new("s/7%", 4, 5)).await.unwrap();
    assert_eq!(
        (lease.action(), lease.reason()),
        (Action::Admit, "capacity_available")
    );
    assert_eq!(fake.look(|book| book.reserved()), 9);
    assert_eq!(lease.decision().reservation_tokens, 9);
    assert!(lease.is_held() && lease.lease_id() == Some("1-fake"));
    assert_eq!(lease.session_id(), "s/7%");
    drop(lease);
    assert!(gate.flush().await);
    assert_eq!(fake.look(|book| book.reserved()), 0);
    assert_eq!(fake.look(|book| book.usage.clone()), [json!({})]);
}

#[tokio::test]
async fn an_explicit_release_says_what_was_used() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let lease = gate.acquire(ask(1, 9)).await.unwrap();
    let answer =
        json!({"meta_info": {"prompt_tokens": 4, "completion_tokens": 2, "cached_tokens": 3}});
    let mut usage = Usage::from_answer(&answer);
    usage.engine = Some("http://engine:30000".to_owned());
    lease.release(usage.clone()).await;
    assert_eq!(fake.look(|book| book.reserved()), 0);

    let mut lease = gate.acquire(ask(2, 9)).await.unwrap();
    lease.report_usage(usage);
    drop(lease);
    assert!(gate.flush().await);
    let told = json!({
        "prompt_tokens": 4, "completion_tokens": 2, "cached_tokens": 3, "engine": "http://engine:30000",
    });
    assert_eq!(fake.look(|book| book.usage.clone()), [told.clone(), told]);
}

#[tokio::test]
async fn a_release_is_on_its_way_when_its_future_is_dropped() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let lease = gate.acquire(ask(1, 9)).await.unwrap();
    fake.behave(Behaviour::Problem(503, "overloaded"));
    // Polled once: it waits for the first attempt.
    let mut release = Box::pin(lease.release(Usage::default()));
    let poll =
        std::future::poll_fn(|context| std::task::Poll::Ready(release.as_mut().poll(context)));
    assert!(poll.await.is_pending());
    drop(release);
    // Never polled.
    fake.behave(Behaviour::Normal);
    let lease = gate.acquire(ask(2, 9)).await.unwrap();
    drop(lease.release(Usage::default()));
    fake.until("both are given back", |book| book.leases.is_empty())
        .await;
}

#[tokio::test]
async fn a_lease_may_be_dropped_anywhere() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let lease = gate.acquire(ask(1, 9)).await.unwrap();
    let thread = std::thread::spawn(move || drop(lease));
    fake.until("it is given back", |book| book.leases.is_empty())
        .await;
    thread.join().unwrap();
}

#[tokio::test]
async fn a_gate_serves_callers_without_a_runtime() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let other = gate.clone();
    // An executor that is not tokio: a thread that polls and parks.
    let thread = std::thread::spawn(move || {
        struct Unpark(std::thread::Thread);
        impl std::task::Wake for Unpark {
            fn wake(self: std::sync::Arc<Self>) {
                self.0.unpark();
            }
        }
        let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
        let mut context = std::task::Context::from_waker(&waker);
        let mut work = Box::pin(async move {
            let lease = other.acquire(ask(1, 9)).await.unwrap();
            let action = lease.action();
            assert!(lease.renew(None).await);
            lease.release(Usage::default()).await;
            action
        });
        loop {
            match work.as_mut().poll(&mut context) {
                std::task::Poll::Ready(action) => return action,
                std::task::Poll::Pending => std::thread::park(),
            }
        }
    });
    let action = soon(tokio::task::spawn_blocking(|| thread.join().unwrap())).await;
    assert_eq!(action.unwrap(), Action::Admit);
    assert_eq!(fake.look(|book| book.reserved()), 0);
}

#[tokio::test]
async fn a_bypass_holds_nothing() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let protected = ask(1, 9).protected(true).scope(Scope::Eval);
    let lease = gate.acquire(protected).await.unwrap();
    assert_eq!(
        (lease.action(), lease.reason()),
        (Action::Bypass, "protected")
    );
    assert!(!lease.is_held() && !lease.decision().local);
    assert!(!lease.renew(None).await);
    lease.release(Usage::default()).await;
    assert!(gate.flush().await);
    assert_eq!(fake.look(|book| book.requests.len()), 1);
    assert_eq!(
        fake.look(|book| book.requests[0].body["scope"].clone()),
        "eval"
    );
}

#[tokio::test]
async fn a_held_lease_is_renewed_at_a_third_of_its_life() {
    let fake = Fake::start();
    let gate = Gate::new(GateConfig {
        ttl: Duration::from_millis(300),
        client: Some("rollout-3".to_owned()),
        ..config(&fake)
    })
    .unwrap();
    let lease = gate.acquire(ask(1, 9)).await.unwrap();
    fake.until("it is renewed", |book| book.count("POST", "/renew") >= 3)
        .await;
    // A gate that is away for a while loses no lease.
    fake.behave(Behaviour::Problem(503, "recovering"));
    let before = fake.look(|book| book.count("POST", "/renew"));
    fake.until("it is tried again", |book| {
        book.count("POST", "/renew") >= before + 2
    })
    .await;
    fake.behave(Behaviour::Normal);
    assert!(lease.is_held());
    assert!(lease.renew(Some(Duration::from_secs(600))).await);
    lease.release(Usage::default()).await;
    let body = fake.look(|book| book.requests[0].body.clone());
    assert_eq!(
        (&body["client"], &body["ttl_s"]),
        (&json!("rollout-3"), &json!(0.3))
    );
}

#[tokio::test]
async fn work_goes_on_when_its_lease_is_lost() {
    let fake = Fake::start();
    let gate = Gate::new(GateConfig {
        ttl: Duration::from_millis(300),
        ..config(&fake)
    })
    .unwrap();
    let lease = gate.acquire(ask(1, 9)).await.unwrap();
    fake.change(|book| book.expire_all());
    let lost = async {
        while lease.is_held() {
            tokio::task::yield_now().await;
        }
    };
    soon(lost).await;
    assert_eq!(lease.action(), Action::Admit);
    assert!(!lease.renew(None).await);
    lease.release(Usage::default()).await;
    assert!(gate.flush().await);
    assert_eq!(fake.look(|book| book.count("POST", "/release")), 0);
}

#[tokio::test]
async fn a_proxy_without_the_gate_says_nothing_of_a_lease() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let lease = gate.acquire(ask(1, 9)).await.unwrap();
    for status in [404, 410] {
        fake.change(|book| book.behaviour = Behaviour::Html(status));
        assert!(!lease.renew(None).await);
        assert!(lease.is_held(), "{status}");
    }
    fake.change(|book| book.behaviour = Behaviour::Normal);
    lease.release(Usage::default()).await;
    assert!(gate.flush().await);
    assert_eq!(fake.look(|book| book.leases.len()), 0);
}

#[tokio::test]
async fn engine_fields_have_a_rid_that_is_no_prefix_of_another() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let mut rids = std::collections::BTreeSet::new();
    for number in 0..50 {
        let lease = gate.acquire(ask(number, 1)).await.unwrap();
        let fields = lease.engine_fields();
        let json = serde_json::to_value(&fields).unwrap();
        assert_eq!(
            json,
            json!({"session_id": format!("s{number}"), "rid": fields.rid})
        );
        assert_eq!(fields.rid.len(), 32);
        rids.insert(fields.rid);
    }
    assert_eq!(rids.len(), 50);
    // The gate knows the same id, so that a close can abort the request.
    let asked = fake.look(|book| book.bodies("/v1/leases"));
    assert!(
        asked
            .iter()
            .all(|body| rids.contains(body["request_id"].as_str().unwrap()))
    );
}

#[tokio::test]
async fn a_ticket_is_used_once() {
    let fake = Fake::start();
    let gate = gate(&fake);
    gate.acquire(ask(1, 9))
        .await
        .unwrap()
        .release(Usage::default())
        .await;
    let cancelled = gate.acquire(ask(1, 9)).await.unwrap_err();
    assert_eq!(
        cancelled.to_string(),
        "ticket \"t1\" of session \"s1\" must not start: ticket_finished"
    );
}

#[tokio::test]
async fn a_future_that_never_ran_asks_nothing() {
    let fake = Fake::start();
    let gate = gate(&fake);
    drop(gate.acquire(ask(1, 9)));
    assert!(gate.flush().await);
    assert_eq!(fake.look(|book| book.requests.len()), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn futures_dropped_at_any_moment_leave_nothing_behind() {
    let fake = Fake::start();
    fake.change(|book| book.capacity = 200);
    let gate = gate(&fake);
    for round in 0..20 {
        let tasks: Vec<_> = (0..100)
            .map(|number| {
                let lease = gate.acquire(ask(round * 100 + number, 10));
                tokio::spawn(async move {
                    let _lease = lease.await.unwrap();
                    std::future::pending::<()>().await;
                })
            })
            .collect();
        // In all moments: before the call, in it, in the wait, in the work.
        for (number, task) in tasks.iter().enumerate() {
            if number % 7 == round % 7 {
                tokio::task::yield_now().await;
            }
            task.abort();
        }
    }
    fake.until("nothing is left", |book| {
        book.leases.is_empty() && book.waiting.is_empty()
    })
    .await;
    assert!(gate.flush().await);
    assert!(fake.look(|book| book.leases.is_empty() && book.waiting.is_empty()));
    // It still works.
    assert_eq!(
        gate.acquire(ask(9_999, 1)).await.unwrap().action(),
        Action::Admit
    );
}

#[tokio::test]
async fn a_blocked_runtime_is_not_held_against_the_gate() {
    let fake = Fake::start();
    // A runtime of its own, so that the gate answers meanwhile.
    let settings = GateConfig {
        call_timeout: Duration::from_millis(300),
        ..config(&fake)
    };
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async move {
            let gate = Gate::new(settings).unwrap();
            drop(gate.acquire(ask(0, 1)).await.unwrap());
            let asking = tokio::spawn(gate.acquire(ask(1, 1)));
            // The call goes out, then the rollout computes for longer than a call may take.
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            let began = std::time::Instant::now();
            while began.elapsed() < Duration::from_millis(700) {
                std::hint::spin_loop();
            }
            asking.await.unwrap().unwrap().action()
        })
    });
    let action = soon(tokio::task::spawn_blocking(|| thread.join().unwrap())).await;
    assert_eq!(action.unwrap(), Action::Admit);
}

#[test]
fn a_gate_without_a_runtime_is_an_error_at_the_start() {
    let outside = Gate::new(GateConfig::at("http://127.0.0.1:1"));
    assert!(matches!(outside, Err(GateError::NoRuntime)));
}

#[tokio::test]
async fn all_of_the_capacity_goes_from_one_to_the_next() {
    let fake = Fake::start();
    let gate = gate(&fake);
    let first = hold_all(&gate).await;
    let second = tokio::spawn(gate.acquire(ask(2, ALL)));
    fake.until("it waits", |book| book.waiting.len() == 1).await;
    drop(first);
    let second = soon(second).await.unwrap().unwrap();
    assert_eq!(second.ticket_id(), "t2");
    assert_eq!(fake.look(|book| book.reserved()), ALL);
}
