//! What is sampled.

use kvgate_core::decision::{BypassReason, Scope, WaitReason};
use kvgate_core::tally::{CancelledHow, LeaseEnd, Tally};
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use kvgate_core::view::View;

use crate::gate::Waits;

macro_rules! series {
    ($($(#[$doc:meta])* $name:ident = $word:literal,)+) => {
        /// A figure over time. New ones are added at the end: their place is their place in the file.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Series { $($(#[$doc])* $name,)+ }

        impl Series {
            /// All, in the order of the file.
            pub const ALL: [Self; [$($word),+].len()] = [$(Self::$name),+];

            /// The name in the API.
            #[must_use]
            pub const fn word(self) -> &'static str {
                match self { $(Self::$name => $word,)+ }
            }
        }
    };
}

series! {
    /// Capacity of the counted engines in tokens.
    Capacity = "capacity",
    /// Admission ceiling in tokens.
    Ceiling = "ceiling",
    /// Sum of the held leases in tokens.
    Reserved = "reserved",
    /// Mean usage of the counted engines, 0 to 1.
    UsageMean = "usage_mean",
    /// Highest usage of a counted engine, 0 to 1.
    UsageMax = "usage_max",
    /// Held leases.
    Leases = "leases",
    /// Waiters in line.
    Waiting = "waiting",
    /// Their reservations together in tokens.
    WaitingTokens = "waiting_tokens",
    /// Age of the waiter that came first, in seconds; 0 without one.
    OldestWaiter = "oldest_waiter_s",
    /// Close intents that are not done.
    ClosesPending = "closes_pending",
    /// Worker-set generation.
    Epoch = "epoch",
    /// 1 while there is no usable ceiling.
    Degraded = "degraded",
    /// Admits a second.
    AdmitRate = "admit_rate",
    /// First enqueues a second.
    WaitRate = "wait_rate",
    /// Bypasses a second, where admission applies.
    BypassRate = "bypass_rate",
    /// Cancelled tickets a second.
    CancelledRate = "cancelled_rate",
    /// Leases given back a second.
    ReleaseRate = "release_rate",
    /// Leases that expired a second.
    ExpireRate = "expire_rate",
    /// Closes asked for a second.
    CloseRate = "close_rate",
    /// Evictable KV of all engines in tokens.
    Evictable = "evictable",
    /// KV locked by running work of all engines in tokens.
    Used = "used",
    /// Median queue time of the grants of the last minute, in seconds.
    WaitP50 = "wait_p50_s",
    /// Its 95th percentile.
    WaitP95 = "wait_p95_s",
    /// The longest of them.
    WaitMax = "wait_max_s",
    /// Grants from the queue a second.
    GrantRate = "queue_grant_rate",
    /// Aging bypasses a second.
    AgedRate = "bypass_aged_rate",
    /// Bypasses a second for want of a usable ceiling.
    DegradedRate = "bypass_degraded_rate",
    /// Bypasses a second that clients reported.
    LocalBypassRate = "local_bypass_rate",
    /// Closes a second that ended with an engine failed or refused.
    CloseFailureRate = "close_failure_rate",
}

impl Series {
    /// Its place among the figures of a sample.
    #[must_use]
    pub fn place(self) -> usize {
        Self::ALL
            .iter()
            .position(|series| *series == self)
            .unwrap_or_default()
    }

    /// The series with this name.
    #[must_use]
    pub fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|series| series.word() == word)
    }
}

/// One figure of each series; not a number where there is none.
pub(super) type Sample = [f64; Series::ALL.len()];

/// The figures of a view. Rates need the counters of the sample before.
pub(super) fn sample(
    view: &View,
    waits: Option<Waits>,
    before: Option<&(Timestamp, Tally)>,
    now: Timestamp,
) -> Sample {
    let measure = &view.measure;
    let rates = before.and_then(|(at, tally)| {
        let seconds = seconds(now.since(*at).millis());
        (seconds > 0.0).then(|| (view.tally.since(tally), seconds))
    });
    let rate = |count: fn(&Tally) -> u64| {
        rates
            .as_ref()
            .map_or(f64::NAN, |(since, seconds)| float(count(since)) / seconds)
    };
    let tokens = |count: Tokens| float(count.get());
    let share = |share: Option<Ppm>| share.map_or(f64::NAN, |share| f64::from(share.get()) / 1e6);
    let summed = |part: fn(&kvgate_core::reading::Reading) -> Option<Tokens>| {
        let known = view.engines.iter().filter(|engine| engine.fresh);
        let parts: Vec<f64> = known
            .filter_map(|engine| part(&engine.reading.as_ref()?.1))
            .map(tokens)
            .collect();
        if parts.is_empty() {
            f64::NAN
        } else {
            parts.iter().sum()
        }
    };
    Series::ALL.map(|series| match series {
        Series::Capacity => tokens(measure.capacity),
        Series::Ceiling => tokens(measure.ceiling),
        Series::Reserved => tokens(view.reserved),
        Series::UsageMean => share(measure.usage_mean),
        Series::UsageMax => share(measure.usage_max),
        Series::Leases => float(view.leases),
        Series::Waiting => float(view.waiting),
        Series::WaitingTokens => tokens(view.waiting_tokens),
        Series::OldestWaiter => view
            .oldest_waiter
            .map_or(0.0, |since| seconds(now.since(since).millis())),
        Series::ClosesPending => float(view.closes_pending),
        Series::Epoch => float(view.epoch.0),
        Series::Degraded => f64::from(u8::from(measure.degraded.is_some())),
        Series::AdmitRate => rate(|since| both(since, |scope| scope.admit)),
        Series::WaitRate => rate(|since| {
            both(since, |scope| {
                WaitReason::ALL.iter().map(|why| scope.waits(*why)).sum()
            })
        }),
        Series::BypassRate => rate(|since| both(since, applied_bypasses)),
        Series::CancelledRate => rate(|since| {
            both(since, |scope| {
                CancelledHow::ALL
                    .iter()
                    .map(|how| scope.cancels(*how))
                    .sum()
            })
        }),
        Series::ReleaseRate => rate(|since| since.ends(LeaseEnd::Released)),
        Series::ExpireRate => rate(|since| since.ends(LeaseEnd::Expired)),
        Series::CloseRate => rate(|since| since.closes),
        Series::Evictable => summed(|reading| reading.evictable),
        Series::Used => summed(|reading| reading.used),
        Series::WaitP50 => waited(waits.map(|waits| waits.p50)),
        Series::WaitP95 => waited(waits.map(|waits| waits.p95)),
        Series::WaitMax => waited(waits.map(|waits| waits.max)),
        Series::GrantRate => rate(|since| since.granted_after_wait),
        Series::AgedRate => rate(|since| both(since, |scope| scope.bypasses(BypassReason::Aged))),
        Series::DegradedRate => {
            rate(|since| both(since, |scope| scope.bypasses(BypassReason::Degraded)))
        }
        Series::LocalBypassRate => rate(|since| since.local_bypasses.iter().sum()),
        Series::CloseFailureRate => rate(|since| since.close_failures),
    })
}

fn waited(span: Option<Span>) -> f64 {
    span.map_or(f64::NAN, |span| seconds(span.millis()))
}

fn both(tally: &Tally, count: fn(&kvgate_core::tally::ScopeTally) -> u64) -> u64 {
    Scope::ALL
        .iter()
        .map(|scope| count(tally.scope(*scope)))
        .sum()
}

/// CNT1: where admission does not apply nothing was bypassed.
fn applied_bypasses(scope: &kvgate_core::tally::ScopeTally) -> u64 {
    BypassReason::ALL
        .iter()
        .filter(|reason| !matches!(reason, BypassReason::Disabled | BypassReason::OutOfScope))
        .map(|reason| scope.bypasses(*reason))
        .sum()
}

#[expect(
    clippy::cast_precision_loss,
    clippy::as_conversions,
    reason = "a plot needs no more digits than a float has"
)]
fn float(count: u64) -> f64 {
    count as f64
}

fn seconds(millis: u64) -> f64 {
    float(millis) / 1_000.0
}
