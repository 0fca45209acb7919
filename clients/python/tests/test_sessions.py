"""Sessions, closes and step reports against the fake gate."""

from __future__ import annotations

import asyncio

import pytest
from conftest import until

from kvgate import AsyncGate, Close, GateConfig, TicketCancelled
from kvgate.testing import FakeGate


async def test_a_session_is_closed_at_the_end_of_its_context(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate, gate.session("s/7") as session:
        async with session.lease(reservation_tokens=1) as lease:
            assert lease.session_id == "s/7"
        assert fake_gate.closes == []
    assert fake_gate.closes == [("s/7", {"mode": "join", "reason": "terminal"})]


async def test_a_session_that_fails_is_closed_as_dropped(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        with pytest.raises(ZeroDivisionError):
            async with gate.session("s", mode="abort"):
                raise ZeroDivisionError
    assert fake_gate.closes == [("s", {"mode": "abort", "reason": "dropped"})]


async def test_a_session_joins_its_own_bypassed_work_before_it_closes(fake_gate: FakeGate) -> None:
    fake_gate.bypass_reason = "degraded"
    ended = asyncio.Event()
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.session("s") as session:

            async def work() -> None:
                async with session.lease(reservation_tokens=1) as lease:
                    assert lease.action == "bypass"
                    await ended.wait()

            task = asyncio.create_task(work())
            await until(lambda: bool(fake_gate.requests), "it runs")
            asyncio.get_running_loop().call_later(0.2, ended.set)
        assert ended.is_set()
        assert len(fake_gate.closes) == 1
        await task


async def test_a_cancelled_session_leaves_its_close_on_the_way(fake_gate: FakeGate) -> None:
    fake_gate.bypass_reason = "degraded"
    ended, running = asyncio.Event(), asyncio.Event()
    async with AsyncGate(fake_gate.url) as gate:

        async def program() -> None:
            async with gate.session("s") as session:

                async def work() -> None:
                    async with session.lease(reservation_tokens=1):
                        running.set()
                        await ended.wait()

                beside.append(asyncio.create_task(work()))
                await running.wait()

        beside: list[asyncio.Task[None]] = []
        task = asyncio.create_task(program())
        await running.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fake_gate.closes == []
        ended.set()
        await until(lambda: len(fake_gate.closes) == 1, "the session is closed")
        await beside[0]


async def test_a_close_answers_how_it_stands(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        assert await gate.close_session("a") == Close("a", "done", "close-1")
        assert (await gate.close_session("a", wait_s=1.0)).state == "done"
        assert fake_gate.requests[-1].path.endswith("/v1/sessions/a/close")


async def test_a_close_without_an_answer_is_tried_again(fake_gate: FakeGate) -> None:
    fake_gate.behave("recovering")
    async with AsyncGate(fake_gate.url) as gate:
        for wait_s in (0.0, 1.0):
            assert (await gate.close_session("a", wait_s=wait_s)).state == "unanswered"
        fake_gate.behave("normal")
        await until(lambda: len(fake_gate.closes) == 2, "both closes arrived")


async def test_a_gate_without_closes_and_reports_is_warned_about_once(
    fake_gate: FakeGate, caplog: pytest.LogCaptureFixture
) -> None:
    fake_gate.serves_sessions = False
    async with AsyncGate(fake_gate.url) as gate:
        for step in range(3):
            assert (await gate.close_session("a")).state == "refused"
            assert await gate.report(step) == {}
            assert await gate.peek() == {}
            # None of this speaks against the gate's leases.
            async with gate.lease(session_id="s", reservation_tokens=1) as lease:
                assert lease.action == "admit"
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2
    assert "a close is refused: status 404 not_found" in warned[0]
    assert "no step report: status 404 not_found" in warned[1]


async def test_a_report_has_a_run_of_its_own(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate, AsyncGate(GateConfig(url=fake_gate.url, run="exp-7")) as named:
        for step in (1, 2):
            assert await gate.report(step) == {"agentic_kv/budget/reserved": 0.0}
        assert await named.report(1)
        assert await named.report(1, run="exp-8")
        assert await named.peek() == {"agentic_kv/admission/waiting": 0.0}
        assert (await gate.state() or {})["features"]["session_lifecycle"]
    asked = [(r.body["run"], r.body["step"]) for r in fake_gate.requests if r.path == "/v1/steps"]
    own = asked[0][0]
    assert len(own) == 32
    assert asked == [(own, 1), (own, 2), ("exp-7", 1), ("exp-8", 1)]


async def test_a_session_close_cancels_what_waits_in_it(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="holder", reservation_tokens=1_000_000):
            async with gate.session("s") as session:

                async def work() -> None:
                    with pytest.raises(TicketCancelled, match="session_closed"):
                        async with session.lease(reservation_tokens=1):
                            raise AssertionError("it must not start")

                task = asyncio.create_task(work())
                await until(lambda: len(fake_gate.waiting) == 1, "it waits")
            await task
