//! Who is there: open calls of waiting tickets, and grants whose answer is on its way (TIC3, TIC4).
//!
//! None of it is kept. After a start every waiter is away and every lease counts as claimed; a writer
//! that goes on after a failed commit still knows which grants nobody was told.

use crate::ids::RowNo;
use crate::ordered::Ordered;
use crate::units::{Span, Timestamp};

/// How the caller of a row stands to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Presence {
    /// A waiter with open calls.
    Calls(u32),
    /// A waiter whose caller is away; dropped at this time.
    Away(Timestamp),
    /// A grant or a bypass whose answer is being written.
    InFlight,
    /// A grant without a caller; taken back at this time.
    Unclaimed(Timestamp),
    /// A bypass that its caller was not told yet.
    Untold,
}

/// Rows that are not simply claimed or told, with the deadlines of those whose caller is away.
#[derive(Clone, Debug, Default)]
pub(crate) struct Presences {
    rows: Ordered<RowNo, Presence>,
    deadlines: Ordered<(Timestamp, RowNo)>,
}

impl Presences {
    pub(crate) fn get(&self, row: RowNo) -> Option<Presence> {
        self.rows.get(&row).copied()
    }

    pub(crate) fn set(&mut self, row: RowNo, presence: Presence) {
        self.clear(row);
        if let Presence::Away(until) | Presence::Unclaimed(until) = presence {
            self.deadlines.insert((until, row), ());
        }
        self.rows.insert(row, presence);
    }

    /// Forgets the row; true when it stood here.
    pub(crate) fn clear(&mut self, row: RowNo) -> Option<Presence> {
        let old = self.rows.remove(&row)?;
        if let Presence::Away(until) | Presence::Unclaimed(until) = old {
            self.deadlines.remove(&(until, row));
        }
        Some(old)
    }

    /// One more open call of a waiter.
    pub(crate) fn enter(&mut self, row: RowNo) {
        let calls = match self.get(row) {
            Some(Presence::Calls(calls)) => calls.saturating_add(1),
            _ => 1,
        };
        self.set(row, Presence::Calls(calls));
    }

    /// One open call less; the last one leaves the row to the grace.
    pub(crate) fn leave(&mut self, row: RowNo, now: Timestamp, grace: Span) {
        if let Some(Presence::Calls(calls)) = self.get(row) {
            let left = calls.saturating_sub(1);
            self.set(
                row,
                if left == 0 {
                    Presence::Away(now.after(grace))
                } else {
                    Presence::Calls(left)
                },
            );
        }
    }

    /// Grants that were not claimed yet.
    pub(crate) fn unclaimed(&self) -> impl Iterator<Item = RowNo> {
        self.rows
            .iter()
            .filter(|(_, presence)| matches!(presence, Presence::InFlight | Presence::Unclaimed(_)))
            .map(|(row, _)| *row)
    }

    /// The next row whose caller was away too long.
    pub(crate) fn first_deadline(&self) -> Option<(Timestamp, RowNo)> {
        self.deadlines.first().map(|(deadline, ())| *deadline)
    }
}
