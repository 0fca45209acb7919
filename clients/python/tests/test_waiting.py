"""Waiting tickets against the fake gate: how they ask again, and when they stop."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from conftest import until

from kvgate import AsyncGate, GateConfig, TicketCancelled
from kvgate.testing import FakeGate

ALL = 1_000_000


async def waits(gate: AsyncGate, number: int, done: list[tuple[int, str, str]], tokens: int = ALL) -> None:
    async with gate.lease(session_id=f"s{number}", ticket_id=f"t{number}", reservation_tokens=tokens) as lease:
        done.append((number, lease.action, lease.reason))


def asked(gate: FakeGate, path: str) -> list[Any]:
    return [request.body for request in gate.requests if request.path == path]


async def test_a_waiting_ticket_asks_again_with_the_same_body(fake_gate: FakeGate) -> None:
    done: list[tuple[int, str, str]] = []
    async with AsyncGate(GateConfig(url=fake_gate.url, window_s=0.1)) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=ALL):
            task = asyncio.create_task(waits(gate, 1, done))
            await until(lambda: len(asked(fake_gate, "/v1/leases")) >= 5, "it asked again")
        await task
    assert done == [(1, "admit", "capacity_available")]
    bodies = [{**body, "wait_s": 0} for body in asked(fake_gate, "/v1/leases")[1:]]
    assert all(body == bodies[0] for body in bodies)


async def test_the_queue_time_is_told(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        held = gate.lease(session_id="holder", reservation_tokens=ALL)
        await held.__aenter__()
        asyncio.get_running_loop().call_later(0.2, lambda: asyncio.ensure_future(held.__aexit__(None, None, None)))
        async with gate.lease(session_id="s", reservation_tokens=ALL) as lease:
            assert 0.1 < lease.waited_s < 10


async def test_many_waiting_tickets_share_calls_and_keep_their_order(fake_gate: FakeGate) -> None:
    done: list[tuple[int, str, str]] = []
    async with AsyncGate(GateConfig(url=fake_gate.url, window_s=0.5)) as gate:
        async with gate.lease(session_id="holder", ticket_id="holder", reservation_tokens=ALL):
            tasks = [asyncio.create_task(waits(gate, number, done)) for number in range(200)]
            await until(lambda: len(fake_gate.waiting) == 200, "all wait")
            queue = fake_gate.waiting
            await until(lambda: len(asked(fake_gate, "/v1/wait")) >= 10, "they share calls")
        await asyncio.gather(*tasks)
    assert fake_gate.granted == ["holder", *queue]
    assert [f"t{number}" for number, _, _ in done] == queue
    assert max(len(body["ticket_ids"]) for body in asked(fake_gate, "/v1/wait")) > 32
    single = Counter(body["ticket_id"] for body in asked(fake_gate, "/v1/leases"))
    assert len(single) < 60, "most tickets never had a call of their own"


async def test_few_waiting_tickets_ask_each_by_itself(fake_gate: FakeGate) -> None:
    done: list[tuple[int, str, str]] = []
    async with AsyncGate(fake_gate.url) as gate:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(gate.lease(session_id="holder", reservation_tokens=ALL))
            tasks = [asyncio.create_task(waits(gate, number, done)) for number in range(31)]
            await until(lambda: len(fake_gate.waiting) == 31, "all wait")
        await asyncio.gather(*tasks)
    assert asked(fake_gate, "/v1/wait") == []


@pytest.mark.parametrize("share_from", [1, 1000])
async def test_a_ticket_that_the_gate_forgot_is_acquired_again(fake_gate: FakeGate, share_from: int) -> None:
    done: list[tuple[int, str, str]] = []
    config = GateConfig(url=fake_gate.url, wait_calls_from=share_from, window_s=0.2)
    async with AsyncGate(config) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=ALL):
            task = asyncio.create_task(waits(gate, 1, done))
            await until(lambda: fake_gate.waiting == ["t1"], "it waits")
            fake_gate.forget("t1")
            await until(lambda: fake_gate.waiting == ["t1"], "it is back")
        await task
    assert done == [(1, "admit", "capacity_available")]


@pytest.mark.parametrize("share_from", [1, 1000])
async def test_a_session_close_cancels_its_waiting_tickets(fake_gate: FakeGate, share_from: int) -> None:
    async with AsyncGate(GateConfig(url=fake_gate.url, wait_calls_from=share_from)) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=ALL):
            task = asyncio.create_task(waits(gate, 1, []))
            await until(lambda: fake_gate.waiting == ["t1"], "it waits")
            await gate.close_session("s1")
            with pytest.raises(TicketCancelled, match="session_closed"):
                await task


@pytest.mark.parametrize("share_from", [1, 1000])
async def test_a_place_outlives_a_restart_of_the_gate(fake_gate: FakeGate, share_from: int) -> None:
    done: list[tuple[int, str, str]] = []
    async with AsyncGate(GateConfig(url=fake_gate.url, wait_calls_from=share_from)) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=ALL):
            tasks = [asyncio.create_task(waits(gate, number, done, 10)) for number in range(100)]
            await until(lambda: len(fake_gate.waiting) == 100, "all wait")
            queue = fake_gate.waiting
            await asyncio.to_thread(fake_gate.stop)
            fake_gate.behave("recovering")
            seen = len(fake_gate.requests)
            await asyncio.to_thread(fake_gate.start)
            await until(lambda: len(fake_gate.requests) > seen, "they came back while it recovers")
            fake_gate.behave("normal")
        await asyncio.gather(*tasks)
        await until(lambda: fake_gate.reserved == 0, "all is given back")
    assert [action for _, action, _ in done] == ["admit"] * 100
    assert fake_gate.granted[1:] == queue


@pytest.mark.parametrize("share_from", [1, 1000])
@pytest.mark.parametrize("trouble", ["stopped", "hang", "draining", "cut", "empty"])
async def test_a_waiting_ticket_goes_on_when_its_grace_is_over(trouble: str, share_from: int) -> None:
    with FakeGate(claim_grace_s=1.0) as fake:
        config = GateConfig(url=fake.url, wait_calls_from=share_from, window_s=0.5, call_timeout_s=0.5)
        async with AsyncGate(config) as gate:
            async with gate.lease(session_id="holder", reservation_tokens=ALL):
                done: list[tuple[int, str, str]] = []
                task = asyncio.create_task(waits(gate, 1, done))
                await until(lambda: fake.waiting == ["t1"], "it waits")
                began = asyncio.get_running_loop().time()
                if trouble == "stopped":
                    await asyncio.to_thread(fake.stop)
                elif trouble == "empty":
                    # An answer that says nothing is no sign of life.
                    fake.behave("empty", "/v1/wait")
                    fake.behave("empty", "/v1/leases")
                else:
                    fake.behave(trouble)  # type: ignore[arg-type]
                await task
                took_s = asyncio.get_running_loop().time() - began
                assert done == [(1, "bypass", "unreachable")]
                assert 0.4 < took_s < 5.0
                await asyncio.to_thread(fake.start)
                for path in ("*", "/v1/wait", "/v1/leases"):
                    fake.behave("normal", path)
                # It went on without an answer, so its ticket is cancelled behind it.
                await until(lambda: fake.waiting == [], "the ticket is cancelled")


async def test_the_hard_bound_holds_whatever_the_gate_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgate.fail_open.BOUND_SLACK_S", 0.3)
    with FakeGate(max_wait_s=0.2) as fake:
        async with AsyncGate(GateConfig(url=fake.url, window_s=0.2)) as gate:
            async with gate.lease(session_id="holder", reservation_tokens=ALL):
                # It says that it would bypass soon, and never does.
                fake.never_ages()
                done: list[tuple[int, str, str]] = []
                await asyncio.wait_for(waits(gate, 1, done), 10)
    assert done == [(1, "bypass", "unreachable")]


async def test_a_gate_with_too_many_calls_is_not_asked_in_a_hurry(fake_gate: FakeGate) -> None:
    # It answers `wait` at once, whatever the call says it may wait.
    fake_gate.never_waits()
    done: list[tuple[int, str, str]] = []
    for share_from in (1, 1000):
        async with AsyncGate(GateConfig(url=fake_gate.url, wait_calls_from=share_from)) as gate:
            async with gate.lease(session_id="holder", reservation_tokens=ALL):
                before = len(fake_gate.requests)
                task = asyncio.create_task(waits(gate, share_from, done))
                await until(lambda: bool(fake_gate.waiting), "it waits")
                await asyncio.sleep(1.0)
                assert len(fake_gate.requests) - before < 8
            await task


@pytest.mark.parametrize(("status", "code"), [(404, ""), (405, ""), (404, "not_found")])
async def test_where_no_shared_calls_are_taken_each_ticket_asks_by_itself(
    fake_gate: FakeGate, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake_gate.refuse(status, "/v1/wait", code=code)
    done: list[tuple[int, str, str]] = []
    async with AsyncGate(GateConfig(url=fake_gate.url, wait_calls_from=1)) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=ALL):
            tasks = [asyncio.create_task(waits(gate, number, done, 1)) for number in range(5)]
            await until(lambda: len(single_waits(fake_gate)) == 5, "each asks by itself")
            assert len(asked(fake_gate, "/v1/wait")) <= 5
            # A new ticket does not even try.
            shared = len(asked(fake_gate, "/v1/wait"))
            tasks.append(asyncio.create_task(waits(gate, 5, done, 1)))
            await until(lambda: len(single_waits(fake_gate)) == 6, "this one as well")
            assert len(asked(fake_gate, "/v1/wait")) == shared
        await asyncio.gather(*tasks)
    assert [action for _, action, _ in done] == ["admit"] * 6
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1
    assert "each ticket asks by itself" in warned[0]


def single_waits(gate: FakeGate) -> set[str]:
    """Tickets that had a waiting call of their own."""
    return {body["ticket_id"] for body in asked(gate, "/v1/leases") if body["wait_s"] > 0}


@pytest.mark.parametrize("trouble", ["refused", "unknown", "waits"])
async def test_shared_calls_that_lead_nowhere_are_no_hot_loop(
    fake_gate: FakeGate, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def says(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        action = {"unknown": "unknown", "waits": "wait"}[trouble]
        rows = [{"ticket_id": ticket_id, "action": action} for ticket_id in body["ticket_ids"]]
        return 200, {"results": [{**row, "bypass_in_s": 30.0, "claim_grace_s": 10.0} for row in rows]}

    if trouble == "refused":
        fake_gate.refuse(422, "/v1/wait", code="invalid_request")
    else:
        monkeypatch.setattr(fake_gate, "_wait", says)
    done: list[tuple[int, str, str]] = []
    async with AsyncGate(GateConfig(url=fake_gate.url, wait_calls_from=1)) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=ALL):
            task = asyncio.create_task(waits(gate, 1, done))
            await until(lambda: bool(asked(fake_gate, "/v1/wait")), "it waits")
            await asyncio.sleep(1.0)
            assert len(fake_gate.requests) < 16
        if trouble == "waits":
            monkeypatch.undo()
        await task
    assert done == [(1, "admit", "capacity_available")]


async def test_a_gate_that_says_wait_and_ask_at_once_is_not_asked_in_a_hurry(
    fake_gate: FakeGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = fake_gate._told

    def at_once(ticket: Any) -> tuple[int, dict[str, Any]]:
        status, answer = told(ticket)
        return status, {**answer, "poll_after_s": 0.0}

    fake_gate.never_waits()
    monkeypatch.setattr(fake_gate, "_told", at_once)
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=ALL):
            task = asyncio.create_task(waits(gate, 1, []))
            await until(lambda: bool(fake_gate.waiting), "it waits")
            await asyncio.sleep(1.0)
            assert len(fake_gate.requests) < 25
        await task


@pytest.mark.parametrize("share_from", [1, 1000])
async def test_a_cancelled_waiter_withdraws_its_ticket_before_it_ends(fake_gate: FakeGate, share_from: int) -> None:
    async with AsyncGate(GateConfig(url=fake_gate.url, wait_calls_from=share_from)) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=ALL):
            task = asyncio.create_task(waits(gate, 1, []))
            await until(lambda: fake_gate.waiting == ["t1"], "it waits")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert fake_gate.waiting == []


async def test_a_ticket_refused_in_its_wait_goes_on(fake_gate: FakeGate) -> None:
    done: list[tuple[int, str, str]] = []
    async with AsyncGate(GateConfig(url=fake_gate.url, window_s=0.1)) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=ALL):
            task = asyncio.create_task(waits(gate, 1, done))
            await until(lambda: fake_gate.waiting == ["t1"], "it waits")
            fake_gate.behave("unauthorized", "/v1/leases")
            await task
            assert done == [(1, "bypass", "refused")]
            await until(lambda: fake_gate.waiting == [], "the ticket is cancelled")
            fake_gate.behave("normal", "/v1/leases")


async def test_a_ticket_that_was_asked_before_is_withdrawn_even_when_its_next_call_never_left(
    fake_gate: FakeGate,
) -> None:
    async with AsyncGate(GateConfig(url=fake_gate.url, wait_calls_from=1, flush_s=0)) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=ALL):
            task = asyncio.create_task(waits(gate, 1, []))
            await until(lambda: fake_gate.waiting == ["t1"], "it waits")
            calls = gate._home().calls
            calls._senders_max = 0
            fake_gate.forget("t1")
            # The call that waits ends with its beat, and the ticket is to be acquired again.
            await until(lambda: len(calls._queue) == 1, "its next call stands in the queue")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert fake_gate.requests[-1].method == "DELETE"
