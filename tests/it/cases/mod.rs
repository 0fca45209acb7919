//! Cases from the field: faults that people reported of systems like this one, each as a test with the
//! case's own numbers. `scenarios` are the tests of the core in `crates/core/tests/scenarios/`.
//!
//! | case | what happened | held by |
//! |---|---|---|
//! | L01 | a restart gives every lease a fresh life | `scenarios::cases::l01_*`, `scenarios::leases::lea4_*` |
//! | L02 | the wall clock is set back an hour | `clock::tests::l02_*`, `scenarios::cases::l02_*`, `scenarios::time::tim1_*` |
//! | L03 | a renewal arrives just after the end | `scenarios::cases::l03_*`, `scenarios::leases::lea3_one_of_them_wins` |
//! | Q01 | a client goes away while it waits | `scenarios::cases::q01_*`, over HTTP `api_delivery::tic3_*` |
//! | Q02 | a client goes away in the instant of the grant | [`vanish`], one turn at a time `gate::tests::tic4_*`, `api_delivery::tic4_*` |
//! | Q03 | a retried acquire charges twice | `scenarios::cases::q03_*`, the real binary [`queue`] |
//! | Q04 | released twice, or after the end | `scenarios::cases::q04_*`, over HTTP [`queue`] |
//! | Q05 | a request larger than the whole ceiling | `scenarios::cases::q05_*`, `scenarios::decision::dec1_oversize` |
//! | Q06 | the ceiling falls below what is reserved | the real binary [`queue`], `scenarios::decision::dec4_a_ceiling_below_the_reserved` |
//! | Q07 | a proxy or client time-out cuts the wait | `scenarios::cases::q07_*`, over HTTP [`queue`] |
//! | Q08 | a reaper takes leases of live requests | `scenarios::cases::q08_*` |
//! | Q09 | a burst between two readings | the real binary `process::burst`, `scenarios::decision::dec2_a_burst_between_two_readings` |
//! | S01 | a close goes to the router | [`closes`] |
//! | S02 | a session id is used again after its close | [`closes`] |
//! | S03 | one engine is down during the close, then a crash | [`closes`] |
//! | S04 | session ids with slashes and percent signs | `closer::clo4_the_body_is_the_id_as_it_is` |
//! | S05 | a close while a request is in flight | [`closes`] |
//! | S06 | a client dies without closing | [`closes`] |
//! | S07 | an engine remembers closed ids | [`closes`] |
//! | D01 | a start after a kill takes long | [`start`] |
//! | D02 | a second process opens the same store | [`stores`], `process::commands::a_store_in_use_ends_with_75` |
//! | D04 | a file that is not a store; files that only grow | [`stores`], `store::refuses_*` |
//! | M01 to M07, M09 | gauges of engines that are repeated, per rank, idle, NaN, hard to read, empty | read: `readings::cap2_*`; shown in `/metrics`: [`metrics`]; M04 and M05 decided: `scenarios::capacity::*` |
//! | M08 | one engine without metrics, one with a key | [`metrics`], `fleet_http::cap2_*` |
//! | P01 | one series for each session | [`metrics`] |
//! | P02 | counter names that end in `_total_total` | [`metrics`], with a linter: `tests/prometheus` |
//! | W01 to W07 | worker lists that are empty, ranked, misspelled, unhealthy, old or locked; an engine that comes back | [`discovery`]; the lists alone: `readings::cap1_*` |
//! | X01 | open to the network without a key | [`access`], every scope `api_rights::each_call_needs_its_scope` |
//! | X02 | a web page reaches the loopback port | [`access`], `api_security::foreign_host_names_*` |
//! | X03 | another site presses a dashboard button | [`access`], `api_security::each_method_and_content_type_*` |
//! | X04 | an engine's address leads somewhere else | [`attacks`], `fleet_http::cap1_*`, `closer::clo5_redirects_are_not_followed`, bombs: `process::floods` |
//! | X05 | slow heads hold all connections | [`attacks`], `api_security::slow_heads_and_idle_connections_are_closed`, over TLS `tls::handshakes_*` |
//!
//! [`pause`] holds what the cases do not tell: a process that was stopped for a while (TIM3).

mod access;
mod attacks;
mod closes;
mod discovery;
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
