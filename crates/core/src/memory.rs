//! A store without a disk: the reference that every other store is compared with.

use alloc::collections::{BTreeMap, VecDeque};
use core::convert::Infallible;

use crate::audit::AuditEntry;
use crate::close::CloseIntent;
use crate::ids::{AuditNo, CloseNo, EngineId, RowNo, RunId, Seq, SessionId, StepNo};
use crate::policy::{EPOCHS_MAX, STARTS_MAX};
use crate::record::Record;
use crate::report::{StepReport, Window};
use crate::settings::Overrides;
use crate::state::{EngineRow, EpochEntry, Start};
use crate::store::{Commit, Image, Store};
use crate::tally::Tally;
use crate::ticket::Ticket;
use crate::units::Timestamp;

/// Keeps what was committed, and can show it as an [`Image`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MemoryStore {
    term: u64,
    seq: Seq,
    now: Timestamp,
    next_issue: u64,
    starts: VecDeque<Start>,
    tickets: BTreeMap<RowNo, Ticket>,
    epochs: VecDeque<EpochEntry>,
    engines: BTreeMap<EngineId, EngineRow>,
    closes: BTreeMap<CloseNo, CloseIntent>,
    sessions: BTreeMap<SessionId, Timestamp>,
    windows: BTreeMap<Option<RunId>, Window>,
    steps: BTreeMap<StepNo, StepReport>,
    overrides: Overrides,
    audit: BTreeMap<AuditNo, AuditEntry>,
    tally: Tally,
    commits: u64,
}

impl MemoryStore {
    /// What a restart would load.
    #[must_use]
    pub fn image(&self) -> Image {
        Image {
            term: self.term,
            seq: self.seq,
            now: self.now,
            next_issue: self.next_issue,
            starts: self.starts.iter().cloned().collect(),
            tickets: self.tickets.values().cloned().collect(),
            epochs: self.epochs.iter().cloned().collect(),
            engines: self.engines.values().cloned().collect(),
            closes: self.closes.values().cloned().collect(),
            sessions: self
                .sessions
                .iter()
                .map(|(id, used)| (id.clone(), *used))
                .collect(),
            windows: self
                .windows
                .iter()
                .map(|(run, window)| (run.clone(), window.clone()))
                .collect(),
            steps: self.steps.values().cloned().collect(),
            overrides: self.overrides.clone(),
            audit: self.audit.values().cloned().collect(),
            tally: self.tally.clone(),
        }
    }

    /// Commits so far.
    #[must_use]
    pub const fn commits(&self) -> u64 {
        self.commits
    }
}

impl Store for MemoryStore {
    type Error = Infallible;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), Infallible> {
        self.seq = commit.seq;
        self.now = self.now.max(commit.now);
        self.next_issue = commit.next_issue;
        self.commits = self.commits.saturating_add(1);
        for record in commit.records {
            match record {
                Record::Started(term, start) => {
                    self.term = term.0;
                    self.starts.push_back(start.clone());
                    while self.starts.len() > STARTS_MAX {
                        self.starts.pop_front();
                    }
                }
                Record::Ticket(ticket) => {
                    self.tickets.insert(ticket.row, ticket.clone());
                }
                Record::Forgotten(row) => {
                    self.tickets.remove(row);
                }
                Record::Epoch(entry) => {
                    self.epochs.push_back(entry.clone());
                    while self.epochs.len() > EPOCHS_MAX {
                        self.epochs.pop_front();
                    }
                }
                Record::Engine(engine) => {
                    self.engines.insert(engine.id.clone(), engine.clone());
                }
                Record::EngineLeft(id) => {
                    self.engines.remove(id);
                }
                Record::Close(close) => {
                    self.closes.insert(close.id.number, (**close).clone());
                }
                Record::CloseForgotten(number) => {
                    self.closes.remove(number);
                }
                Record::SessionUsed(session, used) => {
                    self.sessions.insert(session.clone(), *used);
                }
                Record::SessionForgotten(session) => {
                    self.sessions.remove(session);
                }
                Record::Step(report) => {
                    if let Some(number) = report.number {
                        self.steps.insert(number, (**report).clone());
                    }
                }
                Record::StepForgotten(number) => {
                    self.steps.remove(number);
                }
                Record::Window(run, window) => {
                    self.windows.insert(run.clone(), window.clone());
                }
                Record::WindowForgotten(run) => {
                    self.windows.remove(&Some(run.clone()));
                }
                Record::Settings(overrides) => self.overrides = (**overrides).clone(),
                Record::Audit(entry) => {
                    self.audit.insert(entry.no, (**entry).clone());
                }
                Record::AuditForgotten(no) => {
                    self.audit.remove(no);
                }
                Record::Tally(tally) => self.tally = (**tally).clone(),
            }
        }
        Ok(())
    }
}
