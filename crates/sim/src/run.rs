//! One deterministic run of the whole: callers, connections, the gate around the core, its store,
//! a fleet, an operator, and what goes wrong between them. One seed decides everything.
//!
//! Time is virtual, in milliseconds. The order of events is their time, then the order in which
//! they were planned. After every turn the books are judged by the module `audit`.

use std::collections::{BTreeMap, VecDeque};

use kvgate_core::batch::Committed;
use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{CallFailure, CallId, CallResult, CallWhat, EngineCall};
use kvgate_core::command::{Act, Command, Operation};
use kvgate_core::decision::EndHow;
use kvgate_core::effect::{Answer, CloseReply, Effect, Outcome, Reply};
use kvgate_core::ids::{CloseId, Label, LeaseId, RunId, Seq, Term, TicketId};
use kvgate_core::machine::{Machine, StartParams};
use kvgate_core::policy::{AdmissionScope, Policy};
use kvgate_core::reading::Round;
use kvgate_core::settings::{Change, SettingsChange};
use kvgate_core::tally::LocalBypass;
use kvgate_core::turn::Turn;
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};

use crate::audit::{Audit, Held, Sight, TurnSeen, Violation, broken};
use crate::callers::{Call, Caller, Manner, Told, Wish};
use crate::dice::Dice;
use crate::faults::{FaultOdds, FaultyStore, Planted, StoreFault};
use crate::readings::World;
use crate::report::{Failure, Summary};
use crate::shell::{CallNo, Shell, delivery};

/// The model time at which every run begins.
const BEGIN: u64 = 1_800_000_000_000;

/// Time after the last caller is gone, by which everything must have ended.
const QUIET: u64 = 230_000;

/// Time after that, by which every finished ticket must be forgotten.
const FORGET: u64 = 640_000;

/// How long a call to an engine waits for an answer (CLO6).
const CALL_TIMEOUT: u64 = 5_000;

/// Steps of one run; beyond them it has lost its way.
const STEPS_MAX: u64 = 400_000;

/// What a run is made from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Decides everything.
    pub seed: u64,
    /// A fault that no honest gate has, for tests of the judge.
    pub planted: Option<PlantedFault>,
}

impl Plan {
    /// An honest run.
    #[must_use]
    pub const fn honest(seed: u64) -> Self {
        Self {
            seed,
            planted: None,
        }
    }
}

/// Where a fault is planted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlantedFault {
    /// In the store.
    Store(Planted),
    /// The writer does not look at deadlines and sleeps until something arrives.
    NoDeadlines,
    /// The gate forgets to say that a caller went away.
    LosesGone,
    /// The gate writes every answer and tells the core that it was not written.
    DeniesDelivery,
    /// The gate sends a close when it is asked for, whatever runs.
    ClosesAtOnce,
    /// The gate sends every call to an engine twice.
    CallsTwice,
    /// The gate takes every call that came to nothing for delivered.
    BelievesInDelivery,
    /// The gate aborts by the first letter of a request's name.
    AbortsTooMuch,
    /// The gate does not say that a session was used anew.
    HidesReopened,
}

/// What stands in the writer's inbox.
#[derive(Clone, Debug)]
enum Message {
    Call(CallNo, Call),
    EndWait(CallNo),
    Gone(CallNo),
    Signal(Command),
    Round(Round),
    /// What calls to engines came to.
    Called(Vec<(CallId, CallResult)>),
    Stop,
}

/// What will happen.
#[derive(Clone, Debug)]
enum Event {
    Arrive {
        caller: usize,
        life: u64,
        call: Call,
    },
    EndWait(u64, CallNo),
    Broken(CallNo),
    Written(u64, CallNo, Told),
    Reach {
        caller: usize,
        life: u64,
        told: Told,
    },
    Wake(usize, u64),
    Signal(u64, Command),
    /// A call of the gate reaches its engine; it went out at the given time.
    AtEngine(Box<EngineCall>, u64),
    /// The gate learns what a call came to.
    Came(CallId, CallResult),
    /// What calls came to is handed to the writer.
    HandIn,
    PollBegin(u64),
    PollEnd(u64, Timestamp),
    World,
    Operator,
    Kill,
    /// The process ends between a commit and its answers.
    Cut(u64),
    Stop,
    Freeze,
    End,
}

/// Who gets the answer to a command of the turn.
#[derive(Clone, Debug)]
enum Answerer {
    Acquire(CallNo, TicketId),
    Watch(CallNo),
    Leave(CallNo),
    Reloaded(TicketId),
    Release(CallNo, LeaseId),
    Renew(CallNo, LeaseId),
    Cancel(CallNo, TicketId),
    Close(CallNo),
    Nobody,
}

#[derive(Debug)]
struct Done {
    committed: Committed,
    answerers: Vec<Option<Answerer>>,
    last: bool,
}

#[derive(Debug)]
enum Process {
    Serving(Box<Machine>),
    Committing(u64, Box<Done>),
    /// The store failed; it is opened again at this time.
    Reopening(u64),
    Down(u64),
}

#[derive(Clone, Copy, Debug)]
struct Connection {
    caller: usize,
    life: u64,
}

struct Run {
    plan: Plan,
    now: u64,
    /// The gate's line minus model time.
    offset: i128,
    wall_shift: i128,
    dice: Dice,
    net: Dice,
    events: BTreeMap<(u64, u64), Event>,
    planned: u64,
    /// Calls that a planted fault made.
    planted: u64,
    calls: u64,
    callers: Vec<Caller>,
    lives: Vec<u64>,
    manner: Manner,
    world: World,
    fleet: FleetConfig,
    policy: Policy,
    store: FaultyStore,
    odds: FaultOdds,
    process: Process,
    boot: u64,
    shell: Shell,
    inbox: Vec<Message>,
    late_ends: Vec<CallNo>,
    reattach: bool,
    open: BTreeMap<CallNo, Connection>,
    frozen_until: u64,
    /// A commit took until then.
    slow_until: u64,
    last_turn: u64,
    tick: u64,
    turns: u64,
    idle_turns: u64,
    sight: Option<Sight>,
    audit: Audit,
    kills: bool,
    ended: bool,
    leases: Vec<LeaseId>,
    closes: Vec<CloseId>,
    /// How often a step report was asked for.
    steps_asked: u64,
    /// What calls to engines came to and the writer has not heard of.
    came: Vec<(CallId, CallResult)>,
    /// Waiters without an open connection, and since when.
    alone: BTreeMap<TicketId, Timestamp>,
    events_kept: usize,
    events_seen: VecDeque<String>,
}

/// Runs one seed, and keeps the last `events` events for the report of a failure.
///
/// # Errors
/// The first invariant that did not hold.
pub fn run(plan: Plan, events: usize) -> Result<Summary, Box<Failure>> {
    let mut run = Run::new(plan, events);
    match run.go() {
        Ok(()) => Ok(Summary {
            seeds: 1,
            turns: run.turns,
            millis: run.now - BEGIN,
            counts: run.audit.counts,
        }),
        Err(violation) => Err(Box::new(Failure {
            seed: plan.seed,
            violation,
            at: run.now - BEGIN,
            events: run.events_seen.into(),
        })),
    }
}

/// What the operator does.
fn operation(act: Act) -> Command {
    match Label::new("operator") {
        Ok(who) => Command::Operate(Operation { who, act }),
        // It is a good name.
        Err(_) => Command::ListEpochs,
    }
}

/// Settings of the session lifecycle.
fn lifecycle(dice: &mut Dice) -> Policy {
    let span = |millis: u64| Span::from_millis(millis);
    Policy {
        session_lifecycle: !dice.one_in(6),
        close_attempts: dice.pick(&[1, 2, 4, 8, 8], 8),
        close_deadline: span(dice.pick(&[2_000, 10_000, 40_000, 120_000], 120_000)),
        join_timeout: match dice.between(1, 3) {
            1 => Some(span(dice.pick(&[0, 500, 4_000, 20_000], 4_000))),
            _ => None,
        },
        session_idle_close: match dice.between(1, 4) {
            1 => Some(span(dice.pick(&[1_000, 8_000, 40_000], 8_000))),
            _ => None,
        },
        ..Policy::default()
    }
}

/// The id of a call that the core did not make.
const fn planted_id(number: u64) -> CallId {
    CallId {
        term: Term(0),
        number,
    }
}

fn millis(line: i128) -> u64 {
    u64::try_from(line).unwrap_or(0)
}

impl Run {
    fn new(plan: Plan, events_kept: usize) -> Self {
        let mut dice = Dice::new(plan.seed, 2);
        let world = World::new(BEGIN, &mut dice);
        let policy = Policy {
            program_admission: true,
            max_wait: Span::from_secs(dice.pick(&[0, 3, 10, 30, 60], 30)),
            max_waiting: dice.pick(&[2, 5, 100_000], 100_000),
            claim_grace: Span::from_secs(dice.pick(&[2, 5, 10], 10)),
            scope: if dice.one_in(3) {
                AdmissionScope::All
            } else {
                AdmissionScope::Train
            },
            ..lifecycle(&mut dice)
        };
        // Half of the runs have an honest disk.
        let odds = if dice.one_in(2) {
            FaultOdds {
                fails_unkept: dice.between(150, 1_500),
                fails_kept: dice.between(150, 1_500),
                crashes_unkept: dice.between(300, 2_500),
                crashes_kept: dice.between(300, 2_500),
            }
        } else {
            FaultOdds::default()
        };
        let planted = match plan.planted {
            Some(PlantedFault::Store(planted)) => Some(planted),
            _ => None,
        };
        let count = usize::try_from(dice.between(3, 14)).unwrap_or(3);
        Self {
            plan,
            now: BEGIN,
            offset: 0,
            wall_shift: 0,
            net: Dice::new(plan.seed, 3),
            events: BTreeMap::new(),
            planned: 0,
            planted: 0,
            calls: 0,
            callers: (0_u64..).take(count).map(Caller::new).collect(),
            lives: vec![0; count],
            manner: Manner {
                tokens: dice.between(300, 4_000),
                work: dice.pick(&[2_000, 10_000, 40_000], 10_000),
                think: dice.pick(&[500, 5_000, 20_000], 5_000),
                dies: dice.between(10, 60),
            },
            fleet: world.config(),
            world,
            policy,
            store: FaultyStore::new(plan.seed, odds, planted),
            odds,
            process: Process::Down(BEGIN),
            boot: 0,
            shell: Shell::default(),
            inbox: Vec::new(),
            late_ends: Vec::new(),
            reattach: false,
            open: BTreeMap::new(),
            frozen_until: 0,
            slow_until: 0,
            last_turn: BEGIN,
            tick: dice.pick(&[200, 500, 900], 900),
            turns: 0,
            idle_turns: 0,
            sight: None,
            audit: Audit::default(),
            kills: false,
            ended: false,
            leases: Vec::new(),
            closes: Vec::new(),
            steps_asked: 0,
            came: Vec::new(),
            alone: BTreeMap::new(),
            events_kept,
            events_seen: VecDeque::new(),
            dice,
        }
    }

    fn go(&mut self) -> Held {
        let length = self.dice.between(120, 900) * 1_000;
        self.plan_in(length, Event::End);
        for n in 0..self.callers.len() {
            let at = self.dice.between(0, 8_000);
            self.plan_in(at, Event::Wake(n, 0));
        }
        self.plan_in(1_000, Event::World);
        let at = self.dice.between(5_000, 60_000);
        self.plan_in(at, Event::Operator);
        self.kills = !self.dice.one_in(4);
        if self.kills {
            let at = self.dice.between(5_000, 120_000);
            self.plan_in(at, Event::Kill);
            let at = self.dice.between(10_000, 400_000);
            self.plan_in(at, Event::Stop);
        }
        let at = self.dice.between(10_000, 150_000);
        self.plan_in(at, Event::Freeze);
        let mut quiet_at = BEGIN + length + QUIET;
        let mut forgotten = false;
        for _ in 0..STEPS_MAX {
            let due = self.due();
            let next = self.events.first_key_value().map(|((at, _), _)| *at);
            if self.ended && due.min(next.unwrap_or(due)) > quiet_at {
                self.now = quiet_at;
                if !matches!(self.process, Process::Serving(_)) {
                    // In the middle of a commit: its end is at hand.
                    quiet_at += 1_000;
                    continue;
                }
                if !self.at_the_end(forgotten)? || forgotten {
                    return Ok(());
                }
                forgotten = true;
                quiet_at += FORGET;
                continue;
            }
            match next {
                Some(at) if at < due => {
                    self.now = self.now.max(at);
                    if let Some((_, event)) = self.events.pop_first() {
                        self.happens(event)?;
                    }
                }
                _ => {
                    self.now = self.now.max(due);
                    self.writer()?;
                }
            }
        }
        broken("I7", format!("{STEPS_MAX} steps and no end"))
    }

    /// Says whether the run goes on until everything is forgotten.
    fn at_the_end(&mut self, forgotten: bool) -> Result<bool, Violation> {
        let Process::Serving(machine) = &self.process else {
            broken("I11", "the gate does not serve at the end".to_owned())?;
            return Ok(false);
        };
        self.audit.at_the_end(&machine.view())?;
        let kept = machine.kept();
        self.audit.live_state(&kept)?;
        if forgotten {
            let left = kept.tickets.len();
            if left > 0 || !self.store.image().tickets.is_empty() {
                broken("I11", format!("{left} tickets are remembered for ever"))?;
            }
            self.audit.count("everything forgotten");
        }
        Ok(self.plan.seed.is_multiple_of(8))
    }

    // ---- helpers -----------------------------------------------------------------------------

    fn plan_in(&mut self, after: u64, event: Event) {
        self.planned += 1;
        self.events.insert((self.now + after, self.planned), event);
    }

    fn note(&mut self, words: impl FnOnce() -> String) {
        if self.events_kept == 0 {
            return;
        }
        if self.events_seen.len() == self.events_kept {
            self.events_seen.pop_front();
        }
        let line = format!("{:>9} {}", self.now - BEGIN, words());
        self.events_seen.push_back(line);
    }

    /// Now, on the gate's own line (TIM1).
    fn line(&self) -> Timestamp {
        Timestamp::from_millis(millis(i128::from(self.now) + self.offset))
    }

    /// When the writer does something next.
    fn due(&self) -> u64 {
        let due = match &self.process {
            Process::Serving(machine) => {
                let waits = self.inbox.is_empty()
                    && self.shell.follow_ups.is_empty()
                    && self.late_ends.is_empty()
                    && !self.reattach;
                if !waits {
                    self.now
                } else if self.plan.planted == Some(PlantedFault::NoDeadlines) {
                    self.last_turn + 60_000
                } else {
                    let deadline = machine
                        .next_deadline()
                        .map_or(u64::MAX, |at| millis(i128::from(at.millis()) - self.offset));
                    deadline.min(self.last_turn + self.tick)
                }
            }
            Process::Committing(until, _) | Process::Reopening(until) | Process::Down(until) => {
                *until
            }
        };
        match &self.process {
            Process::Down(_) => due,
            _ => due.max(self.frozen_until),
        }
    }

    // ---- events ------------------------------------------------------------------------------

    fn happens(&mut self, event: Event) -> Held {
        match event {
            Event::Wake(n, step) => self.wake(n, step),
            Event::Arrive { caller, life, call } => self.arrive(caller, life, call),
            Event::Reach { caller, life, told } => self.reach(caller, life, &told),
            Event::Written(boot, call, told) => self.written(boot, call, told),
            Event::Broken(call) => {
                if self.open.remove(&call).is_some() && !self.lost_gone() {
                    self.note(|| format!("connection of call {call} is gone"));
                    self.inbox.push(Message::Gone(call));
                }
            }
            Event::EndWait(boot, call) => {
                if boot == self.boot {
                    self.inbox.push(Message::EndWait(call));
                }
            }
            Event::Signal(boot, command) => {
                if boot == self.boot {
                    self.inbox.push(Message::Signal(command));
                }
            }
            Event::AtEngine(call, sent_at) => self.at_engine(&call, sent_at),
            Event::Came(id, result) => {
                if self.came.is_empty() {
                    let after = self.net.pick(&[0, 0, 3, 40, 1_500], 0);
                    self.plan_in(after, Event::HandIn);
                }
                self.came.push((id, result));
            }
            Event::HandIn => self.hand_outcomes_in(),
            Event::PollBegin(boot) if boot == self.boot => {
                if self.now < self.frozen_until {
                    let after = self.frozen_until - self.now;
                    self.plan_in(after, Event::PollBegin(boot));
                } else {
                    let takes = if self.net.one_in(30) {
                        self.net.between(200, 2_000)
                    } else {
                        self.net.between(3, 60)
                    };
                    let began_at = self.line();
                    self.plan_in(takes, Event::PollEnd(boot, began_at));
                    self.plan_in(1_000.max(takes), Event::PollBegin(boot));
                }
            }
            Event::PollEnd(boot, began_at) if boot == self.boot => {
                if self.now < self.frozen_until {
                    let after = self.frozen_until - self.now;
                    self.plan_in(after, Event::PollEnd(boot, began_at));
                } else {
                    let round = self.world.round(self.now, began_at, &mut self.net);
                    self.inbox.push(Message::Round(round));
                }
            }
            Event::PollBegin(_) | Event::PollEnd(..) => {}
            Event::World => {
                // What changes while the process is frozen, it sees afterwards.
                let now = self.now.max(self.frozen_until);
                if let Some(what) = self.world.change(now, &mut self.dice) {
                    self.audit.count(what);
                    self.note(|| what.to_owned());
                }
                let after = self.dice.between(1_000, 25_000);
                self.plan_in(after, Event::World);
            }
            Event::Operator if !self.ended => self.operate(),
            Event::Kill if !self.ended => {
                self.audit.count("killed");
                self.crash();
                let after = self.dice.between(20_000, 240_000);
                self.plan_in(after, Event::Kill);
            }
            Event::Stop if !self.ended => {
                if matches!(self.process, Process::Serving(_)) {
                    self.inbox.push(Message::Stop);
                }
                let after = self.dice.between(60_000, 500_000);
                self.plan_in(after, Event::Stop);
            }
            Event::Freeze if !self.ended => {
                let span = self.dice.pick(&[300, 1_200, 4_000, 12_000, 40_000], 1_200);
                self.audit.count("frozen");
                self.note(|| format!("frozen for {span} ms"));
                self.frozen_until = self.frozen_until.max(self.now + span);
                let after = self.dice.between(15_000, 200_000);
                self.plan_in(after, Event::Freeze);
            }
            Event::Cut(boot) => {
                if boot == self.boot && matches!(self.process, Process::Committing(..)) {
                    self.crash();
                }
            }
            Event::Operator | Event::Kill | Event::Stop | Event::Freeze => {}
            Event::End => self.end(),
        }
        Ok(())
    }

    fn lost_gone(&self) -> bool {
        self.plan.planted == Some(PlantedFault::LosesGone)
    }

    /// All clients are gone, and nothing goes wrong from here on.
    fn end(&mut self) {
        self.note(|| "all callers are gone".to_owned());
        self.ended = true;
        self.odds = FaultOdds::default();
        self.store.set_odds(self.odds);
        self.world.calm_down();
        self.frozen_until = self.frozen_until.min(self.now + 1_000);
        if let Process::Down(until) | Process::Reopening(until) = &mut self.process {
            *until = self.now + 500;
        }
        for caller in &mut self.callers {
            caller.retire();
        }
        // Nothing is held off any more.
        let change = SettingsChange::reset();
        self.inbox
            .push(Message::Signal(operation(Act::Configure(change))));
        let calls: Vec<CallNo> = self.open.keys().copied().collect();
        for call in calls {
            let after = self.net.between(0, 200);
            self.plan_in(after, Event::Broken(call));
        }
    }

    fn operate(&mut self) {
        self.track();
        let after = self.dice.between(10_000, 150_000);
        self.plan_in(after, Event::Operator);
        let command = match self.dice.between(1, 8) {
            7 | 8 => {
                let last = u64::try_from(self.closes.len()).unwrap_or(0);
                let n = usize::try_from(self.dice.between(0, last)).unwrap_or(0);
                let Some(close) = self.closes.get(n).copied() else {
                    return;
                };
                self.audit.count("close retry asked");
                if self.dice.one_in(2) {
                    operation(Act::RetryClose(close))
                } else {
                    Command::RetryClose(close)
                }
            }
            1 => {
                let count = self.leases.len();
                let last = u64::try_from(count).unwrap_or(0).saturating_sub(1);
                let n = usize::try_from(self.dice.between(0, last)).unwrap_or(0);
                let Some(lease) = self.leases.get(n).copied() else {
                    return;
                };
                self.audit.count("revocation asked");
                operation(Act::Revoke(lease))
            }
            2 => Command::LocalBypasses(vec![(LocalBypass::Timeout, 2)]),
            _ => {
                let change = self.settings_change();
                self.audit.count("settings changed");
                self.note(|| format!("settings {change:?}"));
                // Nothing stays off for long.
                let after = self.dice.between(500, 20_000);
                let on = SettingsChange {
                    program_admission: Change::Value(true),
                    paused: Change::Configured,
                    session_lifecycle: if self.dice.one_in(2) {
                        Change::Value(true)
                    } else {
                        Change::Keep
                    },
                    ..SettingsChange::default()
                };
                let on = operation(Act::Configure(on));
                self.plan_in(after, Event::Signal(self.boot, on));
                operation(Act::Configure(change))
            }
        };
        self.inbox.push(Message::Signal(command));
    }

    fn settings_change(&mut self) -> SettingsChange {
        let mut change = SettingsChange::default();
        match self.dice.between(1, 8) {
            1 => change.paused = Change::Value(true),
            2 => {
                let share = self.dice.pick(&[0, 500_000, 900_000], 1);
                change.headroom = Change::Value(Ppm::clamped(share));
            }
            3 => {
                let wait = self.dice.pick(&[0, 3, 10, 30, 60], 30);
                change.max_wait = Change::Value(Span::from_secs(wait));
            }
            4 => {
                let cap = self.dice.one_in(2).then(|| Tokens::clamped(100));
                change.expected_decode_cap = Change::Value(cap);
            }
            5 => change.program_admission = Change::Value(false),
            6 => change.session_lifecycle = Change::Value(self.dice.one_in(2)),
            7 => change.scope = Change::Value(AdmissionScope::All),
            _ => change = SettingsChange::reset(),
        }
        change
    }

    /// A tracker asks for the report of a step, of two runs in turns; every fourth time it asks for the
    /// last one again.
    fn track(&mut self) {
        self.steps_asked = self.steps_asked.saturating_add(1);
        let step = self
            .steps_asked
            .saturating_sub(u64::from(self.steps_asked.is_multiple_of(4)));
        let name = if step.is_multiple_of(3) { "" } else { "run" };
        if let Ok(run) = RunId::new(name) {
            self.inbox
                .push(Message::Signal(Command::TakeStep { run, step }));
        }
    }

    // ---- callers and the network ---------------------------------------------------------------

    fn wake(&mut self, n: usize, step: u64) {
        let mut wishes = Vec::new();
        if let Some(caller) = self.callers.get_mut(n) {
            caller.wake(step, self.now, self.manner, &mut self.dice, &mut wishes);
        }
        self.grant_wishes(n, wishes);
    }

    fn reach(&mut self, n: usize, life: u64, told: &Told) {
        if self.lives.get(n) != Some(&life) {
            return;
        }
        let mut wishes = Vec::new();
        if let Some(caller) = self.callers.get_mut(n) {
            caller.told(told, self.now, self.manner, &mut self.dice, &mut wishes);
        }
        self.grant_wishes(n, wishes);
    }

    fn grant_wishes(&mut self, n: usize, wishes: Vec<Wish>) {
        for wish in wishes {
            let life = self.lives.get(n).copied().unwrap_or(0);
            match wish {
                Wish::Wake(after, step) => self.plan_in(after, Event::Wake(n, step)),
                Wish::Note(what) => {
                    self.audit.count(what);
                    self.note(|| format!("caller {n}: {what}"));
                }
                Wish::Send(call, after) => {
                    if self.net.one_in(50) {
                        self.audit.count("request lost");
                        continue;
                    }
                    let on_the_way = if self.net.one_in(25) {
                        self.net.between(50, 1_500)
                    } else {
                        self.net.between(1, 15)
                    };
                    let arrive = Event::Arrive {
                        caller: n,
                        life,
                        call,
                    };
                    if self.net.one_in(60) {
                        self.audit.count("request doubled on the way");
                        let late = self.net.between(0, 2_000);
                        self.plan_in(after + on_the_way + late, arrive.clone());
                    }
                    self.plan_in(after + on_the_way, arrive);
                }
                Wish::HangUp { heard } => {
                    let calls: Vec<CallNo> = self
                        .open
                        .iter()
                        .filter(|(_, connection)| connection.caller == n)
                        .map(|(call, _)| *call)
                        .collect();
                    if let Some(life) = self.lives.get_mut(n) {
                        *life += 1;
                    }
                    if heard {
                        for call in calls {
                            let after = self.net.between(0, 80);
                            self.plan_in(after, Event::Broken(call));
                        }
                    }
                }
            }
        }
    }

    fn arrive(&mut self, caller: usize, life: u64, call: Call) {
        let refused = match &self.process {
            Process::Down(_) => Some(Told::Broken),
            Process::Reopening(_) => Some(Told::Unavailable),
            // A start refuses most calls until it has read the fleet (DUR3).
            Process::Serving(machine) if machine.is_starting() => {
                self.net.one_in(2).then_some(Told::Unavailable)
            }
            Process::Serving(_) | Process::Committing(..) => None,
        };
        if let Some(told) = refused {
            let after = self.net.between(1, 20);
            self.plan_in(after, Event::Reach { caller, life, told });
            return;
        }
        self.calls += 1;
        let number = self.calls;
        self.note(|| format!("call {number} of caller {caller}: {call:?}"));
        // A caller that died meanwhile: the end of its connection comes right behind the request.
        if self.lives.get(caller) != Some(&life) {
            let after = self.net.between(0, 20);
            self.plan_in(after, Event::Broken(number));
        }
        self.open.insert(number, Connection { caller, life });
        if let Call::Acquire(_, wait) | Call::Watch(_, wait) = &call
            && *wait > 0
        {
            self.plan_in(*wait, Event::EndWait(self.boot, number));
        }
        self.inbox.push(Message::Call(number, call));
    }

    /// Answers that the gate has ready are on their way to their connections.
    fn send_ready(&mut self) {
        for (call, told) in std::mem::take(&mut self.shell.ready) {
            let after = self.net.between(0, 4);
            self.plan_in(after, Event::Written(self.boot, call, told));
        }
    }

    fn written(&mut self, boot: u64, call: CallNo, told: Told) {
        if boot != self.boot {
            return;
        }
        let answers: Vec<&Answer> = match &told {
            Told::Answer(answer) => vec![answer],
            Told::Watched(results) => results
                .iter()
                .filter_map(|(_, answer)| answer.as_ref())
                .collect(),
            _ => Vec::new(),
        };
        let deliveries: Vec<_> = answers.into_iter().filter_map(delivery).collect();
        let connection = self.open.remove(&call);
        let broke = self.net.one_in(40);
        let whole = connection.is_some() && !broke;
        let denied = self.plan.planted == Some(PlantedFault::DeniesDelivery);
        for delivery in deliveries {
            self.audit
                .count(if whole { "delivered" } else { "undelivered" });
            if denied
                && whole
                && let Some(lease) = delivery.lease
            {
                self.audit.claimed(lease);
            }
            let command = if whole && !denied {
                Command::Delivered(delivery)
            } else {
                Command::Undelivered(delivery)
            };
            let after = self.net.between(0, 10);
            self.plan_in(after, Event::Signal(boot, command));
        }
        let Some(Connection { caller, life }) = connection else {
            return;
        };
        self.note(|| format!("answer of call {call}, whole {whole}: {told:?}"));
        let after = if self.net.one_in(20) {
            self.net.between(50, 2_500)
        } else {
            self.net.between(1, 15)
        };
        if !whole {
            let told = Told::Broken;
            self.plan_in(after, Event::Reach { caller, life, told });
        } else if self.net.one_in(40) {
            self.audit.count("answer lost");
        } else {
            self.plan_in(after, Event::Reach { caller, life, told });
        }
    }

    // ---- calls to engines ------------------------------------------------------------------------

    /// A call leaves the gate: directly to its engine (CLO4).
    fn send_to_engine(&mut self, call: EngineCall) {
        self.note(|| format!("sent {call:?}"));
        let on_the_way = if self.net.one_in(20) {
            self.net.between(100, 4_000)
        } else {
            self.net.between(1, 30)
        };
        let sent_at = self.now;
        self.plan_in(on_the_way, Event::AtEngine(Box::new(call), sent_at));
    }

    fn at_engine(&mut self, call: &EngineCall, sent_at: u64) {
        let mut served = self.world.serve(self.now, &call.engine, &call.what);
        if served.taken {
            if let CallWhat::Abort(begin) = &call.what {
                self.audit.count("aborted by an engine");
                self.abort_callers(&begin.clone());
            }
            // Not before the gate could have seen the incarnation: it would take the failure for a
            // sign of the old one.
            if served.seen && self.net.one_in(30) {
                self.audit.count("call done and its answer lost");
                served.result = CallResult::Failed(if self.net.one_in(2) {
                    CallFailure::Timeout
                } else {
                    CallFailure::Refused
                });
            }
        }
        let believes = self.plan.planted == Some(PlantedFault::BelievesInDelivery);
        let result = if believes && matches!(served.result, CallResult::Failed(_)) {
            CallResult::Status {
                code: 200,
                text: None,
            }
        } else {
            served.result
        };
        self.audit.count(match &result {
            CallResult::Status {
                code: 200..=299, ..
            } => "call answered well",
            CallResult::Status { .. } => "call answered oddly",
            CallResult::Failed(CallFailure::Timeout) => "call timed out",
            CallResult::Failed(_) => "call not connected",
        });
        let after = match &result {
            CallResult::Failed(CallFailure::Timeout) => {
                (sent_at + CALL_TIMEOUT).saturating_sub(self.now)
            }
            _ => self.net.between(1, 30),
        };
        self.plan_in(after, Event::Came(call.id, result));
    }

    /// The requests whose names begin so end at their engine, whose ever they are.
    fn abort_callers(&mut self, begin: &Label) {
        for n in 0..self.callers.len() {
            let mut wishes = Vec::new();
            if let Some(caller) = self.callers.get_mut(n) {
                caller.aborted(begin, &mut self.dice, &mut wishes);
            }
            self.grant_wishes(n, wishes);
        }
    }

    /// What calls came to reaches the writer, in groups and in any order.
    fn hand_outcomes_in(&mut self) {
        if matches!(self.process, Process::Down(_)) {
            // Nobody is there to hear of it; the next writer may.
            self.plan_in(700, Event::HandIn);
            return;
        }
        let mut group = Vec::new();
        while !self.came.is_empty() && !self.net.one_in(5) {
            let last = u64::try_from(self.came.len()).unwrap_or(1) - 1;
            let n = usize::try_from(self.net.between(0, last)).unwrap_or(0);
            group.push(self.came.swap_remove(n));
        }
        if !self.came.is_empty() {
            let after = self.net.between(0, 50);
            self.plan_in(after, Event::HandIn);
        }
        if !group.is_empty() {
            self.inbox.push(Message::Called(group));
        }
    }

    /// Faults of a gate that hands on what the core did not say.
    fn plant(&mut self, effects: &mut Vec<Effect>) {
        let mut more = Vec::new();
        for effect in effects.iter_mut() {
            match (self.plan.planted, effect) {
                (
                    Some(PlantedFault::ClosesAtOnce),
                    Effect::Reply {
                        reply: Reply::Close(CloseReply::Taken(close)),
                        ..
                    },
                ) => {
                    for engine in close.targets.keys() {
                        self.planted += 1;
                        more.push(Effect::Call(EngineCall {
                            id: planted_id(self.planted),
                            engine: engine.clone(),
                            what: CallWhat::Close(close.session.clone()),
                        }));
                    }
                }
                (Some(PlantedFault::CallsTwice), Effect::Call(call)) => {
                    self.planted += 1;
                    more.push(Effect::Call(EngineCall {
                        id: planted_id(self.planted),
                        ..call.clone()
                    }));
                }
                (Some(PlantedFault::AbortsTooMuch), Effect::Call(call)) => {
                    if let CallWhat::Abort(begin) = &mut call.what
                        && let Some(first) = begin.as_str().get(..1)
                        && let Ok(short) = Label::new(first)
                    {
                        *begin = short;
                    }
                }
                (
                    Some(PlantedFault::HidesReopened),
                    Effect::Parked {
                        session_reopened, ..
                    },
                ) => *session_reopened = false,
                (
                    Some(PlantedFault::HidesReopened),
                    Effect::Reply {
                        reply: Reply::Acquire(Ok(answer)),
                        ..
                    },
                ) => answer.session_reopened = false,
                _ => {}
            }
        }
        effects.append(&mut more);
    }

    // ---- the process ---------------------------------------------------------------------------

    fn writer(&mut self) -> Held {
        match std::mem::replace(&mut self.process, Process::Down(self.now)) {
            Process::Serving(machine) => self.turn(machine),
            Process::Committing(_, done) => self.perform(*done),
            Process::Reopening(_) | Process::Down(_) => self.boot(),
        }
    }

    /// The process ends where it stands; the image stays.
    fn crash(&mut self) {
        self.note(|| "the process is gone".to_owned());
        if matches!(self.process, Process::Committing(..)) {
            self.audit.count("gone between commit and answer");
        }
        self.alone.clear();
        let downtime = if self.dice.one_in(12) {
            self.dice.between(60_000, 300_000)
        } else {
            self.dice.between(200, 20_000)
        };
        let until = if self.ended { 500 } else { downtime };
        self.process = Process::Down(self.now + until);
        self.boot += 1;
        self.shell = Shell::default();
        self.inbox.clear();
        self.late_ends.clear();
        // Those of a former writer must be nothing to the next one.
        if self.net.one_in(2) {
            self.came.clear();
        }
        self.reattach = false;
        self.frozen_until = 0;
        for (_, Connection { caller, life }) in std::mem::take(&mut self.open) {
            if !self.net.one_in(5) {
                let after = self.net.between(1, 60);
                let told = Told::Broken;
                self.plan_in(after, Event::Reach { caller, life, told });
            }
        }
        // The wall clock may be set while nobody looks.
        if self.dice.one_in(8) {
            self.audit.count("wall clock set");
            let by = i128::from(self.dice.pick(&[60_000, 3_600_000, 86_400_000], 60_000));
            self.wall_shift += if self.dice.one_in(2) { by } else { -by };
        }
        self.offset = self.wall_shift;
    }

    /// Opens the store and takes over.
    fn boot(&mut self) -> Held {
        // A start may find other settings in its file.
        if self.dice.one_in(4) {
            let on = self.policy.session_lifecycle;
            let drawn = lifecycle(&mut self.dice);
            self.policy = Policy {
                max_waiting: self.dice.pick(&[2, 5, 100_000], 100_000),
                session_lifecycle: on,
                close_attempts: drawn.close_attempts,
                close_deadline: drawn.close_deadline,
                join_timeout: drawn.join_timeout,
                session_idle_close: drawn.session_idle_close,
                ..self.policy.clone()
            };
        }
        let image = self.store.image();
        let stored = i128::from(image.now.millis()) - i128::from(self.now);
        self.offset = self.offset.max(stored);
        let now = self.line();
        self.note(|| format!("start at {now:?}"));
        self.audit.count("start");
        self.world.read_anew();
        self.audit.lost();
        let salt = match self.plan.planted {
            Some(PlantedFault::Store(Planted::RepeatsLeaseIds)) => 7,
            _ => self.dice.any(),
        };
        // Whoever starts it may want back what is configured.
        let reset_settings = self.dice.one_in(6);
        if reset_settings && image.overrides.changed_at.is_some() {
            self.audit.count("settings returned");
        }
        let batch = Machine::restore(
            image,
            StartParams {
                now,
                salt,
                seed: self.plan.seed,
                policy: self.policy.clone(),
                reset_settings,
                fleet: self.fleet.clone(),
            },
        );
        let committed = batch.commit(&mut self.store);
        for commit in self.store.take_kept() {
            self.audit.took_over(&commit, now, self.now, &self.world)?;
        }
        match committed {
            Ok(committed) => {
                let calls = committed
                    .effects
                    .iter()
                    .any(|effect| matches!(effect, Effect::Call(_)));
                if calls {
                    return broken("I12", "a start calls engines before it has read".to_owned());
                }
                let machine = committed.machine;
                self.audit.recovered(&machine.kept(), now)?;
                self.sight = Some(Sight::of(&machine.view()));
                self.last_turn = self.now;
                self.reattach = !self.shell.tickets().is_empty();
                self.boot += 1;
                self.plan_in(0, Event::PollBegin(self.boot));
                self.process = Process::Serving(machine);
            }
            Err(fault) => self.failed(fault),
        }
        Ok(())
    }

    fn failed(&mut self, fault: StoreFault) {
        match fault {
            StoreFault::Crashed => {
                self.audit.count("store crash");
                self.crash();
            }
            StoreFault::Failed => {
                self.audit.count("store failure");
                self.alone.clear();
                self.note(|| "the store failed".to_owned());
                self.boot += 1;
                let after = self.dice.pick(&[100, 100, 400, 3_000], 100);
                self.process = Process::Reopening(self.now + after);
                self.answer_without_store();
            }
        }
    }

    /// DUR4, as far as it is built: what came in is refused.
    fn answer_without_store(&mut self) {
        for message in std::mem::take(&mut self.inbox) {
            match message {
                Message::Call(call, _) => self.shell.ready.push((call, Told::Unavailable)),
                Message::EndWait(call) => self.shell.refuse(call),
                Message::Gone(call) => {
                    self.shell.gone(call);
                }
                Message::Signal(_) | Message::Round(_) | Message::Called(_) | Message::Stop => {}
            }
        }
        self.late_ends.clear();
        self.shell.follow_ups.clear();
        self.send_ready();
    }

    fn turn(&mut self, machine: Box<Machine>) -> Held {
        let now = self.line();
        self.turns += 1;
        let deadline = machine.next_deadline();
        let gap = self.now - self.last_turn;
        let excused = self.frozen_until > self.last_turn || self.slow_until > self.last_turn;
        if gap > 1_000 && !excused {
            return broken("I7", format!("the writer slept for {gap} ms"));
        }
        self.last_turn = self.now;
        let held_before = self.audit.holds();
        self.audit.turn_begins(now, self.now);
        let Some(before) = self.sight.clone() else {
            return broken("I9", "a turn before a start".to_owned());
        };
        let seq_before = self.audit.seq();
        let mut turn = machine.turn(now);
        let mut answerers = Vec::new();
        let (mixed, last) = self.hand_in(&mut turn, &mut answerers, now);
        let batch = if last {
            turn.finish_last()
        } else {
            turn.finish()
        };
        let durable_already = batch.is_durable_already();
        let early = answerers.is_empty()
            && !last
            && gap <= 1_000
            && !held_before
            && deadline.is_some_and(|deadline| now < deadline);
        let committed = batch.commit(&mut self.store);
        let mut seen = TurnSeen {
            now,
            before,
            after: None,
            mixed,
        };
        let committed = match committed {
            Ok(mut committed) => {
                self.plant(&mut committed.effects);
                committed
            }
            Err(fault) => {
                for commit in self.store.take_kept() {
                    self.audit.count("commit kept and not acknowledged");
                    self.audit.kept(&commit, &seen, &self.world)?;
                }
                // Nobody is told anything.
                for answerer in answerers {
                    match answerer {
                        Answerer::Leave(call) => self.shell.refuse(call),
                        Answerer::Acquire(call, _)
                        | Answerer::Watch(call)
                        | Answerer::Release(call, _)
                        | Answerer::Renew(call, _)
                        | Answerer::Cancel(call, _)
                        | Answerer::Close(call) => {
                            self.shell.ready.push((call, Told::Unavailable));
                        }
                        Answerer::Reloaded(_) | Answerer::Nobody => {}
                    }
                }
                self.send_ready();
                self.failed(fault);
                return Ok(());
            }
        };
        let view = committed.machine.view();
        let after = Sight::of(&view);
        seen.after = Some(after.clone());
        self.sight = Some(after);
        let answerers: Vec<Option<Answerer>> = answerers.into_iter().map(Some).collect();
        if early && !(durable_already && committed.effects.is_empty()) {
            return broken("I7", format!("something happened before {deadline:?}"));
        }
        self.judge(&committed, &answerers, &seen, seq_before)?;
        if !last {
            self.audit.at_rest(&view)?;
            self.nobody_stays_in_line_alone(now, view.policy.claim_grace)?;
        }
        if self.turns.is_multiple_of(64) {
            self.audit.live_state(&committed.machine.kept())?;
        }
        // The core asks for a turn and does nothing in it: it would spin.
        let idle = answerers.is_empty() && durable_already && gap == 0;
        self.idle_turns = if idle { self.idle_turns + 1 } else { 0 };
        if self.idle_turns > 20 {
            return broken("I7", format!("turns without end, due {deadline:?}"));
        }
        let takes = if durable_already {
            0
        } else if self.net.one_in(3_000) && !self.ended {
            self.audit.count("commit of many seconds");
            self.net.between(1_100, 20_000)
        } else if self.net.one_in(150) {
            self.net.between(100, 900)
        } else {
            self.net.between(1, 6)
        };
        let done = Box::new(Done {
            committed,
            answerers,
            last,
        });
        if takes > 1 && self.kills && !self.ended && self.net.one_in(500) {
            let after = self.net.between(1, takes - 1);
            self.plan_in(after, Event::Cut(self.boot));
        }
        self.slow_until = self.now + takes;
        self.process = Process::Committing(self.slow_until, done);
        Ok(())
    }

    /// I6: a waiter without an open connection leaves within the claim grace and a turn (TIC3).
    fn nobody_stays_in_line_alone(&mut self, now: Timestamp, grace: Span) -> Held {
        let mut alone = BTreeMap::new();
        for ticket in self.audit.waiters() {
            let present = self
                .shell
                .calls_of(ticket)
                .any(|call| self.open.contains_key(&call));
            if !present {
                let since = self.alone.get(ticket).copied().unwrap_or(now);
                alone.insert(ticket.clone(), since);
            }
        }
        self.alone = alone;
        if self.audit.holds() {
            return Ok(());
        }
        let second = Span::from_secs(1);
        for (ticket, since) in &self.alone {
            let until = self.audit.not_blocked(*since).after(grace).after(second);
            if now > until {
                return broken(
                    "I6",
                    format!("{ticket:?} is in line and alone since {since:?}"),
                );
            }
        }
        Ok(())
    }

    /// The commands of a turn. Says whether a round or settings were among them, and whether it is
    /// the last turn.
    fn hand_in(
        &mut self,
        turn: &mut Turn,
        answerers: &mut Vec<Answerer>,
        now: Timestamp,
    ) -> (bool, bool) {
        let mut mixed = false;
        let mut last = false;
        if std::mem::take(&mut self.reattach) {
            for ticket in self.shell.tickets() {
                turn.handle(Command::Watch(vec![ticket.clone()]));
                answerers.push(Answerer::Reloaded(ticket));
            }
        }
        for command in std::mem::take(&mut self.shell.follow_ups) {
            self.signal(command, turn, answerers, now);
        }
        for call in std::mem::take(&mut self.late_ends) {
            if let Some(command) = self.shell.end_wait(call) {
                turn.handle(command);
                answerers.push(Answerer::Leave(call));
            }
        }
        for message in std::mem::take(&mut self.inbox) {
            match message {
                Message::Call(call, asked) => self.take_call(call, asked, turn, answerers),
                Message::EndWait(call) => {
                    if !self.shell.has(call) {
                        self.late_ends.push(call);
                    } else if let Some(command) = self.shell.end_wait(call) {
                        turn.handle(command);
                        answerers.push(Answerer::Leave(call));
                    }
                }
                Message::Gone(call) => {
                    for command in self.shell.gone(call) {
                        self.signal(command, turn, answerers, now);
                    }
                }
                Message::Signal(command) => {
                    let act = match &command {
                        Command::Operate(operation) => Some(&operation.act),
                        _ => None,
                    };
                    mixed |= matches!(act, Some(Act::Configure(_)));
                    if let Command::RetryClose(close) = &command {
                        self.audit.closings.retried(*close);
                    }
                    if let Some(Act::RetryClose(close)) = act {
                        self.audit.closings.retried(*close);
                    }
                    self.signal(command, turn, answerers, now);
                }
                Message::Round(round) => {
                    mixed = true;
                    self.audit.round(round.began_at);
                    turn.handle(Command::Round(round));
                    answerers.push(Answerer::Nobody);
                }
                Message::Called(results) => {
                    for (id, result) in &results {
                        if !self.audit.closings.called(*id, result, now) {
                            self.audit.count("outcome of an earlier writer");
                        }
                    }
                    turn.handle(Command::Called(results));
                    answerers.push(Answerer::Nobody);
                }
                Message::Stop => last = true,
            }
        }
        if last {
            self.audit.count("orderly stop");
            self.note(|| "orderly stop".to_owned());
            self.shell.refuse_all();
        }
        (mixed, last)
    }

    fn signal(
        &mut self,
        command: Command,
        turn: &mut Turn,
        answerers: &mut Vec<Answerer>,
        now: Timestamp,
    ) {
        match &command {
            Command::Gone(ticket) => self.audit.away(ticket, now),
            Command::Delivered(delivery) => match delivery.lease {
                Some(lease) => self.audit.claimed(lease),
                None => self.audit.told_bypass(&delivery.ticket),
            },
            _ => {}
        }
        turn.handle(command);
        answerers.push(Answerer::Nobody);
    }

    fn take_call(
        &mut self,
        call: CallNo,
        asked: Call,
        turn: &mut Turn,
        answerers: &mut Vec<Answerer>,
    ) {
        let (command, answerer) = match asked {
            Call::Acquire(acquire, _) => {
                self.alone.remove(&acquire.ticket);
                let ticket = acquire.ticket.clone();
                (Command::Acquire(acquire), Answerer::Acquire(call, ticket))
            }
            Call::Watch(tickets, _) => {
                for ticket in &tickets {
                    self.alone.remove(ticket);
                }
                (Command::Watch(tickets), Answerer::Watch(call))
            }
            Call::Release(lease) => (Command::Release(lease), Answerer::Release(call, lease)),
            Call::Renew(lease, ttl) => {
                (Command::Renew { lease, ttl }, Answerer::Renew(call, lease))
            }
            Call::Cancel(ticket) => (
                Command::Cancel(ticket.clone()),
                Answerer::Cancel(call, ticket),
            ),
            Call::Close(request) => (Command::Close(request), Answerer::Close(call)),
        };
        turn.handle(command);
        answerers.push(answerer);
    }

    /// Holds a durable turn against the books, before anybody is told of it.
    fn judge(
        &mut self,
        committed: &Committed,
        answerers: &[Option<Answerer>],
        seen: &TurnSeen,
        seq_before: Seq,
    ) -> Held {
        for effect in &committed.effects {
            if let Effect::Reply { tag, reply, .. } = effect
                && let Some(Some(Answerer::Renew(_, lease))) = answerers.get(tag.0)
                && let Reply::Lease(Ok(view)) = reply
            {
                self.audit.renewed(*lease, view.lease.ends_at, seen.now);
            }
        }
        for commit in self.store.take_kept() {
            self.audit.kept(&commit, seen, &self.world)?;
        }
        for effect in &committed.effects {
            let said = match effect {
                Effect::Parked {
                    tag,
                    session_reopened: true,
                    ..
                } => match answerers.get(tag.0) {
                    Some(Some(Answerer::Acquire(_, ticket))) => Some(ticket),
                    _ => None,
                },
                Effect::Reply {
                    reply: Reply::Acquire(Ok(answer)),
                    ..
                } if answer.session_reopened => Some(&answer.ticket),
                _ => None,
            };
            if let Some(ticket) = said {
                self.audit.closings.said_reopened(ticket)?;
            }
        }
        self.audit.told(&committed.effects, seq_before, seen)?;
        for effect in &committed.effects {
            match effect {
                Effect::Decided { answer, .. } => {
                    let present = self.shell.has_ticket(&answer.ticket);
                    if present && self.audit.ended(&answer.ticket) == Some(EndHow::Dropped) {
                        return broken(
                            "I6",
                            format!("{:?} was dropped with a call open", answer.ticket),
                        );
                    }
                }
                Effect::Reply { tag, reply, .. } => match (answerers.get(tag.0), reply) {
                    (Some(Some(Answerer::Release(_, lease))), Reply::Release(_)) => {
                        self.audit.told_released(*lease)?;
                    }
                    (Some(Some(Answerer::Cancel(_, ticket))), Reply::Cancel(_)) => {
                        self.audit.told_cancelled(ticket)?;
                    }
                    (Some(Some(Answerer::Acquire(..))), Reply::Acquire(Ok(answer)))
                    | (_, Reply::Left(Some(answer))) => {
                        if matches!(answer.outcome, Outcome::Wait(_)) {
                            self.audit.away(&answer.ticket, seen.now);
                        }
                    }
                    _ => {}
                },
                Effect::Parked { .. } | Effect::Call(_) | Effect::CloseDone(_) => {}
            }
        }
        Ok(())
    }

    /// The turn is durable: answer.
    fn perform(&mut self, done: Done) -> Held {
        let Done {
            committed,
            mut answerers,
            last,
        } = done;
        for effect in committed.effects {
            match effect {
                Effect::Decided { answer, .. } => {
                    self.learn(&answer);
                    let open = &self.open;
                    self.shell
                        .decided(&answer, &|call| open.contains_key(&call));
                }
                Effect::Parked { tag, .. } => {
                    if let Some(Answerer::Acquire(call, ticket)) =
                        answerers.get_mut(tag.0).and_then(Option::take)
                    {
                        let open = self.open.contains_key(&call);
                        self.shell.park(call, ticket, open);
                    }
                }
                Effect::Reply { tag, reply, .. } => {
                    if let Some(answerer) = answerers.get_mut(tag.0).and_then(Option::take) {
                        self.answer(answerer, reply);
                    }
                }
                Effect::Call(call) => self.send_to_engine(call),
                Effect::CloseDone(close) => {
                    self.note(|| format!("done: {close:?}"));
                }
            }
        }
        self.shell.end_touched();
        if last {
            self.shell.refuse_all();
            self.send_ready();
            self.crash();
            return Ok(());
        }
        self.send_ready();
        self.process = Process::Serving(committed.machine);
        Ok(())
    }

    fn learn(&mut self, answer: &Answer) {
        if let Outcome::Admit { lease, .. } = &answer.outcome {
            if self.leases.len() > 20 {
                self.leases.clear();
            }
            self.leases.push(*lease);
        }
    }

    fn answer(&mut self, answerer: Answerer, reply: Reply) {
        match (answerer, reply) {
            (Answerer::Acquire(call, _), Reply::Acquire(Ok(answer))) => {
                self.learn(&answer);
                if self.open.contains_key(&call) {
                    self.shell.ready.push((call, Told::Answer(answer)));
                } else {
                    self.shell.undelivered(&answer);
                }
            }
            (Answerer::Acquire(call, _), Reply::Acquire(Err(_))) => {
                self.shell.ready.push((call, Told::Conflict));
            }
            (Answerer::Watch(call), Reply::Watch(watched)) => {
                let open = self.open.contains_key(&call);
                self.shell.watch(call, watched, open);
            }
            (Answerer::Leave(call), Reply::Left(answer)) => self.shell.left(call, answer),
            (Answerer::Reloaded(ticket), Reply::Watch(watched)) => {
                self.audit.count("call attached to a reloaded core");
                let open = &self.open;
                for (_, state) in watched {
                    self.shell
                        .reloaded(ticket.clone(), &state, &|call| open.contains_key(&call));
                }
            }
            (Answerer::Release(call, _), Reply::Release(_)) => {
                self.shell.ready.push((call, Told::Released));
            }
            (Answerer::Renew(call, _), Reply::Lease(result)) => {
                let told = Told::Renewed(result.is_ok());
                self.shell.ready.push((call, told));
            }
            (Answerer::Cancel(call, _), Reply::Cancel(_)) => {
                self.shell.ready.push((call, Told::Cancelled));
            }
            (Answerer::Close(call), Reply::Close(reply)) => {
                if let CloseReply::Taken(close) = reply {
                    if self.closes.len() > 20 {
                        self.closes.clear();
                    }
                    self.closes.push(close.id);
                }
                self.shell.ready.push((call, Told::Closed));
            }
            _ => {}
        }
    }
}
