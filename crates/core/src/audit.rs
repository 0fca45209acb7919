//! What operators did, as it is kept (SET3): one entry in the same turn as the act.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::close::CloseMode;
use crate::effect::CancelOutcome;
use crate::ids::{AuditNo, CloseId, Label, LeaseId, SessionId, TicketId};
use crate::policy::AUDIT_MAX;
use crate::settings::Moved;
use crate::units::{Timestamp, Tokens};

/// One thing that an operator did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AuditEntry {
    /// Its number.
    pub no: AuditNo,
    /// When.
    pub at: Timestamp,
    /// Who did it, by name.
    pub who: Label,
    /// What it was.
    pub act: AuditAct,
}

/// What was done. Only what changed something is here.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AuditAct {
    /// Settings were changed.
    SettingsChanged(Vec<Moved>),
    /// All settings are as configured again, by the wish of a start.
    SettingsReset(Vec<Moved>),
    /// A lease was taken away.
    LeaseRevoked {
        /// The lease.
        lease: LeaseId,
        /// Its ticket.
        ticket: TicketId,
        /// Its session.
        session: Option<SessionId>,
        /// What it had reserved.
        tokens: Tokens,
    },
    /// A ticket was withdrawn.
    TicketCancelled {
        /// The ticket.
        ticket: TicketId,
        /// Its session; `None` when the ticket was not known.
        session: Option<SessionId>,
        /// What it had asked for.
        tokens: Tokens,
        /// What the cancel met.
        outcome: CancelOutcome,
    },
    /// A session was closed, or its running close was made to abort what runs.
    SessionClosed {
        /// The session.
        session: SessionId,
        /// The close.
        close: CloseId,
        /// How it treats work that runs.
        mode: CloseMode,
    },
    /// A close was sent once more.
    CloseRetried {
        /// The close.
        close: CloseId,
        /// Its session.
        session: SessionId,
        /// Engines that it is sent to.
        engines: u64,
    },
}

/// The entries that are remembered.
#[derive(Clone, Debug)]
pub(crate) struct Audit {
    entries: BTreeMap<AuditNo, AuditEntry>,
    next: u64,
}

impl Audit {
    pub(crate) const fn new() -> Self {
        Self {
            entries: BTreeMap::new(),
            next: 1,
        }
    }

    pub(crate) const fn next(&self) -> AuditNo {
        AuditNo(self.next)
    }

    pub(crate) fn put(&mut self, entry: AuditEntry) {
        self.next = self.next.max(entry.no.0.saturating_add(1));
        self.entries.insert(entry.no, entry);
    }

    pub(crate) fn remove(&mut self, no: AuditNo) {
        self.entries.remove(&no);
    }

    /// The oldest entry, when there is one too many (section 9).
    pub(crate) fn one_too_many(&self) -> Option<AuditNo> {
        let (no, _) = self.entries.first_key_value()?;
        (self.entries.len() > AUDIT_MAX).then_some(*no)
    }

    /// Newest first, from a number on.
    pub(crate) fn newest_from(&self, highest: AuditNo) -> impl Iterator<Item = &AuditEntry> {
        self.entries.range(..=highest).rev().map(|(_, entry)| entry)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// All, by number.
    pub(crate) fn kept(&self) -> Vec<AuditEntry> {
        self.entries.values().cloned().collect()
    }
}
