//! The fail-open promise: killed, hung, and callers that leave at any moment.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvgate_client::{Action, Ask, CloseMode, CloseStatus, Gate, Usage};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::{SLACK, SOON, Service, work};
use crate::process::Draw;

const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// What a rollout has cost so far.
#[derive(Clone, Default, Debug)]
struct Costs {
    /// Turns by action and reason.
    turns: BTreeMap<String, u64>,
    /// The most that one request was held up.
    added_most: Duration,
}

impl Costs {
    fn count(&self, name: &str) -> u64 {
        self.turns.get(name).copied().unwrap_or_default()
    }
}

/// 50 sessions with room for all of them, so that every held up request is the gate's doing. They run until they are
/// stopped.
struct Rollout {
    sessions: JoinSet<()>,
    costs: watch::Receiver<Costs>,
    stop: watch::Sender<bool>,
}

impl Rollout {
    fn start(gate: &Gate) -> Self {
        let (costs, seen) = watch::channel(Costs::default());
        let costs = Arc::new(costs);
        let (stop, stopped) = watch::channel(false);
        let mut sessions = JoinSet::new();
        for number in 0..50 {
            let (gate, costs, stopped) = (gate.clone(), Arc::clone(&costs), stopped.clone());
            sessions.spawn(async move {
                while !*stopped.borrow() {
                    let asked_at = Instant::now();
                    let ask = Ask::new(format!("s{number}"), 90, 10);
                    let lease = gate.acquire(ask).await.unwrap();
                    let added = asked_at.elapsed().saturating_sub(lease.waited());
                    work().await;
                    costs.send_modify(|costs| {
                        let name = format!("{} {}", lease.action(), lease.reason());
                        *costs.turns.entry(name).or_default() += 1;
                        costs.added_most = costs.added_most.max(added);
                    });
                }
            });
        }
        Self {
            sessions,
            costs: seen,
            stop,
        }
    }

    /// Waits until the rollout has come so far.
    async fn until(&mut self, what: &str, reached: impl FnMut(&Costs) -> bool) -> Costs {
        let reached = self.costs.wait_for(reached);
        let seen = timeout(SOON, reached).await.expect(what);
        seen.unwrap().clone()
    }

    /// Ends it; no session may have failed.
    async fn end(mut self) -> Costs {
        self.stop.send_replace(true);
        while let Some(session) = self.sessions.join_next().await {
            session.unwrap();
        }
        self.costs.borrow().clone()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_gate_costs_next_to_nothing() {
    let mut service = Service::start(1_000_000).await;
    let client = service.client();
    let mut rollout = Rollout::start(&client);
    let admits = |costs: &Costs| costs.count("admit capacity_available");
    rollout
        .until("it is under way", |costs| admits(costs) > 200)
        .await;
    service.kill();
    let costs = rollout
        .until("it goes on", |costs| costs.count("bypass breaker") > 200)
        .await;
    let before = admits(&costs);
    service.begin().await;
    rollout
        .until("the gate is used again", |costs| {
            admits(costs) > before + 200
        })
        .await;
    let costs = rollout.end().await;
    // A refused connection costs no time at all.
    assert!(costs.added_most < CALL_TIMEOUT + SLACK, "{costs:?}");
    assert_eq!(client.local_bypasses(), BTreeMap::new(), "all were told");
    assert!(client.flush().await);
    service.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_gate_costs_one_time_out_in_a_breaker_period() {
    let service = Service::start(1_000_000).await;
    let client = service.client();
    let mut rollout = Rollout::start(&client);
    let admits = |costs: &Costs| costs.count("admit capacity_available");
    rollout
        .until("it is under way", |costs| admits(costs) > 200)
        .await;
    service.gate().stand_still();
    let costs = rollout
        .until("it goes on", |costs| costs.count("bypass breaker") > 1_000)
        .await;
    // Each session pays at most once when it begins; afterwards one call is tried in each period of the breaker.
    assert!(costs.count("bypass unreachable") <= 50 + 5, "{costs:?}");
    let before = admits(&costs);
    service.gate().signal("CONT");
    rollout
        .until("the gate is used again", |costs| {
            admits(costs) > before + 200
        })
        .await;
    let costs = rollout.end().await;
    assert!(costs.added_most < CALL_TIMEOUT + SLACK, "{costs:?}");
    service.nothing_is_left().await;
}

/// 2,000 callers that leave before their call, in it, in the wait, in the work, or in the release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_leave_at_any_moment_leave_nothing_behind() {
    let service = Service::start(10_000).await;
    let client = service.client();
    let mut draw = Draw(11);
    let mut tasks: Vec<_> = (0..2_000)
        .map(|number| {
            let ask = Ask::reservation(format!("s{number}"), 100);
            let lease = client.acquire(ask);
            tokio::spawn(async move {
                let lease = lease.await.unwrap();
                if number % 2 == 0 {
                    work().await;
                    lease.release(Usage::default()).await;
                } else {
                    std::future::pending::<()>().await;
                }
            })
        })
        .collect();
    while !tasks.is_empty() {
        for _ in 0..100.min(tasks.len()) {
            let place = usize::try_from(draw.below(tasks.len() as u64)).unwrap();
            tasks.swap_remove(place).abort();
        }
        // The gate makes progress between two waves.
        service.get("/v1/state").await.unwrap();
    }
    service.nothing_is_left().await;
    assert!(client.flush().await);
    // What was still under way then came too late to be granted.
    service.nothing_is_left().await;
    let ask = Ask::reservation("last", 10_000);
    let last = client.acquire(ask).await.unwrap();
    assert_eq!(last.action(), Action::Admit);
    assert!(last.renew(Some(Duration::from_secs(60))).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_understood_by_the_real_gate() {
    let service = Service::start(1_000).await;
    let client = service.client();
    let mut lease = client
        .acquire(Ask::new("s/7 %é", 400, 100).ticket_id("t/1?"))
        .await
        .unwrap();
    assert_eq!(
        (lease.action(), lease.reason()),
        (Action::Admit, "capacity_available")
    );
    assert_eq!(lease.decision().reservation_tokens, 500);
    assert_eq!(lease.decision().ttl, Duration::from_secs(600));
    let rows = service.get("/v1/leases").await.unwrap();
    let row = &rows["items"][0];
    assert_eq!(
        (row["ticket_id"].as_str(), row["session_id"].as_str()),
        (Some("t/1?"), Some("s/7 %é"))
    );
    assert_eq!(row["request_id"], lease.engine_fields().rid);
    assert!(lease.renew(None).await);
    let state = client.state().await.unwrap();
    assert_eq!(state.budget.reserved, 500);
    lease.report_usage(Usage {
        prompt_tokens: Some(400),
        completion_tokens: Some(7),
        cached_tokens: Some(0),
        engine: Some(service.fleet.engine_url(0)),
    });
    drop(lease);
    assert!(client.flush().await);
    service.nothing_is_left().await;

    // A session whose waiter is withdrawn by a cancel of somebody else.
    let held = client
        .acquire(Ask::reservation("holder", 1_000))
        .await
        .unwrap();
    let waiting = tokio::spawn(client.acquire(Ask::reservation("s", 1).ticket_id("w")));
    service
        .until(SOON, "it waits", |state| state["queue"]["waiting"] == 1)
        .await;
    service.gate().delete("/v1/tickets/w").await;
    assert_eq!(waiting.await.unwrap().unwrap_err().ticket_id, "w");
    held.release(Usage::default()).await;
    // The lifecycle feature is off.
    let close = client.close_session("s", CloseMode::Join).await;
    assert_eq!(close.status, CloseStatus::Disabled);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_closed_at_the_engines_and_a_step_is_reported() {
    let service = Service::start_with(1_000, &["--session-lifecycle"]).await;
    let client = service.client();
    assert!(client.report(Some("exp-7"), 0).await.is_some());
    let session = client.session("s/7 %");
    for _ in 0..3 {
        let lease = session.acquire(session.ask(40, 10)).await.unwrap();
        assert_eq!(lease.action(), Action::Admit);
    }
    assert!(client.flush().await);
    // It is on its way, then its end is waited for.
    session.close(CloseMode::Join).await;
    let waiting = client.close_session_within("s/7 %", CloseMode::Join, SOON);
    let close = waiting.await;
    assert_eq!(close.status, CloseStatus::Done, "{close:?}");

    let peek = client.peek(Some("exp-7")).await.unwrap();
    let report = client.report(Some("exp-7"), 1).await.unwrap();
    assert_eq!((peek.step, report.step), (None, Some(1)));
    assert_eq!(report.run, "exp-7");
    assert!(
        report
            .metrics
            .keys()
            .all(|key| key.starts_with("agentic_kv/"))
    );
    assert!(!report.metrics.is_empty());
    let again = client.report(Some("exp-7"), 1).await;
    assert_eq!(again, Some(report), "the same step, the same report");
}

/// Many waiters of one process share their calls, and each is granted in its turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_waiters_are_granted_in_their_order() {
    let service = Service::start(1_000).await;
    let client = service.client();
    let held = client
        .acquire(Ask::reservation("holder", 1_000))
        .await
        .unwrap();
    let grants = Arc::new(Mutex::new(BTreeMap::new()));
    let mut tasks = JoinSet::new();
    for number in 0..1_000 {
        let ask = Ask::reservation(format!("s{number}"), 100).ticket_id(format!("t{number}"));
        let (lease, grants) = (client.acquire(ask), Arc::clone(&grants));
        tasks.spawn(async move {
            let lease = lease.await.unwrap();
            let (issue, _) = lease.lease_id().unwrap().split_once('-').unwrap();
            let issue: u64 = issue.parse().unwrap();
            grants
                .lock()
                .unwrap()
                .insert(issue, lease.ticket_id().to_owned());
        });
    }
    service
        .until(SOON, "all wait", |state| state["queue"]["waiting"] == 1_000)
        .await;
    let queue = service.gate().list("/v1/queue").await;
    let queue: Vec<&str> = queue
        .iter()
        .map(|row| row["ticket_id"].as_str().unwrap())
        .collect();
    drop(held);
    while let Some(task) = timeout(SOON, tasks.join_next()).await.unwrap() {
        task.unwrap();
    }
    let granted: Vec<String> = grants.lock().unwrap().values().cloned().collect();
    assert_eq!(granted, queue);
    service.nothing_is_left().await;
}
