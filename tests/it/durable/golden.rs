//! Stores of every schema so far, opened by today's program.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use kvgate::store::{CopyPieces, FILE_NAME, FsDisk, STEPS, look, open, read_copy, write_new};
use kvgate_core::close::{
    CallFailure, CallResult, CloseIntent, CloseMode, CloseReason, CloseStage, Reopened, Target,
    TargetState,
};
use kvgate_core::decision::{BypassReason, EndHow, Scope};
use kvgate_core::ids::{
    CloseId, CloseNo, EngineId, Epoch, Issue, Label, LeaseId, RowNo, SessionId, TicketId,
};
use kvgate_core::memory::MemoryStore;
use kvgate_core::reading::{Role, StartMark};
use kvgate_core::state::{EngineRow, EpochCause, EpochEntry};
use kvgate_core::store::Image;
use kvgate_core::ticket::{Ended, Sent, Stage, Ticket};
use kvgate_core::units::{Span, Timestamp, Tokens};

use super::disk::SimDisk;
use super::work::{Account, Work, work};

/// Set to anything: writes the store of today's schema and its description, if they are not there.
const MAKE: &str = "KVGATE_MAKE_STORES";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/stores")
}

/// An image with every kind of row: what a workload leaves, and by hand what it does not reach.
fn rich_image() -> Image {
    let disk = SimDisk::default();
    let mut account = Account::new(MemoryStore::default());
    work(&disk, &mut account, Work::default()).unwrap();
    let job = Work {
        orderly: false,
        ..Work::default()
    };
    work(&disk, &mut account, job).unwrap();
    let mut image = account.last().image();
    let mut row = image.tickets.last().unwrap().row.0;
    let lease = LeaseId {
        issue: Issue(1),
        salt: u64::MAX,
    };
    let bypasses = [
        BypassReason::Disabled,
        BypassReason::OutOfScope,
        BypassReason::Protected,
        BypassReason::Degraded,
        BypassReason::Oversize,
        BypassReason::QueueFull,
        BypassReason::Aged,
    ];
    let ends = [
        EndHow::Released,
        EndHow::Cancelled,
        EndHow::SessionClosed,
        EndHow::Expired,
        EndHow::Revoked,
        EndHow::Dropped,
        EndHow::TakenBack,
    ];
    for how in bypasses.map(EndHow::Bypassed).into_iter().chain(ends) {
        row += 1;
        let full = row.is_multiple_of(2);
        let mut asked = image.tickets[0].asked.clone().filter(|_| full);
        if let Some(asked) = asked.as_mut().filter(|_| row.is_multiple_of(4)) {
            asked.sent = Sent::Parts {
                prompt: Tokens::new(row).unwrap(),
                max_new: Tokens::new(60).unwrap(),
            };
            asked.terms.scope = Scope::Eval;
            asked.terms.client = None;
            asked.terms.request_id = Some(Label::new("request-9").unwrap());
        }
        image.tickets.push(Ticket {
            row: RowNo(row),
            id: TicketId::new(&format!("by hand {row}")).unwrap(),
            asked,
            stage: Stage::Ended(Ended {
                at: image.now,
                how,
                lease: full.then_some(lease),
                since: full.then_some(image.now),
                waited: Span::from_millis(row),
                epoch: Epoch(1),
            }),
        });
    }
    let last = image.epochs.last().unwrap().epoch.0;
    let causes = [
        EpochCause::First,
        EpochCause::MembersChanged { joined: 3, left: 2 },
        EpochCause::Restarted(EngineId::new("http://a")),
        EpochCause::WorkerIdChanged(EngineId::new("http://b")),
    ];
    for (number, cause) in (last + 1..).zip(causes) {
        image.epochs.push(EpochEntry {
            epoch: Epoch(number),
            at: image.now,
            cause,
        });
    }
    let roles = [Role::Decode, Role::Prefill, Role::Other];
    for (number, role) in (1..).zip(roles) {
        image.engines.push(EngineRow {
            id: EngineId::new(&format!("http://by-hand-{number}")),
            role,
            worker_ids: ["one".into(), "two".into()].into(),
            seen_healthy: number == 1,
            capacity: (number < 3).then(|| Tokens::new(number * 1_000_000).unwrap()),
            start_mark: (number > 1).then_some(StartMark(number)),
            joined: Epoch(number),
            close_refusals: u32::from(number == 2) * 3,
            unsupported_at: (number == 2).then_some(image.now),
        });
    }
    image.tally.local_bypasses = [1, 2, 3, 4, 5];
    image.tally.closes += 5;
    image.tally.close_failures += 2;
    image.tally.close_deliveries = [11, 12, 13, 14, 15, 16, 17];
    image.tally.sessions_reopened += 1;
    let next = image.closes.last().map_or(1, |close| close.id.number.0 + 1);
    image.closes.extend(closes_by_hand(next, image.now));
    for (number, used) in (1..).zip([image.now, Timestamp::from_millis(0)]) {
        let session = SessionId::new(&format!("used by hand {number}")).unwrap();
        image.sessions.push((session, used));
    }
    image.sessions.sort();
    image
}

/// A close in every stage, with engines in every state and every outcome of a call.
fn closes_by_hand(next: u64, now: Timestamp) -> Vec<CloseIntent> {
    let status = |code, text: Option<&str>| CallResult::Status {
        code,
        text: text.map(Into::into),
    };
    let results = [
        None,
        Some(status(200, None)),
        Some(status(400, Some("no such session\nat all"))),
        Some(status(404, None)),
        Some(CallResult::Failed(CallFailure::Timeout)),
        Some(CallResult::Failed(CallFailure::Refused)),
        Some(CallResult::Failed(CallFailure::TooLarge)),
        Some(CallResult::Failed(CallFailure::NotAllowed)),
    ];
    let targets = |states: &[TargetState]| {
        (0_u32..)
            .zip(states)
            .zip(&results)
            .map(|((attempts, state), last)| {
                let target = Target {
                    state: *state,
                    attempts,
                    last: last.clone(),
                };
                (EngineId::new(&format!("http://by-hand-{attempts}")), target)
            })
            .collect()
    };
    let all = [&[TargetState::Pending], &TargetState::ENDS[..]].concat();
    let stages = [
        CloseStage::Joining { ready_since: None },
        CloseStage::Joining {
            ready_since: Some(now),
        },
        CloseStage::Delivering {
            since: now,
            early: true,
        },
        CloseStage::Delivering {
            since: now,
            early: false,
        },
        CloseStage::Done { at: now },
    ];
    let reasons = [
        None,
        Some(CloseReason::Terminal),
        Some(CloseReason::Dropped),
        Some(CloseReason::Idle),
        None,
    ];
    (next..)
        .zip(stages)
        .zip(reasons)
        .map(|((number, stage), reason)| {
            let done = matches!(stage, CloseStage::Done { .. });
            let delivering = matches!(stage, CloseStage::Delivering { .. });
            let full = number % 2 == 0;
            CloseIntent {
                id: CloseId {
                    number: CloseNo(number),
                    salt: u64::MAX - number,
                },
                session: SessionId::new(&format!("closed by hand {number}")).unwrap(),
                mode: if full {
                    CloseMode::Abort
                } else {
                    CloseMode::Join
                },
                reason,
                requested_at: now,
                stage,
                targets: if done {
                    targets(&TargetState::ENDS[1..])
                } else if delivering {
                    targets(&all)
                } else {
                    targets(&[TargetState::Pending])
                },
                counts: if done {
                    [40, 1, 2, 3, 4, 5, 6]
                } else {
                    Default::default()
                },
                timed_out: full,
                failure_counted: done,
                reopened: done.then(|| Reopened {
                    at: now,
                    ticket: TicketId::new("opens again").unwrap(),
                }),
                not_aborted: full
                    .then_some(["request-1", "request-10"])
                    .into_iter()
                    .flatten()
                    .map(|label| Label::new(label).unwrap())
                    .collect(),
            }
        })
        .collect()
}

/// The content in plain lines, in words that later versions keep.
fn describe(image: &Image) -> String {
    let mut text = String::new();
    let mut line = |content: String| writeln!(text, "{content}").unwrap();
    line(format!(
        "head: term {} seq {} now {} next issue {}",
        image.term,
        image.seq.0,
        image.now.millis(),
        image.next_issue
    ));
    for start in &image.starts {
        line(format!(
            "start: first issue {} salt {} at {}",
            start.first_issue.0,
            start.salt,
            start.at.millis()
        ));
    }
    for epoch in &image.epochs {
        line(format!(
            "epoch {}: at {} {:?}",
            epoch.epoch.0,
            epoch.at.millis(),
            epoch.cause
        ));
    }
    for engine in &image.engines {
        line(format!(
            "engine {}: {:?} workers {:?} healthy {} capacity {:?} mark {:?} joined {}",
            engine.id.as_str(),
            engine.role,
            engine.worker_ids,
            engine.seen_healthy,
            engine.capacity.map(Tokens::get),
            engine.start_mark.map(|mark| mark.0),
            engine.joined.0
        ));
        // What schema 1 did not know is told where there is something to tell.
        if engine.close_refusals > 0 || engine.unsupported_at.is_some() {
            line(format!(
                "engine {}: refused closes {} unsupported since {:?}",
                engine.id.as_str(),
                engine.close_refusals,
                engine.unsupported_at.map(Timestamp::millis)
            ));
        }
    }
    for ticket in &image.tickets {
        line(describe_ticket(ticket));
    }
    for close in &image.closes {
        line(describe_close(close));
    }
    for (session, used) in &image.sessions {
        line(format!(
            "session {:?}: used {}",
            session.as_str(),
            used.millis()
        ));
    }
    for scope in &image.tally.scopes {
        line(format!(
            "scope: admit {} wait {:?} bypass {:?} cancelled {:?}",
            scope.admit, scope.wait, scope.bypass, scope.cancelled
        ));
    }
    line(format!(
        "tally: ended {:?} after wait {} waited {} local {:?}",
        image.tally.leases_ended,
        image.tally.granted_after_wait,
        image.tally.waited_millis,
        image.tally.local_bypasses
    ));
    let closes = &image.tally;
    if closes.closes > 0 {
        line(format!(
            "closes: {} failed {} engines {:?} sessions reopened {}",
            closes.closes, closes.close_failures, closes.close_deliveries, closes.sessions_reopened
        ));
    }
    text
}

fn describe_close(close: &CloseIntent) -> String {
    let mut text = format!(
        "close {}: {:?} {:?} reason {:?} asked {} {} counts {:?} timed out {} failure counted {}",
        close.id,
        close.session.as_str(),
        close.mode,
        close.reason,
        close.requested_at.millis(),
        describe_stage(close.stage),
        close.counts,
        close.timed_out,
        close.failure_counted
    );
    if let Some(reopened) = &close.reopened {
        let (at, ticket) = (reopened.at.millis(), reopened.ticket.as_str());
        write!(text, " reopened {at} by {ticket:?}").unwrap();
    }
    for label in &close.not_aborted {
        write!(text, " not aborted {:?}", label.as_str()).unwrap();
    }
    for (engine, target) in &close.targets {
        let (state, attempts) = (target.state, target.attempts);
        write!(text, "; {} {state:?} attempts {attempts}", engine.as_str()).unwrap();
        match &target.last {
            Some(CallResult::Status { code, text: said }) => {
                write!(text, " status {code} {said:?}").unwrap();
            }
            Some(CallResult::Failed(failure)) => write!(text, " {failure:?}").unwrap(),
            None => {}
        }
    }
    text
}

fn describe_stage(stage: CloseStage) -> String {
    match stage {
        CloseStage::Joining { ready_since } => {
            format!("joining, ready {:?}", ready_since.map(Timestamp::millis))
        }
        CloseStage::Delivering { since, early } => {
            format!("delivering since {} early {early}", since.millis())
        }
        CloseStage::Done { at } => format!("done {}", at.millis()),
    }
}

fn describe_ticket(ticket: &Ticket) -> String {
    let asked = ticket.asked.as_ref().map_or_else(
        || "nothing".to_owned(),
        |asked| {
            let sent = match asked.sent {
                Sent::Parts { prompt, max_new } => format!("{}+{}", prompt.get(), max_new.get()),
                Sent::Sum(sum) => sum.get().to_string(),
            };
            format!(
                "{:?} sent {sent} reserves {} {:?} ttl {} client {:?} request {:?}",
                asked.session.as_str(),
                asked.terms.reservation.get(),
                asked.terms.scope,
                asked.terms.ttl.millis(),
                asked.terms.client.as_ref().map(|label| label.as_str()),
                asked.terms.request_id.as_ref().map(|label| label.as_str()),
            )
        },
    );
    let stage = match &ticket.stage {
        Stage::Waiting { since } => format!("waits since {}", since.millis()),
        Stage::Held(lease) => format!(
            "holds {} epoch {} granted {} waited {:?} ttl {} ends {} graced {}",
            lease.id,
            lease.epoch.0,
            lease.granted_at.millis(),
            lease.waited.map(Span::millis),
            lease.ttl.millis(),
            lease.ends_at.millis(),
            lease.graced
        ),
        Stage::Ended(ended) => format!(
            "ended {} {:?} lease {:?} since {:?} waited {} epoch {}",
            ended.at.millis(),
            ended.how,
            ended.lease.map(|lease| lease.to_string()),
            ended.since.map(|since| since.millis()),
            ended.waited.millis(),
            ended.epoch.0
        ),
    };
    format!(
        "ticket {}: {:?} asked {asked}; {stage}",
        ticket.row.0,
        ticket.id.as_str()
    )
}

/// Writes the files of today's schema that are not there yet, when that is wanted.
fn make_missing() {
    // Several tests ask for them at once.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap();
    let newest = kept(STEPS.len());
    if std::env::var_os(MAKE).is_none() || newest.exists() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = rich_image();
    write_new(&FsDisk::new(directory.path()), &image).unwrap();
    fs::copy(directory.path().join(FILE_NAME), &newest).unwrap();
    fs::write(newest.with_extension("txt"), describe(&image)).unwrap();
    let copy: Vec<u8> = CopyPieces::new(image).flatten().collect();
    fs::write(newest.with_extension("ndjson"), copy).unwrap();
}

fn kept(schema: usize) -> PathBuf {
    folder().join(format!("schema-{schema}.redb"))
}

/// The bytes of the store that a program with this schema wrote.
pub fn kept_store(schema: usize) -> Vec<u8> {
    make_missing();
    fs::read(kept(schema)).unwrap_or_else(|error| {
        panic!(
            "{}: {error}; run the tests of stores once with {MAKE}=1",
            kept(schema).display()
        )
    })
}

fn frozen(schema: usize) -> String {
    fs::read_to_string(kept(schema).with_extension("txt")).unwrap()
}

/// DUR5: a store of every schema that there ever was opens, and holds what was frozen beside it.
/// The file is kept from before each step that it needed, and from before it was rewritten.
#[test]
fn stores_of_every_schema_open() {
    for schema in 1..=STEPS.len() {
        let store = kept_store(schema);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE_NAME);
        fs::write(&path, &store).unwrap();
        // A look migrates in memory only.
        let seen = look(directory.path()).unwrap();
        assert_eq!(seen.schema() as usize, schema);
        assert_eq!(describe(seen.image()), frozen(schema), "schema {schema}");
        seen.verify().unwrap();
        drop(seen);
        assert!(fs::read(&path).unwrap() == store, "the file was touched");
        let opened = open(directory.path()).unwrap();
        assert_eq!(describe(&opened.image), frozen(schema), "schema {schema}");
        drop(opened);
        let beside = |end: &str| fs::read(directory.path().join(format!("{FILE_NAME}.{end}")));
        if schema < STEPS.len() {
            let copy = beside(&format!("before-{}", schema + 1)).unwrap();
            assert!(copy == store, "schema {schema}: the copy is another file");
            beside("bak").unwrap();
        } else {
            assert!(beside(&format!("before-{schema}")).is_err());
        }
        // What was migrated is of today's schema and opens again.
        let again = look(directory.path()).unwrap();
        assert_eq!(again.schema() as usize, STEPS.len());
        assert_eq!(describe(again.image()), frozen(schema), "schema {schema}");
    }
}

/// DUR5: a logical copy of every version that there ever was is read, and holds what was frozen
/// beside it; a store made from it is whole.
#[test]
fn copies_of_every_version_are_read() {
    for schema in 1..=STEPS.len() {
        kept_store(schema);
        let copy = fs::read(kept(schema).with_extension("ndjson")).unwrap();
        let image = read_copy(&copy[..]).unwrap();
        assert_eq!(describe(&image), frozen(schema), "schema {schema}");
        let directory = tempfile::tempdir().unwrap();
        let now = image.now.after(Span::from_secs(60));
        let made = kvgate::store::restore(directory.path(), &copy[..], now).unwrap();
        made.verify().unwrap();
        assert_eq!(made.image().tickets, image.tickets);
        assert_eq!(made.image().closes, image.closes);
        assert_eq!(made.image().sessions, image.sessions);
        assert_eq!(made.image().tally, image.tally);
    }
}
