//! What `/metrics` reads at the moment of a scrape: the view of the last commit, the fleet and the gate.
//!
//! Counters are those that are durable: they go on over a restart and never go back, since a reader of
//! metrics takes a lower value for a new beginning and would count everything anew. No label carries
//! an id; the only one whose values come from outside is the address of an engine, which goes with it.

use std::fmt::Error;
use std::sync::Arc;

use kvgate_core::capacity::EngineView;
use kvgate_core::close::TargetState;
use kvgate_core::decision::{BypassReason, Scope, WaitReason};
use kvgate_core::tally::{CancelledHow, LeaseEnd, LocalBypass, Tally};
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use kvgate_core::view::View;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use tokio::sync::watch;

use super::app::FleetDetails;
use crate::gate::{Gate, Phase};
use crate::telemetry::{ReadingResult, scope};
use crate::words;

/// Where this program comes from, when whoever built it said so.
const REVISION: Option<&str> = option_env!("KVGATE_REVISION");

/// Reads everything anew at each scrape, without a word to the writer.
#[derive(Debug)]
pub(super) struct Present {
    pub(super) gate: Gate,
    pub(super) fleet: watch::Receiver<Arc<FleetDetails>>,
}

impl Collector for Present {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let view = self.gate.view();
        let now = self.gate.line().map_or(view.now, |line| line.now());
        let mut page = Page(encoder);
        build(&mut page)?;
        budget(&mut page, &view)?;
        queue(&mut page, &view, now)?;
        decisions(&mut page, &view.durable_tally, &self.gate)?;
        closes(&mut page, &view)?;
        engines(&mut page, &view, now)?;
        readings(&mut page, &self.fleet.borrow().clone())?;
        store(&mut page, &self.gate)
    }
}

fn build(page: &mut Page<'_>) -> Result<(), Error> {
    let labels = [
        ("version", env!("CARGO_PKG_VERSION")),
        ("revision", REVISION.unwrap_or("unknown")),
    ];
    page.family(
        "kvgate_build",
        "Version and revision of this program.",
        MetricType::Info,
        |metric| metric.encode_info(&labels),
    )
}

fn budget(page: &mut Page<'_>, view: &View) -> Result<(), Error> {
    let measure = &view.measure;
    let tokens = [
        (
            "kvgate_budget_capacity_tokens",
            "KV capacity of the counted engines.",
            measure.capacity,
        ),
        (
            "kvgate_budget_ceiling_tokens",
            "What may be reserved: the capacity times the headroom.",
            measure.ceiling,
        ),
        (
            "kvgate_budget_reserved_tokens",
            "Sum of the held leases.",
            view.reserved,
        ),
        (
            "kvgate_budget_available_tokens",
            "What may still be reserved; 0 while more is reserved than the ceiling.",
            view.available(),
        ),
    ];
    for (name, help, count) in tokens {
        page.gauge(name, help, count.get())?;
    }
    page.gauge(
        "kvgate_budget_degraded",
        "1 while there is no fresh capacity snapshot to decide by: everything bypasses.",
        u64::from(measure.degraded.is_some()),
    )?;
    page.gauge(
        "kvgate_budget_epoch",
        "Generation of the worker set.",
        view.epoch.0,
    )?;
    page.ratio(
        "kvgate_kv_token_usage_mean_ratio",
        "Mean token usage of the counted engines; absent while none is counted.",
        measure.usage_mean,
    )?;
    page.ratio(
        "kvgate_kv_token_usage_max_ratio",
        "Highest token usage of the counted engines; absent while none is counted.",
        measure.usage_max,
    )?;
    page.ratio(
        "kvgate_admission_pressure_threshold_ratio",
        "Setting: the usage of the worst engine at which new requests wait.",
        Some(view.policy.pressure_threshold),
    )?;
    page.seconds(
        "kvgate_admission_max_wait_seconds",
        "Setting: the longest time in the queue, then the request bypasses.",
        view.policy.max_wait,
    )
}

fn queue(page: &mut Page<'_>, view: &View, now: Timestamp) -> Result<(), Error> {
    let loads = || Scope::ALL.map(|of| ([("scope", scope(of))], view.load(of)));
    page.gauges(
        "kvgate_leases",
        "Held leases.",
        loads().map(|(labels, load)| (labels, load.leases)),
    )?;
    page.gauges(
        "kvgate_waiting",
        "Waiters in line.",
        loads().map(|(labels, load)| (labels, load.waiting)),
    )?;
    page.gauges(
        "kvgate_waiting_tokens",
        "Reservations of the waiters together.",
        loads().map(|(labels, load)| (labels, load.waiting_tokens.get())),
    )?;
    let oldest = view.oldest_waiter.map(|since| now.since(since));
    page.seconds(
        "kvgate_waiting_oldest_age_seconds",
        "Time since the first enqueue of the waiter that came first; 0 when nobody waits.",
        oldest.unwrap_or(Span::ZERO),
    )
}

fn decisions(page: &mut Page<'_>, tally: &Tally, gate: &Gate) -> Result<(), Error> {
    let mut rows = Vec::new();
    for of in Scope::ALL {
        let counts = tally.scope(of);
        let mut row = |outcome, reason, count| {
            let labels = [
                ("outcome", outcome),
                ("reason", reason),
                ("scope", scope(of)),
            ];
            rows.push((labels, count));
        };
        row("admit", "", counts.admit);
        for reason in WaitReason::ALL {
            row("wait", wait_reason(reason), counts.waits(reason));
        }
        for reason in BypassReason::ALL {
            row("bypass", bypass_reason(reason), counts.bypasses(reason));
        }
        let without = gate.stats().metrics().bypasses_without_store(of);
        row("bypass", "store_unavailable", without);
        for how in CancelledHow::ALL {
            row("cancelled", cancelled(how), counts.cancels(how));
        }
    }
    page.counters(
        "kvgate_admission_decisions",
        "Decisions: wait once for each ticket that had to, and later exactly one of admit, bypass and cancelled.",
        rows,
    )?;
    page.counters(
        "kvgate_leases_ended",
        "Ended leases.",
        LeaseEnd::ALL.map(|how| ([("how", lease_end(how))], tally.ends(how))),
    )?;
    page.counters(
        "kvgate_client_bypasses",
        "Requests that callers let go on by themselves, as they reported.",
        LocalBypass::ALL.map(|why| ([("reason", local_bypass(why))], tally.reported(why))),
    )
}

fn closes(page: &mut Page<'_>, view: &View) -> Result<(), Error> {
    let tally = &view.durable_tally;
    page.counter(
        "kvgate_sessions_reopened",
        "Acquires that used a closed session anew.",
        tally.sessions_reopened,
    )?;
    page.counter("kvgate_session_closes", "Close intents.", tally.closes)?;
    page.counter(
        "kvgate_session_close_failures",
        "Close intents that ended with an engine failed or refused.",
        tally.close_failures,
    )?;
    page.gauge(
        "kvgate_session_closes_pending",
        "Close intents that are not done.",
        view.closes_pending,
    )?;
    page.counters(
        "kvgate_session_close_deliveries",
        "Engines of close intents, by how they ended.",
        TargetState::ENDS.map(|state| ([("result", words::target(state))], tally.delivered(state))),
    )
}

/// What an engine told, for as long as it is fresh: an old gauge looks like a present one.
struct Row<'a> {
    engine: &'a EngineView,
    labels: [(&'static str, &'a str); 1],
    age: Option<Span>,
    fresh: bool,
}

fn engines(page: &mut Page<'_>, view: &View, now: Timestamp) -> Result<(), Error> {
    let rows: Vec<Row<'_>> = view
        .engines
        .iter()
        .map(|engine| {
            let age = engine.reading.as_ref().map(|(at, _)| now.since(*at));
            Row {
                engine,
                labels: [("engine", engine.id.as_str())],
                age,
                // The view stands still while the store is away.
                fresh: engine.fresh && age.is_some_and(|age| age <= view.policy.stale_after),
            }
        })
        .collect();
    page.gauges(
        "kvgate_engine_up",
        "1 while the last reading of the engine was good and is fresh.",
        rows.iter().map(|row| {
            let up = row.fresh && row.engine.failure.is_none();
            (row.labels, u64::from(up))
        }),
    )?;
    page.gauges(
        "kvgate_engine_counted",
        "1 while the engine counts for ceiling and pressure.",
        rows.iter().map(|row| {
            let counted = row.fresh && row.engine.counted;
            (row.labels, u64::from(counted))
        }),
    )?;
    type Of = fn(&kvgate_core::reading::Reading) -> Option<Tokens>;
    let tokens: [(&str, &str, Of); 3] = [
        (
            "kvgate_engine_capacity_tokens",
            "KV capacity of the engine.",
            |reading| Some(reading.capacity),
        ),
        (
            "kvgate_engine_used_tokens",
            "KV that running work holds, where the engine tells it.",
            |reading| reading.used,
        ),
        (
            "kvgate_engine_evictable_tokens",
            "KV that is cached and free to evict, where the engine tells it.",
            |reading| reading.evictable,
        ),
    ];
    let fresh = || {
        rows.iter().filter(|row| row.fresh).filter_map(|row| {
            let (_, reading) = row.engine.reading.as_ref()?;
            Some((row.labels, reading))
        })
    };
    for (name, help, of) in tokens {
        page.gauges(
            name,
            help,
            fresh().filter_map(|(labels, reading)| Some((labels, of(reading)?.get()))),
        )?;
    }
    page.gauges(
        "kvgate_engine_token_usage_ratio",
        "Token usage of the engine as it tells it.",
        fresh().filter_map(|(labels, reading)| Some((labels, ratio(reading.usage?)))),
    )?;
    page.gauges(
        "kvgate_engine_reading_age_seconds",
        "Time since the last good reading.",
        rows.iter()
            .filter_map(|row| Some((row.labels, seconds(row.age?)))),
    )
}

fn readings(page: &mut Page<'_>, fleet: &FleetDetails) -> Result<(), Error> {
    let of_engine = |(engine, details): (_, &super::app::EngineDetails)| {
        let engine: &String = engine;
        details
            .readings
            .iter()
            .map(|(result, count): (ReadingResult, u64)| {
                let labels = [("engine", engine.as_str()), ("result", result.word())];
                (labels, count)
            })
            .collect::<Vec<_>>()
    };
    page.counters(
        "kvgate_engine_readings",
        "Readings of the engine by result, since it was first asked.",
        fleet.engines.iter().flat_map(of_engine),
    )
}

fn store(page: &mut Page<'_>, gate: &Gate) -> Result<(), Error> {
    page.gauge(
        "kvgate_store_bytes",
        "Size of the store on disk.",
        gate.stats().bytes(),
    )?;
    page.gauge(
        "kvgate_store_up",
        "1 while the store takes commits.",
        u64::from(matches!(gate.phase(), Phase::Ready | Phase::Draining)),
    )?;
    page.gauge(
        "kvgate_store_low_space",
        "1 while the disk of the store is nearly full: new acquires bypass.",
        u64::from(gate.store_trouble().low_space.is_some()),
    )?;
    let waiting = u64::try_from(gate.waiting_calls()).unwrap_or(u64::MAX);
    page.gauge(
        "kvgate_http_waiting_calls",
        "Calls that are held open now.",
        waiting,
    )
}

/// Writes families in the words of the format.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    /// One family. Its unit is the last word of its name, where that is one.
    fn family(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        samples: impl FnOnce(&mut MetricEncoder<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (stem, unit) = split_unit(name);
        let mut metric = self.0.encode_descriptor(stem, help, unit.as_ref(), kind)?;
        samples(&mut metric)
    }

    fn gauge(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.family(name, help, MetricType::Gauge, |metric| {
            metric.encode_gauge(&value)
        })
    }

    fn ratio(&mut self, name: &str, help: &str, value: Option<Ppm>) -> Result<(), Error> {
        self.family(name, help, MetricType::Gauge, |metric| match value {
            Some(value) => metric.encode_gauge(&ratio(value)),
            None => Ok(()),
        })
    }

    fn seconds(&mut self, name: &str, help: &str, value: Span) -> Result<(), Error> {
        self.family(name, help, MetricType::Gauge, |metric| {
            metric.encode_gauge(&seconds(value))
        })
    }

    fn gauges<L, V>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (L, V)>,
    ) -> Result<(), Error>
    where
        L: EncodeLabelSet,
        V: prometheus_client::encoding::EncodeGaugeValue,
    {
        self.family(name, help, MetricType::Gauge, |metric| {
            for (labels, value) in samples {
                metric.encode_family(&labels)?.encode_gauge(&value)?;
            }
            Ok(())
        })
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> Result<(), Error> {
        self.family(name, help, MetricType::Counter, |metric| {
            metric.encode_counter::<NoLabelSet, u64, f64>(&value, None)
        })
    }

    fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (L, u64)>,
    ) -> Result<(), Error> {
        self.family(name, help, MetricType::Counter, |metric| {
            for (labels, value) in samples {
                let mut metric = metric.encode_family(&labels)?;
                metric.encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
            }
            Ok(())
        })
    }
}

fn split_unit(name: &str) -> (&str, Option<Unit>) {
    let Some((stem, last)) = name.rsplit_once('_') else {
        return (name, None);
    };
    let unit = match last {
        "seconds" => Unit::Seconds,
        "bytes" => Unit::Bytes,
        "tokens" | "ratio" => Unit::Other(last.to_owned()),
        _ => return (name, None),
    };
    (stem, Some(unit))
}

fn ratio(value: Ppm) -> f64 {
    f64::from(value.get()) / 1e6
}

fn seconds(span: Span) -> f64 {
    std::time::Duration::from_millis(span.millis()).as_secs_f64()
}

const fn wait_reason(reason: WaitReason) -> &'static str {
    match reason {
        WaitReason::BehindOlder => "behind_older",
        WaitReason::PressureGuard => "pressure_guard",
        WaitReason::CapacityExhausted => "capacity_exhausted",
    }
}

const fn bypass_reason(reason: BypassReason) -> &'static str {
    match reason {
        BypassReason::Disabled => "disabled",
        BypassReason::OutOfScope => "out_of_scope",
        BypassReason::Protected => "protected",
        BypassReason::Degraded => "degraded",
        BypassReason::Oversize => "oversize",
        BypassReason::QueueFull => "queue_full",
        BypassReason::Aged => "aged",
    }
}

const fn cancelled(how: CancelledHow) -> &'static str {
    match how {
        CancelledHow::Withdrawn => "withdrawn",
        CancelledHow::SessionClosed => "session_closed",
        CancelledHow::Dropped => "dropped",
        CancelledHow::TakenBack => "taken_back",
    }
}

const fn lease_end(how: LeaseEnd) -> &'static str {
    match how {
        LeaseEnd::Released => "released",
        LeaseEnd::Expired => "expired",
        LeaseEnd::Revoked => "revoked",
        LeaseEnd::Cancelled => "cancelled",
    }
}

const fn local_bypass(why: LocalBypass) -> &'static str {
    match why {
        LocalBypass::Unreachable => "unreachable",
        LocalBypass::Refused => "refused",
        LocalBypass::Breaker => "breaker",
        LocalBypass::Timeout => "timeout",
        LocalBypass::Other => "other",
    }
}
