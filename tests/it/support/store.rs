//! A store in memory that fails or holds commits back when a test says so.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use kvgate_core::memory::MemoryStore;
use kvgate_core::record::Record;
use kvgate_core::store::{Commit, Image, Opened, Store, StoreControl};

/// What the store does with commits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Mood {
    #[default]
    Good,
    /// Commits and openings fail.
    Failing,
    /// Commits are kept, but nobody is told; openings fail.
    FailingAfterwards,
    /// The next commit is kept; from then on it is failing.
    LastGood,
    /// Commits do not return.
    Holding,
    /// Commits panic.
    Panicking,
}

/// The test's end of the store.
#[derive(Clone, Debug, Default)]
pub struct Switch {
    shared: Arc<(Mutex<Shared>, Condvar)>,
}

#[derive(Debug, Default)]
struct Shared {
    mood: Mood,
    held: bool,
    low_space: bool,
    stored: MemoryStore,
    /// Records of each commit.
    commits: Vec<Vec<Record>>,
    /// The last commit, kept or not, was tried by the writer's own thread.
    by_writer: bool,
    opened: u64,
}

#[derive(Debug, thiserror::Error)]
#[error("the disk is broken, as the test wants it")]
pub struct Broken;

#[derive(Debug)]
pub struct MoodyStore(Switch);

impl Switch {
    fn with<R>(&self, change: impl FnOnce(&mut Shared) -> R) -> R {
        let result = change(&mut self.shared.0.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.1.notify_all();
        result
    }

    pub fn set(&self, mood: Mood) {
        self.with(|shared| shared.mood = mood);
    }

    /// Says that the disk is nearly full, or not any more.
    pub fn set_low_space(&self, low: bool) {
        self.with(|shared| shared.low_space = low);
    }

    /// Returns when a commit is held back.
    pub fn wait_until_held(&self) {
        let guard = self.shared.0.lock().unwrap();
        let soon = Duration::from_secs(30);
        let waited = self
            .shared
            .1
            .wait_timeout_while(guard, soon, |shared| !shared.held);
        assert!(!waited.unwrap().1.timed_out(), "the writer did not commit");
    }

    pub fn open(&self) -> Result<Opened<MoodyStore>, Broken> {
        self.with(|shared| match shared.mood {
            Mood::Failing | Mood::FailingAfterwards => Err(Broken),
            Mood::Good | Mood::LastGood | Mood::Holding | Mood::Panicking => {
                shared.opened += 1;
                Ok(Opened {
                    store: MoodyStore(self.clone()),
                    image: shared.stored.image(),
                })
            }
        })
    }

    /// What a restart would find.
    pub fn image(&self) -> Image {
        self.with(|shared| shared.stored.image())
    }

    /// Records of each commit from the given one on.
    pub fn commits(&self, from: usize) -> Vec<Vec<Record>> {
        self.with(|shared| shared.commits.get(from..).unwrap().to_vec())
    }

    /// Whether the last commit, kept or not, was tried by the writer's own thread and not by a caller's.
    pub fn by_writer(&self) -> bool {
        self.with(|shared| shared.by_writer)
    }

    /// How often it was opened.
    pub fn opened(&self) -> u64 {
        self.with(|shared| shared.opened)
    }
}

impl Store for MoodyStore {
    type Error = Broken;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), Broken> {
        let (lock, changed) = &*self.0.shared;
        let mut shared = lock.lock().unwrap();
        shared.by_writer = std::thread::current().name() == Some("kvgate-writer");
        while shared.mood == Mood::Holding {
            shared.held = true;
            changed.notify_all();
            shared = changed.wait(shared).unwrap();
        }
        shared.held = false;
        match shared.mood {
            Mood::Failing => return Err(Broken),
            Mood::Panicking => {
                drop(shared);
                panic!("the store panics, as the test wants it");
            }
            _ => {}
        }
        let Ok(()) = shared.stored.commit(commit);
        shared.commits.push(commit.records.to_vec());
        match shared.mood {
            Mood::FailingAfterwards => Err(Broken),
            Mood::LastGood => {
                shared.mood = Mood::Failing;
                Ok(())
            }
            Mood::Good | Mood::Failing | Mood::Holding | Mood::Panicking => Ok(()),
        }
    }
}

impl StoreControl for MoodyStore {
    type OpenError = Broken;

    fn bytes(&self) -> u64 {
        0
    }

    fn low_space(&self) -> bool {
        self.0.with(|shared| shared.low_space)
    }

    fn close(self) -> Result<(), Broken> {
        Ok(())
    }
}
