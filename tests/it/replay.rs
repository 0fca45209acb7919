//! A concurrent run of the gate on its real store, replayed turn by turn through the reference of
//! the core's property tests: the same inputs at the same times give the same answers (DUR6).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvgate::clock::Clock;
use kvgate::gate::{Gate, Phase, Recorder, WriterConfig, spawn};
use kvgate::store;
use kvgate_core::capacity::FleetConfig;
use kvgate_core::command::{self, Command};
use kvgate_core::decision::Scope;
use kvgate_core::effect::{Effect, Outcome, Reply};
use kvgate_core::ids::{EngineId, LeaseId, SessionId, TicketId};
use kvgate_core::policy::{AdmissionScope, Policy};
use kvgate_core::reading::{self, Reading, Role, RouterAnswer, Worker};
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};
use tokio::task::JoinSet;

use crate::process::Draw;

#[allow(dead_code, reason = "the property tests use the rest of it")]
#[path = "../../crates/core/tests/properties/model.rs"]
mod model;
#[path = "../../crates/core/tests/properties/words.rs"]
mod words;

use model::{Ask, Gauges, Listed, Model, Numbers, Said, Settings, Shown};

const CALLERS: u64 = 12;
const STEPS: u64 = 150;
const LIVES: u64 = 3;

/// One thing that the writer did.
#[derive(Debug)]
enum Recorded {
    Start(Timestamp),
    Turn {
        now: Timestamp,
        commands: Vec<Command>,
        effects: Vec<Effect>,
        last: bool,
    },
}

#[derive(Clone, Debug, Default)]
struct Tape(Arc<Mutex<Vec<Recorded>>>);

impl Recorder for Tape {
    fn started(&mut self, now: Timestamp) {
        self.0.lock().unwrap().push(Recorded::Start(now));
    }

    fn turn(&mut self, now: Timestamp, commands: Vec<Command>, effects: &[Effect], last: bool) {
        self.0.lock().unwrap().push(Recorded::Turn {
            now,
            commands,
            effects: effects.to_vec(),
            last,
        });
    }
}

fn settings() -> Settings {
    Settings {
        on: true,
        paused: false,
        headroom: 900_000,
        threshold: 920_000,
        decode_cap: Some(500),
        max_wait: 1_000,
        all_scopes: false,
        grace: 1_000,
        max_waiting: 60,
        stale_after: 6_000,
        closes: false,
        join_timeout: None,
        idle_close: None,
    }
}

/// The same settings for the gate.
fn policy() -> Policy {
    Policy {
        program_admission: true,
        headroom: Ppm::new(900_000).unwrap(),
        pressure_threshold: Ppm::new(920_000).unwrap(),
        expected_decode_cap: Some(tokens(500)),
        max_wait: Span::from_millis(1_000),
        scope: AdmissionScope::Train,
        claim_grace: Span::from_millis(1_000),
        max_waiting: 60,
        stale_after: Span::from_millis(6_000),
        ..Policy::default()
    }
    .validated()
    .unwrap()
}

fn tokens(count: u64) -> Tokens {
    Tokens::new(count).unwrap()
}

fn engine() -> EngineId {
    EngineId::new("http://127.0.0.1:1")
}

/// The random part of lease ids is the number of the start, as in the reference. A start draws twice.
fn salt() -> u64 {
    static DRAWN: AtomicU64 = AtomicU64::new(0);
    DRAWN.fetch_add(1, Ordering::Relaxed) / 2 + 1
}

async fn gate(data: &Path, tape: &Tape) -> Gate {
    let config = WriterConfig {
        policy: policy(),
        reset_settings: false,
        fleet: FleetConfig {
            has_router: true,
            static_engines: BTreeSet::new(),
        },
        salts: salt,
        recorder: Some(Box::new(tape.clone())),
    };
    let data = data.to_owned();
    let (gate, opened) = spawn(config, Clock::start(), move || store::open(&data)).unwrap();
    opened.await.unwrap().unwrap();
    round(&gate, 0).await;
    let mut phases = gate.phases();
    phases.wait_for(|now| *now == Phase::Ready).await.unwrap();
    gate
}

/// One reading: mostly an idle engine, sometimes one under pressure, a smaller one, or none.
async fn round(gate: &Gate, kind: u64) {
    let idle = Reading::idle(tokens(20_000));
    let reading = match kind {
        1 => Ok(Reading {
            usage: Some(Ppm::new(950_000).unwrap()),
            running: Some(3),
            ..idle
        }),
        2 => Ok(Reading::idle(tokens(12_000))),
        3 => Err(reading::ReadFailure::Timeout),
        _ => Ok(idle),
    };
    let round = reading::Round {
        began_at: gate.line().unwrap().now(),
        router: Some(RouterAnswer::Workers(vec![Worker {
            engine: engine(),
            role: Role::Regular,
            healthy: true,
            worker_ids: BTreeSet::new(),
        }])),
        readings: vec![(engine(), reading)],
        start_marks: vec![],
    };
    gate.round(round).await.unwrap();
}

/// DUR1, DUR2, DUR6 and all rules that the reference knows: twelve callers at once on a gate with
/// its real store, over three lives of it, with calls that are dropped, answers that nobody reads,
/// short leases, pressure and a shrinking fleet. Every turn, replayed through the reference with its
/// recorded inputs and time, gives the recorded answers, decisions and numbered changes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recorded_run_is_what_the_reference_says() {
    let data = tempfile::tempdir().unwrap();
    let tape = Tape::default();
    for life in 0..LIVES {
        let gate = gate(data.path(), &tape).await;
        let mut callers = JoinSet::new();
        for number in 0..CALLERS {
            let gate = gate.clone();
            callers.spawn(async move {
                let mut draw = Draw((life << 32) | number);
                let mut caller = Caller::default();
                for _ in 0..STEPS {
                    caller.step(&gate, &mut draw, number).await;
                }
            });
        }
        while let Some(done) = callers.join_next().await {
            done.unwrap();
        }
        gate.begin_drain();
        gate.stop().await;
    }
    let recorded = std::mem::take(&mut *tape.0.lock().unwrap());
    replay(&recorded);
}

#[derive(Default)]
struct Caller {
    leases: Vec<LeaseId>,
    /// Acquires that were told to wait.
    waiting: Vec<command::Acquire>,
}

impl Caller {
    async fn step(&mut self, gate: &Gate, draw: &mut Draw, number: u64) {
        let lease = match self.leases.len() {
            0 => None,
            some => {
                let some = u64::try_from(some).unwrap();
                let index = usize::try_from(draw.below(some)).unwrap();
                Some((index, self.leases[index]))
            }
        };
        // A few names for all callers, so that their calls meet; others of their own.
        let name = match draw.below(3) {
            0 => format!("shared-{}", draw.below(40)),
            _ => format!("own-{number}-{}", draw.below(2_000)),
        };
        let ticket = TicketId::new(name.as_str()).unwrap();
        match draw.below(20) {
            0..=4 if self.waiting.len() < 4 => {
                let acquire = ask(ticket, draw);
                self.acquire(gate, draw, acquire, 6).await;
            }
            // Back to a place in line.
            0..=8 => {
                if !self.waiting.is_empty() {
                    let acquire = self.waiting.remove(0);
                    self.acquire(gate, draw, acquire, 30).await;
                }
            }
            9..=12 => {
                if let Some((index, lease)) = lease {
                    self.leases.swap_remove(index);
                    let _ = gate.release(lease).await.unwrap();
                }
            }
            13 => drop(gate.cancel(ticket).await.unwrap()),
            14 => {
                if let Some((_, lease)) = lease {
                    let life = Span::from_millis(1_000 + draw.below(3) * 500);
                    drop(gate.renew(lease, Some(life)).await.unwrap());
                    drop(gate.read_lease(lease).await.unwrap());
                }
            }
            15 => drop(gate.read_ticket(ticket).await.unwrap()),
            16 => {
                let other = TicketId::new(format!("shared-{}", draw.below(40)).as_str()).unwrap();
                let wait = Duration::from_millis(draw.below(4));
                for (_, decision) in gate.watch(vec![ticket, other], wait).await.unwrap() {
                    let Some(decision) = decision else { continue };
                    if let Outcome::Admit { lease, .. } = decision.answer.outcome {
                        self.leases.push(lease);
                    }
                    if let Some(receipt) = decision.receipt {
                        receipt.written();
                    }
                }
            }
            17 => {
                let mut commands = Vec::new();
                if draw.below(4) == 0 {
                    commands.push(Command::Cancel(ticket.clone()));
                }
                commands.extend(lease.map(|(_, lease)| Command::Release(lease)));
                commands.push(Command::Acquire(command::Acquire {
                    stays: false,
                    ..ask(ticket, draw)
                }));
                for reply in gate.batch(commands).await.unwrap() {
                    if let (_, Reply::Acquire(Ok(answer))) = reply.unwrap()
                        && let Outcome::Admit { lease, .. } = answer.outcome
                    {
                        self.leases.push(lease);
                    }
                }
            }
            18 => round(gate, draw.below(24)).await,
            _ => round(gate, 0).await,
        }
    }
}

impl Caller {
    async fn acquire(
        &mut self,
        gate: &Gate,
        draw: &mut Draw,
        acquire: command::Acquire,
        most: u64,
    ) {
        let wait = Duration::from_millis(draw.below(3) * draw.below(most));
        let call = gate.acquire(acquire.clone(), wait);
        if draw.below(8) == 0 {
            // The caller goes away in the middle of the call, or just before it ends.
            let patience = Duration::from_millis(draw.below(4));
            drop(tokio::time::timeout(patience, call).await);
            self.waiting.push(acquire);
            return;
        }
        let Ok(decision) = call.await.unwrap().value else {
            return;
        };
        match decision.answer.outcome {
            Outcome::Admit { lease, .. } => self.leases.push(lease),
            Outcome::Wait(_) => self.waiting.push(acquire),
            Outcome::Bypass(_) | Outcome::Cancelled(_) => {}
        }
        match decision.receipt {
            Some(receipt) if draw.below(8) > 0 => receipt.written(),
            // Dropped: nobody has read the answer.
            _ => {}
        }
    }
}

fn ask(ticket: TicketId, draw: &mut Draw) -> command::Acquire {
    // The same ticket sends the same numbers, but for a few.
    let size = ticket.as_str().bytes().map(u64::from).sum::<u64>() % 7 * 300;
    let odd = u64::from(draw.below(30) == 0);
    let sent = match size {
        0 => Sent::Sum(tokens(odd * 30_000)),
        300 => Sent::Parts {
            prompt: tokens(size),
            max_new: tokens(2_000 + odd),
        },
        _ => Sent::Sum(tokens(size + odd)),
    };
    command::Acquire {
        ticket,
        session: SessionId::new("s").unwrap(),
        sent,
        scope: if draw.below(20) == 0 {
            Scope::Eval
        } else {
            Scope::Train
        },
        protected: draw.below(30) == 0,
        ttl: Span::from_millis(1_000 + draw.below(4) * 1_000),
        client: None,
        request_id: None,
        stays: true,
    }
}

// ---- the replay ------------------------------------------------------------------------------

fn replay(recorded: &[Recorded]) {
    let mut model: Option<Model> = None;
    let (mut turns, mut inputs, mut decisions, mut largest) = (0, 0, 0, 0);
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for one in recorded {
        match one {
            Recorded::Start(now) => match &mut model {
                Some(model) => {
                    let started = model.start(now.millis(), None, false);
                    assert!(started.decided.is_empty());
                }
                None => model = Some(Model::new(now.millis(), settings(), Vec::new())),
            },
            Recorded::Turn {
                now,
                commands,
                effects,
                last,
            } => {
                let model = model.as_mut().unwrap();
                model.begin(now.millis());
                for command in commands {
                    take(model, command);
                }
                let turned = if *last {
                    model.finish_last()
                } else {
                    model.finish()
                };
                compare(commands, effects, &turned);
                for said in &turned.said {
                    *kinds.entry(kind(said)).or_default() += 1;
                }
                turns += 1;
                inputs += commands.len();
                decisions += turned.decided.len();
                largest = largest.max(commands.len());
            }
        }
    }
    println!(
        "{turns} turns with {inputs} inputs (at most {largest} in one) and {decisions} decisions of the line: the \
         reference says the same: {kinds:?}"
    );
    assert!(decisions > 50 && largest > 3, "nothing ran at once");
}

/// The name of an answer, and of the reason in it.
fn kind(said: &Said) -> String {
    match said {
        Said::Answer(answer) => match &answer.outcome {
            model::Outcome::Admit { .. } => "admit".to_owned(),
            model::Outcome::Bypass(reason) => format!("bypass {reason:?}"),
            model::Outcome::Cancelled(reason) => format!("cancelled {reason:?}"),
            model::Outcome::Wait(place) => format!("wait {:?}", place.reason),
        },
        Said::Cancel(how) => format!("cancel {how:?}"),
        Said::Gone(why) => format!("gone {why:?}"),
        other => {
            let text = format!("{other:?}");
            text.split(['(', ' ']).next().unwrap_or_default().to_owned()
        }
    }
}

fn take(model: &mut Model, command: &Command) {
    match command.clone() {
        Command::Acquire(acquire) => model.acquire(Ask {
            ticket: acquire.ticket,
            session: acquire.session,
            numbers: match acquire.sent {
                Sent::Sum(sum) => Numbers::Sum(sum.get()),
                Sent::Parts { prompt, max_new } => Numbers::Parts(prompt.get(), max_new.get()),
            },
            scope: acquire.scope,
            protected: acquire.protected,
            ttl: acquire.ttl.millis(),
            stays: acquire.stays,
        }),
        Command::Leave(ticket) => model.leave(ticket),
        Command::Gone(ticket) => model.gone(&ticket),
        Command::Delivered(delivery) => model.delivered(&delivery.ticket, delivery.lease),
        Command::Undelivered(delivery) => {
            model.undelivered_one(&delivery.ticket, delivery.lease);
        }
        Command::Watch(tickets) => model.watch(&tickets),
        Command::Release(lease) => model.release(lease),
        Command::Renew { lease, ttl } => model.renew(lease, ttl.map(Span::millis)),
        Command::Cancel(ticket) => model.cancel(ticket),
        Command::ReadTicket(ticket) => model.read(&ticket),
        Command::ReadLease(lease) => model.read_lease(lease),
        Command::Round(round) => model.round(read(&round)),
        other => panic!("nobody sends {other:?}"),
    }
}

fn read(round: &reading::Round) -> model::Round {
    let Some(RouterAnswer::Workers(workers)) = &round.router else {
        panic!("{round:?}");
    };
    let listed = workers.iter().map(|worker| Listed {
        engine: worker.engine.clone(),
        counts: worker.role.counts(),
        healthy: worker.healthy,
        ids: BTreeSet::new(),
    });
    let readings = round.readings.iter().map(|(engine, reading)| {
        let gauges = reading.as_ref().ok().map(|reading| Gauges {
            capacity: reading.capacity.get(),
            usage: reading.usage.map(Ppm::get),
            idle: reading.running == Some(0),
            counters: None,
        });
        (engine.clone(), gauges)
    });
    model::Round {
        began_at: round.began_at.millis(),
        router: Shown::Lists(listed.collect()),
        readings: readings.collect(),
        marks: Vec::new(),
    }
}

fn compare(commands: &[Command], effects: &[Effect], turned: &model::Turned) {
    let mut told: Vec<Option<(Said, bool)>> = vec![None; commands.len()];
    let mut decided = Vec::new();
    for effect in effects {
        let (tag, one) = match effect {
            Effect::Reply { tag, seq, reply } => (tag, (words::said(reply), seq.is_some())),
            Effect::Parked { tag, seq, .. } => (tag, (Said::Parked, seq.is_some())),
            Effect::Decided { answer, .. } => {
                decided.push(words::answer(answer));
                continue;
            }
            Effect::Call(_) | Effect::CloseDone(_) => panic!("no session was closed: {effect:?}"),
        };
        told[tag.0] = Some(one);
    }
    for (index, command) in commands.iter().enumerate() {
        let (said, changed) = told[index].take().unwrap();
        assert_eq!(said, turned.said[index], "answer to {command:?}");
        // A round is numbered when it changed what is kept of the fleet.
        if !matches!(command, Command::Round(_)) {
            assert_eq!(changed, turned.changed[index], "number of {command:?}");
        }
    }
    assert_eq!(decided, turned.decided, "decisions of the line");
}
