//! Durability, numbers of changes, and the bounds of the books.

use kvgate_core::capacity::FleetConfig;
use kvgate_core::command::{Command, SLICE_MAX, Slice};
use kvgate_core::decision::{BypassReason, CancelReason};
use kvgate_core::effect::{Effect, LeaseGone, LeaseView, Outcome, Page, Reply, WaiterView};
use kvgate_core::ids::{Issue, LeaseId, RowNo};
use kvgate_core::machine::{Machine, StartParams};
use kvgate_core::memory::MemoryStore;
use kvgate_core::policy::{FINISHED_FOR, FINISHED_MAX, Policy, PolicyError, STARTS_MAX};
use kvgate_core::state::Start;
use kvgate_core::store::Image;
use kvgate_core::units::{Ppm, Span, Timestamp, Tokens};

use crate::common::*;

/// DUR1: effects come from a commit only; a failed one consumes the machine, and what the store
/// holds is what counts.
#[test]
fn dur1_a_failed_commit_consumes_the_machine() {
    let mut gate = Gate::new();
    gate.hold("t1", 100);
    let before = gate.machine().kept();
    let why = gate.fail(vec![
        Command::Acquire(acquire("t2", 100)),
        Command::Cancel(ticket("t1")),
    ]);
    assert_eq!(why, "disk full");
    gate.crash(0);
    gate.round();
    let after = gate.machine().kept();
    assert_eq!(after.reserved, before.reserved);
    assert_eq!(after.tickets, before.tickets);
    assert_eq!(gate.read("t2"), None);
    let lease = admitted(&gate.ask("t2", 100));
    assert_eq!(
        lease.issue,
        Issue(2),
        "the lost grant was promised to nobody"
    );
}

/// DUR1: grants, releases, places and cancels are records of their own turn; bypasses and reads cost
/// no disk.
#[test]
fn dur1_what_is_on_disk_before_the_answer() {
    let mut gate = Gate::new();
    let commits = |gate: &Gate| gate.store.commits();
    let mut last = commits(&gate);
    let mut stored = |gate: &mut Gate, expected: bool, what: &str| {
        assert_eq!(commits(gate) > last, expected, "{what}");
        last = commits(gate);
    };
    let lease = admitted(&gate.ask("t1", 900_000));
    stored(&mut gate, true, "grant");
    gate.park("t2", 10);
    stored(&mut gate, true, "place");
    gate.ask("t2", 10);
    stored(&mut gate, false, "repeat");
    gate.ask("t3", 950_000);
    gate.read("t1");
    gate.watch(&["t2"]);
    stored(&mut gate, false, "bypass and reads");
    gate.cancel("t2");
    stored(&mut gate, true, "cancel");
    gate.release(lease).unwrap();
    stored(&mut gate, true, "release");
    gate.release(lease).unwrap();
    stored(&mut gate, false, "repeated release");
    gate.cancel("t9");
    stored(&mut gate, true, "marker");
}

/// DUR1: a turn of immediate bypasses says that it needs no store.
#[test]
fn dur1_a_turn_of_bypasses_is_durable_already() {
    let mut gate = Gate::new();
    gate.turn(Vec::new());
    let commits = gate.store.commits();
    gate.turn(vec![
        Command::Acquire(acquire("t", 950_000)),
        Command::ReadTicket(ticket("t")),
    ]);
    assert_eq!(gate.store.commits(), commits);
}

/// DUR2: the same reserved total, queue order, epoch and counters.
#[test]
fn dur2_the_same_after_a_restart() {
    let mut gate = Gate::new();
    gate.engines.insert("b", Engine::of(1_000_000));
    gate.round();
    let held: Vec<_> = (0..5)
        .map(|n| gate.hold(&format!("h{n}"), 360_000))
        .collect();
    for name in ["w3", "w1", "w2"] {
        gate.park(name, 100_000);
    }
    gate.cancel("w1");
    gate.release(held[2]).unwrap();
    gate.park("w4", 500_000);
    gate.park("w5", 1);
    gate.ask("large", 9_000_000);
    for _ in 0..2 {
        gate.run(1_500);
    }
    let before = gate.machine().kept();
    assert!(before.queue.len() >= 2);
    gate.crash(2_000);
    let after = gate.machine().kept();
    assert_eq!(after, before);
    assert_eq!(place(&mut gate, "w5").position, 2);
}

/// DUR2: the counters of an orderly stop lose nothing; those of a crash at most a second.
#[test]
fn dur2_counters_ride_along() {
    let mut gate = Gate::new();
    gate.unread_for(2_000);
    gate.ask("large", 950_000);
    gate.crash(100);
    assert_eq!(
        gate.bypasses(BypassReason::Oversize),
        1,
        "the second had passed"
    );
    gate.round();
    gate.ask("large 2", 950_000);
    assert_eq!(
        gate.store.image().tally.scopes[0].bypasses(BypassReason::Oversize),
        1
    );
    gate.drain_until(gate.now + 1_000);
    assert_eq!(
        gate.store.image().tally.scopes[0].bypasses(BypassReason::Oversize),
        2
    );
    gate.ask("large 3", 950_000);
    gate.stop();
    assert_eq!(
        gate.store.image().tally.scopes[0].bypasses(BypassReason::Oversize),
        3
    );
}

/// DUR6: every change has a number of its own, rising over restarts; what changes nothing has none.
#[test]
fn dur6_numbers_of_changes() {
    let mut gate = Gate::new();
    let lease = gate.hold("t1", 900_000);
    gate.park("t2", 900_000);
    gate.tell_all(vec![
        Command::Cancel(ticket("t9")),
        Command::Release(lease),
        Command::Acquire(acquire("t3", 900_000)),
        Command::Cancel(ticket("t9")),
        Command::ReadTicket(ticket("t3")),
    ]);
    gate.restart(1_000);
    gate.ask("t3", 900_000);
    gate.cancel("t2");
    gate.cancel("t3");
    gate.engines.insert("b", Engine::of(10));
    gate.round();
    let seqs = std::mem::take(&mut gate.seqs);
    assert_eq!(seqs.len(), 11, "{seqs:?}");
    let mut sorted = seqs.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted, seqs, "strictly rising, none twice");
    assert_eq!(gate.view().seq, *seqs.last().unwrap());
}

/// DUR6: a decision of the queue has a number of its own, after those of the commands of its turn.
#[test]
fn dur6_decisions_of_the_queue_are_numbered() {
    let mut gate = Gate::new();
    let lease = gate.hold("t1", 900_000);
    gate.park("t2", 450_000);
    gate.park("t3", 450_000);
    let effects = gate.turn(vec![Command::Release(lease)]);
    let numbers: Vec<u64> = effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Reply { seq, .. } | Effect::Parked { seq, .. } => seq.map(|seq| seq.0),
            Effect::Decided { seq, .. } => Some(seq.0),
            Effect::Call(_) | Effect::CloseDone(_) => None,
        })
        .collect();
    assert_eq!(numbers.len(), 3);
    assert!(numbers.is_sorted());
    assert_eq!(numbers[2], numbers[0] + 2);
}

/// Section 9: finished tickets are remembered for 10 min, then removed in later batches.
#[test]
fn dur2_finished_tickets_are_forgotten() {
    let mut gate = Gate::new();
    let lease = gate.hold("t", 10);
    gate.release(lease).unwrap();
    gate.cancel("marker");
    gate.ask("large", 950_000);
    let ended = gate.now;
    gate.run(FINISHED_FOR.millis() - 1);
    assert_eq!(cancelled(&gate.ask("t", 10)), CancelReason::TicketFinished);
    assert!(answer(&gate.ask("large", 950_000)).repeated);
    gate.jump(1);
    assert_eq!(gate.now, ended + 600_000);
    gate.turn(Vec::new());
    for name in ["t", "marker", "large"] {
        assert_eq!(gate.read(name), None, "{name}");
    }
    gate.drain_until(gate.now + 1_000);
    assert!(gate.store.image().tickets.is_empty());
}

/// Section 9: 262,144 finished tickets are remembered; the oldest go first.
#[test]
fn dur2_finished_tickets_are_bounded() {
    let mut gate = Gate::new();
    let many = FINISHED_MAX + 10;
    let mut number = 0;
    while number < many {
        let end = many.min(number + 4_096);
        gate.turn(
            (number..end)
                .map(|n| Command::Cancel(ticket(&n.to_string())))
                .collect(),
        );
        number = end;
    }
    assert_eq!(gate.machine().kept().tickets.len(), FINISHED_MAX);
    assert_eq!(gate.read("9"), None);
    assert!(gate.read("10").is_some());
    gate.drain_until(gate.now + 1_000);
    assert_eq!(gate.store.image().tickets.len(), FINISHED_MAX);
}

fn leases(gate: &mut Gate, from: u64, rows: usize) -> Page<LeaseView> {
    match gate
        .tell(Command::ListLeases(Slice {
            from: Issue(from),
            rows,
        }))
        .1
    {
        Told::Reply(Reply::Leases(page)) => page,
        other => panic!("{other:?}"),
    }
}

fn queue(gate: &mut Gate, from: u64, rows: usize) -> Page<WaiterView> {
    match gate
        .tell(Command::ListQueue(Slice {
            from: RowNo(from),
            rows,
        }))
        .1
    {
        Told::Reply(Reply::Queue(page)) => page,
        other => panic!("{other:?}"),
    }
}

/// Section 9: one read looks at 1,000 rows at most; leases come in the order of their grants and
/// waiters from the head.
#[test]
fn dur6_lists_are_slices() {
    let mut gate = Gate::new();
    let many = SLICE_MAX as u64 + 5;
    let asks = (0..many)
        .map(|n| Command::Acquire(acquire(&format!("h{n}"), 10)))
        .collect();
    gate.turn(asks);
    gate.hold("full", 900_000 - many * 10);
    let asks = (0..many)
        .map(|n| Command::Acquire(acquire(&format!("w{n}"), 10)))
        .collect();
    gate.turn(asks);
    let page = leases(&mut gate, 0, usize::MAX);
    assert_eq!((page.items.len(), page.more), (SLICE_MAX, true));
    assert_eq!(page.items[0].ticket, ticket("h0"));
    let next = page.items.last().unwrap().lease.id.issue.0 + 1;
    let page = leases(&mut gate, next, 5);
    assert_eq!((page.items.len(), page.more), (5, true));
    let page = leases(&mut gate, next, 6);
    assert_eq!((page.items.len(), page.more), (6, false));
    assert_eq!(page.items[5].ticket, ticket("full"));
    let page = queue(&mut gate, 0, usize::MAX);
    assert_eq!((page.items.len(), page.more), (SLICE_MAX, true));
    assert_eq!(page.items[0].status.position, 1);
    let next = page.items.last().unwrap().row.0 + 1;
    let page = queue(&mut gate, next, 10);
    assert_eq!((page.items.len(), page.more), (5, false));
    assert_eq!(page.items[4].status.position, many);
    assert_eq!(page.items[4].status.tokens_ahead.get(), (many - 1) * 10);
    assert_eq!(page.items[4].session, session("s"));
    assert_eq!(leases(&mut gate, u64::MAX, 10).items, []);
}

/// DEC1, CAP4, CAP5: settings outside their range are refused together; the admission numbers only
/// matter while admission is on.
#[test]
fn dec1_settings_are_validated() {
    type Change = fn(&mut Policy);
    let refused: [(Change, PolicyError); 8] = [
        (
            |policy| policy.headroom = Ppm::default(),
            PolicyError::Headroom,
        ),
        (
            |policy| policy.pressure_threshold = Ppm::default(),
            PolicyError::PressureThreshold,
        ),
        (
            |policy| policy.expected_decode_cap = Some(Tokens::ZERO),
            PolicyError::DecodeCap,
        ),
        (
            |policy| policy.max_wait = Span::from_millis(u64::MAX),
            PolicyError::MaxWait,
        ),
        (
            |policy| policy.claim_grace = Span::from_millis(999),
            PolicyError::ClaimGrace,
        ),
        (
            |policy| policy.claim_grace = Span::from_millis(60_001),
            PolicyError::ClaimGrace,
        ),
        (|policy| policy.max_waiting = 0, PolicyError::MaxWaiting),
        (
            |policy| policy.stale_after = Span::ZERO,
            PolicyError::StaleAfter,
        ),
    ];
    for (number, (change, error)) in refused.into_iter().enumerate() {
        let mut policy = admission_on();
        change(&mut policy);
        assert_eq!(policy.clone().validated().unwrap_err(), error);
        policy.program_admission = false;
        assert_eq!(policy.validated().is_ok(), number < 4, "{error}");
    }
    let edges: [Change; 4] = [
        |policy| policy.claim_grace = Span::from_secs(1),
        |policy| policy.claim_grace = Span::from_secs(60),
        |policy| policy.headroom = Ppm::ONE,
        |policy| policy.max_waiting = 1,
    ];
    for change in edges {
        let mut policy = admission_on();
        change(&mut policy);
        assert!(policy.validated().is_ok());
    }
    let defaults = Policy::default();
    assert_eq!(defaults.clone().validated().as_ref(), Ok(&defaults));
    assert!(
        !defaults.program_admission && !defaults.session_lifecycle,
        "both switches are off"
    );
}

/// The picture for readers agrees with the books.
#[test]
fn dur6_the_view() {
    let mut gate = Gate::new();
    assert_eq!(
        (gate.view().oldest_lease, gate.view().oldest_waiter),
        (None, None)
    );
    gate.run(1_000);
    let granted = gate.view().now;
    let first = gate.hold("t1", 400_000);
    gate.run(1_000);
    gate.hold("t2", 400_000);
    let enqueued = gate.view().now;
    gate.park("t3", 200_000);
    gate.run(1_000);
    gate.park("t4", 300_000);
    let view = gate.view();
    assert_eq!(
        (view.reserved.get(), view.leases, view.available().get()),
        (800_000, 2, 100_000)
    );
    assert_eq!((view.waiting, view.waiting_tokens.get()), (2, 500_000));
    assert_eq!(
        (view.oldest_lease, view.oldest_waiter),
        (Some(granted), Some(enqueued))
    );
    assert_eq!(view.now.millis(), gate.now);
    gate.release(first).unwrap();
    assert_eq!(gate.grants()[0].0, "t3");
    assert!(matches!(gate.decisions().as_slice(), []));
    assert!(matches!(
        answer(&gate.ask("t3", 200_000)).outcome,
        Outcome::Admit { .. }
    ));
}

/// Section 9: the bound holds after every turn, also after one that ends more tickets than a turn
/// makes decisions.
#[test]
fn dur2_the_bound_of_finished_tickets_holds_after_every_turn() {
    let mut gate = Gate::new();
    gate.turn(
        (0..FINISHED_MAX)
            .map(|n| Command::Cancel(ticket(&n.to_string())))
            .collect(),
    );
    gate.turn(
        (0..6_000)
            .map(|n| Command::Cancel(ticket(&format!("more {n}"))))
            .collect(),
    );
    assert_eq!(gate.machine().kept().tickets.len(), FINISHED_MAX);
}

/// Section 9, LEA1: the machine names the time at which it forgets by age, so that no input is needed.
#[test]
fn dur2_forgetting_needs_no_input() {
    let mut gate = Gate::new();
    let lease = gate.hold("t", 10);
    gate.release(lease).unwrap();
    let ended = gate.now;
    gate.drain_until(ended + 599_999);
    assert_eq!(
        gate.machine().next_deadline(),
        Some(Timestamp::from_millis(ended + 600_000))
    );
    // The gap before that turn is a pause, which holds for 10 s; the rows go a second later.
    gate.drain_until(ended + 611_000);
    assert!(gate.store.image().tickets.is_empty());
    assert_eq!(
        gate.machine().next_deadline(),
        Some(Timestamp::from_millis(ended + 3_600_000)),
        "only the session is left"
    );
    gate.drain_until(ended + 3_700_000);
    assert_eq!(
        gate.machine().next_deadline(),
        None,
        "nothing is left to do"
    );
}

/// Whether a release of the first start's lease id finds that it was issued, with this many starts
/// stored before the present one.
fn first_start_is_known(stored: u64) -> bool {
    let image = Image {
        next_issue: stored + 1,
        starts: (1..=stored)
            .map(|issue| Start {
                first_issue: Issue(issue),
                salt: issue,
                at: Timestamp::from_millis(T0),
            })
            .collect(),
        ..Image::default()
    };
    let params = StartParams {
        now: Timestamp::from_millis(T0),
        salt: 0,
        seed: 0,
        policy: admission_on(),
        reset_settings: false,
        fleet: FleetConfig::default(),
    };
    let Ok(committed) = Machine::restore(image, params).commit(&mut MemoryStore::default());
    let mut turn = committed.machine.turn(Timestamp::from_millis(T0));
    for issue in [1, 2, stored] {
        turn.handle(Command::Release(LeaseId {
            issue: Issue(issue),
            salt: issue,
        }));
    }
    let Ok(committed) = turn.finish().commit(&mut MemoryStore::default());
    let told: Vec<_> = committed
        .effects
        .iter()
        .map(|effect| match effect {
            Effect::Reply {
                reply: Reply::Release(outcome),
                ..
            } => *outcome,
            other => panic!("{other:?}"),
        })
        .collect();
    let expired = Err(LeaseGone::Expired);
    assert_eq!(told[1..], [expired, expired]);
    told[0] == expired
}

/// ID2, TIC6: 10,000 starts are remembered; lease ids of older ones are no longer told from those
/// that were never issued.
#[test]
fn id2_starts_are_bounded() {
    assert!(first_start_is_known(STARTS_MAX as u64 - 1));
    assert!(!first_start_is_known(STARTS_MAX as u64));
}
