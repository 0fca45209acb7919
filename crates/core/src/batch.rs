//! The end of a turn: records to be made durable, and effects that wait for it.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::effect::Effect;
use crate::machine::Machine;
use crate::record::Record;
use crate::store::{Commit, Store};

/// A turn that was decided but is not durable yet. The only way to its effects, and back to the
/// machine, is [`Batch::commit`].
#[derive(Debug)]
pub struct Batch {
    pub(crate) machine: Box<Machine>,
    pub(crate) records: Vec<Record>,
    pub(crate) effects: Vec<Effect>,
}

/// A durable turn.
#[derive(Debug)]
pub struct Committed {
    /// Ready for the next turn.
    pub machine: Box<Machine>,
    /// What the shell must now do, in order.
    pub effects: Vec<Effect>,
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
        if !self.records.is_empty() {
            store.commit(Commit {
                term: self.machine.state.term,
                seq: self.machine.state.seq,
                now: self.machine.last_turn,
                next_issue: self.machine.state.next_issue,
                records: &self.records,
            })?;
        }
        Ok(Committed {
            machine: self.machine,
            effects: self.effects,
        })
    }
}
