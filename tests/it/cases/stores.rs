//! Cases of the store file: in use, not a store, and files that only grow.

use std::fs;
use std::path::Path;

use kvgate::store::FILE_NAME;
use kvgate_core::command::Command;
use kvgate_core::store::StoreControl;
use kvgate_core::units::{Span, Timestamp};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Books, acquire, fleet};
use crate::support::app::{SOON, parse_raw, post_bytes};
use crate::support::process::{Kvgate, command};

const WAITS: usize = 500;

/// How a start that must not come up ended: the code and the one line that says why.
fn refused(data: &Path, code: i32) -> String {
    let (status, said) = Kvgate::try_serve(data, &[]).err().unwrap();
    assert_eq!(status, Some(code), "{said}");
    let mut reasons = said.lines().filter(|line| line.contains(FILE_NAME));
    let reason = reasons
        .next()
        .unwrap_or_else(|| panic!("no file named in {said}"));
    assert_eq!(reasons.next(), None, "one line says it: {said}");
    reason.to_owned()
}

/// D02: a second start names the file and ends with 75 without a byte changed. After a SIGTERM with 500 open
/// waits a supervisor's next starts end with 75 until the first has drained, then come up, with all places.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d02_a_second_process_on_the_same_store() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let router = fleet.router_url();
    let arguments = [
        "--router",
        &router,
        "--program-admission",
        "--claim-grace-s",
        "60",
    ];
    let first = Kvgate::serve(data.path(), &arguments);
    assert_eq!(first.acquire("base", 900_000).await.action(), "admit");
    // The first writes nothing while it stands still, and keeps its lock.
    first.stand_still();
    let before = fs::read(data.path().join(FILE_NAME)).unwrap();
    let reason = refused(data.path(), 75);
    assert!(reason.contains("in use"), "{reason}");
    assert!(
        fs::read(data.path().join(FILE_NAME)).unwrap() == before,
        "the file was touched"
    );
    first.signal("CONT");

    let mut calls = Vec::new();
    for number in 0..WAITS {
        let mut call = TcpStream::connect(first.address()).await.unwrap();
        let ask = json!({"ticket_id": format!("w-{number}"), "session_id": "s", "reservation_tokens": 1, "wait_s": 60});
        call.write_all(&post_bytes("/v1/leases", &ask))
            .await
            .unwrap();
        calls.push(call);
    }
    while first.get("/v1/state").await["queue"]["waiting"] != WAITS {}
    let line = |rows: Vec<serde_json::Value>| -> Vec<String> {
        rows.iter()
            .map(|row| row["ticket_id"].to_string())
            .collect()
    };
    let places = line(first.list("/v1/queue").await);

    first.signal("TERM");
    let path = data.path().to_owned();
    let router = router.clone();
    let next = tokio::task::spawn_blocking(move || {
        let arguments = [
            "--router",
            &router,
            "--program-admission",
            "--claim-grace-s",
            "60",
        ];
        loop {
            match Kvgate::try_serve(&path, &arguments) {
                Ok(next) => return next,
                Err((code, said)) => assert_eq!(code, Some(75), "{said}"),
            }
        }
    });
    for mut call in calls {
        let mut bytes = Vec::new();
        tokio::time::timeout(SOON, call.read_to_end(&mut bytes))
            .await
            .expect("a waiting call was left open")
            .unwrap();
        parse_raw(&bytes).is_problem(503, "draining");
    }
    let next = next.await.unwrap();
    let ended = tokio::task::spawn_blocking(move || first.ended());
    assert!(ended.await.unwrap().success());
    assert_eq!(line(next.list("/v1/queue").await), places);
    assert_eq!(next.get("/v1/state").await["budget"]["reserved"], 900_000);
}

/// D04: a text file where the store should be, and as the data directory itself: refused in one line, and
/// nothing in the directory is touched or made.
#[test]
fn d04_a_file_that_is_not_a_store() {
    let notes = "run 12: lr 1e-6, kl 0.02\nrun 13: lr 5e-7\n";
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join(FILE_NAME);
    fs::write(&file, notes).unwrap();
    let written = fs::metadata(&file).unwrap().modified().unwrap();
    let reason = refused(directory.path(), 65);
    assert!(reason.contains("not a kvgate store"), "{reason}");

    let elsewhere = tempfile::tempdir().unwrap();
    let wrong = elsewhere.path().join("notes.txt");
    fs::write(&wrong, notes).unwrap();
    let output = command(&[
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--data",
        wrong.to_str().unwrap(),
    ])
    .output()
    .unwrap();
    assert_eq!(output.status.code(), Some(74));
    for (directory, file) in [(&directory, &file), (&elsewhere, &wrong)] {
        assert_eq!(fs::read_to_string(file).unwrap(), notes);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
    assert_eq!(fs::metadata(&file).unwrap().modified().unwrap(), written);
}

/// D04: 100,000 acquires and releases with 100 leases alive: once finished tickets are as old as they get,
/// the file grows no more, since their space is used again.
#[test]
fn d04_the_file_stays_bounded() {
    const ALIVE: u64 = 100;
    const TURNS: u64 = 1_000;
    let directory = tempfile::tempdir().unwrap();
    let mut books = Books::create(directory.path(), Timestamp::from_millis(1_700_000_000_000));
    let mut held = Vec::new();
    let mut half = 0;
    for turn in 0..TURNS {
        books.now = books.now.after(Span::from_secs(2));
        let mut commands: Vec<Command> = held.drain(..).map(Command::Release).collect();
        commands.extend((0..ALIVE).map(|n| acquire(&format!("rollout-17/step-{turn}/{n}"), 1_000)));
        held = books.turn(commands);
        assert_eq!(held.len() as u64, ALIVE);
        // Half of the way every finished ticket has made room for a later one at least once.
        if turn == TURNS / 2 {
            half = books.store.bytes();
        }
    }
    let end = books.store.bytes();
    assert_eq!(
        end,
        fs::metadata(directory.path().join(FILE_NAME))
            .unwrap()
            .len()
    );
    assert!(end <= half, "it grew from {half} to {end}");
    assert!(end < 32 << 20, "{end}");
}
