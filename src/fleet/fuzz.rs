//! Fuzz targets of what engines and routers answer: nothing that they send stops a reading of the others, leaves
//! its bounds or depends on the order of rows.

use kvgate_core::ids::EngineId;
use kvgate_core::reading::Reading;
use kvgate_core::units::Ppm;
use serde_json::Value;

use super::address::{ADDRESS_BYTES_MAX, BaseUrl};
use super::dialect::{Gauges, Prefix};
use super::exposition::Samples;
use super::networks::Network;
use super::rows::{BAD_ENTRIES_MAX, BAD_ENTRY_LETTERS_MAX};
use super::{dialect, loads, rows, server_info};
use crate::fuzz::{Inputs, fuzz};

/// What no field may do to a JSON reader: other kinds, ends of ranges, depth.
const JSON_WORDS: &[&str] = &[
    "null",
    "true",
    "false",
    "\"\"",
    "[]",
    "{}",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "\"",
    "\\u0000",
    "\\ud800",
    "1e400",
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    "{\"a\":",
];

fn keeps_its_bounds(reading: &Reading) {
    assert!(reading.capacity >= reading.largest_pool);
    assert!(reading.ranks >= 1);
    assert!(reading.usage.is_none_or(|usage| usage <= Ppm::ONE));
}

/// CAP2.
#[test]
fn expositions() {
    let words = [
        "# ",
        "\r\n",
        "\n",
        "NaN",
        "+Inf",
        "{",
        "}",
        "\"",
        "\\",
        "\\n",
        ",",
        "=",
        " 1764400000000",
        "dp_rank=\"1\",",
        "tp_rank=\"0\",",
        "moe_ep_rank=\"3\",",
        "engine_type=\"decode\",",
        "sglang:max_total_num_tokens",
        "sglang_token_usage",
        "vllm:kv_cache_usage_perc",
        "# {trace=\"a\"} 1",
    ];
    // Without the lines of histograms, which are most of a body: rounds are twice as many.
    let whole = Inputs::of_fixtures(&["exposition", "cases/M0", "cases/W07"]);
    let inputs = Inputs::of(whole.seeds().map(|seed| {
        let text = String::from_utf8_lossy(seed);
        let lines = text.lines().filter(|line| !line.contains("_bucket{"));
        lines.collect::<Vec<_>>().join("\n")
    }));
    let engine = EngineId::new("http://127.0.0.1:30000");
    fuzz!(inputs.with_words(words), |bytes: &[u8]| {
        let body = String::from_utf8_lossy(bytes);
        let mut samples = Samples::new(&body, |_: &str| true);
        for sample in samples.by_ref() {
            assert!(body.contains(sample.name) && !sample.name.is_empty());
            let labels = sample
                .labels()
                .map(|(name, value)| name.len() + value.len());
            assert!(labels.sum::<usize>() <= body.len());
        }
        let blank = |letter: char| matches!(letter, ' ' | '\t' | '\r');
        let lines = body.split('\n').map(|line| line.trim_matches(blank));
        let lines = lines
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .count();
        let tally = samples.tally();
        assert_eq!(tally.good + tally.bad, lines as u64);

        // A body with names of both spellings shows that of its first line.
        let read = |body: &str| {
            let read = dialect::read(body, &engine);
            read.map(|gauges| Gauges {
                prefix: Prefix::Colon,
                ..gauges
            })
        };
        let gauges = read(&body);
        if let Ok(Ok(reading)) = gauges.as_ref().map(Gauges::reading) {
            keeps_its_bounds(&reading);
        }
        let mut reversed: Vec<&str> = body.split('\n').collect();
        reversed.reverse();
        assert_eq!(
            read(&reversed.join("\n")),
            gauges,
            "the order of lines says nothing"
        );
    });
}

/// CAP2.
#[test]
fn loads_of_engines() {
    let words = [
        "\"dp_rank\":",
        "\"loads\":",
        "\"max_total_num_tokens\":",
        "\"token_usage\":",
        "\"disaggregation\":{\"mode\":\"decode\"}",
    ];
    fuzz!(
        Inputs::of_fixtures(&["loads"])
            .with_words(JSON_WORDS)
            .with_words(words),
        |bytes: &[u8]| {
            let Ok(read) = loads::read(bytes) else { return };
            keeps_its_bounds(&read.reading);
            let mut answer: Value = serde_json::from_slice(bytes).unwrap();
            answer["loads"].as_array_mut().unwrap().reverse();
            assert_eq!(
                loads::read(answer.to_string().as_bytes()),
                Ok(read),
                "the order of rows says nothing"
            );
        }
    );
}

/// CLO10.
#[test]
fn server_infos() {
    let words = [
        "\"startup_time\":",
        "\"version\":",
        "\"enable_session_radix_cache\":",
        "\"disaggregation_mode\":",
    ];
    let long = format!("\"version\":\"{}\"", "9".repeat(200));
    let inputs = Inputs::of_fixtures(&["server-info"]).and([format!("{{{long}}}")]);
    fuzz!(
        inputs.with_words(JSON_WORDS).with_words(words),
        |bytes: &[u8]| {
            let Ok(info) = server_info::read(bytes) else {
                return;
            };
            for text in [&info.version, &info.radix_eviction_policy]
                .into_iter()
                .flatten()
            {
                assert!(text.len() <= 128);
            }
            assert_eq!(
                server_info::read(bytes),
                Ok(info),
                "the same body is the same answer"
            );
        }
    );
}

/// CAP1, CAP3.
#[test]
fn worker_lists() {
    let words = [
        "\"url\":\"http://[::1]:30000\"",
        "\"url\":\"http://2001:db8::5:30000\"",
        "\"dp_base_url\":\"h:1\"",
        "@3",
        "@",
        "\"id\":7",
        "\"is_healthy\":false",
        "\"worker_type\":\"prefill\"",
        "HTTP://",
        "grpc://",
        "file:///",
        "//",
        "%2F",
    ];
    fuzz!(
        Inputs::of_fixtures(&["router", "cases/W", "cases/X", "cases/M08"])
            .with_words(JSON_WORDS)
            .with_words(words),
        |bytes: &[u8]| {
            let Ok(listed) = rows::read(bytes) else {
                return;
            };
            assert!(
                listed
                    .workers
                    .is_sorted_by(|one, next| one.engine < next.engine),
                "each engine once"
            );
            for worker in &listed.workers {
                is_a_name(&BaseUrl::parse(worker.engine.as_str()).unwrap());
                assert!(
                    worker
                        .worker_ids
                        .iter()
                        .all(|id| (1..=256).contains(&id.len()))
                );
            }
            assert!(listed.bad.shown.len() <= BAD_ENTRIES_MAX);
            assert!(listed.bad.total >= listed.bad.shown.len() as u64);
            let letters = listed
                .bad
                .shown
                .iter()
                .map(|entry| entry.raw.chars().count());
            assert!(letters.max().unwrap_or(0) <= BAD_ENTRY_LETTERS_MAX);
            let mut answer: Value = serde_json::from_slice(bytes).unwrap();
            let list = match &mut answer {
                Value::Array(rows) => Some(rows),
                Value::Object(fields) => {
                    let named = ["workers", "urls"]
                        .into_iter()
                        .find(|name| fields.get(*name).is_some_and(Value::is_array));
                    named
                        .and_then(|name| fields.get_mut(name))
                        .and_then(Value::as_array_mut)
                }
                _ => None,
            };
            list.unwrap().reverse();
            let reversed = rows::read(answer.to_string().as_bytes()).unwrap();
            assert_eq!(
                reversed.workers, listed.workers,
                "the order of rows says nothing"
            );
            assert_eq!(reversed.bad.total, listed.bad.total);
        }
    );
}

/// The name of an engine is an address that names itself: no path, no user, a host that a client reads as well.
fn is_a_name(base: &BaseUrl) {
    assert_eq!(BaseUrl::parse(base.as_str()).as_ref(), Ok(base));
    let endpoint = url::Url::parse(&base.endpoint("/metrics")).unwrap();
    assert!(matches!(endpoint.scheme(), "http" | "https") && endpoint.has_host());
    assert_eq!(
        (endpoint.path(), endpoint.query(), endpoint.fragment()),
        ("/metrics", None, None)
    );
    assert_eq!((endpoint.username(), endpoint.password()), ("", None));
}

/// CAP1: whatever an address is called, it leads to the host that was written or nowhere.
#[test]
fn addresses() {
    let seeds = [
        "http://127.0.0.1:30000",
        "HTTP://Host.Example:80/",
        "https://[::1]:443@3",
        "grpc://10.0.0.1:20000",
        "host:1@0",
        "http://2001:db8::5:30000",
        "file:///etc/hostname",
        "http://169.254.169.254/latest",
        "http://user:pass@host:1",
        "http://x@1",
        "http://host:1/admin/x?y=1#z",
        "10.0.0.0/8",
        "fe80::/10",
        "::ffff:10.0.0.1",
        "http://0x7f.1:1",
    ];
    let words = [
        "@", "@0", ":", "/", "//", "?", "#", "[", "]", "%", "%40", "\\", "\t", "\u{ff0e}", "xn--",
        "0x7f", "65536", " ",
    ];
    fuzz!(Inputs::of(seeds).with_words(words), |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        if let Ok(base) = BaseUrl::parse(&text) {
            assert!(text.trim().len() <= ADDRESS_BYTES_MAX);
            is_a_name(&base);
            assert_eq!(base.engine().as_str(), base.as_str());
        }
        // A network of engines: what is taken says of each address whether it is inside.
        let _ = text.parse::<Network>();
    });
}
