//! Capacity, pressure, freshness and the worker set (CAP1 to CAP8).
//!
//! Readings and health are not kept over a restart; the member set, its epoch and the last known
//! capacities are, through the records that applying a round returns.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::close::TargetState;
use crate::decision::DegradedReason;
use crate::ids::{EngineId, Epoch};
use crate::lifecycle::{Restarted, Support};
use crate::policy::{
    CAPACITY_KNOWN_FOR, INCARNATION_SIGNS_WITHIN, PACE_READINGS, PRESSURE_WINDOW, Policy,
    UNHEALTHY_AFTER, UNSUPPORTED_AFTER, UNSUPPORTED_TRIED_EVERY,
};
use crate::reading::{
    EngineKind, ReadFailure, Reading, Role, Round, RouterAnswer, RouterFailure, StartMark,
    TokenCounters, Worker,
};
use crate::record::Record;
use crate::state::{EngineRow, EpochCause, EpochEntry};
use crate::units::{Ppm, Timestamp, Tokens};

/// What the operator configured: where members come from (CAP1).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FleetConfig {
    /// A router is asked for members.
    pub has_router: bool,
    /// Engines that are members whatever the router lists.
    pub static_engines: BTreeSet<EngineId>,
}

/// A member and what is known of it now.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Member {
    row: EngineRow,
    /// The router lists it; else only the operator named it.
    listed: bool,
    unhealthy_since: Option<Timestamp>,
    reading: Option<(Timestamp, Reading)>,
    failure: Option<(Timestamp, ReadFailure)>,
    /// Usage of the last readings; `None` for one that was idle or had no usage (CAP5).
    window: VecDeque<Option<Ppm>>,
    capacity_at: Option<Timestamp>,
    /// When its start time was last told, and when its counters were last read.
    mark_at: Option<Timestamp>,
    counters_at: Option<Timestamp>,
    counters: Option<TokenCounters>,
    /// It was away since the counters were last compared (CAP8).
    was_absent: bool,
    last_incarnation: Option<(Timestamp, BTreeSet<Sign>)>,
    /// The last sign that the KV of an incarnation is gone.
    restarted_by: Option<(Timestamp, Sign)>,
    /// The begin of the last reading that it did not answer.
    silent_at: Option<Timestamp>,
}

/// What shows that an engine is a new incarnation (CAP8).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Sign {
    StartTime,
    Counters,
    WorkerId,
}

/// What the readings come to, until the next round or deadline.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Measure {
    /// Sum over counted engines.
    pub capacity: Tokens,
    /// floor(headroom × capacity) (CAP4).
    pub ceiling: Tokens,
    /// The same over all members with a capacity known in the past 60 s (CAP4).
    pub full_ceiling: Tokens,
    /// The largest single pool of a counted engine (DEC5).
    pub largest_pool: Tokens,
    /// Mean of the plain usages of counted engines.
    pub usage_mean: Option<Ppm>,
    /// Highest plain usage of the counted engines.
    pub usage_max: Option<Ppm>,
    /// Fleet pressure and the engine that exerts it (CAP5).
    pub pressure: Option<(Ppm, EngineId)>,
    /// Why there is no usable ceiling (CAP7).
    pub degraded: Option<DegradedReason>,
}

/// A member for readers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineView {
    /// Base URL.
    pub id: EngineId,
    /// Its part in the fleet.
    pub role: Role,
    /// Counts for ceiling and pressure now (CAP3).
    pub counted: bool,
    /// Health as the router says; true for engines that only the operator named.
    pub healthy: bool,
    /// Last good reading and its time.
    pub reading: Option<(Timestamp, Reading)>,
    /// Whether the last reading is fresh (CAP3).
    pub fresh: bool,
    /// Last failure, when it is newer than the last good reading.
    pub failure: Option<ReadFailure>,
    /// Its pressure (CAP5).
    pub pressure: Option<Ppm>,
    /// Generation in which it joined.
    pub joined: Epoch,
}

/// The fleet as far as it is known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Fleet {
    config: FleetConfig,
    members: BTreeMap<EngineId, Member>,
    /// Last good non-empty list, or the start (CAP7).
    router_good_at: Timestamp,
    router_failure: Option<RouterFailure>,
    pace: Pace,
    measure: Arc<Measure>,
    view: Arc<[EngineView]>,
    valid_until: Option<Timestamp>,
}

/// What a reading round brought about.
pub(crate) struct Applied {
    /// What must be kept.
    pub(crate) records: Vec<Record>,
    /// New incarnations by start time or counters; the KV of the old ones is gone (CLO5).
    pub(crate) restarted: Vec<Restarted>,
    /// Engines that gave a good reading.
    pub(crate) answered: Vec<EngineId>,
}

/// Pacing after pressure (CAP6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Pace {
    /// Readings below the threshold in a row; `None` while unpaced.
    below: Option<u32>,
    admitted: u128,
    first_passed: bool,
}

impl Fleet {
    /// Members as last known; nothing fresh. A start begins unpaced (CAP6).
    pub(crate) fn restore(config: FleetConfig, rows: Vec<EngineRow>, now: Timestamp) -> Self {
        let members = rows
            .into_iter()
            .map(|row| (row.id.clone(), Member::new(row, now)))
            .collect();
        Self {
            config,
            members,
            router_good_at: now,
            router_failure: None,
            pace: Pace::default(),
            measure: Arc::new(Measure::default()),
            view: Arc::new([]),
            valid_until: Some(now),
        }
    }

    pub(crate) fn measure(&self) -> &Measure {
        &self.measure
    }

    pub(crate) fn measure_shared(&self) -> Arc<Measure> {
        Arc::clone(&self.measure)
    }

    /// Members for readers, by address.
    pub(crate) fn view(&self) -> Arc<[EngineView]> {
        Arc::clone(&self.view)
    }

    /// What is remembered of the members over a restart, by address (CAP7, CAP8).
    pub(crate) fn rows(&self) -> Vec<EngineRow> {
        self.members
            .values()
            .map(|member| member.row.clone())
            .collect()
    }

    /// When the measure changes by the passing of time alone.
    pub(crate) const fn valid_until(&self) -> Option<Timestamp> {
        self.valid_until
    }

    pub(crate) fn router_failure(&self) -> Option<RouterFailure> {
        self.router_failure
    }

    pub(crate) const fn paced(&self) -> bool {
        self.pace.below.is_some()
    }

    /// Some member's last reading had rows that differ by an unknown label (CAP2).
    pub(crate) fn unknown_label(&self) -> bool {
        self.members
            .values()
            .filter_map(|member| member.reading.as_ref())
            .any(|(_, reading)| reading.unknown_label)
    }

    /// Whether the pace lets a request of this size pass now. The first of a round always passes.
    pub(crate) fn pace_allows(&self, tokens: Tokens) -> bool {
        if !self.paced() || !self.pace.first_passed {
            return true;
        }
        let quota = u128::from(self.measure.ceiling.share(Ppm::TENTH).get());
        self.pace.admitted.saturating_add(u128::from(tokens.get())) <= quota
    }

    pub(crate) fn pace_admitted(&mut self, tokens: Tokens) {
        self.pace.first_passed = true;
        self.pace.admitted = self.pace.admitted.saturating_add(u128::from(tokens.get()));
    }

    /// Members, by address.
    pub(crate) fn members(&self) -> impl Iterator<Item = &EngineId> {
        self.members.keys()
    }

    pub(crate) fn is_member(&self, engine: &EngineId) -> bool {
        self.members.contains_key(engine)
    }

    /// Whether an engine speaks the calls of the lifecycle at all: vLLM and gRPC have neither close nor
    /// abort. An SGLang that has no session close yet may well abort.
    pub(crate) fn takes_calls(&self, engine: &EngineId) -> bool {
        let member = self.members.get(engine);
        let reading = member.and_then(|member| member.reading.as_ref());
        !engine.is_grpc() && reading.is_none_or(|(_, reading)| reading.kind != EngineKind::Vllm)
    }

    /// Whether an engine has a session close, as far as is known (CLO5).
    pub(crate) fn close_support(&self, engine: &EngineId, now: Timestamp) -> Support {
        if !self.takes_calls(engine) {
            return Support::Absent;
        }
        let Some(member) = self.members.get(engine) else {
            return Support::Assumed;
        };
        match member.row.unsupported_at {
            None => Support::Assumed,
            Some(at) if now.reached(at.after(UNSUPPORTED_TRIED_EVERY)) => Support::TriedAgain,
            Some(_) => Support::Absent,
        }
    }

    /// An engine answered a close, as one that has it or as one that has not (CLO5). Gives how the
    /// close ended there, and the member's row when it must be kept.
    pub(crate) fn learn_close(
        &mut self,
        engine: &EngineId,
        has_close: bool,
        now: Timestamp,
    ) -> (TargetState, Option<EngineRow>) {
        let Some(member) = self.members.get_mut(engine) else {
            let state = if has_close {
                TargetState::Delivered
            } else {
                TargetState::Refused
            };
            return (state, None);
        };
        let row = &mut member.row;
        let before = (row.close_refusals, row.unsupported_at);
        let state = if has_close {
            row.forget_refusals();
            TargetState::Delivered
        } else if row.unsupported_at.is_some() {
            row.unsupported_at = Some(now);
            TargetState::Unsupported
        } else {
            row.close_refusals = row.close_refusals.saturating_add(1);
            row.unsupported_at = (row.close_refusals >= UNSUPPORTED_AFTER).then_some(now);
            TargetState::Refused
        };
        let changed = before != (row.close_refusals, row.unsupported_at);
        (state, changed.then(|| row.clone()))
    }

    /// An engine without session close is tried again; the next time is a while from now (CLO5).
    pub(crate) fn tried_again(&mut self, engine: &EngineId, now: Timestamp) -> Option<EngineRow> {
        let member = self.members.get_mut(engine)?;
        member.row.unsupported_at = Some(now);
        Some(member.row.clone())
    }

    /// Takes in one reading round. What is stale is judged as of
    /// `judged_at`, which is before `now` in a hold (TIM3).
    pub(crate) fn apply(
        &mut self,
        round: Round,
        now: Timestamp,
        judged_at: Timestamp,
        policy: &Policy,
        epoch: Epoch,
        first_set: bool,
    ) -> Applied {
        let before: BTreeMap<EngineId, EngineRow> = self
            .members
            .iter()
            .map(|(id, member)| (id.clone(), member.row.clone()))
            .collect();
        let mut epochs = EpochSteps {
            epoch,
            now,
            entries: Vec::new(),
        };
        let mut signs = BTreeSet::new();
        self.apply_members(round.router, now, first_set, &mut epochs, &mut signs);
        // What a round saw was so at its begin or later.
        let began_at = round.began_at.min(now);
        let mut answered = Vec::new();
        let mut restarted = Vec::new();
        for (id, result) in round.readings {
            if let Some(member) = self.members.get_mut(&id) {
                match &result {
                    Ok(_) => answered.push(id.clone()),
                    Err(ReadFailure::Timeout | ReadFailure::Refused) => {
                        member.silent_at = Some(began_at);
                    }
                    Err(_) => {}
                }
                let seen_at = member.counters_at;
                let has_counters = matches!(&result, Ok(reading) if reading.counters.is_some());
                if has_counters {
                    member.counters_at = Some(began_at);
                }
                if member.take_reading(result, now, policy) {
                    restarted.extend(member.restarted(Sign::Counters, seen_at, now));
                    signs.insert((id, Sign::Counters));
                }
            }
        }
        for (id, mark) in round.start_marks {
            if let Some(member) = self.members.get_mut(&id) {
                let seen_at = member.mark_at.replace(began_at);
                if member.take_start_mark(mark) {
                    restarted.extend(member.restarted(Sign::StartTime, seen_at, now));
                    signs.insert((id, Sign::StartTime));
                }
            }
        }
        for (id, sign) in signs {
            if let Some(member) = self.members.get_mut(&id)
                && member.is_new_incarnation(sign, now)
            {
                epochs.step(match sign {
                    Sign::WorkerId => EpochCause::WorkerIdChanged(id),
                    Sign::StartTime | Sign::Counters => EpochCause::Restarted(id),
                });
            }
        }
        self.pace.admitted = 0;
        self.pace.first_passed = false;
        if !answered.is_empty() {
            self.judge_pace(judged_at, policy);
        }
        self.remeasure(judged_at, policy);
        Applied {
            records: self.records(&before, epochs),
            restarted,
            answered,
        }
    }

    /// CAP1, CAP3, CAP7: the set that the router lists, and the operator's engines. An empty or
    /// missing list changes nothing.
    fn apply_members(
        &mut self,
        router: Option<RouterAnswer>,
        now: Timestamp,
        first_set: bool,
        epochs: &mut EpochSteps,
        signs: &mut BTreeSet<(EngineId, Sign)>,
    ) {
        let workers = match router {
            None => Vec::new(),
            Some(RouterAnswer::Workers(workers)) if !workers.is_empty() => {
                self.router_good_at = now;
                self.router_failure = None;
                workers
            }
            Some(RouterAnswer::Workers(_)) => return,
            Some(RouterAnswer::Failed(failure)) => {
                self.router_failure = Some(failure);
                return;
            }
        };
        let mut listed: BTreeMap<EngineId, Worker> = workers
            .into_iter()
            .map(|worker| (worker.engine.clone(), worker))
            .collect();
        let wanted: BTreeSet<EngineId> = listed
            .keys()
            .chain(&self.config.static_engines)
            .cloned()
            .collect();
        if wanted.is_empty() {
            return;
        }
        let left: Vec<EngineId> = self
            .members
            .keys()
            .filter(|id| !wanted.contains(*id))
            .cloned()
            .collect();
        let joined: Vec<EngineId> = wanted
            .into_iter()
            .filter(|id| !self.members.contains_key(id))
            .collect();
        if !left.is_empty() || !joined.is_empty() {
            if first_set {
                epochs.first();
            } else {
                epochs.step(EpochCause::MembersChanged {
                    joined: u32::try_from(joined.len()).unwrap_or(u32::MAX),
                    left: u32::try_from(left.len()).unwrap_or(u32::MAX),
                });
            }
        }
        for id in left {
            self.members.remove(&id);
        }
        for id in joined {
            let row = EngineRow {
                id: id.clone(),
                role: Role::Regular,
                worker_ids: BTreeSet::new(),
                seen_healthy: false,
                capacity: None,
                start_mark: None,
                joined: epochs.epoch,
                close_refusals: 0,
                unsupported_at: None,
            };
            self.members.insert(id, Member::new(row, now));
        }
        for (id, member) in &mut self.members {
            match listed.remove(id) {
                Some(worker) => {
                    if member.take_worker(worker, now) {
                        signs.insert((id.clone(), Sign::WorkerId));
                    }
                }
                // The operator's engine, of whose health nobody says anything.
                None => {
                    member.listed = false;
                    member.call_healthy();
                }
            }
        }
    }

    /// CAP6: judged by the plain usage of each reading round over counted, busy engines.
    fn judge_pace(&mut self, now: Timestamp, policy: &Policy) {
        let high = self
            .members
            .values()
            .filter(|member| member.counted(now, policy) && !member.idle())
            .filter_map(|member| member.reading.as_ref()?.1.usage)
            .any(|usage| usage >= policy.pressure_threshold);
        self.pace.below = if high {
            Some(0)
        } else {
            self.pace
                .below
                .map(|below| below.saturating_add(1))
                .filter(|below| *below < PACE_READINGS)
        };
    }

    /// Works the measure out anew, as of `now`.
    pub(crate) fn remeasure(&mut self, now: Timestamp, policy: &Policy) {
        let mut capacity: u128 = 0;
        let mut known: u128 = 0;
        let mut largest_pool = Tokens::ZERO;
        let mut pressure: Option<(Ppm, EngineId)> = None;
        let mut usages: Vec<u64> = Vec::new();
        let mut usage_max = None;
        let mut any_fresh = false;
        let mut changes: BTreeSet<Timestamp> = BTreeSet::new();
        for (id, member) in &self.members {
            any_fresh |= member.fresh(now, policy);
            changes.extend(member.changes(policy));
            if !member.row.role.counts() {
                continue;
            }
            if let Some(last) = member.known_capacity(now) {
                known = known.saturating_add(u128::from(last.get()));
            }
            let Some((_, reading)) = member.reading.as_ref() else {
                continue;
            };
            if !member.counted(now, policy) {
                continue;
            }
            capacity = capacity.saturating_add(u128::from(reading.capacity.get()));
            largest_pool = largest_pool.max(reading.largest_pool);
            if let Some(usage) = reading.usage {
                usages.push(u64::from(usage.get()));
                usage_max = usage_max.max(Some(usage));
            }
            if let Some(own) = member.pressure()
                && pressure.as_ref().is_none_or(|(worst, _)| own > *worst)
            {
                pressure = Some((own, id.clone()));
            }
        }
        let router_until = self.router_good_at.after(policy.stale_after);
        if self.config.has_router {
            changes.insert(router_until);
        }
        let sum: u64 = usages
            .iter()
            .fold(0, |sum, usage| sum.saturating_add(*usage));
        let count = u64::try_from(usages.len()).unwrap_or(u64::MAX);
        let mean = sum
            .checked_div(count)
            .and_then(|mean| u32::try_from(mean).ok());
        let capacity = Tokens::clamped(capacity);
        let ceiling = capacity.share(policy.headroom);
        self.measure = Arc::new(Measure {
            capacity,
            ceiling,
            full_ceiling: Tokens::clamped(known).share(policy.headroom).max(ceiling),
            largest_pool,
            usage_mean: mean.map(Ppm::clamped),
            usage_max,
            pressure,
            degraded: if !self.config.has_router && self.config.static_engines.is_empty() {
                Some(DegradedReason::NoFleet)
            } else if self.config.has_router && now.reached(router_until) {
                Some(DegradedReason::RouterUnreachable)
            } else if ceiling > Tokens::ZERO {
                None
            } else if any_fresh {
                Some(DegradedReason::NoCapacity)
            } else {
                Some(DegradedReason::NoFreshReading)
            },
        });
        self.view = self
            .members
            .values()
            .map(|member| member.view(now, policy))
            .collect();
        self.valid_until = changes.into_iter().find(|change| *change > now);
    }

    fn records(&self, before: &BTreeMap<EngineId, EngineRow>, epochs: EpochSteps) -> Vec<Record> {
        let left = before
            .keys()
            .filter(|id| !self.members.contains_key(*id))
            .map(|id| Record::EngineLeft(id.clone()));
        let changed = self
            .members
            .values()
            .filter(|member| before.get(&member.row.id) != Some(&member.row))
            .map(|member| Record::Engine(member.row.clone()));
        let entries = epochs.entries.into_iter().map(Record::Epoch);
        entries.chain(left).chain(changed).collect()
    }
}

impl Member {
    fn view(&self, now: Timestamp, policy: &Policy) -> EngineView {
        EngineView {
            id: self.row.id.clone(),
            role: self.row.role,
            counted: self.counted(now, policy),
            healthy: self.unhealthy_since.is_none(),
            fresh: self.fresh(now, policy),
            failure: self.failure.and_then(|(at, failure)| {
                let newer = self.reading.as_ref().is_none_or(|(good, _)| at > *good);
                newer.then_some(failure)
            }),
            reading: self.reading.clone(),
            pressure: self.pressure(),
            joined: self.row.joined,
        }
    }

    fn new(row: EngineRow, now: Timestamp) -> Self {
        let capacity_at = row.capacity.map(|_| now);
        Self {
            row,
            listed: false,
            unhealthy_since: None,
            reading: None,
            failure: None,
            window: VecDeque::new(),
            capacity_at,
            mark_at: None,
            counters_at: None,
            counters: None,
            was_absent: false,
            last_incarnation: None,
            restarted_by: None,
            silent_at: None,
        }
    }

    /// A sign of a new incarnation, unless it is a later sign of one that is known: what was closed in
    /// between may be held by that one. A new incarnation may have what the old one had not.
    fn restarted(
        &mut self,
        sign: Sign,
        seen_at: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<Restarted> {
        if let Some((at, other)) = self.restarted_by
            && other != sign
            && at < now
            && now.since(at) <= INCARNATION_SIGNS_WITHIN
        {
            return None;
        }
        self.restarted_by = Some((now, sign));
        self.row.forget_refusals();
        Some(Restarted {
            engine: self.row.id.clone(),
            seen_at,
            silent_at: self.silent_at,
        })
    }

    fn call_healthy(&mut self) {
        self.unhealthy_since = None;
        self.row.seen_healthy = true;
    }

    /// True when the worker ids changed.
    fn take_worker(&mut self, worker: Worker, now: Timestamp) -> bool {
        self.listed = true;
        self.row.role = worker.role;
        if worker.healthy {
            self.call_healthy();
        } else if self.unhealthy_since.is_none() {
            self.unhealthy_since = Some(now);
        }
        if worker.worker_ids.is_empty() || worker.worker_ids == self.row.worker_ids {
            return false;
        }
        let had_ids = !self.row.worker_ids.is_empty();
        self.row.worker_ids = worker.worker_ids;
        had_ids
    }

    /// True when token counters began again after an absence (CAP8).
    fn take_reading(
        &mut self,
        result: Result<Reading, ReadFailure>,
        now: Timestamp,
        policy: &Policy,
    ) -> bool {
        let reading = match result {
            Ok(reading) => reading,
            Err(failure) => {
                self.failure = Some((now, failure));
                return false;
            }
        };
        if let Some((last, _)) = &self.reading
            && now.since(*last) > policy.stale_after
        {
            self.was_absent = true;
        }
        if !self.listed
            && let Some(role) = reading.role
        {
            self.row.role = role;
        }
        let mut began_again = false;
        if let Some(counters) = reading.counters {
            began_again = self.was_absent
                && self.counters.is_some_and(|last| {
                    counters.prompt < last.prompt || counters.generation < last.generation
                });
            self.was_absent = false;
            self.counters = Some(counters);
        }
        self.row.capacity = Some(reading.capacity);
        self.capacity_at = Some(now);
        self.reading = Some((now, reading));
        let usage = if self.idle() {
            None
        } else {
            self.reading.as_ref().and_then(|(_, reading)| reading.usage)
        };
        self.window.push_back(usage);
        if self.window.len() > PRESSURE_WINDOW {
            self.window.pop_front();
        }
        began_again
    }

    /// True when it differs from the one known before.
    fn take_start_mark(&mut self, mark: StartMark) -> bool {
        let changed = self.row.start_mark.is_some_and(|known| known != mark);
        self.row.start_mark = Some(mark);
        changed
    }

    /// Signs of other kinds within 30 s of the first are the same incarnation (CAP8).
    fn is_new_incarnation(&mut self, sign: Sign, now: Timestamp) -> bool {
        if let Some((at, kinds)) = &mut self.last_incarnation
            && now.since(*at) <= INCARNATION_SIGNS_WITHIN
            && kinds.insert(sign)
        {
            return false;
        }
        self.last_incarnation = Some((now, BTreeSet::from([sign])));
        true
    }

    fn fresh(&self, now: Timestamp, policy: &Policy) -> bool {
        self.reading
            .as_ref()
            .is_some_and(|(at, _)| !now.reached(at.after(policy.stale_after)))
    }

    /// CAP3.
    fn counted(&self, now: Timestamp, policy: &Policy) -> bool {
        let healthy = self.row.seen_healthy
            && self
                .unhealthy_since
                .is_none_or(|since| !now.reached(since.after(UNHEALTHY_AFTER)));
        let has_capacity = self
            .reading
            .as_ref()
            .is_some_and(|(_, reading)| reading.capacity > Tokens::ZERO);
        self.row.role.counts() && healthy && has_capacity && self.fresh(now, policy)
    }

    /// Nothing running and nothing queued: its usage gauge may be old (CAP5).
    fn idle(&self) -> bool {
        self.reading.as_ref().is_some_and(|(_, reading)| {
            reading.running == Some(0) && reading.queued.unwrap_or(0) == 0
        })
    }

    fn pressure(&self) -> Option<Ppm> {
        if self.idle() {
            return None;
        }
        self.window.iter().flatten().copied().max()
    }

    fn known_capacity(&self, now: Timestamp) -> Option<Tokens> {
        let at = self.capacity_at?;
        if now.reached(at.after(CAPACITY_KNOWN_FOR)) {
            return None;
        }
        self.row.capacity
    }

    /// Points in time at which its part of the measure changes by itself.
    fn changes(&self, policy: &Policy) -> impl Iterator<Item = Timestamp> {
        let stale = self
            .reading
            .as_ref()
            .map(|(at, _)| at.after(policy.stale_after));
        let unhealthy = self.unhealthy_since.map(|at| at.after(UNHEALTHY_AFTER));
        let forgotten = self.capacity_at.map(|at| at.after(CAPACITY_KNOWN_FOR));
        stale.into_iter().chain(unhealthy).chain(forgotten)
    }
}

/// The epochs that one round brings.
struct EpochSteps {
    epoch: Epoch,
    now: Timestamp,
    entries: Vec<EpochEntry>,
}

impl EpochSteps {
    /// The first non-empty member set is epoch 1: no step.
    fn first(&mut self) {
        self.note(EpochCause::First);
    }

    fn step(&mut self, cause: EpochCause) {
        self.epoch = Epoch(self.epoch.0.saturating_add(1));
        self.note(cause);
    }

    fn note(&mut self, cause: EpochCause) {
        self.entries.push(EpochEntry {
            epoch: self.epoch,
            at: self.now,
            cause,
        });
    }
}
