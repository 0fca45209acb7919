//! Lines about faults that repeat: the first at once, then once a minute how many more there were.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two lines of one fault.
const EVERY: Duration = Duration::from_secs(60);

/// How often it is looked whether a count is due.
const LOOKS: Duration = Duration::from_secs(5);

/// Faults that were told at least once, so that their counts are told too.
static TOLD: Mutex<Vec<&'static Repeats>> = Mutex::new(Vec::new());

/// A fault that may repeat fast. Each place in the code that tells one has its own.
#[derive(Debug)]
pub struct Repeats {
    what: &'static str,
    counts: Mutex<Counts>,
}

#[derive(Debug)]
struct Counts {
    /// When the last line was written; `None` when the next time is told at once.
    told_at: Option<Instant>,
    untold: u64,
    listed: bool,
}

impl Repeats {
    /// A fault that is called `what` when its count is told.
    #[must_use]
    pub const fn new(what: &'static str) -> Self {
        Self {
            what,
            counts: Mutex::new(Counts {
                told_at: None,
                untold: 0,
                listed: false,
            }),
        }
    }

    /// The fault occurred: whether it is told now. Otherwise it is counted.
    pub fn is_told(&'static self) -> bool {
        let (now, untold, list) = {
            let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
            let (now, untold) = counts.occurred(Instant::now());
            (now, untold, !std::mem::replace(&mut counts.listed, true))
        };
        if list {
            TOLD.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(self);
        }
        self.tell(untold);
        now
    }

    fn tell_when_due(&self, now: Instant, at_once: bool) {
        let untold = {
            let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
            counts.due(now, at_once)
        };
        self.tell(untold);
    }

    fn tell(&self, untold: u64) {
        if untold > 0 {
            tracing::warn!(fault = self.what, times = untold, "repeated");
        }
    }
}

impl Counts {
    /// Whether this time is told, and how many earlier ones are told by their number.
    fn occurred(&mut self, now: Instant) -> (bool, u64) {
        let rests = self
            .told_at
            .is_some_and(|told_at| now.saturating_duration_since(told_at) < EVERY);
        if rests {
            self.untold += 1;
            return (false, 0);
        }
        self.told_at = Some(now);
        (true, std::mem::take(&mut self.untold))
    }

    /// How many are told by their number now. After a minute without one, the next is told at once.
    fn due(&mut self, now: Instant, at_once: bool) -> u64 {
        let Some(told_at) = self.told_at else {
            return 0;
        };
        if !at_once && now.saturating_duration_since(told_at) < EVERY {
            return 0;
        }
        self.told_at = (self.untold > 0).then_some(now);
        std::mem::take(&mut self.untold)
    }
}

/// Tells counts when they are due, for as long as it is polled.
pub async fn tell_repeats() {
    let mut looks = tokio::time::interval(LOOKS);
    loop {
        looks.tick().await;
        tell_all(Instant::now(), false);
    }
}

/// Tells the counts that are left when the service stops.
pub fn tell_repeats_at_the_end() {
    tell_all(Instant::now(), true);
}

fn tell_all(now: Instant, at_once: bool) {
    let told = TOLD.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for repeats in told {
        repeats.tell_when_due(now, at_once);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts() -> Counts {
        Counts {
            told_at: None,
            untold: 0,
            listed: false,
        }
    }

    /// The first is told at once, the others of the minute by their number, and so on for as long as
    /// the fault goes on.
    #[test]
    fn the_first_is_told_and_then_the_number_of_each_minute() {
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        let mut counts = counts();
        assert_eq!(counts.occurred(at(0)), (true, 0));
        for _ in 0..500 {
            assert_eq!(counts.occurred(at(1)), (false, 0));
        }
        assert_eq!(counts.due(at(59), false), 0);
        assert_eq!(counts.due(at(60), false), 500);
        assert_eq!(counts.occurred(at(61)), (false, 0), "it goes on");
        assert_eq!(counts.due(at(119), false), 0);
        assert_eq!(counts.due(at(120), false), 1);
        assert_eq!(counts.due(at(180), false), 0, "a minute without it");
        assert_eq!(counts.occurred(at(181)), (true, 0), "a new beginning");
    }

    /// Nobody looks in between: the number is told with the next time.
    #[test]
    fn a_number_that_nobody_asked_for_comes_with_the_next_line() {
        let start = Instant::now();
        let mut counts = counts();
        assert_eq!(counts.occurred(start), (true, 0));
        assert_eq!(counts.occurred(start), (false, 0));
        assert_eq!(counts.occurred(start + 2 * EVERY), (true, 1));
    }

    /// What is left is told at the end.
    #[test]
    fn the_end_waits_for_no_minute() {
        let start = Instant::now();
        let mut counts = counts();
        assert_eq!(counts.due(start, true), 0, "nothing occurred");
        counts.occurred(start);
        counts.occurred(start);
        assert_eq!(counts.due(start, true), 1);
        assert_eq!(counts.due(start, true), 0);
    }
}
