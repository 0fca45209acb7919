//! A gate on virtual time with a store in memory: short words for given, command and answer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvgate_core::audit::AuditEntry;
use kvgate_core::batch::{Batch, Committed, Failed};
use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{
    CallFailure, CallId, CallResult, CallWhat, CloseIntent, CloseMode, EngineCall, TargetState,
};
use kvgate_core::command::{Acquire, Act, CloseRequest, Command, Delivery, Operation};
use kvgate_core::decision::{BypassReason, CancelReason, Scope, WaitReason};
use kvgate_core::effect::{
    AcquireRefused, Answer, CancelOutcome, CloseReply, Effect, LeaseGone, LeaseView, Outcome,
    ReleaseOutcome, Reply, RetryRefused, SessionView, TicketView, WaitStatus, Watched,
};
use kvgate_core::event::Event;
use kvgate_core::ids::{CloseId, EngineId, Label, LeaseId, Seq, SessionId, TicketId};
use kvgate_core::machine::{Machine, StartParams, Untold};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::{AdmissionScope, Policy};
use kvgate_core::reading::{
    EngineKind, ReadFailure, Reading, Role, Round, RouterAnswer, RouterFailure, StartMark,
    TokenCounters, Worker,
};
use kvgate_core::settings::{Change, SettingsChange};
use kvgate_core::store::{Commit, Store};
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use kvgate_core::view::View;

/// Where virtual time begins, in milliseconds.
pub const T0: u64 = 1_700_000_000_000;

pub fn tokens(count: u64) -> Tokens {
    Tokens::new(count).unwrap()
}

pub fn ticket(name: &str) -> TicketId {
    TicketId::new(name).unwrap()
}

pub fn session(name: &str) -> SessionId {
    SessionId::new(name).unwrap()
}

pub fn engine(name: &str) -> EngineId {
    EngineId::new(&format!("http://{name}:30000"))
}

/// Admission on, for training and evaluation; otherwise the defaults: headroom 0.9, threshold
/// 0.92, maximum wait 30 s, claim grace 10 s, readings fresh for 6 s.
pub fn admission_on() -> Policy {
    Policy {
        program_admission: true,
        scope: AdmissionScope::All,
        ..Policy::default()
    }
    .validated()
    .unwrap()
}

/// The same with session closes on.
pub fn closes_on() -> Policy {
    Policy {
        session_lifecycle: true,
        ..admission_on()
    }
}

/// An acquire of session `s` in scope train with a life of 600 s whose call stays open.
pub fn acquire(name: &str, reservation: u64) -> Acquire {
    Acquire {
        ticket: ticket(name),
        session: session("s"),
        sent: Sent::Sum(tokens(reservation)),
        scope: Scope::Train,
        protected: false,
        ttl: Span::from_secs(600),
        client: None,
        request_id: None,
        stays: true,
    }
}

/// What an engine shows in the rounds from now on.
#[derive(Clone, Debug)]
pub struct Engine {
    pub listed: bool,
    pub role: Role,
    pub healthy: bool,
    pub worker_ids: Vec<&'static str>,
    pub answers: bool,
    /// Its part as it says itself.
    pub own_role: Option<Role>,
    pub capacity: u64,
    pub usage: Option<u32>,
    pub running: Option<u64>,
    pub queued: Option<u64>,
    pub counters: Option<(u64, u64)>,
    pub mark: Option<u64>,
    pub unknown_label: bool,
    pub kind: EngineKind,
}

impl Engine {
    /// A healthy engine at half its pool.
    pub fn of(capacity: u64) -> Self {
        Self {
            listed: true,
            role: Role::Regular,
            healthy: true,
            worker_ids: Vec::new(),
            answers: true,
            own_role: None,
            capacity,
            usage: Some(500_000),
            running: Some(1),
            queued: Some(0),
            counters: None,
            mark: None,
            unknown_label: false,
            kind: EngineKind::Sglang,
        }
    }

    fn reading(&self) -> Result<Reading, ReadFailure> {
        if !self.answers {
            return Err(ReadFailure::Timeout);
        }
        Ok(Reading {
            role: self.own_role,
            usage: self.usage.map(|usage| Ppm::new(usage).unwrap()),
            running: self.running,
            queued: self.queued,
            counters: self
                .counters
                .map(|(prompt, generation)| TokenCounters { prompt, generation }),
            unknown_label: self.unknown_label,
            kind: self.kind,
            ..Reading::idle(tokens(self.capacity))
        })
    }
}

/// What the router does in the rounds from now on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Router {
    None,
    Lists,
    Empty,
    Silent,
}

/// A store that loses its disk.
pub struct FailingStore;

impl Store for FailingStore {
    type Error = &'static str;

    fn commit(&mut self, _: Commit<'_>) -> Result<(), Self::Error> {
        Err("disk full")
    }
}

/// A store that keeps what it gets and calls it failed.
struct FailingAfterwards<'a>(&'a mut MemoryStore);

impl Store for FailingAfterwards<'_> {
    type Error = &'static str;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), Self::Error> {
        let Ok(()) = self.0.commit(commit);
        Err("who knows")
    }
}

/// What one command was told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Told {
    Parked,
    Reply(Reply),
}

/// The gate, its store, its clock and its fleet.
pub struct Gate {
    machine: Option<Box<Machine>>,
    pub store: MemoryStore,
    pub now: u64,
    pub salt: u64,
    pub seed: u64,
    pub policy: Policy,
    /// A start returns to what is configured.
    pub resets: bool,
    pub static_engines: BTreeSet<EngineId>,
    pub router: Router,
    pub engines: BTreeMap<&'static str, Engine>,
    /// Decisions of the queue since they were last taken.
    pub decided: Vec<(Seq, Answer)>,
    /// Events of the committed turns since they were last taken.
    pub events: Vec<Event>,
    /// All numbers of changes so far, in the order of the answers.
    pub seqs: Vec<Seq>,
    /// Calls to engines since they were last taken.
    pub calls: Vec<EngineCall>,
    /// Closes that were told to be done.
    pub done: Vec<CloseIntent>,
}

impl Gate {
    /// Started on an empty store; nothing was read yet.
    pub fn unread(policy: Policy) -> Self {
        let mut gate = Self {
            machine: None,
            store: MemoryStore::default(),
            now: T0,
            salt: 100,
            seed: 7,
            policy,
            resets: false,
            static_engines: BTreeSet::new(),
            router: Router::Lists,
            engines: BTreeMap::new(),
            decided: Vec::new(),
            events: Vec::new(),
            seqs: Vec::new(),
            calls: Vec::new(),
            done: Vec::new(),
        };
        gate.start();
        gate
    }

    /// Started, with one engine `a` of a million tokens read: the ceiling is 900,000.
    pub fn with(policy: Policy) -> Self {
        let mut gate = Self::unread(policy);
        gate.engines.insert("a", Engine::of(1_000_000));
        gate.round();
        gate
    }

    pub fn new() -> Self {
        Self::with(admission_on())
    }

    pub fn start(&mut self) {
        self.reload(&Untold::default());
    }

    /// What the same writer does after a failed commit.
    pub fn reload(&mut self, untold: &Untold) {
        self.salt += 1;
        let params = StartParams {
            now: Timestamp::from_millis(self.now),
            salt: self.salt,
            seed: self.seed,
            policy: self.policy.clone(),
            reset_settings: self.resets,
            fleet: FleetConfig {
                has_router: self.router != Router::None,
                static_engines: self.static_engines.clone(),
            },
        };
        let batch = Machine::reload(self.store.image(), params, untold);
        let Ok(committed) = batch.commit(&mut self.store);
        self.take(committed);
    }

    /// A crash `down_ms` long, a start, and its first reading round.
    pub fn restart(&mut self, down_ms: u64) {
        self.crash(down_ms);
        self.round();
    }

    /// A crash `down_ms` long and a start; nothing is read yet.
    pub fn crash(&mut self, down_ms: u64) {
        self.machine = None;
        self.decided.clear();
        self.calls.clear();
        self.now += down_ms;
        self.start();
    }

    pub fn machine(&self) -> &Machine {
        self.machine.as_ref().unwrap()
    }

    pub fn view(&self) -> View {
        self.machine().view()
    }

    pub fn policy(&self) -> Policy {
        (*self.view().policy).clone()
    }

    fn take(&mut self, committed: Committed) -> Vec<Effect> {
        self.machine = Some(committed.machine);
        self.events.extend(committed.events);
        for effect in &committed.effects {
            match effect {
                Effect::Decided { seq, answer } => {
                    self.seqs.push(*seq);
                    self.decided.push((*seq, answer.clone()));
                }
                Effect::Reply { seq, .. } | Effect::Parked { seq, .. } => self.seqs.extend(*seq),
                Effect::Call(call) => self.calls.push(call.clone()),
                Effect::CloseDone(close) => self.done.push(close.clone()),
            }
        }
        committed.effects
    }

    /// One turn of these commands, committed.
    pub fn turn(&mut self, commands: Vec<Command>) -> Vec<Effect> {
        let mut turn = self
            .machine
            .take()
            .unwrap()
            .turn(Timestamp::from_millis(self.now));
        for command in commands {
            turn.handle(command);
        }
        let Ok(committed) = turn.finish().commit(&mut self.store);
        self.take(committed)
    }

    /// One turn of these commands; what each of them was told.
    pub fn tell_all(&mut self, commands: Vec<Command>) -> Vec<(Option<Seq>, Told)> {
        let count = commands.len();
        let mut told: Vec<Option<(Option<Seq>, Told)>> = vec![None; count];
        for effect in self.turn(commands) {
            match effect {
                Effect::Reply { tag, seq, reply } => {
                    let slot = told.get_mut(tag.0).unwrap();
                    assert!(slot.is_none(), "a command is answered once");
                    *slot = Some((seq, Told::Reply(reply)));
                }
                Effect::Parked { tag, seq, .. } => {
                    let slot = told.get_mut(tag.0).unwrap();
                    assert!(slot.is_none(), "a command is answered once");
                    *slot = Some((seq, Told::Parked));
                }
                Effect::Decided { .. } | Effect::Call(_) | Effect::CloseDone(_) => {}
            }
        }
        told.into_iter()
            .map(|one| one.expect("every command is answered in its turn"))
            .collect()
    }

    pub fn tell(&mut self, command: Command) -> (Option<Seq>, Told) {
        self.tell_all(vec![command]).remove(0)
    }

    /// A turn whose commit fails: the machine and the effects are gone.
    pub fn fail(&mut self, commands: Vec<Command>) -> &'static str {
        let mut turn = self
            .machine
            .take()
            .unwrap()
            .turn(Timestamp::from_millis(self.now));
        for command in commands {
            turn.handle(command);
        }
        turn.finish().commit(&mut FailingStore).unwrap_err()
    }

    /// A turn whose commit fails, with what is left of it.
    pub fn fail_and_leave(&mut self, commands: Vec<Command>) -> Failed<&'static str> {
        self.half_a_turn(commands)
            .try_commit(&mut FailingStore)
            .unwrap_err()
    }

    /// The same, but the store keeps the turn all the same.
    pub fn fail_afterwards(&mut self, commands: Vec<Command>) -> Failed<&'static str> {
        self.half_a_turn(commands)
            .try_commit(&mut FailingAfterwards(&mut self.store))
            .unwrap_err()
    }

    fn half_a_turn(&mut self, commands: Vec<Command>) -> Batch {
        let mut turn = self
            .machine
            .take()
            .unwrap()
            .turn(Timestamp::from_millis(self.now));
        for command in commands {
            turn.handle(command);
        }
        turn.finish()
    }

    /// The last turn of an orderly stop.
    pub fn stop(&mut self) {
        let turn = self
            .machine
            .take()
            .unwrap()
            .turn(Timestamp::from_millis(self.now));
        let Ok(_) = turn.finish_last().commit(&mut self.store);
    }

    // ---- time ----------------------------------------------------------------------------

    /// Time passes in turns of half a second, with a reading round each second.
    pub fn run(&mut self, ms: u64) {
        self.pass(ms, true);
    }

    /// The same without any reading.
    pub fn unread_for(&mut self, ms: u64) {
        self.pass(ms, false);
    }

    fn pass(&mut self, ms: u64, rounds: bool) {
        let end = self.now + ms;
        let mut since_round = 0;
        while self.now < end {
            let step = 500.min(end - self.now);
            self.now += step;
            since_round += step;
            if rounds && since_round >= 1_000 {
                since_round = 0;
                self.round();
            } else {
                self.turn(Vec::new());
            }
        }
    }

    /// Time passes without a turn.
    pub fn jump(&mut self, ms: u64) {
        self.now += ms;
    }

    /// Turns at the deadlines that the machine names, until it names none up to `until`.
    pub fn drain_until(&mut self, until: u64) {
        let mut turns = 0;
        while let Some(deadline) = self.machine().next_deadline() {
            if deadline.millis() > until {
                break;
            }
            self.now = self.now.max(deadline.millis());
            self.turn(Vec::new());
            turns += 1;
            assert!(
                turns < 10_000,
                "the machine names a deadline that it does not serve"
            );
        }
    }

    // ---- fleet ---------------------------------------------------------------------------

    pub fn engine(&mut self, name: &'static str) -> &mut Engine {
        self.engines.get_mut(name).unwrap()
    }

    pub fn round_of(&self, began_at: u64) -> Round {
        let workers = || {
            self.engines
                .iter()
                .filter(|(_, engine)| engine.listed)
                .map(|(name, shown)| Worker {
                    engine: engine(name),
                    role: shown.role,
                    healthy: shown.healthy,
                    worker_ids: shown.worker_ids.iter().map(|id| Arc::from(*id)).collect(),
                })
                .collect()
        };
        Round {
            began_at: Timestamp::from_millis(began_at),
            router: match self.router {
                Router::None => None,
                Router::Lists => Some(RouterAnswer::Workers(workers())),
                Router::Empty => Some(RouterAnswer::Workers(Vec::new())),
                Router::Silent => Some(RouterAnswer::Failed(RouterFailure::Timeout)),
            },
            readings: self
                .engines
                .iter()
                .map(|(name, shown)| (engine(name), shown.reading()))
                .collect(),
            start_marks: self
                .engines
                .iter()
                .filter_map(|(name, shown)| Some((engine(name), StartMark(shown.mark?))))
                .collect(),
        }
    }

    /// One reading round that begins and ends now.
    pub fn round(&mut self) -> Option<Seq> {
        let round = self.round_of(self.now);
        self.tell(Command::Round(round)).0
    }

    pub fn ceiling(&self) -> u64 {
        self.view().measure.ceiling.get()
    }

    pub fn full_ceiling(&self) -> u64 {
        self.view().measure.full_ceiling.get()
    }

    /// The fleet's pressure in millionths.
    pub fn pressure(&self) -> Option<u32> {
        let measure = self.view().measure;
        measure.pressure.as_ref().map(|(worst, _)| worst.get())
    }

    pub fn epoch(&self) -> u64 {
        self.view().epoch.0
    }

    pub fn reserved(&self) -> u64 {
        self.view().reserved.get()
    }

    pub fn waiting(&self) -> u64 {
        self.view().waiting
    }

    // ---- commands ------------------------------------------------------------------------

    pub fn configure(&mut self, change: impl FnOnce(&mut Policy)) {
        let wanted = self.wanted(change);
        self.operate(Act::Configure(wanted));
    }

    /// What would bring the settings to this; only what can be changed at run time may differ.
    pub fn wanted(&self, change: impl FnOnce(&mut Policy)) -> SettingsChange {
        fn wished<T: PartialEq>(before: T, after: T) -> Change<T> {
            if before == after {
                Change::Keep
            } else {
                Change::Value(after)
            }
        }
        let before = self.policy();
        let mut after = before.clone();
        change(&mut after);
        let change = SettingsChange {
            program_admission: wished(before.program_admission, after.program_admission),
            session_lifecycle: wished(before.session_lifecycle, after.session_lifecycle),
            paused: wished(before.paused, after.paused),
            headroom: wished(before.headroom, after.headroom),
            pressure_threshold: wished(before.pressure_threshold, after.pressure_threshold),
            expected_decode_cap: wished(before.expected_decode_cap, after.expected_decode_cap),
            max_wait: wished(before.max_wait, after.max_wait),
            scope: wished(before.scope, after.scope),
        };
        let settings = (*self.view().settings).clone();
        assert_eq!(settings.changed(&change).unwrap().effective(), after);
        change
    }

    /// An operator acts.
    pub fn operate(&mut self, act: Act) -> (Option<Seq>, Told) {
        let who = Label::new("operator").unwrap();
        self.tell(Command::Operate(Operation { who, act }))
    }

    /// What operators did, oldest first.
    pub fn audit(&self) -> Vec<AuditEntry> {
        self.machine().kept().audit
    }

    /// An acquire as [`acquire`] makes it.
    pub fn ask(&mut self, name: &str, reservation: u64) -> Told {
        self.ask_as(acquire(name, reservation))
    }

    pub fn ask_as(&mut self, acquire: Acquire) -> Told {
        self.tell(Command::Acquire(acquire)).1
    }

    /// An acquire that must be admitted; its answer was delivered.
    pub fn hold(&mut self, name: &str, reservation: u64) -> LeaseId {
        self.hold_as(acquire(name, reservation))
    }

    pub fn hold_as(&mut self, acquire: Acquire) -> LeaseId {
        let ticket = acquire.ticket.clone();
        let lease = admitted(&self.ask_as(acquire));
        self.deliver(ticket.as_str(), Some(lease));
        lease
    }

    /// An acquire that must wait with its call open.
    pub fn park(&mut self, name: &str, reservation: u64) {
        let told = self.ask(name, reservation);
        assert_eq!(told, Told::Parked, "{name} waits");
    }

    pub fn deliver(&mut self, name: &str, lease: Option<LeaseId>) {
        self.tell(Command::Delivered(Delivery {
            ticket: ticket(name),
            lease,
        }));
    }

    pub fn undeliver(&mut self, name: &str, lease: Option<LeaseId>) {
        self.tell(Command::Undelivered(Delivery {
            ticket: ticket(name),
            lease,
        }));
    }

    pub fn gone(&mut self, name: &str) {
        self.tell(Command::Gone(ticket(name)));
    }

    pub fn leave(&mut self, name: &str) -> Option<Answer> {
        match self.tell(Command::Leave(ticket(name))).1 {
            Told::Reply(Reply::Left(answer)) => answer,
            other => panic!("not an end of a call: {other:?}"),
        }
    }

    pub fn release(&mut self, lease: LeaseId) -> Result<ReleaseOutcome, LeaseGone> {
        match self.tell(Command::Release(lease)).1 {
            Told::Reply(Reply::Release(outcome)) => outcome,
            other => panic!("not a release: {other:?}"),
        }
    }

    pub fn renew(&mut self, lease: LeaseId) -> Result<LeaseView, LeaseGone> {
        self.renew_for(lease, None)
    }

    pub fn renew_for(&mut self, lease: LeaseId, ttl: Option<Span>) -> Result<LeaseView, LeaseGone> {
        match self.tell(Command::Renew { lease, ttl }).1 {
            Told::Reply(Reply::Lease(view)) => view,
            other => panic!("not a renewal: {other:?}"),
        }
    }

    pub fn read_lease(&mut self, lease: LeaseId) -> Result<LeaseView, LeaseGone> {
        match self.tell(Command::ReadLease(lease)).1 {
            Told::Reply(Reply::Lease(view)) => view,
            other => panic!("not a lease: {other:?}"),
        }
    }

    pub fn revoke(&mut self, lease: LeaseId) -> Result<(), LeaseGone> {
        match self.operate(Act::Revoke(lease)).1 {
            Told::Reply(Reply::Revoke(outcome)) => outcome,
            other => panic!("not a revocation: {other:?}"),
        }
    }

    pub fn cancel(&mut self, name: &str) -> CancelOutcome {
        match self.tell(Command::Cancel(ticket(name))).1 {
            Told::Reply(Reply::Cancel(outcome)) => outcome,
            other => panic!("not a cancel: {other:?}"),
        }
    }

    pub fn read(&mut self, name: &str) -> Option<TicketView> {
        match self.tell(Command::ReadTicket(ticket(name))).1 {
            Told::Reply(Reply::Ticket(view)) => view,
            other => panic!("not a ticket: {other:?}"),
        }
    }

    pub fn watch(&mut self, names: &[&str]) -> Vec<Watched> {
        let tickets = names.iter().map(|name| ticket(name)).collect();
        match self.tell(Command::Watch(tickets)).1 {
            Told::Reply(Reply::Watch(watched)) => {
                watched.into_iter().map(|(_, watched)| watched).collect()
            }
            other => panic!("not a watch: {other:?}"),
        }
    }

    // ---- sessions and closes -------------------------------------------------------------

    pub fn try_close(&mut self, name: &str, mode: CloseMode) -> (Option<Seq>, CloseReply) {
        let request = CloseRequest {
            session: session(name),
            mode,
            reason: None,
        };
        match self.tell(Command::Close(request)) {
            (seq, Told::Reply(Reply::Close(reply))) => (seq, reply),
            other => panic!("not a close: {other:?}"),
        }
    }

    /// A close with mode `join`; the intent as it was answered.
    pub fn close(&mut self, name: &str) -> CloseIntent {
        match self.try_close(name, CloseMode::Join).1 {
            CloseReply::Taken(close) => close,
            other => panic!("not taken: {other:?}"),
        }
    }

    pub fn abort(&mut self, name: &str) -> CloseIntent {
        match self.try_close(name, CloseMode::Abort).1 {
            CloseReply::Taken(close) => close,
            other => panic!("not taken: {other:?}"),
        }
    }

    pub fn retry(&mut self, close: CloseId) -> Result<CloseIntent, RetryRefused> {
        match self.tell(Command::RetryClose(close)).1 {
            Told::Reply(Reply::RetryClose(reply)) => reply,
            other => panic!("not a retry: {other:?}"),
        }
    }

    pub fn find_close(&mut self, close: CloseId) -> Option<CloseIntent> {
        match self.tell(Command::ReadClose(close)).1 {
            Told::Reply(Reply::ReadClose(close)) => close,
            other => panic!("not a close: {other:?}"),
        }
    }

    pub fn read_close(&mut self, close: CloseId) -> CloseIntent {
        self.find_close(close).expect("the close is known")
    }

    pub fn read_session(&mut self, name: &str) -> Option<SessionView> {
        match self.tell(Command::ReadSession(session(name))).1 {
            Told::Reply(Reply::Session(view)) => view,
            other => panic!("not a session: {other:?}"),
        }
    }

    /// Where an engine of a close stands.
    pub fn target(&mut self, close: CloseId, name: &str) -> Option<TargetState> {
        let close = self.read_close(close);
        close.targets.get(&engine(name)).map(|target| target.state)
    }

    /// The calls since the last time, in words: `close s at a`, `abort rid at b`.
    pub fn sent(&mut self) -> Vec<String> {
        let calls = std::mem::take(&mut self.calls);
        calls.iter().map(in_words).collect()
    }

    pub fn called(&mut self, results: Vec<(CallId, CallResult)>) -> Option<Seq> {
        self.tell(Command::Called(results)).0
    }

    /// The calls since the last time come to what `result` says; `None` leaves one open for good.
    pub fn answer_calls(&mut self, result: impl Fn(&EngineCall) -> Option<CallResult>) {
        let calls = std::mem::take(&mut self.calls).into_iter();
        let results: Vec<_> = calls
            .filter_map(|call| Some((call.id, result(&call)?)))
            .collect();
        if !results.is_empty() {
            self.called(results);
        }
    }

    /// Turns at the deadlines that the machine names and at each second up to `until`; calls are
    /// answered at once. Gives which calls went out when, in milliseconds from now.
    pub fn serve_until(
        &mut self,
        until: u64,
        result: impl Fn(&EngineCall) -> Option<CallResult>,
    ) -> Vec<(u64, String)> {
        let began = self.now;
        let mut log = Vec::new();
        for turns in 0.. {
            assert!(
                turns < 10_000,
                "the machine names a deadline that it does not serve"
            );
            log.extend(
                self.calls
                    .iter()
                    .map(|call| (self.now - began, in_words(call))),
            );
            self.answer_calls(&result);
            if !self.calls.is_empty() {
                continue;
            }
            if self.now == until {
                return log;
            }
            // A turn each second, so that no gap is a pause.
            let deadline = self.machine().next_deadline().map(Timestamp::millis);
            let second = self.now + 1_000;
            let next = deadline.map_or(second, |next| next.min(second));
            self.now = self.now.max(next).min(until);
            self.turn(Vec::new());
        }
        log
    }

    /// What is kept of closes and sessions is what the store holds.
    pub fn closes_are_stored(&self) {
        let live = self.machine().image();
        let stored = self.store.image();
        assert_eq!(live.closes, stored.closes, "closes as stored");
        assert_eq!(live.engines, stored.engines, "engines as stored");
    }

    /// The decisions of the queue since the last call, as ticket and outcome.
    pub fn decisions(&mut self) -> Vec<(String, Outcome)> {
        std::mem::take(&mut self.decided)
            .into_iter()
            .map(|(_, answer)| (answer.ticket.as_str().to_owned(), answer.outcome))
            .collect()
    }

    /// The tickets that the queue admitted since the last call, with their leases.
    pub fn grants(&mut self) -> Vec<(String, LeaseId)> {
        self.decisions()
            .into_iter()
            .filter_map(|(name, outcome)| match outcome {
                Outcome::Admit { lease, .. } => Some((name, lease)),
                Outcome::Bypass(_) | Outcome::Cancelled(_) | Outcome::Wait(_) => None,
            })
            .collect()
    }

    // ---- counters ------------------------------------------------------------------------

    pub fn admits(&self) -> u64 {
        self.view()
            .tally
            .scopes
            .iter()
            .map(|scope| scope.admit)
            .sum()
    }

    pub fn waits(&self) -> u64 {
        let tally = self.view().tally;
        tally.scopes.iter().flat_map(|scope| scope.wait).sum()
    }

    pub fn bypasses(&self, reason: BypassReason) -> u64 {
        let tally = self.view().tally;
        tally
            .scopes
            .iter()
            .map(|scope| scope.bypasses(reason))
            .sum()
    }

    pub fn cancels(&self) -> u64 {
        let tally = self.view().tally;
        tally.scopes.iter().flat_map(|scope| scope.cancelled).sum()
    }
}

fn in_words(call: &EngineCall) -> String {
    let at = call.engine.as_str();
    let at = at.trim_start_matches("http://").trim_end_matches(":30000");
    match &call.what {
        CallWhat::Close(session) => format!("close {} at {at}", session.as_str()),
        CallWhat::Abort(request) => format!("abort {} at {at}", request.as_str()),
    }
}

/// An engine answers with this status.
pub fn status_of(code: u16) -> Option<CallResult> {
    Some(CallResult::Status { code, text: None })
}

/// An engine does not answer.
pub fn no_answer() -> Option<CallResult> {
    Some(CallResult::Failed(CallFailure::Refused))
}

/// The answer to an acquire.
pub fn answer(told: &Told) -> Answer {
    match told {
        Told::Reply(Reply::Acquire(Ok(answer))) => answer.clone(),
        other => panic!("not an answer: {other:?}"),
    }
}

pub fn refusal(told: &Told) -> AcquireRefused {
    match told {
        Told::Reply(Reply::Acquire(Err(refused))) => *refused,
        other => panic!("not refused: {other:?}"),
    }
}

pub fn admitted(told: &Told) -> LeaseId {
    match answer(told).outcome {
        Outcome::Admit { lease, .. } => lease,
        other => panic!("not admitted: {other:?}"),
    }
}

pub fn bypassed(told: &Told) -> BypassReason {
    match answer(told).outcome {
        Outcome::Bypass(reason) => reason,
        other => panic!("not bypassed: {other:?}"),
    }
}

pub fn cancelled(told: &Told) -> CancelReason {
    match answer(told).outcome {
        Outcome::Cancelled(reason) => reason,
        other => panic!("not cancelled: {other:?}"),
    }
}

pub fn status(answer: &Answer) -> WaitStatus {
    match &answer.outcome {
        Outcome::Wait(status) => *status,
        other => panic!("does not wait: {other:?}"),
    }
}

/// Where a waiter stands, read without side effects.
pub fn place(gate: &mut Gate, name: &str) -> WaitStatus {
    match gate.read(name) {
        Some(TicketView::Answer(answer)) => status(&answer),
        other => panic!("{name} does not wait: {other:?}"),
    }
}

pub fn reason_of(gate: &mut Gate, name: &str) -> WaitReason {
    place(gate, name).reason
}

/// What a watch says of a decided ticket.
pub fn watched_answer(watched: &Watched) -> Answer {
    match watched {
        Watched::Decided(answer) => answer.clone(),
        other => panic!("not decided: {other:?}"),
    }
}
