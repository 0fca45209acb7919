//! A logical copy of a store: text that outlives schemas and can be read by people and tools.
//!
//! One JSON object a line. The first line says what it is and how much follows, the last one how many
//! lines came before it and their CRC-32. In between stand the rows: facts of the store, counters,
//! starts, epochs, engines, close intents, last uses of sessions, windows of runs, step reports,
//! settings that were set at run time, the audit, tickets, each list in the order of its keys. Copies
//! of version 1 know no closes, those of version 2 no step reports, those of version 3 no settings and
//! no audit: what they do not say begins at nothing.
//!
//! Whoever reads one takes nothing on trust: an unknown kind of line, a field too many, a row that
//! stands twice or out of order, a missing end or a wrong sum are refused with the line's number.

mod operated;
mod shapes;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, BufRead, Read};

use crc32fast::Hasher;
use kvgate_core::audit::AuditEntry;
use kvgate_core::close::{CloseIntent, TargetState};
use kvgate_core::ids::{Epoch, IdError, Issue, RunId, SessionId};
use kvgate_core::policy::{
    AUDIT_MAX, CLOSE_EXCEPTIONS_MAX, EPOCHS_MAX, RUNS_MAX, STARTS_MAX, STEPS_MAX,
};
use kvgate_core::report::{StepReport, Window};
use kvgate_core::settings::Overrides;
use kvgate_core::state::{EpochCause, EpochEntry};
use kvgate_core::store::Image;
use kvgate_core::ticket::{Stage, Ticket};
use kvgate_core::units::Timestamp;

use self::shapes::{Counts, Line};

/// What the first line calls itself.
const FORMAT: &str = "kvgate-backup";

/// The newest form of copies that is known here.
const FORMAT_VERSION: u32 = 4;

/// Longest line that is read: a close on as many engines as a router may list fits, each with the
/// longest address and what it answered.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// Bytes of a written piece, but for the line that fills it.
const PIECE_BYTES: usize = 64 << 10;

/// Why a copy cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// Not the copy of a store.
    #[error(
        "this is not a backup of a kvgate store; name a file that `kvgate store backup` or `GET /v1/backup` wrote"
    )]
    Foreign,
    /// A newer kvgate wrote it.
    #[error(
        "the backup has {what} {found}, this kvgate knows up to {known}; restore it with the newer kvgate"
    )]
    Newer {
        /// Which of its numbers is too new.
        what: &'static str,
        /// That number.
        found: u32,
        /// The newest that is known here.
        known: u32,
    },
    /// It ends before its last line.
    #[error(
        "the backup ends after line {0}, before its end; it was cut off: take it again, or use another one"
    )]
    Truncated(u64),
    /// Its content is not what was written.
    #[error("the backup is damaged in line {line}: {what}; nothing was restored, use another one")]
    Damaged {
        /// Number of the line, from 1.
        line: u64,
        /// What is wrong with it.
        what: String,
    },
    /// Reading failed.
    #[error("the backup cannot be read: {0}")]
    Io(#[from] io::Error),
}

/// What is wrong with one row.
#[derive(Debug, thiserror::Error)]
enum RowFault {
    #[error("an id is refused: {0}")]
    Id(#[from] IdError),
    #[error("{0} is outside its range")]
    Range(&'static str),
    #[error("{0}")]
    Order(&'static str),
}

/// The copy of an image, piece by piece of whole lines. What was written is freed as it goes.
#[derive(Debug)]
pub struct CopyPieces {
    image: Image,
    closes: VecDeque<CloseIntent>,
    sessions: VecDeque<(SessionId, Timestamp)>,
    windows: VecDeque<(Option<RunId>, Window)>,
    steps: VecDeque<StepReport>,
    overrides: Option<Overrides>,
    audit: VecDeque<AuditEntry>,
    tickets: VecDeque<Ticket>,
    stage: WriteStage,
    lines: u64,
    sum: Hasher,
    /// A line could not be encoded: the copy ends without its last line, so that nobody trusts it.
    failed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WriteStage {
    Head,
    Bulk,
    Done,
}

impl CopyPieces {
    /// Begins to write.
    #[must_use]
    pub fn new(image: Image) -> Self {
        Self {
            image,
            closes: VecDeque::new(),
            sessions: VecDeque::new(),
            windows: VecDeque::new(),
            steps: VecDeque::new(),
            overrides: None,
            audit: VecDeque::new(),
            tickets: VecDeque::new(),
            stage: WriteStage::Head,
            lines: 0,
            sum: Hasher::new(),
            failed: false,
        }
    }

    fn put(&mut self, piece: &mut Vec<u8>, line: &Line) {
        let from = piece.len();
        if let Err(error) = serde_json::to_writer(&mut *piece, line) {
            tracing::error!(%error, "a line of a backup cannot be written");
            self.failed = true;
            return;
        }
        piece.push(b'\n');
        self.lines = self.lines.saturating_add(1);
        self.sum.update(piece.get(from..).unwrap_or_default());
    }

    /// Everything but the bulk: closes, last uses, windows, step reports, audit and tickets.
    fn put_head(&mut self, piece: &mut Vec<u8>) {
        self.put(piece, &Line::header(&self.image, Counts::of(&self.image)));
        self.put(piece, &Line::meta(&self.image));
        self.put(piece, &Line::tally(&self.image.tally));
        for start in std::mem::take(&mut self.image.starts) {
            self.put(piece, &Line::start(&start));
        }
        for entry in std::mem::take(&mut self.image.epochs) {
            self.put(piece, &Line::epoch(&entry));
        }
        for engine in std::mem::take(&mut self.image.engines) {
            self.put(piece, &Line::engine(&engine));
        }
        self.closes = std::mem::take(&mut self.image.closes).into();
        self.sessions = std::mem::take(&mut self.image.sessions).into();
        self.windows = std::mem::take(&mut self.image.windows).into();
        self.steps = std::mem::take(&mut self.image.steps).into();
        let overrides = std::mem::take(&mut self.image.overrides);
        self.overrides = (overrides != Overrides::default()).then_some(overrides);
        self.audit = std::mem::take(&mut self.image.audit).into();
        self.tickets = std::mem::take(&mut self.image.tickets).into();
    }

    /// The next line of the bulk.
    fn next_line(&mut self) -> Option<Line> {
        let close = self.closes.pop_front();
        close
            .map(|close| Line::close(&close))
            .or_else(|| {
                let (session, used) = self.sessions.pop_front()?;
                Some(Line::session(&session, used))
            })
            .or_else(|| {
                let (run, window) = self.windows.pop_front()?;
                Some(Line::window(run.as_ref(), &window))
            })
            .or_else(|| {
                let report = self.steps.pop_front()?;
                Some(Line::step(&report))
            })
            .or_else(|| {
                let overrides = self.overrides.take()?;
                Some(Line::settings(&overrides))
            })
            .or_else(|| {
                let entry = self.audit.pop_front()?;
                Some(Line::audit(&entry))
            })
            .or_else(|| {
                let ticket = self.tickets.pop_front()?;
                Some(Line::ticket(&ticket))
            })
    }
}

impl Iterator for CopyPieces {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let mut piece = Vec::with_capacity(PIECE_BYTES);
        if self.stage == WriteStage::Head {
            self.put_head(&mut piece);
            self.stage = WriteStage::Bulk;
        }
        while self.stage == WriteStage::Bulk && piece.len() < PIECE_BYTES && !self.failed {
            match self.next_line() {
                Some(line) => self.put(&mut piece, &line),
                None => {
                    let end = Line::end(self.lines, self.sum.clone().finalize());
                    self.put(&mut piece, &end);
                    self.stage = WriteStage::Done;
                }
            }
        }
        (!piece.is_empty() && !self.failed).then_some(piece)
    }
}

/// Reads a copy to its very end.
///
/// # Errors
/// See [`CopyError`]; a copy is taken whole or not at all.
pub fn read_copy(mut from: impl BufRead) -> Result<Image, CopyError> {
    let mut reading = Reading::default();
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        let read = from
            .by_ref()
            .take(LINE_BYTES_MAX)
            .read_until(b'\n', &mut bytes)?;
        if read == 0 {
            return reading.finish();
        }
        reading.line(&bytes)?;
    }
}

/// How far a copy has been read.
#[derive(Default)]
struct Reading {
    image: Image,
    counts: Counts,
    /// Number of the last change and epoch, as the first line says.
    said: (u64, u64),
    lines: u64,
    sum: Hasher,
    stage: ReadStage,
}

/// The kinds of lines in their order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum ReadStage {
    #[default]
    Nothing,
    Header,
    Meta,
    Tally,
    Starts,
    Epochs,
    Engines,
    Closes,
    Sessions,
    Windows,
    Steps,
    Settings,
    Audit,
    Tickets,
    End,
}

impl Reading {
    fn line(&mut self, bytes: &[u8]) -> Result<(), CopyError> {
        if self.lines == 0 {
            shapes::check_header(bytes)?;
        }
        let number = self.lines.saturating_add(1);
        let damaged = |what: String| CopyError::Damaged { line: number, what };
        let Some(text) = bytes.strip_suffix(b"\n") else {
            return Err(if bytes.len() as u64 == LINE_BYTES_MAX {
                damaged("it is longer than any line of a backup".to_owned())
            } else {
                CopyError::Truncated(self.lines)
            });
        };
        let line: Line =
            serde_json::from_slice(text).map_err(|error| damaged(error.to_string()))?;
        self.take(line)
            .map_err(|fault| damaged(fault.to_string()))?;
        self.sum.update(bytes);
        self.lines = number;
        Ok(())
    }

    fn take(&mut self, line: Line) -> Result<(), RowFault> {
        self.enter(match &line {
            Line::Header(_) => ReadStage::Header,
            Line::Meta(_) => ReadStage::Meta,
            Line::Tally(_) => ReadStage::Tally,
            Line::Start(_) => ReadStage::Starts,
            Line::Epoch(_) => ReadStage::Epochs,
            Line::Engine(_) => ReadStage::Engines,
            Line::Close(_) => ReadStage::Closes,
            Line::Session(_) => ReadStage::Sessions,
            Line::Window(_) => ReadStage::Windows,
            Line::Step(_) => ReadStage::Steps,
            Line::Settings(_) => ReadStage::Settings,
            Line::Audit(_) => ReadStage::Audit,
            Line::Ticket(_) => ReadStage::Tickets,
            Line::End(_) => ReadStage::End,
        })?;
        match line {
            Line::Header(header) => {
                self.counts = header.counts;
                self.said = (header.seq, header.epoch);
            }
            Line::Meta(meta) => meta.put_into(&mut self.image),
            Line::Tally(tally) => self.image.tally = tally.decoded()?,
            Line::Start(start) => self.image.starts.push(start.decoded()?),
            Line::Epoch(entry) => self.image.epochs.push(entry.decoded()),
            Line::Engine(engine) => self.image.engines.push(engine.decoded()?),
            Line::Close(close) => self.image.closes.push(close.decoded()?),
            Line::Session(session) => self.image.sessions.push(session.decoded()?),
            Line::Window(window) => self.image.windows.push(window.decoded()?),
            Line::Step(report) => self.image.steps.push(report.decoded()?),
            Line::Settings(settings) => self.image.overrides = settings.decoded()?,
            Line::Audit(entry) => self.image.audit.push(entry.decoded()?),
            Line::Ticket(ticket) => self.image.tickets.push(ticket.decoded()?),
            Line::End(end) => {
                if end.lines != self.lines {
                    return Err(RowFault::Order("the number of lines is another one"));
                }
                if end.crc32 != format!("{:08x}", self.sum.clone().finalize()) {
                    return Err(RowFault::Order("the sum over all lines is another one"));
                }
            }
        }
        // A line that promises fewer rows than follow would let a copy grow without bound.
        if !self.counts.allow(&self.image) {
            return Err(RowFault::Order(
                "there are more rows than the first line says",
            ));
        }
        Ok(())
    }

    /// Lines stand in the order of their kinds; those that are no list stand once.
    fn enter(&mut self, next: ReadStage) -> Result<(), RowFault> {
        let list = matches!(
            next,
            ReadStage::Starts
                | ReadStage::Epochs
                | ReadStage::Engines
                | ReadStage::Closes
                | ReadStage::Sessions
                | ReadStage::Windows
                | ReadStage::Steps
                | ReadStage::Audit
                | ReadStage::Tickets
        );
        let in_order = if next <= ReadStage::Tally {
            // None of the first three may be missing.
            next as u8 == (self.stage as u8).saturating_add(1)
        } else {
            self.stage >= ReadStage::Tally && (next > self.stage || list && next == self.stage)
        };
        if !in_order {
            return Err(RowFault::Order("this kind of line does not stand here"));
        }
        self.stage = next;
        Ok(())
    }

    fn finish(self) -> Result<Image, CopyError> {
        if self.lines == 0 {
            return Err(CopyError::Foreign);
        }
        if self.stage != ReadStage::End {
            return Err(CopyError::Truncated(self.lines));
        }
        let damaged = |what: &str| CopyError::Damaged {
            line: self.lines,
            what: what.to_owned(),
        };
        if self.counts != Counts::of(&self.image) {
            return Err(damaged("there are fewer rows than the first line says"));
        }
        if self.said != (self.image.seq.0, epoch_of(&self.image).0) {
            return Err(damaged("the first line tells another seq or epoch"));
        }
        check(&self.image).map_err(damaged)?;
        Ok(self.image)
    }
}

/// What holds in every store: keys in order and once, lists within their bounds, no lease number
/// held twice or still to be given (ID2), closes as they may stand (CLO2), one report of a step
/// (REP1).
pub(super) fn check(image: &Image) -> Result<(), &'static str> {
    if !image.tickets.is_sorted_by(|one, next| one.row < next.row) {
        return Err("a ticket's row stands twice or out of order");
    }
    if !image
        .epochs
        .is_sorted_by(|one, next| one.epoch < next.epoch)
    {
        return Err("an epoch stands twice or out of order");
    }
    if !image.engines.is_sorted_by(|one, next| one.id < next.id) {
        return Err("an engine stands twice or out of order");
    }
    if !image.starts.is_sorted_by_key(|start| start.first_issue) {
        return Err("the starts are out of order");
    }
    if image.epochs.len() > EPOCHS_MAX || image.starts.len() > STARTS_MAX {
        return Err("there are more epochs or starts than a store keeps");
    }
    if (image.starts.len() as u64) > image.term {
        return Err("there are more starts than the store has seen");
    }
    let mut held: Vec<Issue> = Vec::new();
    for ticket in &image.tickets {
        match &ticket.stage {
            Stage::Held(lease) => held.push(lease.id.issue),
            Stage::Waiting { .. } => {}
            Stage::Ended(_) => continue,
        }
        if ticket.asked.is_none() {
            return Err("a ticket waits or holds a lease and asked for nothing");
        }
    }
    held.sort_unstable();
    if held.last().is_some_and(|last| last.0 >= image.next_issue) {
        return Err("a lease has a number that is still to be given");
    }
    if !held.is_sorted_by(|one, next| one < next) {
        return Err("a lease stands twice");
    }
    check_closes(image)?;
    check_steps(image)?;
    check_audit(image)
}

/// The same for the audit.
fn check_audit(image: &Image) -> Result<(), &'static str> {
    if image.audit.len() > AUDIT_MAX {
        return Err("there are more entries of the audit than a store keeps");
    }
    if !image.audit.is_sorted_by(|one, next| one.no < next.no) {
        return Err("an entry of the audit stands twice or out of order");
    }
    let numbers = [image.audit.first(), image.audit.last()]
        .into_iter()
        .flatten();
    if numbers
        .into_iter()
        .any(|entry| !(1..=NUMBER_MAX).contains(&entry.no.0))
    {
        return Err("an entry of the audit has a number outside its range");
    }
    Ok(())
}

/// The same for closes and last uses of sessions.
fn check_closes(image: &Image) -> Result<(), &'static str> {
    if !image
        .closes
        .is_sorted_by(|one, next| one.id.number < next.id.number)
    {
        return Err("a close stands twice or out of order");
    }
    if !image.sessions.is_sorted_by(|one, next| one.0 < next.0) {
        return Err("the last use of a session stands twice or out of order");
    }
    let mut open = BTreeMap::new();
    for close in &image.closes {
        if !(1..=NUMBER_MAX).contains(&close.id.number.0) {
            return Err("a close has a number outside its range");
        }
        if open.insert(&close.session, !close.is_done()) == Some(true) {
            return Err("a close is open though its session has a newer one");
        }
        if close.not_aborted.len() > CLOSE_EXCEPTIONS_MAX {
            return Err("a close names more requests than a store keeps");
        }
        if close.is_done() {
            check_finished(close)?;
        }
    }
    Ok(())
}

/// A finished close has counted its engines, and names a few that are not delivered (section 9).
fn check_finished(close: &CloseIntent) -> Result<(), &'static str> {
    if close.targets.len() > CLOSE_EXCEPTIONS_MAX {
        return Err("a finished close names more engines than a store keeps");
    }
    let named = |state| {
        let states = close.targets.values().map(|target| target.state);
        states.filter(|named| *named == state).count() as u64
    };
    if named(TargetState::Pending) > 0 || named(TargetState::Delivered) > 0 {
        return Err("a finished close names an engine that is pending or delivered");
    }
    if TargetState::ENDS
        .iter()
        .any(|state| named(*state) > u64::from(close.count(*state)))
    {
        return Err("a finished close names an engine that it does not count");
    }
    Ok(())
}

/// The same for windows and step reports.
fn check_steps(image: &Image) -> Result<(), &'static str> {
    if !image.windows.is_sorted_by(|one, next| one.0 < next.0) {
        return Err("the window of a run stands twice or out of order");
    }
    let runs = image.windows.iter().filter(|(run, _)| run.is_some());
    if runs.count() > RUNS_MAX || image.steps.len() > STEPS_MAX {
        return Err("there are more runs or step reports than a store keeps");
    }
    if !image
        .steps
        .is_sorted_by(|one, next| one.number < next.number)
    {
        return Err("a step report stands twice or out of order");
    }
    let mut steps = BTreeSet::new();
    for report in &image.steps {
        let in_range = |number: u64, from| (from..=NUMBER_MAX).contains(&number);
        if !report.number.is_some_and(|number| in_range(number.0, 1))
            || !report.step.is_some_and(|step| in_range(step, 0))
        {
            return Err("a step report has a number outside its range");
        }
        if !steps.insert((&report.run, report.step)) {
            return Err("a step has two reports");
        }
    }
    Ok(())
}

/// Numbers that count what a store has given out are moved on by at least this and then rounded up
/// to a multiple of it: no life of a store comes that far.
const FAR: u64 = 1 << 32;

/// The same for terms and epochs, which people read: a store sees few of them.
const FAR_FEW: u64 = 1_000;

/// Changes a second that a service cannot reach, as a power of two: a store that is restored from the
/// same copy again begins above all that the first one has numbered meanwhile.
const CHANGES_A_SECOND_BITS: u32 = 20;

/// Largest number that is given out: every reader of JSON keeps it exact.
const NUMBER_MAX: u64 = (1 << 53) - 1;

/// The image of a store that begins a new life from a copy at `now` (ID2, DUR6).
///
/// The copy does not know what was answered after it was taken. So every number that answers carry
/// moves so far on that none is repeated: seq, term, lease number and epoch. The epoch that begins
/// here says why. Lease ids of the life before are told from new ones by their random part as well,
/// close ids by that part alone: their numbers only order the closes of one store.
///
/// # Errors
/// When one of the numbers is at its end, which takes longer than any service lives.
pub fn moved_on(mut image: Image, now: Timestamp) -> Result<Image, &'static str> {
    let now = now.max(image.now);
    let moved = |number: u64, step: u64| {
        (number / step)
            .checked_add(2)
            .and_then(|steps| steps.checked_mul(step))
            .filter(|number| *number <= NUMBER_MAX)
            .ok_or("a number of the backup is at its end")
    };
    let by_time = (now.millis() / 1_000) << CHANGES_A_SECOND_BITS;
    let used = image.tickets.iter().filter_map(Ticket::issue);
    let next_issue = used
        .map(|issue| issue.0.saturating_add(1))
        .fold(image.next_issue, u64::max);
    image.next_issue = moved(next_issue, FAR)?;
    image.seq.0 = moved(image.seq.0, FAR)?.max(by_time.min(NUMBER_MAX));
    image.term = moved(image.term, FAR_FEW)?;
    let last = image.epochs.last().map_or(1, |entry| entry.epoch.0);
    image.epochs.push(EpochEntry {
        epoch: Epoch(moved(last, FAR_FEW)?),
        at: now,
        cause: EpochCause::Restored,
    });
    let excess = image.epochs.len().saturating_sub(EPOCHS_MAX);
    image.epochs.drain(..excess);
    image.now = now;
    Ok(image)
}

impl Counts {
    fn of(image: &Image) -> Self {
        let count = |len: usize| u64::try_from(len).unwrap_or(u64::MAX);
        Self {
            starts: count(image.starts.len()),
            epochs: count(image.epochs.len()),
            engines: count(image.engines.len()),
            closes: count(image.closes.len()),
            sessions: count(image.sessions.len()),
            windows: count(image.windows.len()),
            steps: count(image.steps.len()),
            audit: count(image.audit.len()),
            tickets: count(image.tickets.len()),
        }
    }

    fn allow(&self, image: &Image) -> bool {
        let found = Self::of(image);
        found.starts <= self.starts
            && found.epochs <= self.epochs
            && found.engines <= self.engines
            && found.closes <= self.closes
            && found.sessions <= self.sessions
            && found.windows <= self.windows
            && found.steps <= self.steps
            && found.audit <= self.audit
            && found.tickets <= self.tickets
    }
}

/// Counters of a copy; one that a later version added begins at 0, one that is not known is refused.
fn counters<C: Copy + Default, const N: usize>(stored: &[C]) -> Result<[C; N], RowFault> {
    if stored.len() > N {
        return Err(RowFault::Range("the number of counters"));
    }
    let mut counters = [C::default(); N];
    for (counter, value) in counters.iter_mut().zip(stored) {
        *counter = *value;
    }
    Ok(counters)
}

/// Epoch of an image, as a start takes it.
pub(super) fn epoch_of(image: &Image) -> Epoch {
    image.epochs.last().map_or(Epoch(1), |entry| entry.epoch)
}

#[cfg(test)]
mod tests;
