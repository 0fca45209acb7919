//! The store on redb: one transaction per turn, durable before it returns (DUR1).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use kvgate_core::policy::{EPOCHS_MAX, STARTS_MAX};
use kvgate_core::record::Record;
use kvgate_core::store::{Commit, Image, Opened, Store, StoreControl};
use kvgate_core::tally::Tally;
use redb::{Database, Durability, ReadableDatabase, ReadableTable, StorageError};

use super::migrations::{META, SCHEMA, STEPS, Step};
use super::peek::peek;
use super::rows::{self, Head, RowError};
use super::tables::{CLEAN, ENGINES, EPOCHS, HEAD, STARTS, TALLY, TICKETS};

/// Name of the store in its directory.
pub const FILE_NAME: &str = "kvgate.redb";

/// redb's page cache. The image is in memory; only the pages that a commit rewrites are read again.
pub(super) const CACHE_BYTES: usize = 8 << 20;

/// Why the store cannot be opened; each has its own exit code (DUR5).
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it open.
    #[error("{} is in use by another process; stop that one, or choose another --data", .0.display())]
    Locked(PathBuf),
    /// Its content is not what was written.
    #[error("{} is damaged ({}); it was left as it is. Restore a backup, or move the file away to start empty", .0.display(), .1)]
    Damaged(PathBuf, String),
    /// It is something else, or an empty file.
    #[error("{} is not a kvgate store; it was left as it is. Choose another --data", .0.display())]
    Foreign(PathBuf),
    /// A newer kvgate wrote it.
    #[error("{} has schema {found}, this kvgate knows up to {known}; use the newer kvgate", .path.display())]
    Newer {
        /// The store.
        path: PathBuf,
        /// Its schema.
        found: u32,
        /// The newest that is known here.
        known: u32,
    },
    /// The operating system forbids it.
    #[error("no permission for {}: {}; give the user that runs kvgate access to it", .0.display(), .1)]
    Permission(PathBuf, io::Error),
    /// The disk is full, or another I/O error.
    #[error("cannot use {}: {}; make room or mend the disk", .0.display(), .1)]
    Io(PathBuf, String),
}

/// Why a turn is not durable, or nobody knows.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// redb.
    #[error(transparent)]
    Redb(#[from] redb::Error),
    /// A row that cannot be encoded.
    #[error(transparent)]
    Row(#[from] RowError),
}

impl From<CommitError> for OpenError {
    fn from(error: CommitError) -> Self {
        Self::Io(PathBuf::from(FILE_NAME), error.to_string())
    }
}

macro_rules! from_redb {
    ($($error:ty),*) => {$(
        impl From<$error> for CommitError {
            fn from(error: $error) -> Self {
                Self::Redb(error.into())
            }
        }
    )*};
}
from_redb!(
    redb::TransactionError,
    redb::TableError,
    redb::CommitError,
    redb::StorageError,
    redb::SetDurabilityError
);

/// The store.
#[derive(Debug)]
pub struct RedbStore {
    database: Database,
    path: PathBuf,
    buffer: Vec<u8>,
    /// Rows in the tables that are kept to a bound.
    epochs: Vec<u64>,
    starts: Vec<u64>,
}

/// Opens the store in `directory`, creating it only where there is none, and loads what it holds.
///
/// # Errors
/// See [`OpenError`]; the file is not touched then.
pub fn open(directory: &Path) -> Result<Opened<RedbStore>, OpenError> {
    let path = directory.join(FILE_NAME);
    let io = |error: io::Error| io_error(&path, error);
    fs::create_dir_all(directory).map_err(io)?;
    match fs::symlink_metadata(&path) {
        Ok(metadata) if metadata.len() == 0 => return Err(OpenError::Foreign(path)),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => create(directory, &path)?,
        Err(error) => return Err(io(error)),
    }
    let found = look_at(&path)?;
    // The look has checked the integrity; this opening may write.
    let database = redb::Builder::new()
        .set_cache_size(CACHE_BYTES)
        .open(&path)
        .map_err(|error| open_error(&path, error))?;
    migrate(&database, found, STEPS).map_err(|error| damaged_or_io(&path, error))?;
    RedbStore::of(database, &path)
}

/// Creates under another name and renames, so that a power cut leaves either a whole store or none.
fn create(directory: &Path, path: &Path) -> Result<(), OpenError> {
    let io = |error: io::Error| io_error(path, error);
    let fresh = directory.join(format!("{FILE_NAME}.new"));
    match fs::remove_file(&fresh) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io(error)),
    }
    let database = redb::Builder::new()
        .create(&fresh)
        .map_err(|error| open_error(path, error))?;
    migrate(&database, 0, STEPS).map_err(|error| damaged_or_io(path, error))?;
    drop(database);
    fs::rename(&fresh, path).map_err(io)?;
    sync_directory(directory).map_err(io)
}

/// redb does not sync the directory entry of a new file.
pub(super) fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Runs the steps after version `from`, each in the transaction that writes its version.
pub(super) fn migrate(database: &Database, from: u32, steps: &[Step]) -> Result<(), redb::Error> {
    for (version, step) in (1u32..).zip(steps) {
        if version <= from {
            continue;
        }
        let transaction = database.begin_write()?;
        step(&transaction)?;
        {
            let mut meta = transaction.open_table(META)?;
            meta.insert(SCHEMA, version.to_le_bytes().as_slice())?;
        }
        transaction.commit()?;
    }
    Ok(())
}

/// The newest schema that is known here.
pub(super) fn schema_known() -> u32 {
    u32::try_from(STEPS.len()).unwrap_or(u32::MAX)
}

/// The schema of a whole store of ours; the file keeps its bytes whatever it is (DUR5).
fn look_at(path: &Path) -> Result<u32, OpenError> {
    look_into(path).map(|(_, found)| found)
}

/// A whole store of ours and its schema; whatever is written to it goes to memory only (DUR5).
pub(super) fn look_into(path: &Path) -> Result<(Database, u32), OpenError> {
    let known = schema_known();
    let database = peek(path, CACHE_BYTES).map_err(|error| open_error(path, error))?;
    let found = schema(&database).map_err(|error| match error {
        redb::Error::TableDoesNotExist(_) | redb::Error::TableTypeMismatch { .. } => {
            OpenError::Foreign(path.to_path_buf())
        }
        other => damaged_or_io(path, other),
    })?;
    match found {
        None => Err(OpenError::Foreign(path.to_path_buf())),
        Some(found) if found > known => Err(OpenError::Newer {
            path: path.to_path_buf(),
            found,
            known,
        }),
        Some(found) => Ok((database, found)),
    }
}

fn schema(database: &Database) -> Result<Option<u32>, redb::Error> {
    let transaction = database.begin_read()?;
    let meta = transaction.open_table(META)?;
    let value = meta.get(SCHEMA)?;
    Ok(value.and_then(|value| value.value().try_into().ok().map(u32::from_le_bytes)))
}

pub(super) fn open_error(path: &Path, error: redb::DatabaseError) -> OpenError {
    match error {
        redb::DatabaseError::DatabaseAlreadyOpen => OpenError::Locked(path.to_path_buf()),
        redb::DatabaseError::Storage(StorageError::Io(error)) => io_error(path, error),
        other => damaged_or_io(path, other.into()),
    }
}

pub(super) fn io_error(path: &Path, error: io::Error) -> OpenError {
    match error.kind() {
        io::ErrorKind::PermissionDenied => OpenError::Permission(path.to_path_buf(), error),
        io::ErrorKind::InvalidData => OpenError::Foreign(path.to_path_buf()),
        _ => OpenError::Io(path.to_path_buf(), error.to_string()),
    }
}

pub(super) fn damaged_or_io(path: &Path, error: redb::Error) -> OpenError {
    match error {
        redb::Error::Io(error) => io_error(path, error),
        other => OpenError::Damaged(path.to_path_buf(), other.to_string()),
    }
}

impl RedbStore {
    /// Loads what an open database of the newest schema holds.
    pub(super) fn of(database: Database, path: &Path) -> Result<Opened<Self>, OpenError> {
        let mut store = Self {
            database,
            path: path.to_path_buf(),
            buffer: Vec::new(),
            epochs: Vec::new(),
            starts: Vec::new(),
        };
        let image = store.load().map_err(|error| match error {
            CommitError::Row(error) => OpenError::Damaged(path.to_path_buf(), error.to_string()),
            CommitError::Redb(error) => damaged_or_io(path, error),
        })?;
        Ok(Opened { store, image })
    }

    /// Whether the last stop was an orderly one.
    pub(super) fn was_clean(&self) -> Result<bool, CommitError> {
        let transaction = self.database.begin_read()?;
        let meta = transaction.open_table(META)?;
        let clean = meta.get(CLEAN)?;
        Ok(clean.is_some_and(|value| value.value() == [1]))
    }

    fn load(&mut self) -> Result<Image, CommitError> {
        let transaction = self.database.begin_read()?;
        let mut image = Image::default();
        let meta = transaction.open_table(META)?;
        if let Some(value) = meta.get(HEAD)? {
            let head = Head::decode(value.value())?;
            image.term = head.term;
            image.seq = head.seq();
            image.now = head.now();
            image.next_issue = head.next_issue;
        }
        image.tally = match meta.get(TALLY)? {
            Some(value) => rows::decode_tally(value.value())?,
            None => Tally::default(),
        };
        for row in transaction.open_table(TICKETS)?.iter()? {
            let (key, value) = row?;
            image
                .tickets
                .push(rows::decode_ticket(key.value(), value.value())?);
        }
        for row in transaction.open_table(STARTS)?.iter()? {
            let (key, value) = row?;
            self.starts.push(key.value());
            image.starts.push(rows::decode_start(value.value())?);
        }
        for row in transaction.open_table(EPOCHS)?.iter()? {
            let (key, value) = row?;
            self.epochs.push(key.value());
            image
                .epochs
                .push(rows::decode_epoch(key.value(), value.value())?);
        }
        for row in transaction.open_table(ENGINES)?.iter()? {
            let (key, value) = row?;
            image
                .engines
                .push(rows::decode_engine(key.value(), value.value())?);
        }
        Ok(image)
    }

    fn mark_clean(&self, clean: bool) -> Result<(), CommitError> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        transaction
            .open_table(META)?
            .insert(CLEAN, [u8::from(clean)].as_slice())?;
        transaction.commit()?;
        Ok(())
    }
}

impl Store for RedbStore {
    type Error = CommitError;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), CommitError> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        let buffer = &mut self.buffer;
        {
            let mut meta = transaction.open_table(META)?;
            let mut tickets = transaction.open_table(TICKETS)?;
            let head = Head {
                term: commit.term.0,
                seq: commit.seq.0,
                now: commit.now.millis(),
                next_issue: commit.next_issue,
            };
            head.encode(buffer)?;
            meta.insert(HEAD, buffer.as_slice())?;
            for record in commit.records {
                match record {
                    Record::Ticket(ticket) => {
                        rows::encode_ticket(ticket, buffer)?;
                        tickets.insert(ticket.row.0, buffer.as_slice())?;
                    }
                    Record::Forgotten(row) => {
                        tickets.remove(row.0)?;
                    }
                    Record::Tally(tally) => {
                        rows::encode_tally(tally, buffer)?;
                        meta.insert(TALLY, buffer.as_slice())?;
                    }
                    Record::Started(term, start) => {
                        meta.insert(CLEAN, [0].as_slice())?;
                        let mut starts = transaction.open_table(STARTS)?;
                        rows::encode_start(start, buffer)?;
                        starts.insert(term.0, buffer.as_slice())?;
                        self.starts.push(term.0);
                        for old in beyond(&mut self.starts, STARTS_MAX) {
                            starts.remove(old)?;
                        }
                    }
                    Record::Epoch(entry) => {
                        let mut epochs = transaction.open_table(EPOCHS)?;
                        rows::encode_epoch(entry, buffer)?;
                        epochs.insert(entry.epoch.0, buffer.as_slice())?;
                        self.epochs.push(entry.epoch.0);
                        for old in beyond(&mut self.epochs, EPOCHS_MAX) {
                            epochs.remove(old)?;
                        }
                    }
                    Record::Engine(engine) => {
                        rows::encode_engine(engine, buffer)?;
                        transaction
                            .open_table(ENGINES)?
                            .insert(engine.id.as_str(), buffer.as_slice())?;
                    }
                    Record::EngineLeft(id) => {
                        transaction.open_table(ENGINES)?.remove(id.as_str())?;
                    }
                }
            }
        }
        transaction.commit()?;
        Ok(())
    }
}

/// The oldest keys beyond the bound, taken off the list.
fn beyond(keys: &mut Vec<u64>, bound: usize) -> Vec<u64> {
    let excess = keys.len().saturating_sub(bound);
    keys.drain(..excess).collect()
}

impl StoreControl for RedbStore {
    type OpenError = OpenError;

    fn bytes(&self) -> u64 {
        fs::metadata(&self.path).map_or(0, |metadata| metadata.len())
    }

    fn close(self) -> Result<(), CommitError> {
        self.mark_clean(true)
    }
}
