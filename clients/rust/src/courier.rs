//! What must arrive: releases, cancels and closes.
//!
//! Each is tried at once. What fails is tried again with a growing, jittered pause for some minutes; then it is left to
//! the lease's TTL. Nobody has to wait for it.

use std::sync::Arc;
use std::time::Duration;

use kvgate_api::{BatchOperation, CancelOperation, ReleaseOperation};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep};

use crate::client::Shared;
use crate::fail_open::Pause;
use crate::turns::Turns;
use crate::wire::{Reply, within};

/// Longest time of one attempt. Nobody waits for it, so a slow gate gets time to answer.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Undelivered operations of one gate object; what comes beyond has one attempt and is then left to the TTL.
const PARCELS_MAX: usize = 65_536;

/// The deliveries of one gate object.
#[derive(Debug)]
pub struct Courier {
    shared: Arc<Shared>,
    turns: Arc<Turns>,
    /// How many operations are undelivered.
    owed: watch::Sender<usize>,
}

impl Courier {
    pub fn new(shared: Arc<Shared>, turns: Arc<Turns>) -> Arc<Self> {
        Arc::new(Self {
            shared,
            turns,
            owed: watch::Sender::new(0),
        })
    }

    /// Sends an operation and sees to its arrival. What is given is the reply to the first attempt.
    pub fn send(self: &Arc<Self>, operation: BatchOperation) -> oneshot::Receiver<Reply> {
        let (sender, first) = oneshot::channel();
        let parcel = Parcel {
            courier: Arc::clone(self),
            operation,
            first: Some(sender),
        };
        self.owed.send_modify(|owed| *owed += 1);
        self.shared.handle.spawn(parcel.deliver());
        first
    }

    /// Withdraws a ticket.
    pub fn cancel(self: &Arc<Self>, ticket_id: &str) {
        let ticket_id = ticket_id.to_owned();
        drop(self.send(BatchOperation::Cancel(CancelOperation { ticket_id })));
    }

    /// Sends at once, whether or not the result is awaited. The wait for the first attempt is not longer than a call
    /// may take, and none at all for a gate that failed just now.
    pub fn deliver(
        self: &Arc<Self>,
        operation: BatchOperation,
    ) -> impl Future<Output = Option<Reply>> + Send + use<> {
        let shared = Arc::clone(&self.shared);
        let is_open = shared.breaker.is_open();
        let first = self.send(operation);
        let waiting = (!is_open).then(|| {
            let handle = shared.handle.clone();
            handle.spawn(async move {
                let ends_at = Instant::now() + shared.config.call_timeout;
                let reply = within(ends_at, first).await;
                if reply.is_none() {
                    shared.breaker.failed(1, Instant::now(), &shared.dice);
                }
                reply.and_then(Result::ok)
            })
        });
        async move { waiting?.await.ok().flatten() }
    }

    /// Waits until nothing is owed, but not longer than this; whether all was delivered or given up.
    pub async fn flushed(&self, time: Duration) -> bool {
        let mut owed = self.owed.subscribe();
        let nothing = owed.wait_for(|owed| *owed == 0);
        within(Instant::now() + time, nothing)
            .await
            .is_some_and(|ended| ended.is_ok())
    }
}

/// An operation that must arrive.
struct Parcel {
    courier: Arc<Courier>,
    operation: BatchOperation,
    first: Option<oneshot::Sender<Reply>>,
}

impl Parcel {
    async fn deliver(mut self) {
        let gives_up_at = Instant::now() + self.courier.shared.config.retry_for;
        let mut pause = Pause::of_delivery();
        loop {
            let turns = &self.courier.turns;
            let reply = turns.ask(self.operation.clone(), ATTEMPT).await;
            if let Some(first) = self.first.take() {
                // Nobody may wait for it.
                let _ = first.send(reply.clone());
            }
            let may_wait = *self.courier.owed.borrow() <= PARCELS_MAX;
            if reply.is_final() || !may_wait || Instant::now() >= gives_up_at {
                self.settle(&reply);
                return;
            }
            sleep(pause.next(&self.courier.shared.dice)).await;
        }
    }

    fn settle(&self, reply: &Reply) {
        let warnings = &self.courier.shared.warnings;
        let name = name_of(&self.operation);
        if !reply.is_final() {
            warnings.warn(
                "undelivered",
                format_args!("a {name} could not be delivered: {reply}; it is left to the TTL"),
            );
            return;
        }
        if let (Some(422), BatchOperation::Release(release)) = (reply.status(), &self.operation)
            && *release != without_usage(&release.lease_id)
        {
            warnings.warn(
                "usage",
                format_args!("the gate does not take a usage report: {reply}"),
            );
            let plain = BatchOperation::Release(without_usage(&release.lease_id));
            drop(self.courier.send(plain));
            return;
        }
        let is_close = matches!(self.operation, BatchOperation::Close(_));
        if reply.good().is_none() && (is_close || !matches!(reply.status(), Some(404 | 410))) {
            let kind = format!("{name}/{}", reply.status().unwrap_or_default());
            warnings.warn(&kind, format_args!("a {name} is refused: {reply}"));
        }
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        self.courier
            .owed
            .send_modify(|owed| *owed = owed.saturating_sub(1));
    }
}

fn without_usage(lease_id: &str) -> ReleaseOperation {
    ReleaseOperation {
        lease_id: lease_id.to_owned(),
        ..ReleaseOperation::default()
    }
}

const fn name_of(operation: &BatchOperation) -> &'static str {
    match operation {
        BatchOperation::Acquire(_) => "acquire",
        BatchOperation::Release(_) => "release",
        BatchOperation::Renew(_) => "renewal",
        BatchOperation::Cancel(_) => "cancel",
        BatchOperation::Close(_) => "close",
    }
}
