//! The writer: the one owner of the core and the store.
//!
//! It takes everything that stands in its inbox, runs it as one turn, makes the turn durable in
//! one transaction, publishes the view and only then answers. Between two turns it lies on a desk, so
//! that its own thread or a caller that is alone can do the next one.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use kvgate_core::batch::{Committed, Failed};
use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{CloseIntent, EngineCall};
use kvgate_core::command::Command;
use kvgate_core::effect::{Effect, Reply, Tag};
use kvgate_core::ids::{CloseId, TicketId};
use kvgate_core::machine::{Machine, StartParams};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::{PAUSE_AFTER, Policy};
use kvgate_core::store::{Image, Opened, StoreControl};
use kvgate_core::units::Timestamp;
use kvgate_core::view::View;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};

use super::closings::Closings;
use super::inbox::{Bed, Messages, inbox};
use super::news::{self, News};
use super::outage::{Kept, Outage};
use super::record::{Recorder, Taking};
use super::stats::CommitStats;
use super::waiters::{AcquireSender, SlotId, Waiters};
use super::{Gate, GateError, Inner, Message, Phase, Replied, Sender, StoreTrouble, Taken, Watch};
use crate::clock::Clock;
use crate::telemetry::{Repeats, Trouble};

/// Commands of one turn. Beyond that the rest is the next turn, so that no answer waits for an
/// endless one.
const TURN_MAX: usize = 4_096;

/// Longest sleep between two turns: a gap above a second would look like a pause (TIM3).
const TICK: Duration = Duration::from_millis(200);

/// After a pause (TIM3), what callers sent meanwhile stands in their sockets and comes in within moments,
/// which a reading round could outrun. The first turn waits until nothing has come in for so long,
const SETTLED_AFTER: Duration = Duration::from_millis(100);
/// and at most this long.
const SETTLED_WITHIN: Duration = Duration::from_secs(1);

/// How often the store's size is looked at.
const SIZE_EVERY: Duration = Duration::from_secs(1);

/// First wait before a failed store is opened again; doubles up to [`REOPEN_MAX`].
const REOPEN_MIN: Duration = Duration::from_millis(100);
const REOPEN_MAX: Duration = Duration::from_secs(5);

/// A disk that fails again right after each opening fails many times a second.
static STORE_FAILED: Repeats = Repeats::new("the store failed");

/// What the writer needs besides a store.
#[derive(Debug)]
pub struct WriterConfig {
    /// Settings as they are configured, validated. What was set over them at run time is in the store.
    pub policy: Policy,
    /// Whatever was set at run time is as configured again from the first opening on.
    pub reset_settings: bool,
    /// Where members come from.
    pub fleet: FleetConfig,
    /// Random numbers: one for the lease ids of this start, one for hash tables.
    pub salts: fn() -> u64,
    /// Who is told of every turn; nobody but tests wants that.
    pub recorder: Option<Box<dyn Recorder>>,
}

/// Tells how the first opening of the store went; the process ends on an error.
pub type FirstOpen<E> = oneshot::Receiver<Result<(), E>>;

/// Starts the writer thread. `open` is called for the first opening and again whenever the store
/// failed; the returned receiver tells how the first one went.
///
/// # Errors
/// When the operating system gives no thread.
pub fn spawn<S, O>(
    config: WriterConfig,
    clock: Clock,
    open: O,
) -> std::io::Result<(Gate, FirstOpen<S::OpenError>)>
where
    S: StoreControl + Send + 'static,
    S::Error: fmt::Display,
    O: FnMut() -> Result<Opened<S>, S::OpenError> + Send + 'static,
{
    let (inbox, messages, bed) = inbox();
    let (first_open, opened) = oneshot::channel();
    let (view_sender, view) = watch::channel(Arc::new(empty_view(&config, clock.now())));
    let (phase, _) = watch::channel(Phase::Starting);
    let (trouble, _) = watch::channel(StoreTrouble::default());
    let stats = CommitStats::default();
    let (calls_out, calls) = unbounded_channel();
    let desk = Arc::new(Mutex::new(None));
    let turns: Arc<dyn Turns> = desk.clone();
    let inner = Arc::new(Inner {
        inbox,
        turns,
        inbox_len: AtomicUsize::new(0),
        next_slot: AtomicU64::new(1),
        waiting_calls: AtomicUsize::new(0),
        view,
        line: OnceLock::new(),
        phase,
        trouble,
        stats: stats.clone(),
        calls: Mutex::new(Some(calls)),
    });
    let gate = Gate {
        inner: Arc::clone(&inner),
    };
    let writer = Writer {
        config,
        clock,
        turned_at: clock.now(),
        open,
        messages,
        // Weak: when the last handle is dropped the inbox closes and the thread ends.
        shared: Arc::downgrade(&inner),
        view: view_sender,
        stats,
        size_due: Instant::now(),
        news: News::default(),
        waiters: Waiters::default(),
        closings: Closings::default(),
        calls: calls_out,
        late_ends: Vec::new(),
        outage: Outage::default(),
        kept: Kept::default(),
        at_stake: Vec::new(),
        bypasses_new: false,
        recovering: false,
        draining: false,
        reattach: Vec::new(),
        waited_for: Vec::new(),
        loaded: None,
    };
    std::thread::Builder::new()
        .name("kvgate-writer".to_owned())
        .spawn(move || writer.run(first_open, &desk, &bed))?;
    Ok((gate, opened))
}

/// The picture before the store is loaded.
fn empty_view(config: &WriterConfig, now: Timestamp) -> View {
    let params = StartParams {
        now,
        salt: 0,
        seed: 0,
        policy: config.policy.clone(),
        reset_settings: false,
        fleet: config.fleet.clone(),
    };
    let Ok(committed) =
        Machine::restore(Image::default(), params).commit(&mut MemoryStore::default());
    committed.machine.view()
}

/// Who waits for the answer to a command of the turn.
enum Answerer {
    /// The caller of the command.
    One(oneshot::Sender<Replied>),
    /// One of the commands of one caller: all answers together.
    Group {
        group: usize,
        index: usize,
    },
    Acquire {
        slot: SlotId,
        ticket: TicketId,
        reply: AcquireSender,
    },
    Watch {
        slot: SlotId,
        reply: Sender<Watch>,
    },
    Leave(SlotId),
    /// Whoever waits until a close is done.
    CloseDone(oneshot::Sender<CloseIntent>),
    Reloaded(TicketId),
    Nobody,
}

/// Answers of one caller's commands as they come in.
struct Group {
    replies: Vec<Option<Replied>>,
    reply: oneshot::Sender<Vec<Replied>>,
}

/// The core with its store.
struct Loaded<S> {
    machine: Box<Machine>,
    store: S,
}

/// What comes after a turn.
enum Next {
    /// Another one, when something comes in or after this time.
    Turn(Duration),
    /// The store failed and took the core with it.
    Reopen,
    /// Nothing: an orderly stop, or no handle is left.
    Stop,
}

/// Where the writer lies between two turns: whoever takes it does the next one.
type Desk<S, O> = Mutex<Option<Writer<S, O>>>;

/// Turns that are done in the place of the writer's thread.
pub(super) trait Turns: fmt::Debug + Send + Sync {
    /// Does the next turn, unless it is one for the writer's thread. That has something to do after the time that is
    /// told.
    fn turn(&self) -> Duration;
}

impl<S, O> Turns for Desk<S, O>
where
    S: StoreControl + Send,
    S::Error: fmt::Display,
    O: FnMut() -> Result<Opened<S>, S::OpenError> + Send,
{
    fn turn(&self) -> Duration {
        let turn = AssertUnwindSafe(|| {
            // Taken, or left behind by a panic.
            let mut desk = self.try_lock().ok()?;
            let next = match &mut *desk {
                // What comes in after a pause is waited for.
                Some(writer) if !writer.has_paused() => writer.turn(false),
                Some(_) | None => return None,
            };
            match next {
                Next::Turn(look_in) => Some(look_in),
                Next::Reopen => None,
                Next::Stop => {
                    *desk = None;
                    None
                }
            }
        });
        // A panic ends the writer, whose thread finds the desk poisoned, and not the caller.
        catch_unwind(turn).ok().flatten().unwrap_or(Duration::ZERO)
    }
}

/// Drops the writer with its thread, however that ends, so that nobody waits for an answer any more.
struct Last<'a, S, O>(&'a Desk<S, O>);

impl<S, O> Drop for Last<'_, S, O> {
    fn drop(&mut self) {
        let desk = self.0.lock();
        drop(desk.unwrap_or_else(PoisonError::into_inner).take());
    }
}

struct Writer<S, O> {
    config: WriterConfig,
    clock: Clock,
    /// When the last turn began.
    turned_at: Timestamp,
    open: O,
    messages: Messages<Message>,
    shared: Weak<Inner>,
    view: watch::Sender<Arc<View>>,
    stats: CommitStats,
    /// When the store's size is looked at again.
    size_due: Instant,
    /// What the log was told.
    news: News,
    waiters: Waiters,
    /// Who waits until a close is done.
    closings: Closings,
    /// Calls to engines. The core lets only so many be under way.
    calls: UnboundedSender<EngineCall>,
    /// Calls whose time was over before they could be parked: ended in the next turn.
    late_ends: Vec<SlotId>,
    /// What is known of callers while the store is away.
    outage: Outage,
    /// Releases and cancels of an outage that are still to be applied.
    kept: Kept,
    /// Releases and cancels of the turn under way: kept when it fails.
    at_stake: Vec<Command>,
    /// Acquires of tickets that are not known bypass: the disk has little room left, or the store
    /// failed and nothing was read yet since.
    bypasses_new: bool,
    /// The store failed, and recovery is not over.
    recovering: bool,
    /// An orderly stop has begun: no call waits any more.
    draining: bool,
    /// Tickets of open calls that a core that was loaded is to tell of.
    reattach: Vec<TicketId>,
    /// Who waits until a close is done that may be done, although the last turn of the store failed.
    waited_for: Vec<(CloseId, oneshot::Sender<CloseIntent>)>,
    /// Empty while the store is away.
    loaded: Option<Loaded<S>>,
}

impl<S, O> fmt::Debug for Writer<S, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer").finish_non_exhaustive()
    }
}

impl<S, O> Writer<S, O>
where
    S: StoreControl,
    S::Error: fmt::Display,
    O: FnMut() -> Result<Opened<S>, S::OpenError>,
{
    fn run(
        mut self,
        first_open: oneshot::Sender<Result<(), S::OpenError>>,
        desk: &Desk<S, O>,
        bed: &Bed<Message>,
    ) {
        let loaded = self.load();
        let is_open = loaded.is_ok();
        // Nobody listens when the process is stopping already.
        let _ = first_open.send(loaded);
        if !is_open {
            return;
        }
        let _last = Last(desk);
        let Ok(mut at) = desk.lock() else { return };
        *at = Some(self);
        drop(at);
        let mut wait = Duration::ZERO;
        loop {
            bed.rest(wait);
            // Nobody goes on from a turn that panicked.
            let Ok(mut desk) = desk.lock() else { return };
            let Some(writer) = desk.as_mut() else { return };
            let has_paused = writer.has_paused();
            match writer.turn(has_paused) {
                Next::Turn(look_in) => wait = look_in,
                Next::Reopen if writer.reopen() => wait = Duration::ZERO,
                Next::Reopen | Next::Stop => return,
            }
        }
    }

    /// Opens the store, takes over from what it holds, and makes that durable.
    fn load(&mut self) -> Result<(), S::OpenError> {
        let Opened { mut store, image } = (self.open)()?;
        self.clock = self.clock.not_below(image.now);
        if let Some(shared) = self.shared.upgrade() {
            // Set at the first load; what this process stored later is on this very line.
            let _ = shared.line.set(self.clock);
        }
        let params = StartParams {
            now: self.clock.now(),
            salt: (self.config.salts)(),
            seed: (self.config.salts)(),
            policy: self.config.policy.clone(),
            // A store that is opened again keeps what was set since the start.
            reset_settings: std::mem::take(&mut self.config.reset_settings),
            fleet: self.config.fleet.clone(),
        };
        let now = params.now;
        let committed = Machine::reload(image, params, &self.outage.untold).commit(&mut store)?;
        if let Some(counts) = self.outage.end() {
            self.waiters.follow_up(counts);
        }
        self.stats.set_bytes(store.bytes());
        if let Some(recorder) = &mut self.config.recorder {
            recorder.started(now);
        }
        self.publish(&committed.machine);
        news::tell_operations(&committed.events);
        self.reattach = self.waiters.tickets();
        self.waited_for = self.closings.take();
        // The time until the first turn is no pause.
        self.turned_at = self.clock.now();
        self.loaded = Some(Loaded {
            machine: committed.machine,
            store,
        });
        Ok(())
    }

    /// One turn with everything that stands in the inbox, and after a pause with what comes in within moments.
    fn turn(&mut self, has_paused: bool) -> Next {
        let Some(Loaded { machine, mut store }) = self.loaded.take() else {
            return Next::Reopen;
        };
        let gathered = if self.kept.is_empty() {
            self.gather(has_paused)
        } else {
            // Whoever retries finds what was kept applied already.
            Vec::new()
        };
        self.note_space(store.low_space());
        let low_space = self.trouble().low_space.is_some();
        self.bypasses_new = low_space || (self.recovering && machine.is_starting());
        self.turned_at = self.clock.now();
        let now = self.turned_at;
        let mut turn = Taking::new(machine.turn(now), self.config.recorder.is_some());
        let mut answerers = Vec::new();
        let mut groups = Vec::new();
        let mut closing = None;
        for ticket in std::mem::take(&mut self.reattach) {
            turn.handle(Command::Watch(vec![ticket.clone()]));
            answerers.push(Answerer::Reloaded(ticket));
        }
        for (close, reply) in std::mem::take(&mut self.waited_for) {
            turn.handle(Command::ReadClose(close));
            answerers.push(Answerer::CloseDone(reply));
        }
        let kept = self.kept.next(TURN_MAX);
        let kept_count = kept.len();
        for command in kept {
            turn.handle(command);
            answerers.push(Answerer::Nobody);
        }
        for command in self.waiters.take_follow_ups() {
            turn.handle(command);
            answerers.push(Answerer::Nobody);
        }
        for slot in std::mem::take(&mut self.late_ends) {
            self.end_wait(slot, &mut turn, &mut answerers);
        }
        for message in gathered {
            closing = closing.or(self.take(message, &mut turn, &mut answerers, &mut groups));
        }
        let (batch, taken) = turn.finish(closing.is_some());
        let durable_already = batch.is_durable_already();
        let began = Instant::now();
        let machine = match batch.try_commit(&mut store) {
            Ok(mut committed) => {
                if !durable_already {
                    self.stats.committed(began.elapsed(), answerers.len());
                    self.note_size(&store);
                }
                self.kept.applied(kept_count);
                self.at_stake.clear();
                if let Some(recorder) = &mut self.config.recorder {
                    recorder.turn(now, taken, &committed.effects, closing.is_some());
                }
                self.publish(&committed.machine);
                let events = std::mem::take(&mut committed.events);
                self.stats.saw(&events);
                let machine = self.perform(committed, answerers, groups);
                // Nobody waits for the log.
                news::tell_expiries(&events);
                news::tell_operations(&events);
                machine
            }
            Err(failed) => {
                self.fail(&failed, answerers, groups);
                return if closing.is_some() {
                    Next::Stop
                } else {
                    Next::Reopen
                };
            }
        };
        if let Some(done) = closing {
            if let Err(error) = store.close() {
                self.stats.failed(Trouble::Close);
                tracing::error!(%error, "the store could not be closed in order");
            }
            let _ = done.send(());
            return Next::Stop;
        }
        if self.shared.strong_count() == 0 {
            return Next::Stop;
        }
        let look_in = self.look_in(&machine);
        self.loaded = Some(Loaded { machine, store });
        Next::Turn(look_in)
    }

    /// When the next turn is due although nothing comes in.
    fn look_in(&self, machine: &Machine) -> Duration {
        let at_once = self.messages.has_taken()
            || !self.kept.is_empty()
            || self.waiters.has_follow_ups()
            || !self.late_ends.is_empty();
        if at_once {
            return Duration::ZERO;
        }
        machine.next_deadline().map_or(TICK, |deadline| {
            let left = deadline.since(self.clock.now());
            TICK.min(Duration::from_millis(left.millis()))
        })
    }

    /// The last turn began so long ago that the process must have stood still (TIM3).
    fn has_paused(&self) -> bool {
        self.clock.now().since(self.turned_at) > PAUSE_AFTER
    }

    /// Everything that stands in the inbox, up to the bound of a turn.
    fn gather(&mut self, has_paused: bool) -> Vec<Message> {
        let mut gathered = Vec::new();
        let mut commands = 0;
        if let Some(message) = self.messages.try_recv() {
            commands += weight(&message);
            gathered.push(message);
        }
        let settles = has_paused && !gathered.iter().any(is_of_the_stop);
        let mut settled_at = settles.then(|| Instant::now() + SETTLED_WITHIN);
        while commands < TURN_MAX {
            let message = match settled_at {
                Some(at) => {
                    let left = at.saturating_duration_since(Instant::now());
                    self.messages.recv_timeout(left.min(SETTLED_AFTER)).ok()
                }
                None => self.messages.try_recv(),
            };
            let Some(message) = message else { break };
            if is_of_the_stop(&message) {
                settled_at = None;
            }
            commands += weight(&message);
            gathered.push(message);
        }
        self.received(commands);
        gathered
    }

    fn received(&self, count: usize) {
        if let Some(shared) = self.shared.upgrade() {
            shared.inbox_len.fetch_sub(count, Ordering::Relaxed);
        }
    }

    /// Hands one message to the turn. Gives back who waits for the end of the service.
    fn take(
        &mut self,
        message: Message,
        turn: &mut Taking,
        answerers: &mut Vec<Answerer>,
        groups: &mut Vec<Group>,
    ) -> Option<oneshot::Sender<()>> {
        match message {
            Message::Command { command, reply } => {
                if self.hand_in(command, turn) {
                    answerers.push(Answerer::One(reply));
                } else {
                    drop(reply.send(Err(GateError::StoreUnavailable)));
                }
            }
            Message::Commands { commands, reply } => {
                let group = groups.len();
                let mut replies = Vec::with_capacity(commands.len());
                for (index, command) in commands.into_iter().enumerate() {
                    if self.hand_in(command, turn) {
                        answerers.push(Answerer::Group { group, index });
                        replies.push(None);
                    } else {
                        replies.push(Some(Err(GateError::StoreUnavailable)));
                    }
                }
                groups.push(Group { replies, reply });
            }
            Message::Acquire {
                slot,
                acquire,
                reply,
            } => {
                if self.draining {
                    drop(reply.send(Err(GateError::Draining)));
                    return None;
                }
                if self.bypasses_new && !turn.knows(&acquire.ticket) {
                    drop(reply.send(Err(GateError::StoreUnavailable)));
                    return None;
                }
                let ticket = acquire.ticket.clone();
                turn.handle(Command::Acquire(acquire));
                answerers.push(Answerer::Acquire {
                    slot,
                    ticket,
                    reply,
                });
            }
            Message::Watch {
                slot,
                tickets,
                reply,
            } => {
                if self.draining {
                    drop(reply.send(Err(GateError::Draining)));
                    return None;
                }
                turn.handle(Command::Watch(tickets));
                answerers.push(Answerer::Watch { slot, reply });
            }
            Message::EndWait(slot) => {
                if self.waiters.has(slot) {
                    self.end_wait(slot, turn, answerers);
                } else {
                    // Answered already, or it came in this turn and is parked at its end.
                    self.late_ends.push(slot);
                }
            }
            Message::Gone(slot) => {
                for command in self.waiters.gone(slot) {
                    turn.handle(command);
                    answerers.push(Answerer::Nobody);
                }
            }
            Message::Signal(command) => {
                turn.handle(command);
                answerers.push(Answerer::Nobody);
            }
            Message::CloseDone { close, reply } => {
                if !self.draining {
                    turn.handle(Command::ReadClose(close));
                    answerers.push(Answerer::CloseDone(reply));
                }
            }
            Message::RefuseWaiting => self.refuse_waiting(),
            Message::Stop { done } => return Some(done),
        }
        None
    }

    /// Hands a caller's command to the turn; false when it is an acquire that bypasses instead.
    fn hand_in(&mut self, command: Command, turn: &mut Taking) -> bool {
        match &command {
            Command::Release(_) | Command::Cancel(_) => self.at_stake.push(command.clone()),
            Command::Acquire(acquire) if self.bypasses_new && !turn.knows(&acquire.ticket) => {
                return false;
            }
            _ => {}
        }
        turn.handle(command);
        true
    }

    /// The call's own time is over.
    fn end_wait(&mut self, slot: SlotId, turn: &mut Taking, answerers: &mut Vec<Answerer>) {
        if let Some(command) = self.waiters.end_wait(slot) {
            turn.handle(command);
            answerers.push(Answerer::Leave(slot));
        }
    }

    /// Ends every open call; those that this turn is about to park end at its end.
    fn refuse_waiting(&mut self) {
        self.draining = true;
        self.closings = Closings::default();
        self.waiters.refuse_all(GateError::Draining);
    }

    /// The turn is durable: answer.
    fn perform(
        &mut self,
        committed: Committed,
        answerers: Vec<Answerer>,
        mut groups: Vec<Group>,
    ) -> Box<Machine> {
        let mut answerers: Vec<Option<Answerer>> = answerers.into_iter().map(Some).collect();
        let mut who = |tag: Tag| answerers.get_mut(tag.0).and_then(Option::take);
        // Whoever gave something back waits for nothing; whoever gets it has waited in the queue.
        let are_grants_first = committed
            .effects
            .iter()
            .any(|effect| matches!(effect, Effect::Decided { .. }));
        let mut later = Vec::new();
        for effect in committed.effects {
            match effect {
                Effect::Decided { seq, answer } => self.waiters.decided(Some(seq), &answer),
                Effect::Parked {
                    tag,
                    seq,
                    session_reopened,
                } => {
                    if let Some(Answerer::Acquire {
                        slot,
                        ticket,
                        reply,
                    }) = who(tag)
                    {
                        self.waiters
                            .park(slot, ticket, seq, session_reopened, reply);
                    }
                }
                Effect::Reply { tag, seq, reply } => match who(tag) {
                    Some(Answerer::One(to)) if are_grants_first => {
                        later.push((to, Ok((seq, reply))))
                    }
                    Some(Answerer::One(to)) => self.answer(to, Ok((seq, reply))),
                    Some(Answerer::Group { group, index }) => {
                        let group = groups.get_mut(group);
                        if let Some(slot) = group.and_then(|group| group.replies.get_mut(index)) {
                            *slot = Some(Ok((seq, reply)));
                        }
                    }
                    Some(Answerer::Acquire { reply: to, .. }) => {
                        if let Reply::Acquire(result) = reply
                            && let Err(Ok(Taken {
                                answer: Ok(answer), ..
                            })) = to.send(Ok(Taken {
                                seq,
                                answer: result,
                                held_open: false,
                            }))
                        {
                            self.waiters.undelivered(&answer);
                        }
                    }
                    Some(Answerer::Watch { slot, reply: to }) => {
                        if let Reply::Watch(watched) = reply {
                            self.waiters.watch(slot, watched, to);
                        }
                    }
                    Some(Answerer::Leave(slot)) => {
                        if let Reply::Left(answer) = reply {
                            self.waiters.left(slot, answer);
                        }
                    }
                    Some(Answerer::Reloaded(ticket)) => {
                        if let Reply::Watch(watched) = reply {
                            for (_, state) in watched {
                                self.waiters.reloaded(ticket.clone(), state);
                            }
                        }
                    }
                    Some(Answerer::CloseDone(to)) => {
                        if let Reply::ReadClose(Some(close)) = reply {
                            self.closings.wait_for(close, to);
                        }
                    }
                    Some(Answerer::Nobody) | None => {}
                },
                // Nobody makes calls while the service stops; the next start makes them.
                Effect::Call(call) => drop(self.calls.send(call)),
                Effect::CloseDone(close) => {
                    news::tell_close(&close);
                    self.closings.done(&close);
                }
            }
        }
        for (to, reply) in later {
            self.answer(to, reply);
        }
        self.waiters.end_touched_watches();
        if self.draining {
            // Those too that came in the turn in which the drain began.
            self.refuse_waiting();
        }
        for group in groups {
            self.waiters.answer_group(group.reply, group.replies);
        }
        committed.machine
    }

    fn answer(&mut self, to: oneshot::Sender<Replied>, reply: Replied) {
        if let Err(unread) = to.send(reply) {
            self.waiters.unread(unread);
        }
    }

    /// The turn is not durable, or nobody knows: nobody is told that it happened (DUR4).
    fn fail(&mut self, failed: &Failed<S::Error>, answerers: Vec<Answerer>, groups: Vec<Group>) {
        let why = &failed.error;
        self.stats.failed(Trouble::Commit);
        if STORE_FAILED.is_told() {
            tracing::error!(error = %why, "the store failed; acquires bypass until it is open again");
        }
        self.recovering = true;
        let since = self.clock.now();
        self.change_trouble(|trouble| {
            trouble.unavailable.get_or_insert(since);
        });
        self.set_phase(Phase::Unavailable);
        for command in std::mem::take(&mut self.at_stake) {
            self.kept.keep(&command);
        }
        self.outage.begin(failed, self.waiters.tickets());
        let error = GateError::StoreUnavailable;
        for answerer in answerers {
            match answerer {
                Answerer::One(reply) => drop(reply.send(Err(error))),
                Answerer::Acquire { reply, .. } => drop(reply.send(Err(error))),
                Answerer::Watch { reply, .. } => drop(reply.send(Err(error))),
                Answerer::Leave(slot) => self.waiters.refuse(slot, error),
                // Whoever waits for a close reads it as it stands.
                Answerer::CloseDone(_)
                | Answerer::Group { .. }
                | Answerer::Reloaded(_)
                | Answerer::Nobody => {}
            }
        }
        for group in groups {
            let replies = group.replies.iter().map(|_| Err(error)).collect();
            drop(group.reply.send(replies));
        }
        drop(self.waiters.take_follow_ups());
    }

    /// Opens the store anew with back-off, answering meanwhile; false when the service stops.
    fn reopen(&mut self) -> bool {
        let mut backoff = REOPEN_MIN;
        let mut told = String::new();
        loop {
            let until = Instant::now() + backoff;
            loop {
                let left = until.saturating_duration_since(Instant::now());
                // The core that is loaded next is to know which answers have arrived.
                if left.is_zero() && !self.messages.has_taken() {
                    break;
                }
                let now = self.clock.now();
                while let Some(ticket) = self.outage.aged(now) {
                    self.waiters
                        .refuse_ticket(&ticket, GateError::StoreUnavailable);
                }
                let aged_in = self.outage.next_bypass_in(now);
                let left =
                    aged_in.map_or(left, |span| left.min(Duration::from_millis(span.millis())));
                match self.messages.recv_timeout(left) {
                    Ok(message) => {
                        self.received(weight(&message));
                        if let Some(done) = self.answer_without_store(message) {
                            let _ = done.send(());
                            return false;
                        }
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return false,
                }
            }
            match self.load() {
                Ok(()) => {
                    tracing::info!("the store is open again");
                    return true;
                }
                Err(error) => {
                    self.stats.failed(Trouble::Open);
                    // Once for each reason, not for each attempt.
                    let reason = error.to_string();
                    if reason != told {
                        tracing::error!(error = reason, "the store cannot be opened again yet");
                        told = reason;
                    }
                    backoff = (backoff * 2).min(REOPEN_MAX);
                }
            }
        }
    }

    fn answer_without_store(&mut self, message: Message) -> Option<oneshot::Sender<()>> {
        let error = GateError::StoreUnavailable;
        match message {
            Message::Command { command, reply } => {
                self.kept.keep(&command);
                drop(reply.send(Err(error)));
            }
            Message::Commands { commands, reply } => {
                for command in &commands {
                    self.kept.keep(command);
                }
                drop(reply.send(commands.iter().map(|_| Err(error)).collect()));
            }
            Message::Acquire { reply, .. } => drop(reply.send(Err(error))),
            Message::Watch { reply, .. } => drop(reply.send(Err(error))),
            Message::EndWait(slot) => self.waiters.refuse(slot, error),
            // The core that is loaded next takes every caller for away until it is told otherwise.
            Message::Gone(slot) => drop(self.waiters.gone(slot)),
            Message::Signal(Command::Delivered(delivery)) => {
                if let Some(lease) = delivery.lease {
                    self.outage.untold.told(lease);
                }
            }
            Message::Signal(Command::LocalBypasses(counts)) => self.outage.count(counts),
            // A close whose outcome is lost here is sent again by the core that is loaded next.
            Message::Signal(_) | Message::CloseDone { .. } => {}
            Message::RefuseWaiting => self.refuse_waiting(),
            Message::Stop { done } => return Some(done),
        }
        None
    }

    fn trouble(&self) -> StoreTrouble {
        let shared = self.shared.upgrade();
        shared.map_or(StoreTrouble::default(), |shared| *shared.trouble.borrow())
    }

    fn change_trouble(&self, change: impl FnOnce(&mut StoreTrouble)) {
        if let Some(shared) = self.shared.upgrade() {
            shared.trouble.send_modify(change);
        }
    }

    /// Each look is a call of the operating system, and nobody watches the size by the commit.
    fn note_size(&mut self, store: &S) {
        let now = Instant::now();
        if now >= self.size_due {
            self.size_due = now + SIZE_EVERY;
            self.stats.set_bytes(store.bytes());
        }
    }

    /// One line of the log for each change.
    fn note_space(&self, is_low: bool) {
        if is_low == self.trouble().low_space.is_some() {
            return;
        }
        if is_low {
            tracing::warn!("the disk of the store is nearly full; new acquires bypass");
        } else {
            tracing::info!("the disk of the store has room again");
        }
        let since = is_low.then(|| self.clock.now());
        self.change_trouble(|trouble| trouble.low_space = since);
    }

    /// Readers see the turn before its callers are answered.
    fn publish(&mut self, machine: &Machine) {
        let view = Arc::new(machine.view());
        self.view.send_replace(Arc::clone(&view));
        self.news.tell(&view, machine.is_starting());
        self.stats.turned(self.clock.now());
        if !machine.is_starting() {
            if std::mem::take(&mut self.recovering) {
                self.change_trouble(|trouble| trouble.unavailable = None);
            }
            self.set_phase(Phase::Ready);
        }
    }

    /// A drain is never taken back.
    fn set_phase(&self, phase: Phase) {
        if let Some(shared) = self.shared.upgrade() {
            shared.phase.send_if_modified(|now| {
                let change = *now != phase && *now != Phase::Draining;
                if change {
                    *now = phase;
                }
                change
            });
        }
    }
}

/// A stop waits for nothing.
fn is_of_the_stop(message: &Message) -> bool {
    matches!(message, Message::RefuseWaiting | Message::Stop { .. })
}

/// How much of a turn's bound, and of the inbox's, a message takes.
pub(super) fn weight(message: &Message) -> usize {
    match message {
        Message::Commands { commands, .. } => commands.len().max(1),
        Message::Watch { tickets, .. } => tickets.len().max(1),
        Message::Signal(Command::Called(results)) => results.len().max(1),
        Message::Command { .. }
        | Message::Acquire { .. }
        | Message::EndWait(_)
        | Message::Gone(_)
        | Message::CloseDone { .. }
        | Message::Signal(_)
        | Message::RefuseWaiting
        | Message::Stop { .. } => 1,
    }
}
