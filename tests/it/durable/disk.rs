//! A simulated disk: a directory of files in memory that remembers what was not synced yet, so that
//! the power can be cut at any operation, and that fails when a plan says so.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvgate::store::{Disk, Found, Open};
use redb::StorageBackend;

/// What a power cut may tear a write at.
const SECTOR: usize = 512;

/// Files by name, as they are when the power comes back.
pub type Files = BTreeMap<String, Vec<u8>>;

/// One thing that happened to the disk, in order.
#[derive(Clone, Debug)]
pub enum Event {
    Write(usize, usize, Vec<u8>),
    SetLen(usize, usize),
    SyncFile(usize),
    /// A sync failed: what was written since the one before is never written by a later one.
    LostSync(usize),
    Name(String, usize),
    Unname(String),
    Rename(String, String, usize),
    SyncNames,
    /// A commit with this number began.
    Tried(usize),
    /// A commit with this number was acknowledged.
    Acked(usize),
}

/// What fails, once or from there on.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The number of the operation, from 0, among those that the error can hit.
    pub at: usize,
    pub error: io::ErrorKind,
    pub sticky: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Look,
    Read,
    Grow,
    Sync,
    Names,
}

/// When another process puts its own file in the place of the named one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    AfterOpen,
    BeforeLink,
}

#[derive(Debug, Default)]
struct State {
    /// Contents, and the room that is taken beyond them.
    files: Vec<(Vec<u8>, u64)>,
    names: BTreeMap<String, usize>,
    log: Vec<Event>,
    capacity: Option<u64>,
    intruder: Option<(When, Vec<u8>)>,
    no_links: bool,
    plan: Option<Plan>,
    /// Operations that the plan's error can hit, so far.
    operations: usize,
    failed: usize,
}

/// The disk; clones share it.
#[derive(Clone, Debug, Default)]
pub struct SimDisk(Arc<Mutex<State>>);

#[derive(Debug)]
struct SimFile {
    disk: SimDisk,
    file: usize,
}

fn missing() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl State {
    fn may(&mut self, kind: Kind) -> io::Result<()> {
        let Some(plan) = self.plan else { return Ok(()) };
        let hits = match plan.error {
            io::ErrorKind::StorageFull => matches!(kind, Kind::Grow | Kind::Names),
            _ => true,
        };
        if !hits {
            return Ok(());
        }
        let number = self.operations;
        self.operations += 1;
        if number == plan.at || plan.sticky && number > plan.at {
            self.failed += 1;
            return Err(plan.error.into());
        }
        Ok(())
    }

    fn intrude(&mut self, now: When, name: &str) {
        if let Some((when, content)) = self.intruder.take() {
            if when == now {
                self.names.insert(name.to_owned(), self.files.len());
                self.files.push((content, 0));
            } else {
                self.intruder = Some((when, content));
            }
        }
    }

    fn used(&self) -> u64 {
        let named: BTreeSet<usize> = self.names.values().copied().collect();
        named
            .iter()
            .map(|file| self.files[*file].0.len() as u64 + self.files[*file].1)
            .sum()
    }

    fn room_for(&self, more: u64) -> io::Result<()> {
        match self.capacity {
            Some(capacity) if self.used() + more > capacity => {
                Err(io::ErrorKind::StorageFull.into())
            }
            _ => Ok(()),
        }
    }
}

impl SimDisk {
    /// A disk with these files, all durable.
    pub fn with(files: &Files) -> Self {
        let disk = Self::default();
        {
            let mut state = disk.state();
            for (name, content) in files {
                let file = state.files.len();
                state.files.push((content.clone(), 0));
                state.names.insert(name.clone(), file);
            }
        }
        disk
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn shared(&self) -> Arc<dyn Disk> {
        Arc::new(self.clone())
    }

    /// The files as a process sees them.
    pub fn files(&self) -> Files {
        let state = self.state();
        let content = |file: &usize| state.files[*file].0.clone();
        state
            .names
            .iter()
            .map(|(name, file)| (name.clone(), content(file)))
            .collect()
    }

    pub fn log(&self) -> Vec<Event> {
        self.state().log.clone()
    }

    pub fn note(&self, event: Event) {
        self.state().log.push(event);
    }

    pub fn fail(&self, plan: Option<Plan>) {
        let mut state = self.state();
        (state.plan, state.operations, state.failed) = (plan, 0, 0);
    }

    /// How many operations failed under the plan.
    pub fn failed(&self) -> usize {
        self.state().failed
    }

    /// Lets another process come in between, once.
    pub fn let_in(&self, when: When, content: Vec<u8>) {
        self.state().intruder = Some((when, content));
    }

    /// A file has one name only, as on some file systems.
    pub fn without_links(&self) {
        self.state().no_links = true;
    }

    pub fn set_capacity(&self, bytes: u64) {
        self.state().capacity = Some(bytes);
    }

    fn opened(&self, file: usize) -> Open {
        let disk = self.clone();
        (Arc::new(SimFile { disk, file }), (0, file as u64))
    }
}

impl Disk for SimDisk {
    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from("simulated").join(name)
    }

    fn prepare(&self) -> io::Result<()> {
        self.state().may(Kind::Look)
    }

    fn find(&self, name: &str) -> io::Result<Option<Found>> {
        let mut state = self.state();
        state.may(Kind::Look)?;
        Ok(state.names.get(name).map(|file| Found {
            len: state.files[*file].0.len() as u64 + state.files[*file].1,
            id: (0, *file as u64),
        }))
    }

    fn open(&self, name: &str) -> io::Result<Open> {
        let mut state = self.state();
        state.may(Kind::Look)?;
        let file = *state.names.get(name).ok_or_else(missing)?;
        state.intrude(When::AfterOpen, name);
        drop(state);
        Ok(self.opened(file))
    }

    fn create(&self, name: &str) -> io::Result<Open> {
        let mut state = self.state();
        state.may(Kind::Names)?;
        if state.names.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let file = state.files.len();
        state.files.push((Vec::new(), 0));
        state.names.insert(name.to_owned(), file);
        state.log.push(Event::Name(name.to_owned(), file));
        drop(state);
        Ok(self.opened(file))
    }

    fn link(&self, name: &str, second: &str) -> io::Result<()> {
        let mut state = self.state();
        state.may(Kind::Names)?;
        let file = *state.names.get(name).ok_or_else(missing)?;
        state.intrude(When::BeforeLink, second);
        if state.no_links {
            return Err(io::ErrorKind::Unsupported.into());
        }
        if state.names.contains_key(second) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        state.names.insert(second.to_owned(), file);
        state.log.push(Event::Name(second.to_owned(), file));
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.state();
        state.may(Kind::Names)?;
        let file = state.names.remove(from).ok_or_else(missing)?;
        state.names.insert(to.to_owned(), file);
        state
            .log
            .push(Event::Rename(from.to_owned(), to.to_owned(), file));
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.state();
        state.may(Kind::Look)?;
        if state.names.remove(name).is_some() {
            state.log.push(Event::Unname(name.to_owned()));
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state();
        state.may(Kind::Sync)?;
        state.log.push(Event::SyncNames);
        Ok(())
    }

    fn free(&self) -> io::Result<u64> {
        let mut state = self.state();
        state.may(Kind::Look)?;
        let used = state.used();
        Ok(state
            .capacity
            .map_or(1 << 40, |capacity| capacity.saturating_sub(used)))
    }

    fn allocate(&self, name: &str, len: u64) -> io::Result<()> {
        self.create(name)?;
        let mut state = self.state();
        state.may(Kind::Grow)?;
        state.room_for(len)?;
        let file = state.names[name];
        state.files[file].1 = len;
        Ok(())
    }
}

impl StorageBackend for SimFile {
    fn len(&self) -> io::Result<u64> {
        let mut state = self.disk.state();
        state.may(Kind::Look)?;
        Ok(state.files[self.file].0.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut state = self.disk.state();
        state.may(Kind::Read)?;
        let from = offset as usize;
        let content = &state.files[self.file].0;
        let there = content
            .get(from..from + out.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(there);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        state.may(Kind::Grow)?;
        let more = len.saturating_sub(state.files[self.file].0.len() as u64);
        state.room_for(more)?;
        state.files[self.file].0.resize(len as usize, 0);
        state.log.push(Event::SetLen(self.file, len as usize));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.disk.state();
        if let Err(error) = state.may(Kind::Sync) {
            state.log.push(Event::LostSync(self.file));
            return Err(error);
        }
        state.log.push(Event::SyncFile(self.file));
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.disk.state();
        state.may(Kind::Grow)?;
        let from = offset as usize;
        state.files[self.file]
            .0
            .get_mut(from..from + data.len())
            .ok_or(io::ErrorKind::UnexpectedEof)?
            .copy_from_slice(data);
        state.log.push(Event::Write(self.file, from, data.to_vec()));
        Ok(())
    }
}

/// Small numbers that look random and are the same in every run.
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % bound.max(1) as u64) as usize
    }
}

/// The part of a disk that survives a power cut, event by event.
#[derive(Clone, Debug, Default)]
pub struct Durable {
    files: BTreeMap<usize, Vec<u8>>,
    names: BTreeMap<String, usize>,
    pending: BTreeMap<usize, Vec<Event>>,
    pending_names: Vec<Event>,
    /// Number of the last commit that was begun, and acknowledged.
    pub tried: usize,
    pub acked: usize,
}

impl Durable {
    /// Begins with what [`SimDisk::with`] begins with.
    pub fn with(files: &Files) -> Self {
        let mut durable = Self::default();
        for (file, (name, content)) in files.iter().enumerate() {
            durable.files.insert(file, content.clone());
            durable.names.insert(name.clone(), file);
        }
        durable
    }

    /// Takes one event; says whether a cut after it can differ from one before it.
    pub fn take(&mut self, event: &Event) -> bool {
        match event {
            Event::Write(file, ..) | Event::SetLen(file, _) => {
                self.pending.entry(*file).or_default().push(event.clone());
            }
            Event::SyncFile(file) => {
                let content = self.files.entry(*file).or_default();
                for event in self.pending.remove(file).unwrap_or_default() {
                    apply(content, &event, |_| true);
                }
            }
            Event::LostSync(file) => drop(self.pending.remove(file)),
            Event::Name(..) | Event::Unname(_) | Event::Rename(..) => {
                self.pending_names.push(event.clone());
            }
            Event::SyncNames => {
                for event in std::mem::take(&mut self.pending_names) {
                    name(&mut self.names, &event);
                }
            }
            Event::Tried(number) => self.tried = *number,
            Event::Acked(number) => (self.tried, self.acked) = (*number, *number),
        }
        !matches!(event, Event::Tried(_))
    }

    /// One outcome of a power cut now: nothing of what was not synced (0), all of it (1), or a
    /// part that the dice choose, writes torn at sectors.
    pub fn cut(&self, mode: usize, dice: &mut Dice) -> Files {
        let mut names = self.names.clone();
        for event in &self.pending_names {
            if mode == 1 || mode > 1 && dice.below(2) == 0 {
                name(&mut names, event);
            }
        }
        let mut survived: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        for file in names.values() {
            let mut content = self.files.get(file).cloned().unwrap_or_default();
            for event in self.pending.get(file).into_iter().flatten() {
                match (mode, dice.below(3)) {
                    (0, _) | (2.., 0) => {}
                    (1, _) | (_, 1) => apply(&mut content, event, |_| true),
                    _ => apply(&mut content, event, |_| dice.below(2) == 0),
                }
            }
            survived.insert(*file, content);
        }
        names
            .into_iter()
            .map(|(name, file)| (name, survived[&file].clone()))
            .collect()
    }
}

/// Applies a change of a file; `keeps` is asked for every sector of a write. What lies beyond the
/// end of the file is lost.
fn apply(content: &mut Vec<u8>, event: &Event, mut keeps: impl FnMut(usize) -> bool) {
    match event {
        Event::SetLen(_, len) if keeps(0) => content.resize(*len, 0),
        Event::Write(_, offset, data) => {
            let mut done = 0;
            while done < data.len() {
                let at = offset + done;
                let part = (SECTOR - at % SECTOR).min(data.len() - done);
                if keeps(at / SECTOR)
                    && let Some(to) = content.get_mut(at..at + part)
                {
                    to.copy_from_slice(&data[done..done + part]);
                }
                done += part;
            }
        }
        _ => {}
    }
}

fn name(names: &mut BTreeMap<String, usize>, event: &Event) {
    match event {
        Event::Name(name, file) => drop(names.insert(name.clone(), *file)),
        Event::Unname(name) => drop(names.remove(name)),
        Event::Rename(from, to, file) => {
            if names.get(from) == Some(file) {
                names.remove(from);
            }
            names.insert(to.clone(), *file);
        }
        _ => {}
    }
}

/// Tells images apart.
pub fn fingerprint(files: &Files) -> u64 {
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    hasher.finish()
}
