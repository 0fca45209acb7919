//! From samples to one engine's gauges: the names, labels and joining rules of SGLang and vLLM (CAP2).
//!
//! Pure. Ranks of one pool repeat a value, so inside a group (`dp_rank`, at vLLM `engine`) the
//! largest counts; groups own separate pools, so tokens and requests are summed over groups and
//! usage is the worst group. Floats become [`Ppm`] and integers here and go no further.

use std::collections::BTreeMap;

use kvgate_core::ids::EngineId;
use kvgate_core::reading::{EngineKind, ReadFailure, Reading, Role, Source, TokenCounters};
use kvgate_core::units::{Ppm, TOKENS_MAX, Tokens};

use super::address::BaseUrl;
use super::exposition::{Sample, Samples, Tally};

/// How the engine spells its metric names: both are met in one fleet during an upgrade.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prefix {
    /// `sglang:` or `vllm:`.
    Colon,
    /// `sglang_` or `vllm_`.
    Underscore,
}

impl Prefix {
    /// What stands between the name of the software and that of a metric.
    #[must_use]
    pub const fn mark(self) -> &'static str {
        match self {
            Self::Colon => ":",
            Self::Underscore => "_",
        }
    }
}

/// The part an engine says it plays in a disaggregated fleet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Disaggregation {
    /// Prefill and decode in one.
    Unified,
    /// The prefill half.
    Prefill,
    /// The decode half.
    Decode,
}

impl Disaggregation {
    /// Reads the label `engine_type`, or the mode of `/v1/loads` and `/server_info`.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        match text {
            "unified" | "null" => Some(Self::Unified),
            "prefill" => Some(Self::Prefill),
            "decode" => Some(Self::Decode),
            _ => None,
        }
    }

    /// The part in the words of the core.
    #[must_use]
    pub const fn role(self) -> Role {
        match self {
            Self::Unified => Role::Regular,
            Self::Prefill => Role::Prefill,
            Self::Decode => Role::Decode,
        }
    }
}

/// What one `/metrics` body says of one engine. Missing values are `None`, not zero.
#[derive(Clone, PartialEq, Debug)]
pub struct Gauges {
    /// Told by the metric names.
    pub kind: EngineKind,
    /// Spelling of the names.
    pub prefix: Prefix,
    /// Sum over the rank groups.
    pub capacity: Option<Tokens>,
    /// The largest single pool (DEC5).
    pub largest_pool: Option<Tokens>,
    /// Rank groups that show a pool.
    pub ranks: u32,
    /// Worst rank group.
    pub usage: Option<Ppm>,
    /// Locked by running work.
    pub used: Option<Tokens>,
    /// Cached and free to evict.
    pub evictable: Option<Tokens>,
    /// Free.
    pub available: Option<Tokens>,
    /// Requests running.
    pub running: Option<u64>,
    /// Requests queued inside the engine.
    pub queued: Option<u64>,
    /// Token counters; `None` until the engine shows one, which some do only after a first request.
    pub counters: Option<TokenCounters>,
    /// Rows differed by a label that is not known: the careful values were taken.
    pub unknown_label: bool,
    /// The label `engine_type`, where all rows agree.
    pub disaggregation: Option<Disaggregation>,
    /// Lines that are no sample.
    pub bad_lines: u64,
}

impl Gauges {
    /// The gauges as a reading of their own.
    ///
    /// # Errors
    /// [`ReadFailure::Missing`] without a capacity.
    pub fn reading(&self) -> Result<Reading, ReadFailure> {
        let (Some(capacity), Some(largest_pool)) = (self.capacity, self.largest_pool) else {
            return Err(ReadFailure::Missing);
        };
        Ok(Reading {
            kind: self.kind,
            role: None,
            source: Source::Metrics,
            capacity,
            largest_pool,
            usage: self.usage,
            used: self.used,
            evictable: self.evictable,
            available: self.available,
            running: self.running,
            queued: self.queued,
            ranks: self.ranks.max(1),
            counters: self.counters,
            unknown_label: self.unknown_label,
        })
    }
}

/// Reads the `/metrics` body of `engine`; rows that another engine's address stands on are left out.
///
/// # Errors
/// [`ReadFailure::Unreadable`] for a body that is no exposition, [`ReadFailure::Missing`] for one
/// without any row of an engine that is known.
pub fn read(body: &str, engine: &EngineId) -> Result<Gauges, ReadFailure> {
    let mut samples = Samples::new(body, |name: &str| Name::of(name).is_some());
    let mut rows = Rows::new(engine);
    for sample in samples.by_ref() {
        rows.take(&sample);
    }
    let tally = samples.tally();
    if tally.unreadable() {
        return Err(ReadFailure::Unreadable);
    }
    rows.joined(tally).ok_or(ReadFailure::Missing)
}

/// A token or request count: finite, not negative, at most 2^53 - 1, else missing. Fractions are cut.
#[must_use]
pub fn count(value: f64) -> Option<u64> {
    let whole = value.trunc();
    if !(value >= 0.0 && whole <= TOKENS_MAX as f64) {
        return None;
    }
    Some(whole as u64)
}

/// A usage: finite and not negative, else missing; above 1 it is brought down to 1.
#[must_use]
pub fn share(value: f64) -> Option<Ppm> {
    if !(value.is_finite() && value >= 0.0) {
        return None;
    }
    Some(Ppm::clamped((value.min(1.0) * 1e6).round() as u32))
}

/// What a row is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Gauge {
    Capacity,
    Usage,
    Used,
    /// The same for the main pool only: stands in where [`Gauge::Used`] is absent.
    KvUsed,
    Evictable,
    Available,
    Running,
    Queued,
    PromptTotal,
    GenerationTotal,
    /// vLLM shows its capacity in labels.
    CacheConfig,
}

impl Gauge {
    /// Whether the smaller value is the careful one.
    const fn careful_is_less(self) -> bool {
        matches!(self, Self::Capacity | Self::Evictable | Self::Available)
    }

    const fn is_counter(self) -> bool {
        matches!(self, Self::PromptTotal | Self::GenerationTotal)
    }
}

/// A metric name taken apart.
#[derive(Clone, Copy)]
struct Name {
    kind: EngineKind,
    prefix: Prefix,
    gauge: Gauge,
}

impl Name {
    fn of(name: &str) -> Option<Self> {
        let (kind, rest) = if let Some(rest) = name.strip_prefix("sglang") {
            (EngineKind::Sglang, rest)
        } else {
            (EngineKind::Vllm, name.strip_prefix("vllm")?)
        };
        let (prefix, rest) = if let Some(rest) = rest.strip_prefix(':') {
            (Prefix::Colon, rest)
        } else {
            (Prefix::Underscore, rest.strip_prefix('_')?)
        };
        let gauge = match kind {
            EngineKind::Sglang => sglang_gauge(rest)?,
            EngineKind::Vllm => vllm_gauge(rest)?,
        };
        Some(Self {
            kind,
            prefix,
            gauge,
        })
    }
}

fn sglang_gauge(name: &str) -> Option<Gauge> {
    Some(match name {
        "max_total_num_tokens" => Gauge::Capacity,
        "token_usage" => Gauge::Usage,
        "num_used_tokens" => Gauge::Used,
        "kv_used_tokens" => Gauge::KvUsed,
        "kv_evictable_tokens" => Gauge::Evictable,
        "kv_available_tokens" => Gauge::Available,
        "num_running_reqs" => Gauge::Running,
        "num_queue_reqs" => Gauge::Queued,
        "prompt_tokens_total" => Gauge::PromptTotal,
        "generation_tokens_total" => Gauge::GenerationTotal,
        _ => return None,
    })
}

fn vllm_gauge(name: &str) -> Option<Gauge> {
    Some(match name {
        "cache_config_info" => Gauge::CacheConfig,
        "kv_cache_usage_perc" => Gauge::Usage,
        "num_requests_running" => Gauge::Running,
        "num_requests_waiting" => Gauge::Queued,
        "prompt_tokens_total" => Gauge::PromptTotal,
        "generation_tokens_total" => Gauge::GenerationTotal,
        _ => return None,
    })
}

/// Labels that tell ranks, models and processes apart and are accounted for by the joining rules.
fn is_known_label(label: &str) -> bool {
    matches!(
        label,
        "model_name"
            | "engine_type"
            | "engine"
            | "tp_rank"
            | "pp_rank"
            | "dp_rank"
            | "moe_ep_rank"
            | "moe_dp_rank"
            | "moe_tp_rank"
            | "ep_rank"
            | "attn_tp_rank"
            | "attn_cp_rank"
            | "cp_rank"
            | "priority"
            | "pid"
            | "worker_addr"
    )
}

/// Where a row belongs.
#[derive(Default)]
struct Labels {
    group: String,
    /// Unknown labels with their values, in order: rows that agree in it are ranks of one pool.
    unknown: String,
    has_priority: bool,
    disaggregation: Option<Disaggregation>,
}

/// The rows of one engine kind: the largest value by gauge, group and unknown labels.
struct Table {
    prefix: Prefix,
    values: BTreeMap<(Gauge, String, String), f64>,
    prompt: Option<f64>,
    generation: Option<f64>,
    disaggregation: Option<Disaggregation>,
    disaggregation_differs: bool,
    configs_differ: bool,
}

impl Table {
    const fn new(prefix: Prefix) -> Self {
        Self {
            prefix,
            values: BTreeMap::new(),
            prompt: None,
            generation: None,
            disaggregation: None,
            disaggregation_differs: false,
            configs_differ: false,
        }
    }

    fn take(&mut self, gauge: Gauge, labels: Labels, sample: &Sample<'_>) {
        if gauge.is_counter() {
            self.add_to_counter(gauge, sample.value);
            return;
        }
        // per-priority rows repeat what the rows without a priority already total
        if labels.has_priority {
            return;
        }
        self.note_disaggregation(labels.disaggregation);
        if gauge == Gauge::CacheConfig {
            self.take_config(labels.group, sample);
            return;
        }
        // NaN, infinities and the like are missing: `max(NaN, x)` would depend on the order of rows
        let usable = if gauge == Gauge::Usage {
            share(sample.value).is_some()
        } else {
            count(sample.value).is_some()
        };
        if usable {
            let value = self
                .values
                .entry((gauge, labels.group, labels.unknown))
                .or_insert(sample.value);
            *value = value.max(sample.value);
        }
    }

    /// Series of a counter are parts of one total, whatever labels they differ by.
    fn add_to_counter(&mut self, gauge: Gauge, value: f64) {
        let sum = match gauge {
            Gauge::PromptTotal => &mut self.prompt,
            _ => &mut self.generation,
        };
        if count(value).is_some() {
            *sum = Some(sum.unwrap_or(0.0) + value);
        }
    }

    /// The whole cache configuration stands in labels, so there are no unknown ones: of two
    /// rows of one engine the smaller capacity is taken.
    fn take_config(&mut self, group: String, sample: &Sample<'_>) {
        let Some(tokens) = configured_tokens(sample) else {
            return;
        };
        let value = self
            .values
            .entry((Gauge::Capacity, group, String::new()))
            .or_insert(tokens);
        self.configs_differ |= *value != tokens;
        *value = value.min(tokens);
    }

    fn note_disaggregation(&mut self, told: Option<Disaggregation>) {
        match (self.disaggregation, told) {
            (None, told) => self.disaggregation = told,
            (Some(known), Some(told)) if known != told => self.disaggregation_differs = true,
            _ => {}
        }
    }

    /// One value for each group, and whether unknown labels told rows of a group apart.
    fn groups(&self, gauge: Gauge) -> (Vec<f64>, bool) {
        let mut differs = false;
        let mut groups: BTreeMap<&str, f64> = BTreeMap::new();
        for ((of, group, _), &value) in &self.values {
            if *of != gauge {
                continue;
            }
            let Some(known) = groups.get_mut(group.as_str()) else {
                groups.insert(group, value);
                continue;
            };
            differs = true;
            *known = if gauge.careful_is_less() {
                known.min(value)
            } else {
                known.max(value)
            };
        }
        (groups.into_values().collect(), differs)
    }

    fn joined(&self, kind: EngineKind, tally: Tally) -> Gauges {
        let mut unknown_label = self.configs_differ;
        let mut groups = |gauge| {
            let (values, differs) = self.groups(gauge);
            unknown_label |= differs;
            values
        };
        let capacity = groups(Gauge::Capacity);
        let usage = groups(Gauge::Usage);
        let used = sum(&groups(Gauge::Used));
        let kv_used = sum(&groups(Gauge::KvUsed));
        let (evictable, available) = (
            sum(&groups(Gauge::Evictable)),
            sum(&groups(Gauge::Available)),
        );
        let (running, queued) = (sum(&groups(Gauge::Running)), sum(&groups(Gauge::Queued)));
        Gauges {
            kind,
            prefix: self.prefix,
            capacity: sum(&capacity),
            largest_pool: largest(&capacity).and_then(count).and_then(Tokens::new),
            ranks: u32::try_from(capacity.len()).unwrap_or(u32::MAX),
            usage: largest(&usage).and_then(share),
            used: used.or(kv_used),
            evictable,
            available,
            running: running.map(Tokens::get),
            queued: queued.map(Tokens::get),
            counters: self.counters(),
            unknown_label,
            disaggregation: self.disaggregation.filter(|_| !self.disaggregation_differs),
            bad_lines: tally.bad,
        }
    }

    fn counters(&self) -> Option<TokenCounters> {
        let whole = |sum: Option<f64>| sum.map_or(0, |sum| sum as u64);
        (self.prompt.is_some() || self.generation.is_some()).then(|| TokenCounters {
            prompt: whole(self.prompt),
            generation: whole(self.generation),
        })
    }
}

/// `None` without a value and for a sum that is no token count any more.
fn sum(groups: &[f64]) -> Option<Tokens> {
    let mut sum = None;
    for &value in groups {
        let value = Tokens::new(count(value)?)?;
        sum = Some(sum.unwrap_or(Tokens::ZERO).checked_add(value)?);
    }
    sum
}

fn largest(groups: &[f64]) -> Option<f64> {
    groups.iter().copied().reduce(f64::max)
}

/// vLLM: `kv_cache_size_tokens`, which is right for hybrid models too; else blocks times their size.
fn configured_tokens(sample: &Sample<'_>) -> Option<f64> {
    let number = |label| {
        let value: f64 = sample.label(label)?.parse().ok()?;
        count(value).map(|_| value)
    };
    number("kv_cache_size_tokens").or_else(|| {
        let tokens = number("block_size")? * number("num_gpu_blocks")?;
        count(tokens).map(|_| tokens)
    })
}

/// All rows of one body that belong to one engine.
struct Rows<'e> {
    engine: &'e EngineId,
    sglang: Option<Table>,
    vllm: Option<Table>,
    /// The last `worker_addr` and whether it is this engine: rows of one worker stand together.
    last_address: Option<(String, bool)>,
}

impl<'e> Rows<'e> {
    const fn new(engine: &'e EngineId) -> Self {
        Self {
            engine,
            sglang: None,
            vllm: None,
            last_address: None,
        }
    }

    fn take(&mut self, sample: &Sample<'_>) {
        let Some(name) = Name::of(sample.name) else {
            return;
        };
        let Some(labels) = self.labels(sample, name) else {
            return;
        };
        let table = match name.kind {
            EngineKind::Sglang => &mut self.sglang,
            EngineKind::Vllm => &mut self.vllm,
        };
        table
            .get_or_insert_with(|| Table::new(name.prefix))
            .take(name.gauge, labels, sample);
    }

    /// `None` for a row of another engine.
    fn labels(&mut self, sample: &Sample<'_>, name: Name) -> Option<Labels> {
        let group_label = match name.kind {
            EngineKind::Sglang => "dp_rank",
            EngineKind::Vllm => "engine",
        };
        let mut labels = Labels::default();
        let mut unknown = Vec::new();
        for (label, value) in sample.labels() {
            match label {
                _ if label == group_label => labels.group = value.into_owned(),
                "priority" => labels.has_priority = !value.is_empty(),
                "engine_type" => labels.disaggregation = Disaggregation::from_text(&value),
                "worker_addr" if !self.is_this_engine(&value) => return None,
                _ if name.gauge == Gauge::CacheConfig || is_known_label(label) => {}
                _ => unknown.push(format!("{label}={value:?}")),
            }
        }
        unknown.sort_unstable();
        labels.unknown = unknown.join(",");
        Some(labels)
    }

    fn is_this_engine(&mut self, address: &str) -> bool {
        if let Some((last, is_this)) = &self.last_address
            && last == address
        {
            return *is_this;
        }
        let is_this =
            BaseUrl::parse(address).is_ok_and(|base| base.as_str() == self.engine.as_str());
        self.last_address = Some((address.to_owned(), is_this));
        is_this
    }

    /// Of a body that mixes both kinds, the one that shows a capacity; SGLang when both do.
    fn joined(&self, tally: Tally) -> Option<Gauges> {
        let join =
            |table: &Option<Table>, kind| table.as_ref().map(|table| table.joined(kind, tally));
        let sglang = join(&self.sglang, EngineKind::Sglang);
        let vllm = join(&self.vllm, EngineKind::Vllm);
        match (sglang, vllm) {
            (Some(sglang), Some(vllm)) if sglang.capacity.is_none() && vllm.capacity.is_some() => {
                Some(vllm)
            }
            (sglang, vllm) => sglang.or(vllm),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gauges(body: &str) -> Gauges {
        read(body, &EngineId::new("http://engine:1")).unwrap()
    }

    fn tokens(count: u64) -> Option<Tokens> {
        Tokens::new(count)
    }

    /// CAP2, DEC5: max inside a dp_rank, sum over dp_ranks, worst usage; the largest pool is kept.
    #[test]
    fn cap2_groups() {
        let read = gauges(
            "sglang:max_total_num_tokens{dp_rank=\"0\",tp_rank=\"0\"} 100\n\
             sglang:max_total_num_tokens{dp_rank=\"0\",tp_rank=\"1\"} 100\n\
             sglang:max_total_num_tokens{dp_rank=\"1\",tp_rank=\"2\"} 60\n\
             sglang:token_usage{dp_rank=\"0\"} 0.25\n\
             sglang:token_usage{dp_rank=\"1\"} 0.9\n\
             sglang:num_running_reqs{dp_rank=\"0\",pp_rank=\"0\"} 3\n\
             sglang:num_running_reqs{dp_rank=\"0\",pp_rank=\"1\"} 3\n\
             sglang:num_running_reqs{dp_rank=\"1\",pp_rank=\"0\"} 4\n",
        );
        assert_eq!(read.capacity, tokens(160));
        assert_eq!(read.largest_pool, tokens(100));
        assert_eq!(read.ranks, 2);
        assert_eq!(read.usage, Ppm::new(900_000));
        assert_eq!(read.running, Some(7));
        assert_eq!(read.queued, None);
        assert!(!read.unknown_label);
    }

    /// CAP2: non-finite, negative and too large values are missing, not zero; usage above 1 is clamped.
    #[test]
    fn cap2_values_that_are_missing() {
        for value in ["NaN", "+Inf", "-Inf", "-1", "9007199254740992", "1e300"] {
            let body = format!("sglang:max_total_num_tokens {value}\nsglang:num_running_reqs 1\n");
            let read = gauges(&body);
            assert_eq!(read.capacity, None, "{value}");
            assert_eq!(read.reading(), Err(ReadFailure::Missing), "{value}");
        }
        assert_eq!(
            gauges("sglang:max_total_num_tokens 9007199254740991\n").capacity,
            Some(Tokens::MAX)
        );
        for value in ["NaN", "+Inf", "-0.5"] {
            assert_eq!(
                gauges(&format!("sglang:token_usage {value}\n")).usage,
                None,
                "{value}"
            );
        }
        assert_eq!(gauges("sglang:token_usage 1.7\n").usage, Some(Ppm::ONE));
        assert_eq!(gauges("sglang:token_usage -0.0\n").usage, Ppm::new(0));
        assert_eq!(count(3.9), Some(3));
    }

    /// CAP2: a missing value of one rank does not depend on the order of rows.
    #[test]
    fn cap2_nan_beside_a_value() {
        for body in [
            "sglang:token_usage{tp_rank=\"0\"} NaN\nsglang:token_usage{tp_rank=\"1\"} 0.5\n",
            "sglang:token_usage{tp_rank=\"0\"} 0.5\nsglang:token_usage{tp_rank=\"1\"} NaN\n",
        ] {
            assert_eq!(gauges(body).usage, Ppm::new(500_000));
        }
    }

    /// CAP2: sums do not pass 2^53 - 1.
    #[test]
    fn cap2_sum_out_of_range_is_missing() {
        let read = gauges(
            "sglang:max_total_num_tokens{dp_rank=\"0\"} 9007199254740991\n\
             sglang:max_total_num_tokens{dp_rank=\"1\"} 1\n",
        );
        assert_eq!(read.capacity, None);
    }

    /// CAP2: rows that differ by an unknown label give the smaller capacity and the larger usage.
    #[test]
    fn cap2_unknown_label() {
        let read = gauges(
            "sglang:max_total_num_tokens{shard=\"a\"} 100\nsglang:max_total_num_tokens{shard=\"b\"} 80\n\
             sglang:token_usage{shard=\"a\"} 0.1\nsglang:token_usage{shard=\"b\"} 0.4\n",
        );
        assert_eq!(read.capacity, tokens(80));
        assert_eq!(read.usage, Ppm::new(400_000));
        assert!(read.unknown_label);
        // the operator's own label on every row tells nothing apart
        let same = gauges(
            "sglang:max_total_num_tokens{pool=\"x\",tp_rank=\"0\"} 100\nsglang:max_total_num_tokens{pool=\"x\",tp_rank=\"1\"} 100\n",
        );
        assert!(!same.unknown_label);
    }

    /// CAP2: rows with a priority are parts of the rows without; `pid` tells processes apart, not pools.
    #[test]
    fn cap2_priority_and_pid() {
        let read = gauges(
            "sglang:num_queue_reqs{priority=\"\"} 3\nsglang:num_queue_reqs{priority=\"5\"} 2\nsglang:num_queue_reqs{priority=\"0\"} 1\n\
             sglang:num_running_reqs{pid=\"1\"} 4\nsglang:num_running_reqs{pid=\"2\"} 4\n",
        );
        assert_eq!((read.queued, read.running), (Some(3), Some(4)));
        assert!(!read.unknown_label);
    }

    /// CAP2: rows of another engine are left out, however the address is written.
    #[test]
    fn cap2_worker_addr() {
        let read = gauges(
            "sglang_max_total_num_tokens{worker_addr=\"http://ENGINE:1/\"} 100\n\
             sglang_max_total_num_tokens{worker_addr=\"http://other:1\"} 900\n",
        );
        assert_eq!(read.capacity, tokens(100));
        assert_eq!(read.prefix, Prefix::Underscore);
    }

    /// CAP8: counters are summed over their series.
    #[test]
    fn cap8_counters() {
        let read = gauges(
            "sglang:prompt_tokens_total{is_streaming=\"true\"} 10\nsglang:prompt_tokens_total{is_streaming=\"false\"} 5\n\
             sglang:generation_tokens_total 7\n",
        );
        assert_eq!(
            read.counters,
            Some(TokenCounters {
                prompt: 15,
                generation: 7
            })
        );
        assert!(!read.unknown_label);
        assert_eq!(gauges("sglang:token_usage 0\n").counters, None);
    }

    /// CAP2: vLLM capacity from `kv_cache_size_tokens`, else from blocks; one pool for each `engine`.
    #[test]
    fn cap2_vllm_capacity() {
        let config = |size: &str, engine: &str| {
            format!(
                "vllm:cache_config_info{{block_size=\"16\",engine=\"{engine}\",kv_cache_size_tokens=\"{size}\",num_gpu_blocks=\"100\"}} 1\n"
            )
        };
        assert_eq!(gauges(&config("1500", "0")).capacity, tokens(1_500));
        assert_eq!(gauges(&config("None", "0")).capacity, tokens(1_600));
        let two = gauges(&(config("1500", "0") + &config("1400", "1")));
        assert_eq!((two.capacity, two.ranks), (tokens(2_900), 2));
        assert!(!two.unknown_label);
        let odd = gauges(&(config("1500", "0") + &config("1400", "0")));
        assert_eq!(odd.capacity, tokens(1_400));
        assert!(odd.unknown_label);
    }

    /// CAP2: an error page is unreadable; a readable body without engine rows misses its capacity.
    #[test]
    fn cap2_bodies_without_a_reading() {
        let engine = EngineId::new("http://engine:1");
        assert_eq!(
            read("<html>\n</html>\n", &engine),
            Err(ReadFailure::Unreadable)
        );
        assert_eq!(read("", &engine), Err(ReadFailure::Missing));
        assert_eq!(
            read("python_info{} 1\n", &engine),
            Err(ReadFailure::Missing)
        );
    }
}
