//! Freshness, ceilings, pressure, pacing and the degraded state.

use kvgate_core::decision::{BypassReason, DegradedReason, WaitReason};
use kvgate_core::effect::Outcome;
use kvgate_core::policy::Policy;
use kvgate_core::reading::{ReadFailure, Role, RouterFailure};
use kvgate_core::units::{Ppm, Span};

use crate::common::*;

fn two_engines() -> Gate {
    let mut gate = Gate::new();
    gate.engines.insert("b", Engine::of(500_000));
    gate.round();
    assert_eq!(gate.ceiling(), 1_350_000);
    gate
}

/// CAP3, TIM2: an engine is fresh for `stale_after`, to the millisecond, by the passing of time alone.
#[test]
fn cap3_a_reading_goes_stale() {
    let mut gate = two_engines();
    gate.engine("b").answers = false;
    let read_at = gate.now;
    gate.run(5_999);
    assert_eq!(gate.now, read_at + 5_999);
    assert_eq!(gate.ceiling(), 1_350_000);
    gate.jump(1);
    gate.turn(Vec::new());
    assert_eq!(
        gate.ceiling(),
        900_000,
        "one sick engine removes only its own share"
    );
    gate.engine("b").answers = true;
    gate.round();
    assert_eq!(gate.ceiling(), 1_350_000);
}

/// CAP3: `stale_after` is a setting.
#[test]
fn cap3_stale_after_is_a_setting() {
    for (stale_after, ceiling) in [(2, 900_000), (20, 1_350_000)] {
        let mut gate = Gate::with(Policy {
            stale_after: Span::from_secs(stale_after),
            ..admission_on()
        });
        gate.engines.insert("b", Engine::of(500_000));
        gate.round();
        gate.engine("b").answers = false;
        gate.run(3_000);
        assert_eq!(gate.ceiling(), ceiling);
    }
}

/// CAP3: an engine called unhealthy for 10 s without a break does not count; one good word begins anew.
#[test]
fn cap3_unhealthy_for_ten_seconds_without_a_break() {
    let mut gate = two_engines();
    gate.engine("b").healthy = false;
    gate.round();
    gate.run(9_999);
    assert_eq!(gate.ceiling(), 1_350_000);
    gate.jump(1);
    gate.turn(Vec::new());
    assert_eq!(gate.ceiling(), 900_000);
    gate.engine("b").healthy = true;
    gate.round();
    assert_eq!(gate.ceiling(), 1_350_000);
    gate.engine("b").healthy = false;
    gate.run(9_000);
    gate.engine("b").healthy = true;
    gate.round();
    gate.engine("b").healthy = false;
    gate.run(9_000);
    assert_eq!(gate.ceiling(), 1_350_000, "the 10 s began anew");
    assert_eq!(gate.epoch(), 2, "health flips do not move the epoch (CAP8)");
}

/// CAP3: an engine that was first seen unhealthy counts from the time it was seen healthy.
#[test]
fn cap3_first_seen_unhealthy() {
    let mut gate = Gate::new();
    let mut sick = Engine::of(500_000);
    sick.healthy = false;
    gate.engines.insert("b", sick);
    gate.round();
    assert_eq!(gate.ceiling(), 900_000, "not for a moment");
    gate.engine("b").healthy = true;
    gate.round();
    assert_eq!(gate.ceiling(), 1_350_000);
    gate.engine("b").healthy = false;
    gate.round();
    assert_eq!(gate.ceiling(), 1_350_000, "now the 10 s apply");
}

/// CAP3: a stored member that was seen healthy counts as seen; the 10 s begin anew at a start.
#[test]
fn cap3_health_over_a_restart() {
    let mut gate = two_engines();
    gate.engine("b").healthy = false;
    gate.run(9_000);
    gate.restart(5_000);
    assert_eq!(gate.ceiling(), 1_350_000);
    gate.run(9_000);
    assert_eq!(gate.ceiling(), 1_350_000);
    gate.run(2_000);
    assert_eq!(gate.ceiling(), 900_000);
}

/// CAP3: a capacity of 0 does not count; neither does an engine that is no member.
#[test]
fn cap3_no_capacity_and_no_member() {
    let mut gate = two_engines();
    gate.engine("b").capacity = 0;
    gate.round();
    assert_eq!(gate.ceiling(), 900_000);
    gate.engine("b").capacity = 500_000;
    gate.engine("b").listed = false;
    gate.round();
    assert_eq!(gate.ceiling(), 900_000);
    assert_eq!(gate.view().engines.len(), 1);
}

/// CAP1, CAP3: a static engine is a member without a router, and counts without a word on its health.
#[test]
fn cap3_static_engines() {
    let mut gate = Gate::unread(admission_on());
    gate.router = Router::None;
    gate.static_engines.insert(engine("a"));
    gate.start();
    let mut shown = Engine::of(100_000);
    shown.listed = false;
    gate.engines.insert("a", shown);
    gate.round();
    assert_eq!(gate.ceiling(), 90_000);
    assert!(
        gate.view()
            .engines
            .iter()
            .all(|engine| engine.healthy && engine.counted)
    );
    gate.run(60_000);
    assert_eq!(
        gate.view().measure.degraded,
        None,
        "no router, no silence of it"
    );
}

/// CAP1, CAP3: a static engine that the router lists too has the router's word on its health.
#[test]
fn cap3_a_static_engine_that_the_router_lists() {
    let mut gate = two_engines();
    gate.static_engines.insert(engine("b"));
    gate.restart(1_000);
    gate.engine("b").healthy = false;
    gate.round();
    gate.run(10_000);
    assert_eq!(gate.ceiling(), 900_000);
}

/// CAP2: of an engine that only the operator named, its own word for its part counts; of a listed
/// one the router's.
#[test]
fn cap2_a_static_engine_tells_its_part() {
    let mut gate = Gate::unread(admission_on());
    gate.static_engines.insert(engine("a"));
    gate.static_engines.insert(engine("b"));
    gate.restart(1_000);
    gate.engines.insert("a", Engine::of(500_000));
    gate.engines.insert("b", Engine::of(500_000));
    gate.engine("a").own_role = Some(Role::Decode);
    gate.engine("b").own_role = Some(Role::Prefill);
    gate.engine("b").listed = false;
    gate.round();
    assert_eq!(gate.ceiling(), 450_000, "the prefill half has no share");
    gate.engine("b").listed = true;
    gate.round();
    assert_eq!(gate.ceiling(), 900_000, "the router calls it regular");
}

/// CAP2, CAP4: prefill engines and engines of other kinds are members without a share.
#[test]
fn cap4_only_decode_pools_count() {
    let mut gate = two_engines();
    for (role, ceiling) in [
        (Role::Regular, 1_350_000),
        (Role::Decode, 1_350_000),
        (Role::Prefill, 900_000),
        (Role::Other, 900_000),
    ] {
        gate.engine("b").role = role;
        gate.engine("b").usage = Some(1_000_000);
        gate.round();
        assert_eq!(
            (gate.ceiling(), gate.full_ceiling()),
            (ceiling, ceiling),
            "{role:?}"
        );
        let pressed = gate.pressure() == Some(1_000_000);
        assert_eq!(pressed, role.counts(), "{role:?}");
    }
}

/// CAP4: floor(headroom × Σ capacity), the product taken before the rounding.
#[test]
fn cap4_the_ceiling_is_rounded_down_once() {
    let mut gate = Gate::new();
    for (headroom, a, b, ceiling) in [
        (900_000, 5, 5, 9),
        (333_333, 10, 10, 6),
        (1, 999_999, 0, 0),
        (1, 999_999, 1, 1),
        (1_000_000, 7, 8, 15),
    ] {
        gate.engines.insert("a", Engine::of(a));
        gate.engines.insert("b", Engine::of(b));
        gate.configure(|policy| policy.headroom = Ppm::new(headroom).unwrap());
        gate.round();
        assert_eq!(gate.ceiling(), ceiling, "{headroom} of {a} + {b}");
    }
}

/// CAP4, DEC1: the full ceiling keeps the last capacity of every member for 60 s.
#[test]
fn cap4_the_full_ceiling_remembers_for_a_minute() {
    let mut gate = two_engines();
    gate.engine("b").answers = false;
    let read_at = gate.now;
    gate.run(10_000);
    assert_eq!((gate.ceiling(), gate.full_ceiling()), (900_000, 1_350_000));
    gate.park("waits for b", 1_000_000);
    gate.run(read_at + 59_999 - gate.now);
    assert_eq!(gate.full_ceiling(), 1_350_000);
    gate.jump(1);
    gate.turn(Vec::new());
    assert_eq!(gate.full_ceiling(), 900_000);
    assert_eq!(
        bypassed(&gate.ask("too large now", 1_000_000)),
        BypassReason::Oversize
    );
}

/// CAP4, CAP7: stored capacities serve the full ceiling for 60 s after a start.
#[test]
fn cap4_the_full_ceiling_over_a_restart() {
    let mut gate = two_engines();
    gate.engine("b").answers = false;
    gate.restart(3_600_000);
    assert_eq!((gate.ceiling(), gate.full_ceiling()), (900_000, 1_350_000));
    gate.run(60_000);
    assert_eq!(gate.full_ceiling(), 900_000);
}

/// CAP4: an engine that left is no member, so it is in neither ceiling.
#[test]
fn cap4_who_left_is_in_neither_ceiling() {
    let mut gate = two_engines();
    gate.engine("b").listed = false;
    gate.round();
    assert_eq!((gate.ceiling(), gate.full_ceiling()), (900_000, 900_000));
}

/// CAP5: an engine's pressure is its highest usage in the last 3 readings.
#[test]
fn cap5_the_highest_of_three_readings() {
    let mut gate = Gate::new();
    gate.engine("a").usage = Some(950_000);
    gate.round();
    gate.park("t", 10);
    assert_eq!(reason_of(&mut gate, "t"), WaitReason::PressureGuard);
    gate.engine("a").usage = Some(100_000);
    for round in 1..=2 {
        gate.run(1_000);
        assert_eq!(gate.waiting(), 1, "round {round}");
        assert_eq!(gate.pressure(), Some(950_000));
    }
    gate.run(1_000);
    assert_eq!(gate.pressure(), Some(100_000));
    assert_eq!(gate.grants().len(), 1);
}

/// CAP5: a failed reading is no reading, and leaves the window as it is.
#[test]
fn cap5_a_failure_does_not_enter_the_window() {
    let mut gate = Gate::new();
    gate.engine("a").usage = Some(950_000);
    gate.round();
    gate.engine("a").answers = false;
    gate.run(4_000);
    gate.engine("a").answers = true;
    gate.engine("a").usage = Some(100_000);
    gate.run(1_000);
    assert_eq!(gate.pressure(), Some(950_000));
}

/// CAP5: the threshold itself is pressure; one millionth less is none.
#[test]
fn cap5_at_the_threshold_requests_wait() {
    for (usage, waits) in [(919_999, false), (920_000, true)] {
        let mut gate = Gate::new();
        gate.engine("a").usage = Some(usage);
        gate.round();
        assert_eq!(gate.ask("t", 10) == Told::Parked, waits, "{usage}");
    }
}

/// CAP5, M04: an engine with nothing running and nothing queued exerts no pressure, and its
/// reading enters the window without a usage.
#[test]
fn cap5_an_idle_engine_exerts_none() {
    let mut gate = Gate::new();
    gate.engine("a").usage = Some(950_000);
    gate.engine("a").running = Some(0);
    gate.run(3_000);
    assert_eq!(gate.pressure(), None);
    assert_eq!(
        gate.view().measure.usage_max.unwrap().get(),
        950_000,
        "shown as it is"
    );
    gate.hold("t", 1_000);
    gate.engine("a").usage = Some(200_000);
    gate.engine("a").running = Some(3);
    gate.round();
    assert_eq!(
        gate.pressure(),
        Some(200_000),
        "the idle gauge is not in the window"
    );
    gate.engine("a").usage = Some(950_000);
    gate.engine("a").running = Some(0);
    gate.engine("a").queued = Some(1);
    gate.round();
    assert_eq!(gate.pressure(), Some(950_000), "queued work is no idleness");
    gate.engine("a").running = None;
    gate.engine("a").queued = Some(0);
    gate.round();
    assert_eq!(
        gate.pressure(),
        Some(950_000),
        "a missing value is not zero"
    );
}

/// CAP5: the fleet's pressure is the highest over the counted engines; means are plain.
#[test]
fn cap5_the_worst_counted_engine() {
    let mut gate = two_engines();
    gate.engine("a").usage = Some(300_000);
    gate.engine("b").usage = Some(800_000);
    gate.round();
    let measure = gate.view().measure;
    assert_eq!(
        measure.pressure.clone().unwrap(),
        (Ppm::new(800_000).unwrap(), engine("b"))
    );
    assert_eq!(measure.usage_mean.unwrap().get(), 550_000);
    assert_eq!(measure.usage_max.unwrap().get(), 800_000);
    gate.engine("b").answers = false;
    gate.run(6_000);
    let measure = gate.view().measure;
    assert_eq!(
        measure.pressure.clone().unwrap(),
        (Ppm::new(300_000).unwrap(), engine("a"))
    );
    assert_eq!(measure.usage_mean.unwrap().get(), 300_000);
    gate.engine("a").usage = None;
    gate.round();
    assert_eq!(
        gate.view().measure.usage_mean,
        None,
        "a missing usage is no zero"
    );
}

/// M05: usage does not count evictable KV, so a pool full of idle sessions admits.
#[test]
fn cap5_evictable_kv_is_no_pressure() {
    let mut gate = Gate::new();
    gate.engine("a").usage = Some(20_000);
    gate.round();
    gate.hold("t", 1_000);
}

/// An engine of a million tokens that was pressed and calmed down: paced, with an empty window.
fn paced() -> Gate {
    let mut gate = Gate::new();
    gate.engine("a").usage = Some(950_000);
    gate.round();
    gate.engine("a").usage = Some(100_000);
    for _ in 0..3 {
        gate.run(1_000);
    }
    assert!(gate.view().paced);
    gate
}

/// CAP6: after a reading at the threshold each round admits at most a tenth of the ceiling; the
/// rest waits with `pressure_guard`. Arrivals use the same quota, and it is not carried over.
#[test]
fn cap6_a_tenth_of_the_ceiling_each_round() {
    let mut gate = paced();
    gate.run(1_000);
    gate.hold("t1", 60_000);
    gate.hold("t2", 30_000);
    gate.park("t3", 1);
    assert_eq!(reason_of(&mut gate, "t3"), WaitReason::PressureGuard);
    gate.park("t4", 90_000);
    gate.round();
    assert_eq!(
        gate.grants().len(),
        1,
        "t3 is the first of its round; t4 would pass the quota"
    );
    assert_eq!(reason_of(&mut gate, "t4"), WaitReason::PressureGuard);
    gate.round();
    assert_eq!(gate.grants().len(), 1);
}

/// CAP6: the head passes whatever its size, once a round.
#[test]
fn cap6_the_first_of_a_round_passes_whatever_its_size() {
    let mut gate = paced();
    gate.round();
    gate.hold("large", 500_000);
    gate.park("next", 1);
    gate.round();
    assert_eq!(gate.grants().len(), 1);
    gate.round();
    gate.round();
    gate.hold("zero", 0);
    gate.park("after zero", 90_001);
    gate.turn(Vec::new());
    assert_eq!(
        gate.waiting(),
        1,
        "a request of 0 tokens was the first of the round"
    );
    gate.round();
    assert_eq!(gate.grants().len(), 1);
}

/// CAP6: 10 readings in a row below the threshold end the pace; one at it begins anew.
#[test]
fn cap6_ten_readings_in_a_row() {
    let mut gate = Gate::new();
    gate.engine("a").usage = Some(920_000);
    gate.round();
    assert!(gate.view().paced);
    gate.engine("a").usage = Some(919_999);
    for _ in 0..9 {
        gate.round();
        assert!(gate.view().paced);
    }
    gate.engine("a").usage = Some(920_000);
    gate.round();
    gate.engine("a").usage = Some(100_000);
    for _ in 0..9 {
        gate.round();
        assert!(gate.view().paced);
    }
    gate.round();
    assert!(!gate.view().paced);
    gate.hold("t1", 400_000);
    gate.hold("t2", 400_000);
}

/// CAP6: rounds without any good reading are no readings below the threshold.
#[test]
fn cap6_failed_rounds_do_not_end_the_pace() {
    let mut gate = paced();
    gate.engine("a").answers = false;
    for _ in 0..12 {
        gate.round();
    }
    assert!(gate.view().paced);
}

/// CAP6: judged is the plain usage of counted, busy engines; a start begins unpaced.
#[test]
fn cap6_idle_engines_and_starts_do_not_pace() {
    let mut gate = Gate::new();
    gate.engine("a").usage = Some(1_000_000);
    gate.engine("a").running = Some(0);
    gate.round();
    assert!(!gate.view().paced);
    let mut gate = paced();
    gate.restart(1_000);
    assert!(!gate.view().paced);
    gate.hold("t1", 400_000);
    gate.hold("t2", 400_000);
}

/// CAP7: no counted engine, or a ceiling of 0.
#[test]
fn cap7_without_readings_or_capacity() {
    let mut gate = Gate::new();
    gate.engine("a").answers = false;
    gate.run(6_000);
    assert_eq!(
        gate.view().measure.degraded,
        Some(DegradedReason::NoFreshReading)
    );
    assert_eq!(bypassed(&gate.ask("t1", 10)), BypassReason::Degraded);
    gate.engine("a").answers = true;
    gate.engine("a").capacity = 1;
    gate.round();
    assert_eq!(
        gate.view().measure.degraded,
        Some(DegradedReason::NoCapacity),
        "floor(0.9) is 0"
    );
    assert_eq!(bypassed(&gate.ask("t2", 0)), BypassReason::Degraded);
    gate.engine("a").capacity = 2;
    gate.round();
    assert_eq!(gate.view().measure.degraded, None);
}

/// CAP7: a router without a good, non-empty answer for longer than `stale_after`; within it the
/// last good set stays in force, and so do members and epoch for ever.
#[test]
fn cap7_a_silent_router() {
    for router in [Router::Silent, Router::Empty] {
        let mut gate = two_engines();
        gate.router = router;
        let good_at = gate.now;
        gate.run(5_999);
        gate.hold("still", 10);
        gate.jump(good_at + 6_000 - gate.now);
        gate.turn(Vec::new());
        assert_eq!(
            gate.view().measure.degraded,
            Some(DegradedReason::RouterUnreachable),
            "{router:?}"
        );
        assert_eq!(bypassed(&gate.ask("t", 10)), BypassReason::Degraded);
        gate.run(60_000);
        assert_eq!(gate.epoch(), 2);
        assert_eq!(gate.view().engines.len(), 2);
        assert_eq!(gate.ceiling(), 1_350_000, "never a ceiling of 0 (W01)");
        assert_eq!(gate.reserved(), 10, "leases stay charged");
        gate.router = Router::Lists;
        gate.round();
        assert_eq!(gate.view().measure.degraded, None);
        assert_eq!(gate.epoch(), 2);
    }
}

/// CAP7: when the router is silent from the start, `stale_after` runs from the start; the member
/// set and the last known capacities are stored.
#[test]
fn cap7_silent_from_the_start() {
    let mut gate = two_engines();
    gate.router = Router::Silent;
    gate.restart(3_600_000);
    let started = gate.now;
    assert_eq!(gate.ceiling(), 1_350_000, "the stored members are read");
    gate.hold("t", 10);
    gate.run(5_999);
    assert_eq!(gate.view().measure.degraded, None);
    gate.jump(started + 6_000 - gate.now);
    gate.turn(Vec::new());
    assert_eq!(
        gate.view().measure.degraded,
        Some(DegradedReason::RouterUnreachable)
    );
}

/// CAP7: neither router nor engines.
#[test]
fn cap7_no_fleet() {
    let mut gate = Gate::unread(admission_on());
    gate.router = Router::None;
    gate.start();
    gate.round();
    assert_eq!(gate.view().measure.degraded, Some(DegradedReason::NoFleet));
    assert_eq!(bypassed(&gate.ask("t", 10)), BypassReason::Degraded);
    gate.router = Router::Lists;
    gate.start();
    gate.round();
    assert_eq!(
        gate.view().measure.degraded,
        Some(DegradedReason::NoFreshReading),
        "an empty list for now"
    );
    gate.run(6_000);
    assert_eq!(
        gate.view().measure.degraded,
        Some(DegradedReason::RouterUnreachable)
    );
}

/// CAP7, DEC2: degradation drains the queue, and recovery admits again.
#[test]
fn cap7_degradation_drains_the_queue() {
    let mut gate = Gate::new();
    gate.hold("full", 900_000);
    gate.park("t1", 10);
    gate.park("t2", 10);
    gate.engine("a").answers = false;
    gate.run(6_000);
    let bypass = Outcome::Bypass(BypassReason::Degraded);
    assert_eq!(
        gate.decisions(),
        [("t1".to_owned(), bypass.clone()), ("t2".to_owned(), bypass)]
    );
}

/// CAP3, CAP7: an arrival is decided by what is fresh now, not by what was fresh at the last turn.
#[test]
fn cap3_an_arrival_after_the_reading_went_stale() {
    let mut gate = Gate::new();
    gate.engine("a").answers = false;
    gate.run(5_500);
    gate.hold("in time", 10);
    gate.jump(500);
    assert_eq!(bypassed(&gate.ask("too late", 10)), BypassReason::Degraded);
    assert_eq!(gate.reserved(), 10);
}

/// CAP3: a static engine that the router no longer lists is called unhealthy by nobody.
#[test]
fn cap3_a_static_engine_that_the_router_no_longer_lists() {
    let mut gate = two_engines();
    gate.static_engines.insert(engine("b"));
    gate.restart(1_000);
    gate.engine("b").healthy = false;
    gate.run(11_000);
    assert_eq!(gate.ceiling(), 900_000);
    gate.engine("b").listed = false;
    gate.round();
    assert_eq!(gate.ceiling(), 1_350_000);
    let shown = gate.view().engines;
    assert!(shown.iter().all(|engine| engine.healthy));
}

/// CAP3: a stored member that was never seen healthy is not counted after a start either.
#[test]
fn cap3_never_seen_healthy_over_a_restart() {
    let mut gate = Gate::new();
    let mut sick = Engine::of(500_000);
    sick.healthy = false;
    gate.engines.insert("b", sick);
    gate.round();
    assert_eq!(gate.ceiling(), 900_000);
    gate.router = Router::Silent;
    gate.restart(1_000);
    assert_eq!(gate.ceiling(), 900_000, "the router said nothing yet");
}

/// CAP1, CAP3, CAP5: what readers see of an engine and of the router: the last failure while it is
/// newer than the last good reading, health, freshness and pressure.
#[test]
fn cap3_the_view_of_an_engine() {
    let mut gate = two_engines();
    let shown = |gate: &Gate, name: &str| {
        let engines = gate.view().engines;
        let found = engines.iter().find(|shown| shown.id == engine(name));
        found.unwrap().clone()
    };
    assert_eq!(gate.view().router_failure, None);
    assert_eq!(shown(&gate, "b").failure, None);
    gate.engine("b").answers = false;
    gate.router = Router::Silent;
    gate.run(1_000);
    let failed = shown(&gate, "b");
    assert_eq!(failed.failure, Some(ReadFailure::Timeout));
    assert!(failed.fresh && failed.counted && failed.healthy);
    assert_eq!(failed.pressure.unwrap().get(), 500_000);
    assert_eq!(failed.reading.unwrap().1.capacity.get(), 500_000);
    assert_eq!(gate.view().router_failure, Some(RouterFailure::Timeout));
    gate.router = Router::Lists;
    gate.engine("a").healthy = false;
    gate.run(5_000);
    let stale = shown(&gate, "b");
    assert!(!stale.fresh && !stale.counted);
    assert!(!shown(&gate, "a").healthy && shown(&gate, "a").counted);
    assert_eq!(gate.view().router_failure, None);
    gate.engine("b").answers = true;
    gate.run(1_000);
    assert_eq!(shown(&gate, "b").failure, None);
}

/// CAP5: of two engines with the same pressure the first by address is named.
#[test]
fn cap5_equal_pressures() {
    let gate = two_engines();
    let measure = gate.view().measure;
    let (worst, named) = measure.pressure.clone().unwrap();
    assert_eq!((worst.get(), named), (500_000, engine("a")));
}
