//! The reference: what `docs/semantics.md` says, as plainly as it can be written.
//!
//! One list of tickets in the order of their enqueue, linear scans, nothing kept that can be worked
//! out anew. It imports ids and the words of a decision, and nothing else of the core. Times are in
//! milliseconds. It does not know the bounds that only matter with thousands of tickets.

use std::collections::{BTreeMap, BTreeSet};

use kvgate_core::decision::{BypassReason, CancelReason, EndHow, Scope, WaitReason};
use kvgate_core::ids::{EngineId, Issue, LeaseId, SessionId, TicketId};

const TOKENS_MAX: u64 = (1 << 53) - 1;

#[derive(Clone, Debug)]
pub struct Settings {
    pub on: bool,
    pub paused: bool,
    pub headroom: u64,
    pub threshold: u32,
    pub decode_cap: Option<u64>,
    pub max_wait: u64,
    pub all_scopes: bool,
    pub grace: u64,
    pub max_waiting: usize,
    pub stale_after: u64,
    pub closes: bool,
    pub join_timeout: Option<u64>,
    pub idle_close: Option<u64>,
}

/// What an operator wishes for one setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish<T> {
    Stay,
    AsConfigured,
    Be(T),
}

/// The same for all that can be changed at run time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wishes {
    pub on: Wish<bool>,
    pub paused: Wish<bool>,
    pub headroom: Wish<u64>,
    pub threshold: Wish<u32>,
    pub decode_cap: Wish<Option<u64>>,
    pub max_wait: Wish<u64>,
    pub all_scopes: Wish<bool>,
    pub closes: Wish<bool>,
}

impl Wishes {
    pub const NONE: Self = Self {
        on: Wish::Stay,
        paused: Wish::Stay,
        headroom: Wish::Stay,
        threshold: Wish::Stay,
        decode_cap: Wish::Stay,
        max_wait: Wish::Stay,
        all_scopes: Wish::Stay,
        closes: Wish::Stay,
    };
}

/// What stands of the wishes: what was wished later for a setting counts.
fn stands<T: Copy>(before: Wish<T>, wish: Wish<T>) -> Wish<T> {
    match wish {
        Wish::Stay => before,
        Wish::AsConfigured => Wish::Stay,
        Wish::Be(_) => wish,
    }
}

fn value<T: Copy>(configured: T, wish: Wish<T>) -> T {
    match wish {
        Wish::Be(value) => value,
        Wish::Stay | Wish::AsConfigured => configured,
    }
}

/// SET1: what is in force.
fn in_force(configured: &Settings, set: &Wishes) -> Settings {
    Settings {
        on: value(configured.on, set.on),
        paused: value(configured.paused, set.paused),
        headroom: value(configured.headroom, set.headroom),
        threshold: value(configured.threshold, set.threshold),
        decode_cap: value(configured.decode_cap, set.decode_cap),
        max_wait: value(configured.max_wait, set.max_wait),
        all_scopes: value(configured.all_scopes, set.all_scopes),
        closes: value(configured.closes, set.closes),
        ..configured.clone()
    }
}

/// SET1: numbers matter while admission is on.
fn fits(settings: &Settings) -> bool {
    let usable = settings.headroom > 0 && settings.threshold > 0;
    !settings.on || (usable && settings.decode_cap != Some(0))
}

/// SET3: what an operator did, apart from closes, which the reference does not follow.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Did {
    Set,
    Reset,
    Revoked(LeaseId),
    Cancelled(TicketId, How),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Numbers {
    Parts(u64, u64),
    Sum(u64),
}

#[derive(Clone, Debug)]
pub struct Ask {
    pub ticket: TicketId,
    pub session: SessionId,
    pub numbers: Numbers,
    pub scope: Scope,
    pub protected: bool,
    pub ttl: u64,
    pub stays: bool,
}

#[derive(Clone, Debug)]
pub enum Shown {
    Silent,
    Lists(Vec<Listed>),
}

#[derive(Clone, Debug)]
pub struct Listed {
    pub engine: EngineId,
    pub counts: bool,
    pub healthy: bool,
    pub ids: BTreeSet<String>,
}

#[derive(Clone, Copy, Debug)]
pub struct Gauges {
    pub capacity: u64,
    pub usage: Option<u32>,
    pub idle: bool,
    pub counters: Option<(u64, u64)>,
}

#[derive(Clone, Debug)]
pub struct Round {
    pub began_at: u64,
    pub router: Shown,
    pub readings: Vec<(EngineId, Option<Gauges>)>,
    pub marks: Vec<(EngineId, u64)>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    pub ticket: TicketId,
    pub session: Option<SessionId>,
    pub reservation: u64,
    pub epoch: u64,
    pub waited: u64,
    pub repeated: bool,
    pub outcome: Outcome,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    Admit { lease: LeaseId, ttl: u64, ends: u64 },
    Bypass(BypassReason),
    Cancelled(CancelReason),
    Wait(Place),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    pub reason: WaitReason,
    pub position: u64,
    pub tokens_ahead: u64,
    pub short: u64,
    pub age: u64,
    pub bypass_in: u64,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Said {
    Parked,
    Answer(Answer),
    Conflict,
    TooManyTokens,
    Left(Option<Answer>),
    Released,
    AlreadyReleased,
    Revoked,
    Lease {
        ends: u64,
        ttl: u64,
        epoch: u64,
    },
    Gone(Why),
    Cancel(How),
    Watch(Vec<Watched>),
    Ticket(Option<Result<Answer, EndHow>>),
    Closed,
    ClosesOff,
    /// To the retry of a close, whatever it did.
    Retried,
    Settings,
    SettingsRefused,
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    NeverIssued,
    Released,
    Expired,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    Withdrawn,
    Released,
    Bypassed,
    AlreadyFinished,
    Unknown,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Watched {
    Waiting,
    Decided(Answer),
    Unknown,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Counter {
    Admit(Scope),
    Wait(Scope, WaitReason),
    Bypass(Scope, BypassReason),
    Withdrawn(Scope),
    Dropped(Scope),
    TakenBack(Scope),
    SessionClosed(Scope),
    Released,
    Expired,
    Revoked,
    Cancelled,
    GrantedAfterWait,
    WaitedMillis,
}

#[derive(Clone, Debug)]
struct Ticket {
    id: TicketId,
    asked: Option<(SessionId, Numbers)>,
    reservation: u64,
    scope: Scope,
    ttl: u64,
    stage: Stage,
    caller: Caller,
}

#[derive(Clone, Debug)]
enum Stage {
    Waiting {
        since: u64,
    },
    Held {
        lease: LeaseId,
        granted: u64,
        since: Option<u64>,
        ttl: u64,
        ends: u64,
        graced: bool,
        epoch: u64,
    },
    Ended {
        at: u64,
        how: EndHow,
        lease: Option<LeaseId>,
        since: Option<u64>,
        waited: u64,
        epoch: u64,
        only_in_memory: bool,
    },
}

/// How the caller stands to its ticket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Caller {
    /// The decision was told or claimed.
    Told,
    /// A waiter with this many open calls.
    Calls(u32),
    /// A waiter whose caller is away until then at most.
    Away(u64),
    /// A grant whose answer is on its way.
    OnItsWay,
    /// A grant without a caller, taken back then.
    Unclaimed(u64),
    /// A bypass that nobody was told.
    Untold,
    /// A bypass whose answer is on its way.
    Telling,
}

#[derive(Clone, Debug)]
struct Engine {
    id: EngineId,
    counts: bool,
    seen_healthy: bool,
    unhealthy_since: Option<u64>,
    reading: Option<(u64, Gauges)>,
    usages: Vec<Option<u32>>,
    capacity: Option<(u64, u64)>,
    counters: Option<(u64, u64)>,
    away: bool,
    mark: Option<u64>,
    ids: BTreeSet<String>,
    signs: Option<(u64, Vec<Sign>)>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Sign {
    Mark,
    Counters,
    Ids,
}

#[derive(Clone, Copy, Debug)]
struct Hold {
    judged_at: u64,
    began_at: u64,
    until: u64,
    starting: bool,
}

/// What one turn said: an answer for each command, and the decisions of the queue.
#[derive(Clone, Debug, Default)]
pub struct Turned {
    pub said: Vec<Said>,
    /// Whether the command, or the decision it was told, was a numbered change.
    pub changed: Vec<bool>,
    /// Whether it says that the session was reopened; `None` when the close may be forgotten.
    pub reopened: Vec<Option<bool>>,
    pub decided: Vec<Answer>,
}

#[derive(Clone, Debug)]
pub struct Model {
    pub now: u64,
    /// What is in force.
    pub settings: Settings,
    pub configured: Settings,
    /// What was set at run time.
    set: Wishes,
    /// This start returns to what is configured.
    pub resets: bool,
    pub audit: Vec<(u64, Did)>,
    pub epoch: u64,
    pub counters: BTreeMap<Counter, u64>,
    /// Acquires that were decided, by whatever decision.
    pub acquires: u64,
    pub issued: Vec<LeaseId>,
    pub salt: u64,
    had_members: bool,
    static_engines: Vec<EngineId>,
    tickets: Vec<Ticket>,
    engines: Vec<Engine>,
    router_good_at: u64,
    /// Readings below the threshold in a row, while paced.
    below: Option<u32>,
    round_admitted: u128,
    round_passed: bool,
    hold: Option<Hold>,
    last_pause: Option<u64>,
    turned_since_start: bool,
    turn: Turned,
    leaving: Vec<(usize, TicketId, bool)>,
    /// Sessions that were closed and not used since, and when they were closed.
    closed: BTreeMap<SessionId, u64>,
    /// Idle sessions may have been closed: the reference does not know which.
    closes_idle: bool,
}

impl Model {
    pub fn new(now: u64, settings: Settings, static_engines: Vec<EngineId>) -> Self {
        let mut model = Self {
            now,
            settings: settings.clone(),
            configured: settings,
            set: Wishes::NONE,
            resets: false,
            audit: Vec::new(),
            epoch: 1,
            counters: BTreeMap::new(),
            acquires: 0,
            issued: Vec::new(),
            salt: 0,
            had_members: false,
            static_engines,
            tickets: Vec::new(),
            engines: Vec::new(),
            router_good_at: now,
            below: None,
            round_admitted: 0,
            round_passed: false,
            hold: None,
            last_pause: None,
            turned_since_start: false,
            turn: Turned::default(),
            leaving: Vec::new(),
            closed: BTreeMap::new(),
            closes_idle: false,
        };
        model.start(now, None, false);
        model
    }

    /// DUR2, LEA4, TIC4: what a start makes of what was kept.
    pub fn start(&mut self, now: u64, configured: Option<Settings>, resets: bool) -> Turned {
        self.now = now;
        self.salt += 1;
        self.configured = configured.unwrap_or_else(|| self.configured.clone());
        // What does not fit what is configured is only started with by returning to that.
        self.resets = resets || !fits(&in_force(&self.configured, &self.set));
        if self.resets && self.set != Wishes::NONE {
            self.set = Wishes::NONE;
            self.audit.push((now, Did::Reset));
        }
        self.settings = in_force(&self.configured, &self.set);
        self.closes_idle |= self.settings.idle_close.is_some();
        self.turn = Turned::default();
        self.tickets.retain(
            |ticket| !matches!(ticket.stage, Stage::Ended { only_in_memory, .. } if only_in_memory),
        );
        let mut claimed = Vec::new();
        for ticket in &mut self.tickets {
            if matches!(ticket.caller, Caller::OnItsWay | Caller::Unclaimed(_)) {
                claimed.push((ticket.scope, ticket.stage.waited()));
            }
            ticket.caller = match ticket.stage {
                Stage::Waiting { .. } => Caller::Away(now + self.settings.grace),
                Stage::Held { .. } | Stage::Ended { .. } => Caller::Told,
            };
            if let Stage::Held {
                ttl, ends, graced, ..
            } = &mut ticket.stage
            {
                let least = now + 30_000.min(*ttl);
                if *ends < least && !*graced {
                    *ends = least;
                    *graced = true;
                }
                *ends = (*ends).min(now + *ttl);
            }
        }
        for (scope, waited) in claimed {
            self.count_admit(scope, waited);
        }
        for engine in &mut self.engines {
            engine.unhealthy_since = None;
            engine.reading = None;
            engine.usages.clear();
            engine.capacity = engine.capacity.map(|(_, capacity)| (now, capacity));
            engine.counters = None;
            engine.away = false;
            engine.signs = None;
        }
        self.router_good_at = now;
        self.below = None;
        self.round_admitted = 0;
        self.round_passed = false;
        self.last_pause = None;
        self.turned_since_start = false;
        self.hold = Some(Hold {
            judged_at: now,
            began_at: now,
            until: now + 2_000,
            starting: true,
        });
        self.finish()
    }

    // ---- turns ---------------------------------------------------------------------------

    pub fn begin(&mut self, now: u64) {
        let last = self.now;
        let judged_at = self.judged_at();
        self.now = now;
        if self.hold.is_some_and(|hold| now >= hold.until) {
            self.hold = None;
        }
        let gap = now - last;
        let allowed = self.last_pause.is_none_or(|pause| now - pause >= 60_000);
        if gap > 1_000 && allowed && self.turned_since_start && self.hold.is_none() {
            self.hold = Some(Hold {
                judged_at,
                began_at: now,
                until: now + gap.min(10_000),
                starting: false,
            });
            self.last_pause = Some(now);
        }
        self.turned_since_start = true;
        self.turn = Turned::default();
    }

    /// Expiries, queue, deadlines, calls that end, forgetting.
    pub fn finish(&mut self) -> Turned {
        let judged_at = self.judged_at();
        while let Some(index) = self.first_by(|ticket| match ticket.stage {
            Stage::Held { ends, lease, .. } if ends <= judged_at => Some((ends, lease.issue.0)),
            _ => None,
        }) {
            self.end_lease(index, EndHow::Expired);
        }
        while let Some(index) = self.first_by(|ticket| match ticket.caller {
            Caller::Away(until) | Caller::Unclaimed(until) if until <= judged_at => {
                Some((until, 0))
            }
            _ => None,
        }) {
            match self.tickets[index].stage {
                Stage::Waiting { .. } => self.withdraw(index, EndHow::Dropped),
                _ => self.end_lease(index, EndHow::TakenBack),
            }
        }
        if !self.hold.is_some_and(|hold| hold.starting) {
            self.pass();
            while let Some(index) = self.first_by(|ticket| match ticket.stage {
                Stage::Waiting { since } if since + self.settings.max_wait <= judged_at => {
                    Some((since, 0))
                }
                _ => None,
            }) {
                let reason = self.leaves(index).unwrap_or(BypassReason::Aged);
                self.bypass(index, reason);
            }
        }
        self.end_calls();
        self.tickets.retain(|ticket| match ticket.stage {
            Stage::Ended { at, .. } => judged_at < at + 600_000,
            _ => true,
        });
        std::mem::take(&mut self.turn)
    }

    /// The last turn of an orderly stop: the calls end, and that is all.
    pub fn finish_last(&mut self) -> Turned {
        self.end_calls();
        std::mem::take(&mut self.turn)
    }

    fn end_calls(&mut self) {
        for (index, id, acquire) in std::mem::take(&mut self.leaving) {
            let at = self.find(&id).unwrap();
            let waits = matches!(self.tickets[at].stage, Stage::Waiting { .. });
            if waits {
                self.call_ends(at);
            }
            let told = self.turn.decided.iter().find(|answer| answer.ticket == id);
            let decided = told.is_some();
            let answer = match told {
                Some(answer) => answer.clone(),
                None => self.first(at),
            };
            self.turn.changed[index] |= decided;
            self.turn.said[index] = if acquire {
                Said::Answer(answer)
            } else {
                Said::Left(waits.then_some(answer))
            };
        }
    }

    /// The first ticket by this key; of equal ones the one that came first.
    fn first_by(&self, key: impl Fn(&Ticket) -> Option<(u64, u64)>) -> Option<usize> {
        (0..self.tickets.len())
            .filter(|index| key(&self.tickets[*index]).is_some())
            .min_by_key(|index| key(&self.tickets[*index]))
    }

    fn judged_at(&self) -> u64 {
        self.hold.map_or(self.now, |hold| hold.judged_at)
    }

    fn say(&mut self, said: Said, changed: bool) {
        self.turn.said.push(said);
        self.turn.changed.push(changed);
        self.turn.reopened.push(Some(false));
    }

    fn find(&self, id: &TicketId) -> Option<usize> {
        self.tickets.iter().position(|ticket| ticket.id == *id)
    }

    fn count(&mut self, counter: Counter) {
        *self.counters.entry(counter).or_default() += 1;
    }

    fn count_admit(&mut self, scope: Scope, waited: Option<u64>) {
        self.count(Counter::Admit(scope));
        if let Some(waited) = waited {
            self.count(Counter::GrantedAfterWait);
            if waited > 0 {
                *self.counters.entry(Counter::WaitedMillis).or_default() += waited;
            }
        }
    }

    // ---- what can be read off ------------------------------------------------------------

    pub fn reserved(&self) -> u64 {
        let held = self.tickets.iter().filter(|ticket| ticket.is_held());
        held.map(|ticket| ticket.reservation).sum()
    }

    pub fn leases(&self) -> usize {
        self.tickets
            .iter()
            .filter(|ticket| ticket.is_held())
            .count()
    }

    pub fn line(&self) -> Vec<TicketId> {
        let waiting = self.tickets.iter().filter(|ticket| ticket.waits());
        waiting.map(|ticket| ticket.id.clone()).collect()
    }

    /// Grants that count as nothing yet.
    pub fn on_their_way(&self) -> usize {
        let open =
            |ticket: &&Ticket| matches!(ticket.caller, Caller::OnItsWay | Caller::Unclaimed(_));
        self.tickets.iter().filter(open).count()
    }

    /// The lease that a ticket holds now.
    pub fn lease_of(&self, id: &TicketId) -> Option<LeaseId> {
        match self.tickets[self.find(id)?].stage {
            Stage::Held { lease, .. } => Some(lease),
            _ => None,
        }
    }

    /// Tickets whose grants wait for their delivery.
    pub fn undelivered(&self) -> Vec<(TicketId, LeaseId)> {
        self.tickets
            .iter()
            .filter(|ticket| ticket.caller == Caller::OnItsWay)
            .filter_map(|ticket| Some((ticket.id.clone(), self.lease_of(&ticket.id)?)))
            .collect()
    }

    // ---- acquire -------------------------------------------------------------------------

    pub fn acquire(&mut self, ask: Ask) {
        let whole = match ask.numbers {
            Numbers::Sum(sum) => sum,
            Numbers::Parts(prompt, new) => prompt + new,
        };
        if whole > TOKENS_MAX {
            return self.say(Said::TooManyTokens, false);
        }
        let mut since = None;
        if let Some(index) = self.find(&ask.ticket) {
            let afresh = match &self.tickets[index].stage {
                Stage::Ended { how, since, .. } => match how {
                    EndHow::Dropped | EndHow::TakenBack => Some(*since),
                    EndHow::Expired | EndHow::Revoked => Some(None),
                    _ => None,
                },
                _ => None,
            };
            match afresh {
                Some(kept) => {
                    since = kept;
                    // Its old place is gone; the decision below does not see it.
                    self.tickets.remove(index);
                }
                None => return self.again(index, ask),
            }
        }
        self.decide(ask, since);
    }

    fn again(&mut self, index: usize, ask: Ask) {
        if let Some((session, numbers)) = &self.tickets[index].asked
            && (*session != ask.session || *numbers != ask.numbers)
        {
            return self.say(Said::Conflict, false);
        }
        if self.tickets[index].waits() {
            self.call_begins(index);
            return self.park(ask.ticket, ask.stays, false);
        }
        let mut answer = self.answer(index);
        if self.tickets[index].asked.is_none() {
            answer.reservation = self.reservation(ask.numbers);
            answer.session = Some(ask.session);
        }
        match self.tickets[index].caller {
            Caller::Untold | Caller::Telling => self.tickets[index].caller = Caller::Telling,
            _ => self.claim(index),
        }
        self.say(Said::Answer(answer), false);
    }

    fn park(&mut self, ticket: TicketId, stays: bool, changed: bool) {
        if !stays {
            self.leaving.push((self.turn.said.len(), ticket, true));
        }
        self.say(Said::Parked, changed);
    }

    fn reservation(&self, numbers: Numbers) -> u64 {
        match numbers {
            Numbers::Sum(sum) => sum,
            Numbers::Parts(prompt, new) => {
                prompt + self.settings.decode_cap.map_or(new, |cap| new.min(cap))
            }
        }
    }

    /// DEC1.
    fn decide(&mut self, ask: Ask, since: Option<u64>) {
        self.acquires += 1;
        let closed = self.closed.remove(&ask.session);
        let reservation = self.reservation(ask.numbers);
        let scope = ask.scope;
        let waiting = self.line().len();
        let bypass = if let Some(reason) = self.not_applied(scope) {
            Some(reason)
        } else if ask.protected {
            Some(BypassReason::Protected)
        } else if self.degraded() {
            Some(BypassReason::Degraded)
        } else if reservation > self.full_ceiling() {
            Some(BypassReason::Oversize)
        } else if waiting >= self.settings.max_waiting {
            Some(BypassReason::QueueFull)
        } else {
            None
        };
        let wait = if waiting > 0 {
            Some(WaitReason::BehindOlder)
        } else {
            self.blocked(reservation)
        };
        let used_up = since.is_some_and(|since| self.judged_at() >= since + self.settings.max_wait);
        let ticket = Ticket {
            id: ask.ticket.clone(),
            asked: Some((ask.session, ask.numbers)),
            reservation,
            scope,
            ttl: ask.ttl,
            stage: Stage::Waiting {
                since: since.unwrap_or(self.now),
            },
            caller: Caller::Told,
        };
        self.tickets.push(ticket);
        let index = self.tickets.len() - 1;
        // CLO8. A close is remembered for an hour after it is done.
        let reopened = match closed {
            Some(at) if self.now >= at + 3_600_000 => None,
            None if self.closes_idle => None,
            closed => Some(closed.is_some()),
        };
        match (bypass, wait) {
            (None, None) => {
                self.grant(index, since);
                self.tickets[index].caller = Caller::OnItsWay;
                let answer = self.first(index);
                self.say(Said::Answer(answer), true);
            }
            (None, Some(reason)) if self.settings.max_wait > 0 && !used_up => {
                self.count(Counter::Wait(scope, reason));
                self.call_begins(index);
                self.park(ask.ticket, ask.stays, true);
            }
            (bypass, _) => {
                let reason = bypass.unwrap_or(BypassReason::Aged);
                self.count(Counter::Bypass(scope, reason));
                self.tickets[index].stage = Stage::Ended {
                    at: self.now,
                    how: EndHow::Bypassed(reason),
                    lease: None,
                    since: None,
                    waited: since.map_or(0, |since| self.now - since),
                    epoch: self.epoch,
                    only_in_memory: true,
                };
                self.tickets[index].caller = Caller::Telling;
                let answer = self.first(index);
                // Nothing is kept but what it does to a close.
                self.say(Said::Answer(answer), reopened == Some(true));
            }
        }
        *self.turn.reopened.last_mut().unwrap() = reopened;
    }

    fn not_applied(&self, scope: Scope) -> Option<BypassReason> {
        if !self.settings.on || self.settings.paused {
            Some(BypassReason::Disabled)
        } else if scope == Scope::Eval && !self.settings.all_scopes {
            Some(BypassReason::OutOfScope)
        } else {
            None
        }
    }

    fn blocked(&self, reservation: u64) -> Option<WaitReason> {
        let pressed = self
            .pressure()
            .is_some_and(|pressure| pressure >= self.settings.threshold);
        let quota = u128::from(self.ceiling() / 10);
        let paced_out = self.below.is_some()
            && self.round_passed
            && self.round_admitted + u128::from(reservation) > quota;
        if pressed || paced_out {
            Some(WaitReason::PressureGuard)
        } else if self.reserved() + reservation > self.ceiling() {
            Some(WaitReason::CapacityExhausted)
        } else {
            None
        }
    }

    fn grant(&mut self, index: usize, since: Option<u64>) {
        let lease = LeaseId {
            issue: Issue(self.issued.len() as u64 + 1),
            salt: self.salt,
        };
        self.issued.push(lease);
        let (now, epoch) = (self.now, self.epoch);
        let ticket = &mut self.tickets[index];
        ticket.stage = Stage::Held {
            lease,
            granted: now,
            since,
            ttl: ticket.ttl,
            ends: now + ticket.ttl,
            graced: false,
            epoch,
        };
        self.round_admitted += u128::from(ticket.reservation);
        self.round_passed = true;
    }

    // ---- the queue -----------------------------------------------------------------------

    /// DEC2.
    fn pass(&mut self) {
        while let Some(head) = self.tickets.iter().position(Ticket::waits) {
            if let Some(reason) = self.leaves(head) {
                self.bypass(head, reason);
            } else if self.blocked(self.tickets[head].reservation).is_none() {
                let since = self.tickets[head].stage.since();
                self.grant(head, since);
                self.tickets[head].caller = match self.tickets[head].caller {
                    Caller::Away(until) => Caller::Unclaimed(until),
                    _ => Caller::OnItsWay,
                };
                let answer = self.first(head);
                self.turn.decided.push(answer);
            } else {
                return;
            }
        }
    }

    fn leaves(&self, index: usize) -> Option<BypassReason> {
        let ticket = &self.tickets[index];
        let since = ticket.stage.since().unwrap();
        if let Some(reason) = self.not_applied(ticket.scope) {
            Some(reason)
        } else if self.judged_at() >= since + self.settings.max_wait {
            Some(BypassReason::Aged)
        } else if self.degraded() {
            Some(BypassReason::Degraded)
        } else if ticket.reservation > self.full_ceiling() {
            Some(BypassReason::Oversize)
        } else {
            None
        }
    }

    fn bypass(&mut self, index: usize, reason: BypassReason) {
        let (now, epoch) = (self.now, self.epoch);
        let ticket = &mut self.tickets[index];
        let since = ticket.stage.since();
        ticket.caller = match ticket.caller {
            Caller::Calls(_) => Caller::Telling,
            _ => Caller::Untold,
        };
        ticket.stage = Stage::Ended {
            at: now,
            how: EndHow::Bypassed(reason),
            lease: None,
            since,
            waited: now - since.unwrap(),
            epoch,
            only_in_memory: false,
        };
        let scope = ticket.scope;
        self.count(Counter::Bypass(scope, reason));
        let answer = self.first(index);
        self.turn.decided.push(answer);
    }

    fn withdraw(&mut self, index: usize, how: EndHow) {
        let (now, epoch) = (self.now, self.epoch);
        let ticket = &mut self.tickets[index];
        let since = ticket.stage.since();
        ticket.caller = Caller::Told;
        ticket.stage = Stage::Ended {
            at: now,
            how,
            lease: None,
            since,
            waited: now - since.unwrap(),
            epoch,
            only_in_memory: false,
        };
        let scope = ticket.scope;
        self.count(match how {
            EndHow::Dropped => Counter::Dropped(scope),
            EndHow::SessionClosed => Counter::SessionClosed(scope),
            _ => Counter::Withdrawn(scope),
        });
        let mut answer = self.first(index);
        answer.outcome = Outcome::Cancelled(match how {
            EndHow::SessionClosed => CancelReason::SessionClosed,
            _ => CancelReason::Cancelled,
        });
        self.turn.decided.push(answer);
    }

    fn end_lease(&mut self, index: usize, how: EndHow) {
        let now = self.now;
        let ticket = &mut self.tickets[index];
        let Stage::Held { lease, epoch, .. } = ticket.stage else {
            panic!("no lease to end");
        };
        let waited = ticket.stage.waited();
        let since = ticket.stage.since();
        let unclaimed = ticket.caller != Caller::Told;
        ticket.caller = Caller::Told;
        ticket.stage = Stage::Ended {
            at: now,
            how,
            lease: Some(lease),
            since,
            waited: waited.unwrap_or(0),
            epoch,
            only_in_memory: false,
        };
        let scope = ticket.scope;
        self.count(match (unclaimed, how) {
            (true, EndHow::Cancelled) => Counter::Withdrawn(scope),
            (true, _) => Counter::TakenBack(scope),
            (false, EndHow::Released) => Counter::Released,
            (false, EndHow::Expired) => Counter::Expired,
            (false, EndHow::Revoked) => Counter::Revoked,
            (false, EndHow::Cancelled) => Counter::Cancelled,
            (false, other) => panic!("a claimed lease does not end by {other:?}"),
        });
    }

    // ---- answers -------------------------------------------------------------------------

    fn answer(&self, index: usize) -> Answer {
        let ticket = &self.tickets[index];
        let untold = matches!(ticket.caller, Caller::Unclaimed(_) | Caller::Untold);
        let (epoch, waited, outcome) = match &ticket.stage {
            Stage::Waiting { since } => (
                self.epoch,
                self.now - since,
                Outcome::Wait(self.place(index, *since)),
            ),
            Stage::Held {
                lease,
                ttl,
                ends,
                epoch,
                ..
            } => (
                *epoch,
                ticket.stage.waited().unwrap_or(0),
                Outcome::Admit {
                    lease: *lease,
                    ttl: *ttl,
                    ends: *ends,
                },
            ),
            Stage::Ended {
                how, waited, epoch, ..
            } => (
                *epoch,
                *waited,
                match how {
                    EndHow::Bypassed(reason) => Outcome::Bypass(*reason),
                    EndHow::SessionClosed => Outcome::Cancelled(CancelReason::SessionClosed),
                    _ => Outcome::Cancelled(CancelReason::TicketFinished),
                },
            ),
        };
        Answer {
            ticket: ticket.id.clone(),
            session: ticket.asked.as_ref().map(|(session, _)| session.clone()),
            reservation: ticket.reservation,
            epoch,
            waited,
            repeated: !untold && !ticket.waits(),
            outcome,
        }
    }

    fn first(&self, index: usize) -> Answer {
        Answer {
            repeated: false,
            ..self.answer(index)
        }
    }

    fn place(&self, index: usize, since: u64) -> Place {
        let ahead: Vec<u64> = self.tickets[..index]
            .iter()
            .filter(|ticket| ticket.waits())
            .map(|ticket| ticket.reservation)
            .collect();
        let reservation = self.tickets[index].reservation;
        let tokens_ahead: u64 = ahead.iter().sum();
        let needed = self.reserved() + tokens_ahead + reservation;
        let blocked = self.blocked(reservation);
        Place {
            reason: if ahead.is_empty() {
                blocked.unwrap_or(WaitReason::CapacityExhausted)
            } else {
                WaitReason::BehindOlder
            },
            position: ahead.len() as u64 + 1,
            tokens_ahead,
            short: needed.saturating_sub(self.ceiling()),
            age: self.now - since,
            bypass_in: (since + self.settings.max_wait).saturating_sub(self.now),
        }
    }

    // ---- who is there --------------------------------------------------------------------

    fn call_begins(&mut self, index: usize) {
        let caller = &mut self.tickets[index].caller;
        *caller = match caller {
            Caller::Calls(calls) => Caller::Calls(*calls + 1),
            _ => Caller::Calls(1),
        };
    }

    fn call_ends(&mut self, index: usize) {
        let until = self.now + self.settings.grace;
        let caller = &mut self.tickets[index].caller;
        *caller = match *caller {
            Caller::Calls(1) => Caller::Away(until),
            Caller::Calls(calls) => Caller::Calls(calls - 1),
            other => other,
        };
    }

    fn claim(&mut self, index: usize) {
        let ticket = &self.tickets[index];
        let unclaimed = matches!(ticket.caller, Caller::OnItsWay | Caller::Unclaimed(_));
        if ticket.is_held() && unclaimed {
            self.count_admit(ticket.scope, ticket.stage.waited());
        }
        self.tickets[index].caller = Caller::Told;
    }

    pub fn leave(&mut self, id: TicketId) {
        match self.find(&id) {
            Some(index) if self.tickets[index].waits() => {
                self.leaving.push((self.turn.said.len(), id, false));
            }
            _ => {}
        }
        self.say(Said::Left(None), false);
    }

    pub fn gone(&mut self, id: &TicketId) {
        if let Some(index) = self.find(id) {
            self.call_ends(index);
        }
        self.say(Said::Done, false);
    }

    /// The ticket whose present decision this delivery is about.
    fn told(&self, id: &TicketId, lease: Option<LeaseId>) -> Option<usize> {
        let index = self.find(id)?;
        let same = match &self.tickets[index].stage {
            Stage::Waiting { .. } => false,
            Stage::Held { lease: held, .. } => lease == Some(*held),
            Stage::Ended { .. } => lease.is_none(),
        };
        same.then_some(index)
    }

    pub fn delivered(&mut self, id: &TicketId, lease: Option<LeaseId>) {
        if let Some(index) = self.told(id, lease) {
            self.claim(index);
        }
        self.say(Said::Done, false);
    }

    pub fn undelivered_one(&mut self, id: &TicketId, lease: Option<LeaseId>) {
        if let Some(index) = self.told(id, lease) {
            let until = self.now + self.settings.grace;
            let ticket = &mut self.tickets[index];
            match ticket.stage {
                Stage::Held { .. } if ticket.caller == Caller::OnItsWay => {
                    ticket.caller = Caller::Unclaimed(until);
                }
                Stage::Ended { .. } if ticket.caller == Caller::Telling => {
                    ticket.caller = Caller::Untold;
                }
                _ => {}
            }
        }
        self.say(Said::Done, false);
    }

    pub fn watch(&mut self, ids: &[TicketId]) {
        let mut watched = Vec::new();
        for id in ids {
            watched.push(match self.find(id) {
                None => Watched::Unknown,
                Some(index) if self.tickets[index].waits() => {
                    self.call_begins(index);
                    Watched::Waiting
                }
                Some(index) if self.tickets[index].stage.decided_afresh() => Watched::Unknown,
                Some(index) => {
                    let answer = self.answer(index);
                    let ticket = &mut self.tickets[index];
                    ticket.caller = match ticket.caller {
                        Caller::Unclaimed(_) | Caller::OnItsWay => Caller::OnItsWay,
                        Caller::Untold | Caller::Telling => Caller::Telling,
                        _ => Caller::Told,
                    };
                    Watched::Decided(answer)
                }
            });
        }
        self.say(Said::Watch(watched), false);
    }

    pub fn read(&mut self, id: &TicketId) {
        let view = self.find(id).map(|index| match self.tickets[index].stage {
            Stage::Ended { how, .. } if self.tickets[index].stage.decided_afresh() => Err(how),
            _ => Ok(self.answer(index)),
        });
        self.say(Said::Ticket(view), false);
    }

    // ---- leases --------------------------------------------------------------------------

    /// The ticket that holds or held this very lease.
    fn lease(&self, lease: LeaseId) -> Result<usize, Why> {
        let found = self.tickets.iter().position(|ticket| match &ticket.stage {
            Stage::Waiting { .. } => false,
            Stage::Held { lease: held, .. } => *held == lease,
            Stage::Ended { lease: held, .. } => *held == Some(lease),
        });
        found.ok_or(if self.issued.contains(&lease) {
            Why::Expired
        } else {
            Why::NeverIssued
        })
    }

    fn held(&self, lease: LeaseId) -> Result<usize, Why> {
        let index = self.lease(lease)?;
        match self.tickets[index].stage {
            Stage::Ended {
                how: EndHow::Released | EndHow::Cancelled,
                ..
            } => Err(Why::Released),
            Stage::Ended { .. } => Err(Why::Expired),
            _ => Ok(index),
        }
    }

    pub fn release(&mut self, lease: LeaseId) {
        match self.held(lease) {
            Ok(index) => {
                // Whoever gives back a lease whose answer is on its way has read that answer.
                if self.tickets[index].caller == Caller::OnItsWay {
                    self.claim(index);
                }
                self.end_lease(index, EndHow::Released);
                self.say(Said::Released, true);
            }
            Err(Why::Released) => self.say(Said::AlreadyReleased, false),
            Err(why) => self.say(Said::Gone(why), false),
        }
    }

    pub fn renew(&mut self, lease: LeaseId, life: Option<u64>) {
        match self.held(lease) {
            Ok(index) => {
                self.claim(index);
                let now = self.now;
                if let Stage::Held {
                    ttl, ends, graced, ..
                } = &mut self.tickets[index].stage
                {
                    *ttl = life.unwrap_or(*ttl);
                    *ends = now + *ttl;
                    *graced = false;
                }
                self.read_lease(lease);
            }
            Err(why) => self.say(Said::Gone(why), false),
        }
    }

    pub fn read_lease(&mut self, lease: LeaseId) {
        let said = match self.held(lease) {
            Ok(index) => match self.tickets[index].stage {
                Stage::Held {
                    ends, ttl, epoch, ..
                } => Said::Lease { ends, ttl, epoch },
                _ => panic!("not held"),
            },
            Err(why) => Said::Gone(why),
        };
        self.say(said, false);
    }

    pub fn revoke(&mut self, lease: LeaseId) {
        match self.held(lease) {
            Ok(index) => {
                self.end_lease(index, EndHow::Revoked);
                self.audit.push((self.now, Did::Revoked(lease)));
                self.say(Said::Revoked, true);
            }
            Err(why) => self.say(Said::Gone(why), false),
        }
    }

    pub fn cancel(&mut self, id: TicketId) {
        let (now, epoch) = (self.now, self.epoch);
        let marker = Stage::Ended {
            at: now,
            how: EndHow::Cancelled,
            lease: None,
            since: None,
            waited: 0,
            epoch,
            only_in_memory: false,
        };
        let Some(index) = self.find(&id) else {
            self.tickets.push(Ticket {
                id,
                asked: None,
                reservation: 0,
                scope: Scope::Train,
                ttl: 0,
                stage: marker,
                caller: Caller::Told,
            });
            return self.say(Said::Cancel(How::Unknown), true);
        };
        match self.tickets[index].stage {
            Stage::Waiting { .. } => {
                self.withdraw(index, EndHow::Cancelled);
                self.say(Said::Cancel(How::Withdrawn), true);
            }
            Stage::Held { .. } => {
                self.end_lease(index, EndHow::Cancelled);
                self.say(Said::Cancel(How::Released), true);
            }
            Stage::Ended {
                how: EndHow::Released | EndHow::Cancelled | EndHow::SessionClosed,
                ..
            } => self.say(Said::Cancel(How::AlreadyFinished), false),
            Stage::Ended { how, .. } => {
                self.tickets[index].stage = marker;
                self.tickets[index].caller = Caller::Told;
                let outcome = match how {
                    EndHow::Bypassed(_) => How::Bypassed,
                    _ => How::AlreadyFinished,
                };
                self.say(Said::Cancel(outcome), true);
            }
        }
    }

    // ---- closes --------------------------------------------------------------------------

    /// CLO2, CLO3, as far as it does not depend on the delivery: waiters are withdrawn, and the next
    /// use is a new one.
    pub fn close(&mut self, session: SessionId) {
        if !self.settings.closes {
            return self.say(Said::ClosesOff, false);
        }
        let of_session = |ticket: &Ticket| {
            let asked = ticket.asked.as_ref();
            ticket.waits() && asked.is_some_and(|(asked, _)| *asked == session)
        };
        while let Some(index) = self.tickets.iter().position(of_session) {
            self.withdraw(index, EndHow::SessionClosed);
        }
        self.closed.insert(session, self.now);
        self.say(Said::Closed, true);
    }

    pub fn retry(&mut self) {
        self.say(Said::Retried, false);
    }

    pub fn called(&mut self) {
        self.say(Said::Done, false);
    }

    // ---- the fleet -----------------------------------------------------------------------

    /// SET1, SET2: all together or none.
    pub fn configure(&mut self, wishes: &Wishes) {
        let set = Wishes {
            on: stands(self.set.on, wishes.on),
            paused: stands(self.set.paused, wishes.paused),
            headroom: stands(self.set.headroom, wishes.headroom),
            threshold: stands(self.set.threshold, wishes.threshold),
            decode_cap: stands(self.set.decode_cap, wishes.decode_cap),
            max_wait: stands(self.set.max_wait, wishes.max_wait),
            all_scopes: stands(self.set.all_scopes, wishes.all_scopes),
            closes: stands(self.set.closes, wishes.closes),
        };
        let settings = in_force(&self.configured, &set);
        if !fits(&settings) {
            return self.say(Said::SettingsRefused, false);
        }
        let changes = set != self.set;
        if changes {
            self.audit.push((self.now, Did::Set));
        }
        self.set = set;
        self.settings = settings;
        self.say(Said::Settings, changes);
    }

    /// SET3.
    pub fn cancel_as(&mut self, id: TicketId) {
        self.cancel(id.clone());
        let said = self.turn.said.last().zip(self.turn.changed.last());
        if let Some((Said::Cancel(how), true)) = said {
            self.audit.push((self.now, Did::Cancelled(id, *how)));
        }
    }

    pub fn round(&mut self, round: Round) {
        if self
            .hold
            .is_some_and(|hold| round.began_at >= hold.began_at)
        {
            self.hold = None;
        }
        let now = self.now;
        let mut signs: BTreeSet<(EngineId, Sign)> = BTreeSet::new();
        if let Shown::Lists(listed) = &round.router
            && !listed.is_empty()
        {
            self.router_good_at = now;
            self.take_members(listed, &mut signs);
        }
        let mut any_good = false;
        for (id, gauges) in &round.readings {
            let stale_after = self.settings.stale_after;
            let Some(engine) = self.engines.iter_mut().find(|engine| engine.id == *id) else {
                continue;
            };
            let Some(gauges) = gauges else { continue };
            any_good = true;
            if engine.reading.is_some_and(|(at, _)| now - at > stale_after) {
                engine.away = true;
            }
            if let Some((prompt, generation)) = gauges.counters {
                let began_again = engine
                    .counters
                    .is_some_and(|last| prompt < last.0 || generation < last.1);
                if engine.away && began_again {
                    signs.insert((id.clone(), Sign::Counters));
                }
                engine.away = false;
                engine.counters = Some((prompt, generation));
            }
            engine.capacity = Some((now, gauges.capacity));
            engine.reading = Some((now, *gauges));
            engine.usages.push(gauges.usage.filter(|_| !gauges.idle));
        }
        for (id, mark) in &round.marks {
            if let Some(engine) = self.engines.iter_mut().find(|engine| engine.id == *id) {
                if engine.mark.is_some_and(|known| known != *mark) {
                    signs.insert((id.clone(), Sign::Mark));
                }
                engine.mark = Some(*mark);
            }
        }
        for (id, sign) in signs {
            let Some(engine) = self.engines.iter_mut().find(|engine| engine.id == id) else {
                continue;
            };
            match &mut engine.signs {
                Some((at, kinds)) if now - *at <= 30_000 && !kinds.contains(&sign) => {
                    kinds.push(sign);
                }
                _ => {
                    engine.signs = Some((now, vec![sign]));
                    self.epoch += 1;
                }
            }
        }
        self.round_admitted = 0;
        self.round_passed = false;
        if any_good {
            let threshold = self.settings.threshold;
            let high = self
                .engines
                .iter()
                .filter(|engine| self.counted(engine))
                .filter_map(|engine| engine.reading)
                .any(|(_, gauges)| !gauges.idle && gauges.usage.is_some_and(|it| it >= threshold));
            self.below = match self.below {
                _ if high => Some(0),
                Some(9) => None,
                below => below.map(|below| below + 1),
            };
        }
        self.say(Said::Done, false);
    }

    fn take_members(&mut self, listed: &[Listed], signs: &mut BTreeSet<(EngineId, Sign)>) {
        let now = self.now;
        let mut wanted: BTreeSet<EngineId> = self.static_engines.iter().cloned().collect();
        wanted.extend(listed.iter().map(|row| row.engine.clone()));
        let present: BTreeSet<EngineId> = self
            .engines
            .iter()
            .map(|engine| engine.id.clone())
            .collect();
        if wanted != present {
            if self.had_members {
                self.epoch += 1;
            }
            self.had_members = true;
        }
        self.engines.retain(|engine| wanted.contains(&engine.id));
        for id in wanted.difference(&present) {
            self.engines.push(Engine {
                id: id.clone(),
                counts: true,
                seen_healthy: false,
                unhealthy_since: None,
                reading: None,
                usages: Vec::new(),
                capacity: None,
                counters: None,
                away: false,
                mark: None,
                ids: BTreeSet::new(),
                signs: None,
            });
        }
        for engine in &mut self.engines {
            let row = listed.iter().find(|row| row.engine == engine.id);
            if row.is_none_or(|row| row.healthy) {
                engine.seen_healthy = true;
                engine.unhealthy_since = None;
            } else if engine.unhealthy_since.is_none() {
                engine.unhealthy_since = Some(now);
            }
            if let Some(row) = row {
                engine.counts = row.counts;
                if !row.ids.is_empty() && row.ids != engine.ids {
                    if !engine.ids.is_empty() {
                        signs.insert((engine.id.clone(), Sign::Ids));
                    }
                    engine.ids = row.ids.clone();
                }
            }
        }
    }

    fn counted(&self, engine: &Engine) -> bool {
        let at = self.judged_at();
        let fresh = engine
            .reading
            .is_some_and(|(read, _)| at < read + self.settings.stale_after);
        let healthy = engine.seen_healthy
            && engine
                .unhealthy_since
                .is_none_or(|since| at < since + 10_000);
        let capacity = engine
            .reading
            .is_some_and(|(_, gauges)| gauges.capacity > 0);
        engine.counts && fresh && healthy && capacity
    }

    pub fn ceiling(&self) -> u64 {
        let counted = self.engines.iter().filter(|engine| self.counted(engine));
        let capacity: u64 = counted
            .filter_map(|engine| engine.reading)
            .map(|(_, gauges)| gauges.capacity)
            .sum();
        capacity * self.settings.headroom / 1_000_000
    }

    pub fn full_ceiling(&self) -> u64 {
        let at = self.judged_at();
        let capacity: u64 = self
            .engines
            .iter()
            .filter(|engine| engine.counts)
            .filter_map(|engine| engine.capacity)
            .filter(|(read, _)| at < read + 60_000)
            .map(|(_, capacity)| capacity)
            .sum();
        capacity * self.settings.headroom / 1_000_000
    }

    pub fn pressure(&self) -> Option<u32> {
        self.engines
            .iter()
            .filter(|engine| self.counted(engine))
            .filter(|engine| engine.reading.is_some_and(|(_, gauges)| !gauges.idle))
            .filter_map(|engine| engine.usages.iter().rev().take(3).flatten().max())
            .max()
            .copied()
    }

    pub fn paced(&self) -> bool {
        self.below.is_some()
    }

    pub fn degraded(&self) -> bool {
        let silent = self.judged_at() >= self.router_good_at + self.settings.stale_after;
        silent || self.ceiling() == 0
    }
}

impl Ticket {
    fn waits(&self) -> bool {
        matches!(self.stage, Stage::Waiting { .. })
    }

    fn is_held(&self) -> bool {
        matches!(self.stage, Stage::Held { .. })
    }
}

impl Stage {
    fn since(&self) -> Option<u64> {
        match self {
            Self::Waiting { since } => Some(*since),
            Self::Held { since, .. } | Self::Ended { since, .. } => *since,
        }
    }

    /// The whole time in the queue of a granted ticket.
    fn waited(&self) -> Option<u64> {
        match self {
            Self::Held { granted, since, .. } => since.map(|since| granted - since),
            Self::Waiting { .. } | Self::Ended { .. } => None,
        }
    }

    fn decided_afresh(&self) -> bool {
        matches!(
            self,
            Self::Ended {
                how: EndHow::Expired | EndHow::Revoked | EndHow::Dropped | EndHow::TakenBack,
                ..
            }
        )
    }
}
