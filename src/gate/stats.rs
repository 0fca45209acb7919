//! Figures of the writer for readers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvgate_core::event::{Event, QueueEnd};
use kvgate_core::units::{Span, Timestamp};

use crate::telemetry::{GateMetrics, Trouble};

/// Commit times that the 99th percentile is taken from.
const COMMITS_KEPT: usize = 1_024;

/// Queue times of grants are looked at for so long.
const WAITS_FOR: Duration = Duration::from_secs(60);
/// Of so many of them: more than a fleet grants in that time.
const WAITS_KEPT: usize = 16_384;

/// Queue times of the grants of the last minute, of those that had to wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waits {
    /// Median.
    pub p50: Span,
    /// 95th percentile.
    pub p95: Span,
    /// The longest.
    pub max: Span,
}

/// Figures of the writer for readers.
#[derive(Clone, Debug, Default)]
pub struct CommitStats {
    inner: Arc<StatsInner>,
}

#[derive(Debug, Default)]
struct StatsInner {
    commits: AtomicU64,
    commands: AtomicU64,
    bytes: AtomicU64,
    times: Mutex<VecDeque<Duration>>,
    waits: Mutex<VecDeque<(Instant, Span)>>,
    metrics: GateMetrics,
    /// Milliseconds of progress of the writer, on the process's own line.
    last_turn: AtomicU64,
}

impl CommitStats {
    /// Commits since the start.
    #[must_use]
    pub fn commits(&self) -> u64 {
        self.inner.commits.load(Ordering::Relaxed)
    }

    /// Commands in those commits.
    #[must_use]
    pub fn commands(&self) -> u64 {
        self.inner.commands.load(Ordering::Relaxed)
    }

    /// Bytes on disk, looked at once a second while there are commits.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.inner.bytes.load(Ordering::Relaxed)
    }

    /// 99th percentile of the last 1,024 commit times; `None` before the first.
    #[must_use]
    pub fn commit_p99(&self) -> Option<Duration> {
        let times = self
            .inner
            .times
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut sorted: Vec<Duration> = times.iter().copied().collect();
        drop(times);
        sorted.sort_unstable();
        let rank = sorted.len().checked_sub(1)? * 99 / 100;
        sorted.get(rank).copied()
    }

    /// Queue times of the grants of the last minute; `None` when none had to wait.
    #[must_use]
    pub fn waits(&self) -> Option<Waits> {
        let waits = self
            .inner
            .waits
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let from = Instant::now().checked_sub(WAITS_FOR);
        let old = waits.partition_point(|(at, _)| from.is_some_and(|from| *at < from));
        let spans = waits.range(old..).map(|(_, waited)| *waited).collect();
        drop(waits);
        quantiles(spans)
    }

    /// When the writer last finished a turn.
    #[must_use]
    pub fn last_turn(&self) -> Timestamp {
        Timestamp::from_millis(self.inner.last_turn.load(Ordering::Relaxed))
    }

    /// What is measured, cumulative since the start.
    #[must_use]
    pub fn metrics(&self) -> &GateMetrics {
        &self.inner.metrics
    }

    /// Something went wrong with the store.
    pub(super) fn failed(&self, trouble: Trouble) {
        self.inner.metrics.failed(trouble);
    }

    pub(super) fn committed(&self, took: Duration, commands: usize) {
        self.inner.metrics.committed(took, commands);
        self.inner.commits.fetch_add(1, Ordering::Relaxed);
        let commands = u64::try_from(commands).unwrap_or(u64::MAX);
        self.inner.commands.fetch_add(commands, Ordering::Relaxed);
        let mut times = self
            .inner
            .times
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if times.len() == COMMITS_KEPT {
            times.pop_front();
        }
        times.push_back(took);
    }

    /// Bytes on disk, as they were looked at.
    pub(super) fn set_bytes(&self, bytes: u64) {
        self.inner.bytes.store(bytes, Ordering::Relaxed);
    }

    /// What a durable turn did.
    pub(super) fn saw(&self, events: &[Event]) {
        for event in events {
            self.inner.metrics.saw(event);
        }
        let granted = events.iter().filter_map(|event| match event {
            Event::LeftQueue {
                outcome: QueueEnd::Admit,
                waited,
            } => Some((Instant::now(), *waited)),
            Event::LeftQueue { .. }
            | Event::Asked { .. }
            | Event::LeaseEnded { .. }
            | Event::Expired { .. }
            | Event::Operated(_) => None,
        });
        let mut granted = granted.peekable();
        if granted.peek().is_some() {
            let mut waits = self
                .inner
                .waits
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            waits.extend(granted);
            let more = waits.len().saturating_sub(WAITS_KEPT);
            waits.drain(..more);
        }
    }

    pub(super) fn turned(&self, now: Timestamp) {
        self.inner.last_turn.store(now.millis(), Ordering::Relaxed);
    }
}

/// By nearest rank.
fn quantiles(mut spans: Vec<Span>) -> Option<Waits> {
    spans.sort_unstable();
    let rank = |percent: usize| {
        let rank = (spans.len() * percent).div_ceil(100).checked_sub(1)?;
        spans.get(rank).copied()
    };
    Some(Waits {
        p50: rank(50)?,
        p95: rank(95)?,
        max: rank(100)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(outcome: QueueEnd, millis: u64) -> Event {
        Event::LeftQueue {
            outcome,
            waited: Span::from_millis(millis),
        }
    }

    /// Only grants count, and no more are kept than the bound.
    #[test]
    fn queue_times_of_grants() {
        let stats = CommitStats::default();
        assert_eq!(stats.waits(), None);
        stats.saw(&[left(QueueEnd::Bypass, 30_000), left(QueueEnd::Admit, 7)]);
        let seven = Span::from_millis(7);
        let waits = stats.waits().unwrap();
        assert_eq!([waits.p50, waits.p95, waits.max], [seven; 3]);
        let many: Vec<Event> = (1..=100)
            .map(|millis| left(QueueEnd::Admit, millis))
            .collect();
        let hundred = CommitStats::default();
        hundred.saw(&many);
        let waits = hundred.waits().unwrap();
        assert_eq!(
            [waits.p50, waits.p95, waits.max].map(Span::millis),
            [50, 95, 100]
        );
        for _ in 0..200 {
            stats.saw(&many);
        }
        assert_eq!(stats.inner.waits.lock().unwrap().len(), WAITS_KEPT);
    }
}
