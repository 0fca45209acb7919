//! Ordered tables of small entries: indexes that hold a row each for a hundred thousand rows.
//!
//! Entries stand in blocks, and blocks in a line. What comes in order fills each block to the brim,
//! where a B-tree leaves its nodes half empty; most keys here are times and numbers that only grow.
//! An operation is a search in the line, one in a block, and a move of half a block.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Entries of a block: two kilobytes of the usual 16-byte entry.
const BLOCK: usize = 128;

/// A table in the order of its keys.
#[derive(Clone, Debug)]
pub(crate) struct Ordered<K, V = ()> {
    /// None of them is empty.
    blocks: VecDeque<Block<K, V>>,
    len: usize,
}

#[derive(Clone, Debug)]
struct Block<K, V> {
    /// No key of this block is lower, and none of an earlier block is as high.
    from: K,
    entries: Vec<(K, V)>,
}

impl<K, V> Default for Ordered<K, V> {
    fn default() -> Self {
        Self {
            blocks: VecDeque::new(),
            len: 0,
        }
    }
}

impl<K: PartialEq, V: PartialEq> PartialEq for Ordered<K, V> {
    /// Blocks are of no interest.
    fn eq(&self, other: &Self) -> bool {
        let all = self.blocks.iter().flat_map(|block| &block.entries);
        let others = other.blocks.iter().flat_map(|block| &block.entries);
        self.len == other.len && all.eq(others)
    }
}

impl<K: Eq, V: Eq> Eq for Ordered<K, V> {}

impl<K: Ord + Clone, V> Ordered<K, V> {
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of the block in which a key stands or would stand.
    fn block_of(&self, key: &K) -> usize {
        // Most keys are the highest yet.
        match self.blocks.back() {
            Some(last) if last.from <= *key => self.blocks.len().saturating_sub(1),
            _ => self
                .blocks
                .partition_point(|block| block.from <= *key)
                .saturating_sub(1),
        }
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        let block = self.blocks.get(self.block_of(key))?;
        let at = block.find(key).ok()?;
        block.entries.get(at).map(|(_, value)| value)
    }

    pub(crate) fn contains(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    /// Puts an entry in its place; gives back what stood under the key.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let number = self.block_of(&key);
        let is_last = number.saturating_add(1) >= self.blocks.len();
        let Some(block) = self.blocks.get_mut(number) else {
            self.blocks.push_back(Block::of(Vec::new(), key, value));
            self.len = 1;
            return None;
        };
        let at = match block.find(&key) {
            Ok(at) => {
                let (_, old) = block.entries.get_mut(at)?;
                return Some(core::mem::replace(old, value));
            }
            Err(at) => at,
        };
        self.len = self.len.saturating_add(1);
        if block.entries.len() < BLOCK {
            block.insert(at, key, value);
        } else if is_last && at == BLOCK {
            let next = Block::of(Vec::with_capacity(BLOCK), key, value);
            self.blocks.push_back(next);
        } else if let Some(mut upper) = block.split() {
            match at.checked_sub(block.entries.len()) {
                Some(above) if above > 0 => upper.insert(above, key, value),
                _ => block.insert(at, key, value),
            }
            self.blocks.insert(number.saturating_add(1), upper);
        }
        None
    }

    /// Takes an entry out; `None` when it was not there.
    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let number = self.block_of(key);
        let block = self.blocks.get_mut(number)?;
        let at = block.find(key).ok()?;
        let (_, value) = block.entries.remove(at);
        self.len = self.len.saturating_sub(1);
        if block.entries.is_empty() {
            self.blocks.remove(number);
        } else if block.entries.len() < BLOCK / 4 {
            self.join(number.saturating_sub(1));
            self.join(number);
        }
        Some(value)
    }

    /// Makes one block of two that have become small, so that few entries take few blocks.
    fn join(&mut self, number: usize) {
        let next = number.saturating_add(1);
        let len = |number| self.blocks.get(number).map(|block| block.entries.len());
        let (Some(lower), Some(upper)) = (len(number), len(next)) else {
            return;
        };
        if lower.saturating_add(upper) <= BLOCK / 2
            && let Some(mut upper) = self.blocks.remove(next)
            && let Some(lower) = self.blocks.get_mut(number)
        {
            lower.entries.append(&mut upper.entries);
        }
    }

    pub(crate) fn first(&self) -> Option<&(K, V)> {
        self.blocks.front()?.entries.first()
    }

    pub(crate) fn last(&self) -> Option<&(K, V)> {
        self.blocks.back()?.entries.last()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &(K, V)> {
        self.blocks.iter().flat_map(|block| &block.entries)
    }

    /// Entries in order, from the first key at or behind `from`.
    pub(crate) fn from(&self, from: K) -> impl Iterator<Item = &(K, V)> {
        let mut blocks = self.blocks.range(self.block_of(&from)..);
        let first = blocks.next().map_or(&[][..], |block| {
            let at = block.entries.partition_point(|(key, _)| *key < from);
            block.entries.get(at..).unwrap_or_default()
        });
        first
            .iter()
            .chain(blocks.flat_map(|block| block.entries.iter()))
    }
}

impl<K: Ord + Clone, V> Block<K, V> {
    fn of(mut entries: Vec<(K, V)>, key: K, value: V) -> Self {
        let from = key.clone();
        entries.push((key, value));
        Self { from, entries }
    }

    fn find(&self, key: &K) -> Result<usize, usize> {
        self.entries.binary_search_by(|(other, _)| other.cmp(key))
    }

    fn insert(&mut self, at: usize, key: K, value: V) {
        if key < self.from {
            self.from = key.clone();
        }
        self.entries.insert(at, (key, value));
    }

    /// Gives away the upper half.
    fn split(&mut self) -> Option<Self> {
        let entries = self.entries.split_off(BLOCK / 2);
        let from = entries.first()?.0.clone();
        Some(Self { from, entries })
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    /// What the module is for: keys that come in order leave no room unused, and a table that most
    /// entries have left does not keep their blocks.
    #[test]
    fn blocks_are_full_of_what_comes_in_order_and_few_when_little_is_left() {
        let mut table = Ordered::default();
        let keys = 0..12_800;
        for key in keys.clone() {
            table.insert(key, ());
        }
        assert_eq!(table.blocks.len(), 100);
        let (kept, left): (Vec<i32>, Vec<i32>) =
            keys.partition(|key: &i32| key.rem_euclid(128) == 7);
        for key in left {
            assert!(table.remove(&key).is_some());
        }
        assert_eq!(table.len(), kept.len());
        assert!(table.blocks.len() <= 8, "{}", table.blocks.len());
        for key in kept {
            assert!(table.remove(&key).is_some());
        }
        assert_eq!(table.blocks.len(), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// It is an ordered map, whatever comes and goes: in order, from the middle, from either end.
        #[test]
        fn it_agrees_with_a_map(
            steps in proptest::collection::vec((0u32..3, 0u32..700), 0..3_000),
        ) {
            let mut table = Ordered::default();
            let mut plain = BTreeMap::new();
            let mut next = 0_u32;
            for (step, (kind, key)) in steps.into_iter().enumerate() {
                match kind {
                    0 => prop_assert_eq!(table.insert(key, step), plain.insert(key, step)),
                    1 => {
                        next = next.saturating_add(1);
                        prop_assert_eq!(table.insert(next, step), plain.insert(next, step));
                    }
                    _ => prop_assert_eq!(table.remove(&key), plain.remove(&key)),
                }
                prop_assert_eq!(table.len(), plain.len());
                prop_assert_eq!(table.is_empty(), plain.is_empty());
                prop_assert_eq!(table.get(&key), plain.get(&key));
                prop_assert_eq!(table.contains(&key), plain.contains_key(&key));
                prop_assert_eq!(table.first().copied(), plain.first_key_value().map(|(k, v)| (*k, *v)));
                prop_assert_eq!(table.last().copied(), plain.last_key_value().map(|(k, v)| (*k, *v)));
            }
            let all: Vec<(u32, usize)> = plain.iter().map(|(k, v)| (*k, *v)).collect();
            prop_assert_eq!(table.iter().copied().collect::<Vec<_>>(), all);
            for from in (0..720).step_by(9) {
                let rest: Vec<(u32, usize)> = plain.range(from..).map(|(k, v)| (*k, *v)).collect();
                prop_assert_eq!(table.from(from).copied().collect::<Vec<_>>(), rest);
            }
            let mut same = Ordered::default();
            for (key, value) in plain.iter().rev() {
                same.insert(*key, *value);
            }
            prop_assert_eq!(&same, &table);
            same.insert(10_000, 0);
            prop_assert!(same != table);
        }
    }
}
