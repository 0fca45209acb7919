//! What one caller may take of what all share: waiting calls, and room for bodies on their way.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use tokio::sync::Semaphore;

use super::listener::Peer;

/// The shares of the peer that a request came from. The accept loop puts them beside every request.
#[derive(Clone, Debug)]
pub(super) struct Shares {
    peer: Peer,
    waiting: Arc<Waiting>,
    bodies: Arc<Semaphore>,
}

impl Shares {
    /// Of everybody together: so many waiting calls of one peer, so many bytes of bodies.
    pub(super) fn new(waiting_per_peer: usize, body_bytes: usize) -> impl Fn(Peer) -> Self {
        let waiting = Arc::new(Waiting {
            most: waiting_per_peer,
            calls: Mutex::default(),
        });
        let bodies = Arc::new(Semaphore::new(body_bytes));
        move |peer| Self {
            peer,
            waiting: Arc::clone(&waiting),
            bodies: Arc::clone(&bodies),
        }
    }

    /// Room for the bytes of bodies on their way.
    pub(super) fn bodies(&self) -> Arc<Semaphore> {
        Arc::clone(&self.bodies)
    }
}

/// How many calls of each peer wait.
#[derive(Debug)]
struct Waiting {
    most: usize,
    calls: Mutex<HashMap<Peer, usize>>,
}

impl Waiting {
    fn with<R>(&self, look: impl FnOnce(&mut HashMap<Peer, usize>) -> R) -> R {
        look(&mut self.calls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A place for one more waiting call; `None` when the peer has its share.
    fn place(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        let has_room = self.with(|calls| {
            let open = calls.entry(peer).or_default();
            let has_room = *open < self.most;
            *open += usize::from(has_room);
            has_room
        });
        has_room.then(|| Place {
            waiting: Arc::clone(self),
            peer,
        })
    }
}

/// One waiting call of a peer, while it is held.
#[derive(Debug)]
pub(super) struct Place {
    waiting: Arc<Waiting>,
    peer: Peer,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.waiting.with(|calls| {
            if let Some(open) = calls.get_mut(&self.peer) {
                *open = open.saturating_sub(1);
                if *open == 0 {
                    calls.remove(&self.peer);
                }
            }
        });
    }
}

/// Whether the call of a request may wait.
pub(super) struct MayWait(
    /// `None`: a call from within the process.
    Option<Shares>,
);

impl MayWait {
    /// How long the call may wait, and its place while it does. Beyond the share of its peer it is
    /// answered at once; the ticket has its place in the queue all the same.
    pub(super) fn for_at_most(&self, wait: Duration) -> (Duration, Option<Place>) {
        let Some(shares) = self.0.as_ref().filter(|_| !wait.is_zero()) else {
            return (wait, None);
        };
        match shares.waiting.place(shares.peer) {
            Some(place) => (wait, Some(place)),
            None => (Duration::ZERO, None),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for MayWait {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self(parts.extensions.get::<Shares>().cloned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_has_its_share_and_no_more() {
        let shares = Shares::new(2, 0);
        let long = Duration::from_secs(60);
        let wait = |user| MayWait(Some(shares(Peer::User(user)))).for_at_most(long);
        let (first, second) = (wait(1), wait(1));
        assert!(first.1.is_some() && second.1.is_some());
        assert!(wait(1).0.is_zero());
        assert_eq!(wait(2).0, long);
        assert_eq!(MayWait(None).for_at_most(long).0, long);
        drop(first);
        assert_eq!(wait(1).0, long);
        drop(second);
        let waiting = shares(Peer::User(1)).waiting;
        assert!(
            waiting.with(|calls| calls.is_empty()),
            "peers that wait no more are forgotten"
        );
    }
}
