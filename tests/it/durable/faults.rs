//! A disk that fails: at each operation, once or for good, and a disk that is full.

use std::io::ErrorKind;

use kvgate::store::{BALLAST_NAME, Disk, FILE_NAME, open_on, open_with};
use kvgate_core::memory::MemoryStore;
use kvgate_core::store::StoreControl;

use super::disk::{Dice, Durable, Files, Plan, SimDisk};
use super::golden::kept_store;
use super::migration::ONE_MORE;
use super::work::{Account, Stopped, Work, work};

/// Small: each operation of it fails several times.
const JOB: Work = Work {
    turns: 2,
    orderly: true,
    steps: kvgate::store::STEPS,
};

/// Runs the job with one fault after the other until none of its operations is left to fail.
/// Afterwards the disk is well again: the store opens with every acknowledged turn, takes more, and
/// survives a power cut. Gives how often a fault struck.
fn sweep(before: &Files, begin: &MemoryStore, job: Work, error: ErrorKind, sticky: bool) -> usize {
    let mut struck = 0;
    for at in 0.. {
        let what = || format!("{error:?} at operation {at}, sticky: {sticky}");
        let disk = SimDisk::with(before);
        let mut account = Account::new(begin.clone());
        disk.fail(Some(Plan { at, error, sticky }));
        let outcome = work(&disk, &mut account, job);
        if disk.failed() == 0 {
            outcome.unwrap();
            return struck;
        }
        struck += 1;
        if let Err(Stopped::Open(error)) = &outcome {
            // Never a claim that would make somebody throw the store away.
            assert!(
                matches!(error, kvgate::store::OpenError::Io(..)),
                "{}: {error:?}",
                what()
            );
        }
        disk.fail(None);
        work(&disk, &mut account, job).unwrap_or_else(|error| panic!("{}: {error}", what()));
        let mut durable = Durable::with(before);
        for event in disk.log() {
            durable.take(&event);
        }
        let files = durable.cut(at % 3, &mut Dice(at as u64));
        let opened = open_with(SimDisk::with(&files).shared(), job.steps)
            .unwrap_or_else(|error| panic!("{}, then a power cut: {error}", what()));
        assert!(
            account.last().image() == opened.image,
            "{}, then a power cut: not what was acknowledged",
            what()
        );
    }
    struck
}

fn sweeps(name: &str, before: &Files, begin: &MemoryStore, job: Work) {
    let mut counts = Vec::new();
    for error in [ErrorKind::Other, ErrorKind::StorageFull] {
        for sticky in [false, true] {
            counts.push(sweep(before, begin, job, error, sticky));
        }
    }
    println!("I/O errors, {name}: {counts:?} faults struck");
    assert!(counts.iter().all(|count| *count > 20), "{counts:?}");
}

/// DUR1, DUR4: creation and commits with an I/O error or a full disk at each operation, once and
/// for good: no panic, no acknowledged turn lost, and the store opens when the fault is over.
#[test]
fn an_error_at_any_operation_of_a_creation_loses_nothing() {
    sweeps("creation", &Files::new(), &MemoryStore::default(), JOB);
}

/// DUR1, DUR4: the same for a start after an unclean stop, with its rewrite.
#[test]
fn an_error_at_any_operation_of_a_rewrite_loses_nothing() {
    let (before, begin) = killed();
    sweeps("rewrite", &before, &begin, JOB);
}

/// DUR1, DUR4: the same for a migration, with its copy and its rewrite.
#[test]
fn an_error_at_any_operation_of_a_migration_loses_nothing() {
    let (before, begin) = killed();
    let job = Work {
        turns: 0,
        steps: ONE_MORE,
        ..JOB
    };
    sweeps("migration", &before, &begin, job);
}

/// DUR1, DUR4: the same for a store of schema 1, whose rows are turned over.
#[test]
fn an_error_at_any_operation_of_a_migration_from_schema_1_loses_nothing() {
    let before = Files::from([(FILE_NAME.to_owned(), kept_store(1))]);
    let opened = open_on(SimDisk::with(&before).shared()).unwrap();
    let begin = super::reference(&opened.image);
    let job = Work { turns: 0, ..JOB };
    sweeps("migration of schema 1", &before, &begin, job);
}

/// The files of a process that was killed, and what they hold.
fn killed() -> (Files, MemoryStore) {
    let disk = SimDisk::default();
    let mut account = Account::new(MemoryStore::default());
    let job = Work {
        orderly: false,
        ..JOB
    };
    work(&disk, &mut account, job).unwrap();
    (disk.files(), account.last())
}

/// DUR4: the disk fills up. The commit that finds no room fails and gives the ballast away; with
/// that room the start path and further turns succeed while the disk is as full as before, nothing
/// acknowledged is lost, and there is a ballast again once there is room.
#[test]
fn the_ballast_gives_a_full_disk_room() {
    let disk = SimDisk::default();
    disk.set_capacity(256 << 20);
    let mut account = Account::new(MemoryStore::default());
    work(&disk, &mut account, JOB).unwrap();
    let ballast = disk.find(BALLAST_NAME).unwrap().expect("a ballast");
    assert!(ballast.len >= 32 << 20, "{ballast:?}");
    assert!(!open_on(disk.shared()).unwrap().store.low_space());

    let other = disk.free().unwrap();
    disk.allocate("of another program", other).unwrap();
    assert_eq!(disk.free().unwrap(), 0);
    let full = Work {
        turns: 2_000,
        orderly: false,
        ..JOB
    };
    let stopped = work(&disk, &mut account, full).unwrap_err();
    match stopped {
        Stopped::Commit(error) => assert!(error.is_full(), "{error}"),
        Stopped::Open(error) => panic!("the start needs no room: {error}"),
    }
    assert_eq!(disk.find(BALLAST_NAME).unwrap(), None);
    work(&disk, &mut account, JOB).unwrap();
    let opened = open_on(disk.shared()).unwrap();
    assert_eq!(opened.image, account.last().image());
    let space = opened.store.space();
    assert!(space.low && opened.store.low_space(), "{space:?}");
    assert_eq!(disk.find(BALLAST_NAME).unwrap(), None, "no room for it yet");
    drop(opened);

    disk.remove("of another program").unwrap();
    let opened = open_on(disk.shared()).unwrap();
    assert!(!opened.store.low_space());
    assert!(disk.find(BALLAST_NAME).unwrap().is_some());
}

/// DUR4: a start that finds no room for its rewrite takes the ballast's.
#[test]
fn a_start_on_a_full_disk_takes_the_ballast() {
    let (files, begin) = killed();
    let disk = SimDisk::with(&files);
    disk.set_capacity(256 << 20);
    disk.remove(BALLAST_NAME).unwrap();
    disk.allocate(BALLAST_NAME, 32 << 20).unwrap();
    let other = disk.free().unwrap();
    disk.allocate("of another program", other).unwrap();
    let opened = open_on(disk.shared()).unwrap();
    assert_eq!(opened.image, begin.image());
    assert_eq!(disk.find(BALLAST_NAME).unwrap(), None);
}

/// DUR4: without a ballast, a start on a full disk says so, keeps the file, and succeeds later.
#[test]
fn a_start_without_any_room_changes_nothing() {
    let (files, begin) = killed();
    let disk = SimDisk::with(&files);
    disk.set_capacity(files[FILE_NAME].len() as u64);
    let error = open_on(disk.shared()).unwrap_err();
    assert!(error.is_full(), "{error:?}");
    assert_eq!(disk.files()[FILE_NAME], files[FILE_NAME]);
    disk.set_capacity(256 << 20);
    let opened = open_on(disk.shared()).unwrap();
    assert_eq!(opened.image, begin.image());
}
