//! Quantities: tokens, parts per million, points in time and spans.
//!
//! They carry no arithmetic operators: every sum saturates or is checked by name, so that no
//! total can wrap (rule TOK2).

/// The largest token count anywhere: 2^53 - 1, the largest integer every JSON reader keeps exact (TOK2).
pub const TOKENS_MAX: u64 = (1 << 53) - 1;

/// A number of KV tokens, 0 to [`TOKENS_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Tokens(u64);

impl Tokens {
    /// No tokens.
    pub const ZERO: Self = Self(0);
    /// The largest count.
    pub const MAX: Self = Self(TOKENS_MAX);

    /// `None` above [`TOKENS_MAX`].
    #[must_use]
    pub const fn new(count: u64) -> Option<Self> {
        if count <= TOKENS_MAX {
            Some(Self(count))
        } else {
            None
        }
    }

    /// The count, brought down to [`TOKENS_MAX`].
    #[must_use]
    pub fn clamped(count: u128) -> Self {
        Self(u64::try_from(count).map_or(TOKENS_MAX, |count| count.min(TOKENS_MAX)))
    }

    /// The count.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The sum, or `None` above [`TOKENS_MAX`].
    #[must_use]
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(sum) => Self::new(sum),
            None => None,
        }
    }

    /// The sum, at most [`TOKENS_MAX`].
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0).min(TOKENS_MAX))
    }

    /// The difference, at least 0.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// floor(self × share).
    #[must_use]
    pub fn share(self, share: Ppm) -> Self {
        let product = u128::from(self.0).saturating_mul(u128::from(share.get()));
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
pub struct Span(u64);

impl Span {
    /// No time.
    pub const ZERO: Self = Self(0);

    /// From milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// From whole seconds.
    #[must_use]
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000))
    }

    /// Milliseconds.
    #[must_use]
    pub const fn millis(self) -> u64 {
        self.0
    }
}

/// A point on kvgate's own time line, in milliseconds since the Unix epoch (TIM1): wall time at
/// the start of the process plus monotonic time since, never below the last stored time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// From milliseconds.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds.
    #[must_use]
    pub const fn millis(self) -> u64 {
        self.0
    }

    /// The point `span` later; the end of time at most.
    #[must_use]
    pub const fn after(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }

    /// The point `span` earlier; the beginning of time at most.
    #[must_use]
    pub const fn before(self, span: Span) -> Self {
        Self(self.0.saturating_sub(span.0))
    }

    /// Time from `earlier` to here; zero when `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }

    /// TIM2: a deadline is reached when now >= deadline.
    #[must_use]
    pub const fn reached(self, deadline: Self) -> bool {
        self.0 >= deadline.0
    }
}
