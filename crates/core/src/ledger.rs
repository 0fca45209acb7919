//! The token ledger: what is reserved, by whom, until when.

use alloc::collections::{BTreeMap, BTreeSet};

use crate::ids::{Issue, RowNo};
use crate::units::{Timestamp, Tokens};

/// Held leases in the order of their grants, their ends in order, and the reserved total.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Ledger {
    held: BTreeMap<Issue, Entry>,
    ends: BTreeSet<(Timestamp, Issue)>,
    reserved: u128,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    row: RowNo,
    tokens: Tokens,
    ends_at: Timestamp,
}

impl Ledger {
    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    /// Sum of the held leases. A sum of grants under a ceiling never exceeds the largest count;
    /// one that was loaded from a store is shown at that bound.
    pub(crate) fn reserved(&self) -> Tokens {
        Tokens::clamped(self.reserved)
    }

    pub(crate) fn row(&self, issue: Issue) -> Option<RowNo> {
        self.held.get(&issue).map(|entry| entry.row)
    }

    pub(crate) fn oldest(&self) -> Option<RowNo> {
        self.held.first_key_value().map(|(_, entry)| entry.row)
    }

    /// Next end of a lease.
    pub(crate) fn first_end(&self) -> Option<(Timestamp, Issue)> {
        self.ends.first().copied()
    }

    pub(crate) fn charge(&mut self, issue: Issue, row: RowNo, tokens: Tokens, ends_at: Timestamp) {
        self.settle(issue);
        self.held.insert(
            issue,
            Entry {
                row,
                tokens,
                ends_at,
            },
        );
        self.ends.insert((ends_at, issue));
        self.reserved = self.reserved.saturating_add(u128::from(tokens.get()));
    }

    /// Gives back what `issue` holds; nothing when it holds nothing, so that no release counts twice.
    pub(crate) fn settle(&mut self, issue: Issue) {
        if let Some(entry) = self.held.remove(&issue) {
            self.ends.remove(&(entry.ends_at, issue));
            self.reserved = self.reserved.saturating_sub(u128::from(entry.tokens.get()));
        }
    }

    /// Leases in the order of their grants, from `from` on.
    pub(crate) fn from(&self, from: Issue) -> impl Iterator<Item = (Issue, RowNo)> {
        self.held
            .range(from..)
            .map(|(issue, entry)| (*issue, entry.row))
    }
}
