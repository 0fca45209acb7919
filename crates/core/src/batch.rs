//! The end of a turn: records to be made durable, and effects that wait for it.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::effect::Effect;
use crate::event::Event;
use crate::ids::{LeaseId, TicketId};
use crate::machine::{Machine, Untold};
use crate::record::Record;
use crate::store::{Commit, Store};
use crate::ticket::Stage;
use crate::units::Timestamp;

/// A turn that was decided but is not durable yet. The only way to its effects, and back to the
/// machine, is [`Batch::commit`].
#[derive(Debug)]
pub struct Batch {
    pub(crate) machine: Box<Machine>,
    pub(crate) records: Vec<Record>,
    pub(crate) effects: Vec<Effect>,
    pub(crate) events: Vec<Event>,
    /// Grants that an acquire of this turn claimed: when the turn fails, its caller was not told.
    pub(crate) claimed: Vec<LeaseId>,
}

/// A turn that is not durable, or nobody knows. What ran ahead of the store answers nothing any
/// more; only what it knew of callers is left, for [`Machine::reload`].
#[derive(Debug)]
pub struct Failed<E> {
    /// What the store said.
    pub error: E,
    machine: Box<Machine>,
    claimed: Vec<LeaseId>,
}

impl<E> Failed<E> {
    /// Grants whose caller was not told of them, as far as is known: those of this turn, and those
    /// of earlier ones that were not claimed yet.
    #[must_use]
    pub fn untold(&self) -> Untold {
        let presences = self.machine.presences.unclaimed();
        let waiting_for_a_claim = presences.filter_map(|row| {
            let ticket = self.machine.state.row(row)?;
            match &ticket.stage {
                Stage::Held(lease) => Some(lease.id),
                Stage::Waiting { .. } | Stage::Ended(_) => None,
            }
        });
        Untold(
            waiting_for_a_claim
                .chain(self.claimed.iter().copied())
                .collect(),
        )
    }

    /// When the queue time of a ticket that was in line is over (TIC3); `None` for one that never was.
    #[must_use]
    pub fn bypass_at(&self, ticket: &TicketId) -> Option<Timestamp> {
        let since = match &self.machine.state.ticket(ticket)?.stage {
            Stage::Waiting { since } => *since,
            Stage::Held(lease) => lease.granted_at.before(lease.waited?),
            Stage::Ended(ended) => ended.since?,
        };
        Some(since.after(self.machine.policy.max_wait))
    }
}

/// A durable turn.
#[derive(Debug)]
pub struct Committed {
    /// Ready for the next turn.
    pub machine: Box<Machine>,
    /// What the shell must now do, in order.
    pub effects: Vec<Effect>,
    /// What the turn did that is measured or logged.
    pub events: Vec<Event>,
}

impl Batch {
    /// Whether the store is needed at all: a turn of immediate bypasses and reads costs no disk.
    #[must_use]
    pub fn is_durable_already(&self) -> bool {
        self.records.is_empty()
    }

    /// Makes the turn durable and gives out its effects.
    ///
    /// # Errors
    /// What the store says. The machine is gone then: its memory ran ahead of the store, whose
    /// state must be loaded anew.
    pub fn commit<S: Store>(self, store: &mut S) -> Result<Committed, S::Error> {
        self.try_commit(store).map_err(|failed| failed.error)
    }

    /// The same for a writer that goes on after a failure.
    ///
    /// # Errors
    /// What the store says, with what the turn knew of callers.
    pub fn try_commit<S: Store>(self, store: &mut S) -> Result<Committed, Failed<S::Error>> {
        if !self.records.is_empty() {
            let commit = Commit {
                term: self.machine.state.term,
                seq: self.machine.state.seq,
                now: self.machine.last_turn,
                next_issue: self.machine.state.next_issue,
                records: &self.records,
            };
            if let Err(error) = store.commit(commit) {
                return Err(Failed {
                    error,
                    machine: self.machine,
                    claimed: self.claimed,
                });
            }
        }
        Ok(Committed {
            machine: self.machine,
            effects: self.effects,
            events: self.events,
        })
    }
}
