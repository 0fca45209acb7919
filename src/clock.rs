//! The only reader of the operating system's clocks (TIM1).

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvgate_core::units::Timestamp;

/// Half a millisecond, for rounding.
const HALF: Duration = Duration::from_micros(500);

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
        Self::starting_at(wall_now())
    }

    /// Starts a line at this wall time. The line reads the wall clock here and never again.
    fn starting_at(wall: Timestamp) -> Self {
        Self {
            base: wall,
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
        let elapsed = whole(self.started.elapsed()).since(Timestamp::default());
        self.base.after(elapsed)
    }

    /// A point of the line as present wall time in milliseconds since the Unix epoch: what is shown.
    #[must_use]
    pub fn wall_millis(&self, at: Timestamp) -> u64 {
        let base = Duration::from_millis(self.base.millis());
        let line = base.saturating_add(self.started.elapsed());
        let wall = since_epoch();
        shown_at(at, whole(line), wall_beside(line, wall))
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

/// The wall time in whole milliseconds that belongs to the line's own whole milliseconds. The two are
/// set apart before they are rounded: else one point would be shown as two neighbours, by the moment.
fn wall_beside(line: Duration, wall: Duration) -> Timestamp {
    let ahead = wall.saturating_sub(line);
    let behind = line.saturating_sub(wall);
    let rounded = |apart: Duration| whole(apart.saturating_add(HALF)).since(Timestamp::default());
    whole(line).after(rounded(ahead)).before(rounded(behind))
}

fn whole(time: Duration) -> Timestamp {
    Timestamp::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// A point of the line that stands at `now` while the wall clock shows `wall`.
fn shown_at(at: Timestamp, now: Timestamp, wall: Timestamp) -> u64 {
    wall.after(at.since(now)).before(now.since(at)).millis()
}

fn wall_now() -> Timestamp {
    whole(since_epoch())
}

fn since_epoch() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use kvgate_core::units::Span;

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

    /// TIM1: a point of the line is shown as the same time whenever it is asked for.
    #[test]
    fn tim1_a_point_is_shown_as_one_time() {
        let at = NOON;
        let apart = Duration::from_micros(300);
        for micros in 0..3_000 {
            let line = Duration::from_millis(NOON.millis()) + Duration::from_micros(micros);
            for (wall, shown) in [
                (line + apart, 0),
                (line - apart, 0),
                (line + Duration::from_millis(7) + apart, 7),
            ] {
                let wall = wall_beside(line, wall);
                assert_eq!(shown_at(at, whole(line), wall), NOON.millis() + shown);
            }
        }
    }

    /// 12:00:00 of some day.
    const NOON: Timestamp = Timestamp::from_millis(1_700_049_600_000);
    const HOUR: Span = Span::from_secs(3_600);

    /// L02 (a), TIM1: within a process the wall clock is read for what is shown only. Set back an hour or
    /// ahead a day, an end is shown as far from the present wall time as it is.
    #[test]
    fn l02_a_jump_of_the_wall_clock_moves_no_end() {
        let clock = Clock::starting_at(NOON);
        let granted = clock.now();
        let ends_at = granted.after(Span::from_secs(60));
        assert!(granted >= NOON && granted < NOON.after(HOUR));
        let now = granted.after(Span::from_secs(10));
        for wall in [NOON.before(HOUR), NOON, NOON.after(Span::from_secs(86_400))] {
            assert_eq!(shown_at(ends_at, now, wall), wall.millis() + 50_000);
            assert_eq!(shown_at(granted, now, wall), wall.millis() - 10_000);
            assert_eq!(shown_at(now, now, wall), wall.millis());
        }
        // A wall clock without a battery: what is shown stops at the epoch and does not wrap.
        assert_eq!(shown_at(granted, now, Timestamp::from_millis(0)), 0);
    }

    /// L02 (b), TIM1: a process that starts with its wall clock an hour back goes on where the last one
    /// stopped: what was left of 60 s is no more than 60 s, not 3,650 s.
    #[test]
    fn l02_a_start_with_the_wall_clock_set_back_goes_on() {
        let stored = NOON.after(Span::from_secs(10));
        let ends_at = NOON.after(Span::from_secs(60));
        let clock = Clock::starting_at(NOON.before(HOUR).after(Span::from_secs(10)));
        let left = ends_at.since(clock.not_below(stored).now());
        assert!(left <= Span::from_secs(50), "{left:?}");
        let ahead = Clock::starting_at(NOON.after(HOUR)).not_below(stored);
        assert!(
            ahead.now() >= NOON.after(HOUR),
            "time goes on while kvgate is down (TIM2)"
        );
    }
}
