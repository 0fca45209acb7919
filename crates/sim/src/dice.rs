//! Draws of a simulation: one seed, one stream, integers only.

use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::{Rng, SeedableRng};

/// A stream of draws.
#[derive(Clone, Debug)]
pub(crate) struct Dice {
    stream: Pcg64Mcg,
}

impl Dice {
    /// The stream `lane` of `seed`; lanes do not disturb each other.
    pub(crate) fn new(seed: u64, lane: u64) -> Self {
        let mixed = seed
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(lane.wrapping_mul(0xd1b5_4a32_d192_ed03));
        Self {
            stream: Pcg64Mcg::seed_from_u64(mixed),
        }
    }

    /// Any number.
    pub(crate) fn any(&mut self) -> u64 {
        self.stream.next_u64()
    }

    /// From `least` to `most`, both included.
    pub(crate) fn between(&mut self, least: u64, most: u64) -> u64 {
        let width = most.saturating_sub(least).saturating_add(1);
        let drawn = u128::from(self.any()).wrapping_mul(u128::from(width)) >> 64;
        least.saturating_add(u64::try_from(drawn).unwrap_or(0))
    }

    /// True once in `n` draws; never for 0.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        n > 0 && self.between(1, n) == 1
    }

    /// One of them.
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T], otherwise: T) -> T {
        let last = u64::try_from(of.len()).unwrap_or(1).saturating_sub(1);
        let index = usize::try_from(self.between(0, last)).unwrap_or(0);
        of.get(index).copied().unwrap_or(otherwise)
    }
}
