//! The token ledger: what is reserved, by whom, until when.

use crate::ids::{Issue, RowNo};
use crate::ordered::Ordered;
use crate::units::{Timestamp, Tokens};

/// Held leases in the order of their grants, their ends in order, and the reserved total.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Ledger {
    held: Ordered<Issue, RowNo>,
    ends: Ordered<(Timestamp, Issue)>,
    reserved: u128,
}

impl Ledger {
    pub(crate) const fn len(&self) -> usize {
        self.held.len()
    }

    /// Sum of the held leases. A sum of grants under a ceiling never exceeds the largest count;
    /// one that was loaded from a store is shown at that bound.
    pub(crate) fn reserved(&self) -> Tokens {
        Tokens::clamped(self.reserved)
    }

    pub(crate) fn row(&self, issue: Issue) -> Option<RowNo> {
        self.held.get(&issue).copied()
    }

    pub(crate) fn oldest(&self) -> Option<RowNo> {
        self.held.first().map(|(_, row)| *row)
    }

    /// Next end of a lease.
    pub(crate) fn first_end(&self) -> Option<(Timestamp, Issue)> {
        self.ends.first().map(|(end, ())| *end)
    }

    /// Charges what a row holds; nothing when it is charged already, so that no grant counts twice.
    pub(crate) fn charge(&mut self, issue: Issue, row: RowNo, tokens: Tokens, ends_at: Timestamp) {
        if self.held.contains(&issue) {
            return;
        }
        self.held.insert(issue, row);
        self.ends.insert((ends_at, issue), ());
        self.reserved = self.reserved.saturating_add(u128::from(tokens.get()));
    }

    /// Gives back what was charged for a row; nothing when it holds nothing, so that no release counts
    /// twice.
    pub(crate) fn settle(&mut self, issue: Issue, row: RowNo, tokens: Tokens, ends_at: Timestamp) {
        if self.row(issue) != Some(row) {
            return;
        }
        self.held.remove(&issue);
        self.ends.remove(&(ends_at, issue));
        self.reserved = self.reserved.saturating_sub(u128::from(tokens.get()));
    }

    /// What is held lasts longer, or shorter.
    pub(crate) fn renew(&mut self, issue: Issue, ended_at: Timestamp, ends_at: Timestamp) {
        if self.ends.remove(&(ended_at, issue)).is_some() {
            self.ends.insert((ends_at, issue), ());
        }
    }

    /// Leases in the order of their grants, from `from` on.
    pub(crate) fn from(&self, from: Issue) -> impl Iterator<Item = (Issue, RowNo)> {
        self.held.from(from).copied()
    }
}
