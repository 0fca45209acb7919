//! What the reading rounds of a run find: engines whose capacity, usage, health and incarnation
//! change, and a router that is silent, empty or back.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvgate_core::capacity::FleetConfig;
use kvgate_core::ids::EngineId;
use kvgate_core::reading::{
    ReadFailure, Reading, Role, Round, RouterAnswer, RouterFailure, StartMark, TokenCounters,
    Worker,
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
    pub(crate) fn new(dice: &mut Dice) -> Self {
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
            })
            .collect();
        Self {
            engines,
            has_router: !dice.one_in(5),
            silent_until: 0,
            empty_until: 0,
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
    }

    /// Something happens, now and then. Says what.
    pub(crate) fn change(&mut self, now: u64, dice: &mut Dice) -> Option<&'static str> {
        if self.calm {
            return None;
        }
        let count = u64::try_from(self.engines.len()).unwrap_or(1);
        let which = usize::try_from(dice.between(0, count.saturating_sub(1))).unwrap_or(0);
        let engine = self.engines.get_mut(which)?;
        Some(match dice.between(1, 12) {
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
                engine.down_until = now + dice.between(500, 15_000);
                "engine restarted"
            }
            5 => {
                engine.down_until = now + dice.between(1_000, 90_000);
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
            _ => {
                engine.healthy = true;
                engine.listed = true;
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
                continue;
            }
            if dice.one_in(40) {
                readings.push((engine.id.clone(), Err(ReadFailure::Timeout)));
                continue;
            }
            engine.usage = if hot {
                u32::try_from(dice.between(900_000, 1_000_000)).unwrap_or(0)
            } else {
                u32::try_from(dice.between(200_000, 860_000)).unwrap_or(0)
            };
            engine.running = if dice.one_in(6) { 0 } else { 5 };
            engine.counters += dice.between(0, 500);
            let mut reading = Reading::idle(Tokens::clamped(u128::from(engine.capacity)));
            reading.running = Some(engine.running);
            reading.usage = (!dice.one_in(20)).then_some(Ppm::clamped(engine.usage));
            reading.unknown_label = dice.one_in(200);
            if dice.one_in(10) {
                reading.counters = Some(TokenCounters {
                    prompt: engine.counters,
                    generation: engine.counters / 2,
                });
            }
            readings.push((engine.id.clone(), Ok(reading)));
            if dice.one_in(10) {
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
