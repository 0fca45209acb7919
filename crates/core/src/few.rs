//! Small ordered sets.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;

/// A set that mostly has one entry or none, which costs no allocation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[expect(
    clippy::box_collection,
    reason = "most sets have no tree, and should not be as large as one"
)]
pub(crate) enum Few<K> {
    #[default]
    None,
    One(K),
    /// At least two.
    More(Box<BTreeSet<K>>),
}

impl<K: Ord + Copy> Few<K> {
    pub(crate) const fn is_empty(&self) -> bool {
        matches!(self, Self::None)
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = K> {
        let (one, more) = match self {
            Self::None => (None, None),
            Self::One(one) => (Some(*one), None),
            Self::More(more) => (None, Some(more.iter().copied())),
        };
        one.into_iter().chain(more.into_iter().flatten())
    }

    pub(crate) fn last(&self) -> Option<K> {
        self.iter().next_back()
    }

    pub(crate) fn insert(&mut self, key: K) {
        match self {
            Self::None => *self = Self::One(key),
            Self::One(one) if *one == key => {}
            Self::One(one) => *self = Self::More(Box::new(BTreeSet::from([*one, key]))),
            Self::More(more) => drop(more.insert(key)),
        }
    }

    pub(crate) fn remove(&mut self, key: K) {
        match self {
            Self::One(one) if *one == key => *self = Self::None,
            Self::None | Self::One(_) => {}
            Self::More(more) => {
                more.remove(&key);
                if let (1, Some(last)) = (more.len(), more.first()) {
                    *self = Self::One(*last);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// It is an ordered set, and one entry is never kept in a tree.
        #[test]
        fn it_agrees_with_a_set(steps in proptest::collection::vec((any::<bool>(), 0u8..5), 0..200)) {
            let mut few = Few::default();
            let mut plain = BTreeSet::new();
            for (insert, key) in steps {
                if insert {
                    few.insert(key);
                    plain.insert(key);
                } else {
                    few.remove(key);
                    plain.remove(&key);
                }
                prop_assert!(few.iter().eq(plain.iter().copied()));
                prop_assert!(few.iter().rev().eq(plain.iter().rev().copied()));
                prop_assert_eq!(few.last(), plain.last().copied());
                prop_assert_eq!(few.is_empty(), plain.is_empty());
                prop_assert_eq!(matches!(few, Few::More(_)), plain.len() > 1);
            }
        }
    }
}
