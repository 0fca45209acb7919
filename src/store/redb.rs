//! The store on redb: one transaction per turn, durable before it returns (DUR1).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use kvgate_core::ids::Term;
use kvgate_core::policy::{EPOCHS_MAX, STARTS_MAX};
use kvgate_core::record::Record;
use kvgate_core::settings::Overrides;
use kvgate_core::state::{EpochEntry, Start};
use kvgate_core::store::{Commit, Image, Store, StoreControl};
use kvgate_core::tally::Tally;
use redb::{
    Database, Durability, Key, ReadableDatabase, ReadableTable, Table, TableDefinition,
    WriteTransaction,
};

use super::FILE_NAME;
use super::disk::Disk;
use super::error::{CommitError, OpenError};
use super::migrations::META;
use super::rows::{self, Head, RowError};
use super::space::{self, Space, Watch};
use super::tables::{
    AUDIT, CLEAN, CLOSES, ENGINES, EPOCHS, HEAD, SESSIONS, SETTINGS, STARTS, STEPS, TALLY, TICKETS,
    WINDOW, WINDOWS,
};

/// The store.
#[derive(Debug)]
pub struct RedbStore {
    database: Database,
    disk: Arc<dyn Disk>,
    buffer: Vec<u8>,
    rows: Rows,
    watch: Mutex<Watch>,
}

/// What is known of the rows without reading them.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// Keys of the tables that are kept to a bound.
    epochs: Vec<u64>,
    starts: Vec<u64>,
    /// Bytes of all keys and values.
    pub live: u64,
}

impl Rows {
    /// Reads everything.
    pub fn load(database: &Database) -> Result<(Image, Self), CommitError> {
        let transaction = database.begin_read()?;
        let mut image = Image::default();
        let mut rows = Self::default();
        let meta = transaction.open_table(META)?;
        for row in meta.iter()? {
            let (key, value) = row?;
            rows.count(key.value().len(), value.value().len());
        }
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
            rows.count(NUMBER, value.value().len());
            image
                .tickets
                .push(rows::decode_ticket(key.value(), value.value())?);
        }
        for row in transaction.open_table(STARTS)?.iter()? {
            let (key, value) = row?;
            rows.count(NUMBER, value.value().len());
            rows.starts.push(key.value());
            image.starts.push(rows::decode_start(value.value())?);
        }
        for row in transaction.open_table(EPOCHS)?.iter()? {
            let (key, value) = row?;
            rows.count(NUMBER, value.value().len());
            rows.epochs.push(key.value());
            image
                .epochs
                .push(rows::decode_epoch(key.value(), value.value())?);
        }
        for row in transaction.open_table(ENGINES)?.iter()? {
            let (key, value) = row?;
            rows.count(key.value().len(), value.value().len());
            image
                .engines
                .push(rows::decode_engine(key.value(), value.value())?);
        }
        for row in transaction.open_table(CLOSES)?.iter()? {
            let (key, value) = row?;
            rows.count(NUMBER, value.value().len());
            image
                .closes
                .push(rows::decode_close(key.value(), value.value())?);
        }
        for row in transaction.open_table(SESSIONS)?.iter()? {
            let (key, value) = row?;
            rows.count(key.value().len(), value.value().len());
            image
                .sessions
                .push(rows::decode_session(key.value(), value.value())?);
        }
        if let Some(value) = meta.get(WINDOW)? {
            let window = rows::decode_window(value.value())?;
            image.windows.push((None, window));
        }
        for row in transaction.open_table(WINDOWS)?.iter()? {
            let (key, value) = row?;
            rows.count(key.value().len(), value.value().len());
            let (run, window) = rows::decode_window_of(key.value(), value.value())?;
            image.windows.push((Some(run), window));
        }
        for row in transaction.open_table(STEPS)?.iter()? {
            let (key, value) = row?;
            rows.count(NUMBER, value.value().len());
            image
                .steps
                .push(rows::decode_step(key.value(), value.value())?);
        }
        if let Some(value) = meta.get(SETTINGS)? {
            image.overrides = rows::decode_settings(value.value())?;
        }
        for row in transaction.open_table(AUDIT)?.iter()? {
            let (key, value) = row?;
            rows.count(NUMBER, value.value().len());
            image
                .audit
                .push(rows::decode_audit(key.value(), value.value())?);
        }
        Ok((image, rows))
    }

    /// Writes a whole image into empty tables.
    pub fn write(transaction: &WriteTransaction, image: &Image) -> Result<Self, CommitError> {
        let mut rows = Self::default();
        let buffer = &mut Vec::new();
        let mut meta = transaction.open_table(META)?;
        // As an empty store has none of these, an empty image makes none.
        if *image != Image::default() {
            let head = Head {
                term: image.term,
                seq: image.seq.0,
                now: image.now.millis(),
                next_issue: image.next_issue,
            };
            head.encode(buffer)?;
            rows.put(&mut meta, HEAD, HEAD.len(), buffer)?;
            rows::encode_tally(&image.tally, buffer)?;
            rows.put(&mut meta, TALLY, TALLY.len(), buffer)?;
        }
        let mut tickets = transaction.open_table(TICKETS)?;
        for ticket in &image.tickets {
            rows::encode_ticket(ticket, buffer)?;
            rows.put(&mut tickets, ticket.row.0, NUMBER, buffer)?;
        }
        let mut starts = transaction.open_table(STARTS)?;
        // The last start is the one of the image's term, and each start took the next term.
        let first = image
            .term
            .saturating_add(1)
            .checked_sub(image.starts.len() as u64)
            .ok_or(RowError::Range)?;
        for (term, start) in (first..).zip(&image.starts) {
            rows::encode_start(start, buffer)?;
            rows.put(&mut starts, term, NUMBER, buffer)?;
            rows.starts.push(term);
        }
        let mut epochs = transaction.open_table(EPOCHS)?;
        for entry in &image.epochs {
            rows::encode_epoch(entry, buffer)?;
            rows.put(&mut epochs, entry.epoch.0, NUMBER, buffer)?;
            rows.epochs.push(entry.epoch.0);
        }
        let mut engines = transaction.open_table(ENGINES)?;
        for engine in &image.engines {
            rows::encode_engine(engine, buffer)?;
            let id = engine.id.as_str();
            rows.put(&mut engines, id, id.len(), buffer)?;
        }
        let mut closes = transaction.open_table(CLOSES)?;
        for close in &image.closes {
            rows::encode_close(close, buffer)?;
            rows.put(&mut closes, close.id.number.0, NUMBER, buffer)?;
        }
        let mut sessions = transaction.open_table(SESSIONS)?;
        for (session, used) in &image.sessions {
            rows::encode_session(*used, buffer)?;
            let id = session.as_str();
            rows.put(&mut sessions, id, id.len(), buffer)?;
        }
        let mut windows = transaction.open_table(WINDOWS)?;
        for (run, window) in &image.windows {
            rows::encode_window(window, buffer)?;
            match run {
                Some(run) => {
                    let run = run.as_str();
                    rows.put(&mut windows, run, run.len(), buffer)?;
                }
                None => rows.put(&mut meta, WINDOW, WINDOW.len(), buffer)?,
            }
        }
        let mut steps = transaction.open_table(STEPS)?;
        for report in &image.steps {
            let number = rows::encode_step(report, buffer)?;
            rows.put(&mut steps, number.0, NUMBER, buffer)?;
        }
        if image.overrides != Overrides::default() {
            rows::encode_settings(&image.overrides, buffer)?;
            rows.put(&mut meta, SETTINGS, SETTINGS.len(), buffer)?;
        }
        let mut audit = transaction.open_table(AUDIT)?;
        for entry in &image.audit {
            rows::encode_audit(entry, buffer)?;
            rows.put(&mut audit, entry.no.0, NUMBER, buffer)?;
        }
        Ok(rows)
    }

    fn count(&mut self, key: usize, value: usize) {
        self.live = self.live.saturating_add((key + value) as u64);
    }

    fn uncount(&mut self, key: usize, value: usize) {
        self.live = self.live.saturating_sub((key + value) as u64);
    }

    /// Inserts or replaces a row.
    pub fn put<'k, K: Key + 'static>(
        &mut self,
        table: &mut Table<'_, K, &'static [u8]>,
        key: impl std::borrow::Borrow<K::SelfType<'k>>,
        key_len: usize,
        value: &[u8],
    ) -> Result<(), CommitError> {
        let old = table.insert(key, value)?.map(|old| old.value().len());
        self.count(key_len, value.len());
        if let Some(old) = old {
            self.uncount(key_len, old);
        }
        Ok(())
    }

    /// Removes a row, if it is there.
    fn take<'k, K: Key + 'static>(
        &mut self,
        table: &mut Table<'_, K, &'static [u8]>,
        key: impl std::borrow::Borrow<K::SelfType<'k>>,
        key_len: usize,
    ) -> Result<(), CommitError> {
        let old = table.remove(key)?.map(|old| old.value().len());
        if let Some(old) = old {
            self.uncount(key_len, old);
        }
        Ok(())
    }
}

/// Bytes of a key that is a number.
const NUMBER: usize = size_of::<u64>();

impl RedbStore {
    pub(super) fn new(database: Database, disk: Arc<dyn Disk>, rows: Rows) -> Self {
        let watch = Mutex::new(Watch::new(&*disk, Instant::now()));
        Self {
            database,
            disk,
            buffer: Vec::new(),
            rows,
            watch,
        }
    }

    /// Bytes of all keys and values, without what redb adds.
    #[must_use]
    pub const fn live_bytes(&self) -> u64 {
        self.rows.live
    }

    /// Room on the disk, as of about a second ago at most.
    #[must_use]
    pub fn space(&self) -> Space {
        self.watch
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .look(&*self.disk, self.rows.live, Instant::now())
    }

    /// Gives the room of the ballast to the store. A commit that fails for want of room does so by
    /// itself (DUR4).
    pub fn free_ballast(&self) {
        if space::give_way(&*self.disk) {
            tracing::warn!("the disk is full: the ballast was given away");
        }
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

    fn write(&mut self, commit: Commit<'_>) -> Result<(), CommitError> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        {
            let mut writing = Writing {
                meta: transaction.open_table(META)?,
                tickets: transaction.open_table(TICKETS)?,
                closes: None,
                sessions: None,
                windows: None,
                audit: None,
                transaction: &transaction,
                rows: &mut self.rows,
                buffer: &mut self.buffer,
            };
            writing.head(&Head {
                term: commit.term.0,
                seq: commit.seq.0,
                now: commit.now.millis(),
                next_issue: commit.next_issue,
            })?;
            for record in commit.records {
                writing.record(record)?;
            }
        }
        transaction.commit()?;
        Ok(())
    }
}

/// One turn on its way into its transaction. Tables that most turns do not touch are opened by the
/// first record that does, and stay open: one turn may bring many of them.
struct Writing<'t> {
    transaction: &'t WriteTransaction,
    rows: &'t mut Rows,
    buffer: &'t mut Vec<u8>,
    meta: Table<'t, &'static str, &'static [u8]>,
    tickets: Table<'t, u64, &'static [u8]>,
    closes: Option<Table<'t, u64, &'static [u8]>>,
    sessions: Option<Table<'t, &'static str, &'static [u8]>>,
    windows: Option<Table<'t, &'static str, &'static [u8]>>,
    audit: Option<Table<'t, u64, &'static [u8]>>,
}

impl Writing<'_> {
    fn head(&mut self, head: &Head) -> Result<(), CommitError> {
        head.encode(self.buffer)?;
        self.rows.put(&mut self.meta, HEAD, HEAD.len(), self.buffer)
    }

    fn record(&mut self, record: &Record) -> Result<(), CommitError> {
        match record {
            Record::Ticket(ticket) => {
                rows::encode_ticket(ticket, self.buffer)?;
                self.rows
                    .put(&mut self.tickets, ticket.row.0, NUMBER, self.buffer)
            }
            Record::Forgotten(row) => self.rows.take(&mut self.tickets, row.0, NUMBER),
            Record::Tally(tally) => {
                rows::encode_tally(tally, self.buffer)?;
                self.rows
                    .put(&mut self.meta, TALLY, TALLY.len(), self.buffer)
            }
            Record::Started(term, start) => self.started(*term, start),
            Record::Epoch(entry) => self.epoch(entry),
            Record::Engine(engine) => {
                rows::encode_engine(engine, self.buffer)?;
                let mut engines = self.transaction.open_table(ENGINES)?;
                let id = engine.id.as_str();
                self.rows.put(&mut engines, id, id.len(), self.buffer)
            }
            Record::EngineLeft(id) => {
                let mut engines = self.transaction.open_table(ENGINES)?;
                let id = id.as_str();
                self.rows.take(&mut engines, id, id.len())
            }
            Record::Close(close) => {
                rows::encode_close(close, self.buffer)?;
                let closes = opened(&mut self.closes, self.transaction, CLOSES)?;
                self.rows
                    .put(closes, close.id.number.0, NUMBER, self.buffer)
            }
            Record::CloseForgotten(number) => {
                let closes = opened(&mut self.closes, self.transaction, CLOSES)?;
                self.rows.take(closes, number.0, NUMBER)
            }
            Record::SessionUsed(session, used) => {
                rows::encode_session(*used, self.buffer)?;
                let sessions = opened(&mut self.sessions, self.transaction, SESSIONS)?;
                let id = session.as_str();
                self.rows.put(sessions, id, id.len(), self.buffer)
            }
            Record::SessionForgotten(session) => {
                let sessions = opened(&mut self.sessions, self.transaction, SESSIONS)?;
                let id = session.as_str();
                self.rows.take(sessions, id, id.len())
            }
            Record::Step(report) => {
                let number = rows::encode_step(report, self.buffer)?;
                let mut steps = self.transaction.open_table(STEPS)?;
                self.rows.put(&mut steps, number.0, NUMBER, self.buffer)
            }
            Record::StepForgotten(number) => {
                let mut steps = self.transaction.open_table(STEPS)?;
                self.rows.take(&mut steps, number.0, NUMBER)
            }
            Record::Window(run, window) => {
                rows::encode_window(window, self.buffer)?;
                let Some(run) = run else {
                    return self
                        .rows
                        .put(&mut self.meta, WINDOW, WINDOW.len(), self.buffer);
                };
                let windows = opened(&mut self.windows, self.transaction, WINDOWS)?;
                let run = run.as_str();
                self.rows.put(windows, run, run.len(), self.buffer)
            }
            Record::WindowForgotten(run) => {
                let windows = opened(&mut self.windows, self.transaction, WINDOWS)?;
                let run = run.as_str();
                self.rows.take(windows, run, run.len())
            }
            Record::Settings(overrides) => {
                rows::encode_settings(overrides, self.buffer)?;
                self.rows
                    .put(&mut self.meta, SETTINGS, SETTINGS.len(), self.buffer)
            }
            Record::Audit(entry) => {
                rows::encode_audit(entry, self.buffer)?;
                let audit = opened(&mut self.audit, self.transaction, AUDIT)?;
                self.rows.put(audit, entry.no.0, NUMBER, self.buffer)
            }
            Record::AuditForgotten(no) => {
                let audit = opened(&mut self.audit, self.transaction, AUDIT)?;
                self.rows.take(audit, no.0, NUMBER)
            }
        }
    }

    fn started(&mut self, term: Term, start: &Start) -> Result<(), CommitError> {
        self.rows.put(&mut self.meta, CLEAN, CLEAN.len(), &[0])?;
        let mut starts = self.transaction.open_table(STARTS)?;
        rows::encode_start(start, self.buffer)?;
        self.rows.put(&mut starts, term.0, NUMBER, self.buffer)?;
        self.rows.starts.push(term.0);
        for old in beyond(&mut self.rows.starts, STARTS_MAX) {
            self.rows.take(&mut starts, old, NUMBER)?;
        }
        Ok(())
    }

    fn epoch(&mut self, entry: &EpochEntry) -> Result<(), CommitError> {
        let mut epochs = self.transaction.open_table(EPOCHS)?;
        rows::encode_epoch(entry, self.buffer)?;
        self.rows
            .put(&mut epochs, entry.epoch.0, NUMBER, self.buffer)?;
        self.rows.epochs.push(entry.epoch.0);
        for old in beyond(&mut self.rows.epochs, EPOCHS_MAX) {
            self.rows.take(&mut epochs, old, NUMBER)?;
        }
        Ok(())
    }
}

/// The table, opened by the first call.
fn opened<'s, 't, K: Key + 'static>(
    slot: &'s mut Option<Table<'t, K, &'static [u8]>>,
    transaction: &'t WriteTransaction,
    definition: TableDefinition<'_, K, &'static [u8]>,
) -> Result<&'s mut Table<'t, K, &'static [u8]>, CommitError> {
    Ok(match slot {
        Some(table) => table,
        None => slot.insert(transaction.open_table(definition)?),
    })
}

impl Store for RedbStore {
    type Error = CommitError;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), CommitError> {
        self.write(commit).inspect_err(|error| {
            if error.is_full() {
                self.free_ballast();
            }
        })
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
        match self.disk.find(FILE_NAME) {
            Ok(Some(found)) => found.len,
            _ => 0,
        }
    }

    fn low_space(&self) -> bool {
        self.space().low
    }

    fn close(self) -> Result<(), CommitError> {
        self.mark_clean(true)?;
        Ok(self.database.close()?)
    }
}
