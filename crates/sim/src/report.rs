//! What a run says of itself: counts of what occurred, and for a seed that failed the last events
//! before it.

use std::collections::BTreeMap;
use std::fmt;

pub use crate::audit::Violation;
use crate::run::{Plan, run};

/// How often everything occurred in one or many runs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Runs.
    pub seeds: u64,
    /// Turns of the writer.
    pub turns: u64,
    /// Model time in milliseconds.
    pub millis: u64,
    /// Reasons, faults and races.
    pub counts: BTreeMap<&'static str, u64>,
}

impl Summary {
    /// Adds another one.
    pub fn add(&mut self, other: &Self) {
        self.seeds += other.seeds;
        self.turns += other.turns;
        self.millis += other.millis;
        for (what, count) in &other.counts {
            *self.counts.entry(what).or_default() += count;
        }
    }

    /// How often `what` occurred.
    #[must_use]
    pub fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} seeds, {} turns, {} min of model time",
            self.seeds,
            self.turns,
            self.millis / 60_000
        )?;
        for (what, count) in &self.counts {
            writeln!(f, "  {count:>9}  {what}")?;
        }
        Ok(())
    }
}

/// A seed for which an invariant did not hold. It fails again whenever it is run again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// What did not hold.
    pub violation: Violation,
    /// Model time in milliseconds.
    pub at: u64,
    /// The last events, oldest first.
    pub events: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the last {} events:", self.events.len())?;
        for event in &self.events {
            writeln!(f, "  {event}")?;
        }
        writeln!(
            f,
            "seed {}: {} does not hold after {} ms: {}",
            self.seed, self.violation.invariant, self.at, self.violation.what
        )
    }
}

/// Runs one seed. One that fails is run again to write down its last `events` events.
///
/// # Errors
/// The invariant that did not hold.
pub fn run_seed(plan: Plan, events: usize) -> Result<Summary, Box<Failure>> {
    run(plan, 0).or_else(|_| run(plan, events))
}
