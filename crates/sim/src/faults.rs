//! A store that fails on a seed: before a commit was kept, after it was kept, and with a crash of
//! the process at either point.
//!
//! It wraps the [`MemoryStore`] and writes down what was really kept, so that a run can be judged
//! by that and not by what the store said. For tests of the judge itself a fault can be planted
//! that no honest store has.

use kvgate_core::decision::EndHow;
use kvgate_core::ids::{Seq, Term};
use kvgate_core::memory::MemoryStore;
use kvgate_core::record::Record;
use kvgate_core::store::{Commit, Image, Store};
use kvgate_core::ticket::Stage;
use kvgate_core::units::Timestamp;

use crate::dice::Dice;

/// How often each fault comes: one commit in so many, 0 for never.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultOdds {
    /// The commit fails and nothing of it was kept.
    pub fails_unkept: u64,
    /// The commit fails and was kept.
    pub fails_kept: u64,
    /// The process ends before the commit was kept.
    pub crashes_unkept: u64,
    /// The process ends after the commit was kept.
    pub crashes_kept: u64,
}

/// What a failed commit comes to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreFault {
    /// The store said no; the machine is lost, the process lives on.
    Failed,
    /// The process is gone.
    Crashed,
}

/// A fault that an honest store does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Planted {
    /// One commit in 50 is acknowledged and not kept.
    AcksWithoutKeeping,
    /// A restart finds no finished tickets.
    ForgetsFinished,
    /// A restart finds the number of the last change moved back.
    ResetsSeq,
    /// A restart finds no waiters.
    ForgetsWaiters,
    /// A restart finds the first issue number again, and the salt of the first start is drawn again.
    RepeatsLeaseIds,
    /// Releases are kept as they were before them.
    LosesReleases,
    /// A restart finds the counters at zero.
    LosesCounters,
    /// A restart finds no close intents.
    ForgetsCloses,
    /// Close intents are not kept.
    LosesCloses,
    /// A restart finds no windows of step reports.
    ForgetsWindows,
    /// A restart finds nothing of what was set at run time.
    ForgetsSettings,
    /// Entries of the audit are not kept.
    LosesAudit,
}

/// One commit as it was kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeptCommit {
    /// The writer's generation.
    pub term: Term,
    /// Number of its last change.
    pub seq: Seq,
    /// Its time.
    pub now: Timestamp,
    /// The issue number of the next grant.
    pub next_issue: u64,
    /// Its facts.
    pub records: Vec<Record>,
}

/// A memory store with faults.
#[derive(Clone, Debug)]
pub struct FaultyStore {
    inner: MemoryStore,
    dice: Dice,
    odds: FaultOdds,
    planted: Option<Planted>,
    kept: Vec<KeptCommit>,
}

impl FaultyStore {
    /// An empty store whose faults are drawn from `seed`.
    #[must_use]
    pub fn new(seed: u64, odds: FaultOdds, planted: Option<Planted>) -> Self {
        Self {
            inner: MemoryStore::default(),
            dice: Dice::new(seed, 1),
            odds,
            planted,
            kept: Vec::new(),
        }
    }

    /// Changes the odds from here on.
    pub const fn set_odds(&mut self, odds: FaultOdds) {
        self.odds = odds;
    }

    /// What a restart loads.
    #[must_use]
    pub fn image(&self) -> Image {
        let mut image = self.inner.image();
        match self.planted {
            Some(Planted::ForgetsFinished) => image
                .tickets
                .retain(|ticket| !matches!(ticket.stage, Stage::Ended(_))),
            Some(Planted::ForgetsWaiters) => image
                .tickets
                .retain(|ticket| !matches!(ticket.stage, Stage::Waiting { .. })),
            Some(Planted::ResetsSeq) => image.seq = Seq(image.seq.0 / 2),
            Some(Planted::RepeatsLeaseIds) => image.next_issue = 1,
            Some(Planted::LosesCounters) => image.tally = kvgate_core::tally::Tally::default(),
            Some(Planted::ForgetsCloses) => image.closes.clear(),
            Some(Planted::ForgetsWindows) => image.windows.clear(),
            Some(Planted::ForgetsSettings) => image.overrides = Default::default(),
            Some(
                Planted::AcksWithoutKeeping
                | Planted::LosesReleases
                | Planted::LosesCloses
                | Planted::LosesAudit,
            )
            | None => {}
        }
        image
    }

    /// What was kept since the last call, in order.
    pub fn take_kept(&mut self) -> Vec<KeptCommit> {
        core::mem::take(&mut self.kept)
    }

    fn keep(&mut self, commit: Commit<'_>) {
        let mut records = commit.records.to_vec();
        if self.planted == Some(Planted::LosesReleases) {
            records.retain(|record| {
                !matches!(record, Record::Ticket(ticket)
                    if matches!(&ticket.stage, Stage::Ended(ended) if ended.how == EndHow::Released))
            });
        }
        if self.planted == Some(Planted::LosesCloses) {
            records.retain(|record| !matches!(record, Record::Close(_)));
        }
        if self.planted == Some(Planted::LosesAudit) {
            records.retain(|record| !matches!(record, Record::Audit(_)));
        }
        let Ok(()) = self.inner.commit(Commit {
            records: &records,
            ..commit
        });
        self.kept.push(KeptCommit {
            term: commit.term,
            seq: commit.seq,
            now: commit.now,
            next_issue: commit.next_issue,
            records,
        });
    }
}

impl Store for FaultyStore {
    type Error = StoreFault;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), StoreFault> {
        if self.dice.one_in(self.odds.fails_unkept) {
            return Err(StoreFault::Failed);
        }
        if self.dice.one_in(self.odds.crashes_unkept) {
            return Err(StoreFault::Crashed);
        }
        if self.planted == Some(Planted::AcksWithoutKeeping) && self.dice.one_in(50) {
            return Ok(());
        }
        self.keep(commit);
        if self.dice.one_in(self.odds.fails_kept) {
            return Err(StoreFault::Failed);
        }
        if self.dice.one_in(self.odds.crashes_kept) {
            return Err(StoreFault::Crashed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(store: &mut FaultyStore, seq: u64) -> Result<(), StoreFault> {
        store.commit(Commit {
            term: Term(1),
            seq: Seq(seq),
            now: Timestamp::from_millis(seq),
            next_issue: 1,
            records: &[],
        })
    }

    /// DUR1: what the log says was kept is what the image shows, whatever the answer was.
    #[test]
    fn the_log_agrees_with_the_image() {
        let odds = FaultOdds {
            fails_unkept: 5,
            fails_kept: 5,
            crashes_unkept: 5,
            crashes_kept: 5,
        };
        let mut store = FaultyStore::new(7, odds, None);
        let mut seen = [0_u32; 3];
        for seq in 1..400 {
            let before = store.image().seq;
            let answer = commit(&mut store, seq);
            let kept = store.take_kept();
            let last = kept.last().map_or(before, |commit| commit.seq);
            assert_eq!(store.image().seq, last);
            match (answer, kept.is_empty()) {
                (Ok(()), empty) => {
                    assert!(!empty, "acknowledged, so kept");
                    seen[0] += 1;
                }
                (Err(_), true) => seen[1] += 1,
                (Err(_), false) => seen[2] += 1,
            }
        }
        assert!(seen.iter().all(|count| *count > 40), "{seen:?}");
    }
}
