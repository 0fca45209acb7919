//! The figures that health checks are judged from.

use std::collections::BTreeMap;

use kvgate_core::capacity::EngineView;
use kvgate_core::tally::Tally;
use kvgate_core::units::{Ppm, Span};

use super::Moment;
use crate::history::{Series, Summary, Window};
use crate::http::read;
use crate::web::checks::{EngineFact, Facts, Gap, NEAR, Resident};
use crate::web::format::bare;
use crate::web::{frame, why};
use crate::words;

/// The time that is judged.
const OVER: Span = Span::from_secs(900);
/// What lasts is looked for in this time.
const LOOK_BACK_S: u64 = 3_600;
/// Its steps.
const STEP_S: u64 = 10;
/// Steps without a figure that are a gap: a short stop of the machine is none.
const GAP_STEPS: usize = 3;

pub(super) fn of(moment: &Moment) -> Facts<'_> {
    let view = &moment.shown.view;
    let now = moment.shown.now;
    let history = moment.look.app.history();
    let window = |series, range_s| history.window(series, now, range_s, STEP_S);
    let reserved = window(Series::Reserved, LOOK_BACK_S);
    let ceiling = window(Series::Ceiling, LOOK_BACK_S);
    let waiting = window(Series::Waiting, LOOK_BACK_S);
    let counted = history.counted(&view.tally, now, OVER);
    let (over, counts) = counted.unwrap_or((Span::ZERO, Tally::default()));
    let near = f64::from(NEAR.get()) / f64::from(Ppm::ONE.get());
    let near = reserved
        .points
        .iter()
        .zip(&ceiling.points)
        .map(|(reserved, ceiling)| {
            let both = reserved.zip(*ceiling);
            both.map(|(reserved, ceiling)| {
                ceiling.mean > 0.0 && reserved.mean >= near * ceiling.mean
            })
        });
    let waits = waiting
        .points
        .iter()
        .map(|point| point.map(|point| point.min >= 1.0));
    let router = read::engines(&moment.look.app).router;
    Facts {
        policy: &view.policy,
        counts,
        over,
        degraded: view
            .measure
            .degraded
            .map(|_| frame::degraded(&moment.look.app)),
        reserved: view.reserved,
        ceiling: view.measure.ceiling,
        near_for: lasting(near.collect()),
        waiting: view.waiting,
        waiting_for: lasting(waits.collect()),
        head: moment
            .rows
            .queue
            .first()
            .map(|head| why::blocked(head, None, view)),
        resident: resident(
            &window(Series::Used, OVER.millis() / 1_000),
            &window(Series::Evictable, OVER.millis() / 1_000),
            &window(Series::Capacity, OVER.millis() / 1_000),
        ),
        closes_failed: view.closes_failed,
        failing: failing(moment),
        engines: view
            .engines
            .iter()
            .map(|engine| engine_fact(engine, moment))
            .collect(),
        router: router.map(|router| router.kind.unwrap_or("router".to_owned())),
        notices: &moment.look.state.notices,
        gap: gap(&reserved, now.millis() / 1_000),
    }
}

/// How long it has been so until now. The step of this moment may have no figure yet.
fn lasting(mut steps: Vec<Option<bool>>) -> Option<Span> {
    if steps.last() == Some(&None) {
        steps.pop();
    }
    let so = |step: &&Option<bool>| **step == Some(true);
    let count = steps.iter().rev().take_while(so).count();
    let count = u64::try_from(count).unwrap_or(u64::MAX);
    (count > 0).then(|| Span::from_secs(count.saturating_mul(STEP_S)))
}

fn resident(used: &Window, cached: &Window, capacity: &Window) -> Option<Resident> {
    let figures = used.points.iter().zip(&cached.points).zip(&capacity.points);
    let shares = figures.filter_map(|((used, cached), capacity)| {
        let (used, cached, capacity): (Summary, Summary, Summary) =
            ((*used)?, (*cached)?, (*capacity)?);
        let share = |tokens: f64| (tokens / capacity.mean).clamp(0.0, 1.0);
        (capacity.mean > 0.0).then(|| (share(used.mean + cached.mean), share(cached.mean)))
    });
    shares.fold(None, |sum: Option<Resident>, (both, cached)| {
        Some(match sum {
            None => Resident {
                low: both,
                high: both,
                cached_low: cached,
            },
            Some(sum) => Resident {
                low: sum.low.min(both),
                high: sum.high.max(both),
                cached_low: sum.cached_low.min(cached),
            },
        })
    })
}

/// Engines where closes that were read failed, the worst first.
fn failing(moment: &Moment) -> Vec<(String, u64)> {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for close in &moment.rows.closes {
        let failed = close
            .targets
            .iter()
            .filter(|(_, target)| target.state.is_failure());
        for (engine, _) in failed {
            *counts.entry(bare(engine.as_str())).or_default() += 1;
        }
    }
    let mut counts: Vec<(String, u64)> = counts
        .into_iter()
        .map(|(engine, count)| (engine.to_owned(), count))
        .collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    counts
}

fn engine_fact(engine: &EngineView, moment: &Moment) -> EngineFact {
    let now = moment.shown.now;
    let reading = engine.reading.as_ref();
    let runs = reading.is_some_and(|(_, reading)| reading.running.is_some_and(|count| count > 0));
    let stands = moment.look.app.history().stands_since(&engine.id);
    let missing = (engine.role.counts() && !engine.counted).then(|| match engine.failure {
        Some(failure) => words::read_failure(failure),
        None if !engine.healthy => "the router calls it unhealthy".to_owned(),
        None if !engine.fresh => "no fresh reading".to_owned(),
        None => "not counted".to_owned(),
    });
    EngineFact {
        name: bare(engine.id.as_str()).to_owned(),
        still: stands
            .filter(|_| runs && engine.counted)
            .map(|since| now.since(since)),
        age: reading
            .filter(|_| engine.counted)
            .map(|(at, _)| now.since(*at)),
        missing,
    }
}

/// The last time without figures that has an end.
fn gap(window: &Window, now_s: u64) -> Option<Gap> {
    let mut gap = None;
    let mut missing = 0;
    let known = window.points.iter().enumerate();
    for (step, point) in known.skip_while(|(_, point)| point.is_none()) {
        if point.is_none() {
            missing += 1;
            continue;
        }
        if missing >= GAP_STEPS {
            gap = Some((missing, step));
        }
        missing = 0;
    }
    let (steps, end) = gap?;
    let secs = |steps: usize| {
        u64::try_from(steps)
            .unwrap_or(u64::MAX)
            .saturating_mul(STEP_S)
    };
    let end_s = (window.from.millis() / 1_000).saturating_add(secs(end));
    Some(Gap {
        length: Span::from_secs(secs(steps)),
        ago: Span::from_secs(now_s.saturating_sub(end_s)),
    })
}

#[cfg(test)]
mod tests {
    use kvgate_core::units::Timestamp;

    use super::*;

    fn window(points: &[Option<f64>]) -> Window {
        let summary = |value: &f64| Summary {
            mean: *value,
            min: *value,
            max: *value,
        };
        Window {
            step_s: STEP_S,
            from: Timestamp::from_millis(0),
            points: points
                .iter()
                .map(|point| point.as_ref().map(summary))
                .collect(),
        }
    }

    #[test]
    fn what_lasts_until_now() {
        let lasts = |steps: &[Option<bool>]| {
            let span = lasting(steps.to_vec())?;
            Some(span.millis() / 1_000)
        };
        let (yes, no) = (Some(true), Some(false));
        assert_eq!(lasts(&[]), None);
        assert_eq!(lasts(&[yes, no, yes, yes]), Some(20));
        assert_eq!(lasts(&[yes, yes, None]), Some(20), "no figure yet");
        assert_eq!(lasts(&[yes, yes, no]), None);
        assert_eq!(lasts(&[yes, None, None]), None);
    }

    #[test]
    fn a_gap_has_figures_on_both_sides() {
        let some = Some(1.0);
        let of = |points: &[Option<f64>]| {
            gap(&window(points), 100).map(|gap| (gap.length.millis(), gap.ago.millis()))
        };
        assert_eq!(of(&[None, None, None, None, some]), None, "no history yet");
        assert_eq!(of(&[some, None, None, None]), None, "no end yet");
        assert_eq!(of(&[some, None, None, some]), None, "too short");
        assert_eq!(
            of(&[some, None, None, None, some, some]),
            Some((30_000, 60_000))
        );
    }

    #[test]
    fn resident_kv_is_used_and_cached() {
        let used = window(&[Some(10.0), Some(50.0), None]);
        let cached = window(&[Some(20.0), Some(40.0), Some(1.0)]);
        let capacity = window(&[Some(100.0), Some(100.0), Some(100.0)]);
        let seen = resident(&used, &cached, &capacity).unwrap();
        let sum = [seen.low, seen.high, seen.cached_low].map(|share| (share * 100.0).round());
        assert_eq!(sum, [30.0, 90.0, 20.0]);
        assert_eq!(resident(&used, &window(&[None; 3]), &capacity), None);
    }
}
