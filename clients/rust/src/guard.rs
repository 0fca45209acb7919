//! [`Lease`]: leave to run one request, renewed while it is held and given back when it is dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvgate_api::{BatchOperation, ReleaseOperation};
use serde::Serialize;
use tokio::time::sleep;

use crate::answer::{Action, Decision, time};
use crate::ask::{Asking, Usage};
use crate::client::{Inner, Stopping};
use crate::fail_open::{Pause, lock};
use crate::session::Joined;
use crate::wire::Reply;

/// A lease is renewed at this part of its life, so that two renewals may fail before it ends.
const RENEWALS_A_LIFE: u32 = 3;
/// Shortest time between two renewals, whatever the gate says of the life.
const RENEWAL_MIN: Duration = Duration::from_millis(50);

/// Leave to run one request: with a grant of the gate ([`Action::Admit`]), or without one ([`Action::Bypass`]).
///
/// A grant is renewed in the background at a third of its life. Dropping the lease gives it back in the background,
/// with retries; what cannot be delivered for minutes is left to the TTL.
#[must_use = "a lease that is dropped is given back at once"]
pub struct Lease {
    inner: Arc<Inner>,
    decision: Decision,
    request_id: String,
    usage: Usage,
    held: Arc<AtomicBool>,
    keeper: Mutex<Option<Stopping<()>>>,
    /// Bypassed work that its session joins.
    joined: Option<Joined>,
}

/// What the engine request needs, so that engines tag the session's KV. Serialises to its two fields, to be flattened
/// into the request.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct EngineFields {
    /// The session.
    pub session_id: String,
    /// Id of the engine request, of a fixed length, so that none is a prefix of another: engines abort by prefix.
    pub rid: String,
}

impl Lease {
    pub(crate) fn new(inner: Arc<Inner>, asking: &Asking, mut decision: Decision) -> Self {
        if decision.ttl.is_zero() {
            let asked = asking.request.ttl_s.map(Duration::try_from_secs_f64);
            decision.ttl = asked.and_then(Result::ok).unwrap_or_default();
        }
        let lease = Self {
            held: Arc::new(AtomicBool::new(decision.lease_id.is_some())),
            inner,
            request_id: asking.request_id.clone(),
            usage: Usage::default(),
            keeper: Mutex::default(),
            joined: None,
            decision,
        };
        lease.keep(lease.decision.ttl);
        lease
    }

    /// Whether there is a grant.
    #[must_use]
    pub const fn action(&self) -> Action {
        self.decision.action
    }

    /// Why, in the gate's words; `unreachable`, `refused` or `breaker` when the client decided by itself.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.decision.reason
    }

    /// Time in the gate's queue.
    #[must_use]
    pub const fn waited(&self) -> Duration {
        self.decision.waited
    }

    /// The ticket.
    #[must_use]
    pub fn ticket_id(&self) -> &str {
        &self.decision.ticket_id
    }

    /// Its session.
    #[must_use]
    pub fn session_id(&self) -> &str {
        &self.decision.session_id
    }

    /// The lease of an admit.
    #[must_use]
    pub fn lease_id(&self) -> Option<&str> {
        self.decision.lease_id.as_deref()
    }

    /// All that was answered.
    #[must_use]
    pub const fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Whether the lease is held: granted, not released, and not known to be lost.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    /// What the engine request needs.
    #[must_use]
    pub fn engine_fields(&self) -> EngineFields {
        EngineFields {
            session_id: self.decision.session_id.clone(),
            rid: self.request_id.clone(),
        }
    }

    /// Says what the request really used. It goes to the gate with the release, also with that of a drop.
    pub fn report_usage(&mut self, usage: Usage) {
        self.usage = usage;
    }

    /// Begins the lease's life anew, with another length when one is given. A held lease is renewed by itself; this is
    /// for those who know that a long pause comes. False when there is no lease, or the gate did not take it.
    pub async fn renew(&self, ttl: Option<Duration>) -> bool {
        let Some(lease_id) = self.decision.lease_id.clone().filter(|_| self.is_held()) else {
            return false;
        };
        let ttl_s = ttl.unwrap_or(self.decision.ttl).as_secs_f64();
        let inner = Arc::clone(&self.inner);
        let renewing = async move { inner.renew(&lease_id, Some(ttl_s)).await };
        let Some(reply) = self.inner.run(renewing).await else {
            return false;
        };
        self.watch().note(&reply);
        let renewed = reply.good().is_some() && self.is_held();
        if renewed {
            self.keep(life(&reply).unwrap_or(self.decision.ttl));
        }
        renewed
    }

    /// Gives the lease back, with what the request really used. Waits for the first attempt, no longer than a call may
    /// take; the release is on its way when this returns, also when the future is dropped.
    pub async fn release(mut self, usage: Usage) {
        if usage != Usage::default() {
            self.usage = usage;
        }
        if let Some(release) = self.end() {
            let delivery = self.inner.courier.deliver(release);
            drop(self);
            // What came of it is the courier's matter.
            let _ = delivery.await;
        }
    }

    pub(crate) fn join(mut self, joined: Joined) -> Self {
        self.joined = Some(joined);
        self
    }

    /// Ends the renewals; the release when there is something to give back.
    fn end(&mut self) -> Option<BatchOperation> {
        drop(lock(&self.keeper).take());
        if !self.held.swap(false, Ordering::AcqRel) {
            return None;
        }
        let usage = std::mem::take(&mut self.usage).into_request();
        Some(BatchOperation::Release(ReleaseOperation {
            lease_id: self.decision.lease_id.clone()?,
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.cached_tokens,
            engine: usage.engine,
        }))
    }

    /// Renews from now on, instead of what did so before.
    fn keep(&self, ttl: Duration) {
        if !self.is_held() {
            return;
        }
        let Some(lease_id) = self.decision.lease_id.clone() else {
            return;
        };
        let keeping = self.watch().keep(lease_id, ttl);
        let keeper = Stopping(self.inner.shared.handle.spawn(keeping));
        *lock(&self.keeper) = Some(keeper);
    }

    fn watch(&self) -> Watch {
        Watch {
            inner: Arc::clone(&self.inner),
            held: Arc::clone(&self.held),
            ticket_id: self.decision.ticket_id.clone(),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(release) = self.end() {
            drop(self.inner.courier.send(release));
        }
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("decision", &self.decision)
            .field("is_held", &self.is_held())
            .finish_non_exhaustive()
    }
}

/// What looks after a lease beside its holder.
struct Watch {
    inner: Arc<Inner>,
    held: Arc<AtomicBool>,
    ticket_id: String,
}

impl Watch {
    /// Renews at a third of the life. What fails is tried again, for as long as the lease is not known to be lost: a
    /// gate that was away has moved its end.
    async fn keep(self, lease_id: String, mut ttl: Duration) {
        while self.held.load(Ordering::Acquire) {
            sleep((ttl / RENEWALS_A_LIFE).max(RENEWAL_MIN)).await;
            let mut pause = Pause::new(
                Duration::from_millis(250).min(ttl / 20).max(RENEWAL_MIN),
                Duration::from_secs(5),
            );
            loop {
                let reply = self.inner.renew(&lease_id, Some(ttl.as_secs_f64())).await;
                self.note(&reply);
                if !reply.fails_over() {
                    ttl = life(&reply).unwrap_or(ttl);
                    break;
                }
                sleep(pause.next(&self.inner.shared.dice)).await;
            }
        }
    }

    /// The work goes on without its lease: a lease is a budget, and running work is never interrupted. Only the gate's
    /// own word counts; what a proxy answers in its place says nothing of the lease.
    fn note(&self, reply: &Reply) {
        let is_gone = reply.is_final() && matches!(reply.status(), Some(404 | 410));
        if is_gone && self.held.swap(false, Ordering::AcqRel) {
            let ticket_id = &self.ticket_id;
            self.inner.shared.warnings.warn(
                "lost",
                format_args!("the lease of ticket {ticket_id} ended before its work: {reply}"),
            );
        }
    }
}

/// The life of a lease as a renewal's answer says.
fn life(reply: &Reply) -> Option<Duration> {
    time(reply.good()?, "ttl_s").filter(|ttl| !ttl.is_zero())
}
