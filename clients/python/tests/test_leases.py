"""Leases against the fake gate: what a caller gets, and what the gate is told."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from typing import Any

import anyio
import pytest
from conftest import until

from kvgate import AsyncGate, GateConfig, TicketCancelled
from kvgate.testing import FakeGate


async def test_an_admitted_request_holds_its_tokens_until_the_context_ends(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="s-7", prompt_tokens=10, max_new_tokens=5) as lease:
            assert (lease.action, lease.reason, lease.held) == ("admit", "capacity_available", True)
            assert lease.decision.reservation_tokens == fake_gate.reserved == 15
            assert lease.ticket_id.startswith("s-7/")
        assert not lease.held
        assert fake_gate.reserved == 0


async def test_a_bypass_starts_at_once_and_gives_nothing_back(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="s", reservation_tokens=1, protected=True) as lease:
            assert (lease.action, lease.reason, lease.lease_id) == ("bypass", "protected", None)
            assert not await lease.renew()
    assert [request.path for request in fake_gate.requests] == ["/v1/leases"]


async def test_all_fields_of_the_call_arrive(fake_gate: FakeGate) -> None:
    config = GateConfig(url=fake_gate.url, client="rollout-3")
    async with AsyncGate(config) as gate:
        context = gate.lease(
            session_id="s/%é", ticket_id="t/1", prompt_tokens=3, max_new_tokens=4, scope="eval", ttl_s=60
        )
        async with context as lease:
            rid = lease.engine_fields()["rid"]
    assert dict(fake_gate.requests[0].body) == {
        "ticket_id": "t/1",
        "session_id": "s/%é",
        "prompt_tokens": 3,
        "max_new_tokens": 4,
        "scope": "eval",
        "protected": False,
        "ttl_s": 60,
        "request_id": rid,
        "client": "rollout-3",
        "wait_s": 0,
    }


async def test_engine_ids_are_of_one_length_and_fresh(fake_gate: FakeGate) -> None:
    rids = set()
    async with AsyncGate(fake_gate.url) as gate:
        for _ in range(20):
            async with gate.lease(session_id="s", reservation_tokens=1) as lease:
                fields = lease.engine_fields()
                assert fields["session_id"] == "s"
                rids.add(fields["rid"])
    assert len(rids) == 20
    assert {len(rid) for rid in rids} == {32}


@pytest.mark.parametrize(
    ("answer", "reported"),
    [
        ({"meta_info": {"prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": 8}}, (9, 4, 8)),
        (
            {"usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}},
            (9, 4, 8),
        ),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": 4.5, "prompt_tokens_details": None}}, ()),
        ({"meta_info": {"prompt_tokens": True, "completion_tokens": 2**53}}, ()),
        (["no", "answer"], ()),
    ],
)
async def test_the_release_tells_what_was_used(fake_gate: FakeGate, answer: object, reported: tuple[int, ...]) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="s", reservation_tokens=1) as lease:
            lease.report_answer(answer, engine="http://10.0.0.1:30000" if reported else "\x00")
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    told = dict(zip(names, reported, strict=False)) | ({"engine": "http://10.0.0.1:30000"} if reported else {})
    assert fake_gate.usage == ([told] if told else [])


async def test_the_users_exception_passes_and_the_lease_is_given_back(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        with pytest.raises(ZeroDivisionError):
            async with gate.lease(session_id="s", reservation_tokens=9):
                raise ZeroDivisionError
        assert fake_gate.reserved == 0


async def test_a_cancelled_ticket_raises(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="s", ticket_id="t", reservation_tokens=1):
            pass
        with pytest.raises(TicketCancelled) as raised:
            async with gate.lease(session_id="s", ticket_id="t", reservation_tokens=1):
                raise AssertionError("it must not start")
    assert raised.value.reason == "ticket_finished"
    assert raised.value.ticket_id == "t"
    assert "must not start" in str(raised.value)


async def test_a_repeated_ticket_is_the_same_lease(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="s", ticket_id="t", reservation_tokens=7) as first:
            async with gate.lease(session_id="s", ticket_id="t", reservation_tokens=7) as again:
                assert again.lease_id == first.lease_id
                assert again.decision.repeated
                assert fake_gate.reserved == 7
        assert fake_gate.reserved == 0


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"prompt_tokens": 1},
        {"max_new_tokens": 1},
        {"prompt_tokens": 1, "max_new_tokens": 1, "reservation_tokens": 2},
    ],
)
async def test_a_call_of_the_wrong_form_is_a_type_error(fake_gate: FakeGate, numbers: dict[str, int]) -> None:
    with pytest.raises(TypeError, match="reservation_tokens"):
        AsyncGate(fake_gate.url).lease(session_id="s", **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "values",
    [
        {"session_id": "", "reservation_tokens": 1},
        {"session_id": "..", "reservation_tokens": 1},
        {"session_id": "a\nb", "reservation_tokens": 1},
        {"session_id": "\ud800", "reservation_tokens": 1},
        {"session_id": "s" * 513, "reservation_tokens": 1},
        {"session_id": "s", "ticket_id": "\x7f", "reservation_tokens": 1},
        {"session_id": "s", "reservation_tokens": -1},
        {"session_id": "s", "prompt_tokens": 2**53, "max_new_tokens": 1},
        {"session_id": "s", "reservation_tokens": 1.5},
        {"session_id": 7, "reservation_tokens": 1},
    ],
)
async def test_a_value_that_the_gate_would_refuse_costs_a_bypass_and_no_call(
    fake_gate: FakeGate, values: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        for _ in range(2):
            async with gate.lease(**values) as lease:  # type: ignore[arg-type]
                assert (lease.action, lease.reason, lease.decision.local) == ("bypass", "refused", True)
        assert gate.local_bypasses() == {"refused": 2}
    assert fake_gate.requests == []
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


class Count:
    """An integer of another library."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


async def test_integers_of_other_libraries_are_taken(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        numbers: dict[str, Any] = {"prompt_tokens": Count(3), "max_new_tokens": Count(4)}
        async with gate.lease(session_id="s", **numbers) as lease:
            assert lease.decision.reservation_tokens == 7
            counted: Any = Count(5)
            lease.report_usage(completion_tokens=counted)
    assert fake_gate.usage == [{"completion_tokens": 5}]


async def test_a_held_lease_is_renewed_at_a_third_of_its_life(fake_gate: FakeGate) -> None:
    # The fake gate gives every lease 600 s, so the timer is looked at and rung by hand.
    loop = asyncio.get_running_loop()
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="s", reservation_tokens=1) as lease:
            timer = lease._timer
            assert timer is not None
            assert 199 <= timer.when() - loop.time() <= 200
            timer._run()
            await until(lambda: any(r.path.endswith("/renew") for r in fake_gate.requests), "a renewal")
            await until(lambda: lease._timer is not timer, "the next timer")
            assert await lease.renew(30)
        assert lease._timer is None


async def test_a_lease_that_ended_under_its_work_lets_the_work_go_on(
    fake_gate: FakeGate, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="s", ticket_id="t", reservation_tokens=1) as lease:
            fake_gate.expire("t")
            assert not await lease.renew()
            assert not lease.held
    assert "ended before its work" in caplog.text
    assert not any(request.path.endswith("/release") for request in fake_gate.requests)


async def test_a_lease_that_nobody_holds_on_to_is_not_renewed(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        lease = await gate.lease(session_id="s", reservation_tokens=1).__aenter__()
        timer = lease._timer
        del lease
        gc.collect()
        assert timer is not None
        timer._run()
        await asyncio.sleep(0)
        assert not any(request.path.endswith("/renew") for request in fake_gate.requests)


async def test_many_at_once_share_calls_and_all_get_their_turn(fake_gate: FakeGate) -> None:
    fake_gate.set_capacity(100)
    actions: Counter[str] = Counter()
    async with AsyncGate(fake_gate.url) as gate:

        async def work(number: int) -> None:
            async with gate.lease(session_id=f"s{number}", reservation_tokens=10) as lease:
                actions[lease.action] += 1
                await asyncio.sleep(0)

        await asyncio.gather(*(work(number) for number in range(1000)))
    assert actions == {"admit": 1000}
    assert fake_gate.reserved == 0
    assert len(fake_gate.requests) < 1000
    assert {"/v1/batch", "/v1/wait"} <= {request.path for request in fake_gate.requests}


async def test_one_bad_operation_does_not_spoil_the_others_of_its_batch(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="other", ticket_id="taken", reservation_tokens=1):

            async def work(number: int) -> str:
                ticket = "taken" if number == 20 else None
                async with gate.lease(session_id="s", ticket_id=ticket, reservation_tokens=1) as lease:
                    return lease.reason

            reasons = Counter(await asyncio.gather(*(work(number) for number in range(40))))
            assert reasons == {"capacity_available": 39, "refused": 1}
            # A ticket that was refused may be another caller's: it is left alone.
            assert "taken" in fake_gate.leases


if sys.version_info >= (3, 11):

    async def test_a_failing_task_group_gives_everything_back(fake_gate: FakeGate) -> None:
        fake_gate.set_capacity(30)
        async with AsyncGate(fake_gate.url) as gate:

            async def work(number: int) -> None:
                async with gate.lease(session_id=f"s{number}", reservation_tokens=10):
                    await asyncio.Event().wait()

            async def fail() -> None:
                await until(lambda: len(fake_gate.waiting) == 47, "47 wait")
                raise ZeroDivisionError

            with pytest.raises(BaseExceptionGroup) as raised:  # noqa: F821  it came with Python 3.11 too
                async with asyncio.TaskGroup() as group:
                    for number in range(50):
                        group.create_task(work(number))
                    group.create_task(fail())
            assert raised.group_contains(ZeroDivisionError)
            await until(lambda: fake_gate.waiting == [] and fake_gate.reserved == 0, "all is given back")


async def test_anyio_scopes_withdraw_their_tickets(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="a", reservation_tokens=1_000_000):
            with anyio.move_on_after(0.2) as scope:
                async with gate.lease(session_id="b", reservation_tokens=10):
                    raise AssertionError("there is no room")
            assert scope.cancelled_caught
            await until(lambda: fake_gate.waiting == [], "the ticket is withdrawn")
