//! What a run tells: one set of figures for each measurement, and the proof at its end.

use hdrhistogram::Histogram;
use serde::Serialize;

use super::scenario::Scenario;

/// Milliseconds at some quantiles.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Latency {
    /// Half of all take no longer.
    pub p50: f64,
    /// The slowest hundredth takes longer.
    pub p99: f64,
    /// The slowest thousandth takes longer.
    pub p999: f64,
}

impl Latency {
    /// `None` when nothing was recorded.
    #[must_use]
    pub fn of(nanos: &Histogram<u64>) -> Option<Self> {
        (!nanos.is_empty()).then(|| Self {
            p50: millis(nanos, 0.5),
            p99: millis(nanos, 0.99),
            p999: millis(nanos, 0.999),
        })
    }
}

/// How callers reach a service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// A port of loopback.
    Tcp,
    /// A Unix socket.
    Unix,
}

impl Transport {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
        }
    }
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum System {
    /// The service.
    Kvgate,
    /// The service as another build of this program is it.
    Against,
    /// Handlers that only read and write the bodies.
    Axum,
}

impl System {
    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kvgate => "kvgate",
            Self::Against => "against",
            Self::Axum => "axum",
        }
    }
}

/// The figures of one measurement. What was not measured is null.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// What was measured.
    pub system: System,
    /// How it was reached.
    pub transport: Transport,
    /// What callers did.
    pub scenario: Scenario,
    /// How many they were.
    pub connections: usize,
    /// Leases that fit, where few do.
    pub slots: Option<usize>,
    /// How long each of them is held, in milliseconds.
    pub hold_ms: Option<f64>,
    /// Which turn of the same measurement, from 1.
    pub round: usize,
    /// How long it took.
    pub seconds: f64,
    /// Acquires with their release; renewals where that is what callers did.
    pub pairs: u64,
    /// The same a second.
    pub pairs_per_s: f64,
    /// From an acquire to its decision, waits included; from when it was due, where the rate is fixed;
    /// of a whole batch, where acquires go in batches.
    pub acquire_ms: Option<Latency>,
    /// The same of releases.
    pub release_ms: Option<Latency>,
    /// The same of renewals or of closes.
    pub act_ms: Option<Latency>,
    /// From a release that is sent to the grant that its place went to.
    pub grant_ms: Option<Latency>,
    /// The same in units of the mean commit of this measurement.
    pub grant_commits: Option<Latency>,
    /// From the answer to that release to the grant; zero when the grant came first.
    pub grant_after_ms: Option<Latency>,
    /// The same in commits of this measurement, as long as their mean.
    pub grant_after_commits: Option<Latency>,
    /// How late the load itself was with the beginnings of a fixed rate.
    pub start_lag_ms: Option<Latency>,
    /// Processor time of the service.
    pub server_cpu_us_per_pair: Option<f64>,
    /// Processor time of the load.
    pub load_cpu_us_per_pair: Option<f64>,
    /// Memory of the service at the end.
    pub rss_bytes: Option<u64>,
    /// Transactions of the store.
    pub commits_per_s: Option<f64>,
    /// What was made durable, in operations of callers for each transaction.
    pub operations_per_commit: Option<f64>,
    /// Time of a transaction, its sync included.
    pub commit_mean_ms: Option<f64>,
    /// Closes that engines have not taken yet.
    pub closes_pending: Option<u64>,
    /// Acquires that were told to ask again.
    pub asked_again: u64,
    /// Acquires that were told to go on without a lease.
    pub bypassed: u64,
    /// Answers that nobody expected.
    pub refused: u64,
    /// The first of them.
    pub first_refusal: Option<String>,
    /// Pairs of a fixed rate that were not begun in twice the time.
    pub not_begun: u64,
}

/// What was done to services that the run started, as they count it themselves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Proof {
    /// Leases that callers got.
    pub granted_by_callers: u64,
    /// Leases that the services granted.
    pub granted_by_service: u64,
    /// Leases that callers gave back.
    pub released_by_callers: u64,
    /// Leases that the services saw given back.
    pub released_by_service: u64,
    /// Tokens that are still reserved.
    pub reserved_tokens: u64,
}

impl Proof {
    /// Both sides count the same, and nothing is left behind.
    #[must_use]
    pub const fn holds(&self) -> bool {
        self.granted_by_callers == self.granted_by_service
            && self.released_by_callers == self.released_by_service
            && self.reserved_tokens == 0
    }

    /// Of both together.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            granted_by_callers: self.granted_by_callers + other.granted_by_callers,
            granted_by_service: self.granted_by_service + other.granted_by_service,
            released_by_callers: self.released_by_callers + other.released_by_callers,
            released_by_service: self.released_by_service + other.released_by_service,
            reserved_tokens: self.reserved_tokens + other.reserved_tokens,
        }
    }
}

/// What a service says of itself in `/metrics`.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Scrape {
    pub commits: f64,
    pub commit_seconds: f64,
    pub granted: u64,
    pub released: u64,
    pub reserved: u64,
    pub closes_pending: u64,
}

impl Scrape {
    pub fn parse(text: &str) -> Self {
        let sum = |name: &str, label: &str| -> f64 {
            let value = |line: &str| {
                let (series, value) = line.split_once(' ').filter(|_| line.starts_with(name))?;
                let labels = series.strip_prefix(name)?;
                let is_it = labels.is_empty() || labels.starts_with('{');
                let value: f64 = value.split(' ').next()?.parse().ok()?;
                (is_it && labels.contains(label)).then_some(value)
            };
            text.lines().filter_map(value).sum::<f64>()
        };
        // Counts that are far below 2^53.
        let count = |name, label| sum(name, label) as u64;
        Self {
            commits: sum("kvgate_store_commit_seconds_count", ""),
            commit_seconds: sum("kvgate_store_commit_seconds_sum", ""),
            granted: count("kvgate_admission_decisions_total", "outcome=\"admit\""),
            released: count("kvgate_leases_ended_total", "how=\"released\""),
            reserved: count("kvgate_budget_reserved_tokens", ""),
            closes_pending: count("kvgate_session_closes_pending", ""),
        }
    }
}

/// A quantile in milliseconds.
#[must_use]
pub fn millis(nanos: &Histogram<u64>, quantile: f64) -> f64 {
    rounded(nanos.value_at_quantile(quantile) as f64 / 1e6)
}

/// To four places: more is noise.
#[must_use]
pub fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// The middle one; of two, the lower.
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_a_value_of_a_round() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0]), Some(1.0));
        assert_eq!(median([]), None);
    }

    #[test]
    fn series_are_summed_by_name_and_label() {
        let text = "# TYPE kvgate_store_commit_seconds histogram\n\
                    kvgate_store_commit_seconds_sum 1.5\n\
                    kvgate_store_commit_seconds_count 30\n\
                    kvgate_admission_decisions_total{outcome=\"admit\",reason=\"\",scope=\"train\"} 7\n\
                    kvgate_admission_decisions_total{outcome=\"admit\",reason=\"\",scope=\"eval\"} 2\n\
                    kvgate_admission_decisions_total{outcome=\"wait\",reason=\"x\",scope=\"train\"} 9\n\
                    kvgate_leases_ended_total{how=\"released\"} 8\n\
                    kvgate_leases_ended_total{how=\"expired\"} 3\n\
                    kvgate_budget_reserved_tokens 22528\n\
                    kvgate_session_closes_pending 4\n# EOF\n";
        let scrape = Scrape::parse(text);
        assert_eq!(
            scrape,
            Scrape {
                commits: 30.0,
                commit_seconds: 1.5,
                granted: 9,
                released: 8,
                reserved: 22_528,
                closes_pending: 4,
            }
        );
    }

    #[test]
    fn a_proof_holds_when_both_sides_agree_and_nothing_is_left() {
        let good = Proof {
            granted_by_callers: 2,
            granted_by_service: 2,
            released_by_callers: 2,
            released_by_service: 2,
            reserved_tokens: 0,
        };
        assert!(good.and(good).holds());
        for bad in [
            Proof {
                granted_by_service: 3,
                ..good
            },
            Proof {
                released_by_service: 1,
                ..good
            },
            Proof {
                reserved_tokens: 1,
                ..good
            },
        ] {
            assert!(!good.and(bad).holds(), "{bad:?}");
        }
    }
}
