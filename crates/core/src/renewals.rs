//! Renewals that are held in memory, and when they are written (LEA2).
//!
//! Few go together, 4 s after the first of them. Many at once would make a commit that everybody waits
//! for, so these go in parts: what was renewed within 2 s is written over the next 2 s. A sweep takes
//! its rows in the order in which they stand in the store, so that neighbours are written together.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::ids::RowNo;
use crate::policy::{
    RENEWALS_EVERY, RENEWALS_PART_EVERY, RENEWALS_PARTS, RENEWALS_SWEEP_AFTER, RENEWALS_TOGETHER,
};
use crate::units::Timestamp;

/// Leases whose last renewal is not written yet.
#[derive(Clone, Default, Debug)]
pub(crate) struct Renewals {
    gathered: BTreeSet<RowNo>,
    /// When the first of them was renewed.
    since: Timestamp,
    /// Those that are being written.
    sweep: BTreeSet<RowNo>,
    /// How many go at a time.
    part: usize,
    next_part_at: Timestamp,
}

impl Renewals {
    /// A lease was renewed. When its row is about to be written, the new end goes with it.
    pub(crate) fn note(&mut self, row: RowNo, now: Timestamp) {
        if self.sweep.contains(&row) {
            return;
        }
        // A sweep that began so late would be over too late for the first of them.
        let late = now.reached(self.since.after(RENEWALS_SWEEP_AFTER));
        if self.gathered.len() == RENEWALS_TOGETHER && self.sweep.is_empty() && late {
            self.begin_sweep(now);
        }
        if self.gathered.is_empty() {
            self.since = now;
        }
        self.gathered.insert(row);
    }

    /// The row is written with something else.
    pub(crate) fn forget(&mut self, row: RowNo) {
        self.gathered.remove(&row);
        self.sweep.remove(&row);
    }

    /// When some are to be written.
    pub(crate) fn due_at(&self) -> Option<Timestamp> {
        if !self.sweep.is_empty() {
            return Some(self.next_part_at);
        }
        let span = match self.gathered.len() {
            0 => return None,
            1..=RENEWALS_TOGETHER => RENEWALS_EVERY,
            _ => RENEWALS_SWEEP_AFTER,
        };
        Some(self.since.after(span))
    }

    /// Takes those that are to be written now.
    pub(crate) fn take_due(&mut self, now: Timestamp) -> Vec<RowNo> {
        let mut taken = Vec::new();
        while self.due_at().is_some_and(|due| now.reached(due)) {
            if self.sweep.is_empty() {
                self.begin_sweep(now);
            }
            let part = core::iter::from_fn(|| self.sweep.pop_first());
            taken.extend(part.take(self.part));
            self.next_part_at = self.next_part_at.after(RENEWALS_PART_EVERY);
        }
        taken
    }

    fn begin_sweep(&mut self, now: Timestamp) {
        self.sweep = core::mem::take(&mut self.gathered);
        self.next_part_at = now;
        self.part = match self.sweep.len() {
            few @ ..=RENEWALS_TOGETHER => few,
            many => many.div_ceil(RENEWALS_PARTS),
        };
    }

    /// Takes all of them, for the last write of an orderly stop.
    pub(crate) fn take_all(&mut self) -> Vec<RowNo> {
        let mut all = core::mem::take(&mut self.sweep);
        all.append(&mut self.gathered);
        all.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Span;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(1_000_000).after(Span::from_millis(millis))
    }

    /// Takes what is due at each due time, from `now` on: how many were taken when.
    fn parts(renewals: &mut Renewals) -> Vec<(u64, usize)> {
        let mut parts = Vec::new();
        while let Some(due) = renewals.due_at() {
            let taken = renewals.take_due(due);
            parts.push((due.since(at(0)).millis(), taken.len()));
        }
        parts
    }

    fn renew(renewals: &mut Renewals, rows: core::ops::Range<u64>, millis: u64) {
        for row in rows {
            renewals.note(RowNo(row), at(millis));
        }
    }

    /// LEA2: few renewals go together, 4 s after the first of them.
    #[test]
    fn few_renewals_are_written_together() {
        let mut renewals = Renewals::default();
        assert_eq!(renewals.due_at(), None);
        renew(&mut renewals, 0..500, 0);
        renew(&mut renewals, 490..512, 3_000);
        assert!(renewals.take_due(at(3_999)).is_empty());
        assert_eq!(parts(&mut renewals), [(4_000, 512)]);
    }

    /// LEA2: many go in even parts; the last of them, and those that were renewed meanwhile, within 4 s.
    #[test]
    fn many_renewals_are_written_in_parts() {
        let mut renewals = Renewals::default();
        renew(&mut renewals, 0..2_000, 0);
        renew(&mut renewals, 2_000..4_000, 1_900);
        let first = renewals.take_due(at(2_000));
        assert_eq!(first, (0..200).map(RowNo).collect::<Vec<_>>());
        // Written already, to be written, and new.
        renew(&mut renewals, 0..100, 2_000);
        renew(&mut renewals, 3_000..3_100, 2_000);
        renew(&mut renewals, 4_000..5_000, 3_900);
        let parts = parts(&mut renewals);
        let sweep: Vec<(u64, usize)> = (1..20).map(|part| (2_000 + part * 100, 200)).collect();
        assert_eq!(parts[..19], sweep);
        let next: Vec<(u64, usize)> = (0..20).map(|part| (4_000 + part * 100, 55)).collect();
        assert_eq!(parts[19..], next);
    }

    /// LEA2: few that become many late do not wait for the others.
    #[test]
    fn few_that_become_many() {
        let mut renewals = Renewals::default();
        renew(&mut renewals, 0..500, 0);
        assert!(renewals.take_due(at(2_000)).is_empty());
        renew(&mut renewals, 490..1_600, 3_900);
        let parts = parts(&mut renewals);
        assert_eq!(parts[0], (3_900, 512));
        assert_eq!((parts.len(), parts[1]), (21, (5_900, 55)));
        assert_eq!(parts[20], (7_800, 1_088 - 19 * 55));
    }

    /// What is late is made up for; what is written otherwise or ended is not written again.
    #[test]
    fn late_parts_and_rows_that_are_gone() {
        let mut renewals = Renewals::default();
        renew(&mut renewals, 0..1_000, 0);
        renewals.forget(RowNo(0));
        let first = renewals.take_due(at(2_000));
        assert_eq!(first.len(), 50);
        renewals.forget(RowNo(999));
        let late = renewals.take_due(at(2_350));
        assert_eq!(late.len(), 150);
        renew(&mut renewals, 0..1, 2_350);
        let all = renewals.take_all();
        assert_eq!((all.len(), all.first()), (799, Some(&RowNo(0))));
        assert_eq!(renewals.due_at(), None);
    }
}
