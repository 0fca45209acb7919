//! The engines and the router of a run: what reading rounds find of them, and what they answer to
//! closes and aborts. Capacity, usage, health and incarnation of engines change, they hang and refuse;
//! a router is silent, empty or back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{CallFailure, CallResult, CallWhat};
use kvgate_core::ids::{EngineId, SessionId};
use kvgate_core::reading::{
    EngineKind, ReadFailure, Reading, Role, Round, RouterAnswer, RouterFailure, StartMark,
    TokenCounters, Worker,
};
use kvgate_core::units::{Ppm, Timestamp, Tokens};

use crate::dice::Dice;

#[derive(Clone, Debug)]
struct Engine {
    id: EngineId,
    capacity: u64,
    usage: u32,
    running: u64,
    listed: bool,
    healthy: bool,
    /// It answers nothing until then.
    down_until: u64,
    incarnation: u64,
    counters: u64,
    worker: u64,
    kind: EngineKind,
    /// It takes calls and answers none until then.
    hangs_until: u64,
    /// What it answers to calls until then.
    odd: Option<(u16, u64)>,
    /// It has no session close, whatever incarnation runs.
    is_old: bool,
    /// Its last reading failed, or there is none: the next good one asks for its start time too.
    missed: bool,
    /// When the present incarnation was ready; an engine that goes away before anybody has seen it
    /// is ready when it is back.
    ready_at: Option<u64>,
    seen: bool,
    /// When it was last asked for its counters and its start time.
    asked_at: u64,
    /// When it last took the close of a session.
    closed: BTreeMap<SessionId, u64>,
}

/// What became of a call at an engine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Served {
    /// What the caller of the engine sees.
    pub(crate) result: CallResult,
    /// The engine did it.
    pub(crate) taken: bool,
    /// A reading has found this incarnation.
    pub(crate) seen: bool,
}

/// The engines and the router as the world has them.
#[derive(Clone, Debug)]
pub(crate) struct World {
    engines: Vec<Engine>,
    has_router: bool,
    silent_until: u64,
    empty_until: u64,
    hot_until: u64,
    /// Nothing bad happens any more.
    calm: bool,
}

impl World {
    pub(crate) fn new(now: u64, dice: &mut Dice) -> Self {
        let count = dice.between(1, 4);
        let engines = (0..count)
            .map(|n| Engine {
                id: EngineId::new(&format!("http://engine-{n}:30000")),
                capacity: dice.between(2_000, 12_000),
                usage: 300_000,
                running: 3,
                listed: n == 0 || !dice.one_in(3),
                healthy: true,
                down_until: 0,
                incarnation: 1,
                counters: 0,
                worker: n,
                kind: if n > 0 && dice.one_in(6) {
                    EngineKind::Vllm
                } else {
                    EngineKind::Sglang
                },
                hangs_until: 0,
                odd: None,
                is_old: dice.one_in(10),
                missed: true,
                ready_at: None,
                seen: false,
                asked_at: 0,
                closed: BTreeMap::new(),
            })
            .collect();
        Self {
            engines,
            has_router: !dice.one_in(5),
            silent_until: 0,
            // Now and then no member is known for a while at first.
            empty_until: if dice.one_in(4) {
                now + dice.between(10_000, 60_000)
            } else {
                0
            },
            hot_until: 0,
            calm: false,
        }
    }

    /// How the gate is told where members come from.
    pub(crate) fn config(&self) -> FleetConfig {
        FleetConfig {
            has_router: self.has_router,
            static_engines: if self.has_router {
                BTreeSet::new()
            } else {
                self.engines
                    .iter()
                    .map(|engine| engine.id.clone())
                    .collect()
            },
        }
    }

    pub(crate) fn calm_down(&mut self) {
        self.calm = true;
        self.silent_until = 0;
        self.empty_until = 0;
        for engine in &mut self.engines {
            engine.hangs_until = 0;
            engine.odd = None;
        }
    }

    /// Another process reads the engines: it asks each for its start time first.
    pub(crate) fn read_anew(&mut self) {
        for engine in &mut self.engines {
            engine.missed = true;
        }
    }

    /// An engine gets a call.
    pub(crate) fn serve(&mut self, now: u64, to: &EngineId, what: &CallWhat) -> Served {
        let failed = |failure| Served {
            result: CallResult::Failed(failure),
            taken: false,
            seen: true,
        };
        let found = self.engines.iter_mut().find(|engine| engine.id == *to);
        let Some(engine) = found.filter(|engine| now >= engine.down_until) else {
            return failed(CallFailure::Refused);
        };
        if now < engine.hangs_until {
            return failed(CallFailure::Timeout);
        }
        let odd = engine.odd.filter(|(_, until)| now < *until);
        let code = match odd {
            Some((code, _)) => code,
            None if engine.is_old => 404,
            None => 200,
        };
        if let (200, CallWhat::Close(session)) = (code, what) {
            engine.closed.insert(session.clone(), now);
        }
        Served {
            result: CallResult::Status {
                code,
                text: (code != 200).then(|| Arc::from("no")),
            },
            taken: code == 200,
            seen: engine.ready_at.is_none() || engine.seen,
        }
    }

    /// Whether the engine took the close of the session at or after `since`.
    pub(crate) fn took_close(&self, of: &EngineId, session: &SessionId, since: u64) -> bool {
        let taken = self
            .engine(of)
            .and_then(|engine| engine.closed.get(session));
        taken.is_some_and(|at| *at >= since)
    }

    /// Whether an incarnation of the engine became ready at or after `since`: it holds nothing of before.
    pub(crate) fn restarted_since(&self, of: &EngineId, since: u64) -> bool {
        let ready_at = self.engine(of).and_then(|engine| engine.ready_at);
        ready_at.is_some_and(|at| at >= since)
    }

    pub(crate) fn is_vllm(&self, of: &EngineId) -> bool {
        self.engine(of)
            .is_some_and(|engine| engine.kind == EngineKind::Vllm)
    }

    fn engine(&self, of: &EngineId) -> Option<&Engine> {
        self.engines.iter().find(|engine| engine.id == *of)
    }

    /// Something happens, now and then. Says what.
    pub(crate) fn change(&mut self, now: u64, dice: &mut Dice) -> Option<&'static str> {
        if self.calm {
            return None;
        }
        let count = u64::try_from(self.engines.len()).unwrap_or(1);
        let which = usize::try_from(dice.between(0, count.saturating_sub(1))).unwrap_or(0);
        let engine = self.engines.get_mut(which)?;
        Some(match dice.between(1, 16) {
            1 => {
                self.silent_until = now + dice.between(1_000, 20_000);
                "router silent"
            }
            2 => {
                self.empty_until = now + dice.between(1_000, 15_000);
                "router lists nothing"
            }
            3 => {
                engine.capacity = dice.between(500, 12_000);
                "capacity changed"
            }
            4 => {
                engine.incarnation += 1;
                engine.counters = 0;
                engine.running = 0;
                // An engine takes long enough to start for a reading to miss it.
                engine.down_until = now + dice.between(3_000, 15_000);
                engine.ready_at = Some(engine.down_until);
                engine.seen = false;
                engine.hangs_until = 0;
                engine.odd = None;
                "engine restarted"
            }
            5 => {
                engine.down_until = now + dice.between(1_000, 90_000);
                if !engine.seen && engine.ready_at.is_some() {
                    engine.ready_at = Some(engine.down_until);
                }
                "engine away"
            }
            6 => {
                engine.healthy = !engine.healthy;
                "health flipped"
            }
            7 => {
                engine.listed = !engine.listed;
                "engine joined or left"
            }
            8 => {
                engine.worker += 100;
                "worker id changed"
            }
            9 | 10 => {
                self.hot_until = now + dice.between(1_000, 15_000);
                "pressure"
            }
            11 | 12 => {
                engine.hangs_until = now + dice.between(2_000, 60_000);
                "engine hangs"
            }
            13 | 14 => {
                let code = dice.pick(&[400, 401, 404, 408, 429, 500, 503, 302], 503);
                engine.odd = Some((code, now + dice.between(1_000, 60_000)));
                "engine answers oddly"
            }
            _ => {
                engine.healthy = true;
                engine.listed = true;
                engine.hangs_until = 0;
                engine.odd = None;
                "engine well"
            }
        })
    }

    /// One round that began at `began_at`.
    pub(crate) fn round(&mut self, now: u64, began_at: Timestamp, dice: &mut Dice) -> Round {
        let hot = now < self.hot_until && !self.calm;
        let mut readings = Vec::new();
        let mut start_marks = Vec::new();
        for engine in &mut self.engines {
            if now < engine.down_until {
                readings.push((engine.id.clone(), Err(ReadFailure::Refused)));
                engine.missed = true;
                continue;
            }
            // A new incarnation answers at first: a failure would be taken for a sign of the old one.
            let fresh = engine.ready_at.is_some() && !engine.seen;
            if dice.one_in(40) && !fresh {
                readings.push((engine.id.clone(), Err(ReadFailure::Timeout)));
                engine.missed = true;
                continue;
            }
            engine.seen = true;
            engine.usage = if hot {
                u32::try_from(dice.between(900_000, 1_000_000)).unwrap_or(0)
            } else {
                u32::try_from(dice.between(200_000, 860_000)).unwrap_or(0)
            };
            engine.running = if dice.one_in(6) { 0 } else { 5 };
            engine.counters += dice.between(0, 500);
            let mut reading = Reading::idle(Tokens::clamped(u128::from(engine.capacity)));
            reading.kind = engine.kind;
            reading.running = Some(engine.running);
            reading.usage = (!dice.one_in(20)).then_some(Ppm::clamped(engine.usage));
            reading.unknown_label = dice.one_in(200);
            // Every 10 s, and soon after it did not answer (CAP2, CAP8).
            let due = now >= engine.asked_at + 10_000;
            if due {
                engine.asked_at = now;
            }
            if due || (engine.missed && dice.one_in(2)) {
                reading.counters = Some(TokenCounters {
                    prompt: engine.counters,
                    generation: engine.counters / 2,
                });
            }
            readings.push((engine.id.clone(), Ok(reading)));
            if std::mem::take(&mut engine.missed) || due {
                start_marks.push((engine.id.clone(), StartMark(engine.incarnation)));
            }
        }
        Round {
            began_at,
            router: self.has_router.then(|| self.router(now)),
            readings,
            start_marks,
        }
    }

    fn router(&self, now: u64) -> RouterAnswer {
        if now < self.silent_until {
            return RouterAnswer::Failed(RouterFailure::Timeout);
        }
        if now < self.empty_until {
            return RouterAnswer::Workers(Vec::new());
        }
        let workers = self
            .engines
            .iter()
            .filter(|engine| engine.listed)
            .map(|engine| Worker {
                engine: engine.id.clone(),
                role: Role::Regular,
                healthy: engine.healthy,
                worker_ids: BTreeSet::from([Arc::from(format!("w{}", engine.worker))]),
            })
            .collect();
        RouterAnswer::Workers(workers)
    }
}
