//! Step reports and the last decisions (REP1, section 9).

use kvgate_core::command::{Command, Slice};
use kvgate_core::decision::{BypassReason, Scope, WaitReason};
use kvgate_core::decisions::{Decided, DecisionEntry, DecisionsPlace, DecisionsWanted};
use kvgate_core::effect::Reply;
use kvgate_core::ids::{RunId, Seq, SessionId, StepNo};
use kvgate_core::policy::{DECISIONS_KEPT, Policy, STEPS_MAX};
use kvgate_core::report::StepReport;
use kvgate_core::tally::{CancelledHow, LeaseEnd};
use kvgate_core::units::{Ppm, Span, Timestamp};

use crate::common::{Gate, Told, acquire, admission_on};

fn run(name: &str) -> RunId {
    RunId::new(name).unwrap()
}

fn take(gate: &mut Gate, name: &str, step: u64) -> (Option<Seq>, StepReport) {
    let run = run(name);
    match gate.tell(Command::TakeStep { run, step }) {
        (seq, Told::Reply(Reply::Step(report))) => (seq, *report),
        other => panic!("{other:?}"),
    }
}

fn peek(gate: &mut Gate, name: &str) -> StepReport {
    match gate.tell(Command::PeekStep(run(name))) {
        (None, Told::Reply(Reply::Step(report))) => *report,
        other => panic!("{other:?}"),
    }
}

fn steps(gate: &mut Gate) -> Vec<StepReport> {
    let slice = Slice {
        from: StepNo(u64::MAX),
        rows: 1_000,
    };
    match gate.tell(Command::ListSteps(slice)) {
        (None, Told::Reply(Reply::Steps(page))) => page.items,
        other => panic!("{other:?}"),
    }
}

fn read(gate: &mut Gate, wanted: DecisionsWanted) -> (Vec<DecisionEntry>, bool) {
    match gate.tell(Command::ListDecisions(wanted)) {
        (None, Told::Reply(Reply::Decisions(page))) => (page.items, page.more),
        other => panic!("{other:?}"),
    }
}

fn decisions(gate: &mut Gate, after: Option<u64>) -> Vec<DecisionEntry> {
    let last = DecisionsWanted::last(1_000);
    let place = after.map_or(last.place, DecisionsPlace::After);
    read(gate, DecisionsWanted { place, ..last }).0
}

/// The train scope's admits, waits, bypasses and cancelled tickets of a report.
fn counts(report: &StepReport) -> (u64, u64, u64, u64) {
    let scope = report.counts.scope(Scope::Train);
    (
        scope.admit,
        WaitReason::ALL.iter().map(|why| scope.waits(*why)).sum(),
        BypassReason::ALL
            .iter()
            .map(|why| scope.bypasses(*why))
            .sum(),
        CancelledHow::ALL
            .iter()
            .map(|how| scope.cancels(*how))
            .sum(),
    )
}

fn deliver(gate: &mut Gate, name: &str, reservation: u64) {
    let lease = gate.hold(name, reservation);
    gate.deliver(name, Some(lease));
}

/// REP1: a report holds what happened since the run's previous step, and the same step gives the
/// same report, whatever happened since.
#[test]
fn rep1_a_step_is_drained_once() {
    let mut gate = Gate::new();
    deliver(&mut gate, "t1", 500_000);
    gate.park("t2", 500_000);
    let (seq, first) = take(&mut gate, "exp", 1);
    assert!(seq.is_some(), "it changed what is kept");
    assert_eq!(counts(&first), (1, 1, 0, 0));
    assert_eq!(first.step, Some(1));
    assert_eq!(first.standing.waiting, 1);
    assert_eq!(first.standing.leases, 1);
    assert_eq!(first.standing.reserved.get(), 500_000);
    gate.cancel("t2");
    assert_eq!(take(&mut gate, "exp", 1), (None, first.clone()));
    let (_, second) = take(&mut gate, "exp", 2);
    assert_eq!(counts(&second), (0, 0, 0, 1));
    assert_eq!(second.from, first.to);
    let (_, third) = take(&mut gate, "exp", 3);
    assert_eq!(counts(&third), (0, 0, 0, 0));
    let numbers: Vec<_> = steps(&mut gate).iter().map(|step| step.step).collect();
    assert_eq!(numbers, [Some(3), Some(2), Some(1)], "newest first");
}

/// REP1: each run has a window of its own; a new run begins at the latest step of any run, and the
/// first one at the first start of the store.
#[test]
fn rep1_runs_do_not_disturb_each_other() {
    let mut gate = Gate::new();
    let first_start = gate.store.image().starts[0].at;
    deliver(&mut gate, "t1", 10);
    let (_, a1) = take(&mut gate, "a", 1);
    assert_eq!((a1.from, counts(&a1).0), (first_start, 1));
    deliver(&mut gate, "t2", 10);
    gate.now += 5;
    let (_, b1) = take(&mut gate, "b", 1);
    assert_eq!((b1.from, counts(&b1).0), (a1.to, 1), "since the step of a");
    deliver(&mut gate, "t3", 10);
    let (_, a2) = take(&mut gate, "a", 2);
    assert_eq!((a2.from, counts(&a2).0), (a1.to, 2), "b took nothing of a");
    // The run without a name is a run.
    let (_, unnamed) = take(&mut gate, "", 2);
    assert_eq!(counts(&unnamed).0, 0);
}

/// REP1: a look drains nothing and is no change.
#[test]
fn rep1_a_look_drains_nothing() {
    let mut gate = Gate::new();
    deliver(&mut gate, "t1", 10);
    let look = peek(&mut gate, "exp");
    assert_eq!((look.step, look.number, counts(&look).0), (None, None, 1));
    assert_eq!(peek(&mut gate, "exp").counts, look.counts);
    assert_eq!(counts(&take(&mut gate, "exp", 7).1).0, 1);
}

/// REP1: usage is sampled at every reading: the mean of the fleet means, the peak of the worst engine.
#[test]
fn rep1_usage_over_the_window() {
    let mut gate = Gate::new();
    take(&mut gate, "exp", 0);
    for usage in [100_000, 700_000, 400_000] {
        gate.engine("a").usage = Some(usage);
        gate.round();
    }
    let (_, report) = take(&mut gate, "exp", 1);
    assert_eq!(report.counts.usage_rounds, 3);
    assert_eq!(report.counts.usage_sum, 1_200_000);
    assert_eq!(report.usage_peak, Ppm::new(700_000));
    // A window without a reading has no usage.
    let (_, report) = take(&mut gate, "exp", 2);
    assert_eq!((report.counts.usage_rounds, report.usage_peak), (0, None));
}

/// REP1, DUR2: a window goes on over a restart in the middle of a step, with its counters and its
/// peak; reports are there after it, and a step asked again gives the same report.
#[test]
fn rep1_a_window_survives_a_restart() {
    let mut gate = Gate::new();
    let (_, first) = take(&mut gate, "exp", 1);
    deliver(&mut gate, "t1", 10);
    gate.engine("a").usage = Some(900_000);
    gate.round();
    gate.engine("a").usage = Some(200_000);
    gate.run(2_000);
    gate.crash(10_000);
    gate.round();
    deliver(&mut gate, "t2", 10);
    let (_, second) = take(&mut gate, "exp", 2);
    assert_eq!(counts(&second).0, 2);
    assert_eq!(second.from, first.to);
    assert_eq!(second.usage_peak, Ppm::new(900_000));
    gate.crash(1_000);
    assert_eq!(take(&mut gate, "exp", 1), (None, first));
    assert_eq!(take(&mut gate, "exp", 2), (None, second));
    let mut image = gate.machine().image();
    image.now = gate.store.image().now;
    assert_eq!(image, gate.store.image());
}

/// REP1: at most 16 runs have a window; the one whose last step is longest ago goes, and begins
/// like a new one when it comes again.
#[test]
fn rep1_sixteen_runs() {
    let mut gate = Gate::new();
    for number in 0..17 {
        gate.now += 1;
        take(&mut gate, &format!("run-{number}"), 1);
    }
    let windows = gate.store.image().windows;
    assert_eq!(windows.len(), 17, "sixteen runs and the window of new ones");
    assert!(!windows.iter().any(|(name, _)| *name == Some(run("run-0"))));
    let latest = gate.now;
    deliver(&mut gate, "t", 10);
    let (_, again) = take(&mut gate, "run-0", 2);
    assert_eq!(again.from, Timestamp::from_millis(latest));
    assert_eq!(counts(&again).0, 1);
}

/// Section 9: 10,000 reports are remembered.
#[test]
fn rep1_old_reports_are_forgotten() {
    let mut gate = Gate::new();
    let last = STEPS_MAX as u64 + 3;
    for step in 0..last {
        take(&mut gate, "exp", step);
    }
    let image = gate.store.image();
    assert_eq!(image.steps.len(), STEPS_MAX);
    assert_eq!(image.steps[0].step, Some(3));
    // A step that is not remembered is taken anew.
    assert!(take(&mut gate, "exp", 0).0.is_some());
}

/// REP1: counts of a lease that expired, of a bypass, and of what is in no sum.
#[test]
fn rep1_the_kinds_are_kept_apart() {
    let mut gate = Gate::new();
    deliver(&mut gate, "t1", 10);
    gate.ask("large", 2_000_000);
    gate.run(600_000);
    let (_, report) = take(&mut gate, "exp", 1);
    assert_eq!(report.counts.ends(LeaseEnd::Expired), 1);
    let train = report.counts.scope(Scope::Train);
    assert_eq!(train.bypasses(BypassReason::Oversize), 1);
    assert_eq!(report.standing.leases, 0);
}

/// Section 9: each decision is remembered with the figures of its moment, before it changed them.
#[test]
fn decisions_carry_their_moment() {
    let mut gate = Gate::new();
    deliver(&mut gate, "t1", 500_000);
    gate.park("t2", 500_000);
    gate.park("t3", 1);
    gate.ask("large", 2_000_000);
    gate.cancel("t3");
    let all = decisions(&mut gate, None);
    let said: Vec<_> = all
        .iter()
        .map(|entry| {
            (
                entry.ticket.as_str(),
                entry.decided,
                entry.moment.reserved.get(),
            )
        })
        .collect();
    assert_eq!(
        said,
        [
            ("t1", Decided::Admit, 0),
            ("t2", Decided::Wait(WaitReason::CapacityExhausted), 500_000),
            ("t3", Decided::Wait(WaitReason::BehindOlder), 500_000),
            ("large", Decided::Bypass(BypassReason::Oversize), 500_000),
            ("t3", Decided::Cancelled(CancelledHow::Withdrawn), 500_000),
        ]
    );
    assert!(
        all.iter()
            .all(|entry| entry.moment.ceiling.get() == 900_000)
    );
    assert_eq!(all[1].moment.waiting, 0);
    assert_eq!(all[4].moment.waiting, 2);
    assert!(all.is_sorted_by(|one, next| one.number + 1 == next.number));
    assert_eq!(decisions(&mut gate, Some(all[2].number)), all[3..]);
    assert_eq!(decisions(&mut gate, Some(all[4].number)), []);
}

/// Section 9: a decision of the queue names the time in line; numbers only grow over a restart.
#[test]
fn decisions_of_the_queue() {
    let mut gate = Gate::new();
    let lease = gate.hold("t1", 900_000);
    gate.park("t2", 10);
    gate.run(3_000);
    gate.release(lease).unwrap();
    let before = decisions(&mut gate, None);
    let granted = before.last().unwrap();
    assert_eq!(
        (granted.ticket.as_str(), granted.decided),
        ("t2", Decided::Admit)
    );
    assert_eq!(granted.waited.millis(), 3_000);
    gate.crash(1);
    gate.round();
    gate.ask("t3", 10);
    let after = decisions(&mut gate, None);
    assert_eq!(after.len(), 1, "they are in memory only");
    assert!(after[0].number > granted.number);
}

/// Section 9: the end of a claimed lease stands among the decisions, with the time that it was held.
#[test]
fn ends_of_leases_are_remembered() {
    let mut gate = Gate::new();
    let lease = gate.hold("t1", 900_000);
    gate.run(2_000);
    gate.release(lease).unwrap();
    let last = decisions(&mut gate, None).pop().unwrap();
    assert_eq!(
        (last.ticket.as_str(), last.decided),
        ("t1", Decided::Ended(LeaseEnd::Released))
    );
    assert_eq!(last.held.map(Span::millis), Some(2_000));
    assert_eq!(last.moment.reserved.get(), 900_000);
}

/// Section 9: readers page back and choose, and are told whether there is more on that side.
#[test]
fn decisions_are_chosen_and_read_backwards() {
    let mut gate = Gate::new();
    deliver(&mut gate, "t1", 500_000);
    gate.park("t2", 500_000);
    gate.park("t3", 1);
    gate.ask("large", 2_000_000);
    gate.cancel("t3");
    let all = decisions(&mut gate, None);
    let last = DecisionsWanted::last(2);
    assert_eq!(read(&mut gate, last.clone()), (all[3..].to_vec(), true));
    let before = |number, most| DecisionsWanted {
        place: DecisionsPlace::Before(number),
        most,
        ..last.clone()
    };
    let page = read(&mut gate, before(all[3].number, 2));
    assert_eq!(page, (all[1..3].to_vec(), true));
    let page = read(&mut gate, before(all[1].number, 2));
    assert_eq!(page, (all[..1].to_vec(), false));
    let mut chosen = |wanted: DecisionsWanted| -> Vec<(String, Decided)> {
        let entries = read(&mut gate, wanted).0.into_iter();
        entries
            .map(|entry| (entry.ticket.as_str().to_owned(), entry.decided))
            .collect()
    };
    let withdrawn = Decided::Cancelled(CancelledHow::Withdrawn);
    let behind = Decided::Wait(WaitReason::BehindOlder);
    let of_ticket = DecisionsWanted {
        ticket: Some(all[2].ticket.clone()),
        ..last.clone()
    };
    let t3 = |decided| ("t3".to_owned(), decided);
    assert_eq!(chosen(of_ticket), [t3(behind), t3(withdrawn)]);
    let of_kind = DecisionsWanted {
        decided: vec![behind],
        ..last.clone()
    };
    assert_eq!(chosen(of_kind), [t3(behind)]);
    let with_text = DecisionsWanted {
        part: Some("arg".to_owned()),
        ..last.clone()
    };
    let large = Decided::Bypass(BypassReason::Oversize);
    assert_eq!(chosen(with_text), [("large".to_owned(), large)]);
    let of_session = DecisionsWanted {
        session: SessionId::new("nobody").ok(),
        ..last.clone()
    };
    assert_eq!(chosen(of_session), []);
}

/// Section 9: the ring is bounded.
#[test]
fn decisions_are_bounded() {
    let mut gate = Gate::with(Policy {
        program_admission: false,
        ..admission_on()
    });
    let commands = (0..DECISIONS_KEPT + 5)
        .map(|number| Command::Acquire(acquire(&format!("t{number}"), 1)))
        .collect();
    gate.turn(commands);
    let first = decisions(&mut gate, Some(0));
    assert_eq!(first.len(), 1_000);
    assert_eq!(first[0].ticket.as_str(), "t5");
}
