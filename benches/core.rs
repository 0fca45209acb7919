//! Nanoseconds per command of the core, without store or HTTP, at queues of 1k, 10k and 100k; what it
//! takes when all leases end, all waiters age or all are cancelled at once; and how 60,000 leases that are
//! renewed every 7 s come into the store.
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
use std::time::{Duration, Instant};

use kvgate_core::capacity::FleetConfig;
use kvgate_core::command::{Acquire, Command};
use kvgate_core::decision::Scope;
use kvgate_core::effect::{Effect, Outcome, Reply};
use kvgate_core::ids::{EngineId, LeaseId, SessionId, TicketId};
use kvgate_core::machine::{Machine, StartParams};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::{Policy, TTL_MAX};
use kvgate_core::reading::{Reading, Round};
use kvgate_core::store::{Commit, Image, Store};
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Span, Timestamp, Tokens};

const ROUNDS: usize = 7;
const STEPS: usize = 20_000;
/// Commands of one turn: what gathers while a commit runs.
const TURN: usize = 64;
const HELD: usize = 1_000;
/// Commands of the longest turn that the writer makes.
const TURN_MAX: usize = 4_096;
/// The life of leases that all end at once, and the longest wait.
const LIFE: Span = Span::from_secs(3_600);
const PATIENCE: Span = Span::from_secs(7_200);
/// Leases of a training run at full width, and how often each is renewed.
const RENEWED: usize = 60_000;
const RENEWED_EVERY_MS: u64 = 7_000;
const RENEWED_FOR_MS: u64 = 35_000;
/// Time between two turns of them.
const STEP_MS: u64 = 10;

/// A store that costs nothing, so that only the core is measured. It counts.
#[derive(Default)]
struct Counting {
    commits: usize,
    rows: usize,
    rows_most: usize,
}

impl Store for Counting {
    type Error = std::convert::Infallible;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), Self::Error> {
        self.commits += 1;
        self.rows += commit.records.len();
        self.rows_most = self.rows_most.max(commit.records.len());
        Ok(())
    }
}

struct Bench {
    machine: Option<Box<Machine>>,
    store: Counting,
    now: Timestamp,
    ttl: Span,
    next: u64,
    leases: std::collections::VecDeque<LeaseId>,
    waiting: std::collections::VecDeque<TicketId>,
}

impl Bench {
    /// A full ledger of 1,000 leases, and `waiters` in line.
    fn new(waiters: usize) -> Self {
        Self::filled(HELD, waiters, TTL_MAX)
    }

    /// A full ledger of leases with this life, and `waiters` in line.
    fn filled(held: usize, waiters: usize, ttl: Span) -> Self {
        let engine = EngineId::new("http://127.0.0.1:1");
        let now = Timestamp::from_millis(1_000_000);
        let params = StartParams {
            now,
            salt: 1,
            seed: 1,
            policy: Policy {
                program_admission: true,
                max_wait: PATIENCE,
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
            store: Counting::default(),
            now,
            ttl,
            next: 0,
            leases: Default::default(),
            waiting: Default::default(),
        };
        let capacity = Tokens::new(held as u64 * 1_000 * 10 / 9 + 10).unwrap();
        let reading = Reading::idle(capacity);
        bench.turn(vec![Command::Round(Round {
            began_at: now,
            router: None,
            readings: vec![(engine, Ok(reading))],
            start_marks: vec![],
        })]);
        let mut left = held + waiters;
        while left > 0 {
            let some = left.min(TURN);
            let commands = (0..some).map(|_| bench.acquire()).collect();
            bench.turn(commands);
            left -= some;
        }
        assert_eq!(bench.leases.len(), held);
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
            ttl: self.ttl,
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
        let Ok(committed) = turn.finish().commit(&mut self.store);
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

/// What a mass of rows costs: all turns, and the longest of them.
struct Mass {
    spent: Duration,
    longest: Duration,
}

impl Bench {
    /// Turns with `commands` until there are none left, and until nothing is due.
    fn drain(&mut self, rows: usize, mut commands: Vec<Command>) -> Mass {
        let (mut spent, mut longest) = (Duration::ZERO, Duration::ZERO);
        loop {
            let some = commands.split_off(commands.len().saturating_sub(TURN_MAX));
            let began = Instant::now();
            self.turn(some);
            let took = began.elapsed();
            spent += took;
            longest = longest.max(took);
            let machine = self.machine.as_ref().unwrap();
            let view = machine.view();
            if view.leases as usize + view.waiting as usize <= rows {
                return Mass { spent, longest };
            }
        }
    }

    /// Lets time pass. A long gap between two turns holds all deadlines for a while (TIM3).
    fn pass(&mut self, span: Span) {
        self.now = self.now.after(span);
        self.turn(Vec::new());
        self.now = self.now.after(Span::from_secs(10));
    }
}

/// All leases end at once.
fn expiry(rows: usize) -> Mass {
    let mut bench = Bench::filled(rows, 0, LIFE);
    bench.pass(LIFE);
    bench.drain(0, Vec::new())
}

/// All waiters have waited for as long as they may.
fn aging(rows: usize) -> Mass {
    let mut bench = Bench::filled(HELD, rows, TTL_MAX);
    bench.pass(PATIENCE);
    bench.drain(HELD, Vec::new())
}

/// All waiters are cancelled.
fn cancels(rows: usize) -> Mass {
    let mut bench = Bench::filled(HELD, rows, TTL_MAX);
    let commands = bench.waiting.iter().cloned().map(Command::Cancel).collect();
    bench.drain(HELD, commands)
}

/// A name, and what is measured.
type MassCase = (&'static str, fn(usize) -> Mass);

const MASSES: [MassCase; 3] = [
    ("all leases end", expiry),
    ("all waiters age", aging),
    ("all waiters are cancelled", cancels),
];

/// How renewals come into the store (LEA2).
fn renewals(leases: usize) {
    let mut bench = Bench::filled(leases, 0, Span::from_secs(600));
    bench.store = Counting::default();
    let (mut renewed, mut longest) = (0, Duration::ZERO);
    let began = Instant::now();
    for at in (0..RENEWED_FOR_MS).step_by(STEP_MS as usize) {
        let until = ((at % RENEWED_EVERY_MS + STEP_MS) * leases as u64 / RENEWED_EVERY_MS) as usize;
        let from = (at % RENEWED_EVERY_MS * leases as u64 / RENEWED_EVERY_MS) as usize;
        let commands: Vec<Command> = (from..until)
            .map(|lease| Command::Renew {
                lease: bench.leases[lease],
                ttl: None,
            })
            .collect();
        renewed += commands.len();
        bench.now = bench.now.after(Span::from_millis(STEP_MS - 1));
        let turn = Instant::now();
        bench.turn(commands);
        longest = longest.max(turn.elapsed());
    }
    let Counting {
        commits,
        rows,
        rows_most,
    } = bench.store;
    println!(
        "{leases} leases renewed every {} s: {:.2} commits per 1,000 renewals, {rows} rows for {renewed} renewals, at most {rows_most} in one; {:.0} ns a renewal, longest turn {:.1} ms",
        RENEWED_EVERY_MS / 1_000,
        commits as f64 * 1e3 / renewed as f64,
        began.elapsed().as_nanos() as f64 / renewed as f64,
        longest.as_secs_f64() * 1e3,
    );
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
    println!("\nns a row, and the longest turn in ms, at once");
    println!(
        "| rows |{}",
        MASSES.map(|(name, _)| format!(" {name} |")).concat()
    );
    println!("|---|{}", "---|".repeat(MASSES.len()));
    for &size in sizes {
        let mut row = format!("| {size} |");
        for (_, mass) in MASSES {
            let masses: Vec<Mass> = (0..rounds).map(|_| mass(size)).collect();
            let longest = masses.iter().map(|mass| mass.longest.as_secs_f64() * 1e3);
            let longest = median(longest.collect());
            let each = masses
                .iter()
                .map(|mass| mass.spent.as_nanos() as f64 / size as f64);
            row += &format!(" {:.0}, {longest:.1} |", median(each.collect()));
        }
        println!("{row}");
    }
    println!();
    renewals(if quick { sizes[0] } else { RENEWED });
}
