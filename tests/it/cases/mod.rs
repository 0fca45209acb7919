//! Cases from the field: faults that people reported of systems like this one, each as a test with the
//! case's own numbers and, where it has some, its own input files. `docs/cases.md` has the table of all of
//! them, with those that other tests hold.
//!
//! [`pause`] holds what the cases do not tell: a process that was stopped for a while (TIM3).

mod access;
mod attacks;
mod burst;
mod closes;
mod discovery;
mod full_disk;
mod metrics;
mod pause;
mod queue;
mod start;
mod stores;
mod vanish;

use std::collections::BTreeSet;
use std::path::Path;

use kvgate::demo::{FakeFleet, FleetSpec};
use kvgate::store::{self, RedbStore};
use kvgate_core::capacity::FleetConfig;
use kvgate_core::command::{Acquire, Command};
use kvgate_core::decision::Scope;
use kvgate_core::effect::{Effect, Outcome, Reply};
use kvgate_core::ids::{EngineId, LeaseId, SessionId, TicketId};
use kvgate_core::machine::{Machine, StartParams};
use kvgate_core::policy::Policy;
use kvgate_core::reading::{Reading, Round};
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use kvgate_core::view::View;

/// Two engines of 500,000 tokens: a ceiling of 900,000.
async fn fleet() -> FakeFleet {
    FakeFleet::start(FleetSpec::uniform(2, 500_000))
        .await
        .unwrap()
}

/// The core on a real store and on virtual time: many turns without a second of waiting.
struct Books {
    machine: Option<Box<Machine>>,
    store: RedbStore,
    now: Timestamp,
}

impl Books {
    /// A new store with room for a billion tokens, read once.
    fn create(directory: &Path, now: Timestamp) -> Self {
        let engine = EngineId::new("http://engine-1:30000");
        let policy = Policy {
            program_admission: true,
            headroom: Ppm::ONE,
            stale_after: Span::from_secs(86_400),
            ..Policy::default()
        };
        let fleet = FleetConfig {
            has_router: false,
            static_engines: BTreeSet::from([engine.clone()]),
        };
        let mut books = Self::unread(directory, now, policy, fleet);
        let reading = Reading::idle(Tokens::new(1_000_000_000).unwrap());
        books.turn(vec![Command::Round(Round {
            began_at: now,
            router: None,
            readings: vec![(engine, Ok(reading))],
            start_marks: Vec::new(),
        })]);
        books
    }

    /// A new store for a fleet that was not read yet.
    fn unread(directory: &Path, now: Timestamp, policy: Policy, fleet: FleetConfig) -> Self {
        let mut opened = store::open(directory).unwrap();
        let params = StartParams {
            now,
            salt: 1,
            seed: 1,
            policy,
            reset_settings: false,
            fleet,
        };
        let committed = Machine::restore(opened.image, params)
            .commit(&mut opened.store)
            .unwrap();
        Self {
            machine: Some(committed.machine),
            store: opened.store,
            now,
        }
    }

    fn view(&self) -> View {
        self.machine.as_ref().unwrap().view()
    }

    /// One durable turn; what comes out of it.
    fn effects(&mut self, commands: Vec<Command>) -> Vec<Effect> {
        let mut turn = self.machine.take().unwrap().turn(self.now);
        for command in commands {
            turn.handle(command);
        }
        let committed = turn.finish().commit(&mut self.store).unwrap();
        self.machine = Some(committed.machine);
        committed.effects
    }

    /// One durable turn; the leases that it granted.
    fn turn(&mut self, commands: Vec<Command>) -> Vec<LeaseId> {
        let lease = |effect: Effect| match effect {
            Effect::Reply {
                reply: Reply::Acquire(Ok(answer)),
                ..
            } => match answer.outcome {
                Outcome::Admit { lease, .. } => Some(lease),
                other => panic!("{other:?}"),
            },
            _ => None,
        };
        self.effects(commands)
            .into_iter()
            .filter_map(lease)
            .collect()
    }
}

fn acquire(ticket: &str, tokens: u64) -> Command {
    Command::Acquire(Acquire {
        ticket: TicketId::new(ticket).unwrap(),
        session: SessionId::new("s").unwrap(),
        sent: Sent::Sum(Tokens::new(tokens).unwrap()),
        scope: Scope::Train,
        protected: false,
        ttl: Span::from_secs(3_600),
        client: None,
        request_id: None,
        stays: false,
    })
}
