//! Callers beside: each asks for one token, and gives back its lease or leaves the line.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use hyper::Method;
use serde_json::json;
use tokio::task::JoinSet;

use crate::support::{Connection, call, connect, histogram, millis, post, ticket};

/// Callers at a steady rate: 1,000 pairs a second together.
pub const STEADY: Callers = Callers {
    count: 32,
    every: Some(Duration::from_millis(32)),
};
/// Callers that ask again at once.
pub const EAGER: Callers = Callers {
    count: 16,
    every: None,
};

#[derive(Clone, Copy)]
pub struct Callers {
    count: usize,
    /// Time from one pair to the next of a caller; `None` for no rest.
    every: Option<Duration>,
}

/// What callers saw.
pub struct Seen {
    /// Nanoseconds of acquires. A call that could not begin in time counts from when it should have.
    pub acquires: Histogram<u64>,
    pub seconds: f64,
}

impl Seen {
    pub fn pairs_per_s(&self) -> f64 {
        self.acquires.len() as f64 / self.seconds
    }

    pub fn ms(&self, quantile: f64) -> f64 {
        millis(&self.acquires, quantile)
    }
}

impl Callers {
    /// Calls while `work` lasts.
    pub async fn beside<T>(self, address: SocketAddr, work: impl Future<Output = T>) -> (Seen, T) {
        let over = Arc::new(AtomicBool::new(false));
        let mut connections = Vec::new();
        for _ in 0..self.count {
            connections.push(connect(address).await);
        }
        let began = Instant::now();
        let mut callers = JoinSet::new();
        for (number, connection) in connections.into_iter().enumerate() {
            let first = began + self.every.unwrap_or_default() * number as u32 / self.count as u32;
            callers.spawn(pairs(connection, first, self.every, Arc::clone(&over)));
        }
        let done = work.await;
        over.store(true, Ordering::Relaxed);
        let seconds = began.elapsed().as_secs_f64();
        let mut acquires = histogram();
        while let Some(nanos) = callers.join_next().await {
            acquires.add(nanos.unwrap()).unwrap();
        }
        (Seen { acquires, seconds }, done)
    }
}

async fn pairs(
    mut connection: Connection,
    first: Instant,
    every: Option<Duration>,
    over: Arc<AtomicBool>,
) -> Histogram<u64> {
    let mut nanos = histogram();
    let mut due = first;
    while !over.load(Ordering::Relaxed) {
        let mut began = Instant::now();
        if let Some(every) = every {
            if began < due {
                tokio::time::sleep_until(due.into()).await;
                began = Instant::now();
            } else {
                began = due;
            }
            due += every;
        }
        pair(&mut connection, began, &mut nanos).await;
    }
    nanos
}

/// One acquire, and what undoes it.
async fn pair(connection: &mut Connection, began: Instant, nanos: &mut Histogram<u64>) {
    let ticket = ticket();
    let body = json!({
        "ticket_id": ticket, "session_id": format!("of-{ticket}"), "reservation_tokens": 1,
        "wait_s": 0, "request_id": ticket, "client": "rollout-3",
    });
    let answer = post(connection, "/v1/leases", body.to_string()).await;
    nanos.saturating_record(began.elapsed().as_nanos() as u64);
    match answer["action"].as_str() {
        Some("admit") => {
            let lease = answer["lease_id"].as_str().unwrap();
            let path = format!("/v1/leases/{lease}/release");
            post(connection, &path, "{}".to_owned()).await;
        }
        Some("wait") => {
            // It may be decided meanwhile: a conflict then.
            let path = format!("/v1/tickets/{ticket}");
            call(connection, Method::DELETE, &path, String::new()).await;
        }
        _ => {}
    }
}
