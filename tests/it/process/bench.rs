//! `kvgate bench` on the real binary: what callers and services count adds up, and nothing is left behind.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use super::fleet;
use crate::support::process::{Kvgate, binary, command};

const SCENARIOS: [&str; 6] = [
    "open",
    "contended",
    "renewals",
    "closes",
    "batch",
    "arrivals",
];

/// A short run of these flags, with its files in `data`.
fn bench(data: &Path, rounds: &str, flags: &[&str]) -> Output {
    let short = ["--seconds", "0.1", "--connections", "4", "--rounds", rounds];
    let small = ["--slots", "2", "--batch", "5", "--rate", "100"];
    let mut bench = command(&["bench"]);
    bench.args(short).args(small).arg("--data").arg(data);
    bench.args(flags).output().unwrap()
}

/// The objects of a run that went well.
fn lines(output: &Output) -> Vec<Value> {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?} {errors}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn sum<'a>(figures: impl IntoIterator<Item = &'a Value>, field: &str) -> u64 {
    let figures = figures.into_iter();
    figures.map(|one| one[field].as_u64().unwrap()).sum()
}

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

/// Leases that are held make way for no more pairs than fit: none is given back before half of its time.
#[test]
fn leases_are_held_for_a_time() {
    let data = tempfile::tempdir().unwrap();
    let flags = ["--json", "--scenario", "contended", "--hold-ms", "100"];
    let lines = lines(&bench(data.path(), "1", &flags));
    let one = &lines[1];
    assert_eq!((&one["slots"], &one["hold_ms"]), (&2.into(), &100.0.into()));
    let slots_of_time = 2.0 * one["seconds"].as_f64().unwrap() / 0.05;
    let pairs = one["pairs"].as_f64().unwrap();
    assert!(pairs >= 2.0 && pairs <= slots_of_time, "{one}");
}

/// Every scenario over both transports: each lease that a caller got is one that the service granted, all
/// come back, and nothing stays on the disk.
#[test]
fn every_scenario_adds_up() {
    let data = tempfile::tempdir().unwrap();
    let scenarios = SCENARIOS.join(",");
    let flags = ["--json", "--transport", "both", "--scenario", &scenarios];
    let lines = lines(&bench(data.path(), "1", &flags));
    let [first, figures @ .., last] = lines.as_slice() else {
        panic!("{lines:?}");
    };
    let machine = &first["machine"];
    for field in [
        "cores",
        "fdatasync_p50_ms",
        "fdatasync_per_s",
        "redb_commit_p50_ms",
    ] {
        assert!(
            machine[field].as_f64().unwrap() > 0.0,
            "{field} in {machine}"
        );
    }
    assert!(machine["quiet"].is_boolean() && machine["load"].is_number());

    // Bare handlers know nothing but pairs.
    let mut wanted = BTreeSet::new();
    for transport in ["tcp", "unix"] {
        wanted.extend(SCENARIOS.map(|scenario| ("kvgate", transport, scenario)));
        wanted.extend(["open", "arrivals"].map(|scenario| ("axum", transport, scenario)));
    }
    let word = |one: &Value, field: &str| one[field].as_str().unwrap().to_owned();
    let made: Vec<_> = figures
        .iter()
        .map(|one| {
            (
                word(one, "system"),
                word(one, "transport"),
                word(one, "scenario"),
            )
        })
        .collect();
    let distinct: BTreeSet<_> = made
        .iter()
        .map(|(system, transport, scenario)| {
            (system.as_str(), transport.as_str(), scenario.as_str())
        })
        .collect();
    assert_eq!((distinct, made.len()), (wanted.clone(), wanted.len()));

    for one in figures {
        assert_eq!((&one["connections"], &one["round"]), (&4.into(), &1.into()));
        assert!(one["pairs"].as_u64().unwrap() > 0, "{one}");
        assert_eq!(one["refused"], 0, "{one}");
        assert_eq!(one["bypassed"], 0, "{one}");
        assert!(one["rss_bytes"].as_u64().unwrap() > 0, "{one}");
        let is_renewal = one["scenario"] == "renewals";
        for (field, is_there) in [
            ("acquire_ms", !is_renewal),
            ("release_ms", !is_renewal),
            ("act_ms", is_renewal || one["scenario"] == "closes"),
            ("start_lag_ms", one["scenario"] == "arrivals"),
            ("commits_per_s", one["system"] == "kvgate"),
        ] {
            assert_eq!(!one[field].is_null(), is_there, "{field} in {one}");
        }
        if let Some(acquire) = one["acquire_ms"].as_object() {
            let quantile = |name: &str| acquire[name].as_f64().unwrap();
            assert!(quantile("p50") <= quantile("p99") && quantile("p99") <= quantile("p999"));
        }
    }
    // Two of four callers wait at any time.
    let contended = figures.iter().filter(|one| one["scenario"] == "contended");
    for one in contended {
        assert!(one["grant_ms"]["p50"].as_f64().unwrap() > 0.0, "{one}");
    }
    let arrivals = figures.iter().filter(|one| one["scenario"] == "arrivals");
    for one in arrivals {
        assert_eq!(sum([one], "pairs") + sum([one], "not_begun"), 10, "{one}");
    }

    let proof = &last["proof"];
    let own = || figures.iter().filter(|one| one["system"] == "kvgate");
    let pairs = sum(own().filter(|one| one["scenario"] != "renewals"), "pairs");
    // Each of the four callers holds one lease through the renewals over each transport.
    assert_eq!(proof["granted_by_service"], pairs + 8);
    assert_eq!(proof["granted_by_callers"], pairs + 8);
    assert_eq!(proof["released_by_service"], pairs + 8);
    assert_eq!(proof["released_by_callers"], pairs + 8);
    assert_eq!(proof["reserved_tokens"], 0);
    assert!(is_empty(data.path()));
}

/// A table for people, with the share of bare handlers.
#[test]
fn people_get_medians() {
    let data = tempfile::tempdir().unwrap();
    let output = bench(data.path(), "2", &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(
        text.starts_with("quiet: ") || text.starts_with("noisy: "),
        "{text}"
    );
    for part in [
        "syncs/s",
        "one row",
        "\nopen\n",
        "share of it",
        "nothing is reserved",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let rows = text.lines().filter(|line| line.starts_with("tcp "));
    assert_eq!(rows.count(), 1, "{text}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("round 2 of 2: axum tcp open with 4"));
}

/// A service that runs already is driven over its port and over its socket, and counts the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_service_is_driven() {
    let fleet = fleet().await;
    let folder = tempfile::tempdir().unwrap();
    let (data, files) = (folder.path().join("data"), folder.path().join("files"));
    fs::create_dir(&files).unwrap();
    let socket = folder.path().join("gate.sock");
    let listen = format!("unix:{}", socket.display());
    let engines = [fleet.engine_url(0), fleet.engine_url(1)];
    let gate = Kvgate::serve(
        &data,
        &[
            "--program-admission",
            "--listen",
            &listen,
            "--engine",
            &engines[0],
            "--engine",
            &engines[1],
        ],
    );
    let (url, pid) = (gate.url("/"), gate.pid().to_string());
    let common = [
        "--json",
        "--systems",
        "kvgate",
        "--scenario",
        "open,contended",
    ];
    let mut pairs = 0;
    for (place, transport) in [
        (["--url", &url, "--pid", &pid].as_slice(), "tcp"),
        (&["--socket", socket.to_str().unwrap()], "unix"),
    ] {
        let output = bench(&files, "1", &[&common, place].concat());
        let lines = lines(&output);
        let [_, open, contended] = lines.as_slice() else {
            panic!("a proof counts services of its own only: {lines:?}");
        };
        for one in [open, contended] {
            assert_eq!(one["transport"], transport);
            assert_eq!(one["rss_bytes"].is_null(), transport == "unix", "{one}");
            assert!(one["commits_per_s"].as_f64().unwrap() > 0.0, "{one}");
        }
        pairs += sum([open, contended], "pairs");
    }
    let state = gate.get("/v1/state").await;
    assert_eq!(
        (&state["budget"]["reserved"], &state["leases"]["count"]),
        (&0.into(), &0.into())
    );
    // A restart ends with everything written down.
    assert!(gate.terminate().success());
    let gate = Kvgate::serve(&data, &[]);
    let metrics = gate.http.get(gate.url("/metrics")).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    let released = format!("kvgate_leases_ended_total{{how=\"released\"}} {pairs}\n");
    assert!(metrics.contains(&released), "{released}{metrics}");
    assert!(is_empty(&files));
}

/// What cannot be meant is refused, with what to do instead; nothing is started.
#[test]
fn bad_flags_are_refused() {
    let data = tempfile::tempdir().unwrap();
    for (flags, says) in [
        (
            &["--connections", "0"][..],
            "connections must be 1 to 20000",
        ),
        (&["--seconds", "0"], "seconds must be 0.05 to 3600"),
        (&["--seconds", "nan"], "seconds must be 0.05 to 3600"),
        (&["--rounds", "0"], "rounds must be 1 to 1000"),
        (&["--rate", "0"], "rate must be 1 to 1000000"),
        (&["--batch", "1001"], "batch must be 1 to 1000"),
        (
            &["--scenario", "batch", "--connections", "500"],
            "a smaller --batch",
        ),
        (&["--slots", "0"], "slots must be 1 to 20000"),
        (&["--hold-ms", "60001"], "hold-ms must be 0 to 60000"),
        (&["--threads", "65"], "threads must be 1 to 64"),
        (&["--wait-s", "61"], "wait-s must be 0 to 60"),
        (&["--id-chars", "36"], "such as 36,17"),
        (&["--id-chars", "19,17"], "20 to 512"),
        (&["--id-chars", "36,513"], "16 to 512"),
        (
            &["--scenario", "closed"],
            "possible values: open, contended",
        ),
        (
            &["--url", "https://127.0.0.1:1"],
            "url must be http://HOST:PORT",
        ),
        (&["--url", "127.0.0.1:1"], "url must be http://HOST:PORT"),
        (
            &["--url", "http://me:hidden@127.0.0.1:1"],
            "url must be http://HOST:PORT",
        ),
        (&["--url", "http://192.0.2.1:7070"], "say --any-address"),
        (&["--url", "http://gate.example:7070"], "say --any-address"),
        (&["--url", "http://[2001:db8::1]:7070"], "say --any-address"),
        (&["--any-address"], "--url"),
        (
            &["--url", "http://127.0.0.1:1", "--socket", "s"],
            "cannot be used with",
        ),
        (
            &["--socket", "s", "--", "--max-waiting", "5"],
            "cannot be used with",
        ),
    ] {
        let mut bench = command(&["bench", "--data"]);
        let output = bench.arg(data.path()).args(flags).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {errors}");
        assert!(errors.contains(says), "{flags:?}: {errors}");
        assert!(!errors.contains("hidden"), "{errors}");
        assert!(
            output.stdout.is_empty() && is_empty(data.path()),
            "{flags:?}"
        );
    }
}

/// Another build is measured in turn with this one, and counts in the proof.
#[test]
fn another_build_is_measured_beside_this_one() {
    let data = tempfile::tempdir().unwrap();
    let other = binary();
    let flags = [
        "--json",
        "--systems",
        "kvgate",
        "--scenario",
        "open,closes",
        "--against",
    ];
    let lines = lines(&bench(
        data.path(),
        "2",
        &[&flags[..], &[other.to_str().unwrap()]].concat(),
    ));
    let [_, figures @ .., last] = lines.as_slice() else {
        panic!("{lines:?}");
    };
    let order: Vec<_> = figures
        .iter()
        .map(|one| one["system"].as_str().unwrap())
        .collect();
    assert_eq!(order.len(), 8);
    assert_eq!((order[0], order[1]), ("against", "kvgate"));
    assert_eq!((order[4], order[5]), ("kvgate", "against"));
    assert_eq!(last["proof"]["granted_by_service"], sum(figures, "pairs"));
    assert_eq!(last["proof"]["reserved_tokens"], 0);
    assert!(is_empty(data.path()));
}

/// A service that asks for tokens is driven with one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_with_tokens_is_driven_with_one() {
    let fleet = fleet().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens");
    fs::write(&file, "load:client:a-token-for-the-load\n").unwrap();
    let gate = Kvgate::serve(
        &folder.path().join("data"),
        &[
            "--program-admission",
            "--engine",
            &fleet.engine_url(0),
            "--token-file",
            file.to_str().unwrap(),
        ],
    );
    let files = tempfile::tempdir().unwrap();
    let url = gate.url("");
    let refused = bench(files.path(), "1", &["--url", &url]);
    assert_eq!(refused.status.code(), Some(69));
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(
        errors.contains("401") && errors.contains("--token-file"),
        "{errors}"
    );
    let token = [
        "--token-file",
        file.to_str().unwrap(),
        "--token-name",
        "load",
    ];
    let driven = bench(
        files.path(),
        "1",
        &[&["--json", "--url", &url], &token[..]].concat(),
    );
    for one in lines(&driven).iter().skip(1) {
        assert_eq!(one["refused"], 0, "{one}");
        assert!(one["pairs"].as_u64().unwrap() > 0, "{one}");
    }
    assert!(is_empty(files.path()));
}

/// No service, a flag that the service refuses, and a folder that is not there.
#[test]
fn what_cannot_be_started_or_reached_is_told() {
    let data = tempfile::tempdir().unwrap();
    let socket = data.path().join("nobody.sock");
    let socket = socket.to_str().unwrap();
    let unreached = bench(data.path(), "1", &["--socket", socket]);
    assert_eq!(unreached.status.code(), Some(69));
    assert!(String::from_utf8_lossy(&unreached.stderr).contains("nobody.sock"));
    let refused = bench(data.path(), "1", &["--", "--no-such-setting"]);
    assert_eq!(refused.status.code(), Some(74));
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert!(
        errors.contains("did not start") && errors.contains("no-such-setting"),
        "{errors}"
    );
    assert!(is_empty(data.path()));
    let nowhere = bench(&data.path().join("nowhere"), "1", &[]);
    assert_eq!(nowhere.status.code(), Some(74));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("--data"));
}

/// A signal ends the run, its servers and its files, whenever it comes.
#[test]
fn an_interrupt_leaves_nothing_behind() {
    for (signal, is_early) in [("INT", false), ("TERM", true), ("HUP", false)] {
        let data = tempfile::tempdir().unwrap();
        let mut child = command(&["bench", "--json", "--seconds", "60", "--connections", "2"])
            .args(["--scenario", "open,contended", "--data"])
            .arg(data.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id();
        let mut servers = Vec::new();
        if is_early {
            wait_until(&mut child, || !is_empty(data.path()));
        } else {
            // The servers are started one after the other, and the callers come last.
            wait_until(&mut child, || {
                servers = children(pid);
                servers.len() == 2 && has_callers(pid)
            });
        }
        let sent = Command::new("kill")
            .args([format!("-{signal}"), pid.to_string()])
            .status();
        assert!(sent.unwrap().success());
        let output = child.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{signal}: {errors}");
        assert!(errors.contains("interrupted"), "{errors}");
        for server in servers {
            assert!(!Path::new(&format!("/proc/{server}")).exists(), "{signal}");
        }
        assert!(is_empty(data.path()), "{signal}");
    }
}

/// Looks until it is so, as long as the child runs.
fn wait_until(child: &mut Child, mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        assert!(child.try_wait().unwrap().is_none(), "the run has ended");
        std::thread::yield_now();
    }
}

fn has_callers(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let mut names = threads.map(|task| fs::read_to_string(task.unwrap().path().join("comm")));
    names.any(|name| name.is_ok_and(|name| name == "load\n"))
}

fn children(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        // A thread may be gone by now.
        let children = fs::read_to_string(task.unwrap().path().join("children"));
        let children = children.unwrap_or_default();
        let children = children.split_whitespace().map(|pid| pid.parse::<u32>());
        found.extend(children.map(Result::unwrap));
    }
    found
}
