//! Nanoseconds per command of the core, without store or HTTP, at queues of 1k, 10k and 100k.
//!
//! `cargo bench --bench core`. Medians of seven rounds; what matters is how the figures grow.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a program that prints its measurements and stops at what should not happen"
)]

use std::collections::BTreeSet;
use std::time::Instant;

use kvgate_core::capacity::FleetConfig;
use kvgate_core::command::{Acquire, Command};
use kvgate_core::decision::Scope;
use kvgate_core::effect::{Effect, Outcome, Reply};
use kvgate_core::ids::{EngineId, LeaseId, SessionId, TicketId};
use kvgate_core::machine::{Machine, StartParams};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::Policy;
use kvgate_core::reading::{Reading, Round};
use kvgate_core::store::{Commit, Image, Store};
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Span, Timestamp, Tokens};

const ROUNDS: usize = 7;
const STEPS: usize = 20_000;
/// Commands of one turn: what gathers while a commit runs.
const TURN: usize = 64;
const HELD: usize = 1_000;

/// A store that costs nothing: only the core is measured.
struct NoStore;

impl Store for NoStore {
    type Error = std::convert::Infallible;

    fn commit(&mut self, _commit: Commit<'_>) -> Result<(), Self::Error> {
        Ok(())
    }
}

struct Bench {
    machine: Option<Box<Machine>>,
    now: Timestamp,
    next: u64,
    leases: std::collections::VecDeque<LeaseId>,
    waiting: std::collections::VecDeque<TicketId>,
}

impl Bench {
    /// A full ledger of 1,000 leases, and `waiters` in line.
    fn new(waiters: usize) -> Self {
        let engine = EngineId::new("http://127.0.0.1:1");
        let now = Timestamp::from_millis(1_000_000);
        let params = StartParams {
            now,
            salt: 1,
            seed: 1,
            policy: Policy {
                program_admission: true,
                max_wait: Span::from_secs(86_400),
                claim_grace: Span::from_secs(60),
                max_waiting: 1_000_000,
                stale_after: Span::from_secs(86_400),
                ..Policy::default()
            },
            reset_settings: false,
            fleet: FleetConfig {
                has_router: false,
                static_engines: BTreeSet::from([engine.clone()]),
            },
        };
        let Ok(started) =
            Machine::restore(Image::default(), params).commit(&mut MemoryStore::default());
        let mut bench = Self {
            machine: Some(started.machine),
            now,
            next: 0,
            leases: Default::default(),
            waiting: Default::default(),
        };
        let capacity = Tokens::new(HELD as u64 * 1_000 * 10 / 9 + 10).unwrap();
        let reading = Reading::idle(capacity);
        bench.turn(vec![Command::Round(Round {
            began_at: now,
            router: None,
            readings: vec![(engine, Ok(reading))],
            start_marks: vec![],
        })]);
        let mut left = HELD + waiters;
        while left > 0 {
            let some = left.min(TURN);
            let commands = (0..some).map(|_| bench.acquire()).collect();
            bench.turn(commands);
            left -= some;
        }
        assert_eq!(bench.leases.len(), HELD);
        assert_eq!(bench.waiting.len(), waiters);
        bench
    }

    fn acquire(&mut self) -> Command {
        self.next += 1;
        let ticket = TicketId::new(&format!("{:036}", self.next)).unwrap();
        Command::Acquire(Acquire {
            ticket,
            session: SessionId::new(&format!("session-{:09}", self.next)).unwrap(),
            sent: Sent::Sum(Tokens::new(1_000).unwrap()),
            scope: Scope::Train,
            protected: false,
            ttl: Span::from_secs(3_600),
            client: None,
            request_id: None,
            stays: true,
        })
    }

    /// One turn; keeps book of what it granted and queued.
    fn turn(&mut self, commands: Vec<Command>) {
        let tickets: Vec<Option<TicketId>> = commands
            .iter()
            .map(|command| match command {
                Command::Acquire(acquire) => Some(acquire.ticket.clone()),
                _ => None,
            })
            .collect();
        self.now = self.now.after(Span::from_millis(1));
        let mut turn = self.machine.take().unwrap().turn(self.now);
        for command in commands {
            turn.handle(command);
        }
        let Ok(committed) = turn.finish().commit(&mut NoStore);
        self.machine = Some(committed.machine);
        for effect in committed.effects {
            match effect {
                Effect::Parked { tag, .. } => {
                    self.waiting.push_back(tickets[tag.0].clone().unwrap());
                }
                Effect::Decided { answer, .. }
                | Effect::Reply {
                    reply: Reply::Acquire(Ok(answer)),
                    ..
                } => {
                    if let Outcome::Admit { lease, .. } = answer.outcome {
                        self.leases.push_back(lease);
                        if self.waiting.front() == Some(&answer.ticket) {
                            self.waiting.pop_front();
                        }
                    }
                }
                Effect::Reply { .. } | Effect::Call(_) | Effect::CloseDone(_) => {}
            }
        }
    }

    /// Nanoseconds per step of `STEPS` steps in turns of `TURN`; `make` builds the commands of a
    /// turn outside the measured time.
    fn measure(&mut self, mut make: impl FnMut(&mut Self) -> Vec<Command>) -> f64 {
        let mut spent = 0;
        let mut steps = 0;
        while steps < STEPS {
            let commands = make(self);
            steps += commands.len();
            let began = Instant::now();
            self.turn(commands);
            spent += began.elapsed().as_nanos();
        }
        spent as f64 / steps as f64
    }
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// What is measured: a name, and a function that builds the commands of one turn.
type Case = (&'static str, fn(&mut Bench) -> Vec<Command>);

const CASES: [Case; 4] = [
    ("release + grant + enqueue", |bench| {
        (0..TURN / 2)
            .flat_map(|_| {
                let lease = bench.leases.pop_front().unwrap();
                [Command::Release(lease), bench.acquire()]
            })
            .collect()
    }),
    ("cancel in the middle + enqueue", |bench| {
        (0..TURN / 2)
            .flat_map(|_| {
                let middle = bench.waiting.len() / 2;
                let ticket = bench.waiting.remove(middle).unwrap();
                [Command::Cancel(ticket), bench.acquire()]
            })
            .collect()
    }),
    ("position and tokens ahead", |bench| {
        (0..TURN)
            .map(|step| {
                let at = (bench.next as usize * 31 + step * 97) % bench.waiting.len();
                Command::ReadTicket(bench.waiting[at].clone())
            })
            .collect()
    }),
    ("renew", |bench| {
        (0..TURN)
            .map(|step| Command::Renew {
                lease: bench.leases[(bench.next as usize + step * 13) % bench.leases.len()],
                ttl: None,
            })
            .collect()
    }),
];

fn main() {
    // `cargo test --benches` runs this too: a look whether it works is enough there.
    let quick = !std::env::args().any(|argument| argument == "--bench");
    let (sizes, rounds): (&[usize], usize) = if quick {
        (&[1_000], 1)
    } else {
        (&[1_000, 10_000, 100_000], ROUNDS)
    };
    println!("ns per command, median of {rounds}, turns of {TURN} commands, {HELD} held leases");
    println!(
        "| waiters |{}",
        CASES.map(|(name, _)| format!(" {name} |")).concat()
    );
    println!("|---|{}", "---|".repeat(CASES.len()));
    for &size in sizes {
        let mut row = format!("| {size} |");
        for (_, make) in CASES {
            let figures = (0..rounds)
                .map(|_| Bench::new(size).measure(make))
                .collect();
            row += &format!(" {:.0} |", median(figures));
        }
        println!("{row}");
    }
}
