//! Rows in memory: each stands once, in a place of its own, and is found by keys that it carries.

use alloc::vec::Vec;
use core::fmt;
use core::hash::{BuildHasher, Hash};

use foldhash::fast::FixedState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

/// Rows of one chunk.
const CHUNK: usize = 256;

/// Where a row stands, until it is taken out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place(u32);

impl Place {
    fn chunk(self) -> usize {
        self.number().checked_div(CHUNK).unwrap_or(usize::MAX)
    }

    fn within(self) -> usize {
        self.number().checked_rem(CHUNK).unwrap_or(usize::MAX)
    }

    fn number(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }
}

/// Rows in chunks: room for more moves none of them, which would be a pause and leave a hole in the heap.
#[derive(Clone, Debug)]
pub(crate) struct Arena<T> {
    chunks: Vec<Vec<Option<T>>>,
    /// The first place that was never taken.
    next: u32,
    /// Places that were left.
    free: Vec<Place>,
}

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Self {
            chunks: Vec::new(),
            next: 0,
            free: Vec::new(),
        }
    }
}

impl<T> Arena<T> {
    pub(crate) fn get(&self, place: Place) -> Option<&T> {
        let chunk = self.chunks.get(place.chunk())?;
        chunk.get(place.within())?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, place: Place) -> Option<&mut T> {
        let chunk = self.chunks.get_mut(place.chunk())?;
        chunk.get_mut(place.within())?.as_mut()
    }

    pub(crate) fn insert(&mut self, row: T) -> Place {
        if let Some(place) = self.free.pop() {
            let chunk = self.chunks.get_mut(place.chunk());
            if let Some(slot) = chunk.and_then(|chunk| chunk.get_mut(place.within())) {
                *slot = Some(row);
            }
            return place;
        }
        let place = Place(self.next);
        self.next = self.next.saturating_add(1);
        match self.chunks.get_mut(place.chunk()) {
            Some(chunk) => chunk.push(Some(row)),
            None => {
                let mut chunk = Vec::with_capacity(CHUNK);
                chunk.push(Some(row));
                self.chunks.push(chunk);
            }
        }
        place
    }

    pub(crate) fn remove(&mut self, place: Place) -> Option<T> {
        let chunk = self.chunks.get_mut(place.chunk())?;
        let row = chunk.get_mut(place.within())?.take()?;
        self.free.push(place);
        Some(row)
    }

    /// Rows by place, which says nothing.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten().flatten()
    }
}

/// Finds rows of an arena by a key that stands in the rows themselves.
pub(crate) struct Index<T, K> {
    places: HashTable<Place>,
    hash: FixedState,
    key: fn(&T) -> &K,
}

impl<T, K> Clone for Index<T, K> {
    fn clone(&self) -> Self {
        Self {
            places: self.places.clone(),
            hash: self.hash.clone(),
            key: self.key,
        }
    }
}

impl<T, K> fmt::Debug for Index<T, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Index").field(&self.places.len()).finish()
    }
}

impl<T, K: Eq + Hash> Index<T, K> {
    /// `seed` spreads the table, so that chosen keys cannot pile up in one bucket.
    pub(crate) fn new(seed: u64, key: fn(&T) -> &K) -> Self {
        Self {
            places: HashTable::new(),
            hash: FixedState::with_seed(seed),
            key,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// Where the row with this key stands.
    pub(crate) fn find(&self, rows: &Arena<T>, key: &K) -> Option<Place> {
        let has_key = |place: &Place| rows.get(*place).is_some_and(|row| (self.key)(row) == key);
        self.places.find(self.hash.hash_one(key), has_key).copied()
    }

    /// From here on the key of this row leads to it, and not to another row with the same key.
    pub(crate) fn put(&mut self, rows: &Arena<T>, place: Place) {
        let (key_of, hash) = (self.key, &self.hash);
        let Some(key) = rows.get(place).map(key_of) else {
            return;
        };
        let has_key = |place: &Place| rows.get(*place).is_some_and(|row| key_of(row) == key);
        let rehash = |place: &Place| {
            let row = rows.get(*place);
            row.map_or(0, |row| hash.hash_one(key_of(row)))
        };
        match self.places.entry(hash.hash_one(key), has_key, rehash) {
            Entry::Occupied(mut entry) => *entry.get_mut() = place,
            Entry::Vacant(entry) => drop(entry.insert(place)),
        }
    }

    /// The row with this key is about to leave its place. A key that leads to another row stays.
    pub(crate) fn remove(&mut self, key: &K, place: Place) {
        let hash = self.hash.hash_one(key);
        if let Ok(entry) = self.places.find_entry(hash, |other| *other == place) {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeMap;
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// An arena with an index is a map whose rows keep their places; a place that was left is
        /// taken again, so that what came and went takes no room.
        #[test]
        fn an_arena_with_an_index_is_a_map(
            steps in proptest::collection::vec((any::<bool>(), 0u32..400), 0..2_000),
        ) {
            let mut rows: Arena<(u32, usize)> = Arena::default();
            let mut index = Index::new(7, |row: &(u32, usize)| &row.0);
            let mut plain: BTreeMap<u32, usize> = BTreeMap::new();
            let mut most = 0;
            for (step, (put, key)) in steps.into_iter().enumerate() {
                let place = index.find(&rows, &key);
                prop_assert_eq!(place.and_then(|place| rows.get(place)).map(|row| row.1), plain.get(&key).copied());
                match place {
                    Some(place) if put => rows.get_mut(place).unwrap().1 = step,
                    Some(place) => {
                        index.remove(&key, place);
                        prop_assert_eq!(rows.remove(place).map(|row| row.1), plain.get(&key).copied());
                        prop_assert!(rows.remove(place).is_none() && rows.get(place).is_none());
                    }
                    None if put => {
                        let place = rows.insert((key, step));
                        index.put(&rows, place);
                    }
                    None => {}
                }
                if put {
                    plain.insert(key, step);
                } else {
                    plain.remove(&key);
                }
                most = most.max(plain.len());
                prop_assert_eq!(index.len(), plain.len());
            }
            let mut all: Vec<(u32, usize)> = rows.iter().copied().collect();
            all.sort_unstable();
            prop_assert_eq!(all, plain.into_iter().collect::<Vec<_>>());
            prop_assert!(rows.chunks.len() <= most.div_ceil(CHUNK));
        }
    }

    /// Of two rows with one key the one that was put last is found, and the other one's end changes
    /// nothing.
    #[test]
    fn the_last_of_two_rows_with_one_key_is_found() {
        let mut rows = Arena::default();
        let mut index = Index::new(7, |row: &(u32, &str)| &row.0);
        let former = rows.insert((1, "former"));
        index.put(&rows, former);
        let later = rows.insert((1, "later"));
        index.put(&rows, later);
        assert_eq!(index.find(&rows, &1), Some(later));
        index.remove(&1, former);
        assert_eq!(index.find(&rows, &1), Some(later));
        index.remove(&1, later);
        assert_eq!((index.find(&rows, &1), index.len()), (None, 0));
    }
}
