//! The start path: open, never create over; check; migrate; load; rewrite when that is due.
//!
//! Whatever is written here stands whole under another name before it takes the store's name, so a
//! power cut at any time leaves the old store or the new one (DUR1). What it leaves besides is
//! removed at the next start.

use std::io;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvgate_core::store::{Image, Opened};
use redb::{Database, ReadableDatabase, StorageBackend};

use super::disk::{Disk, FileId, Found, FsDisk, Shared};
use super::error::{CommitError, OpenError, damaged_or_io, io_error, open_error};
use super::migrations::{META, SCHEMA, STEPS, Step};
use super::peek::{peek, was_closed};
use super::redb::{RedbStore, Rows};
use super::space;
use super::tables::CLEAN;

/// Name of the store in its directory.
pub const FILE_NAME: &str = "kvgate.redb";

/// A store that is being written.
const FRESH: &str = "kvgate.redb.new";
/// A copy that is being written.
const COPY: &str = "kvgate.redb.copy";
/// The store before it was rewritten.
const OLD: &str = "kvgate.redb.bak";

/// redb's page cache. The image is in memory; only the pages that a commit rewrites are read again.
const CACHE_BYTES: usize = 4 << 20;

/// A file is bloated beyond this many times its live bytes, and that many bytes.
const BLOAT_TIMES: u64 = 4;
const BLOAT_PLUS: u64 = 2 << 20;

/// How often a store in use is tried again, and the rest before each time: half a second in all.
const LOCK_TRIES: u32 = 20;
const LOCK_REST: Duration = Duration::from_millis(25);

/// Bytes of a file that are copied at once.
const COPY_PIECE: usize = 256 << 10;

/// Opens the store in `directory`, creating it only where there is none, and loads what it holds.
///
/// # Errors
/// See [`OpenError`]; a file that is refused is not touched.
pub fn open(directory: &Path) -> Result<Opened<RedbStore>, OpenError> {
    open_on(Arc::new(FsDisk::new(directory)))
}

/// The same on any disk.
///
/// # Errors
/// See [`OpenError`].
pub fn open_on(disk: Arc<dyn Disk>) -> Result<Opened<RedbStore>, OpenError> {
    open_with(disk, STEPS)
}

/// The same with any steps of migration.
///
/// # Errors
/// See [`OpenError`].
pub fn open_with(disk: Arc<dyn Disk>, steps: &[Step]) -> Result<Opened<RedbStore>, OpenError> {
    let opened = match patiently(|| start(&disk, steps)) {
        Err(error) if error.is_full() => {
            let ballast = space::give_way(&*disk);
            let old = disk.remove(OLD);
            tracing::warn!(%error, ballast, old = old.is_ok(), "making room to open the store");
            start(&disk, steps)
        }
        other => other,
    }?;
    if let Err(error) = space::lay(&*disk, opened.store.live_bytes()) {
        tracing::warn!(%error, "no ballast could be laid beside the store");
    }
    Ok(opened)
}

/// Tries again for a moment while the store is in use: the one before may be about to end, and a
/// process that was just forked shares the locks of its parent until it becomes another program.
fn patiently<T>(mut attempt: impl FnMut() -> Result<T, OpenError>) -> Result<T, OpenError> {
    let mut result = attempt();
    for _ in 0..LOCK_TRIES {
        if !matches!(result, Err(OpenError::Locked(_))) {
            break;
        }
        std::thread::sleep(LOCK_REST);
        result = attempt();
    }
    result
}

/// Writes a whole store from an image, where there is none.
///
/// # Errors
/// See [`OpenError`]; also when there is a store already.
pub fn write_new(disk: &dyn Disk, image: &Image) -> Result<(), OpenError> {
    let at = Place::new(disk);
    disk.prepare().map_err(|error| at.io(error))?;
    if at.find()?.is_some() {
        return Err(at.io(io::ErrorKind::AlreadyExists.into()));
    }
    at.discard_unused(FRESH)?;
    let Fresh { database, id, .. } = at.write_fresh(image, STEPS)?;
    database
        .close()
        .map_err(|error| open_error(&at.path, error))?;
    if at.publish_first(id)? {
        Ok(())
    } else {
        Err(at.io(io::ErrorKind::AlreadyExists.into()))
    }
}

fn start(disk: &Arc<dyn Disk>, steps: &[Step]) -> Result<Opened<RedbStore>, OpenError> {
    let at = Place::new(&**disk);
    disk.prepare().map_err(|error| at.io(error))?;
    if at.find()?.is_none() {
        at.discard_unused(FRESH)?;
        let Fresh { database, rows, id } = at.write_fresh(&Image::default(), steps)?;
        if at.publish_first(id)? {
            return Ok(Opened {
                store: RedbStore::new(database, Arc::clone(disk), rows),
                image: Image::default(),
            });
        }
        // Another process was faster: its store is the store.
    }
    let mut look = at.look(steps)?;
    for leftover in [FRESH, COPY] {
        disk.remove(leftover).map_err(|error| at.io(error))?;
    }
    // Whoever gave the file its name may have been killed before that was durable.
    disk.sync().map_err(|error| at.io(error))?;
    let migrates = (look.schema as usize) < steps.len();
    if migrates {
        look = at.migrate(look, steps)?;
    }
    let (image, rows) = Rows::load(&look.database).map_err(|error| error.at(&at.path))?;
    let bloated = look.len
        > BLOAT_TIMES
            .saturating_mul(rows.live)
            .saturating_add(BLOAT_PLUS);
    if look.unclean || migrates || bloated {
        let rewritten = at.rewrite(&look.file, &image, steps).inspect_err(|_| {
            // A part of a store would only take room until the next start.
            drop(disk.remove(FRESH));
        });
        match rewritten {
            Ok(Fresh { database, rows, .. }) => {
                return Ok(Opened {
                    store: RedbStore::new(database, Arc::clone(disk), rows),
                    image,
                });
            }
            // The file as it stands is good, only large.
            Err(error) if error.is_full() && !look.unclean && !migrates => {}
            Err(error) => return Err(error),
        }
    }
    drop(look.database);
    // The look has checked the integrity; this opening may write.
    let database = at.open(&look.file)?;
    Ok(Opened {
        store: RedbStore::new(database, Arc::clone(disk), rows),
        image,
    })
}

/// The newest schema that is known here.
pub(super) fn schema_known() -> u32 {
    u32::try_from(STEPS.len()).unwrap_or(u32::MAX)
}

/// What a store holds. Its file keeps its bytes, and stays locked while this lives.
#[derive(Debug)]
pub(super) struct Seen {
    pub schema: u32,
    pub clean: bool,
    pub bytes: u64,
    pub image: Image,
    _database: Database,
}

/// Looks into a store for somebody who will not write: checks its integrity and loads everything.
pub(super) fn see(directory: &Path) -> Result<Seen, OpenError> {
    patiently(|| see_once(directory))
}

fn see_once(directory: &Path) -> Result<Seen, OpenError> {
    let disk = FsDisk::new(directory);
    let at = Place::new(&disk);
    let look = at.look(STEPS)?;
    let image = at.foresee(&look, STEPS)?;
    Ok(Seen {
        schema: look.schema,
        clean: !look.unclean,
        bytes: look.len,
        image,
        _database: look.database,
    })
}

/// Locks what stands in the store's place, whatever it is, until the answer is dropped. `None` for
/// what is no store that could be locked.
pub(super) fn hold(directory: &Path) -> Result<Option<Database>, OpenError> {
    patiently(|| hold_once(directory))
}

fn hold_once(directory: &Path) -> Result<Option<Database>, OpenError> {
    let disk = FsDisk::new(directory);
    let at = Place::new(&disk);
    let (file, _) = disk.open(FILE_NAME).map_err(|error| at.io(error))?;
    match peek(&file, CACHE_BYTES).map_err(|error| open_error(&at.path, error)) {
        Ok(database) => Ok(Some(database)),
        Err(error @ (OpenError::Locked(_) | OpenError::Permission(..))) => Err(error),
        Err(_) => Ok(None),
    }
}

/// A store that was looked at, and is locked.
struct Look {
    file: Arc<dyn StorageBackend>,
    /// Reads the file and writes nothing to it.
    database: Database,
    schema: u32,
    /// The last stop was none: pages may be in the memory of the operating system only.
    unclean: bool,
    len: u64,
}

/// A store that was written, and is locked, under its first name.
struct Fresh {
    database: Database,
    rows: Rows,
    id: FileId,
}

/// The directory in which a start goes on.
struct Place<'a> {
    disk: &'a dyn Disk,
    path: PathBuf,
}

impl<'a> Place<'a> {
    fn new(disk: &'a dyn Disk) -> Self {
        Self {
            disk,
            path: disk.path(FILE_NAME),
        }
    }

    fn io(&self, error: io::Error) -> OpenError {
        io_error(&self.path, error)
    }

    fn find(&self) -> Result<Option<Found>, OpenError> {
        self.disk.find(FILE_NAME).map_err(|error| self.io(error))
    }

    /// Finds out what the file is; it keeps its bytes whatever that is (DUR5).
    fn look(&self, steps: &[Step]) -> Result<Look, OpenError> {
        let known = u32::try_from(steps.len()).unwrap_or(u32::MAX);
        if self.find()?.is_some_and(|found| found.len == 0) {
            return Err(OpenError::Foreign(self.path.clone()));
        }
        let (file, id) = self.disk.open(FILE_NAME).map_err(|error| self.io(error))?;
        let database = peek(&file, CACHE_BYTES).map_err(|error| open_error(&self.path, error))?;
        // It may have been replaced by its owner before it was locked here.
        if self.find()?.is_none_or(|found| found.id != id) {
            return Err(OpenError::Locked(self.path.clone()));
        }
        let closed = was_closed(&file).map_err(|error| self.io(error))?;
        let (schema, clean) = facts(&database).map_err(|error| match error {
            redb::Error::TableDoesNotExist(_) | redb::Error::TableTypeMismatch { .. } => {
                OpenError::Foreign(self.path.clone())
            }
            other => damaged_or_io(&self.path, other),
        })?;
        match schema {
            None => Err(OpenError::Foreign(self.path.clone())),
            Some(found) if found > known => Err(OpenError::Newer {
                path: self.path.clone(),
                found,
                known,
            }),
            Some(schema) => Ok(Look {
                len: file.len().map_err(|error| self.io(error))?,
                file,
                database,
                schema,
                unclean: !(clean && closed),
            }),
        }
    }

    /// Opens a file of ours for writing.
    fn open(&self, file: &Arc<dyn StorageBackend>) -> Result<Database, OpenError> {
        redb::Builder::new()
            .set_cache_size(CACHE_BYTES)
            .create_with_backend(Shared(Arc::clone(file)))
            .map_err(|error| open_error(&self.path, error))
    }

    /// What the store holds once the missing steps have run. They run in memory; the file shows
    /// through below.
    fn foresee(&self, look: &Look, steps: &[Step]) -> Result<Image, OpenError> {
        for (version, step) in (1_u32..).zip(steps).skip(look.schema as usize) {
            take_step(&look.database, version, *step)
                .map_err(|error| CommitError::from(error).at(&self.path))?;
        }
        let (image, _) = Rows::load(&look.database).map_err(|error| error.at(&self.path))?;
        Ok(image)
    }

    /// Runs the missing steps, each in the transaction that writes its version, and each after a
    /// copy of the file was kept.
    fn migrate(&self, look: Look, steps: &[Step]) -> Result<Look, OpenError> {
        // A row that cannot be migrated, or not be read then, is refused before the file is touched
        // (DUR5).
        self.foresee(&look, steps)?;
        let Look {
            file,
            database,
            schema,
            ..
        } = look;
        drop(database);
        for (version, step) in (1_u32..).zip(steps).skip(schema as usize) {
            self.copy(&file, &format!("{FILE_NAME}.before-{version}"))?;
            let database = self.open(&file)?;
            take_step(&database, version, *step)
                .map_err(|error| CommitError::from(error).at(&self.path))?;
            // The lock goes with it; the next look takes it again.
            database
                .close()
                .map_err(|error| open_error(&self.path, error))?;
            tracing::info!(version, "the store was migrated");
        }
        drop(file);
        self.look(steps)
    }

    /// Copies the file as it stands.
    fn copy(&self, file: &Arc<dyn StorageBackend>, name: &str) -> Result<(), OpenError> {
        let copy = || {
            self.disk.remove(COPY)?;
            let (to, _) = self.disk.create(COPY)?;
            let len = file.len()?;
            to.set_len(len)?;
            let mut piece = vec![0; COPY_PIECE];
            let mut at = 0;
            while at < len {
                let part = usize::try_from(len - at).unwrap_or(usize::MAX);
                let part = part.min(COPY_PIECE);
                let piece = piece.get_mut(..part).ok_or(io::ErrorKind::UnexpectedEof)?;
                file.read(at, piece)?;
                to.write(at, piece)?;
                at += part as u64;
            }
            to.sync_data()?;
            drop(to);
            self.disk.rename(COPY, name)?;
            self.disk.sync()
        };
        copy().map_err(|error| self.io(error))
    }

    /// Writes a store under another name, durable when this returns, and keeps it open and locked.
    fn write_fresh(&self, image: &Image, steps: &[Step]) -> Result<Fresh, OpenError> {
        let in_use = || OpenError::Locked(self.path.clone());
        let (file, id) = self
            .disk
            .create(FRESH)
            .map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists => in_use(),
                _ => self.io(error),
            })?;
        let database = self.open(&file)?;
        // Before it was locked here, another process may have taken it for a leftover.
        if !self.is_fresh(id)? {
            return Err(in_use());
        }
        let rows = fill(&database, image, steps).map_err(|error| match error {
            CommitError::Redb(error) => damaged_or_io(&self.path, error),
            other => OpenError::from(other),
        })?;
        Ok(Fresh { database, rows, id })
    }

    /// Whether the file that is being written has its name still.
    fn is_fresh(&self, id: FileId) -> Result<bool, OpenError> {
        let found = self.disk.find(FRESH).map_err(|error| self.io(error))?;
        Ok(found.is_some_and(|found| found.id == id))
    }

    /// Gives the fresh store its name unless there is a store. Says whether there was none.
    fn publish_first(&self, id: FileId) -> Result<bool, OpenError> {
        if !self.is_fresh(id)? {
            return Err(OpenError::Locked(self.path.clone()));
        }
        let published = match self.disk.link(FRESH, FILE_NAME) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            // No second names on this file system.
            Err(_) if self.find()?.is_some() => Ok(false),
            Err(_) => self.disk.rename(FRESH, FILE_NAME).map(|()| true),
        }
        .map_err(|error| self.io(error))?;
        if self.is_fresh(id)? {
            self.disk.remove(FRESH).map_err(|error| self.io(error))?;
        }
        self.disk.sync().map_err(|error| self.io(error))?;
        Ok(published)
    }

    /// Writes a fresh file and puts it in the place of the old one, which is kept. The caller holds
    /// the lock of the old one.
    fn rewrite(
        &self,
        file: &Arc<dyn StorageBackend>,
        image: &Image,
        steps: &[Step],
    ) -> Result<Fresh, OpenError> {
        let fresh = self.write_fresh(image, steps)?;
        // The name must not be free for an instant, or a power cut there would leave no store. So
        // the old one gets a second name, or is copied where a file cannot have two.
        self.disk.remove(OLD).map_err(|error| self.io(error))?;
        if self.disk.link(FILE_NAME, OLD).is_err() {
            self.copy(file, OLD)?;
        }
        self.disk
            .rename(FRESH, FILE_NAME)
            .and_then(|()| self.disk.sync())
            .map_err(|error| self.io(error))?;
        Ok(fresh)
    }

    /// Removes what an interrupted creation left, unless a process is at it.
    fn discard_unused(&self, name: &str) -> Result<(), OpenError> {
        let file = match self.disk.open(name) {
            Ok((file, _)) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.io(error)),
        };
        if let Ok(false) = file.try_lock_range(Bound::Unbounded, Bound::Unbounded) {
            return Err(OpenError::Locked(self.path.clone()));
        }
        self.disk.remove(name).map_err(|error| self.io(error))
    }
}

/// The schema, and whether the last stop was orderly.
fn facts(database: &Database) -> Result<(Option<u32>, bool), redb::Error> {
    let transaction = database.begin_read()?;
    let meta = transaction.open_table(META)?;
    let schema = meta.get(SCHEMA)?;
    let clean = meta.get(CLEAN)?;
    Ok((
        schema.and_then(|value| value.value().try_into().ok().map(u32::from_le_bytes)),
        clean.is_some_and(|value| value.value() == [1]),
    ))
}

fn take_step(database: &Database, version: u32, step: Step) -> Result<(), redb::Error> {
    // Another process may have been faster, between the look and this lock.
    if facts(database)?.0.is_some_and(|found| found >= version) {
        return Ok(());
    }
    let transaction = database.begin_write()?;
    step(&transaction)?;
    transaction
        .open_table(META)?
        .insert(SCHEMA, version.to_le_bytes().as_slice())?;
    transaction.commit()?;
    Ok(())
}

/// The newest schema and all rows, in one durable transaction.
fn fill(database: &Database, image: &Image, steps: &[Step]) -> Result<Rows, CommitError> {
    let transaction = database.begin_write()?;
    for step in steps {
        step(&transaction)?;
    }
    let version = u32::try_from(steps.len()).unwrap_or(u32::MAX);
    let mut rows = Rows::write(&transaction, image)?;
    {
        let mut meta = transaction.open_table(META)?;
        rows.put(&mut meta, SCHEMA, SCHEMA.len(), &version.to_le_bytes())?;
        rows.put(&mut meta, CLEAN, CLEAN.len(), &[1])?;
    }
    transaction.commit()?;
    Ok(rows)
}
