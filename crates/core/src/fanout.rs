//! The delivery of closes and aborts: one lane for each engine, with its retries, its probes and its
//! calls under way (CLO4, CLO6). Nothing of it is kept: a start fills the lanes from the intents that
//! are open.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;

use crate::close::CallId;
use crate::ids::{CloseNo, EngineId, Label, RowNo, Term};
use crate::policy::{
    AWAY_AFTER, CALLS_PER_ENGINE_MAX, NOTICE_FOR, PROBE_MIN, REOPENED_NOTED_MAX,
    REOPENED_NOTICE_FOR, RETRY_MAX, RETRY_MIN,
};
use crate::units::{Span, Timestamp};

/// Something that an engine is to be asked. Aborts go first, then what is older.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Job {
    /// End the request of a lease that a closing session holds.
    Abort {
        close: CloseNo,
        row: RowNo,
        request_id: Label,
    },
    /// Deliver a close.
    Close {
        close: CloseNo,
        round: Round,
        /// The engine counts as having no session close: one attempt shows whether it still has none.
        trial: bool,
    },
}

/// One delivery of an intent to all engines; what belongs to an earlier one settles nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Round {
    pub(crate) since: Timestamp,
    pub(crate) early: bool,
}

/// A call under way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Call {
    pub(crate) engine: EngineId,
    pub(crate) job: Job,
    /// It finds out whether an engine that is away is back; it uses up no attempt.
    pub(crate) probe: bool,
    pub(crate) began_at: Timestamp,
}

/// An engine that does not answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Away {
    next_probe: Timestamp,
    delay: Span,
}

/// What is to be asked of one engine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Lane {
    ready: BTreeSet<Job>,
    later: BTreeSet<(Timestamp, Job)>,
    /// Attempts used up by aborts; those of closes stand with their intents.
    abort_attempts: BTreeMap<Job, u32>,
    in_flight: BTreeSet<Job>,
    /// Transport failures in a row.
    failures: u32,
    away: Option<Away>,
    /// The begin of the last call that it did not answer.
    down_at: Option<Timestamp>,
}

/// An engine that refuses calls.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) text: Option<Arc<str>>,
    pub(crate) since: Timestamp,
    pub(crate) last: Timestamp,
}

/// All lanes, and what else is looked after for closes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Fanout {
    term: Term,
    next_call: u64,
    calls: BTreeMap<u64, Call>,
    lanes: BTreeMap<EngineId, Lane>,
    /// When an intent is to be looked at; an entry may be too early, never too late.
    deadlines: BTreeSet<(Timestamp, CloseNo)>,
    /// Intents whose last lease may have ended.
    joined: BTreeSet<CloseNo>,
    /// Intents that wait for a first member.
    memberless: BTreeSet<CloseNo>,
    /// Deadlines are not before a while after this: a start, or when the feature was turned on.
    pub(crate) resumed_at: Timestamp,
    /// Closes whose session was used anew soon after, and when (CLO8).
    reopened: BTreeMap<CloseNo, Timestamp>,
    refusals: BTreeMap<(EngineId, bool), Refusal>,
    /// The next time at which a lane moves by itself; `None` when it must be worked out.
    due: Option<Option<Timestamp>>,
    /// The lane that gave the last call: those before it have none to give.
    giving: Option<EngineId>,
}

impl Fanout {
    pub(crate) const fn new(term: Term, now: Timestamp) -> Self {
        Self {
            term,
            next_call: 1,
            calls: BTreeMap::new(),
            lanes: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            joined: BTreeSet::new(),
            memberless: BTreeSet::new(),
            resumed_at: now,
            reopened: BTreeMap::new(),
            refusals: BTreeMap::new(),
            due: None,
            giving: None,
        }
    }

    /// What waits in the lanes is filled in anew, from the intents; calls under way stay. Deadlines
    /// leave them some time from here.
    pub(crate) fn resume(&mut self, now: Timestamp) {
        self.resumed_at = now;
        self.due = None;
        for lane in self.lanes.values_mut() {
            lane.ready.clear();
            lane.later.clear();
        }
    }

    // ---- intents to look at --------------------------------------------------------------

    pub(crate) fn look_at(&mut self, close: CloseNo, when: Timestamp) {
        self.deadlines.insert((when, close));
    }

    /// The next intent whose deadline may be over.
    pub(crate) fn take_reached(&mut self, now: Timestamp) -> Option<CloseNo> {
        let (at, _) = self.deadlines.first()?;
        if !now.reached(*at) {
            return None;
        }
        self.deadlines.pop_first().map(|(_, close)| close)
    }

    pub(crate) fn note_joined(&mut self, close: CloseNo) {
        self.joined.insert(close);
    }

    pub(crate) fn take_joined(&mut self) -> Option<CloseNo> {
        self.joined.pop_first()
    }

    pub(crate) fn note_memberless(&mut self, close: CloseNo) {
        self.memberless.insert(close);
    }

    /// A member is known now: those that waited for one go on.
    pub(crate) fn members_known(&mut self) {
        self.joined.append(&mut self.memberless);
    }

    // ---- lanes ---------------------------------------------------------------------------

    pub(crate) fn push(&mut self, engine: &EngineId, job: Job) {
        self.due = None;
        let lane = self.lanes.entry(engine.clone()).or_default();
        if !lane.in_flight.contains(&job) {
            lane.ready.insert(job);
        }
    }

    /// The next call that may go out; the engine and the job leave their lane. A job that has lost
    /// its sense is given out as well: whoever takes it looks.
    pub(crate) fn take_due(&mut self, now: Timestamp) -> Option<(EngineId, Job, bool)> {
        if let Some(due) = self.due
            && due.is_none_or(|at| !now.reached(at))
        {
            return None;
        }
        // Once through the lanes from the one that gave the last, so that a turn with many calls does
        // not look at each lane for each call.
        if let Some(from) = self.giving.take()
            && let Some(given) = Self::first_due(self.lanes.range_mut(from..), now)
        {
            self.giving = Some(given.0.clone());
            return Some(given);
        }
        if let Some(given) = Self::first_due(self.lanes.iter_mut(), now) {
            self.giving = Some(given.0.clone());
            return Some(given);
        }
        self.due = Some(self.lanes.values().filter_map(Lane::due).min());
        None
    }

    fn first_due<'a>(
        mut lanes: impl Iterator<Item = (&'a EngineId, &'a mut Lane)>,
        now: Timestamp,
    ) -> Option<(EngineId, Job, bool)> {
        lanes.find_map(|(engine, lane)| {
            let (job, probe) = lane.take_due(now)?;
            Some((engine.clone(), job, probe))
        })
    }

    /// A call goes out.
    pub(crate) fn begin(
        &mut self,
        engine: EngineId,
        job: Job,
        probe: bool,
        now: Timestamp,
    ) -> CallId {
        let number = self.next_call;
        self.next_call = self.next_call.saturating_add(1);
        let lane = self.lanes.entry(engine.clone()).or_default();
        lane.in_flight.insert(job.clone());
        let call = Call {
            engine,
            job,
            probe,
            began_at: now,
        };
        self.calls.insert(number, call);
        CallId {
            term: self.term,
            number,
        }
    }

    /// A call ended; `None` for one that this writer did not make.
    pub(crate) fn end(&mut self, id: CallId) -> Option<Call> {
        if id.term != self.term {
            return None;
        }
        let call = self.calls.remove(&id.number)?;
        self.due = None;
        if let Some(lane) = self.lanes.get_mut(&call.engine) {
            lane.in_flight.remove(&call.job);
        }
        Some(call)
    }

    /// The engine answered, whatever it said.
    pub(crate) fn answered(&mut self, engine: &EngineId) {
        if let Some(lane) = self.lanes.get_mut(engine) {
            lane.failures = 0;
            lane.away = None;
        }
    }

    /// The engine did not answer; after a few times it is away (CLO6).
    pub(crate) fn silent(&mut self, call: &Call, now: Timestamp) {
        let Some(lane) = self.lanes.get_mut(&call.engine) else {
            return;
        };
        lane.failures = lane.failures.saturating_add(1);
        lane.down_at = lane.down_at.max(Some(call.began_at));
        match &mut lane.away {
            Some(away) if call.probe => {
                away.delay = doubled(away.delay, RETRY_MAX);
                away.next_probe = now.after(away.delay);
            }
            Some(_) => {}
            None if lane.failures >= AWAY_AFTER => {
                lane.away = Some(Away {
                    next_probe: now.after(PROBE_MIN),
                    delay: PROBE_MIN,
                });
                // Whatever stood back is now simply waiting.
                let later = core::mem::take(&mut lane.later);
                lane.ready.extend(later.into_iter().map(|(_, job)| job));
            }
            None => {}
        }
    }

    /// The engine answered a reading: an engine that is away is probed at once.
    pub(crate) fn seen(&mut self, engine: &EngineId, now: Timestamp) {
        if let Some(lane) = self.lanes.get_mut(engine)
            && let Some(away) = &mut lane.away
        {
            away.next_probe = now;
            self.due = None;
        }
    }

    /// The begin of the last call that the engine did not answer: it may be back since.
    pub(crate) fn down_at(&self, engine: &EngineId) -> Option<Timestamp> {
        self.lanes.get(engine)?.down_at
    }

    /// Puts a job back: for now while the engine is away, else for its next attempt.
    pub(crate) fn again(&mut self, engine: &EngineId, job: Job, attempts: u32, now: Timestamp) {
        self.due = None;
        let wait = jittered(backoff(attempts), &job, engine, attempts);
        let lane = self.lanes.entry(engine.clone()).or_default();
        if lane.away.is_some() {
            lane.ready.insert(job);
        } else {
            lane.later.insert((now.after(wait), job));
        }
    }

    /// One more attempt of an abort.
    pub(crate) fn abort_attempt(&mut self, engine: &EngineId, job: &Job) -> u32 {
        let lane = self.lanes.entry(engine.clone()).or_default();
        let attempts = lane.abort_attempts.entry(job.clone()).or_default();
        *attempts = attempts.saturating_add(1);
        *attempts
    }

    /// An abort has ended.
    pub(crate) fn abort_ended(&mut self, engine: &EngineId, job: &Job) {
        if let Some(lane) = self.lanes.get_mut(engine) {
            lane.abort_attempts.remove(job);
        }
    }

    /// Lanes of engines that are neither members nor asked anything hold nothing of interest.
    pub(crate) fn forget_lanes(&mut self, is_member: impl Fn(&EngineId) -> bool) {
        self.lanes
            .retain(|engine, lane| !lane.is_empty() || is_member(engine));
    }

    /// When something moves by itself.
    pub(crate) fn next_due(&self) -> Option<Timestamp> {
        let lanes = match self.due {
            Some(due) => due,
            None => self.lanes.values().filter_map(Lane::due).min(),
        };
        let looks = self.deadlines.first().map(|(at, _)| *at);
        lanes.into_iter().chain(looks).min()
    }

    /// Whether an intent can move now.
    pub(crate) fn has_joined(&self) -> bool {
        !self.joined.is_empty()
    }

    // ---- notices -------------------------------------------------------------------------

    pub(crate) fn note_reopened(&mut self, close: CloseNo, at: Timestamp) {
        self.reopened.insert(close, at);
        if self.reopened.len() > REOPENED_NOTED_MAX {
            self.reopened.pop_first();
        }
    }

    /// The session was closed again, or the close is forgotten.
    pub(crate) fn forget_reopened(&mut self, close: CloseNo) {
        self.reopened.remove(&close);
    }

    /// How many there are, the newest close among them, and since when.
    pub(crate) fn reopened(&self) -> Option<(u64, CloseNo, Timestamp)> {
        let (newest, _) = self.reopened.last_key_value()?;
        let since = self.reopened.values().min()?;
        let count = u64::try_from(self.reopened.len()).unwrap_or(u64::MAX);
        Some((count, *newest, *since))
    }

    pub(crate) fn refused(
        &mut self,
        engine: &EngineId,
        abort: bool,
        status: u16,
        text: Option<Arc<str>>,
        now: Timestamp,
    ) {
        let key = (engine.clone(), abort);
        let since = self.refusals.get(&key).map_or(now, |known| known.since);
        let refusal = Refusal {
            status,
            text,
            since,
            last: now,
        };
        self.refusals.insert(key, refusal);
    }

    pub(crate) fn accepted(&mut self, engine: &EngineId, abort: bool) {
        if !self.refusals.is_empty() {
            self.refusals.remove(&(engine.clone(), abort));
        }
    }

    pub(crate) const fn refusals(&self) -> &BTreeMap<(EngineId, bool), Refusal> {
        &self.refusals
    }

    pub(crate) fn forget_notices(&mut self, now: Timestamp) {
        self.reopened
            .retain(|_, at| !now.reached(at.after(REOPENED_NOTICE_FOR)));
        self.refusals
            .retain(|_, refusal| !now.reached(refusal.last.after(NOTICE_FOR)));
    }
}

impl Lane {
    fn take_due(&mut self, now: Timestamp) -> Option<(Job, bool)> {
        if let Some(away) = self.away {
            if !self.in_flight.is_empty() || !now.reached(away.next_probe) {
                return None;
            }
            return self.ready.pop_first().map(|job| (job, true));
        }
        if self.in_flight.len() >= CALLS_PER_ENGINE_MAX {
            return None;
        }
        while let Some((at, _)) = self.later.first()
            && now.reached(*at)
        {
            if let Some((_, job)) = self.later.pop_first() {
                self.ready.insert(job);
            }
        }
        self.ready.pop_first().map(|job| (job, false))
    }

    /// When a call may go out by the passing of time alone.
    fn due(&self) -> Option<Timestamp> {
        if let Some(away) = self.away {
            let waits = self.in_flight.is_empty() && !self.ready.is_empty();
            return waits.then_some(away.next_probe);
        }
        if self.in_flight.len() >= CALLS_PER_ENGINE_MAX {
            return None;
        }
        if !self.ready.is_empty() {
            return Some(Timestamp::default());
        }
        self.later.first().map(|(at, _)| *at)
    }

    fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.later.is_empty() && self.in_flight.is_empty()
    }
}

fn doubled(span: Span, most: Span) -> Span {
    Span::from_millis(span.millis().saturating_mul(2)).min(most)
}

/// CLO6: 0.25 s doubling to 15 s; `attempts` are those used up, from 1.
fn backoff(attempts: u32) -> Span {
    let doublings = attempts.saturating_sub(1);
    let factor = 1_u64.checked_shl(doublings).unwrap_or(u64::MAX);
    let millis = RETRY_MIN.millis().saturating_mul(factor);
    Span::from_millis(millis).min(RETRY_MAX)
}

/// CLO6: times 0.75 to 1.25, drawn from what is retried, so that the same commands give the same
/// times, and engines and intents that fail together do not come back together.
fn jittered(span: Span, job: &Job, engine: &EngineId, attempts: u32) -> Span {
    let (Job::Abort { close, .. } | Job::Close { close, .. }) = job;
    let mut hash = close.0 ^ u64::from(attempts).rotate_left(32);
    for byte in engine.as_str().bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash = (hash ^ hash.wrapping_shr(30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash.wrapping_shr(27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^= hash.wrapping_shr(31);
    let thousandths = hash.checked_rem(501).unwrap_or(0).saturating_add(750);
    let millis = span.millis().saturating_mul(thousandths);
    Span::from_millis(millis.checked_div(1_000).unwrap_or(0))
}
