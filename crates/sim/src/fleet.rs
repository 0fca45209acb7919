//! Several engines and a router's placement: each request goes to the least loaded engine.
//!
//! Placement is the router's business. Nothing here decides on admission.

use kvgate_core::units::{Span, Timestamp};

use crate::clock::VirtualClock;
use crate::engine::{Engine, EngineSpec, Finished, Gauges, Request, TooLong};

/// Where a least-loaded router sends the next request: the place of the smallest load, the first of
/// equals. Load is what runs and what waits inside the engine, against its pool.
#[must_use]
pub fn least_loaded(gauges: impl IntoIterator<Item = Gauges>) -> Option<usize> {
    gauges
        .into_iter()
        .enumerate()
        .min_by_key(|(_, gauges)| {
            let load = u128::from(gauges.used) + u128::from(gauges.queued_tokens);
            let load = load * 1_000_000 / u128::from(gauges.capacity).max(1);
            (load, gauges.running + gauges.queued)
        })
        .map(|(place, _)| place)
}

/// Engines under one clock.
#[derive(Clone, Debug)]
pub struct Fleet {
    clock: VirtualClock,
    engines: Vec<Engine>,
}

impl Fleet {
    /// Empty engines; the clock starts at `start`.
    #[must_use]
    pub fn new(start: Timestamp, specs: &[EngineSpec]) -> Self {
        Self {
            clock: VirtualClock::new(start),
            engines: specs.iter().map(|spec| Engine::new(*spec)).collect(),
        }
    }

    /// The present of the fleet.
    #[must_use]
    pub const fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The engines.
    #[must_use]
    pub fn engines(&self) -> &[Engine] {
        &self.engines
    }

    /// All pools together, in tokens.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.engines
            .iter()
            .map(|engine| engine.spec().pool_tokens)
            .sum()
    }

    /// Places a request; says on which engine. `None` without engines.
    ///
    /// # Errors
    /// The request is larger than the pool of that engine.
    pub fn submit(&mut self, request: Request) -> Result<Option<usize>, TooLong> {
        let place = least_loaded(self.engines.iter().map(Engine::gauges));
        match place.and_then(|place| self.engines.get_mut(place)) {
            Some(engine) => engine.submit(request).map(|()| place),
            None => Ok(None),
        }
    }

    /// Closes a session on every engine; says how many tokens that freed.
    pub fn close_session(&mut self, session: &str) -> u64 {
        self.engines
            .iter_mut()
            .map(|engine| engine.close_session(session))
            .sum()
    }

    /// Moves time on by `span`; what ended, with the engine it ran on, engine by engine.
    pub fn step(&mut self, span: Span) -> Vec<(usize, Finished)> {
        self.clock.advance(span);
        let mut ended = Vec::new();
        for (place, engine) in self.engines.iter_mut().enumerate() {
            ended.extend(engine.step(span).into_iter().map(|one| (place, one)));
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};

    use super::*;
    use crate::workload::{Pace, SessionPlan, Workload, WorkloadSpec};

    fn request(rid: &str, prompt: u64) -> Request {
        Request {
            rid: rid.into(),
            session: rid.into(),
            prefix: None,
            prompt_tokens: prompt,
            max_new_tokens: 100,
            decode_tokens: 100,
        }
    }

    fn spec(pool_tokens: u64) -> EngineSpec {
        EngineSpec {
            pool_tokens,
            ..EngineSpec::default()
        }
    }

    #[test]
    fn the_least_loaded_engine_gets_the_request() {
        let mut fleet = Fleet::new(Timestamp::default(), &[spec(10_000), spec(20_000)]);
        assert_eq!(fleet.submit(request("a", 4_000)), Ok(Some(0)));
        assert_eq!(fleet.submit(request("b", 4_000)), Ok(Some(1)));
        assert_eq!(
            fleet.submit(request("c", 4_000)),
            Ok(Some(1)),
            "4,000 of 20,000 is less than 4,000 of 10,000"
        );
        let mut none = Fleet::new(Timestamp::default(), &[]);
        assert_eq!(none.submit(request("a", 1)), Ok(None));
    }

    /// A gate with a plain ledger, so that the workload can be looked at without the service.
    #[derive(Default, Debug, PartialEq, Clone)]
    struct Outcome {
        finished: usize,
        waits: usize,
        aged: usize,
        pressure_waits: usize,
        expired: usize,
        longest_wait_ms: u64,
        utilisation: Vec<u64>,
        queue: Vec<usize>,
        usage_max: Vec<u32>,
        cached: u64,
        prompt: u64,
    }

    struct Slot {
        plan: SessionPlan,
        turn: usize,
        next: u64,
    }

    /// Drives `slots` sessions through a FIFO ledger of 90 % for `secs` seconds of model time.
    fn drive(spec_: WorkloadSpec, slots: u64, secs: u64, ttl_ms: u64) -> Outcome {
        let pools = [416_000, 400_000, 392_000, 384_000];
        let specs: Vec<EngineSpec> = pools.map(spec).to_vec();
        let mut fleet = Fleet::new(Timestamp::default(), &specs);
        let workload = Workload::new(spec_.clone()).unwrap();
        let ceiling = fleet.capacity() * 9 / 10;
        let mut out = Outcome::default();
        let mut idle: BTreeMap<u64, Slot> = (0..slots)
            .map(|slot| {
                let plan = workload.session(slot);
                let next = Pace::start(&spec_, slot, 0);
                (
                    slot,
                    Slot {
                        plan,
                        turn: 0,
                        next,
                    },
                )
            })
            .collect();
        let mut queue: VecDeque<(u64, u64, Slot, u64, bool)> = VecDeque::new();
        let mut flying: BTreeMap<String, (u64, Slot, u64)> = BTreeMap::new();
        let mut lost: Vec<(u64, u64)> = Vec::new();
        let mut reserved = 0;
        let mut next_index = slots;
        let tick = 100;
        for now in (0..secs * 1_000).step_by(100) {
            let due: Vec<u64> = idle
                .iter()
                .filter(|(_, slot)| slot.next <= now)
                .map(|(id, _)| *id)
                .collect();
            for id in due {
                let slot = idle.remove(&id).unwrap();
                let turn = &slot.plan.turns[slot.turn];
                let tokens = turn.prompt_tokens + turn.max_new_tokens;
                if slot.plan.eval || slot.plan.protected {
                    queue.push_front((id, now, slot, tokens, false));
                } else {
                    queue.push_back((id, now, slot, tokens, false));
                }
            }
            let (gone, kept): (Vec<_>, Vec<_>) = lost.into_iter().partition(|(at, _)| *at <= now);
            lost = kept;
            for (_, tokens) in gone {
                reserved -= tokens;
                out.expired += 1;
            }
            let usage = fleet
                .engines()
                .iter()
                .map(|engine| engine.gauges().usage().get())
                .max()
                .unwrap();
            if now % 1_000 == 0 {
                out.usage_max.push(usage);
                out.queue.push(queue.len());
                out.utilisation.push(reserved * 100 / ceiling);
            }
            while let Some((_, since, slot, tokens, _)) = queue.front() {
                let outside = slot.plan.eval || slot.plan.protected;
                let aged = now - since >= 30_000;
                let fits = reserved + tokens <= ceiling && usage < 920_000;
                if !(outside || aged || fits) {
                    break;
                }
                let (id, since, slot, tokens, counted) = queue.pop_front().unwrap();
                let charged = if outside || !fits { 0 } else { tokens };
                if counted {
                    out.longest_wait_ms = out.longest_wait_ms.max(now - since);
                }
                out.aged += usize::from(aged && !outside);
                reserved += charged;
                let turn = &slot.plan.turns[slot.turn];
                let rid = format!("{id}-{}-{}", slot.plan.session, slot.turn);
                fleet.submit(turn.request(&slot.plan, &rid)).unwrap();
                if turn.dies_after.is_some() {
                    lost.push((now + ttl_ms, charged));
                    let plan = workload.session(next_index);
                    next_index += 1;
                    let next = now + 1_000;
                    idle.insert(
                        id,
                        Slot {
                            plan,
                            turn: 0,
                            next,
                        },
                    );
                } else {
                    flying.insert(rid, (id, slot, charged));
                }
            }
            for entry in queue.iter_mut().filter(|entry| !entry.4) {
                entry.4 = true;
                out.waits += 1;
                out.pressure_waits += usize::from(usage >= 920_000);
            }
            for (_, finished) in fleet.step(Span::from_millis(tick)) {
                out.finished += 1;
                out.cached += finished.cached_tokens;
                out.prompt += finished.prompt_tokens;
                let Some((id, mut slot, charged)) = flying.remove(&*finished.rid) else {
                    continue;
                };
                reserved -= charged;
                let tool = slot.plan.turns[slot.turn].tool.millis();
                slot.turn += 1;
                slot.next = now + tool;
                if slot.turn == slot.plan.turns.len() {
                    fleet.close_session(&slot.plan.session);
                    slot.plan = workload.session(next_index);
                    next_index += 1;
                    slot.turn = 0;
                    slot.next = Pace::start(&spec_, id, slot.next);
                }
                idle.insert(id, slot);
            }
            for engine in fleet.engines() {
                engine.check().unwrap();
            }
        }
        out
    }

    #[test]
    fn the_default_workload_shows_what_admission_is_for() {
        let out = drive(WorkloadSpec::default(), 200, 300, 80_000);
        let formed = out.queue.iter().position(|len| *len >= 20).unwrap();
        let drained = out.queue.iter().skip(formed).any(|len| *len <= 1);
        assert!(drained, "a queue forms and drains: {:?}", out.queue);
        assert!(out.utilisation.iter().any(|percent| *percent >= 98));
        assert!(out.longest_wait_ms >= 2_000, "some waits last seconds");
        assert!(out.pressure_waits > 0, "pressure holds some back");
        assert!(out.expired > 0, "a dead client's lease expires");
        assert!(out.aged * 100 < out.finished, "waits end before they age");
        assert!(out.cached > 0, "later turns find cached prefixes");
        let again = drive(WorkloadSpec::default(), 200, 300, 80_000);
        assert_eq!(out, again, "same seed, same run");
    }
}
