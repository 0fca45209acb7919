"""The rules of patience by themselves, with the clock as an argument."""

from __future__ import annotations

import pytest

from kvgate.fail_open import BOUND_SLACK_S, CLAIM_GRACE_S, Breaker, LocalBypasses, OnceWarnings, Pause, Place, log


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_breaker_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(3, 5.0, Clock())
    for _ in range(2):
        breaker.failed()
    breaker.succeeded()
    for _ in range(2):
        breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    assert breaker.is_open()


def test_an_open_breaker_lets_one_trial_through_at_a_time() -> None:
    clock = Clock()
    breaker = Breaker(1, 5.0, clock)
    breaker.failed()
    clock.now += 7.0
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.failed()
    assert not breaker.allows()
    clock.now += 7.0
    assert breaker.allows()
    breaker.succeeded()
    assert all(breaker.allows() for _ in range(3))


def test_failures_of_others_do_not_keep_a_breaker_open_for_ever() -> None:
    clock = Clock()
    breaker = Breaker(1, 5.0, clock)
    breaker.failed()
    for _ in range(20):
        clock.now += 0.5
        breaker.failed()
        if breaker.allows():
            return
    raise AssertionError("no trial within 10 s")


def test_a_pause_doubles_within_its_jitter() -> None:
    pause = Pause(0.2, 2.0)
    drawn = [pause.next_s() for _ in range(8)]
    assert 0.15 <= drawn[0] <= 0.25
    assert 0.3 <= drawn[1] <= 0.5
    assert all(1.5 <= value <= 2.0 for value in drawn[4:])
    pause.reset()
    assert pause.next_s() <= 0.25


def test_a_place_is_kept_for_the_grace_since_the_last_sign() -> None:
    place = Place(0.0)
    assert place.grace_ends_at() == CLAIM_GRACE_S
    place.heard(20.0, bypass_in_s=25.0, claim_grace_s=4.0)
    assert place.grace_ends_at() == 24.0
    assert place.bound_at() == 45.0 + BOUND_SLACK_S
    # The gate knew the caller until its open call broke; what cuts every call moves nothing.
    place.cut(27.0)
    place.cut(30.0)
    assert place.grace_ends_at() == 31.0
    place.heard(31.0)
    place.cut(49.0)
    assert place.grace_ends_at() == place.bound_at() == 50.0


def test_local_bypasses_are_taken_once_and_put_back() -> None:
    counts = LocalBypasses()
    counts.add("unreachable")
    counts.add("unreachable")
    counts.add("breaker")
    taken = counts.take()
    assert taken == {"unreachable": 2, "breaker": 1}
    assert counts.take() == {}
    counts.add("breaker")
    counts.put_back(taken)
    assert counts.peek() == {"unreachable": 2, "breaker": 2}


def test_a_kind_of_trouble_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", log.name):
        warnings = OnceWarnings()
        for _ in range(5):
            warnings.warn("a", "first %s", "thing")
            warnings.warn("b", "second")
    assert [record.getMessage() for record in caplog.records] == ["first thing", "second"]
