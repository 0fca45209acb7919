//! The store on redb: keeps exactly what the reference store keeps, and touches nothing it did not make.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fs;
use std::mem::discriminant;
use std::path::Path;

use kvgate::store::{
    CopyPieces, FILE_NAME, OpenError, RedbStore, look, open, read_copy, write_new,
};
use kvgate_core::capacity::FleetConfig;
use kvgate_core::close::{CallFailure, CallResult, CloseMode, CloseReason, CloseStage, EngineCall};
use kvgate_core::command::{Acquire, Act, CloseRequest, Command, Operation};
use kvgate_core::decision::Scope;
use kvgate_core::effect::{CloseReply, Effect, Reply};
use kvgate_core::ids::{EngineId, Label, RunId, SessionId, TicketId};
use kvgate_core::machine::{Machine, StartParams};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::{AdmissionScope, Policy, RUNS_MAX};
use kvgate_core::reading::{Reading, Role, Round, RouterAnswer, StartMark, Worker};
use kvgate_core::settings::{Change, SettingsChange};
use kvgate_core::store::{Commit, Image, Store, StoreControl};
use kvgate_core::tally::LocalBypass;
use kvgate_core::ticket::{Sent, Stage};
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};

/// Commits to the store under test and to the reference.
struct Both {
    redb: RedbStore,
    memory: MemoryStore,
}

impl Store for Both {
    type Error = Infallible;

    fn commit(&mut self, commit: Commit<'_>) -> Result<(), Infallible> {
        self.redb.commit(commit).unwrap();
        self.memory.commit(commit)
    }
}

pub fn tokens(count: u64) -> Tokens {
    Tokens::new(count).unwrap()
}

pub fn params(now: Timestamp) -> StartParams {
    StartParams {
        now,
        salt: now.millis(),
        seed: 7,
        policy: Policy {
            program_admission: true,
            session_lifecycle: true,
            session_idle_close: Some(Span::from_secs(20)),
            ..Policy::default()
        },
        reset_settings: false,
        fleet: FleetConfig {
            has_router: true,
            static_engines: Default::default(),
        },
    }
}

/// A round of busy engines, whose usage rises and falls below the threshold.
pub fn round(now: Timestamp, names: &[&str], mark: u64) -> Command {
    let usage = 100_000 + u32::try_from(now.millis() / 100 % 50).unwrap() * 10_000;
    let ids: Vec<EngineId> = names.iter().map(|name| EngineId::new(name)).collect();
    Command::Round(Round {
        began_at: now,
        router: Some(RouterAnswer::Workers(
            ids.iter()
                .map(|engine| Worker {
                    engine: engine.clone(),
                    role: Role::Regular,
                    healthy: true,
                    worker_ids: [format!("w-{mark}").as_str().into()].into(),
                })
                .collect(),
        )),
        readings: ids
            .iter()
            .map(|engine| {
                let reading = Reading {
                    usage: Ppm::new(usage),
                    running: Some(1),
                    ..Reading::idle(tokens(1_000))
                };
                (engine.clone(), Ok(reading))
            })
            .collect(),
        start_marks: ids
            .iter()
            .map(|engine| (engine.clone(), StartMark(mark)))
            .collect(),
    })
}

pub fn acquire(ticket: &str, sent: Sent, protected: bool) -> Command {
    acquire_in("sitzung/ß %2F", ticket, sent, protected, None)
}

pub fn acquire_in(
    session: &str,
    ticket: &str,
    sent: Sent,
    protected: bool,
    request_id: Option<&str>,
) -> Command {
    Command::Acquire(Acquire {
        ticket: TicketId::new(ticket).unwrap(),
        session: SessionId::new(session).unwrap(),
        sent,
        scope: Scope::Train,
        protected,
        ttl: Span::from_secs(60),
        client: Some(Label::new("rollout-3").unwrap()),
        request_id: request_id.map(|request_id| Label::new(request_id).unwrap()),
        stays: false,
    })
}

pub fn close(session: &str, mode: CloseMode) -> Command {
    Command::Close(CloseRequest {
        session: SessionId::new(session).unwrap(),
        mode,
        reason: (mode == CloseMode::Join).then_some(CloseReason::Terminal),
    })
}

/// What an operator does: something else each time.
pub fn operate(number: u64, image: &Image) -> Command {
    let held = image.tickets.iter().find_map(|ticket| match &ticket.stage {
        Stage::Held(lease) => Some(lease.id),
        Stage::Waiting { .. } | Stage::Ended(_) => None,
    });
    let failed = image.closes.iter().rev().find(|close| close.has_failed());
    let act = match number % 6 {
        0 => Act::Configure(SettingsChange {
            headroom: Change::Value(Ppm::clamped(800_000 + u32::try_from(number).unwrap())),
            expected_decode_cap: Change::Value(number.is_multiple_of(12).then(|| tokens(500))),
            scope: Change::Value(AdmissionScope::All),
            ..SettingsChange::default()
        }),
        1 => Act::Cancel(TicketId::new(&format!("by an operator {number}")).unwrap()),
        2 => Act::Close(CloseRequest {
            session: SessionId::new(&format!("operator's {}", number % 7)).unwrap(),
            mode: CloseMode::Abort,
            reason: None,
        }),
        3 if failed.is_some() => Act::RetryClose(failed.unwrap().id),
        4 if held.is_some() => Act::Revoke(held.unwrap()),
        _ => Act::Configure(SettingsChange {
            headroom: Change::Configured,
            max_wait: Change::Value(Span::from_millis(20_000 + number)),
            paused: Change::Value(false),
            ..SettingsChange::default()
        }),
    };
    Command::Operate(Operation {
        who: Label::new("betrieb/ß").unwrap(),
        act,
    })
}

/// A step of one of two runs; the run without a name is one of them.
pub fn take_step(run: u64, step: u64) -> Command {
    let run = if run.is_multiple_of(2) { "" } else { "lauf/ß" };
    Command::TakeStep {
        run: RunId::new(run).unwrap(),
        step,
    }
}

/// What the calls of a turn come to: now and then each thing that an engine can answer, most of the
/// time well, and now and then nothing yet. In every second term one engine has no session close.
pub fn outcomes(effects: &[Effect]) -> Command {
    let status = |code, text: Option<&str>| CallResult::Status {
        code,
        text: text.map(Into::into),
    };
    let outcome = |call: &EngineCall| match call.id.number % 11 {
        _ if call.id.term.0.is_multiple_of(2) && call.engine.as_str() == "http://b" => {
            Some(status(404, None))
        }
        1 => None,
        2 => Some(status(503, Some("busy\n"))),
        3 => Some(status(400, Some("„nein“"))),
        4 => Some(CallResult::Failed(CallFailure::NotAllowed)),
        5 => Some(CallResult::Failed(CallFailure::TooLarge)),
        6 => Some(CallResult::Failed(CallFailure::Refused)),
        7 => Some(CallResult::Failed(CallFailure::Timeout)),
        _ => Some(status(200, None)),
    };
    let calls = effects.iter().filter_map(|effect| match effect {
        Effect::Call(call) => Some((call.id, outcome(call)?)),
        _ => None,
    });
    Command::Called(calls.collect())
}

/// DUR1, DUR2: whatever a turn promised is on disk as the reference store has it: waiters, leases,
/// ended tickets, markers, epochs, engines, starts, closes, last uses of sessions, windows of runs, step
/// reports, settings, audit and counters, over several starts, some of which begin an hour later.
#[test]
fn keeps_what_the_reference_store_keeps() {
    let directory = tempfile::tempdir().unwrap();
    let mut memory = MemoryStore::default();
    let mut now = Timestamp::from_millis(1_000_000);
    let mut seen = Seen::default();
    for start in 0..4_u64 {
        let opened = open(directory.path()).unwrap();
        assert_eq!(opened.image, memory.image());
        let mut params = params(now);
        // Last uses are forgotten when idle sessions are closed no more.
        params.policy.session_idle_close.take_if(|_| start == 2);
        params.reset_settings = start == 3;
        let mut both = Both {
            redb: opened.store,
            memory,
        };
        let Ok(committed) = Machine::restore(opened.image, params).commit(&mut both);
        let mut machine = committed.machine;
        let mut effects = committed.effects;
        for turn in 0..40_u64 {
            now = now.after(Span::from_millis(700));
            let mut turning = machine.turn(now);
            if turn % 3 == 0 {
                let names: &[&str] = if turn < 20 {
                    &["http://a", "http://b"]
                } else {
                    &["http://b"]
                };
                turning.handle(round(now, names, start + turn / 30));
            }
            let name = format!("t-{start}-{turn}");
            let parts = Sent::Parts {
                prompt: tokens(300),
                max_new: tokens(turn),
            };
            turning.handle(acquire(&name, parts, turn % 7 == 0));
            turning.handle(acquire(
                &format!("{name}-sum"),
                Sent::Sum(tokens(10)),
                false,
            ));
            turning.handle(Command::Cancel(
                TicketId::new(&format!("t-{start}-{}", turn / 2)).unwrap(),
            ));
            turning.handle(Command::Cancel(
                TicketId::new(&format!("bare-{turn}")).unwrap(),
            ));
            turning.handle(Command::LocalBypasses(vec![(LocalBypass::Breaker, 3)]));
            turning.handle(outcomes(&effects));
            let program = format!("program {}", turn / 3 % 4);
            if turn % 3 == 2 {
                let modes = [CloseMode::Abort, CloseMode::Join, CloseMode::Join];
                turning.handle(close(&program, modes[(turn / 3 % 3) as usize]));
            } else {
                let request = format!("{name}/request");
                let sent = Sent::Sum(tokens(1));
                let ticket = format!("{name}-program");
                turning.handle(acquire_in(&program, &ticket, sent, false, Some(&request)));
            }
            if turn % 5 == 4 {
                turning.handle(take_step(turn, start * 40 + turn));
            }
            // More runs than have a window.
            if start == 3 && turn.is_multiple_of(2) {
                turning.handle(Command::TakeStep {
                    run: RunId::new(&format!("run {turn:02}")).unwrap(),
                    step: 0,
                });
            }
            if turn % 2 == 1 {
                turning.handle(operate(start * 20 + turn / 2, &both.memory.image()));
            }
            let Ok(committed) = turning.finish().commit(&mut both);
            machine = committed.machine;
            effects = committed.effects;
            let image = both.memory.image();
            seen.look(&image);
            // Whatever a gate keeps can be copied and read again.
            let copy: Vec<u8> = CopyPieces::new(image.clone()).flatten().collect();
            assert_eq!(read_copy(&copy[..]).unwrap(), image);
        }
        let Ok(_) = machine.turn(now).finish_last().commit(&mut both);
        both.redb.close().unwrap();
        memory = both.memory;
        let gap = if start == 1 { 4_000 } else { 5 };
        now = now.after(Span::from_secs(gap));
    }
    let image = open(directory.path()).unwrap().image;
    assert_eq!(image, memory.image());
    assert_eq!(image.term, 4);
    assert_eq!(image.steps.len(), 52);
    assert!(image.tickets.len() > 100 && image.epochs.len() >= 4 && image.starts.len() == 4);
    assert!(seen.is_everything(), "{seen:?}");
    let acts: BTreeSet<_> = image
        .audit
        .iter()
        .map(|entry| discriminant(&entry.act))
        .map(|act| format!("{act:?}"))
        .collect();
    assert_eq!(acts.len(), 6, "every kind of act");
    assert!(image.overrides.changed_at.is_some());

    // A logical copy, and a store written in one go from it, hold the same.
    let copy: Vec<u8> = CopyPieces::new(image.clone()).flatten().collect();
    let read = read_copy(&copy[..]).unwrap();
    assert_eq!(read, image);
    let second = tempfile::tempdir().unwrap();
    write_new(&kvgate::store::FsDisk::new(second.path()), &read).unwrap();
    look(second.path()).unwrap().verify().unwrap();
    assert_eq!(open(second.path()).unwrap().image, image);
}

/// ID2: the id of a close does not come again in a store that was made from a copy, though its number
/// does; nothing of the life after the copy is found by the old id.
#[test]
fn id2_a_restored_store_takes_no_close_id_again() {
    let now = Timestamp::from_millis(1_000_000);
    // A close of a session in one life, and the store after it.
    let life = |image: Image, salt: u64, session: &str| {
        let mut store = MemoryStore::default();
        let mut params = params(now);
        params.salt = salt;
        let Ok(committed) = Machine::restore(image, params).commit(&mut store);
        let mut turn = committed.machine.turn(now);
        turn.handle(close(session, CloseMode::Join));
        let Ok(committed) = turn.finish().commit(&mut store);
        let taken = committed
            .effects
            .into_iter()
            .find_map(|effect| match effect {
                Effect::Reply {
                    reply: Reply::Close(CloseReply::Taken(close)),
                    ..
                } => Some(close.id),
                _ => None,
            });
        (taken.unwrap(), committed.machine)
    };
    let (first, machine) = life(Image::default(), 1, "before the copy");
    let copy: Vec<u8> = CopyPieces::new(machine.image()).flatten().collect();
    let (lost, _) = life(machine.image(), 2, "after the copy");
    let directory = tempfile::tempdir().unwrap();
    let look = kvgate::store::restore(directory.path(), &copy[..], now).unwrap();
    let (new, machine) = life(look.into_image(), 3, "after the restore");
    assert_eq!(new.number, lost.number);
    assert_ne!(new, lost);
    let read = |id| {
        let machine = life(machine.image(), 4, "another").1;
        let mut turn = machine.turn(now);
        turn.handle(Command::ReadClose(id));
        let Ok(committed) = turn.finish().commit(&mut MemoryStore::default());
        committed.effects.iter().any(|effect| {
            matches!(
                effect,
                Effect::Reply {
                    reply: Reply::ReadClose(Some(_)),
                    ..
                }
            )
        })
    };
    assert!(read(first) && read(new) && !read(lost));
}

/// What the images of a test had in them.
#[derive(Default, Debug)]
struct Seen {
    joining: bool,
    delivering: bool,
    done: bool,
    failed: bool,
    reopened: bool,
    closes_most: usize,
    closes_fewer: bool,
    uses_most: usize,
    uses_none_again: bool,
    unsupported: bool,
    usage_peak: bool,
    runs_most: usize,
    run_gone: bool,
}

impl Seen {
    fn look(&mut self, image: &Image) {
        for close in &image.closes {
            match close.stage {
                CloseStage::Joining { .. } => self.joining = true,
                CloseStage::Delivering { .. } => self.delivering = true,
                CloseStage::Done { .. } => self.done = true,
            }
            self.failed |= close.has_failed();
            self.reopened |= close.reopened.is_some();
        }
        self.closes_fewer |= image.closes.len() < self.closes_most;
        self.closes_most = self.closes_most.max(image.closes.len());
        self.uses_none_again |= self.uses_most > 0 && image.sessions.is_empty();
        self.uses_most = self.uses_most.max(image.sessions.len());
        let mut engines = image.engines.iter();
        self.unsupported |= engines.any(|engine| engine.unsupported_at.is_some());
        let mut windows = image.windows.iter();
        self.usage_peak |= windows.any(|(_, window)| window.usage_peak.is_some());
        self.runs_most = self.runs_most.max(image.windows.len());
        let mut runs = image.steps.iter().map(|report| &report.run);
        let windows = &image.windows;
        let is_gone = |run: &RunId| !windows.iter().any(|(of, _)| of.as_ref() == Some(run));
        self.run_gone |= runs.any(is_gone);
    }

    fn is_everything(&self) -> bool {
        let stages = self.joining && self.delivering && self.done;
        let ends = self.failed && self.reopened && self.unsupported;
        let forgotten = self.closes_fewer && self.uses_none_again && self.run_gone;
        let reports = self.usage_peak && self.runs_most == RUNS_MAX + 1;
        stages && ends && forgotten && reports && self.closes_most > 5 && self.uses_most > 3
    }
}

fn untouched(path: &Path, content: &[u8]) {
    assert_eq!(fs::read(path).unwrap(), content, "the file was touched");
}

/// A file that is no store is refused and left as it is; an empty one too, since only a missing one is new.
#[test]
fn refuses_what_is_not_a_store() {
    for content in [&b"no store, just notes\n"[..], b"", &[0; 100_000]] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE_NAME);
        fs::write(&path, content).unwrap();
        let error = open(directory.path()).unwrap_err();
        assert!(matches!(error, OpenError::Foreign(_)), "{error:?}");
        assert!(error.to_string().contains("not a kvgate store"), "{error}");
        untouched(&path, content);
    }
}

/// A database of another program is not a store either.
#[test]
fn refuses_a_database_of_another_program() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE_NAME);
    let table: redb::TableDefinition<'_, u64, u64> = redb::TableDefinition::new("theirs");
    let database = redb::Database::create(&path).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(table).unwrap().insert(1, 2).unwrap();
    transaction.commit().unwrap();
    drop(database);
    let before = fs::read(&path).unwrap();
    let error = open(directory.path()).unwrap_err();
    assert!(matches!(error, OpenError::Foreign(_)), "{error:?}");
    untouched(&path, &before);
}

/// A newer schema is refused with both versions named.
#[test]
fn refuses_a_newer_schema() {
    let directory = tempfile::tempdir().unwrap();
    drop(open(directory.path()).unwrap());
    let meta: redb::TableDefinition<'_, &str, &[u8]> = redb::TableDefinition::new("meta");
    let database = redb::Database::open(directory.path().join(FILE_NAME)).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction
        .open_table(meta)
        .unwrap()
        .insert("schema", 99_u32.to_le_bytes().as_slice())
        .unwrap();
    transaction.commit().unwrap();
    drop(database);
    let path = directory.path().join(FILE_NAME);
    let before = fs::read(&path).unwrap();
    let error = open(directory.path()).unwrap_err();
    untouched(&path, &before);
    assert!(
        matches!(
            error,
            OpenError::Newer {
                found: 99,
                known: 4,
                ..
            }
        ),
        "{error:?}"
    );
}

/// A store in use by another opener is refused; it can be opened once the other is gone.
#[test]
fn refuses_a_store_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let first = open(directory.path()).unwrap();
    let error = open(directory.path()).unwrap_err();
    assert!(matches!(error, OpenError::Locked(_)), "{error:?}");
    drop(first);
    assert_eq!(open(directory.path()).unwrap().image, Image::default());
}

/// A cut file is refused, not repaired into something else.
#[test]
fn refuses_a_cut_file() {
    let directory = tempfile::tempdir().unwrap();
    drop(open(directory.path()).unwrap());
    let path = directory.path().join(FILE_NAME);
    let whole = fs::read(&path).unwrap();
    let half = whole.get(..whole.len() / 2).unwrap().to_vec();
    fs::write(&path, &half).unwrap();
    let error = open(directory.path()).unwrap_err();
    assert!(matches!(error, OpenError::Damaged(..)), "{error:?}");
    untouched(&path, &half);
}

/// The rest of a creation that a crash interrupted is no store and stands in nobody's way.
#[test]
fn starts_over_after_an_interrupted_creation() {
    let directory = tempfile::tempdir().unwrap();
    let rest = directory.path().join(format!("{FILE_NAME}.new"));
    fs::write(&rest, b"half of a store").unwrap();
    assert_eq!(open(directory.path()).unwrap().image, Image::default());
    assert!(!rest.exists());
}
