//! The accept loop: what axum's own server does not do (decision 0007).
//!
//! It bounds the connections and sheds the oldest silent ones, gives up on slow heads, on TLS that
//! does not come about and on readers that stall, tells whether answers arrived, and stops within a
//! bounded time.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use futures_util::future::join_all;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::app::App;
use super::delivery::{Ending, Patience, Socket, Stage, Tracker};
use super::front;
use super::listener::{Accepted, Listener, Peer, RawStream, Stream};
use super::shares::Shares;
use crate::access::Scheme;
use crate::gate::WAITING_CALLS_MAX;
use crate::telemetry::Repeats;

static NOT_ACCEPTED: Repeats = Repeats::new("a connection could not be accepted");
static NO_TLS: Repeats = Repeats::new("a connection to a TLS port brought no TLS");

/// How often connections are looked through for those whose time is over.
const SWEEP: Duration = Duration::from_millis(500);

/// Rest after an accept that failed for want of descriptors or memory.
const ACCEPT_REST: Duration = Duration::from_millis(50);

/// First byte of a TLS connection: the content type of a handshake.
const HANDSHAKE: u8 = 0x16;

/// What is read and thrown away of a client that speaks no TLS, so that it sees the answer instead of
/// a cut connection.
const OVERRUN_MAX: usize = 64 << 10;

/// Bounds of the server.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Longest time for the head of a request, for the first byte of a fresh connection, and for TLS
    /// to be agreed on.
    pub head: Duration,
    /// Longest silence between two requests. Longer than the pools of usual clients keep a
    /// connection, so that a client closes first and no request meets a closing connection.
    pub idle: Duration,
    /// Longest time in which a reader of an answer takes no byte.
    pub stalled: Duration,
    /// Largest head in bytes.
    pub head_bytes: usize,
    /// Bytes of a connection that are read ahead of what is asked for.
    pub ahead_bytes: usize,
    /// Open connections. Beyond that the oldest silent one is shed.
    pub connections: usize,
    /// Open waiting calls of one peer: an address, or a user of this machine. Beyond that its calls are
    /// answered at once.
    pub waiting_per_peer: usize,
    /// Bytes of bodies on their way. Beyond that larger bodies are refused.
    pub body_bytes: usize,
    /// Bytes of answers that are being written. Beyond that those that take longest are cut.
    pub answer_bytes: u64,
    /// How long answers in flight have when the service stops.
    pub stop_within: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            head: Duration::from_secs(15),
            idle: Duration::from_secs(120),
            stalled: Duration::from_secs(30),
            head_bytes: 32 << 10,
            ahead_bytes: 64 << 10,
            connections: 32_768,
            // Three quarters of all: callers behind one proxy or on one driver node share an address,
            // so the bound is wide; the last quarter is left to others.
            waiting_per_peer: WAITING_CALLS_MAX / 4 * 3,
            body_bytes: 128 << 20,
            answer_bytes: 256 << 20,
            stop_within: Duration::from_secs(3),
        }
    }
}

/// How requests of a connection came in. It stands beside each of them.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) scheme: Scheme,
    pub(super) shares: Shares,
}

/// Longest time that connections that are cut take to end.
const CUT_WITHIN: Duration = Duration::from_secs(1);

/// Serves until `stop` is cancelled; then answers in flight have [`Limits::stop_within`] to end and
/// the rest is cut. Waiting calls must be ended by `Gate::begin_drain` before.
pub async fn serve(
    listeners: Vec<Listener>,
    app: App,
    router: Router,
    limits: Limits,
    stop: CancellationToken,
) {
    let stop_within = limits.stop_within;
    let tasks = TaskTracker::new();
    let server = Arc::new(Server {
        app,
        router,
        patience: Patience {
            head: limits.head,
            idle: limits.idle,
            stalled: limits.stalled,
        },
        shares: Box::new(Shares::new(limits.waiting_per_peer, limits.body_bytes)),
        limits,
        open: Open::default(),
    });
    tokio::select! {
        () = stop.cancelled() => {}
        _ = join_all(listeners.iter().map(|listener| server.accept(listener, &tasks))) => {}
        () = server.sweep() => {}
    }
    drop(listeners);
    tasks.close();
    server.open.stop(Ending::Orderly);
    if tokio::time::timeout(stop_within, tasks.wait())
        .await
        .is_err()
    {
        tracing::warn!(connections = tasks.len(), "cutting what is still open");
        server.open.stop(Ending::Cut);
        // A connection whose thread stands in a commit that does not return hears of nothing.
        if tokio::time::timeout(CUT_WITHIN, tasks.wait())
            .await
            .is_err()
        {
            tracing::error!(connections = tasks.len(), "left open");
        }
    }
}

struct Server {
    app: App,
    router: Router,
    limits: Limits,
    patience: Patience,
    shares: Box<dyn Fn(Peer) -> Shares + Send + Sync>,
    open: Open,
}

impl Server {
    async fn accept(self: &Arc<Self>, listener: &Listener, tasks: &TaskTracker) {
        loop {
            match listener.accept().await {
                Ok(accepted) => {
                    self.make_room().await;
                    let entry = self.enter();
                    tasks.spawn(async move { entry.serve(accepted).await });
                }
                Err(error) if is_of_the_connection(&error) => {}
                Err(error) => {
                    let shed = self.open.shed_oldest_silent(self.limits.stalled);
                    if NOT_ACCEPTED.is_told() {
                        tracing::warn!(%error, shed, "a connection could not be accepted");
                    }
                    tokio::time::sleep(ACCEPT_REST).await;
                }
            }
        }
    }

    /// Waits for room for one that was accepted, shedding the oldest silent connection when there is
    /// one. Without a further connection nobody is shed.
    async fn make_room(&self) {
        while self.open.count() >= self.limits.connections {
            self.open.shed_oldest_silent(self.limits.stalled);
            // When all are busy, one may fall silent without leaving: look again now and then.
            let _ = tokio::time::timeout(SWEEP, self.open.left.notified()).await;
        }
    }

    /// Ends connections whose time is over.
    async fn sweep(&self) {
        let mut tick = tokio::time::interval(SWEEP);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let now = Instant::now();
            let trackers = self.open.all();
            self.cut_slow_readers(&trackers);
            for tracker in trackers {
                let (stage, since, _) = tracker.stage();
                if self
                    .patience
                    .deadline(&tracker)
                    .is_some_and(|deadline| deadline <= now)
                {
                    tracker.shed(stage, since);
                }
            }
        }
    }

    /// Each answer is kept until its reader took it, so many slow readers of large ones would fill the
    /// memory. Who takes longest is cut first.
    fn cut_slow_readers(&self, trackers: &[Arc<Tracker>]) {
        let mut writing = Vec::new();
        let mut bytes = 0_u64;
        for tracker in trackers {
            let (stage, since, _) = tracker.stage();
            if let Some((began, size)) = tracker.answer() {
                bytes = bytes.saturating_add(size);
                writing.push((began, size, stage, since, tracker));
            }
        }
        writing.sort_unstable_by_key(|(began, ..)| *began);
        for (_, size, stage, since, tracker) in writing {
            if bytes <= self.limits.answer_bytes {
                break;
            }
            tracker.shed(stage, since);
            bytes = bytes.saturating_sub(size);
        }
    }

    fn enter(self: &Arc<Self>) -> Entry {
        let tracker = Tracker::new();
        let number = self.open.next.fetch_add(1, Ordering::Relaxed);
        self.open
            .with(|trackers| trackers.insert(number, Arc::clone(&tracker)));
        Entry {
            server: Arc::clone(self),
            tracker,
            number,
        }
    }

    async fn connection(&self, accepted: Accepted, tracker: &Arc<Tracker>) {
        let arrival = Arc::new(Arrival {
            scheme: accepted.stream.scheme(),
            shares: (self.shares)(accepted.peer),
        });
        let stream = tokio::select! {
            biased;
            stream = self.open_stream(accepted.stream, tracker) => stream,
            _ = tracker.is_to_end(false) => None,
        };
        if let Some(stream) = stream {
            self.requests(stream, arrival, tracker).await;
        }
    }

    /// Serves the requests of a connection until it ends, whoever ends it.
    async fn requests(
        &self,
        stream: Box<dyn Stream>,
        arrival: Arc<Arrival>,
        tracker: &Arc<Tracker>,
    ) {
        let app = self.app.clone();
        let refusal = Box::new(move |head: &[u8]| front::refusal(&app, head));
        let socket = Socket::new(stream, Arc::clone(tracker), refusal);
        let service = service_fn(|request: Request<Incoming>| {
            let mut request = request.map(|body| Body::new(tracker.begin(body)));
            request.extensions_mut().insert(Arc::clone(&arrival));
            let answer = self.router.clone().oneshot(request);
            let tracker = Arc::clone(tracker);
            async move {
                let Ok(response) = answer.await;
                Ok::<_, Infallible>(tracker.track(response))
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            // The sweep does this: hyper's own time-out would also end connections that are idle.
            .header_read_timeout(None)
            .max_header_size(self.limits.head_bytes)
            .max_buf_size(self.limits.ahead_bytes)
            .serve_connection(TokioIo::new(socket), service);
        let mut connection = pin!(connection);
        let mut stopping = false;
        loop {
            tokio::select! {
                biased;
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "a connection broke");
                    }
                    break;
                }
                ending = tracker.is_to_end(stopping) => match ending {
                    Ending::Cut => break,
                    Ending::Orderly => {
                        stopping = true;
                        connection.as_mut().graceful_shutdown();
                    }
                },
            }
        }
    }

    /// What requests are read from; `None` when no TLS came about.
    async fn open_stream(&self, stream: RawStream, tracker: &Tracker) -> Option<Box<dyn Stream>> {
        let (mut stream, tls) = match stream {
            RawStream::Plain(stream) => return Some(stream),
            RawStream::Tls(stream, tls) => (stream, tls),
        };
        let agreed = match speaks_tls(&stream).await {
            Ok(true) => tls.acceptor().accept(stream).await,
            Ok(false) => {
                let refusal = front::plain_on_tls(&self.app);
                // A client that is gone needs no answer.
                let _ = refuse_in_the_clear(&mut stream, &refusal).await;
                Err(io::Error::other("HTTP in the clear"))
            }
            Err(error) => Err(error),
        };
        match agreed {
            Ok(stream) => {
                tracker.opened();
                Some(Box::new(stream))
            }
            Err(error) => {
                // Who only looks whether the port is open says nothing wrong.
                if error.kind() != io::ErrorKind::UnexpectedEof && NO_TLS.is_told() {
                    tracing::warn!(%error, "a connection to a TLS port brought no TLS");
                }
                None
            }
        }
    }
}

/// Who comes to a TLS port speaks TLS, or asks in the clear: a slip that is told in the clear.
async fn speaks_tls(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    let read = stream.peek(&mut first).await?;
    Ok(read == 0 || first == [HANDSHAKE])
}

/// Tells a client that speaks no TLS that it should, and waits until it has seen it.
async fn refuse_in_the_clear(stream: &mut TcpStream, refusal: &[u8]) -> io::Result<()> {
    stream.write_all(refusal).await?;
    stream.shutdown().await?;
    let mut rest = [0; 1 << 10];
    let mut read = 0_usize;
    while read < OVERRUN_MAX {
        match stream.read(&mut rest).await? {
            0 => break,
            more => read = read.saturating_add(more),
        }
    }
    Ok(())
}

/// Errors of a connect that was given up before it was accepted.
fn is_of_the_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::Interrupted
    )
}

/// The open connections, in the order of their opening.
#[derive(Default)]
struct Open {
    next: AtomicU64,
    trackers: Mutex<BTreeMap<u64, Arc<Tracker>>>,
    left: Notify,
}

impl Open {
    fn with<R>(&self, look: impl FnOnce(&mut BTreeMap<u64, Arc<Tracker>>) -> R) -> R {
        look(&mut self.trackers.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn count(&self) -> usize {
        self.with(|trackers| trackers.len())
    }

    fn all(&self) -> Vec<Arc<Tracker>> {
        self.with(|trackers| trackers.values().cloned().collect())
    }

    /// Tells all connections that the service stops.
    fn stop(&self, ending: Ending) {
        for tracker in self.all() {
            tracker.stop(ending);
        }
    }

    /// Ends the connection that has sent nothing, or no whole request, for the longest time: one that
    /// never was answered before one of a caller that pauses between requests. Where there is none, the
    /// one that has been taking its answer for the longest time beyond `patience`.
    fn shed_oldest_silent(&self, patience: Duration) -> bool {
        let now = Instant::now();
        let oldest = self.with(|trackers| {
            trackers
                .values()
                .filter_map(|tracker| {
                    let (stage, since, answered) = tracker.stage();
                    let (slow, began) = match stage {
                        Stage::Silent | Stage::Head | Stage::Body => (false, since),
                        Stage::Writing => (true, tracker.answer()?.0),
                        Stage::Busy => return None,
                    };
                    let is_due = !slow || now.duration_since(began) >= patience;
                    is_due.then_some(((slow, answered, began), (stage, since, tracker)))
                })
                .min_by_key(|(rank, _)| *rank)
                .map(|(_, (stage, since, tracker))| (stage, since, Arc::clone(tracker)))
        });
        if let Some((stage, since, tracker)) = &oldest {
            tracker.shed(*stage, *since);
        }
        oldest.is_some()
    }
}

/// One connection on the list; it leaves the list when its task ends in whatever way.
struct Entry {
    server: Arc<Server>,
    tracker: Arc<Tracker>,
    number: u64,
}

impl Entry {
    async fn serve(self, accepted: Accepted) {
        self.server.connection(accepted, &self.tracker).await;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.tracker.ended();
        let open = &self.server.open;
        open.with(|trackers| trackers.remove(&self.number));
        open.left.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use axum::response::Response;
    use futures_util::FutureExt;

    use super::*;

    /// Where nobody is silent, readers that take their time hold no place for ever; one that is being
    /// served, or has just begun to take its answer, keeps it.
    #[tokio::test]
    async fn slow_readers_are_shed_after_silent_connections() {
        let open = Open::default();
        let add = |number| {
            let tracker = Tracker::new();
            open.with(|trackers| trackers.insert(number, Arc::clone(&tracker)));
            tracker
        };
        let (first, second, silent) = (add(1), add(2), add(3));
        let _first = first.track(Response::new(Body::from("answer")));
        let _second = second.track(Response::new(Body::from("answer")));
        let is_shed = |tracker: &Tracker| tracker.is_to_end(false).now_or_never().is_some();

        assert!(open.shed_oldest_silent(Duration::ZERO));
        assert!(is_shed(&silent) && !is_shed(&first));
        open.with(|trackers| trackers.remove(&3));
        assert!(!open.shed_oldest_silent(Duration::from_secs(3_600)));
        assert!(open.shed_oldest_silent(Duration::ZERO));
        assert!(is_shed(&first) && !is_shed(&second));
    }
}
