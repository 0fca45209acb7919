//! Callers that go away in the very turn in which they are decided (TIC3, TIC4).
//!
//! The store stops the writer inside a commit, so that what is sent meanwhile is one turn, in an
//! order that the test chooses.
#![cfg(test)]

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex};

use futures_util::FutureExt;
use kvgate_core::capacity::FleetConfig;
use kvgate_core::command::Acquire;
use kvgate_core::decision::Scope;
use kvgate_core::ids::{EngineId, LeaseId, SessionId};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::Policy;
use kvgate_core::reading::Reading;
use kvgate_core::store::{Commit, Image, Opened, Store, StoreControl};
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Ppm, Tokens};

use super::*;

const SOON: Duration = Duration::from_secs(30);
const ENGINE: &str = "http://engine:1";

/// Holds commits back while it is closed.
#[derive(Clone, Debug, Default)]
struct Barrier {
    state: Arc<(Mutex<BarrierState>, Condvar)>,
}

#[derive(Debug, Default)]
struct BarrierState {
    closed: bool,
    waits: bool,
}

impl Barrier {
    fn close(&self) {
        self.state.0.lock().unwrap().closed = true;
    }

    fn open(&self) {
        self.state.0.lock().unwrap().closed = false;
        self.state.1.notify_all();
    }

    /// Returns when the writer stands in front of it.
    fn wait_for_the_writer(&self) {
        let state = self.state.0.lock().unwrap();
        let (_state, late) = self
            .state
            .1
            .wait_timeout_while(state, SOON, |state| !state.waits)
            .unwrap();
        assert!(!late.timed_out(), "the writer did not commit");
    }

    fn pass(&self) {
        let mut state = self.state.0.lock().unwrap();
        state.waits = state.closed;
        self.state.1.notify_all();
        let mut state = self
            .state
            .1
            .wait_while(state, |state| state.closed)
            .unwrap();
        state.waits = false;
    }
}

#[derive(Debug)]
struct HeldStore {
    inner: MemoryStore,
    barrier: Barrier,
}

impl Store for HeldStore {
    type Error = Infallible;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), Infallible> {
        self.barrier.pass();
        self.inner.commit(commit)
    }
}

impl StoreControl for HeldStore {
    type OpenError = Infallible;

    fn bytes(&self) -> u64 {
        0
    }

    fn close(self) -> Result<(), Infallible> {
        Ok(())
    }
}

/// A gate with one engine of 1,000 tokens, a grace of a second, and a lease on all of it.
struct Held {
    gate: Gate,
    barrier: Barrier,
    lease: LeaseId,
}

type Call<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

impl Held {
    async fn start() -> Self {
        let barrier = Barrier::default();
        let config = WriterConfig {
            policy: Policy {
                program_admission: true,
                headroom: Ppm::ONE,
                max_wait: Span::from_secs(600),
                claim_grace: Span::from_secs(1),
                stale_after: Span::from_secs(3_600),
                ..Policy::default()
            },
            reset_settings: false,
            fleet: FleetConfig {
                has_router: false,
                static_engines: BTreeSet::from([EngineId::new(ENGINE)]),
            },
            salts: || 7,
            recorder: None,
        };
        let stored = barrier.clone();
        let open = move || {
            Ok(Opened {
                store: HeldStore {
                    inner: MemoryStore::default(),
                    barrier: stored.clone(),
                },
                image: Image::default(),
            })
        };
        let (gate, opened) = spawn::<HeldStore, _>(config, Clock::start(), open).unwrap();
        opened.await.unwrap().unwrap();
        let round = Round {
            began_at: gate.line().unwrap().now(),
            router: None,
            readings: vec![(EngineId::new(ENGINE), Ok(reading()))],
            start_marks: Vec::new(),
        };
        gate.round(round).await.unwrap();
        let taken = gate.acquire(acquire("holder", 1_000), Duration::ZERO).await;
        let decision = taken.unwrap().value.unwrap();
        let Outcome::Admit { lease, .. } = decision.answer.outcome else {
            panic!("{decision:?}");
        };
        decision.receipt.unwrap().written();
        Self {
            gate,
            barrier,
            lease,
        }
    }

    /// A call that is dropped before its answer is looked at.
    fn acquires(&self, ticket: &str) -> Call<'_> {
        let acquire = acquire(ticket, 1_000);
        Box::pin(async move {
            let answered = self.gate.acquire(acquire, SOON).await;
            panic!("{answered:?} was read");
        })
    }

    fn watches(&self, ticket: &str) -> Call<'_> {
        let tickets = vec![TicketId::new(ticket).unwrap()];
        Box::pin(async move {
            let watched = self.gate.watch(tickets, SOON).await;
            panic!("{watched:?} was read");
        })
    }

    fn releases(&self) -> Call<'_> {
        Box::pin(async {
            self.gate.release(self.lease).await.unwrap().value.unwrap();
        })
    }

    async fn until(&self, so: impl Fn(&View) -> bool) {
        let mut views = self.gate.views();
        let seen = views.wait_for(|view| so(view));
        tokio::time::timeout(SOON, seen).await.unwrap().unwrap();
    }

    /// Runs `sends` while the writer stands in a commit: what they send is the next turn.
    async fn in_one_turn(&self, sends: impl AsyncFnOnce()) {
        self.barrier.close();
        let mut marker = Box::pin(self.gate.cancel(TicketId::new("marker").unwrap()));
        assert!((&mut marker).now_or_never().is_none());
        self.barrier.wait_for_the_writer();
        sends().await;
        self.barrier.open();
        marker.await.unwrap();
    }

    /// Nobody holds anything any more: no grant is left without a caller.
    async fn ends_empty(&self) {
        self.until(|view| view.leases == 0 && view.waiting == 0)
            .await;
    }
}

fn send(call: &mut Call<'_>) {
    assert!(call.now_or_never().is_none());
}

fn acquire(ticket: &str, tokens: u64) -> Acquire {
    Acquire {
        ticket: TicketId::new(ticket).unwrap(),
        session: SessionId::new("s").unwrap(),
        sent: Sent::Sum(Tokens::new(tokens).unwrap()),
        scope: Scope::Train,
        protected: false,
        ttl: Span::from_secs(600),
        client: None,
        request_id: None,
        stays: true,
    }
}

fn reading() -> Reading {
    let capacity = Tokens::new(1_000).unwrap();
    Reading::idle(capacity)
}

/// Who is granted by a release hears of it first: it has waited in the queue, and whoever releases waits for nothing.
#[tokio::test]
async fn a_grant_is_told_before_its_release() {
    let held = Held::start().await;
    let told = Arc::new(Mutex::new(Vec::new()));
    let (gate, tells) = (held.gate.clone(), Arc::clone(&told));
    let waiter = tokio::spawn(async move {
        gate.acquire(acquire("w", 1_000), SOON).await.unwrap();
        tells.lock().unwrap().push("waiter");
    });
    held.until(|view| view.waiting == 1).await;
    let (gate, lease, tells) = (held.gate.clone(), held.lease, Arc::clone(&told));
    let holder = tokio::spawn(async move {
        gate.release(lease).await.unwrap().value.unwrap();
        tells.lock().unwrap().push("holder");
    });
    // It has sent its release after the rest, and waits for the answer.
    held.in_one_turn(tokio::task::yield_now).await;
    holder.await.unwrap();
    waiter.await.unwrap();
    assert_eq!(*told.lock().unwrap(), ["waiter", "holder"]);
}

/// TIC4: the caller goes before or after the release that grants it, in the same turn.
#[tokio::test]
async fn tic4_a_caller_that_goes_in_the_turn_of_its_grant_keeps_nothing() {
    for gone_first in [true, false] {
        let held = Held::start().await;
        let mut waits = held.acquires("w");
        send(&mut waits);
        held.until(|view| view.waiting == 1).await;
        let mut releases = held.releases();
        held.in_one_turn(async || {
            if gone_first {
                drop(waits);
                send(&mut releases);
            } else {
                send(&mut releases);
                drop(waits);
            }
        })
        .await;
        releases.await;
        held.ends_empty().await;
    }
}

/// TIC3, TIC4: the whole life of a call lies in one turn: it is decided, or parked, with nobody there.
#[tokio::test]
async fn tic3_a_caller_that_comes_and_goes_in_one_turn_is_away() {
    for released in [true, false] {
        let held = Held::start().await;
        let mut releases = held.releases();
        held.in_one_turn(async || {
            let mut waits = held.acquires("w");
            send(&mut waits);
            drop(waits);
            if released {
                send(&mut releases);
            }
        })
        .await;
        if !released {
            held.until(|view| view.waiting == 1).await;
            held.until(|view| view.waiting == 0).await;
        }
        releases.await;
        held.ends_empty().await;
    }
}

/// TIC4: an answer that was sent but never read did not arrive; a batch and a watch are no different.
#[tokio::test]
async fn tic4_an_answer_that_nobody_read_is_undelivered() {
    let held = Held::start().await;
    let mut waits = held.acquires("w");
    send(&mut waits);
    held.until(|view| view.waiting == 1).await;
    held.releases().await;
    // A second answer of the writer: the first was sent before it.
    held.gate
        .read_lease(held.lease)
        .await
        .unwrap()
        .value
        .unwrap_err();
    drop(waits);
    held.ends_empty().await;

    let batch = vec![Command::Acquire(Acquire {
        stays: false,
        ..acquire("b", 1_000)
    })];
    let mut batch: Call<'_> = Box::pin(async {
        let replies = held.gate.batch(batch).await;
        panic!("{replies:?} was read");
    });
    held.in_one_turn(async || send(&mut batch)).await;
    held.until(|view| view.leases == 1).await;
    held.gate
        .read_lease(held.lease)
        .await
        .unwrap()
        .value
        .unwrap_err();
    drop(batch);
    held.ends_empty().await;
}

/// TIC3, TIC4: a watch that goes in the turn in which its ticket is granted, or that comes and goes in one turn.
#[tokio::test]
async fn tic4_a_watch_that_goes_keeps_nothing() {
    for parked in [true, false] {
        let held = Held::start().await;
        let waiting = Acquire {
            stays: false,
            ..acquire("w", 1_000)
        };
        held.gate
            .acquire(waiting, Duration::ZERO)
            .await
            .unwrap()
            .value
            .unwrap();
        let mut watch = Some(held.watches("w"));
        if parked {
            send(watch.as_mut().unwrap());
            held.gate
                .read_lease(held.lease)
                .await
                .unwrap()
                .value
                .unwrap();
        }
        let mut releases = held.releases();
        held.in_one_turn(async || {
            let mut watch = watch.take().unwrap();
            if !parked {
                send(&mut watch);
            }
            send(&mut releases);
            drop(watch);
        })
        .await;
        releases.await;
        held.ends_empty().await;
    }
}

/// TIC2: a call whose own time is over before the writer has seen it is answered all the same.
#[tokio::test]
async fn tic2_a_call_whose_time_is_over_at_once_is_answered() {
    let held = Held::start().await;
    let instant = Duration::from_millis(1);
    let mut waits = Box::pin(held.gate.acquire(acquire("w", 1), instant));
    let tickets = vec![TicketId::new("w").unwrap()];
    let mut watches = Box::pin(held.gate.watch(tickets, Duration::ZERO));
    held.barrier.close();
    let mut marker = Box::pin(held.gate.cancel(TicketId::new("marker").unwrap()));
    assert!((&mut marker).now_or_never().is_none());
    held.barrier.wait_for_the_writer();
    assert!((&mut waits).now_or_never().is_none());
    assert!((&mut watches).now_or_never().is_none());
    // The same turn sees both calls and the ends of their times.
    let answered = async {
        tokio::select! {
            _ = &mut waits => {}
            _ = &mut watches => {}
        }
    };
    let over = tokio::time::timeout(instant * 50, answered).await;
    assert!(over.is_err(), "answered before the commit");
    held.barrier.open();
    marker.await.unwrap();
    let answered = tokio::time::timeout(SOON, waits).await.unwrap().unwrap();
    let decision = answered.value.unwrap();
    assert!(
        matches!(decision.answer.outcome, Outcome::Wait(_)),
        "{decision:?}"
    );
    let watched = tokio::time::timeout(SOON, watches).await.unwrap().unwrap();
    assert!(watched.is_empty(), "{watched:?}");
}

/// A call that comes in with the drain, or after it, is refused and not parked.
#[tokio::test]
async fn a_call_beside_a_drain_is_refused() {
    let held = Held::start().await;
    let calls: Vec<_> = (0..2)
        .map(|number| {
            let acquire = acquire(&format!("w-{number}"), 1);
            Box::pin(held.gate.acquire(acquire, SOON))
        })
        .collect();
    let mut calls = calls.into_iter();
    let (mut before, mut after) = (calls.next().unwrap(), calls.next().unwrap());
    held.in_one_turn(async || {
        assert!((&mut before).now_or_never().is_none());
        held.gate.begin_drain();
        assert!((&mut after).now_or_never().is_none());
    })
    .await;
    for call in [before, after] {
        assert_eq!(call.await.unwrap_err(), GateError::Draining);
    }
}
