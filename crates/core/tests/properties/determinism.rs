//! The same commands give the same effects and the same records, however hash tables are spread.

use std::convert::Infallible;

use kvgate_core::command::Command;
use kvgate_core::effect::Effect;
use kvgate_core::ids::Seq;
use kvgate_core::machine::Machine;
use kvgate_core::memory::MemoryStore;
use kvgate_core::record::Record;
use kvgate_core::store::{Commit, Store};
use kvgate_core::units::Timestamp;
use proptest::prelude::*;

use crate::closing::Closing;
use crate::steps::{Kind, Reference, T0, Turn, settings, step};
use crate::subject::{command, params};

/// Keeps every record in its order.
#[derive(Default)]
struct Recorder {
    inner: MemoryStore,
    commits: Vec<(Seq, Timestamp, Vec<Record>)>,
}

impl Store for Recorder {
    type Error = Infallible;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), Infallible> {
        self.commits
            .push((commit.seq, commit.now, commit.records.to_vec()));
        self.inner.commit(commit)
    }
}

pub struct Run {
    machine: Box<Machine>,
    store: Recorder,
    seed: u64,
    closing: Closing,
}

impl Run {
    pub fn new(seed: u64) -> Self {
        let mut store = Recorder::default();
        let start = params(T0, 1, seed, &settings(), false);
        let Ok(committed) = Machine::restore(store.inner.image(), start).commit(&mut store);
        Self {
            machine: committed.machine,
            store,
            seed,
            closing: Closing::default(),
        }
    }

    pub fn take(mut self, turn: &Turn) -> (Self, Vec<Effect>) {
        let batch = if turn.kind == Kind::Start {
            let after = &turn.after;
            let start = params(
                turn.now,
                after.salt,
                self.seed,
                &after.configured,
                after.resets,
            );
            self.closing.started();
            Machine::restore(self.store.inner.image(), start)
        } else {
            let mut under_way = self.machine.turn(Timestamp::from_millis(turn.now));
            for resolved in &turn.commands {
                under_way.handle(command(resolved, &mut self.closing));
            }
            match turn.kind {
                Kind::Last => under_way.finish_last(),
                Kind::Ordinary | Kind::Start => under_way.finish(),
            }
        };
        let Ok(committed) = batch.commit(&mut self.store);
        self.machine = committed.machine;
        self.closing.take(&committed.effects);
        (self, committed.effects)
    }

    /// A turn with one command that the reference does not know.
    pub fn give(mut self, now: u64, command: Command) -> (Self, Vec<Effect>) {
        let mut under_way = self.machine.turn(Timestamp::from_millis(now));
        under_way.handle(command);
        let Ok(committed) = under_way.finish().commit(&mut self.store);
        self.machine = committed.machine;
        self.closing.take(&committed.effects);
        (self, committed.effects)
    }
}

proptest! {
    #![proptest_config(crate::config(100))]

    /// DUR1, DUR6: nothing depends on the order of hash tables.
    #[test]
    fn hash_seeds_change_nothing(
        steps in prop::collection::vec(step(), 1..60),
        seeds in any::<(u64, u64)>(),
    ) {
        let (mut one, mut other) = (Run::new(seeds.0), Run::new(seeds.1));
        let mut reference = Reference::new();
        for step in &steps {
            reference = reference.step(step);
            for turn in &reference.turns {
                let (effects, same);
                (one, effects) = one.take(turn);
                (other, same) = other.take(turn);
                prop_assert_eq!(effects, same);
            }
        }
        prop_assert_eq!(one.store.commits, other.store.commits);
        prop_assert_eq!(one.store.inner, other.store.inner);
    }
}
