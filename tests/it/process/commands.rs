//! The command line: what each command prints and how it ends.

use std::fs;
use std::process::Output;

use kvgate::demo::Behaviour;
use serde_json::Value;

use super::fleet;
use crate::support::process::{Kvgate, command};

fn run(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Runs `kvgate serve` on a data directory where it must not come up.
fn serve(data: &str) -> Output {
    run(&["serve", "--listen", "127.0.0.1:0", "--data", data])
}

#[test]
fn usage_and_configuration_faults_end_with_2() {
    for arguments in [
        &["serve", "--no-such-flag"][..],
        &["serve", "--admission-max-wait-s", "soon"],
        &["serve", "--listen", "0.0.0.0:0"],
        &["serve", "--config", "does-not-exist.toml"],
        &[
            "serve",
            "--program-admission",
            "--admission-headroom",
            "1.5",
        ],
        &["no-such-command"],
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!stderr(&output).is_empty(), "{arguments:?} says why");
        assert!(stdout(&output).is_empty(), "{arguments:?}");
    }
}

#[test]
fn print_config_shows_every_value_with_its_origin() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvgate.toml");
    fs::write(&file, "max_waiting = 7\n").unwrap();
    let mut printing = command(&[
        "serve",
        "--print-config",
        "--config",
        file.to_str().unwrap(),
        "--agentic-admission-headroom",
        "0.5",
        "--agentic-program-admission",
        "--agentic-session-lifecycle",
        "--session-idle-close-s",
        "1800",
    ]);
    let output = printing.env("KVGATE_CLAIM_GRACE_S", "20").output().unwrap();
    assert!(output.status.success());
    let text = stdout(&output);
    for line in [
        "max_waiting = 7  # file",
        "admission_headroom = 0.5  # flag",
        "program_admission = true  # flag",
        "claim_grace_s = 20.0  # env",
        "admission_max_wait_s = 30.0  # default",
        "session_lifecycle = true  # flag",
        "session_idle_close_s = 1800.0  # flag",
        "close_timeout_s = 5.0  # default",
        "join_timeout_s = 0.0  # default",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
}

#[test]
fn what_is_no_store_ends_with_65_and_stays_as_it_is() {
    for content in [&b"just notes\n"[..], b""] {
        let data = tempfile::tempdir().unwrap();
        let file = data.path().join("kvgate.redb");
        fs::write(&file, content).unwrap();
        let output = serve(data.path().to_str().unwrap());
        assert_eq!(output.status.code(), Some(65), "{}", stderr(&output));
        assert!(stderr(&output).contains("not a kvgate store"));
        assert_eq!(fs::read(&file).unwrap(), content);
    }
}

/// A second process on the same store ends with 75 and disturbs nobody.
#[tokio::test]
async fn a_store_in_use_ends_with_75() {
    let data = tempfile::tempdir().unwrap();
    let gate = Kvgate::serve(data.path(), &[]);
    let address = fs::read(data.path().join("address")).unwrap();
    let output = serve(data.path().to_str().unwrap());
    assert_eq!(output.status.code(), Some(75), "{}", stderr(&output));
    assert!(stderr(&output).contains("in use"));
    assert_eq!(fs::read(data.path().join("address")).unwrap(), address);
    assert_eq!(gate.acquire("t", 1).await.status, 200);
}

#[test]
fn an_address_in_use_ends_with_69() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let data = tempfile::tempdir().unwrap();
    let output = run(&[
        "serve",
        "--listen",
        &address,
        "--data",
        data.path().to_str().unwrap(),
    ]);
    assert_eq!(output.status.code(), Some(69), "{}", stderr(&output));
    assert!(stderr(&output).contains(&address));
    assert!(
        !data.path().join("kvgate.redb").exists(),
        "bound before the store is opened (DUR3)"
    );
}

#[test]
fn a_data_directory_that_cannot_be_made_ends_with_74() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output = serve(file.path().join("data").to_str().unwrap());
    assert_eq!(output.status.code(), Some(74), "{}", stderr(&output));
}

/// With neither feature on everything is a bypass `disabled`, and the start says so (DEC1).
#[tokio::test]
async fn without_a_feature_it_observes() {
    let data = tempfile::tempdir().unwrap();
    let gate = Kvgate::serve(data.path(), &[]);
    assert!(gate.log_text().contains("neither feature is on"));
    let answer = gate.acquire("t", 1).await;
    assert_eq!(
        (answer.action(), &answer.body["reason"]),
        ("bypass", &Value::from("disabled"))
    );
}

#[test]
fn the_document_of_the_api_is_printed() {
    let output = run(&["openapi"]);
    assert!(output.status.success());
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    assert!(document["paths"]["/v1/leases"]["post"].is_object());
    let version = stdout(&run(&["--version"]));
    assert_eq!(
        version.trim(),
        format!("kvgate {}", env!("CARGO_PKG_VERSION"))
    );
}

/// `check` says what is to be mended, and ends with 1 only then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_says_what_is_to_be_mended() {
    let fleet = fleet().await;
    let router = fleet.router_url();
    let check = |more: &[&str]| {
        let mut arguments = vec!["check", "--router", &router];
        arguments.extend(more);
        run(&arguments)
    };
    let output = check(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
    assert!(stdout(&output).contains("capacity 500000 tokens"));

    fleet
        .engine(0)
        .behave("*", Behaviour::Status(401, "{}".into()));
    fleet
        .router()
        .set_kind(kvgate::demo::RouterKind::SglangRouter);
    let output = check(&["--session-lifecycle", "-o", "json"]);
    assert_eq!(output.status.code(), Some(1));
    let findings: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let mend: Vec<&str> = findings
        .iter()
        .filter(|finding| finding["weight"] == "mend")
        .map(|finding| finding["text"].as_str().unwrap())
        .collect();
    assert!(
        mend.iter().any(|text| text.contains("needs a key (401)")),
        "{mend:?}"
    );
    assert!(
        mend.iter().any(|text| text.contains("drops session_id")),
        "{mend:?}"
    );

    let output = run(&["check"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("neither a router nor an engine"));

    // CLO10: a router in place of an engine.
    let output = run(&["check", "--session-lifecycle", "--engine", &router]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("it answers as a router"));
}

/// A service whose stderr nobody reads any more goes on reading its fleet and deciding.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_stderr_ends_nothing() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let mut child = command(&["serve", "--listen", "127.0.0.1:0", "--program-admission"])
        .args(["--router", &fleet.router_url(), "--data"])
        .arg(data.path())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    // Rounds go on beyond the line that is logged when the first one ends the degraded state.
    let read = |requests: &[kvgate::demo::RecordedRequest]| requests.len() > 8;
    fleet.engine(0).wait_for(read).await;
    child.kill().unwrap();
    child.wait().unwrap();
}
