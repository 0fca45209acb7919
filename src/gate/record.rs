//! What the writer took in, turn by turn: for tests that replay a run.

use std::fmt;

use kvgate_core::batch::Batch;
use kvgate_core::command::Command;
use kvgate_core::effect::{Effect, Tag};
use kvgate_core::ids::TicketId;
use kvgate_core::turn::Turn;
use kvgate_core::units::Timestamp;

/// Is told of every start and of every durable turn, by whoever does it and before anybody is
/// answered.
pub trait Recorder: Send + fmt::Debug {
    /// The core took over from what was stored.
    fn started(&mut self, now: Timestamp);

    /// A turn is durable: its time, all that it took in, in order, and all that it says. `last` is
    /// the turn of an orderly stop.
    fn turn(&mut self, now: Timestamp, commands: Vec<Command>, effects: &[Effect], last: bool);
}

/// A turn under way that remembers its commands when somebody wants them.
pub(super) struct Taking {
    turn: Turn,
    taken: Option<Vec<Command>>,
}

impl Taking {
    pub(super) fn new(turn: Turn, recorded: bool) -> Self {
        Self {
            turn,
            taken: recorded.then(Vec::new),
        }
    }

    pub(super) fn handle(&mut self, command: Command) -> Tag {
        if let Some(taken) = &mut self.taken {
            taken.push(command.clone());
        }
        self.turn.handle(command)
    }

    /// See [`Turn::knows`].
    pub(super) fn knows(&self, ticket: &TicketId) -> bool {
        self.turn.knows(ticket)
    }

    /// Ends the turn, and gives back what it took in.
    pub(super) fn finish(self, last: bool) -> (Batch, Vec<Command>) {
        let batch = if last {
            self.turn.finish_last()
        } else {
            self.turn.finish()
        };
        (batch, self.taken.unwrap_or_default())
    }
}
