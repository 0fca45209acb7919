//! The virtual clock: a point in time that moves only when it is told to, and never back.

use kvgate_core::units::{Span, Timestamp};

/// A clock in the hands of its owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VirtualClock {
    now: Timestamp,
}

impl VirtualClock {
    /// Starts at `start`.
    #[must_use]
    pub const fn new(start: Timestamp) -> Self {
        Self { now: start }
    }

    /// The present.
    #[must_use]
    pub const fn now(&self) -> Timestamp {
        self.now
    }

    /// Moves on by `span` and returns the new present.
    pub const fn advance(&mut self, span: Span) -> Timestamp {
        self.now = self.now.after(span);
        self.now
    }

    /// Moves to `at` when that is later, and returns how far it moved.
    pub const fn advance_to(&mut self, at: Timestamp) -> Span {
        let moved = at.since(self.now);
        self.now = self.now.after(moved);
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_forward_only() {
        let mut clock = VirtualClock::new(Timestamp::from_millis(1_000));
        assert_eq!(
            clock.advance(Span::from_millis(50)),
            Timestamp::from_millis(1_050)
        );
        assert_eq!(
            clock.advance_to(Timestamp::from_millis(1_300)),
            Span::from_millis(250)
        );
        assert_eq!(
            clock.advance_to(Timestamp::from_millis(10)),
            Span::ZERO,
            "time must not go back"
        );
        assert_eq!(clock.now(), Timestamp::from_millis(1_300));
    }
}
