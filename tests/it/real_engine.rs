//! Closes at a real SGLang 0.5.15.post1, which runs on the CPU with a tiny random model.
//!
//! Runs when `KVGATE_REAL_ENGINE=1` is set, as `just real-engine` does, and then needs Linux on x86-64,
//! Python 3.11 and a pip that can fetch packages: about 6 GB, kept in the folder that
//! `KVGATE_REAL_ENGINE_DIR` names, else below the target folder. Everything but pip keeps to loopback.
//! The steps are those of `session_kv.rs`. What the engine answers is left in `answers` below that
//! folder; the files of the same names in `tests/fixtures/real-engine` came from there.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::Instant;

use crate::session_kv::{
    Effect, Engine, closes_at_the_engine, closes_through_the_gate, gate, prompt,
};
use crate::support::child::{Process, free_ports, looks, must};

/// For the packages to be fetched and unpacked.
const INSTALL_PATIENCE: Duration = Duration::from_secs(1_800);
/// For the engine to load: half a minute on an idle machine.
const START_PATIENCE: Duration = Duration::from_secs(600);
/// Starts of the engine whose port was taken by others meanwhile.
const CLASHES_MAX: u32 = 5;

/// CLO3, CLO4, CLO7: the closes of `session_kv.rs`, by the engine itself and through the gate.
#[tokio::test]
async fn clo7_closes_at_a_real_engine() {
    if std::env::var_os("KVGATE_REAL_ENGINE").is_none_or(|real| real != "1") {
        let _ = writeln!(
            io::stderr(),
            "\nSKIPPED: the check against a real engine; `just real-engine` runs it (docs/ci.md)"
        );
        return;
    }
    let folder = folder();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/real/engine.py");
    let began = Instant::now();
    let mut setup = Command::new("python3");
    setup.arg(&script).arg("setup").arg(&folder);
    must(setup, INSTALL_PATIENCE).await;
    say(&format!("installed in {:.0?}", began.elapsed()));

    let began = Instant::now();
    let (mut process, engine) = start(&script, &folder).await;
    say(&format!("the engine answers after {:.0?}", began.elapsed()));
    let began = Instant::now();
    record(&engine, &folder).await;
    closes_at_the_engine(&engine, Effect::Frees).await;
    say(&format!("closes at the engine: {:.1?}", began.elapsed()));

    let began = Instant::now();
    let data = TempDir::new().unwrap();
    let gate = gate(&data, &engine);
    closes_through_the_gate(&gate, &engine, Effect::Frees, say).await;
    say(&format!("closes through the gate: {:.1?}", began.elapsed()));
    assert_eq!(process.ended(), None);
}

/// Past the capture of the test harness, which hides what a passing test prints.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "real engine: {line}");
}

fn folder() -> PathBuf {
    std::env::var_os("KVGATE_REAL_ENGINE_DIR").map_or_else(
        || Path::new(env!("CARGO_TARGET_TMPDIR")).join("real-engine"),
        PathBuf::from,
    )
}

/// Runs the engine, and waits until it answers.
async fn start(script: &Path, folder: &Path) -> (Process, Engine) {
    let mut clashes = 0;
    loop {
        let [port, _] = free_ports();
        let mut command = Command::new("python3");
        command.arg(script).arg("serve").arg(folder);
        command.arg(port.to_string());
        let mut process = Process::start(command);
        let engine = Engine::new(format!("http://127.0.0.1:{port}"));
        let Some(status) = answers(&mut process, &engine).await else {
            return (process, engine);
        };
        let log = process.tail();
        clashes += 1;
        assert!(
            log.contains("address already in use") && clashes < CLASHES_MAX,
            "the engine ended with {status}; its log:\n{log}"
        );
    }
}

/// Waits until the engine answers; how it ended, when it did.
async fn answers(process: &mut Process, engine: &Engine) -> Option<ExitStatus> {
    let began = Instant::now();
    let mut looks = looks();
    loop {
        looks.tick().await;
        if let Some(status) = process.ended() {
            return Some(status);
        }
        if engine.is_up().await {
            return None;
        }
        assert!(
            began.elapsed() < START_PATIENCE,
            "no answer in {START_PATIENCE:?}; the log of the engine:\n{}",
            process.tail()
        );
    }
}

/// Keeps what the engine answers to the calls that the gate and its callers make.
async fn record(engine: &Engine, folder: &Path) {
    let answers = folder.join("answers");
    fs::create_dir_all(&answers).unwrap();
    let here = folder.canonicalize().unwrap();
    let save = |name: &str, text: &str| {
        // Where it was installed is of no interest, and no machine is to be named.
        let text = text.replace(here.to_str().unwrap(), "<folder>");
        fs::write(answers.join(format!("sglang-0.5.15.post1-{name}")), text).unwrap();
    };
    let mut calls = Vec::new();
    let mut note = |(method, path, request): (&str, &str, &str), (status, body): (u16, String)| {
        let body = body.replace(here.to_str().unwrap(), "<folder>");
        calls.push(json!({
            "method": method, "path": path, "request": request, "status": status, "body": body,
        }));
    };

    let prompt = prompt(21, 300);
    let turn = engine.generate(&prompt, 8, Some("recorded"), None).await;
    save("generate.json", &pretty(&turn.body));
    engine.kv().await;
    save("session_open-metrics.txt", &kv_lines(engine).await);
    let [close, abort] = ["/close_session", "/abort_request"];
    let recorded = ("POST", close, r#"{"session_id":"recorded"}"#);
    note(recorded, engine.call(recorded).await);
    engine.kv().await;
    save("session_closed-metrics.txt", &kv_lines(engine).await);
    for call in [
        recorded,
        ("POST", close, r#"{"session_id":"nobody"}"#),
        ("POST", close, r#"{"session_id":"nobody","extra":1}"#),
        ("GET", close, r#"{"session_id":"recorded"}"#),
        ("DELETE", close, r#"{"session_id":"recorded"}"#),
        ("POST", close, "{}"),
        ("POST", close, r#"{"session_id":null}"#),
        ("POST", close, r#"{"session_id":5}"#),
        ("POST", close, "no json"),
        ("POST", abort, r#"{"rid":"nobody"}"#),
        ("POST", abort, "{}"),
        ("GET", abort, ""),
    ] {
        note(call, engine.call(call).await);
    }
    save("calls.json", &pretty(&Value::Array(calls)));
    let info = engine.get("/server_info").await.1;
    let mut info: Value = serde_json::from_str(&info).unwrap();
    // Each rank repeats the whole body once more.
    for state in info["internal_states"].as_array_mut().unwrap() {
        *state = json!({"memory_usage": state["memory_usage"]});
    }
    save("server_info.json", &pretty(&info));
}

fn pretty(value: &Value) -> String {
    format!("{}\n", serde_json::to_string_pretty(value).unwrap())
}

/// The lines of `/metrics` that tell of the KV and of work; the rest is long, and other recordings
/// have it.
async fn kv_lines(engine: &Engine) -> String {
    const NAMES: [&str; 8] = [
        "max_total_num_tokens",
        "num_running_reqs",
        "num_queue_reqs",
        "token_usage",
        "kv_available_tokens",
        "kv_evictable_tokens",
        "kv_used_tokens",
        "prompt_tokens_total",
    ];
    let text = engine.get("/metrics").await.1;
    let kept = text.lines().filter(|line| {
        let row = line
            .trim_start_matches("# HELP ")
            .trim_start_matches("# TYPE ");
        let name = row.split(['{', ' ']).next().unwrap_or_default();
        NAMES
            .iter()
            .any(|known| name.strip_prefix("sglang:") == Some(known))
    });
    kept.fold(String::new(), |all, line| all + line + "\n")
}
