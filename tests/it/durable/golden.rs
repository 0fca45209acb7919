//! Stores of every schema so far, opened by today's program.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use kvgate::store::{CopyPieces, FILE_NAME, FsDisk, STEPS, look, open, read_copy, write_new};
use kvgate_core::audit::{AuditAct, AuditEntry};
use kvgate_core::close::{
    CallFailure, CallResult, CloseIntent, CloseMode, CloseReason, CloseStage, Reopened, Target,
    TargetState,
};
use kvgate_core::decision::{BypassReason, EndHow, Scope};
use kvgate_core::effect::CancelOutcome;
use kvgate_core::ids::{
    AuditNo, CloseId, CloseNo, EngineId, Epoch, Issue, Label, LeaseId, RowNo, RunId, SessionId,
    StepNo, TicketId,
};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::AdmissionScope;
use kvgate_core::reading::{Role, StartMark};
use kvgate_core::report::{Standing, StepReport, Window};
use kvgate_core::settings::{Moved, Overrides, Setting, SettingValue};
use kvgate_core::state::{EngineRow, EpochCause, EpochEntry};
use kvgate_core::store::Image;
use kvgate_core::tally::Tally;
use kvgate_core::ticket::{Ended, Sent, Stage, Ticket};
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};

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
    image.tally.usage_rounds = 77;
    image.tally.usage_sum = 33_000_000;
    reports_by_hand(&mut image);
    image.overrides = Overrides {
        program_admission: Some(true),
        session_lifecycle: Some(false),
        paused: Some(true),
        headroom: Some(Ppm::ONE),
        pressure_threshold: Ppm::new(1),
        expected_decode_cap: Some(None),
        max_wait: Some(Span::ZERO),
        scope: Some(AdmissionScope::All),
        changed_at: Some(image.now),
    };
    acts_by_hand(&mut image);
    image
}

/// Every act with every kind of value.
fn acts_by_hand(image: &mut Image) {
    let values = [
        SettingValue::Switch(true),
        SettingValue::Share(Ppm::ONE),
        SettingValue::Cap(None),
        SettingValue::Cap(Some(Tokens::MAX)),
        SettingValue::Time(Span::from_millis(1)),
        SettingValue::Scope(AdmissionScope::Train),
        SettingValue::Scope(AdmissionScope::All),
        SettingValue::Switch(false),
    ];
    let moves = |is_set: bool| -> Vec<Moved> {
        let settings = Setting::ALL.iter().zip(values);
        let moved = |(setting, value): (&Setting, SettingValue)| Moved {
            setting: *setting,
            from: value,
            to: value,
            is_set,
        };
        settings.map(moved).collect()
    };
    let session = || SessionId::new("by hand").unwrap();
    let ticket = || TicketId::new("by hand").unwrap();
    let close = CloseId {
        number: CloseNo(7),
        salt: u64::MAX,
    };
    let cancelled = |outcome, known: bool| AuditAct::TicketCancelled {
        ticket: ticket(),
        session: known.then(session),
        tokens: Tokens::new(u64::from(known)).unwrap(),
        outcome,
    };
    let acts = [
        AuditAct::SettingsChanged(moves(true)),
        AuditAct::SettingsReset(moves(false)),
        AuditAct::LeaseRevoked {
            lease: LeaseId {
                issue: Issue(1),
                salt: u64::MAX,
            },
            ticket: ticket(),
            session: None,
            tokens: Tokens::MAX,
        },
        cancelled(CancelOutcome::Withdrawn, true),
        cancelled(CancelOutcome::Released, true),
        cancelled(CancelOutcome::Bypassed, true),
        cancelled(CancelOutcome::AlreadyFinished, true),
        cancelled(CancelOutcome::Unknown, false),
        AuditAct::SessionClosed {
            session: session(),
            close,
            mode: CloseMode::Join,
        },
        AuditAct::SessionClosed {
            session: session(),
            close,
            mode: CloseMode::Abort,
        },
        AuditAct::CloseRetried {
            close,
            session: session(),
            engines: 3,
        },
    ];
    let next = image.audit.last().map_or(1, |last| last.no.0 + 1);
    for (number, act) in (next..).zip(acts) {
        image.audit.push(AuditEntry {
            no: AuditNo(number),
            at: image.now,
            who: Label::new("by hand").unwrap(),
            act,
        });
    }
}

/// A window and a report in which everything is there, and one of each in which nothing is.
fn reports_by_hand(image: &mut Image) {
    let run = |name: &str| RunId::new(name).unwrap();
    let window = |full: bool| Window {
        from: image.now,
        base: Box::new(if full {
            image.tally.clone()
        } else {
            Tally::default()
        }),
        usage_peak: full.then_some(Ppm::ONE),
    };
    let windows = [
        (Some(run("by hand")), window(true)),
        (Some(run("new by hand")), window(false)),
    ];
    let next = image.steps.last().map_or(1, |last| last.number.unwrap().0) + 1;
    let report = |number: u64, full: bool| StepReport {
        number: Some(StepNo(number)),
        run: run("by hand"),
        step: Some(if full { (1 << 53) - 1 } else { 0 }),
        from: Timestamp::from_millis(0),
        to: image.now,
        counts: window(full).base,
        usage_peak: window(full).usage_peak,
        standing: Standing {
            session_lifecycle: full,
            waiting: number,
            ceiling: if full { Tokens::MAX } else { Tokens::ZERO },
            reserved: Tokens::new(number).unwrap(),
            leases: number + 1,
            epoch: Epoch(number + 2),
            degraded: !full,
        },
    };
    let reports = [report(next, false), report(next + 1, true)];
    image.windows.extend(windows);
    image.windows.sort_by(|one, next| one.0.cmp(&next.0));
    image.steps.extend(reports);
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
    for (run, window) in &image.windows {
        let run = run.as_ref().map(RunId::as_str);
        let (from, peak) = (window.from.millis(), window.usage_peak.map(Ppm::get));
        line(format!("window of {run:?}: from {from} peak {peak:?}"));
        describe_tally(&window.base, &mut line);
    }
    for report in &image.steps {
        line(describe_step(report));
        describe_tally(&report.counts, &mut line);
    }
    // What schema 3 did not know is told where there is something to tell.
    if image.overrides != Overrides::default() {
        line(describe_overrides(&image.overrides));
    }
    for entry in &image.audit {
        let (number, at, who) = (entry.no.0, entry.at.millis(), entry.who.as_str());
        let act = describe_act(&entry.act);
        line(format!("audit {number}: at {at} by {who:?} {act}"));
    }
    describe_tally(&image.tally, &mut line);
    text
}

fn describe_overrides(overrides: &Overrides) -> String {
    format!(
        "set: admission {:?} lifecycle {:?} paused {:?} headroom {:?} threshold {:?} cap {:?} \
         max wait {:?} scope {:?} changed {:?}",
        overrides.program_admission,
        overrides.session_lifecycle,
        overrides.paused,
        overrides.headroom.map(Ppm::get),
        overrides.pressure_threshold.map(Ppm::get),
        overrides
            .expected_decode_cap
            .map(|cap| cap.map(Tokens::get)),
        overrides.max_wait.map(Span::millis),
        overrides.scope,
        overrides.changed_at.map(Timestamp::millis)
    )
}

fn describe_act(act: &AuditAct) -> String {
    let moved = |moves: &[Moved]| -> String {
        let one = |moved: &Moved| {
            let (from, to) = (describe_value(moved.from), describe_value(moved.to));
            format!(" {:?} {from} {to} set {}", moved.setting, moved.is_set)
        };
        moves.iter().map(one).collect()
    };
    match act {
        AuditAct::SettingsChanged(moves) => format!("changed settings{}", moved(moves)),
        AuditAct::SettingsReset(moves) => format!("reset settings{}", moved(moves)),
        AuditAct::LeaseRevoked {
            lease,
            ticket,
            session,
            tokens,
        } => format!(
            "revoked {lease} of {:?} session {:?} tokens {}",
            ticket.as_str(),
            session.as_ref().map(SessionId::as_str),
            tokens.get()
        ),
        AuditAct::TicketCancelled {
            ticket,
            session,
            tokens,
            outcome,
        } => format!(
            "cancelled {:?} session {:?} tokens {} {outcome:?}",
            ticket.as_str(),
            session.as_ref().map(SessionId::as_str),
            tokens.get()
        ),
        AuditAct::SessionClosed {
            session,
            close,
            mode,
        } => format!("closed {:?} {close} {mode:?}", session.as_str()),
        AuditAct::CloseRetried {
            close,
            session,
            engines,
        } => format!("retried {close} of {:?} at {engines}", session.as_str()),
    }
}

fn describe_value(value: SettingValue) -> String {
    match value {
        SettingValue::Switch(on) => on.to_string(),
        SettingValue::Share(share) => share.get().to_string(),
        SettingValue::Cap(cap) => format!("{:?}", cap.map(Tokens::get)),
        SettingValue::Time(time) => time.millis().to_string(),
        SettingValue::Scope(scope) => format!("{scope:?}"),
    }
}

fn describe_tally(tally: &Tally, line: &mut impl FnMut(String)) {
    for scope in &tally.scopes {
        line(format!(
            "scope: admit {} wait {:?} bypass {:?} cancelled {:?}",
            scope.admit, scope.wait, scope.bypass, scope.cancelled
        ));
    }
    line(format!(
        "tally: ended {:?} after wait {} waited {} local {:?}",
        tally.leases_ended, tally.granted_after_wait, tally.waited_millis, tally.local_bypasses
    ));
    if tally.closes > 0 {
        line(format!(
            "closes: {} failed {} engines {:?} sessions reopened {}",
            tally.closes, tally.close_failures, tally.close_deliveries, tally.sessions_reopened
        ));
    }
    if tally.usage_rounds > 0 {
        line(format!(
            "usage: {} in {} rounds",
            tally.usage_sum, tally.usage_rounds
        ));
    }
}

fn describe_step(report: &StepReport) -> String {
    let standing = &report.standing;
    format!(
        "step {:?} of {:?}: number {:?} from {} to {} peak {:?} lifecycle {} waiting {} ceiling {} \
         reserved {} leases {} epoch {} degraded {}",
        report.step,
        report.run.as_str(),
        report.number.map(|number| number.0),
        report.from.millis(),
        report.to.millis(),
        report.usage_peak.map(Ppm::get),
        standing.session_lifecycle,
        standing.waiting,
        standing.ceiling.get(),
        standing.reserved.get(),
        standing.leases,
        standing.epoch.0,
        standing.degraded
    )
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
        assert_eq!(made.image().windows, image.windows);
        assert_eq!(made.image().steps, image.steps);
        assert_eq!(made.image().overrides, image.overrides);
        assert_eq!(made.image().audit, image.audit);
        assert_eq!(made.image().tally, image.tally);
    }
}
