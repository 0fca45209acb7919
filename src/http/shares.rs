//! What one caller may take of what all share: waiting calls, and room for bodies on their way.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use tokio::sync::Semaphore;

use super::listener::Peer;
use super::server::Arrival;

/// The shares of the peer that a connection came from.
#[derive(Debug)]
pub(super) struct Shares {
    calls: Arc<PeerCalls>,
    bodies: Arc<Semaphore>,
}

impl Shares {
    /// Of everybody together: so many waiting calls of one peer, so many bytes of bodies.
    pub(super) fn new(waiting_per_peer: usize, body_bytes: usize) -> impl Fn(Peer) -> Self {
        let waiting = Arc::new(Waiting {
            most: waiting_per_peer,
            peers: Mutex::default(),
        });
        let bodies = Arc::new(Semaphore::new(body_bytes));
        move |peer| Self {
            calls: waiting.of(peer),
            bodies: Arc::clone(&bodies),
        }
    }

    /// Room for the bytes of bodies on their way.
    pub(super) const fn bodies(&self) -> &Arc<Semaphore> {
        &self.bodies
    }

    /// A place for one more waiting call; `None` when the peer has its share.
    fn place(&self) -> Option<Place> {
        let PeerCalls { waiting, count, .. } = &*self.calls;
        let one_more = |open: usize| (open < waiting.most).then_some(open + 1);
        count
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
            .ok()?;
        Some(Place {
            calls: Arc::clone(&self.calls),
        })
    }
}

/// How many calls of each peer wait.
#[derive(Debug)]
struct Waiting {
    most: usize,
    peers: Mutex<HashMap<Peer, Weak<PeerCalls>>>,
}

impl Waiting {
    fn with<R>(&self, look: impl FnOnce(&mut HashMap<Peer, Weak<PeerCalls>>) -> R) -> R {
        look(&mut self.peers.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What all connections of a peer share: looked up once for each of them, and not for each call.
    fn of(self: &Arc<Self>, peer: Peer) -> Arc<PeerCalls> {
        self.with(|peers| {
            if let Some(calls) = peers.get(&peer).and_then(Weak::upgrade) {
                return calls;
            }
            let calls = Arc::new(PeerCalls {
                peer,
                waiting: Arc::clone(self),
                count: AtomicUsize::new(0),
            });
            peers.insert(peer, Arc::downgrade(&calls));
            calls
        })
    }
}

/// The waiting calls of one peer, while it has a connection.
#[derive(Debug)]
struct PeerCalls {
    peer: Peer,
    waiting: Arc<Waiting>,
    count: AtomicUsize,
}

impl Drop for PeerCalls {
    fn drop(&mut self) {
        self.waiting.with(|peers| {
            // It may have come back meanwhile.
            if peers
                .get(&self.peer)
                .is_some_and(|calls| calls.strong_count() == 0)
            {
                peers.remove(&self.peer);
            }
        });
    }
}

/// One waiting call of a peer, while it is held.
#[derive(Debug)]
pub(super) struct Place {
    calls: Arc<PeerCalls>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.calls.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether the call of a request may wait.
pub(super) struct MayWait(
    /// `None`: a call from within the process.
    Option<Arc<Arrival>>,
);

impl MayWait {
    /// How long the call may wait, and its place while it does. Beyond the share of its peer it is
    /// answered at once; the ticket has its place in the queue all the same.
    pub(super) fn for_at_most(&self, wait: Duration) -> (Duration, Option<Place>) {
        let Some(arrival) = self.0.as_ref().filter(|_| !wait.is_zero()) else {
            return (wait, None);
        };
        match arrival.shares.place() {
            Some(place) => (wait, Some(place)),
            None => (Duration::ZERO, None),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for MayWait {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(parts.extensions.get::<Arc<Arrival>>().cloned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Scheme;

    #[test]
    fn a_peer_has_its_share_and_no_more() {
        let shares = Shares::new(2, 0);
        let long = Duration::from_secs(60);
        let connection = |user| {
            Arc::new(Arrival {
                scheme: Scheme::Http,
                shares: shares(Peer::User(user)),
            })
        };
        let wait = |arrival: &Arc<Arrival>| MayWait(Some(Arc::clone(arrival))).for_at_most(long);
        let (one, its_second, other) = (connection(1), connection(1), connection(2));
        let (first, second) = (wait(&one), wait(&its_second));
        assert!(first.1.is_some() && second.1.is_some());
        assert!(wait(&one).0.is_zero() && wait(&its_second).0.is_zero());
        assert_eq!(wait(&other).0, long);
        assert_eq!(MayWait(None).for_at_most(long).0, long);
        drop(first);
        assert_eq!(wait(&its_second).0, long);
        drop((second, its_second, other));
        let waiting = Arc::clone(&one.shares.calls.waiting);
        assert_eq!(waiting.with(|peers| peers.len()), 1);
        drop(one);
        assert!(
            waiting.with(|peers| peers.is_empty()),
            "peers without a connection are forgotten"
        );
    }
}
