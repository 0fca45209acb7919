//! The disk fills up under a running service and is freed again (DUR4; case D03): on a real small
//! tmpfs where a namespace of its own is allowed, and always with a bound on the size of files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::fleet;
use crate::support::process::{Answer, Kvgate, command, command_under};

/// Size of the small disk. Enough for the store's ballast and for the room below which acquires
/// bypass; only what is written takes memory.
const DISK_MIB: u64 = 192;
const CLIENTS: u64 = 50;
/// Acquires of the first client to get there, after which the disk is filled.
const REQUESTS_BEFORE: u64 = 30;
/// Requests of one client after which the disk must have been found full.
const REQUESTS_MAX: u64 = 20_000;

/// A tmpfs in a mount namespace of its own, which lives as long as this holder.
struct SmallDisk {
    holder: Child,
    _stdin: ChildStdin,
    directory: tempfile::TempDir,
}

impl SmallDisk {
    /// `None` where the operating system allows no such namespace.
    fn new(size: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mut holder = Command::new("unshare")
            .args(["-rm", "sh", "-c"])
            .arg(r#"mount -t tmpfs -o size="$1" tmpfs "$2" && echo mounted && exec cat"#)
            .args(["sh", size])
            .arg(directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .ok()?;
        let stdin = holder.stdin.take().unwrap();
        let mut said = String::new();
        BufReader::new(holder.stdout.take().unwrap())
            .read_line(&mut said)
            .unwrap();
        if said.trim() != "mounted" {
            holder.kill().unwrap();
            holder.wait().unwrap();
            return None;
        }
        Some(Self {
            holder,
            _stdin: stdin,
            directory,
        })
    }

    /// What runs a program inside.
    fn wrapper(&self) -> Vec<String> {
        let pid = self.holder.id().to_string();
        ["nsenter", "-t", &pid, "-U", "-m", "--preserve-credentials"]
            .map(str::to_owned)
            .to_vec()
    }

    /// The directory as seen from inside.
    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// The same directory as seen from here.
    fn outside(&self) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.id()));
        root.join(self.path().strip_prefix("/").unwrap())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        self.holder.kill().unwrap();
        self.holder.wait().unwrap();
    }
}

/// How a test makes the disk full, and frees it.
trait Disk {
    fn fill(&self, gate: &Kvgate);
    fn free(&self, gate: &Kvgate);
}

impl Disk for SmallDisk {
    fn fill(&self, _: &Kvgate) {
        self.fill_up();
    }

    fn free(&self, _: &Kvgate) {
        fs::remove_file(self.outside().join("fill")).unwrap();
    }
}

impl SmallDisk {
    fn fill_up(&self) {
        let mut file = File::create(self.outside().join("fill")).unwrap();
        let block = vec![0_u8; 1 << 16];
        // To the last byte: ever smaller blocks until none fits.
        let mut size = block.len();
        while size > 0 {
            if file.write_all(&block[..size]).is_err() {
                size /= 2;
            }
        }
    }
}

/// No file may grow beyond its size.
struct SizeLimit(PathBuf);

impl SizeLimit {
    fn set(gate: &Kvgate, limit: &str) {
        let done = Command::new("prlimit")
            .args([format!("--pid={}", gate.pid()), format!("--fsize={limit}")])
            .status()
            .unwrap();
        assert!(done.success());
    }
}

impl Disk for SizeLimit {
    fn fill(&self, gate: &Kvgate) {
        let size = fs::metadata(self.0.join("kvgate.redb")).unwrap().len();
        // The hard limit stays, so that it can be raised again.
        Self::set(gate, &format!("{size}:"));
    }

    fn free(&self, gate: &Kvgate) {
        Self::set(gate, "unlimited:");
    }
}

/// What the clients were told.
#[derive(Default)]
struct Log {
    /// Lease by ticket: admitted and not given back.
    held: BTreeMap<String, String>,
    /// Releases that were told 503: kept for the recovery.
    kept: BTreeSet<String>,
    bypassed: u64,
    /// The state as a client found it right after such a bypass, while the store was in trouble.
    troubled: Option<Value>,
    admits: u64,
}

/// Long ids make long rows, so that the disk is full soon.
fn ticket(client: u64, step: u64) -> String {
    format!("{client}-{step}-{}", "x".repeat(480))
}

async fn acquire(gate: &reqwest::Client, base: &str, ticket: &str) -> Answer {
    let body =
        json!({"ticket_id": ticket, "session_id": ticket, "reservation_tokens": 1, "wait_s": 0});
    let sent = gate.post(format!("{base}/leases")).json(&body).send().await;
    Answer::of(sent.unwrap()).await
}

/// Clients that acquire, and release every third lease, until each was told to bypass for the
/// store's sake. The disk is filled while they do.
async fn load(gate: &Kvgate, disk: &dyn Disk, log: &Arc<Mutex<Log>>) {
    let (enough, mut reached) = tokio::sync::mpsc::channel(1);
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let http = gate.http.clone();
        let base = gate.url("/v1");
        let log = Arc::clone(log);
        let enough = enough.clone();
        clients.spawn(async move {
            for step in 0..REQUESTS_MAX {
                let ticket = ticket(client, step);
                let answer = acquire(&http, &base, &ticket).await;
                assert_eq!(answer.status, 200, "{answer:?}");
                if answer.action() == "bypass" {
                    assert_eq!(answer.body["reason"], "store_unavailable");
                    let state = http.get(format!("{base}/state")).send().await.unwrap();
                    let state: Value = state.json().await.unwrap();
                    let mut log = log.lock().unwrap();
                    log.bypassed += 1;
                    // The store may be open again already, for as long as a commit fits.
                    if state["store"]["state"] != "ok" {
                        log.troubled = Some(state);
                    }
                    return;
                }
                let lease = answer.lease();
                {
                    let mut log = log.lock().unwrap();
                    log.admits += 1;
                    log.held.insert(ticket.clone(), lease.clone());
                }
                if step % 3 == 0 {
                    release(&http, &base, &log, &ticket, &lease).await;
                }
                if step >= REQUESTS_BEFORE {
                    // One word is enough.
                    let _ = enough.try_send(());
                }
            }
            panic!("the disk was never found full");
        });
    }
    reached.recv().await.unwrap();
    disk.fill(gate);
    while let Some(done) = clients.join_next().await {
        done.unwrap();
    }
}

async fn release(http: &reqwest::Client, base: &str, log: &Mutex<Log>, ticket: &str, lease: &str) {
    let sent = http.delete(format!("{base}/leases/{lease}")).send().await;
    let answer = Answer::of(sent.unwrap()).await;
    let mut log = log.lock().unwrap();
    log.held.remove(ticket);
    if answer.status == 503 {
        assert_eq!(answer.body["code"], "store_unavailable");
        log.kept.insert(lease.to_owned());
    } else {
        assert_eq!(answer.body["outcome"], "released", "{answer:?}");
    }
}

/// The leases that are there: exactly those that were admitted and not given back. Grants that nobody
/// was told of end after the claim grace, so this waits until they have.
async fn only_what_was_told(gate: &Kvgate, log: &Mutex<Log>) {
    let told: BTreeSet<String> = log.lock().unwrap().held.values().cloned().collect();
    let mut there = BTreeSet::new();
    // Each look costs a round trip; the grace is 1 s.
    for _ in 0..10_000 {
        let leases = gate.list("/v1/leases").await;
        let name = |lease: &Value| lease["lease_id"].as_str().unwrap().to_owned();
        there = leases.iter().map(name).collect();
        assert!(told.is_subset(&there), "an admit is not on disk");
        if there.len() == told.len() {
            let reserved = gate.get("/v1/state").await["budget"]["reserved"].clone();
            assert_eq!(reserved, told.len(), "reserved is the sum of the leases");
            return;
        }
    }
    panic!("{} leases for {} told", there.len(), told.len());
}

/// The whole case: filled under load, freed, recovered, killed, started.
async fn fills_up_and_recovers(disk: &dyn Disk, wrapper: &[&str], data: &Path) {
    let fleet = fleet().await;
    let router = fleet.router_url();
    let arguments = [
        "--router",
        &router,
        "--program-admission",
        "--claim-grace-s",
        "1",
        "--lease-ttl-s",
        "3600",
    ];
    let mut gate = Kvgate::serve_under(wrapper, data, &arguments);
    let log = Arc::new(Mutex::new(Log::default()));
    let first = gate.acquire("first", 1).await.lease();
    let second = gate.acquire("second", 1).await.lease();
    log.lock().unwrap().held.insert("second".into(), second);

    load(&gate, disk, &log).await;
    assert_eq!(log.lock().unwrap().bypassed, CLIENTS);
    let state = log.lock().unwrap().troubled.clone();
    let state = state.expect("the state tells of a store in trouble");
    let named = state["store"]["state"].as_str().unwrap();
    assert!(matches!(named, "unavailable" | "low_space"), "{state}");
    let code = match named {
        "unavailable" => "store_unavailable",
        other => other,
    };
    let notices = state["notices"].as_array().unwrap();
    assert!(
        notices.iter().any(|notice| notice["code"] == code),
        "{state}"
    );
    // One release for sure while it is full.
    let base = gate.url("/v1");
    release(&gate.http, &base, &log, "first", &first).await;

    disk.free(&gate);
    let mut step = 0;
    let recovered = loop {
        step += 1;
        let answer = acquire(&gate.http, &base, &format!("after-{step}")).await;
        if answer.action() == "admit" {
            break answer.lease();
        }
        assert!(step < 1_000_000, "it does not recover");
    };
    log.lock()
        .unwrap()
        .held
        .insert(format!("after-{step}"), recovered);
    let kept = log.lock().unwrap().kept.clone();
    for lease in kept {
        let again = gate.delete(&format!("/v1/leases/{lease}")).await;
        assert_eq!(again.body["outcome"], "already_released", "{again:?}");
    }
    only_what_was_told(&gate, &log).await;
    if named == "unavailable" {
        gate.wait_for_log("the store is open again");
    }
    assert!(!gate.log_text().contains("panicked"), "{}", gate.log_text());

    gate.kill();
    let gate = Kvgate::serve_under(wrapper, data, &arguments);
    only_what_was_told(&gate, &log).await;
    assert!(gate.terminate().success());
    let log = log.lock().unwrap();
    eprintln!(
        "{} admits until the disk was full; {} releases were kept",
        log.admits,
        log.kept.len()
    );
}

/// D03, DUR4: a tmpfs of 192 MiB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d03_a_disk_fills_up_while_running() {
    let Some(disk) = SmallDisk::new(&format!("{DISK_MIB}m")) else {
        eprintln!(
            "NOT RUN on a tmpfs: unshare -rm is not allowed here; the size limit of files stands in"
        );
        return;
    };
    let wrapper = disk.wrapper();
    let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
    fills_up_and_recovers(&disk, &wrapper, disk.path()).await;
}

/// D03, DUR4: the same where files cannot grow (EFBIG), which needs no rights at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d03_a_file_cannot_grow() {
    let data = tempfile::tempdir().unwrap();
    let disk = SizeLimit(data.path().to_owned());
    // Without the signal a write beyond the limit is an error like any other.
    let wrapper = ["env", "--ignore-signal=XFSZ"];
    fills_up_and_recovers(&disk, &wrapper, data.path()).await;
}

/// DUR4: a disk without room for a new store ends with 74 and one sentence, and leaves no store.
#[test]
fn a_disk_that_is_full_at_the_start_ends_with_74() {
    let data = tempfile::tempdir().unwrap();
    let limited = ["env", "--ignore-signal=XFSZ", "prlimit", "--fsize=4096"];
    ends_with_74(&limited, data.path(), data.path());
    match SmallDisk::new("1m") {
        Some(disk) => {
            disk.fill_up();
            let wrapper = disk.wrapper();
            let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
            ends_with_74(&wrapper, disk.path(), &disk.outside());
        }
        None => eprintln!("NOT RUN on a tmpfs: unshare -rm is not allowed here"),
    }
}

fn ends_with_74(wrapper: &[&str], data: &Path, outside: &Path) {
    let arguments = ["serve", "--listen", "127.0.0.1:0", "--data"];
    let mut within = vec!["timeout", "--signal=KILL", "60"];
    within.extend(wrapper);
    let output = command_under(&within, &arguments)
        .arg(data)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(74), "{said}");
    assert!(said.contains("make room or mend the disk"), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    assert!(!outside.join("kvgate.redb").exists());
}

/// A directory or a store without permission ends with 77, and the store stays as it is.
#[test]
fn no_permission_ends_with_77() {
    let data = tempfile::tempdir().unwrap();
    let arguments = ["serve", "--listen", "127.0.0.1:0", "--data"];
    for with_store in [false, true] {
        let file = data.path().join("kvgate.redb");
        if with_store {
            fs::write(&file, b"whatever it is").unwrap();
            chmod("000", &file);
        }
        chmod("500", data.path());
        // Root reads and writes everything, unless it gives these rights up.
        let drop_rights = [
            "timeout",
            "--signal=KILL",
            "60",
            "setpriv",
            "--bounding-set=-dac_override,-dac_read_search",
        ];
        let write = data.path().join("probe");
        let probe = Command::new(drop_rights[0])
            .args(&drop_rights[1..])
            .arg("touch")
            .arg(&write)
            .stderr(Stdio::null())
            .status();
        let plain = OpenOptions::new().create(true).append(true).open(&write);
        if plain.is_ok() {
            fs::remove_file(&write).unwrap();
        }
        let output = match (plain, probe) {
            (Err(_), _) => command(&arguments).arg(data.path()).output().unwrap(),
            (Ok(_), Ok(probe)) if !probe.success() => command_under(&drop_rights, &arguments)
                .arg(data.path())
                .output()
                .unwrap(),
            (Ok(_), _) => {
                eprintln!("NOT RUN: this user writes everywhere and cannot give that up");
                return;
            }
        };
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(77), "{said}");
        assert!(said.contains("no permission for"), "{said}");
        chmod("700", data.path());
        if with_store {
            chmod("600", &file);
            assert_eq!(fs::read(&file).unwrap(), b"whatever it is");
        } else {
            assert!(!file.exists());
        }
    }
}

fn chmod(mode: &str, path: &Path) {
    let done = Command::new("chmod").arg(mode).arg(path).status().unwrap();
    assert!(done.success());
}
