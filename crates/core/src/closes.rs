//! The book of close intents (CLO2): those that are open, and finished ones for a while.

use alloc::collections::{BTreeMap, BTreeSet};

use crate::close::{CloseIntent, CloseStage};
use crate::ids::{CloseId, CloseNo};
use crate::policy::{CLOSES_FOR, CLOSES_MAX};
use crate::units::Timestamp;

/// All close intents that are remembered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Closes {
    rows: BTreeMap<CloseNo, CloseIntent>,
    /// Those that are done, in the order in which they are forgotten.
    finished: BTreeSet<(Timestamp, CloseNo)>,
    /// How many of those failed.
    failed: u64,
    next: u64,
}

impl Closes {
    pub(crate) const fn new() -> Self {
        Self {
            rows: BTreeMap::new(),
            finished: BTreeSet::new(),
            failed: 0,
            next: 1,
        }
    }

    /// Number of the next intent.
    pub(crate) const fn next(&self) -> CloseNo {
        CloseNo(self.next)
    }

    pub(crate) fn put(&mut self, close: CloseIntent) {
        let number = close.id.number;
        self.take(number);
        self.next = self.next.max(number.0.saturating_add(1));
        if let CloseStage::Done { at } = close.stage {
            self.finished.insert((at, number));
            if close.has_failed() {
                self.failed = self.failed.saturating_add(1);
            }
        }
        self.rows.insert(number, close);
    }

    pub(crate) fn take(&mut self, number: CloseNo) -> Option<CloseIntent> {
        let close = self.rows.remove(&number)?;
        if let CloseStage::Done { at } = close.stage {
            self.finished.remove(&(at, number));
            if close.has_failed() {
                self.failed = self.failed.saturating_sub(1);
            }
        }
        Some(close)
    }

    pub(crate) fn get(&self, number: CloseNo) -> Option<&CloseIntent> {
        self.rows.get(&number)
    }

    /// The intent with this very id.
    pub(crate) fn find(&self, id: CloseId) -> Option<&CloseIntent> {
        self.rows.get(&id.number).filter(|close| close.id == id)
    }

    /// By number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &CloseIntent> {
        self.rows.values()
    }

    /// Newest first, from a number on.
    pub(crate) fn newest_from(&self, highest: CloseNo) -> impl Iterator<Item = &CloseIntent> {
        self.rows.range(..=highest).rev().map(|(_, close)| close)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// All that are remembered.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Intents that are not done.
    pub(crate) fn open(&self) -> usize {
        self.rows.len().saturating_sub(self.finished.len())
    }

    /// Finished ones that are remembered and failed.
    pub(crate) const fn failed(&self) -> u64 {
        self.failed
    }

    /// The oldest finished one, when it is too old or there is one too many (section 9).
    pub(crate) fn too_old(&self, now: Timestamp) -> Option<CloseNo> {
        let (at, number) = self.finished.first()?;
        (self.finished.len() > CLOSES_MAX || now.reached(at.after(CLOSES_FOR))).then_some(*number)
    }

    /// When the next finished one is forgotten by age.
    pub(crate) fn forget_at(&self) -> Option<Timestamp> {
        self.finished.first().map(|(at, _)| at.after(CLOSES_FOR))
    }
}
