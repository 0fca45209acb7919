//! The seam to durability.
//!
//! *Durable* means: on stable storage before `commit` returns. A failed commit has an unknown
//! outcome; the state that ran ahead of it is consumed with it ([`crate::batch::Batch::commit`]).

use alloc::vec::Vec;

use crate::audit::AuditEntry;
use crate::close::CloseIntent;
use crate::ids::{RunId, Seq, SessionId, Term};
use crate::record::Record;
use crate::report::{StepReport, Window};
use crate::settings::Overrides;
use crate::state::{EngineRow, EpochEntry, Start};
use crate::tally::Tally;
use crate::ticket::Ticket;
use crate::units::Timestamp;

/// One committed turn.
#[derive(Clone, Copy, Debug)]
pub struct Commit<'a> {
    /// The writer's generation; a store rejects an old one.
    pub term: Term,
    /// Number of the last change in this turn (DUR6).
    pub seq: Seq,
    /// The turn's time; the stored line never goes back (TIM1).
    pub now: Timestamp,
    /// The issue number that the next grant gets (ID2).
    pub next_issue: u64,
    /// The facts, in order.
    pub records: &'a [Record],
}

/// Durable state as loaded.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Image {
    /// The last writer's generation; 0 for a new store.
    pub term: u64,
    /// Number of the last change.
    pub seq: Seq,
    /// The last stored time.
    pub now: Timestamp,
    /// The issue number that the next grant gets.
    pub next_issue: u64,
    /// Starts, oldest first.
    pub starts: Vec<Start>,
    /// Tickets, by row.
    pub tickets: Vec<Ticket>,
    /// Epochs, oldest first.
    pub epochs: Vec<EpochEntry>,
    /// Members as last known.
    pub engines: Vec<EngineRow>,
    /// Close intents, by number.
    pub closes: Vec<CloseIntent>,
    /// Last use of sessions, by session; kept only while idle sessions are closed (CLO11).
    pub sessions: Vec<(SessionId, Timestamp)>,
    /// Windows of step reports; `None` is the one of new runs (REP1).
    pub windows: Vec<(Option<RunId>, Window)>,
    /// Step reports, by number.
    pub steps: Vec<StepReport>,
    /// What was set at run time (SET2).
    pub overrides: Overrides,
    /// What operators did, by number (SET3).
    pub audit: Vec<AuditEntry>,
    /// Counters.
    pub tally: Tally,
}

/// Where turns are made durable. Called on the writer's own thread; may block.
pub trait Store {
    /// What can go wrong.
    type Error;

    /// Makes one turn durable, whole or not at all.
    ///
    /// # Errors
    /// Whenever it cannot promise that the turn is on stable storage. Whether it is, is unknown then.
    fn commit(&mut self, commit: Commit<'_>) -> Result<(), Self::Error>;
}

/// A store that was opened, and what it holds.
#[derive(Debug)]
pub struct Opened<S> {
    /// The store.
    pub store: S,
    /// What it holds.
    pub image: Image,
}

/// What a writer does with a store besides committing.
pub trait StoreControl: Store + Sized + 'static {
    /// Why it cannot be opened.
    type OpenError: core::fmt::Display + From<Self::Error> + Send + 'static;

    /// Bytes on disk.
    fn bytes(&self) -> u64;

    /// Whether room for more is so low that nothing new should be promised (DUR4). Cheap: the
    /// answer may be about a second old.
    fn low_space(&self) -> bool {
        false
    }

    /// Marks an orderly stop and closes.
    ///
    /// # Errors
    /// When the mark could not be made durable.
    fn close(self) -> Result<(), Self::Error>;
}
