//! Figures of the writer for readers.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvgate_core::event::Event;
use kvgate_core::units::Timestamp;

use crate::telemetry::{GateMetrics, Trouble};

/// Commit times that the 99th percentile is taken from.
const COMMITS_KEPT: usize = 1_024;

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

    /// Bytes on disk.
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

    pub(super) fn committed(&self, took: Duration, commands: usize, bytes: u64) {
        self.inner.metrics.committed(took, commands);
        self.inner.commits.fetch_add(1, Ordering::Relaxed);
        let commands = u64::try_from(commands).unwrap_or(u64::MAX);
        self.inner.commands.fetch_add(commands, Ordering::Relaxed);
        self.inner.bytes.store(bytes, Ordering::Relaxed);
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

    /// The store was opened.
    pub(super) fn opened(&self, bytes: u64) {
        self.inner.bytes.store(bytes, Ordering::Relaxed);
    }

    /// What a durable turn did.
    pub(super) fn saw(&self, events: &[Event]) {
        for event in events {
            self.inner.metrics.saw(event);
        }
    }

    pub(super) fn turned(&self, now: Timestamp) {
        self.inner.last_turn.store(now.millis(), Ordering::Relaxed);
    }
}
