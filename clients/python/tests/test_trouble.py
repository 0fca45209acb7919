"""Trouble with the gate never reaches the rollout, and costs it next to nothing. Against the fake gate."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from conftest import raw_server, until

from kvgate import AdmissionClient, AsyncGate, GateConfig
from kvgate._wire import Reply
from kvgate.aio import Lease
from kvgate.testing import FakeGate

QUICK = {"call_timeout_s": 0.3, "breaker_open_s": 60.0}


async def turn(gate: AsyncGate, number: int = 0) -> Lease:
    async with gate.lease(session_id=f"s{number}", reservation_tokens=1) as lease:
        return lease


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("hang", "unreachable"),
        ("cut", "unreachable"),
        ("garbage", "unreachable"),
        ("recovering", "unreachable"),
        ("draining", "unreachable"),
        ("overloaded", "unreachable"),
        ("unauthorized", "refused"),
    ],
)
async def test_a_new_ticket_goes_on_at_once(
    fake_gate: FakeGate, behaviour: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake_gate.behave(behaviour)  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with AsyncGate(GateConfig(url=fake_gate.url, flush_s=0.1, **QUICK)) as gate:  # type: ignore[arg-type]
        leases = [await turn(gate, number) for number in range(10)]
        assert loop.time() - began < 5.0
        assert leases[0].action == "bypass"
        assert leases[0].reason == reason
        told = gate.local_bypasses()
        assert sum(told.values()) == 10
        # The cancels behind them fail as well, and open the breaker the sooner.
        assert told == {"refused": 10} or 1 <= told[reason] <= 3
        assert all(lease.decision.local for lease in leases)
        warned = [record for record in caplog.records if record.levelname == "WARNING" and record.name == "kvgate"]
        assert len(warned) == 1
        assert "goes on without a lease" in warned[0].getMessage()


async def test_a_gate_that_is_not_there_costs_next_to_nothing(fake_gate: FakeGate) -> None:
    fake_gate.stop()
    async with AsyncGate(GateConfig(url=fake_gate.url, flush_s=0)) as gate:
        leases = await asyncio.gather(*(turn(gate, number) for number in range(500)))
    assert {lease.action for lease in leases} == {"bypass"}
    assert {lease.reason for lease in leases} <= {"unreachable", "breaker"}


async def test_local_bypasses_are_told_with_the_next_call_that_gets_through(fake_gate: FakeGate) -> None:
    fake_gate.behave("recovering")
    config = GateConfig(url=fake_gate.url, call_timeout_s=0.3, breaker_open_s=0.05)
    async with AsyncGate(config) as gate:
        for number in range(6):
            await turn(gate, number)
        decided = Counter(gate.local_bypasses())
        assert sum(decided.values()) == 6
        fake_gate.behave("normal")
        await until(lambda: not gate._here().shared.breaker.is_open(), "a cancel came through")
        await turn(gate)
        assert gate.local_bypasses() == {}
    assert fake_gate.local_bypasses == decided


async def test_local_bypasses_are_told_inside_a_batch_too(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        gate._here().shared.bypasses.put_back({"breaker": 5})
        await asyncio.gather(*(turn(gate, number) for number in range(100)))
    assert fake_gate.local_bypasses == {"breaker": 5}


async def test_what_was_decided_without_an_answer_is_cancelled_behind(fake_gate: FakeGate) -> None:
    # The gate grants, and its answer comes too late.
    fake_gate.slow(1.0)
    async with AsyncGate(GateConfig(url=fake_gate.url, **QUICK)) as gate:  # type: ignore[arg-type]
        lease = await turn(gate)
        assert lease.reason == "unreachable"
        await until(lambda: any(r.method == "DELETE" for r in fake_gate.requests), "the ticket is cancelled")
        fake_gate.slow(0.0)
        await until(lambda: fake_gate.reserved == 0, "no lease is left")


@pytest.mark.parametrize(("status", "cancelled"), [(408, True), (425, True), (429, True), (404, False), (413, False)])
async def test_any_4xx_to_a_new_ticket_is_a_refusal(fake_gate: FakeGate, status: int, cancelled: bool) -> None:
    fake_gate.refuse(status)
    async with AsyncGate(GateConfig(url=fake_gate.url, flush_s=0)) as gate:
        assert (await turn(gate)).reason == "refused"
        assert gate.local_bypasses() == {"refused": 1}
        fake_gate.behave("normal")
        if cancelled:
            # The gate may have taken it all the same.
            await until(lambda: any(r.method == "DELETE" for r in fake_gate.requests), "the ticket is cancelled")
        assert (await turn(gate, 1)).action == "admit"
        assert any(r.method == "DELETE" for r in fake_gate.requests) == cancelled
    assert fake_gate.local_bypasses == {"refused": 1}


OF_CALLER = [
    (401, "unauthorized"),
    (403, "forbidden"),
    (403, ""),
    (421, "host_not_allowed"),
    (407, ""),
    (400, ""),
    (404, ""),
    (405, ""),
    (410, ""),
    (413, ""),
    (422, ""),
    (429, ""),
]


def test_what_refuses_the_caller_says_nothing_of_the_call() -> None:
    for status, code in [*OF_CALLER, (401, ""), (503, "draining")]:
        assert Reply(status, {"code": code} if code else {}).may_pass_later, (status, code)
    for status, code in [(404, "ticket_not_found"), (410, "lease_expired"), (422, "invalid_request")]:
        assert not Reply(status, {"code": code}).may_pass_later, (status, code)
    assert not Reply(200).may_pass_later


@pytest.mark.parametrize(("status", "code"), OF_CALLER)
async def test_releases_cancels_and_closes_outlive_what_refuses_the_caller(
    fake_gate: FakeGate, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        client = AdmissionClient(gate)
        # So many that some of the releases go as a batch.
        held = [gate.lease(session_id=f"s{number}", reservation_tokens=1) for number in range(20)]
        leases = [await context.__aenter__() for context in held]
        leases[0].report_usage(prompt_tokens=7)
        fake_gate.refuse(status, code=code)
        await asyncio.gather(*(context.__aexit__(None, None, None) for context in held), client.cancel("t"))
        assert [(await gate.close_session("s", wait_s=wait_s)).state for wait_s in (0.0, 0.1)] == ["unanswered"] * 2
        assert (fake_gate.reserved, fake_gate.closes) == (20, [])
        fake_gate.behave("normal")
        await until(lambda: fake_gate.reserved == 0, "the releases arrived")
        await until(lambda: len(fake_gate.closes) == 2, "the closes arrived")
        await until(lambda: _cancels(fake_gate, "t") > 1, "the cancel arrived")
    assert fake_gate.usage == [{"prompt_tokens": 7}]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    # Once for each kind of call, at most; what blames the server is retried without a word.
    assert len(warned) <= 3
    assert all(f"refused, and tried again: status {status}" in text for text in warned)


def _cancels(gate: FakeGate, ticket_id: str) -> int:
    """How often a cancel of this ticket came, by itself or in a batch."""
    singly = [r for r in gate.requests if r.method == "DELETE" and r.path.endswith(f"/{ticket_id}")]
    operations = [operation for r in gate.requests for operation in r.body.get("operations", [])]
    return len(singly) + len([o for o in operations if o["op"] == "cancel" and o["ticket_id"] == ticket_id])


async def test_a_lease_is_not_lost_by_the_word_of_a_proxy(
    fake_gate: FakeGate, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="s", reservation_tokens=9) as lease:
            for status in (404, 410):
                fake_gate.refuse(status)
                assert not await lease.renew()
                assert lease.held
            fake_gate.behave("normal")
            assert await lease.renew()
        assert fake_gate.reserved == 0
    assert "ended before its work" not in caplog.text


async def test_a_release_that_is_refused_for_its_token_is_tried_again(
    fake_gate: FakeGate, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        for _ in range(2):
            async with gate.lease(session_id="s", reservation_tokens=9):
                fake_gate.behave("unauthorized")
            assert (await gate.close_session("s")).state == "unanswered"
            assert fake_gate.reserved == 9
            fake_gate.behave("normal")
            await until(lambda: fake_gate.reserved == 0, "the release arrived")
        await until(lambda: len(fake_gate.closes) == 2, "the closes arrived")
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 2
    assert all("refused, and tried again: status 401" in text for text in warned)


async def test_a_release_is_tried_until_it_arrives(fake_gate: FakeGate) -> None:
    async with AsyncGate(GateConfig(url=fake_gate.url, **QUICK)) as gate:  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        async with gate.lease(session_id="s", reservation_tokens=9):
            fake_gate.behave("hang")
            began = loop.time()
        assert loop.time() - began < 2.0
        assert fake_gate.reserved == 9
        fake_gate.behave("recovering")
        await asyncio.to_thread(fake_gate.stop)
        await asyncio.to_thread(fake_gate.start)
        fake_gate.behave("normal")
        await until(lambda: fake_gate.reserved == 0, "the release arrived")


async def test_a_usage_report_that_is_refused_does_not_keep_the_lease(fake_gate: FakeGate) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        fake_gate.refuse_usage()
        async with gate.lease(session_id="s", reservation_tokens=9) as lease:
            lease.report_usage(prompt_tokens=1)
        await until(lambda: fake_gate.reserved == 0, "the lease is given back")


async def test_a_breaker_costs_one_time_out_in_its_period(fake_gate: FakeGate) -> None:
    config = GateConfig(url=fake_gate.url, call_timeout_s=0.3, breaker_open_s=1.0, flush_s=0)
    fake_gate.behave("hang")
    loop = asyncio.get_running_loop()
    async with AsyncGate(config) as gate:
        for _ in range(3):
            await turn(gate)
        slow = 0
        began = loop.time()
        while loop.time() - began < 3.0:
            asked_at = loop.time()
            await turn(gate)
            slow += loop.time() - asked_at > 0.2
            await asyncio.sleep(0.005)
        assert slow <= 4
        # Once it is back, the next trial closes the breaker.
        fake_gate.behave("normal")
        while (await turn(gate)).action != "admit":
            assert loop.time() - began < 30.0
            await asyncio.sleep(0.05)


async def test_an_endless_answer_is_garbage() -> None:
    async def endless(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        while True:
            writer.write(b" " * 65536)
            await writer.drain()

    async with raw_server(endless) as url, AsyncGate(GateConfig(url=url, flush_s=0, retry_for_s=0)) as gate:
        assert (await turn(gate)).reason == "unreachable"


@pytest.mark.parametrize(
    "answer",
    [
        b'{"action": "admit"}',
        b'{"action": "admit", "lease_id": 7}',
        b'{"action": "wait"}',
        b'{"action": "dance"}',
        b"[]",
        b"null",
        b"",
        b'{"action": "admit", "lease_id": "x", "ttl_s": "long", "waited_s": null, "epoch": -1}',
    ],
)
async def test_odd_answers_are_no_exceptions(answer: bytes) -> None:
    async def odd(_request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
        await writer.drain()

    async with raw_server(odd) as url, AsyncGate(GateConfig(url=url, flush_s=0.5)) as gate:
        async with gate.lease(session_id="s", reservation_tokens=3) as lease:
            assert lease.action == ("admit" if b'"x"' in answer else "bypass")
            assert lease.decision.reservation_tokens == 3
        assert await gate.state() is None or answer.startswith(b"{")
        assert await gate.report(1) == {}


async def test_a_blocked_event_loop_is_not_held_against_the_gate(fake_gate: FakeGate) -> None:
    async with AsyncGate(GateConfig(url=fake_gate.url, call_timeout_s=0.3)) as gate:
        await turn(gate)
        task = asyncio.create_task(turn(gate, 1))
        loop = asyncio.get_running_loop()
        # The call goes out, then the rollout computes for longer than a call may take.
        loop.call_later(0.002, time.sleep, 1.0)
        assert (await task).action == "admit"


async def test_a_fault_of_the_client_itself_is_a_bypass(
    fake_gate: FakeGate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncGate(fake_gate.url) as gate:
        await turn(gate)
        monkeypatch.setattr("kvgate._home._decision", lambda *_: 1 / 0)
        lease = await turn(gate)
        assert (lease.action, lease.reason) == ("bypass", "unreachable")
        monkeypatch.undo()
        await until(lambda: fake_gate.reserved == 0, "the ticket is cancelled")
    assert "a fault of the client" in caplog.text
