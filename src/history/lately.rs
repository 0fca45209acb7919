//! The last minutes in memory: counters to subtract from, and engines whose figures stand still.

use std::collections::{BTreeMap, VecDeque};

use kvgate_core::capacity::EngineView;
use kvgate_core::ids::EngineId;
use kvgate_core::reading::{Reading, TokenCounters};
use kvgate_core::tally::Tally;
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};

/// Time between two sets of counters that are kept.
const EVERY: Span = Span::from_secs(5);
/// Sets of counters that are kept: 15 minutes of them, and one to begin with.
const KEPT: usize = 181;

/// Counters as they stood, oldest first.
#[derive(Debug, Default)]
pub(super) struct Counters(VecDeque<(Timestamp, Tally)>);

impl Counters {
    /// Keeps a set when the last one is old enough.
    pub(super) fn take(&mut self, now: Timestamp, tally: &Tally) {
        let due = self
            .0
            .back()
            .is_none_or(|(at, _)| now.reached(at.after(EVERY)));
        if !due {
            return;
        }
        if self.0.len() >= KEPT {
            self.0.pop_front();
        }
        self.0.push_back((now, tally.clone()));
    }

    /// The newest set that is at least so old, or the oldest there is.
    pub(super) fn before(&self, now: Timestamp, span: Span) -> Option<(Timestamp, &Tally)> {
        let old = self.0.partition_point(|(at, _)| *at <= now.before(span));
        let (at, tally) = self.0.get(old.saturating_sub(1))?;
        Some((*at, tally))
    }
}

/// What moves in an engine that works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Figures {
    usage: Option<Ppm>,
    used: Option<Tokens>,
    running: Option<u64>,
    queued: Option<u64>,
    /// Those last read: they are not in every reading.
    counters: Option<TokenCounters>,
}

impl Figures {
    fn of(reading: &Reading, before: Option<&Self>) -> Self {
        Self {
            usage: reading.usage,
            used: reading.used,
            running: reading.running,
            queued: reading.queued,
            counters: reading
                .counters
                .or(before.and_then(|figures| figures.counters)),
        }
    }
}

/// Since when each member's figures are the same. Bounded as the members are.
#[derive(Debug, Default)]
pub(super) struct Standing(BTreeMap<EngineId, (Timestamp, Figures)>);

impl Standing {
    pub(super) fn look(&mut self, engines: &[EngineView], now: Timestamp) {
        self.0
            .retain(|known, _| engines.iter().any(|engine| engine.id == *known));
        for engine in engines {
            // An engine that gives no reading is told of by other figures.
            let Some((_, reading)) = engine.reading.as_ref().filter(|_| engine.fresh) else {
                self.0.remove(&engine.id);
                continue;
            };
            let before = self.0.get(&engine.id);
            let figures = Figures::of(reading, before.map(|(_, figures)| figures));
            let since = before.filter(|(_, before)| *before == figures);
            let since = since.map_or(now, |(since, _)| *since);
            self.0.insert(engine.id.clone(), (since, figures));
        }
    }

    pub(super) fn since(&self, engine: &EngineId) -> Option<Timestamp> {
        self.0.get(engine).map(|(since, _)| *since)
    }
}

#[cfg(test)]
mod tests {
    use kvgate_core::ids::Epoch;
    use kvgate_core::reading::Role;

    use super::*;

    fn at(second: u64) -> Timestamp {
        Timestamp::from_millis(1_700_000_000_000 + second * 1_000)
    }

    fn closes(count: u64) -> Tally {
        Tally {
            closes: count,
            ..Tally::default()
        }
    }

    /// What is subtracted from stands where the time began, or at the start; old sets go.
    #[test]
    fn counters_of_a_moment_ago() {
        let mut counters = Counters::default();
        assert!(counters.before(at(0), Span::from_secs(60)).is_none());
        for second in 0..2_000 {
            counters.take(at(second), &closes(second));
        }
        let before = |span| {
            let (since, tally) = counters.before(at(1_999), Span::from_secs(span)).unwrap();
            (at(1_999).since(since).millis() / 1_000, tally.closes)
        };
        assert_eq!(before(60), (64, 1_935));
        assert_eq!(before(4), (4, 1_995));
        assert_eq!(before(900), (904, 1_095));
        assert_eq!(before(5_000), (904, 1_095), "no more is kept");
        assert_eq!(counters.0.len(), KEPT);
    }

    fn engine(running: u64, counters: Option<u64>) -> EngineView {
        let reading = Reading {
            running: Some(running),
            counters: counters.map(|count| TokenCounters {
                prompt: 1,
                generation: count,
            }),
            ..Reading::idle(Tokens::new(1_000).unwrap())
        };
        EngineView {
            id: EngineId::new("http://e:1"),
            role: Role::Regular,
            counted: true,
            healthy: true,
            reading: Some((at(0), reading)),
            fresh: true,
            failure: None,
            pressure: None,
            joined: Epoch(1),
        }
    }

    /// A figure that moves begins the time anew; counters that were not read say nothing.
    #[test]
    fn engines_that_stand_still() {
        let id = EngineId::new("http://e:1");
        let mut standing = Standing::default();
        let mut since = |second, view: EngineView| {
            standing.look(&[view], at(second));
            standing.since(&id)
        };
        assert_eq!(since(0, engine(3, Some(10))), Some(at(0)));
        assert_eq!(since(1, engine(3, None)), Some(at(0)));
        assert_eq!(since(60, engine(3, Some(10))), Some(at(0)));
        assert_eq!(since(61, engine(3, Some(11))), Some(at(61)));
        assert_eq!(since(62, engine(4, None)), Some(at(62)));
        let silent = EngineView {
            fresh: false,
            ..engine(4, None)
        };
        assert_eq!(since(63, silent), None);
        standing.look(&[], at(64));
        assert!(standing.0.is_empty());
    }
}
