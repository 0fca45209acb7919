//! When to ask, when to ask again, and when to go on without the gate.
//!
//! Plain values with the time as an argument: the rules of the contract's "Rules for clients", without I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::answer::WaitTimes;
use crate::config::GateError;

/// Local bypass: no good answer.
pub const UNREACHABLE: &str = "unreachable";
/// Local bypass: the gate does not take the call.
pub const REFUSED: &str = "refused";
/// Local bypass: the gate was not asked, since it failed just now.
pub const BREAKER: &str = "breaker";

/// Grace that is assumed until the gate tells its own.
const CLAIM_GRACE: Duration = Duration::from_secs(10);
/// Added to the last `bypass_in_s`: the hard bound of a wait.
const BOUND_SLACK: Duration = Duration::from_secs(5);
/// Kinds of trouble that are told apart. What comes beyond is logged for debugging only.
const KINDS_MAX: usize = 64;

/// A lock that a panic elsewhere does not spoil: what it guards here is valid after every statement.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ids and jitter from one seed.
#[derive(Debug)]
pub struct Dice {
    prefix: u64,
    drawn: AtomicU64,
    ids: AtomicU64,
}

impl Dice {
    pub fn new() -> Result<Self, GateError> {
        let seed = || getrandom::u64().map_err(GateError::Random);
        Ok(Self {
            prefix: seed()?,
            drawn: AtomicU64::new(seed()?),
            ids: AtomicU64::new(seed()?),
        })
    }

    /// A name of 32 letters and digits that never repeats. All have one length, so that none is a prefix of another:
    /// engines abort by prefix.
    pub fn id(&self) -> String {
        let number = self.ids.fetch_add(1, Ordering::Relaxed);
        format!("{:016x}{number:016x}", self.prefix)
    }

    /// Between 0 and 1.
    fn fraction(&self) -> f64 {
        // SplitMix64: good enough to spread callers.
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.drawn.fetch_add(STEP, Ordering::Relaxed);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let top = u32::try_from((z ^ (z >> 31)) >> 32).unwrap_or(0);
        f64::from(top) / f64::from(u32::MAX)
    }

    /// From `least` to 1 of a time.
    pub fn part_of(&self, time: Duration, least: f64) -> Duration {
        time.mul_f64(least + (1.0 - least) * self.fraction())
    }

    /// Three quarters to five quarters of a pause, so that callers do not come back together.
    pub fn jittered(&self, pause: Duration) -> Duration {
        pause.mul_f64(0.75 + 0.5 * self.fraction())
    }
}

/// A pause that doubles from `first` to `most`, with jitter, until it is reset.
#[derive(Debug)]
pub struct Pause {
    first: Duration,
    most: Duration,
    next: Duration,
}

impl Pause {
    pub const fn new(first: Duration, most: Duration) -> Self {
        Self {
            first,
            most,
            next: first,
        }
    }

    /// Between two attempts of a waiting ticket: the first within 250 ms, then up to 2 s.
    pub const fn of_place() -> Self {
        Self::new(Duration::from_millis(200), Duration::from_secs(2))
    }

    /// Between two attempts of what must arrive.
    pub const fn of_delivery() -> Self {
        Self::new(Duration::from_millis(250), Duration::from_secs(5))
    }

    pub fn next(&mut self, dice: &Dice) -> Duration {
        let pause = self.next;
        self.next = pause.saturating_mul(2).min(self.most);
        dice.jittered(pause).min(self.most)
    }

    pub const fn reset(&mut self) {
        self.next = self.first;
    }
}

/// Skips calls for a while after a few failures in a row, so that a dead gate costs next to nothing.
///
/// When the while is over one call goes out as a trial; the others are skipped until it has ended. Any success closes
/// the breaker, also one of a waiting ticket or a retried release.
#[derive(Debug)]
pub struct Breaker {
    failures_max: u32,
    open: Duration,
    state: Mutex<BreakerState>,
}

#[derive(Debug, Default)]
struct BreakerState {
    failures: u32,
    open_until: Option<Instant>,
}

impl Breaker {
    pub fn new(failures_max: u32, open: Duration) -> Self {
        Self {
            failures_max,
            open,
            state: Mutex::default(),
        }
    }

    /// Whether a new call may go out. Leave is used up by asking: it may be the trial.
    pub fn allows(&self, now: Instant, dice: &Dice) -> bool {
        let mut state = lock(&self.state);
        match state.open_until {
            None => true,
            Some(until) if now < until => false,
            Some(_) => {
                state.open_until = Some(now + dice.jittered(self.open));
                true
            }
        }
    }

    /// Whether calls are skipped now.
    pub fn is_open(&self) -> bool {
        lock(&self.state).open_until.is_some()
    }

    pub fn succeeded(&self) {
        *lock(&self.state) = BreakerState::default();
    }

    /// So many calls failed; those that shared a batch count each, as if they had gone by themselves.
    pub fn failed(&self, calls: u32, now: Instant, dice: &Dice) {
        let mut state = lock(&self.state);
        state.failures = state.failures.saturating_add(calls);
        // One that is open stays open until its own trial: others that ask again all the time, such as waiting
        // tickets, must not put the trial off.
        if state.failures >= self.failures_max && state.open_until.is_none() {
            state.open_until = Some(now + dice.jittered(self.open));
        }
    }
}

/// What was decided without the gate and not yet told to it: reason to count.
#[derive(Debug, Default)]
pub struct LocalBypasses {
    counts: Mutex<BTreeMap<String, u64>>,
}

impl LocalBypasses {
    pub fn add(&self, reason: &str) {
        self.put_back(BTreeMap::from([(reason.to_owned(), 1)]));
    }

    /// All counts, for a call. A call that does not get through puts them back.
    pub fn take(&self) -> BTreeMap<String, u64> {
        std::mem::take(&mut *lock(&self.counts))
    }

    pub fn put_back(&self, counts: BTreeMap<String, u64>) {
        let mut kept = lock(&self.counts);
        for (reason, count) in counts {
            let sum = kept.entry(reason).or_default();
            *sum = sum.saturating_add(count);
        }
    }

    pub fn peek(&self) -> BTreeMap<String, u64> {
        lock(&self.counts).clone()
    }
}

/// A place in the gate's queue that would be lost by going on too early.
///
/// The grace runs from the last sign of the gate: its last answer, or the moment an open call was cut, since until then
/// the gate knew that the caller was there. The hard bound moves with nothing but the gate's own `bypass_in_s`.
#[derive(Clone, Debug)]
pub struct Place {
    sign_at: Instant,
    is_cut: bool,
    grace: Duration,
    bound_at: Option<Instant>,
}

impl Place {
    pub const fn new(now: Instant) -> Self {
        Self {
            sign_at: now,
            is_cut: false,
            grace: CLAIM_GRACE,
            bound_at: None,
        }
    }

    /// The gate answered.
    pub const fn heard(&mut self, now: Instant) {
        self.sign_at = now;
        self.is_cut = false;
    }

    /// The gate answered `wait`, with its two times.
    pub fn told(&mut self, now: Instant, times: WaitTimes) {
        self.heard(now);
        self.grace = times.claim_grace;
        // A gate that says 0 again and again is one that should have decided: its word moves nothing any more.
        if !times.bypass_in.is_zero() || self.bound_at.is_none() {
            self.bound_at = Some(now + times.bypass_in + BOUND_SLACK);
        }
    }

    /// An open call broke. Only the first since the last answer counts: what takes calls and cuts them all is no gate.
    pub const fn cut(&mut self, now: Instant) {
        if !self.is_cut {
            self.is_cut = true;
            self.sign_at = now;
        }
    }

    /// When a caller that hears nothing more goes on.
    pub fn grace_ends_at(&self) -> Instant {
        (self.sign_at + self.grace).min(self.bound_at())
    }

    /// When a caller goes on whatever the gate says.
    pub fn bound_at(&self) -> Instant {
        self.bound_at.unwrap_or(self.sign_at + self.grace)
    }
}

/// Warns once for each kind of trouble, so that a rollout of thousands of requests keeps its log.
#[derive(Debug, Default)]
pub struct OnceWarnings {
    seen: Mutex<BTreeSet<String>>,
}

impl OnceWarnings {
    pub fn warn(&self, kind: &str, text: fmt::Arguments<'_>) {
        if self.is_first(kind) {
            tracing::warn!("{text}");
        } else {
            tracing::debug!("{text}");
        }
    }

    fn is_first(&self, kind: &str) -> bool {
        let mut seen = lock(&self.seen);
        seen.len() < KINDS_MAX && seen.insert(kind.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn ids_have_one_length_and_never_repeat() {
        let dice = Dice::new().unwrap();
        let ids: BTreeSet<String> = (0..1_000).map(|_| dice.id()).collect();
        assert_eq!(ids.len(), 1_000);
        assert!(ids.iter().all(|id| id.len() == 32));
    }

    #[test]
    fn a_pause_doubles_with_jitter_up_to_its_most() {
        let dice = Dice::new().unwrap();
        let mut pause = Pause::of_place();
        assert!(pause.next(&dice) <= Duration::from_millis(250));
        let mut pauses: Vec<Duration> = (0..10).map(|_| pause.next(&dice)).collect();
        assert!(pauses.iter().all(|pause| *pause <= 2 * SECOND));
        let last = pauses.pop().unwrap();
        assert!(last >= Duration::from_millis(1_500));
        pause.reset();
        assert!(pause.next(&dice) <= Duration::from_millis(250));
    }

    #[test]
    fn a_breaker_opens_after_some_failures_and_lets_one_trial_through() {
        let dice = Dice::new().unwrap();
        let breaker = Breaker::new(3, 4 * SECOND);
        let start = Instant::now();
        breaker.failed(2, start, &dice);
        assert!(breaker.allows(start, &dice));
        breaker.succeeded();
        breaker.failed(2, start, &dice);
        assert!(!breaker.is_open());
        breaker.failed(1, start, &dice);
        assert!(breaker.is_open());
        assert!(!breaker.allows(start + 2 * SECOND, &dice));
        // Failures meanwhile do not put the trial off.
        breaker.failed(9, start + 2 * SECOND, &dice);
        let later = start + 5 * SECOND;
        assert!(breaker.allows(later, &dice));
        assert!(!breaker.allows(later, &dice));
        breaker.succeeded();
        assert!(breaker.allows(later, &dice));
    }

    #[test]
    fn calls_of_one_batch_count_each() {
        let dice = Dice::new().unwrap();
        let breaker = Breaker::new(3, SECOND);
        breaker.failed(3, Instant::now(), &dice);
        assert!(breaker.is_open());
    }

    #[test]
    fn local_bypasses_that_do_not_get_through_are_put_back() {
        let bypasses = LocalBypasses::default();
        bypasses.add(BREAKER);
        bypasses.add(BREAKER);
        let taken = bypasses.take();
        assert_eq!(bypasses.peek(), BTreeMap::new());
        bypasses.add(REFUSED);
        bypasses.put_back(taken);
        let told = BTreeMap::from([(BREAKER.to_owned(), 2), (REFUSED.to_owned(), 1)]);
        assert_eq!(bypasses.peek(), told);
    }

    #[test]
    fn the_grace_runs_from_the_last_sign_and_never_past_the_hard_bound() {
        let times = |bypass_in: u64| WaitTimes {
            bypass_in: Duration::from_secs(bypass_in),
            claim_grace: 7 * SECOND,
        };
        let start = Instant::now();
        let mut place = Place::new(start);
        assert_eq!(place.grace_ends_at(), start + CLAIM_GRACE);
        place.told(start, times(30));
        assert_eq!(place.bound_at(), start + 35 * SECOND);
        assert_eq!(place.grace_ends_at(), start + 7 * SECOND);
        place.heard(start + 20 * SECOND);
        assert_eq!(place.grace_ends_at(), start + 27 * SECOND);
        place.cut(start + 31 * SECOND);
        place.cut(start + 34 * SECOND);
        assert_eq!(place.grace_ends_at(), start + 35 * SECOND);
        // Its own word moves the bound, as after a restart, but not the word that it is overdue.
        place.told(start + 34 * SECOND, times(10));
        assert_eq!(place.bound_at(), start + 49 * SECOND);
        place.told(start + 48 * SECOND, times(0));
        assert_eq!(place.bound_at(), start + 49 * SECOND);
    }

    #[test]
    fn a_kind_of_trouble_is_told_once_and_kinds_are_bounded() {
        let warnings = OnceWarnings::default();
        assert!(warnings.is_first("a"));
        assert!(!warnings.is_first("a"));
        let first = (0..1_000)
            .filter(|kind| warnings.is_first(&kind.to_string()))
            .count();
        assert_eq!(first, KINDS_MAX - 1);
    }
}
