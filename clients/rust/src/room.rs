//! Where waiting tickets stand.
//!
//! Few tickets ask again each by itself. From a number on they share calls of `/v1/wait`, so that thousands of waiters
//! need a handful of connections. Either way a call is open for each of them nearly all the time, which is what keeps
//! its place. While the gate is away they ask again with a growing pause, each until its grace or its hard bound has
//! ended.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvgate_api::{AcquireRequest, WaitRequest};
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

use crate::answer::{WaitTimes, text, time};
use crate::client::Shared;
use crate::fail_open::{Pause, Place, lock};
use crate::wire::{Call, Reply, Trouble};

/// Tickets of one shared call. A decision for one makes the others ask again, so a call is kept small.
const SEATS_MAX: usize = 128;
/// How long tickets that come one by one gather before they share a call.
const GATHER: Duration = Duration::from_millis(5);
/// Small shared calls end together at this beat, so that they merge.
const BEAT: Duration = Duration::from_secs(1);
/// A shared call of fewer tickets is small.
const SMALL: usize = 32;
/// Shortest rest when the gate answers before its time, whatever it says.
const REST_MIN: Duration = Duration::from_millis(100);

/// What became of a waiting ticket.
#[derive(Clone, PartialEq, Debug)]
pub enum News {
    /// A decision, `wait` once more, or a refusal.
    Reply(Reply),
    /// The gate does not know the ticket any more: it is to be acquired again.
    Unknown,
    /// Nothing was heard for too long: the caller goes on by itself.
    GoOn,
}

/// A ticket that waits.
#[derive(Debug)]
pub struct Seat {
    ticket_id: String,
    place: Mutex<Place>,
    news: Mutex<Option<oneshot::Sender<News>>>,
}

impl Seat {
    pub fn new(ticket_id: &str, now: Instant) -> Arc<Self> {
        Arc::new(Self {
            ticket_id: ticket_id.to_owned(),
            place: Mutex::new(Place::new(now)),
            news: Mutex::default(),
        })
    }

    pub fn told(&self, now: Instant, times: WaitTimes) {
        lock(&self.place).told(now, times);
    }

    pub fn grace_ends_at(&self) -> Instant {
        lock(&self.place).grace_ends_at()
    }

    pub fn bound_at(&self) -> Instant {
        lock(&self.place).bound_at()
    }

    fn tell(&self, news: News) {
        if let Some(sender) = lock(&self.news).take() {
            // Its caller may have left.
            let _ = sender.send(news);
        }
    }

    fn waits(&self) -> bool {
        lock(&self.news)
            .as_ref()
            .is_some_and(|sender| !sender.is_closed())
    }
}

/// The waiting tickets of one gate object.
#[derive(Debug)]
pub struct Room {
    shared: Arc<Shared>,
    began: Instant,
    waiting: AtomicUsize,
    idle: Mutex<Idle>,
    /// The gate takes no shared calls: each ticket asks by itself.
    is_unshared: AtomicBool,
}

/// Tickets that are in no shared call at the moment.
#[derive(Debug, Default)]
struct Idle {
    seats: Vec<Arc<Seat>>,
    is_gathering: bool,
}

/// Counts a ticket for as long as it waits, however its wait ends.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Room {
    pub fn new(shared: Arc<Shared>) -> Arc<Self> {
        Arc::new(Self {
            shared,
            began: Instant::now(),
            waiting: AtomicUsize::new(0),
            idle: Mutex::default(),
            is_unshared: AtomicBool::new(false),
        })
    }

    /// Waits for news of a ticket.
    pub async fn attend(self: &Arc<Self>, seat: &Arc<Seat>, request: &AcquireRequest) -> News {
        let waiting = self.waiting.fetch_add(1, Ordering::AcqRel) + 1;
        let _counted = Counted(&self.waiting);
        let share_from = self.shared.config.wait_calls_from;
        if waiting < share_from || self.is_unshared.load(Ordering::Acquire) {
            return self.ask_alone(seat, request).await;
        }
        self.ask_together(seat).await
    }

    // ---- one ticket, one call -----------------------------------------------------------------------------------

    async fn ask_alone(&self, seat: &Seat, request: &AcquireRequest) -> News {
        let config = &self.shared.config;
        let mut pause = Pause::of_place();
        loop {
            let asked_at = Instant::now();
            let bound_at = seat.bound_at();
            let window = config.window.min(bound_at.duration_since(asked_at));
            let body = AcquireRequest {
                wait_s: Some(window.as_secs_f64()),
                ..request.clone()
            };
            let ends_at = (asked_at + window + config.call_timeout).min(bound_at);
            let call = Call::post("/v1/leases".to_owned(), &body);
            let reply = self.shared.wire.call_once(&call, ends_at).await;
            self.shared.note(&reply, 1);
            if !reply.fails_over() {
                if let (Some(202), Some(body)) = (reply.status(), reply.good()) {
                    let rest = time(body, "poll_after_s").unwrap_or(BEAT);
                    self.rest(asked_at, window, rest).await;
                }
                return News::Reply(reply);
            }
            let pause = pause.next(&self.shared.dice);
            if !bear(&reply, std::slice::from_ref(&seat), pause).await {
                return News::GoOn;
            }
        }
    }

    // ---- many tickets, one call ---------------------------------------------------------------------------------

    async fn ask_together(self: &Arc<Self>, seat: &Arc<Seat>) -> News {
        let (sender, news) = oneshot::channel();
        *lock(&seat.news) = Some(sender);
        self.join(std::iter::once(Arc::clone(seat)));
        match timeout_at(seat.bound_at(), news).await {
            Ok(Ok(news)) => news,
            Ok(Err(_)) | Err(_) => News::GoOn,
        }
    }

    fn join(self: &Arc<Self>, seats: impl Iterator<Item = Arc<Seat>>) {
        let mut idle = lock(&self.idle);
        idle.seats.extend(seats);
        if !idle.seats.is_empty() && !idle.is_gathering {
            idle.is_gathering = true;
            let room = Arc::clone(self);
            self.shared.handle.spawn(async move {
                sleep(GATHER).await;
                room.seat_all();
            });
        }
    }

    fn seat_all(self: &Arc<Self>) {
        let mut idle = lock(&self.idle);
        idle.is_gathering = false;
        let mut seats = std::mem::take(&mut idle.seats);
        drop(idle);
        seats.retain(|seat| seat.waits());
        for bunch in seats.chunks(SEATS_MAX) {
            let share = Arc::clone(self).share(bunch.to_vec());
            self.shared.handle.spawn(share);
        }
    }

    /// Keeps one shared call open for some tickets, until few are left to be worth a call of their own.
    async fn share(self: Arc<Self>, mut seats: Vec<Arc<Seat>>) {
        let mut pause = Pause::of_place();
        loop {
            seats.retain(|seat| seat.waits());
            if seats.is_empty() {
                return;
            }
            let asked_at = Instant::now();
            let window = self.window_of(seats.len(), asked_at);
            let body = WaitRequest {
                ticket_ids: seats.iter().map(|seat| seat.ticket_id.clone()).collect(),
                wait_s: Some(window.as_secs_f64()),
            };
            let ends_at = asked_at + window + self.shared.config.call_timeout;
            let call = Call::post("/v1/wait".to_owned(), &body);
            let mut reply = self.shared.wire.call_once(&call, ends_at).await;
            if reply.good().is_some_and(|body| results(body).is_none()) {
                reply = Reply::Silent(Trouble::Garbage);
            }
            self.shared.note(&reply, 1);
            if reply.fails_over() {
                let pause = pause.next(&self.shared.dice);
                if !bear(&reply, &seats, pause).await {
                    return;
                }
                continue;
            }
            pause.reset();
            let Some(body) = reply.good() else {
                if matches!(reply.status(), Some(404 | 405)) {
                    self.unshare(&reply);
                }
                // Each asks by itself, and hears whether that is refused as well.
                for seat in &seats {
                    seat.tell(News::Unknown);
                }
                return;
            };
            if !hand_out(body, &seats) {
                self.rest(asked_at, window, BEAT).await;
            }
            if seats.len() < SMALL {
                self.join(seats.into_iter().filter(|seat| seat.waits()));
                return;
            }
        }
    }

    /// Where one shared call leads nowhere, the next does as well.
    fn unshare(&self, reply: &Reply) {
        self.is_unshared.store(true, Ordering::Release);
        self.shared.warnings.warn(
            "wait",
            format_args!(
                "the gate takes no shared waiting calls, each ticket asks by itself: {reply}"
            ),
        );
    }

    fn window_of(&self, seats: usize, now: Instant) -> Duration {
        let window = self.shared.config.window;
        if seats >= SMALL {
            // Not all at the same time.
            return self.shared.dice.part_of(window, 0.75);
        }
        let since = now.duration_since(self.began).as_secs_f64() / BEAT.as_secs_f64();
        let beats = (since + 0.2).ceil() - since;
        window.min(BEAT.mul_f64(beats.max(0.0)))
    }

    /// A gate with too many open calls says `wait` at once. Then it is not asked again at once.
    async fn rest(&self, asked_at: Instant, window: Duration, rest: Duration) {
        let took = asked_at.elapsed();
        if took < window / 2 {
            let rest = self.shared.dice.jittered(rest.max(REST_MIN));
            sleep(rest.min(window.saturating_sub(took))).await;
        }
    }
}

fn results(body: &Value) -> Option<&Vec<Value>> {
    body.get("results")?.as_array()
}

/// Tells the decided ones; whether there were any.
fn hand_out(body: &Value, seats: &[Arc<Seat>]) -> bool {
    let now = Instant::now();
    let mut by_ticket: BTreeMap<&str, &Arc<Seat>> = BTreeMap::new();
    for seat in seats {
        lock(&seat.place).heard(now);
        by_ticket.insert(&seat.ticket_id, seat);
    }
    let mut told = false;
    for result in results(body).map(Vec::as_slice).unwrap_or_default() {
        if let Some(seat) = by_ticket.remove(text(result, "ticket_id")) {
            told = true;
            seat.tell(match text(result, "action") {
                "unknown" => News::Unknown,
                _ => News::Reply(Reply::Answer {
                    status: 200,
                    body: result.clone(),
                }),
            });
        }
    }
    told
}

/// Pauses before the next attempt. Tells those whose time is over to go on; false when all are told.
async fn bear<S: AsRef<Seat>>(reply: &Reply, seats: &[S], pause: Duration) -> bool {
    let now = Instant::now();
    if *reply == Reply::Silent(Trouble::Cut) {
        for seat in seats {
            lock(&seat.as_ref().place).cut(now);
        }
    }
    let ends = seats.iter().map(|seat| seat.as_ref().grace_ends_at());
    if let Some(next_end) = ends.filter(|end| *end > now).min() {
        sleep(pause.min(next_end.duration_since(now))).await;
    }
    let now = Instant::now();
    let mut left = false;
    for seat in seats {
        if seat.as_ref().grace_ends_at() <= now {
            seat.as_ref().tell(News::GoOn);
        } else {
            left = true;
        }
    }
    left
}

impl AsRef<Self> for Seat {
    fn as_ref(&self) -> &Self {
        self
    }
}
