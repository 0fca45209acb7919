//! One loopback address that answers HTTP and can be told to misbehave.
//!
//! Promises: the port stays ours from the first start to the drop, also while nothing listens, so
//! that a stopped address refuses connections and comes back the same; every request is recorded
//! before it is answered. What a path answers normally is left to the engine and the router.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Request, Response, StatusCode, header};
use futures_util::stream;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

/// Largest request body that is read, in bytes.
const BODY_BYTES_MAX: usize = 4 << 20;
/// Requests that are remembered; older ones are forgotten, as the demo runs for hours.
const RECORDED_MAX: usize = 16_384;
/// Connections that the system holds for us between two accepts.
const BACKLOG: u32 = 1_024;
/// Piece of a body that never ends, in bytes.
const PIECE_BYTES: usize = 16 << 10;

/// What a path does with a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Behaviour {
    /// The modelled answer.
    Normal,
    /// This status and text.
    Status(u16, String),
    /// Takes the request and never answers.
    Hang,
    /// Closes the connection without an answer.
    Cut,
    /// Sends the head and half of the modelled answer, then closes the connection.
    CutMidBody,
    /// 307 to this address.
    Redirect(String),
    /// 200 with these bytes as the body.
    Raw(Vec<u8>),
    /// 200 with a body of so many spaces.
    Huge(u64),
    /// 200 with a body that goes on for ever.
    Endless,
    /// The modelled answer after this time.
    Slow(Duration),
    /// Takes the request and holds it until the path is told to behave anew; then it is served by
    /// that. Unlike [`Behaviour::Hang`] it can end well.
    Hold,
}

/// A request as it came in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordedRequest {
    /// Its number at this address, from 1.
    pub number: u64,
    /// Method, in capitals.
    pub method: String,
    /// Path without the query.
    pub path: String,
    /// Query without the question mark.
    pub query: Option<String>,
    /// The `Authorization` header.
    pub authorization: Option<String>,
    /// The body.
    pub body: Bytes,
}

impl RecordedRequest {
    /// The body as JSON; null when it is none.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// Says that the connection ends here, without an answer.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the connection is cut on purpose")]
pub(super) struct Cut;

/// An answer that ends the connection in place of being sent.
pub(super) fn cut_answer() -> Response<Body> {
    let mut answer = Response::new(Body::empty());
    answer.extensions_mut().insert(Cut);
    answer
}

/// Locks a mutex whose holder never leaves a half-done change behind.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a path does: one step after the other, then it is normal again.
#[derive(Default)]
struct Rule {
    steps: VecDeque<Step>,
    /// How often the path was told to behave, for the requests that are held.
    version: u64,
}

struct Step {
    behaviour: Behaviour,
    /// How many requests it still serves; `None` for all.
    left: Option<u64>,
}

/// Requests of one path that are under way.
#[derive(Clone, Copy, Default)]
struct UnderWay {
    now: usize,
    peak: usize,
}

/// A span of time in which the address listens.
struct Era {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// The address.
pub(super) struct Door {
    addr: SocketAddr,
    /// Bound, never listening: it keeps the port while the door is shut.
    _hold: TcpSocket,
    app: Router,
    rules: Mutex<BTreeMap<String, Rule>>,
    /// Sent when a path was told to behave anew.
    told: watch::Sender<()>,
    under_way: Mutex<BTreeMap<String, UnderWay>>,
    recorded: Mutex<VecDeque<RecordedRequest>>,
    /// How many requests came in so far.
    count: watch::Sender<u64>,
    era: tokio::sync::Mutex<Option<Era>>,
    stop: CancellationToken,
}

impl Door {
    /// Takes a free loopback port and listens there until `stop`.
    pub(super) async fn open(app: Router, stop: CancellationToken) -> io::Result<Arc<Self>> {
        let hold = socket_at(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let door = Arc::new(Self {
            addr: hold.local_addr()?,
            _hold: hold,
            app,
            rules: Mutex::default(),
            told: watch::Sender::new(()),
            under_way: Mutex::default(),
            recorded: Mutex::default(),
            count: watch::Sender::new(0),
            era: tokio::sync::Mutex::new(None),
            stop,
        });
        door.start().await?;
        Ok(door)
    }

    /// `http://127.0.0.1:port`.
    pub(super) fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Listens again after [`Door::shut`]; does nothing while it listens.
    pub(super) async fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut era = self.era.lock().await;
        if era.is_some() {
            return Ok(());
        }
        let listener = socket_at(self.addr)?.listen(BACKLOG)?;
        let stop = self.stop.child_token();
        let task = tokio::spawn(accept(Arc::clone(self), listener, stop.clone()));
        *era = Some(Era { stop, task });
        Ok(())
    }

    /// Stops listening and cuts every connection; returns when that is done.
    pub(super) async fn shut(&self) {
        if let Some(era) = self.era.lock().await.take() {
            era.stop.cancel();
            // A task that was cancelled with its runtime has nothing left to close.
            let _ended = era.task.await;
        }
    }

    /// Whether it listens.
    pub(super) async fn is_open(&self) -> bool {
        self.era.lock().await.is_some()
    }

    /// From now on `path` behaves so; `*` stands for every path without a rule of its own.
    pub(super) fn behave(&self, path: &str, behaviour: Behaviour, times: Option<u64>) {
        let normal = behaviour == Behaviour::Normal && times.is_none();
        let step = Step {
            behaviour,
            left: times,
        };
        self.tell(path, (!normal).then_some(step).into_iter().collect());
    }

    /// The next requests to `path` meet one behaviour each, in this order; then it is normal again.
    pub(super) fn behave_in_turn(&self, path: &str, behaviours: Vec<Behaviour>) {
        let steps = behaviours.into_iter().map(|behaviour| Step {
            behaviour,
            left: Some(1),
        });
        self.tell(path, steps.collect());
    }

    fn tell(&self, path: &str, steps: VecDeque<Step>) {
        let mut rules = lock(&self.rules);
        let rule = rules.entry(path.to_owned()).or_default();
        rule.steps = steps;
        rule.version += 1;
        drop(rules);
        self.told.send_replace(());
    }

    /// Most requests to `path` that were under way at the same time.
    pub(super) fn peak(&self, path: &str) -> usize {
        lock(&self.under_way)
            .get(path)
            .map_or(0, |under_way| under_way.peak)
    }

    /// The requests so far, the oldest first.
    pub(super) fn requests(&self) -> Vec<RecordedRequest> {
        lock(&self.recorded).iter().cloned().collect()
    }

    /// Waits until the recorded requests meet `condition`, and returns them.
    pub(super) async fn wait_for(
        &self,
        mut condition: impl FnMut(&[RecordedRequest]) -> bool,
    ) -> Vec<RecordedRequest> {
        let mut count = self.count.subscribe();
        loop {
            count.borrow_and_update();
            let requests = self.requests();
            if condition(&requests) {
                return requests;
            }
            if count.changed().await.is_err() {
                return requests;
            }
        }
    }

    /// What the next request to `path` meets, once nothing holds it any more.
    async fn behaviour(&self, path: &str) -> Behaviour {
        let mut told = self.told.subscribe();
        loop {
            let (behaviour, key, version) = self.next_step(path);
            if behaviour != Behaviour::Hold {
                return behaviour;
            }
            while self.version(&key) == version {
                // The sender lives as long as this door.
                let _told = told.changed().await;
            }
        }
    }

    fn version(&self, key: &str) -> u64 {
        lock(&self.rules).get(key).map_or(0, |rule| rule.version)
    }

    /// The step of the rule for `path`, that rule's name and its version.
    fn next_step(&self, path: &str) -> (Behaviour, String, u64) {
        let mut rules = lock(&self.rules);
        let own = rules.get(path).is_some_and(|rule| !rule.steps.is_empty());
        let key = if own { path } else { "*" };
        let rule = rules.entry(key.to_owned()).or_default();
        let Some(step) = rule.steps.front_mut() else {
            return (Behaviour::Normal, key.to_owned(), rule.version);
        };
        let behaviour = step.behaviour.clone();
        if let Some(left) = &mut step.left {
            *left = left.saturating_sub(1);
            if *left == 0 {
                rule.steps.pop_front();
            }
        }
        (behaviour, key.to_owned(), rule.version)
    }

    fn record(&self, parts: &axum::http::request::Parts, body: &Bytes) {
        let number = *self.count.borrow() + 1;
        let authorization = parts.headers.get(header::AUTHORIZATION);
        let request = RecordedRequest {
            number,
            method: parts.method.to_string(),
            path: parts.uri.path().to_owned(),
            query: parts.uri.query().map(str::to_owned),
            authorization: authorization
                .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()),
            body: body.clone(),
        };
        let mut recorded = lock(&self.recorded);
        if recorded.len() >= RECORDED_MAX {
            recorded.pop_front();
        }
        recorded.push_back(request);
        self.count.send_modify(|count| *count += 1);
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Body>, Cut> {
        let (parts, body) = request.into_parts();
        let Ok(body) = Limited::new(body, BODY_BYTES_MAX).collect().await else {
            return Ok(plain(StatusCode::PAYLOAD_TOO_LARGE, Body::empty()));
        };
        let body = body.to_bytes();
        let _under_way = Counted::enter(self, parts.uri.path());
        self.record(&parts, &body);
        let behaviour = self.behaviour(parts.uri.path()).await;
        let request = Request::from_parts(parts, Body::from(body));
        match behaviour {
            // Nothing holds a request any more when it comes here.
            Behaviour::Normal | Behaviour::Hold => self.normal(request).await,
            Behaviour::Slow(delay) => {
                tokio::time::sleep(delay).await;
                self.normal(request).await
            }
            Behaviour::Status(status, text) => {
                let status =
                    StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                Ok(plain(status, Body::from(text)))
            }
            Behaviour::Hang => std::future::pending().await,
            Behaviour::Cut => Err(Cut),
            Behaviour::CutMidBody => half(self.normal(request).await?).await,
            Behaviour::Redirect(to) => Ok(redirect(&to)),
            Behaviour::Raw(bytes) => Ok(plain(StatusCode::OK, Body::from(bytes))),
            Behaviour::Huge(bytes) => Ok(plain(StatusCode::OK, spaces(Some(bytes)))),
            Behaviour::Endless => Ok(plain(StatusCode::OK, spaces(None))),
        }
    }

    async fn normal(&self, request: Request<Body>) -> Result<Response<Body>, Cut> {
        let answer = match self.app.clone().oneshot(request).await {
            Ok(answer) => answer,
            Err(never) => match never {},
        };
        if answer.extensions().get::<Cut>().is_some() {
            return Err(Cut);
        }
        Ok(answer)
    }
}

/// Counts a request as under way until it is answered or its client left.
struct Counted<'a> {
    door: &'a Door,
    path: String,
}

impl<'a> Counted<'a> {
    fn enter(door: &'a Door, path: &str) -> Self {
        let mut all = lock(&door.under_way);
        let under_way = all.entry(path.to_owned()).or_default();
        under_way.now += 1;
        under_way.peak = under_way.peak.max(under_way.now);
        drop(all);
        Self {
            door,
            path: path.to_owned(),
        }
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if let Some(under_way) = lock(&self.door.under_way).get_mut(&self.path) {
            under_way.now -= 1;
        }
    }
}

/// A socket bound to `addr`. The port may be shared with other sockets of this module only: plain
/// address reuse would let a stranger take the port while nobody listens.
fn socket_at(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    #[cfg(unix)]
    socket.set_reuseport(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

async fn accept(door: Arc<Door>, listener: TcpListener, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_ended) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _peer)) => {
                    connections.spawn(serve(Arc::clone(&door), stream));
                }
                // Out of descriptors, or a peer that left already: leave the others a turn.
                Err(_refused) => tokio::task::yield_now().await,
            },
        }
    }
    drop(listener);
    connections.shutdown().await;
}

async fn serve(door: Arc<Door>, stream: TcpStream) {
    let service = hyper::service::service_fn(move |request| {
        let door = Arc::clone(&door);
        async move { door.answer(request).await }
    });
    let connection =
        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    // Peers that leave and connections cut on purpose end here; neither is news.
    let _ended = connection.await;
}

fn plain(status: StatusCode, body: Body) -> Response<Body> {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer
}

fn redirect(to: &str) -> Response<Body> {
    let mut answer = plain(StatusCode::TEMPORARY_REDIRECT, Body::empty());
    if let Ok(to) = HeaderValue::from_str(to) {
        answer.headers_mut().insert(header::LOCATION, to);
    }
    answer
}

/// The head and the first half of an answer, then the end of the connection.
async fn half(answer: Response<Body>) -> Result<Response<Body>, Cut> {
    let (mut parts, body) = answer.into_parts();
    let whole = body.collect().await.map_err(|_broken| Cut)?.to_bytes();
    let first = whole.slice(..whole.len() / 2);
    let length = HeaderValue::from(whole.len().max(1));
    parts.headers.insert(header::CONTENT_LENGTH, length);
    let pieces = stream::unfold(Some(first), |first| async move {
        match first {
            Some(first) => Some((Ok(first), None)),
            None => {
                // The first half leaves before the connection does.
                tokio::task::yield_now().await;
                Some((Err(Cut), None))
            }
        }
    });
    Ok(Response::from_parts(parts, Body::from_stream(pieces)))
}

fn spaces(bytes: Option<u64>) -> Body {
    let piece = Bytes::from(vec![b' '; PIECE_BYTES]);
    let pieces = stream::unfold(bytes, move |left| {
        let piece = piece.clone();
        async move {
            let size = match left {
                Some(0) => return None,
                Some(left) => usize::try_from(left).unwrap_or(usize::MAX).min(PIECE_BYTES),
                None => PIECE_BYTES,
            };
            let left = left.map(|left| left.saturating_sub(size as u64));
            Some((Ok::<_, Infallible>(piece.slice(..size)), left))
        }
    });
    Body::from_stream(pieces)
}

#[cfg(test)]
mod tests {
    use axum::routing::get;

    use super::super::http_client;
    use super::*;

    async fn door() -> (Arc<Door>, tokio_util::sync::DropGuard) {
        let stop = CancellationToken::new();
        let guard = stop.clone().drop_guard();
        let app = Router::new().route("/a", get(|| async { "a long enough answer" }));
        (Door::open(app, stop).await.unwrap(), guard)
    }

    async fn ask(door: &Door) -> reqwest::Result<reqwest::Response> {
        let url = format!("{}/a?x=1", door.url());
        http_client().unwrap().get(url).send().await
    }

    #[tokio::test]
    async fn behaves_as_told_and_records_what_came() {
        let (door, _guard) = door().await;
        assert_eq!(ask(&door).await.unwrap().text().await.unwrap().len(), 20);

        door.behave("*", Behaviour::Status(418, "tea".into()), None);
        assert_eq!(ask(&door).await.unwrap().status(), 418);
        door.behave("/a", Behaviour::Redirect("http://x/".into()), Some(1));
        let answer = ask(&door).await.unwrap();
        assert_eq!(answer.status(), 307);
        assert_eq!(answer.headers()["location"], "http://x/");
        assert_eq!(ask(&door).await.unwrap().status(), 418, "once is over");
        door.behave("*", Behaviour::Normal, None);

        door.behave("/a", Behaviour::Cut, None);
        assert!(ask(&door).await.is_err());
        door.behave("/a", Behaviour::CutMidBody, None);
        let answer = ask(&door).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert!(answer.bytes().await.is_err(), "the body breaks off");
        door.behave("/a", Behaviour::Raw(b"raw".to_vec()), None);
        assert_eq!(ask(&door).await.unwrap().text().await.unwrap(), "raw");
        door.behave("/a", Behaviour::Huge(100_000), None);
        let huge = ask(&door).await.unwrap().bytes().await.unwrap();
        assert_eq!(huge.len(), 100_000);
        door.behave("/a", Behaviour::Slow(Duration::from_millis(1)), None);
        assert_eq!(ask(&door).await.unwrap().status(), 200);

        door.behave("/a", Behaviour::Endless, None);
        let mut endless = ask(&door).await.unwrap();
        let mut read = 0;
        while read < 1 << 20 {
            read += endless.chunk().await.unwrap().unwrap().len();
        }
        drop(endless);

        let requests = door.requests();
        assert_eq!(requests[0].number, 1);
        assert_eq!(requests[0].path, "/a");
        assert_eq!(requests[0].query.as_deref(), Some("x=1"));
        assert_eq!(requests.len(), 10);
    }

    #[tokio::test]
    async fn a_hanging_request_is_seen_and_cut_by_the_end() {
        let (door, guard) = door().await;
        door.behave("/a", Behaviour::Hang, None);
        let call = {
            let door = Arc::clone(&door);
            tokio::spawn(async move { ask(&door).await.is_err() })
        };
        door.wait_for(|requests| requests.len() == 1).await;
        drop(guard);
        assert!(call.await.unwrap(), "the end of the fleet cuts it");
    }

    #[tokio::test]
    async fn a_script_is_met_in_turn_and_then_it_is_normal() {
        let (door, _guard) = door().await;
        let busy = Behaviour::Status(503, String::new());
        door.behave_in_turn("/a", vec![busy, Behaviour::Cut, Behaviour::Normal]);
        assert_eq!(ask(&door).await.unwrap().status(), 503);
        assert!(ask(&door).await.is_err());
        for _ in 0..2 {
            assert_eq!(ask(&door).await.unwrap().status(), 200);
        }
    }

    #[tokio::test]
    async fn a_held_request_is_served_by_what_is_told_next() {
        let (door, _guard) = door().await;
        door.behave("/a", Behaviour::Hold, Some(2));
        let calls: Vec<_> = (0..2)
            .map(|_| {
                let door = Arc::clone(&door);
                tokio::spawn(async move { ask(&door).await.unwrap().status() })
            })
            .collect();
        door.wait_for(|requests| requests.len() == 2).await;
        assert_eq!(ask(&door).await.unwrap().status(), 200, "only two are held");
        assert_eq!(door.peak("/a"), 3);
        door.behave("/b", Behaviour::Hang, None);
        door.behave("/a", Behaviour::Status(404, String::new()), Some(2));
        for call in calls {
            assert_eq!(call.await.unwrap(), 404);
        }
        assert_eq!((door.peak("/a"), door.peak("/b")), (3, 0));
    }

    #[tokio::test]
    async fn a_shut_door_refuses_and_opens_at_the_same_port() {
        let (door, _guard) = door().await;
        let url = door.url();
        for _ in 0..3 {
            assert_eq!(ask(&door).await.unwrap().status(), 200);
            door.shut().await;
            assert!(ask(&door).await.unwrap_err().is_connect());
            door.start().await.unwrap();
            assert_eq!(door.url(), url);
        }
        door.start().await.unwrap();
        assert_eq!(ask(&door).await.unwrap().status(), 200);
    }
}
