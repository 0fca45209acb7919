//! Whether an answer arrived (TIC4), and what a connection is doing.
//!
//! ```text
//!  handler ── Receipts on the answer ──> Tracked body ── at its end ──> Tracker ── after the flush ──> written()
//!                                            └ dropped before: undelivered      └ dropped before: undelivered
//! ```
//!
//! hyper flushes the socket only when its own buffer is empty. So a flush that succeeds after the
//! body of an answer has ended means that every byte of it was handed to an open socket.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::Response;
use futures_util::task::AtomicWaker;
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::listener::Stream;
use crate::gate::Receipt;

/// Receipts on their way from a handler to the connection, as an extension of the answer.
#[derive(Clone, Debug)]
pub(super) struct Receipts(Arc<Mutex<Vec<Receipt>>>);

impl Receipts {
    pub(super) fn new(receipts: impl IntoIterator<Item = Receipt>) -> Self {
        Self(Arc::new(Mutex::new(receipts.into_iter().collect())))
    }

    fn take(&self) -> Vec<Receipt> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What a connection is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Nothing was sent since it was opened or since the last answer.
    Silent,
    /// A request head has begun.
    Head,
    /// The body of a request is on its way.
    Body,
    /// A request is being served.
    Busy,
    /// An answer is being written.
    Writing,
}

/// What is known of one connection, shared by its socket, its service and its watchdog.
#[derive(Debug)]
pub(super) struct Tracker {
    state: Mutex<State>,
    /// Whether it is worth looking why the connection might end.
    may_end: AtomicBool,
    ends: AtomicWaker,
}

/// How a connection is to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    /// After the answer that is under way.
    Orderly,
    /// Now.
    Cut,
}

#[derive(Debug)]
struct State {
    stage: Stage,
    since: Instant,
    /// Receipts of the answer whose body has ended but which was not flushed yet.
    due: Vec<Receipt>,
    body_ended: bool,
    answered: bool,
    /// The answer that is being written: since when, and its bytes.
    answer: Option<(Instant, u64)>,
    /// What it did, and since when, when it was chosen to end.
    chosen: Option<(Stage, Instant)>,
    /// How the service ends it, which stops.
    stops: Option<Ending>,
}

impl Tracker {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                stage: Stage::Silent,
                since: Instant::now(),
                due: Vec::new(),
                body_ended: false,
                answered: false,
                answer: None,
                chosen: None,
                stops: None,
            }),
            may_end: AtomicBool::new(false),
            ends: AtomicWaker::new(),
        })
    }

    fn with<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What it is doing, since when, and whether it was ever answered.
    pub(super) fn stage(&self) -> (Stage, Instant, bool) {
        self.with(|state| (state.stage, state.since, state.answered))
    }

    /// Tells the connection to end if it still does what it was seen doing, and since when: a request
    /// that came in meanwhile is served.
    pub(super) fn shed(&self, stage: Stage, since: Instant) {
        self.with(|state| state.chosen = Some((stage, since)));
        self.look_whether_to_end();
    }

    /// Tells the connection that the service stops.
    pub(super) fn stop(&self, ending: Ending) {
        self.with(|state| state.stops = Some(ending));
        self.look_whether_to_end();
    }

    fn look_whether_to_end(&self) {
        self.may_end.store(true, Ordering::Release);
        self.ends.wake();
    }

    /// Returns when the connection is to end; one that is `ending` in order is to be cut only.
    ///
    /// All that may end a connection is in its own tracker: each of its polls asks for it, and one signal for all
    /// connections is a lock that they share.
    pub(super) fn is_to_end(&self, ending: bool) -> impl Future<Output = Ending> {
        poll_fn(move |context| {
            self.ends.register(context.waker());
            if !self.may_end.load(Ordering::Acquire) {
                return Poll::Pending;
            }
            self.with(|state| match state.stops {
                _ if state.chosen == Some((state.stage, state.since)) => Poll::Ready(Ending::Cut),
                Some(Ending::Cut) => Poll::Ready(Ending::Cut),
                Some(Ending::Orderly) if !ending => Poll::Ready(Ending::Orderly),
                Some(Ending::Orderly) | None => Poll::Pending,
            })
        })
    }

    /// TLS is agreed on: the head of the first request has its time from here on.
    pub(super) fn opened(&self) {
        self.with(|state| state.go(Stage::Silent));
    }

    /// A head was read. The request is served from here on, while its body may still be on its way.
    pub(super) fn begin(self: &Arc<Self>, body: Incoming) -> Arriving {
        let has_arrived = body.is_end_stream();
        let stage = match has_arrived {
            true => Stage::Busy,
            false => Stage::Body,
        };
        self.with(|state| state.go(stage));
        Arriving {
            body,
            tracker: (!has_arrived).then(|| Arc::clone(self)),
        }
    }

    /// The body of the request was read whole, or nobody wants it.
    fn body_arrived(&self) {
        self.with(|state| {
            if state.stage == Stage::Body {
                state.go(Stage::Busy);
            }
        });
    }

    /// The answer that is being written: since when, and its bytes.
    pub(super) fn answer(&self) -> Option<(Instant, u64)> {
        self.with(|state| state.answer)
    }

    fn bytes_read(&self) {
        self.with(|state| {
            if state.stage == Stage::Silent {
                state.go(Stage::Head);
            }
        });
    }

    /// Bytes were taken by the socket. The clock of a stalled answer begins anew with each of them.
    fn bytes_written(&self) {
        self.with(|state| {
            if state.stage == Stage::Writing {
                state.since = Instant::now();
            }
        });
    }

    fn body_ended(&self, receipts: Vec<Receipt>) {
        self.with(|state| {
            state.due.extend(receipts);
            state.body_ended = true;
        });
    }

    /// All that was to be written is with the operating system.
    fn flushed(&self) {
        let due = self.with(|state| {
            if !state.body_ended {
                return Vec::new();
            }
            state.body_ended = false;
            state.answered = true;
            // A request that was sent ahead may be served already.
            if state.stage == Stage::Writing {
                state.answer = None;
                state.go(Stage::Silent);
            }
            std::mem::take(&mut state.due)
        });
        Receipt::all_written(due);
    }

    /// The answer with a body that reports its end.
    pub(super) fn track(self: &Arc<Self>, mut response: Response) -> Response<Tracked> {
        let bytes = response.body().size_hint().lower();
        self.with(|state| {
            state.go(Stage::Writing);
            state.answer = Some((state.since, bytes));
        });
        let receipts = response
            .extensions_mut()
            .remove::<Receipts>()
            .map(|receipts| receipts.take())
            .unwrap_or_default();
        response.map(|body| Tracked {
            body,
            receipts,
            tracker: Some(Arc::clone(self)),
        })
    }

    /// What is left when the connection has ended arrived nowhere.
    pub(super) fn ended(&self) {
        drop(self.with(|state| std::mem::take(&mut state.due)));
    }
}

impl State {
    fn go(&mut self, stage: Stage) {
        self.stage = stage;
        self.since = Instant::now();
    }
}

/// The body of a request, which tells when it has arrived.
#[derive(Debug)]
pub(super) struct Arriving {
    body: Incoming,
    /// `None` once it was told.
    tracker: Option<Arc<Tracker>>,
}

impl Arriving {
    fn arrived(&mut self) {
        if let Some(tracker) = self.tracker.take() {
            tracker.body_arrived();
        }
    }
}

impl http_body::Body for Arriving {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.arrived();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.arrived();
    }
}

/// A body that hands its receipts on when it has ended. Dropped before, they are undelivered.
#[derive(Debug)]
pub(super) struct Tracked {
    body: Body,
    receipts: Vec<Receipt>,
    /// `None` once the end was reported.
    tracker: Option<Arc<Tracker>>,
}

impl Tracked {
    fn end(&mut self) {
        if let Some(tracker) = self.tracker.take() {
            tracker.body_ended(std::mem::take(&mut self.receipts));
        }
    }
}

impl http_body::Body for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        match &frame {
            // hyper asks no further when the body says that this was its last frame.
            Some(Ok(_)) if self.body.is_end_stream() => self.end(),
            None => self.end(),
            Some(_) => {}
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Tracked {
    /// A body that is not polled to its end (to a HEAD, or an empty one) has no more to write; what
    /// it carried did not arrive.
    fn drop(&mut self) {
        self.receipts.clear();
        self.end();
    }
}

/// Makes the whole answer to a request that never reached the router, from the status that hyper
/// chose for it.
pub(super) type Refusal = Box<dyn Fn(&[u8]) -> Vec<u8> + Send + Sync>;

/// The socket of one connection.
pub(super) struct Socket {
    stream: Box<dyn Stream>,
    tracker: Arc<Tracker>,
    refusal: Refusal,
    /// Written in place of hyper's own words about a request that it could not read.
    instead: Vec<u8>,
}

impl Socket {
    pub(super) fn new(stream: Box<dyn Stream>, tracker: Arc<Tracker>, refusal: Refusal) -> Self {
        Self {
            stream,
            tracker,
            refusal,
            instead: Vec::new(),
        }
    }

    fn wrote(&self, result: io::Result<usize>) -> io::Result<usize> {
        if matches!(result, Ok(count) if count > 0) {
            self.tracker.bytes_written();
        }
        result
    }

    /// hyper answers a request that it cannot read by itself and without a body. No answer of ours is
    /// under way then, so the problem is written in its place.
    fn replaces(&mut self, head: &[u8]) -> bool {
        let (stage, ..) = self.tracker.stage();
        let by_hyper = matches!(stage, Stage::Silent | Stage::Head);
        if by_hyper && self.instead.is_empty() && !head.is_empty() {
            self.instead = (self.refusal)(head);
        }
        by_hyper
    }

    fn poll_instead(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.instead.is_empty() {
            let count = ready!(Pin::new(&mut self.stream).poll_write(context, &self.instead))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.instead.drain(..count);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        if buffer.filled().len() > before {
            self.tracker.bytes_read();
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.replaces(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        let result = ready!(Pin::new(&mut self.stream).poll_write(context, bytes));
        Poll::Ready(self.wrote(result))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let head = parts.iter().find(|part| !part.is_empty());
        if self.replaces(head.map_or(&[], |part| part)) {
            return Poll::Ready(Ok(parts.iter().map(|part| part.len()).sum()));
        }
        let result = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, parts));
        Poll::Ready(self.wrote(result))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(context))?;
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        self.tracker.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// How long a connection may stay in a stage; `None` means for as long as it likes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) head: Duration,
    pub(super) idle: Duration,
    pub(super) stalled: Duration,
}

impl Patience {
    /// When a connection is given up unless something happens. A fresh connection has as long as a
    /// head may take: it was opened to send one.
    pub(super) fn deadline(&self, tracker: &Tracker) -> Option<Instant> {
        let (stage, since, answered) = tracker.stage();
        let patience = match stage {
            Stage::Silent if answered => self.idle,
            Stage::Silent | Stage::Head => self.head,
            Stage::Writing => self.stalled,
            // The gate bounds how long a call stays open, and a body has its own time-out.
            Stage::Body | Stage::Busy => return None,
        };
        Some(since + patience)
    }
}
