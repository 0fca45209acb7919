//! What is done with a store that no service uses: look into it, copy it, make one from a copy, set
//! one aside (DUR5). Nothing here changes a store that exists, and nothing is created over one.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, Write};
use std::path::{Path, PathBuf};

use kvgate_core::capacity::FleetConfig;
use kvgate_core::ids::SessionId;
use kvgate_core::machine::{Machine, StartParams};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::Policy;
use kvgate_core::settings::Setting;
use kvgate_core::store::Image;
use kvgate_core::ticket::Stage;
use kvgate_core::units::{Timestamp, Tokens};
use kvgate_core::view::View;

use super::disk::{Disk, FsDisk};
use super::error::{OpenError, io_error};
use super::logical::{self, CopyError, CopyPieces, epoch_of, moved_on, read_copy};
use super::start::{FILE_NAME, Seen, hold, see, write_new};

/// Why a command on a store was not done.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] OpenError),
    /// The copy cannot be read.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// There is no store.
    #[error("there is no store in {}; name its directory with --data", .0.display())]
    Missing(PathBuf),
    /// There is a store already.
    #[error("{} exists, and a restore never writes over a store; choose another --data, or set it aside with `kvgate store reset`", .0.display())]
    Exists(PathBuf),
    /// There is a file where the copy is wanted.
    #[error("{} exists, and a backup never writes over a file; choose another name", .0.display())]
    CopyExists(PathBuf),
    /// The copy cannot be written.
    #[error("the backup cannot be written: {0}; make room, or choose another place")]
    Write(io::Error),
}

/// A store as it was found. The file keeps its bytes, an older schema included.
#[derive(Debug)]
pub struct Look {
    /// The file.
    pub path: PathBuf,
    seen: Seen,
}

/// The figures of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Inspection {
    /// Present epoch.
    pub epoch: u64,
    /// Held leases.
    pub leases: u64,
    /// Sum of their reservations.
    pub reserved: u64,
    /// Waiting tickets.
    pub waiting: u64,
    /// Sum of their reservations.
    pub waiting_tokens: u64,
    /// Ended tickets that are remembered.
    pub ended: u64,
    /// When the oldest held lease was granted.
    pub oldest_lease: Option<Timestamp>,
    /// Close intents that are not done.
    pub closes_open: u64,
    /// Finished ones that are remembered.
    pub closes_finished: u64,
    /// Those of them that failed (CLO9).
    pub closes_failed: u64,
    /// Sessions that hold a lease, wait, have a close, or whose last use is kept.
    pub sessions: u64,
    /// Step reports that are kept.
    pub steps: u64,
    /// Runs that have a window of their own (REP1).
    pub runs: u64,
    /// Settings that were set at run time (SET2).
    pub settings: u64,
}

/// Looks into the store of a directory: checks its integrity, loads everything, leaves the file as
/// it is byte for byte (DUR5).
///
/// # Errors
/// See [`OfflineError`].
pub fn look(directory: &Path) -> Result<Look, OfflineError> {
    let path = existing(directory)?;
    let seen = see(directory)?;
    Ok(Look { path, seen })
}

impl Look {
    /// Its schema.
    #[must_use]
    pub const fn schema(&self) -> u32 {
        self.seen.schema
    }

    /// Whether the last stop was an orderly one.
    #[must_use]
    pub const fn clean(&self) -> bool {
        self.seen.clean
    }

    /// Bytes on disk.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.seen.bytes
    }

    /// What it holds.
    #[must_use]
    pub const fn image(&self) -> &Image {
        &self.seen.image
    }

    /// What it holds, for keeps; the store is free again.
    #[must_use]
    pub fn into_image(self) -> Image {
        self.seen.image
    }

    /// The figures.
    #[must_use]
    pub fn inspect(&self) -> Inspection {
        let mut found = Inspection {
            epoch: epoch_of(&self.seen.image).0,
            leases: 0,
            reserved: 0,
            waiting: 0,
            waiting_tokens: 0,
            ended: 0,
            oldest_lease: None,
            closes_open: 0,
            closes_finished: 0,
            closes_failed: 0,
            sessions: 0,
            steps: 0,
            runs: 0,
            settings: 0,
        };
        let image = &self.seen.image;
        let mut sessions: BTreeSet<&SessionId> = image.sessions.iter().map(|(id, _)| id).collect();
        for ticket in &image.tickets {
            let asked = ticket.asked.as_ref();
            let tokens = asked.map_or(0, |asked| asked.terms.reservation.get());
            if !matches!(ticket.stage, Stage::Ended(_)) {
                sessions.extend(asked.map(|asked| &asked.session));
            }
            match &ticket.stage {
                Stage::Held(lease) => {
                    found.leases = found.leases.saturating_add(1);
                    found.reserved = found.reserved.saturating_add(tokens);
                    let oldest = found.oldest_lease.unwrap_or(lease.granted_at);
                    found.oldest_lease = Some(oldest.min(lease.granted_at));
                }
                Stage::Waiting { .. } => {
                    found.waiting = found.waiting.saturating_add(1);
                    found.waiting_tokens = found.waiting_tokens.saturating_add(tokens);
                }
                Stage::Ended(_) => found.ended = found.ended.saturating_add(1),
            }
        }
        for close in &image.closes {
            sessions.insert(&close.session);
            let count = if close.is_done() {
                &mut found.closes_finished
            } else {
                &mut found.closes_open
            };
            *count = count.saturating_add(1);
            let failed = u64::from(close.has_failed());
            found.closes_failed = found.closes_failed.saturating_add(failed);
        }
        found.sessions = u64::try_from(sessions.len()).unwrap_or(u64::MAX);
        found.steps = u64::try_from(image.steps.len()).unwrap_or(u64::MAX);
        let runs = image.windows.iter().filter(|(run, _)| run.is_some());
        found.runs = u64::try_from(runs.count()).unwrap_or(u64::MAX);
        let set = Setting::ALL
            .iter()
            .filter(|setting| image.overrides.has(**setting));
        found.settings = u64::try_from(set.count()).unwrap_or(u64::MAX);
        found
    }

    /// Compares the rows with each other, and their sums with those that a start would make of them.
    ///
    /// # Errors
    /// [`OpenError::Damaged`], with what disagrees.
    pub fn verify(&self) -> Result<Inspection, OfflineError> {
        let damaged = |what: &str| OpenError::Damaged(self.path.clone(), what.to_owned());
        logical::check(&self.seen.image).map_err(damaged)?;
        let found = self.inspect();
        let view = start_from(&self.seen.image);
        let shown = |tokens: u64| Tokens::clamped(u128::from(tokens));
        let same = view.leases == found.leases
            && view.reserved == shown(found.reserved)
            && view.waiting == found.waiting
            && view.waiting_tokens == shown(found.waiting_tokens)
            && view.epoch.0 == found.epoch
            // A start may find that the last engines of some have no session close.
            && view.closes_pending <= found.closes_open
            && view.seq == self.seen.image.seq;
        if same {
            Ok(found)
        } else {
            Err(damaged("the sums of its rows disagree").into())
        }
    }
}

/// The picture right after a start from the image.
fn start_from(image: &Image) -> View {
    let params = StartParams {
        now: image.now,
        salt: 0,
        seed: 0,
        policy: Policy::default(),
        reset_settings: false,
        fleet: FleetConfig {
            has_router: true,
            static_engines: Default::default(),
        },
    };
    let Ok(started) = Machine::restore(image.clone(), params).commit(&mut MemoryStore::default());
    started.machine.view()
}

/// Writes the logical copy of what was found.
///
/// # Errors
/// [`OfflineError::Write`].
pub fn backup(look: Look, to: &mut impl Write) -> Result<(), OfflineError> {
    for piece in CopyPieces::new(look.seen.image) {
        to.write_all(&piece).map_err(OfflineError::Write)?;
    }
    to.flush().map_err(OfflineError::Write)
}

/// Makes a new store from a copy, where there is none. Its numbers are moved on, so that nothing that
/// was answered after the copy was taken is answered again (ID2). Tells what the store holds.
///
/// # Errors
/// See [`OfflineError`]; there is no store then.
pub fn restore(directory: &Path, from: impl BufRead, now: Timestamp) -> Result<Look, OfflineError> {
    let path = directory.join(FILE_NAME);
    refuse_existing(&path)?;
    let copy = read_copy(from)?;
    let image = moved_on(copy, now).map_err(|what| CopyError::Damaged {
        line: 1,
        what: what.to_owned(),
    })?;
    write_new(&FsDisk::new(directory), &image)?;
    let made = look(directory)?;
    if *made.image() == image {
        Ok(made)
    } else {
        let what = "what was written is not what is read back".to_owned();
        Err(OpenError::Damaged(path, what).into())
    }
}

/// Renames the store, whatever it is, so that the next start finds none. Never deletes. Tells the new
/// name.
///
/// # Errors
/// See [`OfflineError`]; a store in use stays.
pub fn reset(directory: &Path, stamp: &str) -> Result<PathBuf, OfflineError> {
    let path = found(directory)?;
    let io = |error: io::Error| io_error(&path, error);
    // Damage is no hindrance; the lock is held until the store has its other name.
    let held = hold(directory)?;
    let mut number = 1_u32;
    let aside = loop {
        let suffix = match number {
            1 => String::new(),
            number => format!("-{number}"),
        };
        let aside = directory.join(format!("{FILE_NAME}.reset-{stamp}{suffix}"));
        match fs::symlink_metadata(&aside) {
            Ok(_) => number = number.saturating_add(1),
            Err(error) if error.kind() == io::ErrorKind::NotFound => break aside,
            Err(error) => return Err(io(error).into()),
        }
    };
    fs::rename(&path, &aside).map_err(io)?;
    FsDisk::new(directory).sync().map_err(io)?;
    drop(held);
    Ok(aside)
}

/// The store of a directory that may be one: an empty file is none.
fn existing(directory: &Path) -> Result<PathBuf, OfflineError> {
    let path = found(directory)?;
    match fs::metadata(&path) {
        Ok(metadata) if metadata.len() == 0 => Err(OpenError::Foreign(path).into()),
        Ok(_) => Ok(path),
        Err(error) => Err(io_error(&path, error).into()),
    }
}

/// What stands where the store of a directory stands, whatever it is.
fn found(directory: &Path) -> Result<PathBuf, OfflineError> {
    let path = directory.join(FILE_NAME);
    match fs::symlink_metadata(&path) {
        Ok(_) => Ok(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(OfflineError::Missing(directory.to_path_buf()))
        }
        Err(error) => Err(io_error(&path, error).into()),
    }
}

fn refuse_existing(path: &Path) -> Result<(), OfflineError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Err(OfflineError::Exists(path.to_path_buf())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io_error(path, error).into()),
    }
}
