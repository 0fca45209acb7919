//! The one FIFO: order of arrival, and how much stands before a place.
//!
//! Places are row numbers, which only grow. Beside them stands a tower of sums: level k holds one
//! entry for each block of 64^k row numbers that has a waiter. To answer "how many, and how many
//! tokens, stand before me" at most 63 entries of each level are added, and the tower is only as
//! high as the span between head and tail asks for. So every operation is O(log n), in the middle
//! of the line too, and nothing is ever rebuilt.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::ids::RowNo;
use crate::ordered::Ordered;
use crate::units::Tokens;

/// log2 of the fan-out of the tower.
const BLOCK_BITS: u32 = 6;

/// Waiters and their tokens; the tokens of a hundred thousand waiters can exceed 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Sum {
    count: u64,
    tokens: u128,
}

impl Sum {
    fn add(&mut self, other: Self) {
        self.count = self.count.saturating_add(other.count);
        self.tokens = self.tokens.saturating_add(other.tokens);
    }

    fn subtract(&mut self, other: Self) {
        self.count = self.count.saturating_sub(other.count);
        self.tokens = self.tokens.saturating_sub(other.tokens);
    }
}

/// The line of waiters.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Queue {
    places: Ordered<RowNo, Tokens>,
    /// `tower[k]` sums blocks of 64^(k+1) places, by block number. The top level has one block.
    tower: Vec<BTreeMap<u64, Sum>>,
    total: Sum,
}

/// Block number of a place at a level of the tower.
fn block(row: RowNo, level: usize) -> u64 {
    let shift = u32::try_from(level)
        .unwrap_or(u32::MAX)
        .saturating_add(1)
        .saturating_mul(BLOCK_BITS);
    row.0.checked_shr(shift).unwrap_or(0)
}

impl Queue {
    pub(crate) fn len(&self) -> u64 {
        self.total.count
    }

    /// Tokens of all waiters together.
    pub(crate) fn tokens(&self) -> u128 {
        self.total.tokens
    }

    pub(crate) fn head(&self) -> Option<RowNo> {
        self.places.first().map(|(row, _)| *row)
    }

    /// Puts a waiter in line. A place that is taken already keeps its waiter.
    pub(crate) fn insert(&mut self, row: RowNo, tokens: Tokens) {
        if self.places.contains(&row) {
            return;
        }
        let sum = Sum {
            count: 1,
            tokens: u128::from(tokens.get()),
        };
        self.places.insert(row, tokens);
        self.total.add(sum);
        for (level, blocks) in self.tower.iter_mut().enumerate() {
            blocks.entry(block(row, level)).or_default().add(sum);
        }
        self.raise_tower();
    }

    /// Takes a waiter out of line, wherever it stands. False when it was not there.
    pub(crate) fn remove(&mut self, row: RowNo) -> bool {
        let Some(tokens) = self.places.remove(&row) else {
            return false;
        };
        let sum = Sum {
            count: 1,
            tokens: u128::from(tokens.get()),
        };
        self.total.subtract(sum);
        for (level, blocks) in self.tower.iter_mut().enumerate() {
            let number = block(row, level);
            if let Some(entry) = blocks.get_mut(&number) {
                entry.subtract(sum);
                if entry.count == 0 {
                    blocks.remove(&number);
                }
            }
        }
        if self.places.is_empty() {
            self.tower.clear();
        }
        true
    }

    /// Waiters and tokens before `row`; `None` when it does not wait.
    pub(crate) fn ahead(&self, row: RowNo) -> Option<(u64, u128)> {
        if !self.places.contains(&row) {
            return None;
        }
        let mut sum = Sum::default();
        let from = RowNo(block_start(row.0));
        let before = self.places.from(from).take_while(|(other, _)| *other < row);
        for (_, tokens) in before {
            sum.add(Sum {
                count: 1,
                tokens: u128::from(tokens.get()),
            });
        }
        for (level, blocks) in self.tower.iter().enumerate() {
            let number = block(row, level);
            for entry in blocks.range(block_start(number)..number) {
                sum.add(*entry.1);
            }
        }
        Some((sum.count, sum.tokens))
    }

    /// Waiters in order, from the first place at or behind `from`.
    pub(crate) fn from(&self, from: RowNo) -> impl Iterator<Item = RowNo> {
        self.places.from(from).map(|(row, _)| *row)
    }

    /// Adds levels until the top one has a single block.
    fn raise_tower(&mut self) {
        let (Some((head, _)), Some((tail, _))) = (self.places.first(), self.places.last()) else {
            return;
        };
        let (head, tail) = (*head, *tail);
        loop {
            let level = self.tower.len();
            // The level below the new one: places themselves, or the present top.
            let one_block_below = match level.checked_sub(1) {
                None => head == tail,
                Some(top) => block(head, top) == block(tail, top),
            };
            if one_block_below {
                return;
            }
            let mut blocks: BTreeMap<u64, Sum> = BTreeMap::new();
            match self.tower.last() {
                None => {
                    for (row, tokens) in self.places.iter() {
                        blocks.entry(block(*row, level)).or_default().add(Sum {
                            count: 1,
                            tokens: u128::from(tokens.get()),
                        });
                    }
                }
                Some(top) => {
                    for (number, sum) in top {
                        blocks
                            .entry(number.checked_shr(BLOCK_BITS).unwrap_or(0))
                            .or_default()
                            .add(*sum);
                    }
                }
            }
            self.tower.push(blocks);
        }
    }
}

/// First number of the block of 64 that `number` lies in.
fn block_start(number: u64) -> u64 {
    number & !((1 << BLOCK_BITS) - 1)
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    /// One waiter needs no tower, and a line of n places one level for each factor of 64: that is
    /// what keeps every operation O(log n).
    #[test]
    fn the_tower_is_no_higher_than_the_line_asks_for() {
        let heights = [(1, 0), (2, 1), (64, 1), (65, 2), (4_096, 2), (4_097, 3)];
        for (waiters, height) in heights {
            let mut queue = Queue::default();
            for row in 0..waiters {
                queue.insert(RowNo(row), Tokens::ZERO);
            }
            assert_eq!(queue.tower.len(), height, "{waiters}");
            for row in 0..waiters {
                queue.remove(RowNo(row));
            }
            assert_eq!(queue, Queue::default(), "nothing is left of it");
        }
    }

    proptest! {
        /// Position and tokens ahead agree with counting, whatever came and went, near and far apart.
        #[test]
        fn ahead_agrees_with_counting(
            steps in proptest::collection::vec((0u64..5_000, any::<bool>(), 0u64..=crate::units::TOKENS_MAX), 1..200),
            stretch in prop_oneof![Just(1u64), Just(97), Just(1 << 20), Just(1 << 50)],
        ) {
            let mut queue = Queue::default();
            let mut plain: Vec<(RowNo, Tokens)> = Vec::new();
            for (number, insert, tokens) in steps {
                let row = RowNo(number.saturating_mul(stretch));
                if insert {
                    if plain.iter().all(|(other, _)| *other != row) {
                        plain.push((row, Tokens::new(tokens).unwrap()));
                        plain.sort();
                    }
                    queue.insert(row, Tokens::new(tokens).unwrap());
                } else {
                    let before = plain.len();
                    plain.retain(|(other, _)| *other != row);
                    prop_assert_eq!(queue.remove(row), plain.len() < before);
                }
                prop_assert_eq!(queue.len(), u64::try_from(plain.len()).unwrap());
                prop_assert_eq!(queue.head(), plain.first().map(|(row, _)| *row));
                let mut sum = 0u128;
                for (count, (row, tokens)) in (0u64..).zip(&plain) {
                    prop_assert_eq!(queue.ahead(*row), Some((count, sum)));
                    sum = sum.saturating_add(u128::from(tokens.get()));
                }
                prop_assert_eq!(queue.tokens(), sum);
                prop_assert_eq!(queue.ahead(RowNo(u64::MAX)), None);
                prop_assert_eq!(queue.from(RowNo(0)).collect::<Vec<_>>(), plain.iter().map(|p| p.0).collect::<Vec<_>>());
            }
        }
    }
}
