//! The only reader of the operating system's clocks (TIM1).

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kvgate_core::units::{Span, Timestamp};

/// kvgate's own time line: wall time at the start of the process plus monotonic time since, never
/// below the last stored time. Jumps of the wall clock have no effect on it.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    base: Timestamp,
    started: Instant,
}

impl Clock {
    /// Starts a line at the present wall time.
    #[must_use]
    pub fn start() -> Self {
        Self {
            base: wall_now(),
            started: Instant::now(),
        }
    }

    /// The same line, moved so far ahead that it does not begin below `stored`.
    #[must_use]
    pub fn not_below(self, stored: Timestamp) -> Self {
        let behind = stored.since(self.now());
        Self {
            base: self.base.after(behind),
            ..self
        }
    }

    /// Now, on the line.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        let elapsed = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.base.after(Span::from_millis(elapsed))
    }

    /// A point of the line as present wall time in milliseconds since the Unix epoch: what is shown.
    #[must_use]
    pub fn wall_millis(&self, at: Timestamp) -> u64 {
        let now = self.now();
        let wall = wall_now();
        let shown = wall.after(at.since(now)).before(now.since(at));
        shown.millis()
    }
}

/// A point in time as text: RFC 3339 in UTC with milliseconds.
#[must_use]
pub fn text(at: Timestamp) -> String {
    format!("{:.3}", instant(at))
}

/// A point in time as a part of a file's name: to the second, without colons.
#[must_use]
pub fn file_stamp(at: Timestamp) -> String {
    format!("{:.0}", instant(at)).replace(':', "-")
}

fn instant(at: Timestamp) -> jiff::Timestamp {
    let millis = i64::try_from(at.millis()).unwrap_or(i64::MAX);
    jiff::Timestamp::from_millisecond(millis).unwrap_or(jiff::Timestamp::MAX)
}

fn wall_now() -> Timestamp {
    let since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Timestamp::from_millis(u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_and_name_files() {
        let at = Timestamp::from_millis(1_796_000_000_123);
        assert_eq!(text(at), "2026-11-30T00:53:20.123Z");
        assert_eq!(file_stamp(at), "2026-11-30T00-53-20Z");
        assert!(text(Timestamp::from_millis(u64::MAX)).starts_with("9999-"));
    }

    /// TIM1: the line never begins below the last stored time, and what is shown follows the wall clock.
    #[test]
    fn tim1_the_line_is_never_below_the_stored_time() {
        let clock = Clock::start();
        let ahead = clock.now().after(Span::from_secs(3_600));
        let moved = clock.not_below(ahead);
        assert!(moved.now() >= ahead);
        assert_eq!(
            clock.not_below(Timestamp::from_millis(5)).base,
            clock.base,
            "a line that is ahead stays"
        );
        let shown = moved.wall_millis(moved.now());
        assert!(shown.abs_diff(wall_now().millis()) < 60_000);
    }
}
