//! Settings at run time and the audit (SET1 to SET4).

use kvgate_core::audit::{AuditAct, AuditEntry};
use kvgate_core::close::{CloseMode, CloseReason};
use kvgate_core::command::{Act, CloseRequest, Command, Slice};
use kvgate_core::effect::{CancelOutcome, CloseReply, LeaseGone, Reply, RetryRefused};
use kvgate_core::ids::AuditNo;
use kvgate_core::policy::{AUDIT_MAX, AdmissionScope, Policy, PolicyError};
use kvgate_core::settings::{
    Change, Moved, Overrides, Setting, SettingValue, Settings, SettingsChange,
};
use kvgate_core::units::{Ppm, Span, Timestamp};

use crate::common::*;

fn ppm(millionths: u32) -> Ppm {
    Ppm::new(millionths).unwrap()
}

fn configure(gate: &mut Gate, change: SettingsChange) -> (bool, Result<Settings, PolicyError>) {
    match gate.operate(Act::Configure(change)) {
        (seq, Told::Reply(Reply::Settings(settings))) => {
            (seq.is_some(), settings.map(|settings| (*settings).clone()))
        }
        other => panic!("not settings: {other:?}"),
    }
}

fn acts(gate: &Gate) -> Vec<AuditAct> {
    gate.audit().into_iter().map(|entry| entry.act).collect()
}

/// SET1: what was set wins over what is configured, until it is returned.
#[test]
fn set1_what_was_set_wins_until_it_is_returned() {
    let mut gate = Gate::new();
    let (changed, settings) = configure(
        &mut gate,
        SettingsChange {
            headroom: Change::Value(ppm(500_000)),
            scope: Change::Value(AdmissionScope::All),
            ..SettingsChange::default()
        },
    );
    let settings = settings.unwrap();
    assert!(changed);
    assert_eq!(settings.effective().headroom, ppm(500_000));
    assert_eq!(*gate.view().settings, settings);
    assert_eq!(gate.ceiling(), 500_000);
    let hidden: Vec<Setting> = settings
        .hidden()
        .iter()
        .map(|hidden| hidden.setting)
        .collect();
    assert_eq!(
        hidden,
        [Setting::Headroom],
        "the scope is configured so too"
    );
    assert!(settings.overrides.has(Setting::Scope));
    let (changed, settings) = configure(
        &mut gate,
        SettingsChange {
            headroom: Change::Configured,
            ..SettingsChange::default()
        },
    );
    assert!(changed && settings.unwrap().hidden().is_empty());
    assert_eq!(gate.ceiling(), 900_000);
    let (_, settings) = configure(&mut gate, SettingsChange::reset());
    let overrides = settings.unwrap().overrides;
    assert_eq!(
        overrides,
        Overrides {
            changed_at: Some(Timestamp::from_millis(gate.now)),
            ..Overrides::default()
        }
    );
}

/// SET1: all values are checked together; a change that is refused changes none, and leaves no entry.
#[test]
fn set1_all_values_or_none() {
    let zero = Ppm::clamped(0);
    let cases = [
        (
            SettingsChange {
                headroom: Change::Value(zero),
                paused: Change::Value(true),
                ..SettingsChange::default()
            },
            PolicyError::Headroom,
        ),
        (
            SettingsChange {
                pressure_threshold: Change::Value(zero),
                ..SettingsChange::default()
            },
            PolicyError::PressureThreshold,
        ),
        (
            SettingsChange {
                expected_decode_cap: Change::Value(Some(tokens(0))),
                ..SettingsChange::default()
            },
            PolicyError::DecodeCap,
        ),
    ];
    for (change, expected) in cases {
        let mut gate = Gate::new();
        let before = gate.view();
        assert_eq!(configure(&mut gate, change.clone()), (false, Err(expected)));
        assert_eq!(gate.view().settings, before.settings);
        assert_eq!(gate.view().policy, before.policy);
        assert!(gate.audit().is_empty());
        // With admission off the numbers are free, and hold when it is turned on.
        let off = SettingsChange {
            program_admission: Change::Value(false),
            ..change
        };
        assert!(configure(&mut gate, off).0);
        let on = SettingsChange {
            program_admission: Change::Value(true),
            ..SettingsChange::default()
        };
        assert_eq!(configure(&mut gate, on), (false, Err(expected)));
        assert!(!gate.view().policy.program_admission);
        assert_eq!(gate.audit().len(), 1);
    }
}

/// SET2, DUR1, DUR2: what was set is in force after a crash, over whatever is configured then.
#[test]
fn set2_what_was_set_survives_a_crash() {
    let mut gate = Gate::new();
    gate.configure(|policy| {
        policy.paused = true;
        policy.max_wait = Span::from_secs(5);
        policy.expected_decode_cap = None;
    });
    let set = gate.view().settings.overrides.clone();
    let audit = gate.audit();
    gate.policy.max_wait = Span::from_secs(77);
    gate.policy.headroom = ppm(100_000);
    gate.restart(1_000);
    let view = gate.view();
    assert_eq!(view.settings.overrides, set);
    assert!(view.policy.paused);
    assert_eq!(view.policy.max_wait, Span::from_secs(5));
    assert_eq!(view.policy.headroom, ppm(100_000), "configured anew");
    assert_eq!(gate.audit(), audit);
    gate.configure(|policy| policy.paused = false);
    assert_eq!(gate.audit().last().unwrap().no, AuditNo(2), "numbers go on");
}

/// SET2: no cap at all can be set over a configured one.
#[test]
fn set2_a_cap_can_be_lifted() {
    let mut gate = Gate::with(Policy {
        expected_decode_cap: Some(tokens(10)),
        ..admission_on()
    });
    let lifted = SettingsChange {
        expected_decode_cap: Change::Value(None),
        ..SettingsChange::default()
    };
    assert!(configure(&mut gate, lifted.clone()).0);
    assert_eq!(gate.view().policy.expected_decode_cap, None);
    gate.restart(0);
    assert_eq!(gate.view().policy.expected_decode_cap, None);
    assert!(!configure(&mut gate, lifted).0, "it is so already");
}

/// SET3: a start that returns everything to what is configured says so, once.
#[test]
fn set3_a_start_that_returns_all_settings() {
    let mut gate = Gate::new();
    gate.resets = true;
    gate.restart(0);
    assert!(gate.audit().is_empty(), "nothing was set");
    gate.configure(|policy| policy.headroom = ppm(500_000));
    gate.restart(0);
    assert_eq!(gate.ceiling(), 900_000);
    let last = gate.audit().pop().unwrap();
    assert_eq!(last.who.as_str(), "kvgate");
    assert_eq!(
        last.act,
        AuditAct::SettingsReset(vec![Moved {
            setting: Setting::Headroom,
            from: SettingValue::Share(ppm(500_000)),
            to: SettingValue::Share(ppm(900_000)),
            is_set: false,
        }])
    );
    gate.restart(0);
    assert_eq!(gate.audit().len(), 2);
}

/// SET3: one entry for each change of settings, with what moved; none for one that changes nothing.
#[test]
fn set3_changes_of_settings() {
    let mut gate = Gate::new();
    let same = SettingsChange {
        headroom: Change::Value(ppm(900_000)),
        ..SettingsChange::default()
    };
    let moved = |is_set| Moved {
        setting: Setting::Headroom,
        from: SettingValue::Share(ppm(900_000)),
        to: SettingValue::Share(ppm(900_000)),
        is_set,
    };
    assert!(
        configure(&mut gate, same.clone()).0,
        "it stays, whatever is configured"
    );
    assert!(!configure(&mut gate, same).0);
    assert!(!configure(&mut gate, SettingsChange::default()).0);
    assert!(configure(&mut gate, SettingsChange::reset()).0);
    assert!(!configure(&mut gate, SettingsChange::reset()).0);
    assert_eq!(
        acts(&gate),
        [
            AuditAct::SettingsChanged(vec![moved(true)]),
            AuditAct::SettingsChanged(vec![moved(false)]),
        ]
    );
    let entry = gate.audit().pop().unwrap();
    assert_eq!(
        (entry.at.millis(), entry.who.as_str()),
        (gate.now, "operator")
    );
}

/// SET3, LEA3: a revocation is in the audit with what it freed; one that is refused is not.
#[test]
fn set3_revocations() {
    let mut gate = Gate::new();
    let lease = gate.hold("t", 700);
    let waiter = acquire("waits", 900_000);
    assert_eq!(gate.ask_as(waiter), Told::Parked);
    assert_eq!(gate.revoke(lease), Ok(()));
    assert_eq!(
        gate.view().reserved,
        tokens(900_000),
        "the next one has its tokens"
    );
    assert_eq!(gate.revoke(lease), Err(LeaseGone::Expired));
    let never = kvgate_core::ids::LeaseId { salt: 1, ..lease };
    assert_eq!(gate.revoke(never), Err(LeaseGone::NotFound));
    assert_eq!(
        acts(&gate),
        [AuditAct::LeaseRevoked {
            lease,
            ticket: ticket("t"),
            session: Some(session("s")),
            tokens: tokens(700),
        }]
    );
}

/// SET3, TIC5: a cancel by an operator is answered as any, and is in the audit when it changed something.
/// A caller's own is not.
#[test]
fn set3_cancels() {
    let mut gate = Gate::new();
    gate.hold("held", 900_000);
    gate.park("waits", 10);
    gate.park("waits too", 20);
    let mut cancel = |name: &str| match gate.operate(Act::Cancel(ticket(name))) {
        (seq, Told::Reply(Reply::Cancel(outcome))) => (seq.is_some(), outcome),
        other => panic!("not a cancel: {other:?}"),
    };
    assert_eq!(cancel("waits"), (true, CancelOutcome::Withdrawn));
    assert_eq!(cancel("waits"), (false, CancelOutcome::AlreadyFinished));
    assert_eq!(cancel("never"), (true, CancelOutcome::Unknown));
    assert_eq!(cancel("held"), (true, CancelOutcome::Released));
    gate.cancel("waits too");
    let cancelled = |name, known: bool, reserved, outcome| AuditAct::TicketCancelled {
        ticket: ticket(name),
        session: known.then(|| session("s")),
        tokens: tokens(reserved),
        outcome,
    };
    assert_eq!(
        acts(&gate),
        [
            cancelled("waits", true, 10, CancelOutcome::Withdrawn),
            cancelled("never", false, 0, CancelOutcome::Unknown),
            cancelled("held", true, 900_000, CancelOutcome::Released),
        ]
    );
}

/// SET3, CLO2: closes and retries by an operator.
#[test]
fn set3_closes_and_retries() {
    let mut gate = Gate::with(closes_on());
    let close = |gate: &mut Gate, mode| {
        let request = CloseRequest {
            session: session("s"),
            mode,
            reason: Some(CloseReason::Dropped),
        };
        match gate.operate(Act::Close(request)).1 {
            Told::Reply(Reply::Close(CloseReply::Taken(close))) => close.id,
            other => panic!("not a close: {other:?}"),
        }
    };
    gate.hold("t", 10);
    let id = close(&mut gate, CloseMode::Join);
    assert_eq!(close(&mut gate, CloseMode::Join), id, "joined");
    assert_eq!(close(&mut gate, CloseMode::Abort), id, "made to abort");
    gate.cancel("t");
    gate.answer_calls(|_| status_of(400));
    let retry = |gate: &mut Gate| match gate.operate(Act::RetryClose(id)) {
        (seq, Told::Reply(Reply::RetryClose(outcome))) => (seq.is_some(), outcome.map(|_| ())),
        other => panic!("not a retry: {other:?}"),
    };
    assert_eq!(retry(&mut gate), (true, Ok(())));
    assert_eq!(retry(&mut gate), (false, Ok(())), "it is under way");
    gate.configure(|policy| policy.session_lifecycle = false);
    assert_eq!(retry(&mut gate), (false, Err(RetryRefused::Disabled)));
    let closed = |mode| AuditAct::SessionClosed {
        session: session("s"),
        close: id,
        mode,
    };
    let acts = acts(&gate);
    assert_eq!(
        acts[..3],
        [
            closed(CloseMode::Join),
            closed(CloseMode::Abort),
            AuditAct::CloseRetried {
                close: id,
                session: session("s"),
                engines: 1,
            },
        ]
    );
    assert!(matches!(acts[3..], [AuditAct::SettingsChanged(_)]));
}

/// SET3, DUR1: an entry is in the same transaction as its act, so that a failed commit leaves neither.
#[test]
fn set3_an_entry_is_in_the_turn_of_its_act() {
    let mut gate = Gate::new();
    let lease = gate.hold("t", 10);
    let commits = gate.store.commits();
    gate.revoke(lease).unwrap();
    assert_eq!(gate.store.commits(), commits + 1);
    assert_eq!(gate.store.image().audit, gate.audit());
    assert_eq!(gate.audit().len(), 1);
}

/// SET3, section 9: the last 10,000 entries are kept, and read newest first.
#[test]
fn set3_the_audit_has_a_bound() {
    let mut gate = Gate::new();
    for number in 0..AUDIT_MAX + 5 {
        gate.operate(Act::Cancel(ticket(&format!("t-{number}"))));
    }
    let audit = gate.audit();
    assert_eq!(audit.len(), AUDIT_MAX);
    assert_eq!(audit[0].no, AuditNo(6));
    assert_eq!(gate.store.image().audit, audit);
    let mut list = |from, rows| match gate.tell(Command::ListAudit(Slice { from, rows })) {
        (None, Told::Reply(Reply::Audit(page))) => (page.items, page.more),
        other => panic!("not a list: {other:?}"),
    };
    let (items, more) = list(AuditNo(u64::MAX), 2);
    let numbers = |items: &[AuditEntry]| items.iter().map(|entry| entry.no.0).collect::<Vec<_>>();
    let last = AUDIT_MAX as u64 + 5;
    assert_eq!((numbers(&items), more), (vec![last, last - 1], true));
    let (items, more) = list(AuditNo(7), 1_000_000);
    assert_eq!((numbers(&items), more), (vec![7, 6], false));
    gate.restart(0);
    assert_eq!(gate.audit(), audit);
}
