//! The member set and its generations.

use kvgate_core::command::Command;
use kvgate_core::effect::Reply;
use kvgate_core::policy::EPOCHS_MAX;
use kvgate_core::state::{EpochCause, EpochEntry};
use kvgate_core::units::Timestamp;

use crate::common::*;

fn two_engines() -> Gate {
    let mut gate = Gate::unread(admission_on());
    gate.engines.insert("a", Engine::of(500_000));
    gate.engines.insert("b", Engine::of(500_000));
    gate.round();
    gate
}

fn epochs(gate: &mut Gate) -> Vec<EpochEntry> {
    match gate.tell(Command::ListEpochs).1 {
        Told::Reply(Reply::Epochs(epochs)) => epochs,
        other => panic!("not epochs: {other:?}"),
    }
}

/// CAP8: the epoch starts at 1; the first member set that is not empty is epoch 1.
#[test]
fn cap8_the_first_set_is_epoch_1() {
    let mut gate = Gate::unread(admission_on());
    assert_eq!(gate.epoch(), 1);
    gate.router = Router::Empty;
    gate.round();
    assert_eq!((gate.epoch(), epochs(&mut gate).len()), (1, 0));
    gate.router = Router::Lists;
    gate.engines.insert("a", Engine::of(500_000));
    let seq = gate.round();
    assert!(seq.is_some(), "the set was stored");
    assert_eq!(gate.epoch(), 1);
    let entry = EpochEntry {
        epoch: kvgate_core::ids::Epoch(1),
        at: Timestamp::from_millis(gate.now),
        cause: EpochCause::First,
    };
    assert_eq!(epochs(&mut gate), [entry]);
    assert_eq!(gate.round(), None, "nothing changed");
}

/// CAP8: one step for each change of the member set, whatever joins and leaves; the order of rows
/// does not matter.
#[test]
fn cap8_a_change_of_the_set_is_one_step() {
    let mut gate = two_engines();
    gate.engine("a").listed = false;
    gate.engine("b").listed = false;
    gate.engines.insert("c", Engine::of(100));
    gate.engines.insert("d", Engine::of(100));
    gate.engines.insert("e", Engine::of(100));
    gate.round();
    assert_eq!(gate.epoch(), 2);
    assert_eq!(
        epochs(&mut gate)[0].cause,
        EpochCause::MembersChanged { joined: 3, left: 2 }
    );
    gate.run(3_000);
    assert_eq!(gate.epoch(), 2);
    let joined: Vec<u64> = gate
        .view()
        .engines
        .iter()
        .map(|engine| engine.joined.0)
        .collect();
    assert_eq!(joined, [2, 2, 2]);
}

/// CAP8, DUR2: durable, never back; a lease keeps the epoch it was granted in and nothing is cancelled.
#[test]
fn cap8_leases_keep_their_epoch() {
    let mut gate = two_engines();
    let lease = gate.hold("t", 100);
    gate.engines.insert("c", Engine::of(500_000));
    gate.round();
    assert_eq!(gate.epoch(), 2);
    assert_eq!(gate.read_lease(lease).unwrap().lease.epoch.0, 1);
    assert_eq!(answer(&gate.ask("t", 100)).epoch.0, 1);
    assert_eq!(answer(&gate.ask("u", 100)).epoch.0, 2);
    gate.restart(1_000);
    assert_eq!(gate.epoch(), 2);
    assert_eq!(gate.read_lease(lease).unwrap().lease.epoch.0, 1);
    gate.engine("c").listed = false;
    gate.restart(1_000);
    assert_eq!(gate.epoch(), 3, "compared with the stored set");
}

/// CAP8: a changed start time is a new incarnation, also over a restart of the gate; the first one
/// known is none.
#[test]
fn cap8_a_changed_start_time() {
    let mut gate = two_engines();
    gate.engine("a").mark = Some(5);
    gate.round();
    assert_eq!(gate.epoch(), 1, "now it is known");
    gate.engine("a").mark = None;
    gate.round();
    gate.engine("a").mark = Some(5);
    gate.round();
    assert_eq!(gate.epoch(), 1);
    gate.engine("a").mark = Some(4);
    gate.round();
    assert_eq!(gate.epoch(), 2, "any change");
    assert_eq!(
        epochs(&mut gate)[0].cause,
        EpochCause::Restarted(engine("a"))
    );
    gate.engine("a").mark = Some(6);
    gate.restart(1_000);
    assert_eq!(gate.epoch(), 3);
}

/// CAP8, W07: an absence after which the token counters began again is a new incarnation; away
/// alone is not, and counters that fall without an absence are not.
#[test]
fn cap8_counters_that_began_again_after_an_absence() {
    let mut gate = two_engines();
    gate.engine("b").counters = Some((1_000, 500));
    gate.round();
    gate.engine("b").counters = Some((900, 500));
    gate.round();
    assert_eq!(gate.epoch(), 1, "no absence");
    gate.engine("b").answers = false;
    gate.run(6_000);
    gate.engine("b").answers = true;
    gate.engine("b").counters = Some((10, 10));
    gate.round();
    assert_eq!(
        gate.epoch(),
        1,
        "away for exactly `stale_after` is not longer than it"
    );
    gate.engine("b").answers = false;
    gate.run(8_000);
    gate.engine("b").answers = true;
    gate.engine("b").capacity = 300_000;
    gate.round();
    assert_eq!(gate.epoch(), 1, "away alone is none");
    gate.engine("b").answers = false;
    gate.run(8_000);
    gate.engine("b").answers = true;
    gate.engine("b").counters = None;
    gate.run(3_000);
    assert_eq!(gate.epoch(), 1, "the counters were not read yet");
    gate.engine("b").counters = Some((12, 0));
    gate.round();
    assert_eq!(gate.epoch(), 2, "the generation counter began again");
    assert_eq!(gate.ceiling(), 720_000);
    gate.engine("b").counters = Some((0, 0));
    gate.round();
    assert_eq!(gate.epoch(), 2, "the absence was used");
}

/// CAP8: either counter tells: the prompt counter alone too.
#[test]
fn cap8_the_prompt_counter_alone() {
    let mut gate = two_engines();
    gate.engine("b").counters = Some((1_000, 500));
    gate.round();
    gate.engine("b").answers = false;
    gate.run(8_000);
    gate.engine("b").answers = true;
    gate.engine("b").counters = Some((999, 500));
    gate.round();
    assert_eq!(gate.epoch(), 2);
}

/// CAP8: a changed worker id moves the epoch; with several rows it is the set of their ids. A row
/// without an id changes nothing.
#[test]
fn cap8_worker_ids() {
    let mut gate = two_engines();
    gate.engine("a").worker_ids = vec!["w1", "w2"];
    gate.round();
    assert_eq!(gate.epoch(), 1, "the first ids known");
    gate.engine("a").worker_ids = vec!["w2", "w1"];
    gate.round();
    gate.engine("a").worker_ids = Vec::new();
    gate.round();
    gate.engine("a").worker_ids = vec!["w1", "w2"];
    gate.round();
    assert_eq!(gate.epoch(), 1);
    gate.engine("a").worker_ids = vec!["w1"];
    gate.round();
    assert_eq!(gate.epoch(), 2);
    assert_eq!(
        epochs(&mut gate)[0].cause,
        EpochCause::WorkerIdChanged(engine("a"))
    );
    gate.engine("a").worker_ids = vec!["w9"];
    gate.restart(1_000);
    assert_eq!(gate.epoch(), 3, "the ids are stored");
}

/// CAP8: one new incarnation is one step, however many signs it shows: a second kind of sign within
/// 30 s of the first is the same incarnation.
#[test]
fn cap8_several_signs_of_one_incarnation() {
    let show = |gate: &mut Gate, mark: u64, worker: &'static str| {
        gate.engine("b").mark = Some(mark);
        gate.engine("b").worker_ids = vec![worker];
        gate.round();
    };
    // At once.
    let mut gate = two_engines();
    show(&mut gate, 1, "w1");
    show(&mut gate, 2, "w2");
    assert_eq!(gate.epoch(), 2);
    // 30 s apart: the same; more: another.
    for (apart, epoch) in [(30_000, 2), (30_001, 3)] {
        let mut gate = two_engines();
        show(&mut gate, 1, "w1");
        show(&mut gate, 2, "w1");
        assert_eq!(gate.epoch(), 2);
        gate.run(apart - 500);
        gate.jump(500);
        show(&mut gate, 2, "w2");
        assert_eq!(gate.epoch(), epoch, "{apart}");
    }
    // The same kind twice is another incarnation, soon as it may come.
    let mut gate = two_engines();
    show(&mut gate, 1, "w1");
    show(&mut gate, 2, "w2");
    gate.run(5_000);
    show(&mut gate, 3, "w2");
    assert_eq!(gate.epoch(), 3);
    gate.run(5_000);
    show(&mut gate, 3, "w3");
    assert_eq!(gate.epoch(), 3, "its second sign");
    // Signs of another engine are another incarnation.
    gate.engine("a").mark = Some(1);
    gate.round();
    gate.engine("a").mark = Some(2);
    gate.round();
    assert_eq!(gate.epoch(), 4);
}

/// CAP8: two engines that restart in one round are two incarnations.
#[test]
fn cap8_two_engines_at_once() {
    let mut gate = two_engines();
    gate.engine("a").mark = Some(1);
    gate.engine("b").mark = Some(1);
    gate.round();
    gate.engine("a").mark = Some(2);
    gate.engine("b").mark = Some(2);
    gate.round();
    assert_eq!(gate.epoch(), 3);
}

/// CAP7, CAP8: an empty or failed list moves nothing (W01); a member that only fails to answer stays.
#[test]
fn cap8_silence_moves_nothing() {
    let mut gate = two_engines();
    gate.router = Router::Empty;
    gate.run(3_000);
    gate.router = Router::Silent;
    gate.run(3_000);
    gate.router = Router::Lists;
    gate.engine("a").answers = false;
    gate.engine("b").answers = false;
    gate.run(120_000);
    assert_eq!(gate.epoch(), 1);
    assert_eq!(gate.view().engines.len(), 2);
}

/// CAP8, section 9: 10,000 epochs are kept; the generation goes on.
#[test]
fn cap8_epochs_are_bounded() {
    let mut gate = two_engines();
    for turn in 0..EPOCHS_MAX as u64 + 5 {
        gate.engine("a").mark = Some(turn);
        gate.round();
    }
    let epoch = gate.epoch();
    assert_eq!(epoch, EPOCHS_MAX as u64 + 5);
    let listed = epochs(&mut gate);
    assert_eq!(listed.len(), EPOCHS_MAX);
    assert_eq!(listed[0].epoch.0, epoch, "newest first");
    assert_eq!(gate.store.image().epochs.len(), EPOCHS_MAX);
    gate.restart(1_000);
    assert_eq!(gate.epoch(), epoch);
    assert_eq!(epochs(&mut gate), listed);
}
