//! Quantities: tokens, parts per million, points in time and spans.
//!
//! They carry no arithmetic operators: every sum saturates or is checked by name, so that no
//! total can wrap (rule TOK2).

use core::fmt;
use core::num::NonZeroU64;

/// A number up to 2^64 - 2, kept as one more: an `Option` of it takes no room of its own, and rows that
/// are held a hundred thousand times are full of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Count(NonZeroU64);

impl Count {
    const ZERO: Self = Self(NonZeroU64::MIN);

    /// The largest number stands for what is beyond it.
    const fn new(number: u64) -> Self {
        match NonZeroU64::new(number.saturating_add(1)) {
            Some(one_more) => Self(one_more),
            None => Self::ZERO,
        }
    }

    const fn get(self) -> u64 {
        self.0.get().saturating_sub(1)
    }
}

impl Default for Count {
    fn default() -> Self {
        Self::ZERO
    }
}

impl fmt::Debug for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.get(), f)
    }
}

/// The largest token count anywhere: 2^53 - 1, the largest integer every JSON reader keeps exact (TOK2).
pub const TOKENS_MAX: u64 = (1 << 53) - 1;

/// A number of KV tokens, 0 to [`TOKENS_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Tokens(Count);

impl Tokens {
    /// No tokens.
    pub const ZERO: Self = Self(Count::ZERO);
    /// The largest count.
    pub const MAX: Self = Self(Count::new(TOKENS_MAX));

    /// `None` above [`TOKENS_MAX`].
    #[must_use]
    pub const fn new(count: u64) -> Option<Self> {
        if count <= TOKENS_MAX {
            Some(Self(Count::new(count)))
        } else {
            None
        }
    }

    /// The count, brought down to [`TOKENS_MAX`].
    #[must_use]
    pub fn clamped(count: u128) -> Self {
        let count = u64::try_from(count).map_or(TOKENS_MAX, |count| count.min(TOKENS_MAX));
        Self(Count::new(count))
    }

    /// The count.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// The sum, or `None` above [`TOKENS_MAX`].
    #[must_use]
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.get().checked_add(other.get()) {
            Some(sum) => Self::new(sum),
            None => None,
        }
    }

    /// The sum, at most [`TOKENS_MAX`].
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self(Count::new(
            self.get().saturating_add(other.get()).min(TOKENS_MAX),
        ))
    }

    /// The difference, at least 0.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(Count::new(self.get().saturating_sub(other.get())))
    }

    /// floor(self × share).
    #[must_use]
    pub fn share(self, share: Ppm) -> Self {
        let product = u128::from(self.get()).saturating_mul(u128::from(share.get()));
        Self::clamped(product.checked_div(u128::from(PPM_ONE)).unwrap_or(0))
    }
}

const PPM_ONE: u32 = 1_000_000;

/// A ratio in parts per million, 0 to 1,000,000. Floats end where gauges are read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Ppm(u32);

impl Ppm {
    /// The whole.
    pub const ONE: Self = Self(PPM_ONE);
    /// A tenth: what one reading round may admit while paced (CAP6).
    pub const TENTH: Self = Self(100_000);

    /// `None` above one.
    #[must_use]
    pub const fn new(millionths: u32) -> Option<Self> {
        if millionths <= PPM_ONE {
            Some(Self(millionths))
        } else {
            None
        }
    }

    /// Brought down to one (CAP2: usage above 1 is clamped).
    #[must_use]
    pub const fn clamped(millionths: u32) -> Self {
        if millionths <= PPM_ONE {
            Self(millionths)
        } else {
            Self::ONE
        }
    }

    /// Millionths.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// A length of time in milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Span(Count);

impl Span {
    /// No time.
    pub const ZERO: Self = Self(Count::ZERO);

    /// From milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(Count::new(millis))
    }

    /// From whole seconds.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self::from_millis(secs.saturating_mul(1_000))
    }

    /// Milliseconds.
    #[must_use]
    pub const fn millis(self) -> u64 {
        self.0.get()
    }
}

/// A point on kvgate's own time line, in milliseconds since the Unix epoch (TIM1): wall time at
/// the start of the process plus monotonic time since, never below the last stored time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Timestamp(Count);

impl Timestamp {
    /// From milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(Count::new(millis))
    }

    /// Milliseconds.
    #[must_use]
    pub const fn millis(self) -> u64 {
        self.0.get()
    }

    /// The point `span` later; the end of time at most.
    #[must_use]
    pub const fn after(self, span: Span) -> Self {
        Self::from_millis(self.millis().saturating_add(span.millis()))
    }

    /// The point `span` earlier; the beginning of time at most.
    #[must_use]
    pub const fn before(self, span: Span) -> Self {
        Self::from_millis(self.millis().saturating_sub(span.millis()))
    }

    /// Time from `earlier` to here; zero when `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Span {
        Span::from_millis(self.millis().saturating_sub(earlier.millis()))
    }

    /// TIM2: a deadline is reached when now >= deadline.
    #[must_use]
    pub const fn reached(self, deadline: Self) -> bool {
        self.millis() >= deadline.millis()
    }
}
