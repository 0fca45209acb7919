//! `kvgate store` and `GET /v1/backup` on the real binary (ID2, DUR2, DUR5).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use kvgate::store::{FILE_NAME, FsDisk, OfflineError, OpenError, look, write_new};
use kvgate_core::close::CloseStage;
use kvgate_core::ids::SessionId;
use kvgate_core::store::Image;
use kvgate_core::units::Timestamp;
use serde_json::{Value, json};

use super::fleet;
use crate::durable::close;
use crate::support::process::{Kvgate, command};

/// Runs `kvgate store` on a data directory.
fn store(arguments: &[&str], data: &Path) -> Output {
    command(&["store"])
        .args(arguments)
        .arg("--data")
        .arg(data)
        .output()
        .unwrap()
}

/// Stdout of a command that must succeed.
fn done(arguments: &[&str], data: &Path) -> Vec<u8> {
    let output = store(arguments, data);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
    assert!(output.stderr.is_empty(), "{arguments:?}: {output:?}");
    output.stdout
}

/// The one line on stderr of a command that must end with this code.
fn refused(arguments: &[&str], data: &Path, code: i32) -> String {
    let output = store(arguments, data);
    assert_eq!(
        output.status.code(),
        Some(code),
        "{arguments:?}: {output:?}"
    );
    assert!(output.stdout.is_empty(), "{arguments:?}: {output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

fn inspected(data: &Path) -> Value {
    serde_json::from_slice(&done(&["inspect", "-o", "json"], data)).unwrap()
}

fn serve(data: &Path, router: &str) -> Kvgate {
    let more = ["--claim-grace-s", "60", "--admission-max-wait-s", "600"];
    let mut arguments = vec!["--program-admission", "--router", router];
    arguments.extend(more);
    Kvgate::serve(data, &arguments)
}

async fn backup_of(gate: &Kvgate) -> Vec<u8> {
    let answer = gate.http.get(gate.url("/v1/backup")).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let header = |name: &str| answer.headers()[name].to_str().unwrap().to_owned();
    assert_eq!(header("content-type"), "application/x-ndjson");
    let name = header("content-disposition");
    assert!(
        name.starts_with("attachment; filename=\"kvgate-2"),
        "{name}"
    );
    assert!(
        name.ends_with("Z.ndjson\"") && !name.contains(':'),
        "{name}"
    );
    answer.bytes().await.unwrap().to_vec()
}

async fn release(gate: &Kvgate, lease: &str) -> u16 {
    let path = format!("/v1/leases/{lease}/release");
    gate.post(&path, &json!({})).await.status
}

fn names(items: &[Value]) -> Vec<&str> {
    items
        .iter()
        .map(|item| item["ticket_id"].as_str().unwrap())
        .collect()
}

/// A store with a lease, a waiter and ended tickets, stopped in order.
async fn used() -> tempfile::TempDir {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let gate = serve(data.path(), &fleet.router_url());
    assert_eq!(gate.acquire("held-ticket", 600_000).await.action(), "admit");
    assert_eq!(gate.acquire("waits", 500_000).await.action(), "wait");
    assert_eq!(gate.delete("/v1/tickets/bare").await.status, 200);
    assert!(gate.terminate().success());
    data
}

fn file(data: &Path) -> PathBuf {
    data.join(FILE_NAME)
}

/// ID2, DUR2, DUR6: a store made from a backup holds the leases and the queue of that moment; what is
/// answered from then on has lease ids, a seq and an epoch that were never answered before; a lease of
/// the life after the backup hits no other one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restored_backup_repeats_nothing() {
    let fleet = fleet().await;
    let router = fleet.router_url();
    let old = tempfile::tempdir().unwrap();
    let gate = serve(old.path(), &router);
    let held = gate.acquire("held", 600_000).await;
    assert_eq!(held.action(), "admit");
    assert_eq!(gate.acquire("waits", 500_000).await.action(), "wait");
    let backup = backup_of(&gate).await;

    // Life goes on: one more lease of this start, and one of a start that the backup never saw.
    assert_eq!(gate.delete("/v1/tickets/waits").await.status, 200);
    let same_start = gate.acquire("later", 1_000).await;
    let epoch = gate.get("/v1/state").await["epoch"].as_u64().unwrap();
    assert!(gate.terminate().success());
    let gate = serve(old.path(), &router);
    let next_start = gate.acquire("last", 1_000).await;
    let last_seq = next_start.seq.unwrap();
    assert!(gate.terminate().success());

    let new = tempfile::tempdir().unwrap();
    let copy = new.path().join("copy.ndjson");
    fs::write(&copy, &backup).unwrap();
    let data = new.path().join("data");
    let said = done(&["restore", copy.to_str().unwrap()], &data);
    let said = String::from_utf8(said).unwrap();
    assert!(
        said.contains("holds 1 leases of 600000 tokens and 1 waiting"),
        "{said}"
    );
    let found = inspected(&data);
    assert_eq!(found["clean"], true);
    assert!(found["seq"].as_u64().unwrap() > last_seq);

    let gate = serve(&data, &router);
    let leases = gate.list("/v1/leases").await;
    assert_eq!(names(&leases), ["held"]);
    assert_eq!(leases[0]["lease_id"], held.lease());
    assert_eq!(names(&gate.list("/v1/queue").await), ["waits"]);
    let state = gate.get("/v1/state").await;
    assert!(state["epoch"].as_u64().unwrap() > epoch);
    assert_eq!(state["budget"]["reserved"], 600_000);
    let epochs = gate.list("/v1/epochs").await;
    assert_eq!(epochs[0]["cause"], "restored");

    for after_the_backup in [&same_start, &next_start] {
        let status = release(&gate, &after_the_backup.lease()).await;
        assert!(status == 404 || status == 410, "{status}");
    }
    assert_eq!(gate.delete("/v1/tickets/waits").await.status, 200);
    let fresh = gate.acquire("later", 1_000).await;
    assert_eq!(fresh.action(), "admit");
    assert!(fresh.seq.unwrap() > last_seq);
    let before = [held.lease(), same_start.lease(), next_start.lease()];
    assert!(!before.contains(&fresh.lease()));
    // The releases above hit nobody, and the id of before still names its own lease.
    assert_eq!(release(&gate, &held.lease()).await, 200);
    assert_eq!(names(&gate.list("/v1/leases").await), ["later"]);
    assert!(gate.terminate().success());

    // A copy is never restored over a store.
    let before = fs::read(file(&data)).unwrap();
    let said = refused(&["restore", copy.to_str().unwrap()], &data, 2);
    assert!(said.contains("never writes over a store"), "{said}");
    assert_eq!(fs::read(file(&data)).unwrap(), before);
}

/// DUR2: a backup that is taken while callers come and go is the picture of one moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_under_load_is_one_moment() {
    let fleet = fleet().await;
    let data = tempfile::tempdir().unwrap();
    let gate = serve(data.path(), &fleet.router_url());
    let busy = async {
        for number in 0..200 {
            let held = gate.acquire(&format!("t-{number}"), 1_000).await;
            assert_eq!(release(&gate, &held.lease()).await, 200);
        }
    };
    let copies = async {
        let mut copies = Vec::new();
        for _ in 0..10 {
            copies.push(backup_of(&gate).await);
        }
        copies
    };
    let ((), copies) = tokio::join!(busy, copies);
    for copy in copies {
        let image = kvgate::store::read_copy(&copy[..]).unwrap();
        let last = image
            .tickets
            .iter()
            .filter_map(|ticket| ticket.issue())
            .max();
        let issued = image.next_issue - 1;
        assert_eq!(
            last.map_or(0, |issue| issue.0),
            issued,
            "no grant is missing"
        );
        assert!(image.tally.scopes[0].admit >= issued.saturating_sub(1));
    }
}

/// DUR5: looking at a store, checking and copying it leave its bytes as they are, after an orderly
/// stop and after a kill alike.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn looks_leave_the_store_as_it_is() {
    let fleet = fleet().await;
    let data = used().await;
    for killed in [false, true] {
        if killed {
            serve(data.path(), &fleet.router_url()).kill();
        }
        let before = fs::read(file(data.path())).unwrap();
        let found = inspected(data.path());
        assert_eq!(found["clean"], !killed);
        assert_eq!(
            (&found["leases"], &found["reserved_tokens"]),
            (&json!(1), &json!(600_000))
        );
        assert_eq!((&found["waiting"], &found["ended"]), (&json!(1), &json!(1)));
        assert_eq!(found["bytes"], before.len());
        assert!(found["oldest_lease_at"].as_str().unwrap().ends_with('Z'));
        let table = String::from_utf8(done(&["inspect"], data.path())).unwrap();
        assert!(
            table.contains("leases        1 of 600000 tokens\n"),
            "{table}"
        );
        let verified = String::from_utf8(done(&["verify"], data.path())).unwrap();
        assert!(verified.contains("is whole: 1 leases of 600000 tokens, 1 waiting"));
        let copies = tempfile::tempdir().unwrap();
        let copy = copies.path().join("copy.ndjson");
        done(&["backup", copy.to_str().unwrap()], data.path());
        let written = fs::read(&copy).unwrap();
        assert_eq!(done(&["backup"], data.path()), written);
        assert_eq!(done(&["backup", "-"], data.path()), written);
        let image = kvgate::store::read_copy(&written[..]).unwrap();
        assert_eq!(image, look(data.path()).unwrap().into_image());
        let said = refused(&["backup", copy.to_str().unwrap()], data.path(), 2);
        assert!(said.contains("never writes over a file"), "{said}");
        assert_eq!(
            fs::read(&copy).unwrap(),
            written,
            "a file that exists stays"
        );
        assert_eq!(fs::read_dir(copies.path()).unwrap().count(), 1);
        assert_eq!(fs::read(file(data.path())).unwrap(), before);
    }
}

/// CLO2, DUR2: the figures of a store tell its closes, open, finished and failed, and its sessions; a
/// store whose closes contradict each other is not whole.
#[test]
fn the_closes_of_a_store_are_told() {
    let at = Timestamp::from_millis(5_000);
    let finished = |number, failed: bool| {
        let mut close = close(number, CloseStage::Done { at });
        if !failed {
            close.targets.clear();
            close.counts = [8, 0, 0, 0, 0, 0, 0];
        }
        close
    };
    let mut image = Image {
        term: 1,
        now: at,
        next_issue: 1,
        closes: vec![
            finished(1, true),
            finished(2, false),
            close(3, CloseStage::Joining { ready_since: None }),
        ],
        ..Image::default()
    };
    let idle = SessionId::new("idle").unwrap();
    image.sessions = vec![(image.closes[1].session.clone(), at), (idle, at)];
    let data = tempfile::tempdir().unwrap();
    write_new(&FsDisk::new(data.path()), &image).unwrap();
    let found = inspected(data.path());
    let counts = [
        "closes_open",
        "closes_finished",
        "closes_failed",
        "sessions",
    ];
    assert_eq!(counts.map(|name| &found[name]), [1, 2, 1, 4]);
    let table = String::from_utf8(done(&["inspect"], data.path())).unwrap();
    assert!(
        table.contains("closes        1 open, 2 finished (1 failed)\nsessions      4\n"),
        "{table}"
    );
    let verified = String::from_utf8(done(&["verify"], data.path())).unwrap();
    assert!(
        verified.ends_with("0 waiting, 1 closes open\n"),
        "{verified}"
    );

    // Two open closes of one session: no gate writes that.
    let mut twice = close(4, CloseStage::Joining { ready_since: None });
    twice.session = image.closes[2].session.clone();
    image.closes.push(twice);
    let data = tempfile::tempdir().unwrap();
    write_new(&FsDisk::new(data.path()), &image).unwrap();
    let said = refused(&["verify"], data.path(), 65);
    assert!(said.contains("has a newer one"), "{said}");
}

/// REP1, DUR2: a report that was taken is the same after a restart and in a store that was made from a
/// backup; the window of its run goes on where it was, and the figures of a store tell both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn step_reports_outlive_the_process_and_a_restore() {
    let fleet = fleet().await;
    let router = fleet.router_url();
    let old = tempfile::tempdir().unwrap();
    let gate = serve(old.path(), &router);
    assert_eq!(gate.acquire("first", 1_000).await.action(), "admit");
    let asked = json!({"run": "lauf/ß", "step": 7});
    let taken = gate.post("/v1/steps", &asked).await.body;
    assert_eq!(taken["metrics"]["agentic_kv/admission/admit"], 1.0);
    assert_eq!(gate.acquire("second", 1_000).await.action(), "admit");
    let backup = backup_of(&gate).await;
    gate.kill();

    let found = inspected(old.path());
    assert_eq!((&found["steps"], &found["runs"]), (&json!(1), &json!(1)));
    let table = String::from_utf8(done(&["inspect"], old.path())).unwrap();
    assert!(table.contains("step reports  1, 1 runs\n"), "{table}");

    let new = tempfile::tempdir().unwrap();
    let copy = new.path().join("copy.ndjson");
    fs::write(&copy, &backup).unwrap();
    let data = new.path().join("data");
    done(&["restore", copy.to_str().unwrap()], &data);
    for data in [old.path(), &data] {
        let gate = serve(data, &router);
        assert_eq!(gate.post("/v1/steps", &asked).await.body, taken);
        assert_eq!(gate.list("/v1/steps").await, std::slice::from_ref(&taken));
        let current = gate.get("/v1/steps/current?run=lauf%2F%C3%9F").await;
        assert_eq!(current["from"], taken["to"]);
        assert_eq!(current["metrics"]["agentic_kv/admission/admit"], 1.0);
        assert!(gate.terminate().success());
    }
}

/// DUR5: a copy that is cut, garbled, newer or something else is refused, and no store comes of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_copies_are_refused() {
    let data = used().await;
    let whole = done(&["backup"], data.path());
    let text = String::from_utf8(whole.clone()).unwrap();
    let garbled = text.replace("held-ticket", "held-packet").into_bytes();
    let newer = text
        .replace(r#""version":4"#, r#""version":7"#)
        .into_bytes();
    for (copy, code, says) in [
        (&whole[..whole.len() / 2], 65, "was cut off"),
        (&garbled[..], 65, "damaged in line"),
        (&newer[..], 78, "version 7"),
        (&b"notes\n"[..], 65, "not a backup"),
    ] {
        let new = tempfile::tempdir().unwrap();
        let path = new.path().join("copy.ndjson");
        fs::write(&path, copy).unwrap();
        let data = new.path().join("data");
        let said = refused(&["restore", path.to_str().unwrap()], &data, code);
        assert!(said.contains(says), "{said}");
        assert!(!data.exists(), "nothing is made");
    }
    let new = tempfile::tempdir().unwrap();
    let said = refused(&["restore", "no-such-copy"], new.path(), 74);
    assert!(said.contains("no-such-copy"), "{said}");
}

/// Without a store there is nothing to look at, and nothing is made.
#[test]
fn a_missing_store_is_named() {
    let data = tempfile::tempdir().unwrap();
    for arguments in [&["inspect"][..], &["verify"], &["backup"], &["reset"]] {
        let said = refused(arguments, data.path(), 2);
        assert!(said.contains("there is no store in"), "{said}");
    }
    assert_eq!(fs::read_dir(data.path()).unwrap().count(), 0);
}

/// DUR5: a store in use is left to who uses it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_in_use_is_left_alone() {
    let data = tempfile::tempdir().unwrap();
    let gate = Kvgate::serve(data.path(), &[]);
    for arguments in [&["inspect"][..], &["verify"], &["backup"], &["reset"]] {
        let said = refused(arguments, data.path(), 75);
        assert!(said.contains("in use"), "{said}");
    }
    assert!(file(data.path()).exists());
    assert_eq!(gate.acquire("t", 1).await.status, 200);
}

/// DUR5: a store is set aside whole, whatever it is, and nothing is ever lost by it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reset_never_deletes() {
    let data = used().await;
    let mut kept = Vec::new();
    for content in [None, Some(&b"no store\n"[..]), Some(b"")] {
        if let Some(content) = content {
            fs::write(file(data.path()), content).unwrap();
        }
        kept.push(fs::read(file(data.path())).unwrap());
        let said = String::from_utf8(done(&["reset"], data.path())).unwrap();
        assert!(said.contains("kvgate.redb.reset-2"), "{said}");
        assert!(!file(data.path()).exists());
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(data.path()).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        assert!(!name.contains(':'), "{name}");
        if name.starts_with("kvgate.redb.reset-") {
            found.push(fs::read(entry.path()).unwrap());
        }
    }
    kept.sort();
    found.sort();
    assert!(kept == found, "every store that was set aside is there");
    // The next start finds none and begins empty.
    let gate = Kvgate::serve(data.path(), &[]);
    assert!(gate.list("/v1/leases").await.is_empty());
}

/// DUR5: `verify` finds a bit that turned over in what the store holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verify_finds_a_flipped_bit() {
    let data = used().await;
    let path = file(data.path());
    let mut bytes = fs::read(&path).unwrap();
    let ticket = b"held-ticket";
    let places: Vec<usize> = bytes
        .windows(ticket.len())
        .enumerate()
        .filter_map(|(at, window)| (window == ticket).then_some(at))
        .collect();
    assert!(!places.is_empty());
    for place in places {
        bytes[place] ^= 1;
    }
    fs::write(&path, &bytes).unwrap();
    for arguments in [&["verify"][..], &["inspect"], &["backup"]] {
        let said = refused(arguments, data.path(), 65);
        assert!(said.contains("damaged"), "{said}");
    }
    assert_eq!(fs::read(&path).unwrap(), bytes, "it was left as it is");
}

/// DUR5: a bit that turns over anywhere is found, or nothing of the store hangs on it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_flipped_bit_gives_a_wrong_picture() {
    let data = used().await;
    let image = look(data.path()).unwrap().into_image();
    let path = file(data.path());
    let whole = fs::read(&path).unwrap();
    let mut found = 0;
    for step in 0..150_usize {
        // The head of the file densely, the rest spread.
        let at = if step < 100 {
            step * 4
        } else {
            whole.len() / 50 * (step - 100)
        };
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (step % 8);
        fs::write(&path, &bytes).unwrap();
        match look(data.path()) {
            Ok(look) => {
                assert_eq!(*look.image(), image, "byte {at}");
                look.verify().unwrap();
            }
            Err(OfflineError::Store(OpenError::Damaged(..) | OpenError::Foreign(_))) => found += 1,
            Err(error) => panic!("byte {at}: {error:?}"),
        }
        assert!(
            fs::read(&path).unwrap() == bytes,
            "byte {at}: the file was touched"
        );
    }
    assert!(found > 0);
}
