//! A whole store written in one go, from an image.

use std::fs;
use std::io;
use std::path::Path;

use kvgate_core::store::Image;
use redb::{Database, Durability};

use super::migrations::{META, STEPS};
use super::redb::{
    CommitError, FILE_NAME, OpenError, damaged_or_io, io_error, migrate, open_error, sync_directory,
};
use super::rows::{self, Head};
use super::tables::{CLEAN, ENGINES, EPOCHS, HEAD, STARTS, TALLY, TICKETS};

/// redb's page cache while a whole store is written.
const CACHE_BYTES: usize = 32 << 20;

/// Writes a store that holds exactly the image and was stopped in order. It is made under another
/// name and renamed when it is on stable storage, so that a power cut leaves either the whole store or
/// what was there before.
///
/// # Errors
/// See [`OpenError`].
pub fn write_new(directory: &Path, image: &Image) -> Result<(), OpenError> {
    let path = directory.join(FILE_NAME);
    let io = |error: io::Error| io_error(&path, error);
    fs::create_dir_all(directory).map_err(io)?;
    let fresh = directory.join(format!("{FILE_NAME}.new"));
    match fs::remove_file(&fresh) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io(error)),
    }
    let database = redb::Builder::new()
        .set_cache_size(CACHE_BYTES)
        .create(&fresh)
        .map_err(|error| open_error(&path, error))?;
    migrate(&database, 0, STEPS).map_err(|error| damaged_or_io(&path, error))?;
    fill(&database, image).map_err(|error| match error {
        CommitError::Redb(error) => damaged_or_io(&path, error),
        CommitError::Row(error) => OpenError::Io(path.clone(), error.to_string()),
    })?;
    drop(database);
    fs::rename(&fresh, &path).map_err(io)?;
    sync_directory(directory).map_err(io)
}

fn fill(database: &Database, image: &Image) -> Result<(), CommitError> {
    let mut transaction = database.begin_write()?;
    transaction.set_durability(Durability::Immediate)?;
    let buffer = &mut Vec::new();
    {
        let mut meta = transaction.open_table(META)?;
        let head = Head {
            term: image.term,
            seq: image.seq.0,
            now: image.now.millis(),
            next_issue: image.next_issue,
        };
        head.encode(buffer)?;
        meta.insert(HEAD, buffer.as_slice())?;
        rows::encode_tally(&image.tally, buffer)?;
        meta.insert(TALLY, buffer.as_slice())?;
        meta.insert(CLEAN, [1].as_slice())?;
        let mut tickets = transaction.open_table(TICKETS)?;
        for ticket in &image.tickets {
            rows::encode_ticket(ticket, buffer)?;
            tickets.insert(ticket.row.0, buffer.as_slice())?;
        }
        let mut starts = transaction.open_table(STARTS)?;
        // Each start has a term of its own, the last one the present term.
        let before = u64::try_from(image.starts.len()).unwrap_or(u64::MAX);
        for (term, start) in (image.term.saturating_sub(before)..)
            .skip(1)
            .zip(&image.starts)
        {
            rows::encode_start(start, buffer)?;
            starts.insert(term, buffer.as_slice())?;
        }
        let mut epochs = transaction.open_table(EPOCHS)?;
        for entry in &image.epochs {
            rows::encode_epoch(entry, buffer)?;
            epochs.insert(entry.epoch.0, buffer.as_slice())?;
        }
        let mut engines = transaction.open_table(ENGINES)?;
        for engine in &image.engines {
            rows::encode_engine(engine, buffer)?;
            engines.insert(engine.id.as_str(), buffer.as_slice())?;
        }
    }
    transaction.commit()?;
    Ok(())
}
