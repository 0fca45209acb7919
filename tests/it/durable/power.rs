//! Power cuts: whatever part of what was not synced is lost, nothing that was acknowledged is.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use kvgate::store::{FILE_NAME, STEPS, Step, open_with};
use kvgate_core::memory::MemoryStore;
use kvgate_core::store::Image;

use super::disk::{Dice, Durable, Event, Files, SimDisk, fingerprint};
use super::golden::kept_store;
use super::migration::ONE_MORE;
use super::work::{Account, Work, work};

/// Outcomes that are drawn for every cut.
const DRAWS: usize = 24;

/// One run whose every moment the power is cut at.
struct Scenario {
    name: &'static str,
    before: Files,
    log: Vec<Event>,
    images: Vec<Image>,
    steps: &'static [Step],
}

impl Scenario {
    fn run(name: &'static str, before: &Files, begin: MemoryStore, job: Work) -> (Self, SimDisk) {
        let disk = SimDisk::with(before);
        let mut account = Account::new(begin);
        work(&disk, &mut account, job).unwrap();
        let scenario = Self {
            name,
            before: before.clone(),
            log: disk.log(),
            images: account.images(),
            steps: job.steps,
        };
        (scenario, disk)
    }

    /// Cuts the power after every event; the outcomes go to `each`, with the images that are right.
    fn cuts(&self, part: usize, parts: usize, mut each: impl FnMut(&Files, &[Image], usize)) {
        let mut durable = Durable::with(&self.before);
        for (number, event) in self.log.iter().enumerate() {
            if !durable.take(event) || number % parts != part {
                continue;
            }
            let right = &self.images[durable.acked..=durable.tried];
            let mut dice = Dice(number as u64);
            for mode in 0..DRAWS {
                each(&durable.cut(mode, &mut dice), right, number);
            }
        }
    }

    /// Checks every distinct outcome; gives their number.
    fn check(&self) -> usize {
        let seen = Mutex::new(HashSet::new());
        let parts = 2;
        std::thread::scope(|scope| {
            for part in 0..parts {
                let seen = &seen;
                scope.spawn(move || {
                    self.cuts(part, parts, |files, right, number| {
                        let new = seen
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .insert(fingerprint(files));
                        if new {
                            self.opens(files, right, number);
                        }
                    });
                });
            }
        });
        let count = seen.into_inner().unwrap().len();
        println!("power cuts, {}: {count} images", self.name);
        count
    }

    fn opens(&self, files: &Files, right: &[Image], number: usize) {
        let at = || format!("{}, cut after event {number}", self.name);
        let disk = SimDisk::with(files);
        let opened = open_with(disk.shared(), self.steps)
            .unwrap_or_else(|error| panic!("{}: {error:?}", at()));
        assert!(right.contains(&opened.image), "{}: wrong image", at());
        let names: Vec<String> = disk.files().into_keys().collect();
        let leftovers = [".new", ".copy"].map(|end| format!("{FILE_NAME}{end}"));
        assert!(
            !names.iter().any(|name| leftovers.contains(name)),
            "{}: {names:?}",
            at()
        );
        // What was opened is durable at once, and opens again, even when the power fails again.
        if number.is_multiple_of(7) {
            let mut durable = Durable::with(files);
            for event in disk.log() {
                durable.take(&event);
            }
            for mode in 0..4 {
                let again = SimDisk::with(&durable.cut(mode, &mut Dice(number as u64)));
                let again = open_with(again.shared(), self.steps)
                    .unwrap_or_else(|error| panic!("{}, twice: {error:?}", at()));
                assert_eq!(again.image, opened.image, "{}, twice", at());
            }
        }
    }
}

/// DUR1, DUR2, CLO2: at every operation of a creation, a workload, an orderly and an unclean start, a
/// rewrite and a migration the power is cut, with any part of the unsynced writes, lengths and names
/// lost and writes torn. Every outcome opens and holds each acknowledged turn whole, and at most the
/// one turn that nobody was told of.
#[test]
fn a_power_cut_loses_nothing_that_was_acknowledged() {
    let long = Work {
        turns: 14,
        ..Work::default()
    };
    let short = Work {
        turns: 3,
        ..Work::default()
    };
    let stops = Work {
        orderly: false,
        ..short
    };
    let empty = Files::new();
    let first = MemoryStore::default();
    let (creation, disk) = Scenario::run("creation and work", &empty, first, long);
    let closed = disk.files();
    let last = state_in(&closed);
    let (clean, _) = Scenario::run("orderly start", &closed, last.clone(), short);
    let (stopped, _) = Scenario::run("start and kill", &closed, last.clone(), stops);
    let mut durable = Durable::with(&stopped.before);
    for event in &stopped.log {
        durable.take(event);
    }
    let torn = durable.cut(2, &mut Dice(3));
    let after = state_in(&torn);
    let (rewrite, disk) = Scenario::run("unclean start with rewrite", &torn, after, stops);
    let old = format!("{FILE_NAME}.bak");
    assert_eq!(disk.files()[&old], torn[FILE_NAME], "the old file was kept");
    let migrates = Work {
        turns: 1,
        steps: ONE_MORE,
        ..Work::default()
    };
    let (migration, _) = Scenario::run("migration", &closed, last, migrates);
    let (old_torn, _) = Scenario::run(
        "migration after a kill",
        &torn,
        state_in(&torn),
        Work {
            turns: 0,
            ..migrates
        },
    );
    let files = Files::from([(FILE_NAME.to_owned(), kept_store(1))]);
    let (from_first, _) = Scenario::run(
        "migration of schema 1",
        &files,
        state_in(&files),
        Work {
            steps: STEPS,
            ..migrates
        },
    );
    let scenarios = [
        creation, clean, stopped, rewrite, migration, old_torn, from_first,
    ];
    let total: usize = scenarios.iter().map(Scenario::check).sum();
    println!("power cuts: {total} distinct images");
    assert!(total >= 4_000, "{total} images only");
}

/// The reference store with what these files hold.
fn state_in(files: &Files) -> MemoryStore {
    let opened = open_with(SimDisk::with(files).shared(), STEPS).unwrap();
    super::reference(&opened.image)
}
