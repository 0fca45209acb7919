//! Starts on a real directory, several at once, and with much to load.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use kvgate::store::{BALLAST_NAME, FILE_NAME, FsDisk, OpenError, open, open_on, write_new};
use kvgate_core::ids::{RowNo, Seq, Term};
use kvgate_core::memory::MemoryStore;
use kvgate_core::record::Record;
use kvgate_core::store::{Commit, Image, Store};
use kvgate_core::ticket::Stage;
use kvgate_core::units::Timestamp;

use super::churn::ticket;
use super::disk::{Files, SimDisk, When};
use super::work::{Account, Work, work};

const OPENERS: u64 = 4;
const TURNS: u64 = 10;

fn one(image: &Image, records: &[Record], store: &mut impl Store<Error: std::fmt::Debug>) {
    let commit = Commit {
        term: Term(image.term),
        seq: Seq(image.seq.0 + 1),
        now: Timestamp::from_millis(1_000),
        next_issue: image.next_issue,
        records,
    };
    store.commit(commit).unwrap();
}

/// DUR1, DUR5: openers that race for one directory, from its creation on and through many
/// rewrites: each is refused or has the store for itself, and no turn of any of them is lost.
#[test]
fn racing_starts_lose_no_turn() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let refused = AtomicU64::new(0);
    let deadline = Instant::now() + Duration::from_secs(60);
    thread::scope(|scope| {
        for _ in 0..OPENERS {
            scope.spawn(|| {
                let mut turns = 0;
                while turns < TURNS {
                    match open(path) {
                        Ok(mut opened) => {
                            let row = opened.image.seq.0 + 1;
                            let records = [Record::Ticket(ticket(row, true))];
                            one(&opened.image, &records, &mut opened.store);
                            turns += 1;
                        }
                        Err(OpenError::Locked(_)) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(other) => panic!("{other:?}"),
                    }
                    assert!(Instant::now() < deadline, "{turns} turns only");
                    thread::yield_now();
                }
            });
        }
    });
    println!("racing starts: {} were refused", refused.into_inner());
    let image = open(path).unwrap().image;
    assert_eq!(image.seq.0, OPENERS * TURNS);
    assert_eq!(image.tickets.len() as u64, OPENERS * TURNS);
}

fn closed_files(turns: u64) -> (Files, MemoryStore) {
    let disk = SimDisk::default();
    let mut account = Account::new(MemoryStore::default());
    let job = Work {
        turns,
        ..Work::default()
    };
    work(&disk, &mut account, job).unwrap();
    (disk.files(), account.last())
}

/// DUR5: a file that its owner replaced while it was being locked is not taken for the store: it
/// counts as in use, and what is tried again is what stands there then.
#[test]
fn a_store_that_is_replaced_meanwhile_is_opened_anew() {
    let (old, _) = closed_files(2);
    let (new, state) = closed_files(4);
    let disk = SimDisk::with(&old);
    disk.let_in(When::AfterOpen, new[FILE_NAME].clone());
    assert_eq!(open_on(disk.shared()).unwrap().image, state.image());
}

/// DUR5: nothing is created over what another process made meanwhile.
#[test]
fn a_creation_gives_way_to_a_faster_one() {
    let (new, state) = closed_files(4);
    let disk = SimDisk::default();
    disk.let_in(When::BeforeLink, new[FILE_NAME].clone());
    assert_eq!(open_on(disk.shared()).unwrap().image, state.image());
    let disk = SimDisk::default();
    disk.let_in(When::BeforeLink, new[FILE_NAME].clone());
    assert!(write_new(&disk, &Image::default()).is_err());
    assert_eq!(disk.files()[FILE_NAME], new[FILE_NAME]);
    assert!(write_new(&disk, &Image::default()).is_err());
    assert_eq!(disk.files()[FILE_NAME], new[FILE_NAME]);
}

/// DUR1, DUR5: where a file cannot have two names, a creation still replaces nothing, and a rewrite
/// keeps a copy of the old file.
#[test]
fn a_file_system_without_second_names_will_do() {
    let disk = SimDisk::default();
    disk.without_links();
    let mut account = Account::new(MemoryStore::default());
    let job = Work {
        orderly: false,
        ..Work::default()
    };
    work(&disk, &mut account, job).unwrap();
    let before = disk.files();
    work(&disk, &mut account, job).unwrap();
    assert_eq!(disk.files()[&format!("{FILE_NAME}.bak")], before[FILE_NAME]);
    assert_eq!(
        open_on(disk.shared()).unwrap().image,
        account.last().image()
    );

    let disk = SimDisk::default();
    disk.without_links();
    let (other, state) = closed_files(2);
    disk.let_in(When::BeforeLink, other[FILE_NAME].clone());
    assert_eq!(open_on(disk.shared()).unwrap().image, state.image());
}

/// DUR5: a link to a store is that store; one that leads nowhere is not replaced by a new store.
#[cfg(unix)]
#[test]
fn a_link_to_a_store_is_followed() {
    use std::os::unix::fs::symlink;
    let (files, state) = closed_files(2);
    let elsewhere = tempfile::tempdir().unwrap();
    let target = elsewhere.path().join("store");
    let directory = tempfile::tempdir().unwrap();
    symlink(&target, directory.path().join(FILE_NAME)).unwrap();
    let error = open(directory.path()).unwrap_err();
    assert!(matches!(error, OpenError::Io(..)), "{error:?}");
    assert!(!target.exists());
    fs::write(&target, &files[FILE_NAME]).unwrap();
    assert_eq!(open(directory.path()).unwrap().image, state.image());
}

/// DUR4: on a real file system the ballast takes up what it says.
#[cfg(unix)]
#[test]
fn the_ballast_is_really_allocated() {
    use std::os::unix::fs::MetadataExt;
    let directory = tempfile::tempdir().unwrap();
    let opened = open(directory.path()).unwrap();
    let space = opened.store.space();
    assert!(space.free_bytes.is_some());
    let ballast = fs::metadata(directory.path().join(BALLAST_NAME));
    if space.low {
        assert!(ballast.is_err(), "there is no room for a ballast");
        return;
    }
    let ballast = ballast.unwrap();
    assert!(ballast.len() >= 32 << 20);
    assert!(
        ballast.blocks() * 512 >= ballast.len(),
        "{}",
        ballast.blocks()
    );
    opened.store.free_ballast();
    assert!(!directory.path().join(BALLAST_NAME).exists());
}

/// DUR2, DUR3: 50,000 leases and 50,000 waiting tickets are there again within two seconds after
/// a kill, integrity check and rewrite included (on release code; not timed in a debug build).
#[test]
fn a_large_store_is_open_soon_after_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let mut image = Image {
        seq: Seq(100_000),
        next_issue: 50_001,
        ..Image::default()
    };
    for number in 0..100_000 {
        let mut ticket = ticket(number, true);
        if number >= 50_000 {
            ticket.stage = Stage::Waiting {
                since: Timestamp::from_millis(number),
            };
        }
        image.tickets.push(ticket);
    }
    write_new(&FsDisk::new(directory.path()), &image).unwrap();
    let mut opened = open(directory.path()).unwrap();
    one(&image, &[Record::Forgotten(RowNo(7))], &mut opened.store);
    // The file of a process that is gone: not closed, and not marked as clean.
    let file = fs::read(directory.path().join(FILE_NAME)).unwrap();
    drop(opened);
    let mut shortest = Duration::MAX;
    // Other tests take the processor too: the best of some.
    for _ in 0..if cfg!(debug_assertions) { 1 } else { 3 } {
        let killed = tempfile::tempdir().unwrap();
        fs::write(killed.path().join(FILE_NAME), &file).unwrap();
        let began = Instant::now();
        let again = open(killed.path()).unwrap();
        shortest = shortest.min(began.elapsed());
        assert_eq!(again.image.tickets.len(), 99_999);
        assert!(killed.path().join(format!("{FILE_NAME}.bak")).exists());
    }
    println!(
        "a start with 100,000 rows after a kill: {shortest:?}, {} bytes",
        file.len()
    );
    assert!(
        cfg!(debug_assertions) || shortest < Duration::from_secs(2),
        "{shortest:?}"
    );
}
