//! `kvgate check` on fleets with planted faults: each is named, with what to do about it.

use std::process::Output;

use kvgate::demo::{
    Behaviour, EngineSetup, EngineVersion, FakeFleet, FleetSpec, RouterKind, WorkerRow,
};
use serde_json::Value;

use super::commands::{run, stderr, stdout};

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

/// Runs a check while the fleet of the test goes on.
async fn check(arguments: Vec<String>) -> Output {
    let run = move || {
        let mut all = vec!["check"];
        all.extend(arguments.iter().map(String::as_str));
        run(&all)
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

async fn check_router(fleet: &FakeFleet, more: &[&str]) -> Output {
    let mut arguments = vec!["--router".to_owned(), fleet.router_url()];
    arguments.extend(more.iter().map(|text| (*text).to_owned()));
    check(arguments).await
}

fn found(output: &Output) -> Vec<Value> {
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What is to be mended: code and subject, in order.
fn mend(findings: &[Value]) -> Vec<(String, String)> {
    let mut mend: Vec<(String, String)> = of_weight(findings, "mend");
    mend.sort();
    mend
}

fn of_weight(findings: &[Value], weight: &str) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    findings
        .iter()
        .filter(|finding| finding["weight"] == weight)
        .map(|finding| (text(&finding["code"]), text(&finding["subject"])))
        .collect()
}

fn sorted(mut expected: Vec<(&str, String)>) -> Vec<(String, String)> {
    expected.sort();
    expected
        .into_iter()
        .map(|(code, subject)| (code.to_owned(), subject))
        .collect()
}

fn whole() -> EngineSetup {
    EngineSetup::with_pool(500_000)
}

/// Metrics off, no capacity reading, session cache off, session close absent in the version, a key that is
/// refused, and a router that drops `session_id`: all are named at once, each with what to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_five_planted_faults_and_what_to_do() {
    let spec = FleetSpec {
        engines: vec![
            whole(),
            EngineSetup {
                metrics: false,
                loads: false,
                ..whole()
            },
            whole(),
            EngineSetup {
                session_close: false,
                ..whole()
            },
            whole(),
            EngineSetup {
                api_key: Some("other".to_owned()),
                ..whole()
            },
        ],
        ..FleetSpec::uniform(0, 0)
    };
    let fleet = FakeFleet::start(spec).await.unwrap();
    fleet.router().set_kind(RouterKind::SglangRouter);
    let empty = fleet.engine(2);
    empty.behave("/v1/loads", Behaviour::Status(404, String::new()));
    empty.behave("/metrics", Behaviour::Raw(Vec::new()));
    let old = br#"{"version":"0.5.14"}"#.to_vec();
    fleet.engine(4).behave("/server_info", Behaviour::Raw(old));

    let planted = sorted(vec![
        ("engine_metrics_off", fleet.engine_url(1)),
        ("engine_no_capacity", fleet.engine_url(2)),
        ("engine_session_cache_off", fleet.engine_url(3)),
        ("engine_session_close_absent", fleet.engine_url(4)),
        ("engine_key_refused", fleet.engine_url(5)),
        ("router_drops_session_id", "router".to_owned()),
    ]);
    let output = check_router(&fleet, &["--session-lifecycle", "-o", "json"]).await;
    assert_eq!(code(&output), 1);
    let findings = found(&output);
    assert_eq!(mend(&findings), planted, "{findings:#?}");
    let advice: Vec<&str> = findings
        .iter()
        .filter(|finding| finding["weight"] == "mend")
        .map(|finding| finding["advice"].as_str().unwrap())
        .collect();
    for part in [
        "--enable-metrics",
        "max_total_num_tokens",
        "--enable-session-radix-cache",
        "SGLang 0.5.15",
        "--engine-key-file",
        "smg",
    ] {
        assert!(
            advice.iter().any(|text| text.contains(part)),
            "{part} in {advice:?}"
        );
    }

    let table = check_router(&fleet, &["--session-lifecycle"]).await;
    assert_eq!(code(&table), 1);
    assert_eq!(stderr(&table), "kvgate: 6 to mend; each says what to do\n");
    let text = stdout(&table);
    assert_eq!(
        text.lines()
            .filter(|line| line.starts_with("MEND "))
            .count(),
        6,
        "{text}"
    );
    let line = text
        .lines()
        .position(|line| line.contains("metrics off (404)"))
        .unwrap();
    let below = text.lines().nth(line + 1).unwrap();
    assert_eq!(
        below,
        "      start it with --enable-metrics, or use a version with /v1/loads"
    );

    // Without session closes what would spoil them is worth knowing only.
    let output = check_router(&fleet, &["-o", "json"]).await;
    let left = ["engine_metrics_off", "engine_no_capacity"];
    let codes: Vec<String> = mend(&found(&output))
        .into_iter()
        .map(|(code, _)| code)
        .collect();
    assert_eq!(codes, left);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_of_a_whole_fleet_ends_with_0() {
    let spec = FleetSpec {
        engines: vec![whole(), whole().of(EngineVersion::V0_5_15Post1)],
        ..FleetSpec::uniform(0, 0)
    };
    let fleet = FakeFleet::start(spec).await.unwrap();
    let output = check_router(&fleet, &["--session-lifecycle", "-o", "json"]).await;
    assert_eq!(code(&output), 0, "{}", stdout(&output));
    assert!(stderr(&output).is_empty());
    let findings = found(&output);
    assert!(mend(&findings).is_empty());
    assert!(
        of_weight(&findings, "ok")
            .iter()
            .any(|(code, _)| code == "router_lists")
    );
    let output = check_router(&fleet, &[]).await;
    assert_eq!(code(&output), 0);
    assert!(stdout(&output).contains("capacity 500000 tokens in 1 rank"));
}

/// An engine that is away, one that redirects, one that has `/v1/loads` and no `/metrics`, and one that the
/// router writes in two ways.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_what_else_a_fleet_may_have() {
    let spec = FleetSpec {
        engines: vec![
            whole(),
            whole(),
            EngineSetup {
                metrics: false,
                ..whole()
            },
            whole(),
        ],
        ..FleetSpec::uniform(0, 0)
    };
    let fleet = FakeFleet::start(spec).await.unwrap();
    fleet.engine(0).stop().await;
    let elsewhere = fleet.engine_url(3);
    fleet
        .engine(1)
        .behave("*", Behaviour::Redirect(elsewhere.clone()));
    let mut rows = fleet.router().rows();
    rows[0].healthy = false;
    rows.push(WorkerRow::new("w", &format!("{elsewhere}/")));
    rows.push(WorkerRow::new("v", "http://2001:db8::5:30000"));
    fleet.router().set_rows(rows);
    let named_twice = [
        "-o",
        "json",
        "--engine",
        &elsewhere,
        "--engine",
        &format!("{elsewhere}/"),
    ];
    let output = check_router(&fleet, &named_twice).await;
    assert_eq!(code(&output), 1);
    let findings = found(&output);
    let expected = sorted(vec![
        ("engine_unhealthy", fleet.engine_url(0)),
        ("engine_unreachable", fleet.engine_url(0)),
        ("engine_redirects", fleet.engine_url(1)),
        ("router_bad_entry", "router".to_owned()),
    ]);
    assert_eq!(mend(&findings), expected, "{findings:#?}");
    let notes = of_weight(&findings, "note");
    for expected in [
        ("engine_metrics_missing", fleet.engine_url(2)),
        ("engine_spelled_differently", elsewhere.clone()),
        ("engine_named_twice", elsewhere.clone()),
    ] {
        let expected = (expected.0.to_owned(), expected.1);
        assert!(notes.contains(&expected), "{expected:?} in {notes:?}");
    }
    assert_eq!(
        fleet
            .engine(3)
            .requests()
            .iter()
            .filter(|asked| asked.path == "/metrics")
            .count(),
        1
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_a_router_that_is_of_no_use() {
    let fleet = FakeFleet::start(FleetSpec::uniform(1, 500_000))
        .await
        .unwrap();
    let router = fleet.router();
    let only = async |fleet: &FakeFleet, more: &[&str]| {
        let mut all = vec!["-o", "json"];
        all.extend(more);
        let output = check_router(fleet, &all).await;
        assert_eq!(code(&output), 1, "{}", stdout(&output));
        let mut codes: Vec<String> = mend(&found(&output))
            .into_iter()
            .map(|(code, _)| code)
            .collect();
        assert_eq!(codes.len(), 1, "{codes:?}");
        (codes.remove(0), stdout(&output))
    };
    router.set_rows(Vec::new());
    assert_eq!(only(&fleet, &[]).await.0, "router_lists_nothing");
    router.unset_rows();

    router.set_api_key(Some("k"));
    let (code, text) = only(&fleet, &[]).await;
    assert_eq!(code, "router_key_refused");
    assert!(text.contains("give its key by --router-key-file"), "{text}");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "hidden\n").unwrap();
    let (code, text) = only(
        &fleet,
        &["--router-key-file", file.path().to_str().unwrap()],
    )
    .await;
    assert_eq!(code, "router_key_refused");
    assert!(
        text.contains("put the right one into the file") && !text.contains("hidden"),
        "{text}"
    );
    router.set_api_key(None);

    router.behave("*", Behaviour::Redirect(fleet.engine_url(0)));
    assert_eq!(only(&fleet, &[]).await.0, "router_redirects");
    router.behave("*", Behaviour::Raw(b"<html>".to_vec()));
    assert_eq!(only(&fleet, &[]).await.0, "router_unreadable");
    router.stop().await;
    assert_eq!(only(&fleet, &[]).await.0, "router_unreachable");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_names_engines_that_cannot_be_used() {
    let fleet = FakeFleet::start(FleetSpec::uniform(1, 500_000))
        .await
        .unwrap();
    let outside = check_router(&fleet, &["-o", "json", "--engine-network", "10.0.0.0/8"]).await;
    let expected = sorted(vec![("engine_outside_networks", fleet.engine_url(0))]);
    assert_eq!(mend(&found(&outside)), expected);
    assert!(fleet.requests(0).is_empty(), "it is not asked");

    // CLO10: a router in place of an engine.
    let router = fleet.router_url();
    let arguments = ["--session-lifecycle", "-o", "json", "--engine", &router];
    let output = check(arguments.iter().map(|text| (*text).to_owned()).collect()).await;
    assert_eq!(code(&output), 1);
    let codes: Vec<String> = mend(&found(&output))
        .into_iter()
        .map(|(code, _)| code)
        .collect();
    assert!(codes.contains(&"engine_is_router".to_owned()), "{codes:?}");

    let output = check(Vec::new()).await;
    assert_eq!(code(&output), 1);
    assert!(stdout(&output).contains("neither a router nor an engine is configured"));
    assert!(stdout(&output).contains("--engine"));
}
