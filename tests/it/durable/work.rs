//! A workload through the real core, with an account of what was acknowledged.

use kvgate::store::{CommitError, OpenError, RedbStore, STEPS, Step, open_with};
use kvgate_core::close::CloseMode;
use kvgate_core::command::Command;
use kvgate_core::ids::TicketId;
use kvgate_core::machine::Machine;
use kvgate_core::memory::MemoryStore;
use kvgate_core::store::{Commit, Image, Opened, Store, StoreControl};
use kvgate_core::ticket::{Sent, Stage};
use kvgate_core::units::{Span, Timestamp};

use super::disk::{Event, SimDisk};
use crate::store::{
    acquire, acquire_in, close, operate, outcomes, params, round, take_step, tokens,
};

/// What the reference store held after each commit, 0 being before the first, and how far the
/// store under test told that it is.
#[derive(Clone, Debug)]
pub struct Account {
    pub states: Vec<MemoryStore>,
    pub acked: usize,
}

impl Account {
    pub fn new(begin: MemoryStore) -> Self {
        Self {
            states: vec![begin],
            acked: 0,
        }
    }

    pub fn images(&self) -> Vec<Image> {
        self.states.iter().map(MemoryStore::image).collect()
    }

    pub fn last(&self) -> MemoryStore {
        self.states.last().unwrap().clone()
    }

    /// Which state the image is, among those that may be on disk: every acknowledged commit, and
    /// at most the one whose outcome nobody was told.
    pub fn state_of(&self, image: &Image) -> Option<&MemoryStore> {
        self.states[self.acked..]
            .iter()
            .take(2)
            .find(|state| state.image() == *image)
    }
}

struct Watched<'a> {
    redb: RedbStore,
    disk: &'a SimDisk,
    account: &'a mut Account,
}

impl Store for Watched<'_> {
    type Error = CommitError;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), CommitError> {
        let mut next = self.account.last();
        let Ok(()) = next.commit(commit);
        self.account.states.push(next);
        let number = self.account.states.len() - 1;
        self.disk.note(Event::Tried(number));
        self.redb.commit(commit)?;
        self.disk.note(Event::Acked(number));
        self.account.acked = number;
        Ok(())
    }
}

/// What one process does.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub turns: u64,
    pub orderly: bool,
    pub steps: &'static [Step],
}

impl Default for Work {
    fn default() -> Self {
        Self {
            turns: 6,
            orderly: true,
            steps: STEPS,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Stopped {
    #[error("not opened: {0}")]
    Open(#[from] OpenError),
    #[error("not committed: {0}")]
    Commit(#[from] CommitError),
}

/// Opens, takes over, works, and closes or just stops.
pub fn work(disk: &SimDisk, account: &mut Account, work: Work) -> Result<(), Stopped> {
    let Opened { store, image } = open_with(disk.shared(), work.steps)?;
    let found = account.state_of(&image).cloned();
    let found = found.expect("the store holds what was acknowledged, and one commit more at most");
    // What was not told to anyone is either there or not: the account goes on from what is there.
    account.states.truncate(account.acked);
    account.states.push(found);
    let term = image.term;
    // Every third start comes late: what was finished is forgotten. It closes no idle sessions either.
    let late = term % 3 == 2;
    let gap = Span::from_secs(if late { 4_000 } else { 5 });
    let mut now = image.now.after(gap).max(Timestamp::from_millis(1_000_000));
    let mut params = params(now);
    params.policy.session_idle_close = (!late).then_some(Span::from_secs(5));
    let mut store = Watched {
        redb: store,
        disk,
        account,
    };
    let mut committed = Machine::restore(image, params).commit(&mut store)?;
    for number in 0..work.turns {
        now = now.after(Span::from_millis(1_900));
        let held: Vec<_> = store.account.last().image().tickets;
        let mut turn = committed.machine.turn(now);
        turn.handle(outcomes(&committed.effects));
        if number % 2 == 0 {
            turn.handle(round(now, &["http://a", "http://b"], term + number / 4));
        }
        for ticket in 0..3 {
            let name = format!("t-{term}-{number}-{ticket}");
            let sent = Sent::Sum(tokens(100 + 50 * number + ticket));
            turn.handle(acquire(&name, sent, ticket == 2 && number % 3 == 0));
        }
        if let Some(Stage::Held(lease)) = held
            .iter()
            .map(|ticket| &ticket.stage)
            .find(|stage| matches!(stage, Stage::Held(_)))
        {
            turn.handle(Command::Release(lease.id));
        }
        let cancelled = format!("t-{term}-{}-1", number / 2);
        turn.handle(Command::Cancel(TicketId::new(&cancelled).unwrap()));
        // Programs of a few turns each, some of them closed while they wait or hold a lease.
        let program = format!("program {term}/{}", number / 3);
        if number % 3 == 2 {
            let modes = [CloseMode::Join, CloseMode::Abort];
            turn.handle(close(&program, modes[(number / 3 % 2) as usize]));
        } else {
            let name = format!("p-{term}-{number}");
            let sent = Sent::Sum(tokens(1));
            turn.handle(acquire_in(&program, &name, sent, false, Some(&name)));
        }
        // Two runs take turns with their steps; the next starts ask for some of them again.
        if number % 2 == 1 {
            turn.handle(take_step(number / 2, number));
        }
        turn.handle(operate(term * 5 + number, &store.account.last().image()));
        committed = turn.finish().commit(&mut store)?;
    }
    if work.orderly {
        let _last = committed
            .machine
            .turn(now)
            .finish_last()
            .commit(&mut store)?;
        store.redb.close()?;
    }
    Ok(())
}
