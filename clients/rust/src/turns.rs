//! Calls that are answered at once, gathered under load.
//!
//! A few calls are under way at a time. What is asked for while all of them are busy gathers, and the next free one
//! takes all of it in one `/v1/batch`. So a quiet client sends each call by itself and at once, while thousands of
//! callers share a handful of connections, and no timer decides which it is.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvgate_api::{
    BatchOperation, BatchRequest, CloseRequest, ReleaseOperation, ReleaseRequest, RenewRequest,
};
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::client::Shared;
use crate::fail_open::lock;
use crate::wire::{Call, LATE, Reply, Trouble, segment, within};

/// Calls under way at a time. More would only make smaller batches.
pub const LANES: usize = 8;
/// The same for what nobody waits long for. It has lanes of its own, so that its patience keeps none from others.
pub const BACKGROUND_LANES: usize = 4;
/// Operations of one batch: a quarter of the gate's bound, which keeps the longest ids below its 4 MiB.
const BATCH_MAX: usize = 256;

const QUEUED: u8 = 0;
const SENT: u8 = 1;
const WITHDRAWN: u8 = 2;

/// Calls that have the same patience.
#[derive(Debug)]
pub struct Turns {
    shared: Arc<Shared>,
    lanes_max: usize,
    queue: Mutex<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    items: VecDeque<Arc<Item>>,
    lanes: usize,
}

/// An operation on its way.
#[derive(Debug)]
struct Item {
    operation: BatchOperation,
    ends_at: Instant,
    state: AtomicU8,
    /// Whether it goes by itself, since a batch with it was refused as a whole.
    alone: AtomicBool,
    reply: Mutex<Option<oneshot::Sender<Reply>>>,
}

impl Item {
    fn settle(&self, reply: Reply) {
        if let Some(sender) = lock(&self.reply).take() {
            // Nobody may be left to hear it.
            let _ = sender.send(reply);
        }
    }

    /// Whether nobody waits for it any more.
    fn is_left(&self) -> bool {
        lock(&self.reply)
            .as_ref()
            .is_none_or(oneshot::Sender::is_closed)
    }

    /// Takes it out of the queue for good; false when its caller took it back before.
    fn take(&self) -> bool {
        let taken = self
            .state
            .compare_exchange(QUEUED, SENT, Ordering::AcqRel, Ordering::Acquire);
        taken.map_or_else(|state| state == SENT, |_| true)
    }
}

/// The caller's end of an operation on its way.
#[derive(Debug)]
pub struct Awaited {
    item: Arc<Item>,
    reply: oneshot::Receiver<Reply>,
}

/// Says later whether an operation went out.
#[derive(Debug)]
pub struct Tracked(Arc<Item>);

impl Tracked {
    /// Takes back what nobody waits for any more; true when the gate cannot have seen it.
    pub fn withdraw(&self) -> bool {
        let taken =
            self.0
                .state
                .compare_exchange(QUEUED, WITHDRAWN, Ordering::AcqRel, Ordering::Acquire);
        taken.map_or_else(|state| state == WITHDRAWN, |_| true)
    }
}

impl Awaited {
    pub fn tracked(&self) -> Tracked {
        Tracked(Arc::clone(&self.item))
    }

    /// What comes of it, soon after its time at the latest: the call itself knows better what became of it.
    pub async fn outcome(self) -> Reply {
        match within(self.item.ends_at + LATE, self.reply).await {
            Some(Ok(reply)) => reply,
            Some(Err(_)) => Reply::Silent(Trouble::Cut),
            None => Reply::Silent(Trouble::Timeout),
        }
    }
}

impl Turns {
    pub fn new(shared: Arc<Shared>, lanes_max: usize) -> Arc<Self> {
        Arc::new(Self {
            shared,
            lanes_max,
            queue: Mutex::default(),
        })
    }

    /// Puts an operation on its way. Its reply comes within this time, the time in the queue included.
    pub fn put(self: &Arc<Self>, operation: BatchOperation, patience: Duration) -> Awaited {
        let (sender, reply) = oneshot::channel();
        let item = Arc::new(Item {
            operation,
            ends_at: Instant::now() + patience,
            state: AtomicU8::new(QUEUED),
            alone: AtomicBool::new(false),
            reply: Mutex::new(Some(sender)),
        });
        let mut queue = lock(&self.queue);
        queue.items.push_back(Arc::clone(&item));
        if queue.lanes < self.lanes_max {
            queue.lanes += 1;
            drop(queue);
            let lane = Lane {
                turns: Arc::clone(self),
                is_counted: true,
            };
            self.shared.handle.spawn(lane.run());
        }
        Awaited { item, reply }
    }

    /// Puts an operation on its way and waits for what comes of it.
    pub async fn ask(self: &Arc<Self>, operation: BatchOperation, patience: Duration) -> Reply {
        self.put(operation, patience).outcome().await
    }

    async fn send(&self, bunch: Vec<Arc<Item>>) {
        let ends_at = bunch.iter().map(|item| item.ends_at).max();
        let ends_at = ends_at.unwrap_or_else(Instant::now);
        let mut operations: Vec<BatchOperation> =
            bunch.iter().map(|item| item.operation.clone()).collect();
        let mut told = Told::none(&self.shared);
        for (place, operation) in operations.iter_mut().enumerate() {
            if let BatchOperation::Acquire(request) = operation {
                told = Told::take(&self.shared, place);
                request.local_bypasses = told.counts().cloned();
                break;
            }
        }
        let replies = match operations.as_slice() {
            [operation] => Some(vec![self.single(operation, ends_at).await]),
            _ => self.batch(operations, ends_at).await,
        };
        let Some(replies) = replies else {
            drop(told);
            self.send_each_alone(bunch);
            return;
        };
        told.arrived(&replies);
        for (item, reply) in bunch.iter().zip(replies) {
            item.settle(reply);
        }
    }

    /// One of a batch spoiled the whole, and each has to go by itself.
    fn send_each_alone(&self, bunch: Vec<Arc<Item>>) {
        let mut queue = lock(&self.queue);
        for item in bunch.into_iter().rev() {
            item.alone.store(true, Ordering::Release);
            queue.items.push_front(item);
        }
    }

    async fn single(&self, operation: &BatchOperation, ends_at: Instant) -> Reply {
        let reply = self.shared.wire.call(&call_of(operation), ends_at).await;
        self.shared.note(&reply, 1);
        reply
    }

    /// The replies in order; none when the batch is refused as a whole.
    async fn batch(&self, operations: Vec<BatchOperation>, ends_at: Instant) -> Option<Vec<Reply>> {
        let count = operations.len();
        let body = BatchRequest { operations };
        let call = Call::post("/v1/batch".to_owned(), &body);
        let mut reply = self.shared.wire.call(&call, ends_at).await;
        if matches!(reply.status(), Some(400 | 413 | 422)) {
            return None;
        }
        if let Some(body) = reply.good() {
            if let Some(replies) = results(body, count) {
                self.shared.breaker.succeeded();
                return Some(replies);
            }
            reply = Reply::Silent(Trouble::Garbage);
        }
        self.shared
            .note(&reply, u32::try_from(count).unwrap_or(u32::MAX));
        Some(vec![reply; count])
    }
}

/// One call under way after another, while there is something to send.
struct Lane {
    turns: Arc<Turns>,
    is_counted: bool,
}

impl Lane {
    async fn run(mut self) {
        while let Some(bunch) = self.next_bunch() {
            self.turns.send(bunch).await;
        }
    }

    fn next_bunch(&mut self) -> Option<Vec<Arc<Item>>> {
        let now = Instant::now();
        let mut queue = lock(&self.turns.queue);
        let mut bunch: Vec<Arc<Item>> = Vec::new();
        while bunch.len() < BATCH_MAX {
            let Some(item) = queue.items.pop_front() else {
                break;
            };
            let alone = item.alone.load(Ordering::Acquire);
            if alone && !bunch.is_empty() {
                queue.items.push_front(item);
                break;
            }
            if item.is_left() || !item.take() {
                continue;
            }
            if item.ends_at <= now {
                item.settle(Reply::Silent(Trouble::Timeout));
                continue;
            }
            bunch.push(item);
            if alone {
                break;
            }
        }
        if bunch.is_empty() {
            // Under the lock: whoever puts something in from now on begins a lane.
            queue.lanes = queue.lanes.saturating_sub(1);
            self.is_counted = false;
            return None;
        }
        Some(bunch)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if self.is_counted {
            let mut queue = lock(&self.turns.queue);
            queue.lanes = queue.lanes.saturating_sub(1);
        }
    }
}

/// Local bypasses on their way to the gate. What does not get through is kept for the next call.
struct Told<'a> {
    shared: &'a Shared,
    place: usize,
    counts: Option<BTreeMap<String, u64>>,
}

impl<'a> Told<'a> {
    const fn none(shared: &'a Shared) -> Self {
        Self {
            shared,
            place: 0,
            counts: None,
        }
    }

    /// All counts, with the operation at this place.
    fn take(shared: &'a Shared, place: usize) -> Self {
        Self {
            shared,
            place,
            counts: Some(shared.bypasses.take()).filter(|counts| !counts.is_empty()),
        }
    }

    const fn counts(&self) -> Option<&BTreeMap<String, u64>> {
        self.counts.as_ref()
    }

    fn arrived(mut self, replies: &[Reply]) {
        if replies
            .get(self.place)
            .is_some_and(|reply| reply.good().is_some())
        {
            self.counts = None;
        }
    }
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        if let Some(counts) = self.counts.take() {
            self.shared.bypasses.put_back(counts);
        }
    }
}

/// An operation as a call of its own.
fn call_of(operation: &BatchOperation) -> Call {
    match operation {
        BatchOperation::Acquire(request) => Call::post("/v1/leases".to_owned(), request),
        BatchOperation::Release(release) => {
            let path = format!("/v1/leases/{}/release", segment(&release.lease_id));
            Call::post(path, &usage_of(release))
        }
        BatchOperation::Renew(renew) => {
            let path = format!("/v1/leases/{}/renew", segment(&renew.lease_id));
            Call::post(path, &RenewRequest { ttl_s: renew.ttl_s })
        }
        BatchOperation::Cancel(cancel) => {
            Call::delete(format!("/v1/tickets/{}", segment(&cancel.ticket_id)))
        }
        BatchOperation::Close(close) => {
            let path = format!("/v1/sessions/{}/close", segment(&close.session_id));
            let body = CloseRequest {
                mode: close.mode,
                reason: close.reason,
            };
            Call::post(path, &body)
        }
    }
}

fn usage_of(release: &ReleaseOperation) -> ReleaseRequest {
    ReleaseRequest {
        prompt_tokens: release.prompt_tokens,
        completion_tokens: release.completion_tokens,
        cached_tokens: release.cached_tokens,
        engine: release.engine.clone(),
    }
}

/// The results of a batch; none when they are not as they should be.
fn results(body: &Value, count: usize) -> Option<Vec<Reply>> {
    let rows = body.get("results")?.as_array()?;
    if rows.len() != count {
        return None;
    }
    rows.iter()
        .map(|row| {
            let status = u16::try_from(row.get("status")?.as_u64()?).ok()?;
            let body = row.get("body").filter(|body| body.is_object());
            Some(Reply::Answer {
                status,
                body: body.cloned().unwrap_or_default(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn results_that_do_not_fit_the_batch_are_none() {
        let good = json!({"results": [{"status": 200, "body": {}}, {"status": 404}]});
        assert_eq!(results(&good, 2).map(|replies| replies.len()), Some(2));
        assert_eq!(results(&good, 1), None);
        for odd in [
            json!({}),
            json!({"results": {}}),
            json!({"results": [1, 2]}),
            json!({"results": [{"status": "200"}, {"status": 70_000}]}),
        ] {
            assert_eq!(results(&odd, 2), None, "{odd}");
        }
    }
}
