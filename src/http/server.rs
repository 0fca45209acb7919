//! The accept loop: what axum's own server does not do (decision 0007).
//!
//! It bounds the connections and sheds the oldest silent ones, gives up on slow heads and on
//! readers that stall, tells whether answers arrived, and stops within a bounded time.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Protocol, Socket as RawSocket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::app::App;
use super::delivery::{Patience, Socket, Stage, Tracker};
use super::front;
use crate::telemetry::Repeats;

static NOT_ACCEPTED: Repeats = Repeats::new("a connection could not be accepted");

/// Connects that may wait to be accepted: a burst of a fleet of callers.
const BACKLOG: i32 = 4_096;

/// How often connections are looked through for those whose time is over.
const SWEEP: Duration = Duration::from_millis(500);

/// Rest after an accept that failed for want of descriptors or memory.
const ACCEPT_REST: Duration = Duration::from_millis(50);

/// Bounds of the server.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Longest time for the head of a request, and for the first byte of a fresh connection.
    pub head: Duration,
    /// Longest silence between two requests. Longer than the pools of usual clients keep a
    /// connection, so that a client closes first and no request meets a closing connection.
    pub idle: Duration,
    /// Longest time in which a reader of an answer takes no byte.
    pub stalled: Duration,
    /// Largest head in bytes.
    pub head_bytes: usize,
    /// Open connections. Beyond that the oldest silent one is shed.
    pub connections: usize,
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
            connections: 32_768,
            stop_within: Duration::from_secs(3),
        }
    }
}

/// A bound port. Connects wait in the backlog until [`serve`] is called, which is before the store
/// is opened (DUR3).
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Binds the port. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = RawSocket::new(
            Domain::for_address(address),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        socket.set_reuse_address(true)?;
        if address.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        let listener = TcpListener::from_std(socket.into())?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// Where it listens, with the port that was chosen for port 0.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Serves until `stop` is cancelled; then answers in flight have [`Limits::stop_within`] to end and
/// the rest is cut. Waiting calls must be ended by `Gate::begin_drain` before.
pub async fn serve(
    listener: Listener,
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
        limits,
        open: Open::default(),
        stop: stop.clone(),
        cut: CancellationToken::new(),
    });
    tokio::select! {
        () = stop.cancelled() => {}
        () = server.accept(&listener.listener, &tasks) => {}
        () = server.sweep() => {}
    }
    drop(listener);
    tasks.close();
    if tokio::time::timeout(stop_within, tasks.wait())
        .await
        .is_err()
    {
        tracing::warn!(connections = tasks.len(), "cutting what is still open");
        server.cut.cancel();
        tasks.wait().await;
    }
}

struct Server {
    app: App,
    router: Router,
    limits: Limits,
    patience: Patience,
    open: Open,
    stop: CancellationToken,
    cut: CancellationToken,
}

impl Server {
    async fn accept(self: &Arc<Self>, listener: &TcpListener, tasks: &TaskTracker) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    self.make_room().await;
                    let entry = self.enter();
                    tasks.spawn(async move { entry.serve(stream).await });
                }
                Err(error) if is_of_the_connection(&error) => {}
                Err(error) => {
                    let shed = self.open.shed_oldest_silent();
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
            self.open.shed_oldest_silent();
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
            for tracker in self.open.all() {
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

    async fn connection(&self, stream: TcpStream, tracker: &Arc<Tracker>) {
        // Answers are small and wanted at once. A socket that refuses is gone already.
        let _ = stream.set_nodelay(true);
        let app = self.app.clone();
        let refusal = Box::new(move |head: &[u8]| front::refusal(&app, head));
        let socket = Socket::new(stream, Arc::clone(tracker), refusal);
        let service = service_fn(|request: Request<Incoming>| {
            tracker.begin();
            let answer = self.router.clone().oneshot(request.map(Body::new));
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
                () = self.cut.cancelled() => break,
                () = tracker.is_shed() => break,
                () = self.stop.cancelled(), if !stopping => {
                    stopping = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }
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

    /// Ends the connection that has sent nothing, or no whole head, for the longest time.
    fn shed_oldest_silent(&self) -> bool {
        let oldest = self.with(|trackers| {
            trackers
                .values()
                .filter_map(|tracker| {
                    let (stage, since, _) = tracker.stage();
                    let silent = matches!(stage, Stage::Silent | Stage::Head);
                    silent.then_some((stage, since, tracker))
                })
                .min_by_key(|(_, since, _)| *since)
                .map(|(stage, since, tracker)| (stage, since, Arc::clone(tracker)))
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
    async fn serve(self, stream: TcpStream) {
        self.server.connection(stream, &self.tracker).await;
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
