//! Closes at a real SGLang 0.5.15.post1, which runs on the CPU with a tiny random model: by hand, and as
//! the agent harness of `examples` leaves them on the Python client.
//!
//! Runs when `KVGATE_REAL_ENGINE=1` is set, as `just real-engine` does, and then needs Linux on x86-64,
//! Python 3.11 and a pip that can fetch packages: about 6 GB, kept in the folder that
//! `KVGATE_REAL_ENGINE_DIR` names, else below the target folder. Everything but pip keeps to loopback.
//! The steps by hand are those of `session_kv.rs`. What the engine answers is left in `answers` below that
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
    Effect, Engine, SLACK, closed, closes_at_the_engine, closes_through_the_gate, done, gate,
    prompt, release, shown_until,
};
use crate::support::child::{Process, free_ports, looks, must};
use crate::support::process::Kvgate;

/// For the packages to be fetched and unpacked.
const INSTALL_PATIENCE: Duration = Duration::from_secs(1_800);
/// For the engine to load: half a minute on an idle machine.
const START_PATIENCE: Duration = Duration::from_secs(600);
/// For the harness, which takes some seconds.
const HARNESS_PATIENCE: Duration = Duration::from_secs(300);
/// What the harness runs: its pool holds all of them, its budget three turns at a time.
const SESSIONS: u64 = 6;
const TURNS: u64 = 3;
const NEW_TOKENS: u64 = 32;
const HEADROOM: &str = "0.3";
/// Tokens of a task in the harness, which no other session has.
const TASK_TOKENS: u64 = 300;
/// Starts of the engine whose port was taken by others meanwhile.
const CLASHES_MAX: u32 = 5;

/// CLO3, CLO4, CLO7: the closes of `session_kv.rs`, by the engine itself and through the gate; then
/// those of the agent harness.
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
    let script = tree("tests/real/engine.py");
    let began = Instant::now();
    let mut setup = Command::new("python3");
    setup.arg(&script).arg("setup").arg(&folder);
    must(setup, INSTALL_PATIENCE).await;
    say(&format!("installed in {:.0?}", began.elapsed()));
    let began = Instant::now();
    let mut client = Command::new("python3");
    client.arg(&script).arg("client").arg(&folder);
    must(client, INSTALL_PATIENCE).await;
    say(&format!("the client too, in {:.0?}", began.elapsed()));

    let began = Instant::now();
    let (mut process, engine) = start(&script, &folder).await;
    say(&format!("the engine answers after {:.0?}", began.elapsed()));
    let began = Instant::now();
    record(&engine, &folder).await;
    closes_at_the_engine(&engine, Effect::Frees).await;
    say(&format!("closes at the engine: {:.1?}", began.elapsed()));

    let began = Instant::now();
    let data = TempDir::new().unwrap();
    let gate = gate(&data, &engine, &[]);
    closes_through_the_gate(&gate, &engine, Effect::Frees, say).await;
    say(&format!("closes through the gate: {:.1?}", began.elapsed()));
    drop(gate);

    let began = Instant::now();
    closes_of_the_harness(&folder, &engine).await;
    say(&format!("closes of the harness: {:.1?}", began.elapsed()));
    assert_eq!(process.ended(), None);
}

/// Past the capture of the test harness, which hides what a passing test prints.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "real engine: {line}");
}

/// A file of this tree.
fn tree(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
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

/// CLO3, CLO7: sessions of several turns with a tool between them, by the example on the Python client.
/// Another holder has a lease in each session, so that the closes wait, and the KV that the sessions left
/// is seen before it goes.
async fn closes_of_the_harness(folder: &Path, engine: &Engine) {
    let data = TempDir::new().unwrap();
    let gate = gate(&data, engine, &["--admission-headroom", HEADROOM]);
    shown_until(&gate, "reading of the engine", |shown| {
        shown["counted"] == true && shown["close_support"] == true
    })
    .await;
    let mut held = Vec::new();
    for number in 0..SESSIONS {
        let body = json!({
            "ticket_id": format!("held-{number}"), "session_id": format!("agent-{number}"),
            "reservation_tokens": 1,
        });
        let answer = gate.post("/v1/leases", &body).await;
        assert_eq!(answer.action(), "admit", "{answer:?}");
        held.push(answer.lease());
    }

    let summary = harness(folder, engine, &gate).await;
    let number = |name: &str| summary[name].as_u64().unwrap_or_default();
    assert_eq!(number("sessions"), SESSIONS, "{summary}");
    assert_eq!(number("turns"), SESSIONS * TURNS, "{summary}");
    assert_eq!(number("tools"), SESSIONS * TURNS, "{summary}");
    // A machine that is busy elsewhere may make a reading late, and a turn a bypass.
    assert_eq!(number("admit") + number("bypass"), SESSIONS * TURNS);
    assert!(number("admit") > SESSIONS * TURNS / 2, "{summary}");
    assert!(
        summary["waited_s"].as_f64().unwrap() > 0.0,
        "never waited: {summary}"
    );
    say(&format!("the harness: {summary}"));

    // All turns gave their leases back, and the closes wait for the other holder.
    let state = gate.get("/v1/state").await;
    assert_eq!(state["budget"]["reserved"], SESSIONS, "{state}");
    assert_eq!(state["closes"]["pending"], SESSIONS, "{state}");
    let closes = gate.list("/v1/closes").await;
    assert!(closes.iter().all(|close| close["state"] == "joining"));
    // What is certainly a session's own: its task, and what the model wrote.
    let tokens = SESSIONS * TASK_TOKENS + number("completion_tokens");
    let before = engine.kv_until("end of all work", |kv| kv.used == 0).await;
    assert!(before.evictable + SLACK >= tokens, "{before:?}");
    shown_until(&gate, "KV of the sessions", |shown| {
        shown["evictable"].as_u64() >= Some(before.evictable)
    })
    .await;
    say(&format!("all closes wait: {before:?}"));

    for lease in &held {
        release(&gate, lease).await;
    }
    for close in &closes {
        let close = done(&gate, close).await;
        assert_eq!(close["counts"], json!({"delivered": 1}), "{close}");
    }
    let state = gate.get("/v1/state").await;
    assert_eq!(state["budget"]["reserved"], 0, "{state}");
    assert_eq!(state["queue"]["waiting"], 0, "{state}");
    assert_eq!(state["closes"], json!({"pending": 0, "failed": 0}));
    let after = engine
        .kv_until("closes of the sessions", |kv| {
            closed(Effect::Frees, before, *kv, tokens)
        })
        .await;
    let most = before.evictable + SLACK - tokens;
    let seen = shown_until(&gate, "drop of the evictable tokens", |shown| {
        shown["evictable"].as_u64().is_some_and(|now| now <= most)
    });
    say(&format!(
        "the gate shows {} evictable",
        seen.await["evictable"]
    ));
    say(&format!("all closed and delivered: {after:?}"));
}

/// Runs the harness with the client that was installed; its summary, which is all that it says.
async fn harness(folder: &Path, engine: &Engine, gate: &Kvgate) -> Value {
    let mut command = Command::new(folder.join("client/bin/python"));
    command.arg(tree("examples/agents.py"));
    for (flag, value) in [
        ("--router", engine.url.clone()),
        ("--gate", gate.url("")),
        ("--sessions", SESSIONS.to_string()),
        ("--turns", TURNS.to_string()),
        ("--max-new-tokens", NEW_TOKENS.to_string()),
    ] {
        command.args([flag, &value]);
    }
    let mut process = Process::start(command);
    let went_well = process.success(HARNESS_PATIENCE).await;
    let said = process.tail();
    assert!(went_well, "the harness failed:\n{said}");
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error} in:\n{said}"))
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
