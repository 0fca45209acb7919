//! Renewals on their way into the store (LEA2).
//!
//! A renewal is answered from memory. What was renewed is gathered for a while and then written in a
//! round, a share with each turn: tens of thousands of rows in one transaction would hold up every
//! caller. Rows go in their own order, in which neighbours share a page of the store.

use alloc::vec::Vec;

use crate::ids::RowNo;
use crate::ordered::Ordered;
use crate::policy::{RENEWALS_EVERY, RENEWALS_PACE, RENEWALS_SHARE_MIN, RENEWALS_TURNS};
use crate::units::Timestamp;

/// Leases that were renewed since they were last written.
#[derive(Clone, Debug, Default)]
pub(crate) struct Renewals {
    gathered: Ordered<RowNo>,
    /// When the first of them came.
    since: Option<Timestamp>,
    /// What is left of the round under way.
    round: Ordered<RowNo>,
    /// Rows of it that go with one turn.
    share: usize,
    /// When the next of them go.
    next_share: Timestamp,
}

impl Renewals {
    /// A lease was renewed. One that is still to be written in this round is written as it stands then.
    pub(crate) fn note(&mut self, row: RowNo, now: Timestamp) {
        if self.round.contains(&row) {
            return;
        }
        self.gathered.insert(row, ());
        self.since.get_or_insert(now);
    }

    /// The row is written for another reason.
    pub(crate) fn forget(&mut self, row: RowNo) {
        self.round.remove(&row);
        if self.gathered.remove(&row).is_some() && self.gathered.is_empty() {
            self.since = None;
        }
    }

    /// When rows are to be written, if there are any.
    pub(crate) fn due_at(&self) -> Option<Timestamp> {
        let gathered = self.since.map(|since| since.after(RENEWALS_EVERY));
        let round = (!self.round.is_empty()).then_some(self.next_share);
        gathered.into_iter().chain(round).min()
    }

    /// Rows that are to be written now; all of them at the end.
    pub(crate) fn take(&mut self, now: Timestamp, last: bool) -> Vec<RowNo> {
        let is_due = |since: Timestamp| last || now.reached(since.after(RENEWALS_EVERY));
        if self.since.is_some_and(is_due) {
            self.since = None;
            let gathered = core::mem::take(&mut self.gathered);
            if self.round.is_empty() {
                self.round = gathered;
            } else {
                for (row, ()) in gathered.iter() {
                    self.round.insert(*row, ());
                }
            }
            let share = self.round.len().div_ceil(RENEWALS_TURNS);
            self.share = share.max(RENEWALS_SHARE_MIN);
            self.next_share = now;
        }
        if self.round.is_empty() || !(last || now.reached(self.next_share)) {
            return Vec::new();
        }
        self.next_share = now.after(RENEWALS_PACE);
        let share = if last { usize::MAX } else { self.share };
        let rows: Vec<RowNo> = self
            .round
            .iter()
            .map(|(row, ())| *row)
            .take(share)
            .collect();
        for row in &rows {
            self.round.remove(row);
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Span;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    /// LEA2: 60,000 renewals go in shares with time between them, each row once and within 5 s; one
    /// that comes again before its share went goes with it.
    #[test]
    fn lea2_many_renewals_go_in_shares() {
        let mut renewals = Renewals::default();
        let first = at(1_000);
        for row in 0..60_000 {
            renewals.note(RowNo(row), first);
        }
        let begin = first.after(RENEWALS_EVERY);
        assert!(
            renewals
                .take(begin.before(Span::from_millis(1)), false)
                .is_empty()
        );
        let mut written: Vec<RowNo> = Vec::new();
        let mut now = begin;
        while let Some(due) = renewals.due_at() {
            assert!(
                renewals
                    .take(due.before(Span::from_millis(1)), false)
                    .is_empty()
            );
            now = due;
            let share = renewals.take(now, false);
            assert!((1..=1_024).contains(&share.len()), "{}", share.len());
            written.extend(share);
            if written.len() < 50_000 {
                renewals.note(RowNo(59_999), now);
                renewals.forget(RowNo(59_998));
            }
        }
        assert!(now.since(first) < Span::from_secs(5), "{now:?}");
        assert!(
            written
                .iter()
                .copied()
                .eq((0..60_000).filter(|row| *row != 59_998).map(RowNo))
        );
    }

    /// LEA2: however many there are, a round ends in time; and an orderly stop writes all of them.
    #[test]
    fn lea2_a_round_ends_in_time() {
        let mut renewals = Renewals::default();
        for row in 0..300_000 {
            renewals.note(RowNo(row), at(0));
        }
        let mut left = 300_000_usize;
        let mut now = at(0);
        while left > 100_000 {
            now = renewals.due_at().unwrap();
            left = left.saturating_sub(renewals.take(now, false).len());
        }
        renewals.note(RowNo(1), now);
        assert_eq!(renewals.take(now, true).len(), left.saturating_add(1));
        assert_eq!(renewals.due_at(), None);
        for row in 0..300_000 {
            renewals.note(RowNo(row), at(0));
        }
        while let Some(due) = renewals.due_at() {
            now = due;
            renewals.take(now, false);
        }
        assert!(now < at(5_000), "{now:?}");
    }
}
