//! The past hour of each engine: a ring in memory, bounded in engines and steps. Unlike the figures of
//! the gate it is not kept over a restart: one look at the engines is enough to begin it anew.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvgate_core::capacity::EngineView;
use kvgate_core::ids::EngineId;
use kvgate_core::units::{Ppm, Timestamp};

/// Seconds of a step.
pub const ENGINE_STEP_S: u64 = 10;
/// Steps that are kept: an hour.
pub const ENGINE_STEPS: usize = 360;
/// Engines that are kept; those beyond have no past.
const ENGINES_MAX: usize = 256;

/// One step of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineStep {
    /// Number of the step since the Unix epoch.
    step: u64,
    /// Highest usage in it.
    pub usage: Option<Ppm>,
    /// Most requests that ran in it.
    pub running: Option<u64>,
}

/// The past hour of all engines.
#[derive(Debug, Default)]
pub(super) struct EngineRings(BTreeMap<EngineId, VecDeque<EngineStep>>);

impl EngineRings {
    /// Takes in what the engines say now; engines that left are dropped.
    pub(super) fn put(&mut self, now: Timestamp, engines: &[EngineView]) {
        let present: BTreeSet<&EngineId> = engines.iter().map(|engine| &engine.id).collect();
        self.0.retain(|id, _| present.contains(id));
        let step = step_of(now);
        for engine in engines.iter().filter(|engine| engine.fresh) {
            let Some((_, reading)) = &engine.reading else {
                continue;
            };
            if self.0.len() >= ENGINES_MAX && !self.0.contains_key(&engine.id) {
                continue;
            }
            let ring = self.0.entry(engine.id.clone()).or_default();
            match ring.back_mut() {
                Some(last) if last.step >= step => {
                    last.usage = last.usage.max(reading.usage);
                    last.running = last.running.max(reading.running);
                }
                _ => ring.push_back(EngineStep {
                    step,
                    usage: reading.usage,
                    running: reading.running,
                }),
            }
            while ring.len() > ENGINE_STEPS {
                ring.pop_front();
            }
        }
    }

    /// The steps of the hour until `now`, the oldest first; `None` where the engine gave no reading.
    pub(super) fn window(&self, engine: &EngineId, now: Timestamp) -> Vec<Option<EngineStep>> {
        let mut steps = vec![None; ENGINE_STEPS];
        let last = step_of(now);
        for step in self.0.get(engine).into_iter().flatten() {
            let back = usize::try_from(last.saturating_sub(step.step)).unwrap_or(usize::MAX);
            let place = ENGINE_STEPS
                .checked_sub(1)
                .and_then(|newest| newest.checked_sub(back));
            if let Some(slot) = place.and_then(|place| steps.get_mut(place)) {
                *slot = Some(*step);
            }
        }
        steps
    }
}

const fn step_of(now: Timestamp) -> u64 {
    now.millis() / 1_000 / ENGINE_STEP_S
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvgate_core::ids::Epoch;
    use kvgate_core::reading::{Reading, Role};
    use kvgate_core::units::Tokens;

    fn engine(name: &str, usage: u32, running: u64) -> EngineView {
        EngineView {
            id: EngineId::new(name),
            role: Role::Regular,
            counted: true,
            healthy: true,
            reading: Some((
                Timestamp::default(),
                Reading {
                    usage: Some(Ppm::clamped(usage)),
                    running: Some(running),
                    ..Reading::idle(Tokens::ZERO)
                },
            )),
            fresh: true,
            failure: None,
            pressure: None,
            joined: Epoch(1),
        }
    }

    fn at(second: u64) -> Timestamp {
        Timestamp::from_millis(1_700_000_000_000 + second * 1_000)
    }

    /// A step holds the highest of its readings, a step without one is a gap, and an hour is kept.
    #[test]
    fn steps_of_an_engine() {
        let mut rings = EngineRings::default();
        rings.put(at(0), &[engine("a", 10, 5)]);
        rings.put(at(9), &[engine("a", 30, 2)]);
        rings.put(at(20), &[engine("a", 20, 1)]);
        let window = rings.window(&EngineId::new("a"), at(25));
        assert_eq!(window.len(), ENGINE_STEPS);
        let last = &window[ENGINE_STEPS - 3..];
        let figures = |step: &Option<EngineStep>| {
            step.map(|step| (step.usage.unwrap().get(), step.running.unwrap()))
        };
        assert_eq!(
            last.iter().map(figures).collect::<Vec<_>>(),
            [Some((30, 5)), None, Some((20, 1))]
        );
        for second in (30..5_000).step_by(10) {
            rings.put(at(second), &[engine("a", 1, 1)]);
        }
        assert_eq!(rings.0[&EngineId::new("a")].len(), ENGINE_STEPS);
        assert!(
            rings
                .window(&EngineId::new("a"), at(4_990))
                .iter()
                .all(Option::is_some)
        );
    }

    /// Engines that left are dropped, and there are never more than the bound.
    #[test]
    fn engines_are_bounded() {
        let mut rings = EngineRings::default();
        let many: Vec<EngineView> = (0..300)
            .map(|number| engine(&format!("e{number}"), 1, 1))
            .collect();
        rings.put(at(0), &many);
        assert_eq!(rings.0.len(), ENGINES_MAX);
        rings.put(at(10), &many[..2]);
        assert_eq!(rings.0.len(), 2);
        let gone = rings.window(&EngineId::new("e9"), at(10));
        assert!(gone.iter().all(Option::is_none));
    }
}
