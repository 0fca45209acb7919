//! What callers do in one measurement, and what they saw.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use super::ask::{Head, Shape};
use super::wire::{Answer, Target};

/// Shortest and longest time that is told apart, in nanoseconds.
const NANOS: (u64, u64) = (1_000, 600_000_000_000);
/// Digits of a latency that are kept.
const DIGITS: u8 = 3;
/// What is shown of an answer that nobody expected, in bytes.
const SHOWN_BYTES: usize = 300;

/// What callers do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scenario {
    /// Everything fits: acquire, release, and again.
    Open,
    /// The same while few leases fit: all others wait in the queue.
    Contended,
    /// Each caller renews the lease that it holds.
    Renewals,
    /// Acquire, release and close a session, and again with another session.
    Closes,
    /// Many acquires in one call, then all their releases in another.
    Batch,
    /// Acquire and release at a fixed rate, whatever the answers take.
    Arrivals,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Open,
        Self::Contended,
        Self::Renewals,
        Self::Closes,
        Self::Batch,
        Self::Arrivals,
    ];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Contended => "contended",
            Self::Renewals => "renewals",
            Self::Closes => "closes",
            Self::Batch => "batch",
            Self::Arrivals => "arrivals",
        }
    }
}

/// A service as callers see it.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where it listens.
    pub target: Target,
    /// What stands above requests to it.
    pub head: Head,
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct Cell {
    /// What callers do.
    pub scenario: Scenario,
    /// How many they are.
    pub connections: usize,
    /// For how long they begin anew.
    pub time: Duration,
    /// Tokens of an acquire.
    pub tokens: u64,
    /// How many acquires fit at a time, where few do.
    pub slots: usize,
    /// How long each of them is held there.
    pub hold: Duration,
    /// Acquires in one batch.
    pub batch: usize,
    /// Beginnings of pairs a second, where their rate is fixed.
    pub rate: f64,
    /// What acquires look like.
    pub shape: Shape,
    /// Threads that make the load.
    pub threads: usize,
}

/// A histogram of nanoseconds.
#[must_use]
pub fn histogram() -> Histogram<u64> {
    #[expect(clippy::expect_used, reason = "the bounds are constants, and fit")]
    Histogram::new_with_bounds(NANOS.0, NANOS.1, DIGITS).expect("bounds of a histogram")
}

/// What one measurement saw.
#[derive(Clone, Debug)]
pub struct Measured {
    /// From the start until the last caller ended what it had begun.
    pub time: Duration,
    /// Whole pairs, or renewals.
    pub pairs: u64,
    /// Operations that had to be made durable: acquires that were admitted, releases, renewals, closes.
    pub operations: u64,
    /// Acquires that were told to ask again.
    pub asked_again: u64,
    /// Acquires that were told to go on without a lease.
    pub bypassed: u64,
    /// Answers that nobody expected, and the first of them.
    pub refused: u64,
    /// The first of them.
    pub first_refusal: Option<String>,
    /// Pairs of a fixed rate that were not begun, since the time was over.
    pub not_begun: u64,
    /// Nanoseconds from an acquire, or from when it was due, to its decision; of a whole batch where
    /// acquires go in batches.
    pub acquire: Histogram<u64>,
    /// The same of releases.
    pub release: Histogram<u64>,
    /// The same of renewals or closes.
    pub act: Histogram<u64>,
    /// From the moment a release is sent until the waiter that gets its place has its grant.
    pub grant: Histogram<u64>,
    /// From the answer to that release; zero when the grant came first.
    pub grant_after: Histogram<u64>,
    /// How late the beginnings of a fixed rate were: what the load itself adds to their latency.
    pub lag: Histogram<u64>,
}

impl Default for Measured {
    fn default() -> Self {
        Self {
            time: Duration::ZERO,
            pairs: 0,
            operations: 0,
            asked_again: 0,
            bypassed: 0,
            refused: 0,
            first_refusal: None,
            not_begun: 0,
            acquire: histogram(),
            release: histogram(),
            act: histogram(),
            grant: histogram(),
            grant_after: histogram(),
            lag: histogram(),
        }
    }
}

impl Measured {
    pub(super) fn add(&mut self, other: &Self) {
        self.time = self.time.max(other.time);
        self.pairs += other.pairs;
        self.operations += other.operations;
        self.asked_again += other.asked_again;
        self.bypassed += other.bypassed;
        self.refused += other.refused;
        if self.first_refusal.is_none() {
            self.first_refusal.clone_from(&other.first_refusal);
        }
        self.not_begun += other.not_begun;
        for (all, own) in [
            (&mut self.acquire, &other.acquire),
            (&mut self.release, &other.release),
            (&mut self.act, &other.act),
            (&mut self.grant, &other.grant),
            (&mut self.grant_after, &other.grant_after),
            (&mut self.lag, &other.lag),
        ] {
            // All have the same bounds, so that nothing is left out.
            let _ = all.add(own);
        }
    }

    /// An answer that was none of those that were hoped for.
    pub(super) fn refuse(&mut self, answer: Answer<'_>) {
        self.refused += 1;
        if self.first_refusal.is_none() {
            let shown = answer.body.get(..SHOWN_BYTES).unwrap_or(answer.body);
            let shown = String::from_utf8_lossy(shown);
            self.first_refusal = Some(format!("status {}: {shown}", answer.status));
        }
    }
}

pub(super) fn record(histogram: &mut Histogram<u64>, time: Duration) {
    histogram.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_counted_and_the_first_is_kept() {
        let mut measured = Measured::default();
        measured.refuse(Answer::of(503, "one"));
        measured.refuse(Answer::of(503, &"x".repeat(1_000)));
        assert_eq!(measured.refused, 2);
        assert_eq!(measured.first_refusal.unwrap(), "status 503: one");
    }
}
