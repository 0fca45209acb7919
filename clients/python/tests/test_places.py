"""Where a gate object may be used: several loops, threads, after a fork, and without an event loop at all."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from kvgate import AdmissionClient, AsyncGate, Gate, GateConfig, TicketCancelled
from kvgate.testing import FakeGate

ALL = 1_000_000


async def one(gate: AsyncGate) -> str:
    async with gate.lease(session_id="s", reservation_tokens=1) as lease:
        return lease.action


def test_one_gate_serves_one_loop_after_another_and_leaves_nothing_open(fake_gate: FakeGate) -> None:
    gate = AsyncGate(fake_gate.url)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            # No `aclose`: the end of the loop is the end of its connections.
            assert asyncio.run(one(gate)) == "admit"
            gc.collect()
    assert fake_gate.reserved == 0


def test_one_gate_serves_loops_in_many_threads(fake_gate: FakeGate) -> None:
    gate = AsyncGate(fake_gate.url)

    async def many() -> Counter[str]:
        return Counter(await asyncio.gather(*(one(gate) for _ in range(50))))

    with ThreadPoolExecutor(4) as pool:
        actions = list(pool.map(lambda _: asyncio.run(many()), range(8)))
    assert sum(actions, Counter()) == {"admit": 400}
    assert fake_gate.reserved == 0


def test_a_loop_that_ends_still_delivers_what_it_owes(fake_gate: FakeGate) -> None:
    gate = AsyncGate(GateConfig(url=fake_gate.url, call_timeout_s=5.0))

    async def main() -> None:
        context = gate.lease(session_id="s", reservation_tokens=9)
        await context.__aenter__()
        fake_gate.behave("recovering")
        await context.__aexit__(None, None, None)
        assert fake_gate.reserved == 9
        fake_gate.behave("normal")

    asyncio.run(main())
    assert fake_gate.reserved == 0


def test_tasks_that_a_program_leaves_behind_give_back_what_they_hold(fake_gate: FakeGate) -> None:
    gate = AsyncGate(fake_gate.url)

    async def hold(tokens: int) -> None:
        async with gate.lease(session_id="s", reservation_tokens=tokens):
            await asyncio.Event().wait()

    async def main() -> None:
        tasks = [asyncio.create_task(hold(tokens)) for tokens in [1, 2, 3, ALL]]
        while len(fake_gate.leases) != 3 or len(fake_gate.waiting) != 1:
            await asyncio.sleep(0.01)
        assert len(tasks) == 4

    asyncio.run(main())
    assert fake_gate.reserved == 0
    assert fake_gate.waiting == []


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_has_connections_and_counts_of_its_own(
    fake_gate: FakeGate, method: Literal["fork", "spawn"]
) -> None:
    gate = AsyncGate(fake_gate.url)
    gate._here().shared.bypasses.add("unreachable")

    async def main() -> str:
        async with gate.lease(session_id="parent", ticket_id="parent", reservation_tokens=1):
            context = multiprocessing.get_context("fork" if method == "fork" else "spawn")
            with warnings.catch_warnings():
                # Python 3.12 warns about any fork of a program with threads.
                warnings.simplefilter("ignore", DeprecationWarning)
                child = context.Process(target=child_of, args=(gate,))  # type: ignore[attr-defined]
                child.start()
            await asyncio.to_thread(child.join, 60)
            assert child.exitcode == 0
            assert fake_gate.leases == ["parent"]
            return await one(gate)

    assert asyncio.run(main()) == "admit"
    assert fake_gate.reserved == 0


def child_of(gate: AsyncGate) -> None:
    assert gate.local_bypasses() == {}
    assert asyncio.run(one(gate)) == "admit"
    asyncio.run(gate.aclose())


def test_runs_differ_between_processes() -> None:
    gate = AsyncGate()
    copy = pickle.loads(pickle.dumps(gate))
    assert gate._here().run != copy._here().run


# ---- without an event loop ---------------------------------------------------------------------------


def test_the_synchronous_gate_does_the_same(fake_gate: FakeGate) -> None:
    with Gate(fake_gate.url) as gate:
        with gate.lease(session_id="s", prompt_tokens=4, max_new_tokens=5) as lease:
            assert (lease.action, lease.reason, lease.held) == ("admit", "capacity_available", True)
            assert fake_gate.reserved == lease.decision.reservation_tokens == 9
            assert lease.renew()
            assert len(lease.engine_fields()["rid"]) == 32
            assert lease.lease_id == "fake-1"
            lease.report_answer({"meta_info": {"prompt_tokens": 4, "completion_tokens": 2, "cached_tokens": 0}})
        with gate.session("s") as session, session.lease(reservation_tokens=1, protected=True) as lease:
            assert lease.reason == "protected"
            assert lease.waited_s == 0
        assert gate.close_session("x", mode="abort").state == "done"
        assert gate.report(1) == {"agentic_kv/budget/reserved": 0.0}
        assert gate.peek() == {"agentic_kv/admission/waiting": 0.0}
        assert (gate.state() or {})["leases"]["count"] == 0
        assert gate.local_bypasses() == {}
    assert [session for session, _ in fake_gate.closes] == ["s", "x"]
    assert fake_gate.usage == [{"prompt_tokens": 4, "completion_tokens": 2, "cached_tokens": 0}]


def test_many_threads_share_one_gate(fake_gate: FakeGate) -> None:
    fake_gate.set_capacity(20)
    with Gate(fake_gate.url) as gate:

        def work(number: int) -> str:
            with gate.lease(session_id=f"s{number}", reservation_tokens=10) as lease:
                return lease.action

        with ThreadPoolExecutor(64) as pool:
            assert Counter(pool.map(work, range(300))) == {"admit": 300}
    assert fake_gate.reserved == 0


def test_a_cancelled_ticket_raises_without_a_loop_too(fake_gate: FakeGate) -> None:
    with Gate(fake_gate.url) as gate:
        with gate.lease(session_id="s", ticket_id="t", reservation_tokens=1):
            pass
        with pytest.raises(TicketCancelled), gate.lease(session_id="s", ticket_id="t", reservation_tokens=1):
            raise AssertionError("it must not start")


def test_ctrl_c_in_a_wait_withdraws_the_ticket(fake_gate: FakeGate) -> None:
    with Gate(fake_gate.url) as gate, gate.lease(session_id="holder", reservation_tokens=ALL):

        def interrupt() -> None:
            fake_gate.wait_for(lambda gate: len(gate.waiting) == 1)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt), gate.lease(session_id="s", reservation_tokens=1):
            raise AssertionError("there is no room")
        thread.join()
        assert fake_gate.waiting == []


def test_closing_ends_what_is_under_way_and_a_later_call_starts_anew(fake_gate: FakeGate) -> None:
    gate = Gate(fake_gate.url)
    with gate.lease(session_id="s", reservation_tokens=1):
        pass
    threads = {thread.name for thread in threading.enumerate()}
    assert "kvgate" in threads
    gate.close()
    assert "kvgate" not in {thread.name for thread in threading.enumerate()}
    with gate.lease(session_id="s", reservation_tokens=1) as lease:
        assert lease.action == "admit"
    gate.close()


def test_a_gate_that_is_closed_under_a_lease_is_no_exception(fake_gate: FakeGate) -> None:
    gate = Gate(fake_gate.url)
    with gate.lease(session_id="s", reservation_tokens=1) as lease:
        gate.close()
        assert not lease.renew()
        lease.release()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_leaves_the_thread_with_the_parent(fake_gate: FakeGate) -> None:
    gate = Gate(fake_gate.url)
    with gate.lease(session_id="parent", ticket_id="parent", reservation_tokens=1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            status = 1
            try:
                with gate.lease(session_id="child", reservation_tokens=1) as lease:
                    status = 0 if lease.action == "admit" else 2
                gate.close()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert fake_gate.leases == ["parent"]
    gate.close()
    assert fake_gate.reserved == 0


def test_a_program_that_just_ends_delivers_its_releases(fake_gate: FakeGate) -> None:
    program = f"""
from kvgate import Gate
gate = Gate({fake_gate.url!r})
context = gate.lease(session_id="s", reservation_tokens=5)
lease = context.__enter__()
assert lease.action == "admit"
lease.release()
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert fake_gate.reserved == 0


# ---- in the shape of an in-process coordinator -------------------------------------------------------


async def test_the_admission_client_speaks_in_dictionaries(fake_gate: FakeGate) -> None:
    client = AdmissionClient(fake_gate.url)
    asked = {"ticket_id": "req-1:0", "reservation_tokens": 30, "protected": False}
    answer = await client.acquire(asked)
    assert answer == {
        "action": "admit",
        "reason": "capacity_available",
        "ticket_id": "req-1:0",
        "reservation_tokens": 30,
        "lease_id": "fake-1",
        "owner_epoch": 1,
        "wait_s": answer["wait_s"],
    }
    assert fake_gate.requests[0].body["session_id"] == "req-1"
    again = await client.acquire(asked)
    assert again["lease_id"] == "fake-1"
    assert fake_gate.reserved == 30
    await client.release("fake-1")
    await client.release("fake-1")
    await client.release("never-issued")
    assert fake_gate.reserved == 0

    protected = await client.acquire({"ticket_id": "req-2:0", "reservation_tokens": 1, "protected": True})
    assert (protected["action"], protected["reason"]) == ("bypass", "protected")
    assert (protected["lease_id"], protected["owner_epoch"]) == (None, -1)

    held = await client.acquire({"ticket_id": "req-3:0", "reservation_tokens": 1, "session_id": "s-3"})
    assert held["action"] == "admit"
    await client.cancel("req-3:0")
    assert fake_gate.reserved == 0
    await client.cancel("req-4:0")
    late = await client.acquire({"ticket_id": "req-4:0", "reservation_tokens": 1})
    assert (late["action"], late["reason"]) == ("bypass", "cancelled")

    assert await client.metrics() == {"admission/waiting": 0.0}
    assert await client.metrics(reset=True) == {"budget/reserved": 0.0}
    assert await client.metrics(reset=True) == {"budget/reserved": 0.0}
    steps = [request.body["step"] for request in fake_gate.requests if request.path == "/v1/steps"]
    assert len(steps) == len(set(steps)) == 2
    await client.acquire({"ticket_id": "req-5:0", "reservation_tokens": 1})
    await client.shutdown()
    assert fake_gate.reserved == 0


async def test_the_admission_client_fails_open(fake_gate: FakeGate) -> None:
    fake_gate.stop()
    client = AdmissionClient(GateConfig(url=fake_gate.url, flush_s=0))
    answer = await client.acquire({"ticket_id": "r:0", "reservation_tokens": 5})
    assert (answer["action"], answer["reason"], answer["lease_id"]) == ("bypass", "unreachable", None)
    assert await client.metrics(reset=True) == {}
    await client.shutdown()
