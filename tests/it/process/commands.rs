//! The command line: what each command prints and how it ends.

use std::fs;
use std::process::Output;

use serde_json::Value;

use super::fleet;
use crate::support::process::{Kvgate, command};

pub(super) fn run(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

pub(super) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

pub(super) fn stdout(output: &Output) -> String {
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
        &["queue", "--limit", "0"],
        &["queue", "--limit", "1001"],
        &["queue", "--all", "--limit", "5"],
        &["completions", "no-such-shell"],
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

/// Names that are mistyped are refused with the nearest, wherever they stand, and no password is shown.
#[test]
fn a_mistyped_name_is_refused_with_the_nearest() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvgate.toml");
    fs::write(&file, "admission_headrom = 0.5\n").unwrap();
    let in_file = run(&[
        "serve",
        "--print-config",
        "--config",
        file.to_str().unwrap(),
    ]);
    let flag = run(&["serve", "--print-config", "--admission-headrom", "0.5"]);
    let mut command = command(&["serve", "--print-config"]);
    let variable = command
        .env("KVGATE_ADMISSION_HEADROM", "0.5")
        .output()
        .unwrap();
    for (output, nearest) in [
        (in_file, "\"admission_headroom\""),
        (flag, "--admission-headroom"),
        (variable, "KVGATE_ADMISSION_HEADROOM"),
    ] {
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains(nearest), "{}", stderr(&output));
        assert!(stdout(&output).is_empty());
    }
    // A password in an address would be shown wherever the address is.
    let hidden = run(&[
        "serve",
        "--print-config",
        "--router",
        "http://me:hidden@127.0.0.1:1",
    ]);
    assert_eq!(hidden.status.code(), Some(2));
    assert!(
        stderr(&hidden).contains("--router-key-file"),
        "{}",
        stderr(&hidden)
    );
    assert!(!stderr(&hidden).contains("hidden@") && stdout(&hidden).is_empty());
}

/// Every command of the contract is there, and says what it takes, gives back and needs.
#[test]
fn every_command_says_how_it_is_used() {
    let overview = stdout(&run(&["--help"]));
    for part in [
        "Exit codes:",
        "69  cannot listen, or no service answers",
        "NO_COLOR",
    ] {
        assert!(overview.contains(part), "{part} in\n{overview}");
    }
    for command in [
        "serve",
        "demo",
        "bench",
        "check",
        "state",
        "queue",
        "leases",
        "closes",
        "steps",
        "settings",
        "audit",
        "store",
        "openapi",
        "completions",
    ] {
        assert!(
            overview.contains(&format!("\n  {command} ")),
            "{command} in\n{overview}"
        );
        assert!(run(&[command, "--help"]).status.success(), "{command}");
    }
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/CLI.md")).unwrap();
    let commands = overview.split_once("Commands:").unwrap().1;
    let commands = commands.split_once("Options:").unwrap().0;
    let named = commands.lines().filter_map(|line| line.strip_prefix("  "));
    for command in named.filter_map(|line| line.split_once("  ")?.0.split(' ').next()) {
        let known = command.is_empty() || command == "help";
        assert!(
            known || page.contains(&format!("`kvgate {command}`")),
            "{command} in docs/CLI.md"
        );
    }
    for asking in [
        &["state"][..],
        &["queue"],
        &["leases"],
        &["leases", "revoke"],
        &["closes"],
        &["closes", "retry"],
        &["steps"],
        &["steps", "current"],
        &["settings"],
        &["settings", "set"],
        &["settings", "reset"],
        &["audit"],
    ] {
        let mut arguments = asking.to_vec();
        arguments.push("--help");
        let help = stdout(&run(&arguments));
        let parts = [
            "--url <URL>",
            "KVGATE_URL",
            "--token-file <FILE>",
            "--token-name",
            "--output",
            "Exit codes:",
        ];
        for part in parts {
            assert!(help.contains(part), "{part} in {asking:?}\n{help}");
        }
    }
    let serve = stdout(&run(&["serve", "--help"]));
    // The help is fitted to the terminal.
    let serve = serve.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "Examples:",
        "[default: 0.9]",
        "KVGATE_ADMISSION_HEADROOM",
        "--agentic-admission-headroom",
    ] {
        assert!(serve.contains(part), "{part} in\n{serve}");
    }
}

#[test]
fn completions_know_commands_and_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(&["completions", shell]);
        assert!(output.status.success(), "{shell}");
        let script = stdout(&output);
        for word in [
            "admission-headroom",
            "agentic-admission-headroom",
            "revoke",
            "token-file",
        ] {
            assert!(script.contains(word), "{word} for {shell}");
        }
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
