"""The fail-open promise, with the real binary: whatever the gate does, the rollout ends well, what it costs is
bounded, and no lease is left behind. Leases live for 600 s here, so nothing is given back by time."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
from conftest import StartGate, until
from processes import Service
from proxy import Mode, Proxy
from rollouts import Costs, rollout

from kvgate import AsyncGate, GateConfig

END_S = 15.0
"""Within so much time after the end nothing is reserved any more."""
TIMEOUT_S = 2.0
SLACK_S = 2.0
"""For a machine that has other things to do."""


async def nothing_is_left(service: Service) -> None:
    await until(lambda: _free(service), "nothing is reserved, and nobody waits", END_S)


def _free(service: Service) -> bool:
    try:
        state = service.state()
    except OSError:
        return False
    return bool(state["budget"]["reserved"] == 0 and state["queue"]["waiting"] == 0 and state["leases"]["count"] == 0)


class Trouble:
    """Begins after so many turns, and ends after a time: in a thread, so that the rollout goes on meanwhile."""

    def __init__(self, after_turns: int, begin: Callable[[], None], end: Callable[[], None], for_s: float) -> None:
        self._after = after_turns
        self._begin, self._end, self._for_s = begin, end, for_s
        self.task: asyncio.Task[None] | None = None

    def __call__(self, turns: int) -> None:
        if turns == self._after:
            self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await asyncio.to_thread(self._begin)
        await asyncio.sleep(self._for_s)
        await asyncio.to_thread(self._end)


async def under_trouble(service: Service, url: str, trouble: Trouble, *, turns: int = 120) -> Costs:
    """50 sessions with room for all of them, so that nobody waits and every second is the gate's doing."""
    async with AsyncGate(GateConfig(url=url, call_timeout_s=TIMEOUT_S, flush_s=0.5)) as gate:
        costs = await rollout(gate, sessions=50, turns=turns, tokens=100, after_turn=trouble)
        assert trouble.task is not None
        await trouble.task
        print(
            f"{costs.turns} requests: {dict(costs.actions)}; at most {costs.added_most_s:.2f} s added to one, "
            f"{max(costs.added_by_session_s):.2f} s to one of 50 sessions"
        )
        assert costs.turns == 50 * turns
        assert costs.added_most_s < TIMEOUT_S + SLACK_S
        await nothing_is_left(service)
    return costs


async def test_a_killed_gate(start_gate: StartGate) -> None:
    service = start_gate()
    trouble = Trouble(500, service.process.kill, service.start, 3.0)
    costs = await under_trouble(service, service.url, trouble)
    # A refused connection costs no time at all.
    assert max(costs.added_by_session_s) < 10.0
    assert costs.actions["admit capacity_available"] >= 500
    assert costs.actions["bypass breaker"] > 0


async def test_a_gate_that_hangs(start_gate: StartGate) -> None:
    service = start_gate()
    trouble = Trouble(500, service.process.stand_still, service.process.go_on, 6.0)
    costs = await under_trouble(service, service.url, trouble)
    # Some pay one time-out when it begins, and one call is tried in each period of the breaker.
    assert max(costs.added_by_session_s) < 3 * TIMEOUT_S + 5.0
    assert costs.actions["bypass unreachable"] > 0
    assert costs.actions["bypass breaker"] > costs.actions["bypass unreachable"]


@pytest.mark.parametrize("mode", ["slow", "garbage", "unauthorized"])
async def test_a_gate_that_is_slow_or_wrong(start_gate: StartGate, mode: Mode) -> None:
    service = start_gate()
    with Proxy(service.url, slow_s=TIMEOUT_S + 1.0) as proxy:

        def change(to: Mode) -> Callable[[], None]:
            return lambda: setattr(proxy, "mode", to)

        trouble = Trouble(500, change(mode), change("pass"), 4.0)
        costs = await under_trouble(service, proxy.url, trouble)
        assert costs.actions["admit capacity_available"] >= 500
        if mode == "unauthorized":
            assert costs.actions["bypass refused"] > 0
        else:
            assert costs.actions["bypass unreachable"] > 0


async def test_a_restart_in_the_middle_of_500_sessions(start_gate: StartGate) -> None:
    # 40 of 500 run at a time, so hundreds wait when the gate dies.
    service = start_gate("--admission-max-wait-s", "120", ceiling=4_000)
    waiting: list[str] = []
    granted: dict[str, int] = {}
    bypassed: Counter[str] = Counter()

    async def session(gate: AsyncGate, number: int) -> None:
        for turn in range(3):
            ticket = f"s{number}/{turn}"
            async with gate.lease(session_id=f"s{number}", ticket_id=ticket, reservation_tokens=100) as lease:
                if lease.lease_id is None:
                    bypassed[lease.reason] += 1
                else:
                    # A lease id begins with the number of its grant.
                    granted[ticket] = int(lease.lease_id.partition("-")[0])
                await asyncio.sleep(random.uniform(0.05, 0.15))

    async def restart() -> None:
        await until(lambda: len(granted) > 200, "the rollout is under way")

        def kill() -> None:
            items = service.get("/v1/queue?limit=1000")["items"]
            waiting.extend(item["ticket_id"] for item in items)
            service.process.kill()
            service.start()

        await asyncio.to_thread(kill)

    async with AsyncGate(service.url) as gate:
        restarting = asyncio.create_task(restart())
        await asyncio.gather(*(session(gate, number) for number in range(500)))
        await restarting
        assert len(granted) + sum(bypassed.values()) == 1500
        assert set(bypassed) <= {"unreachable", "breaker", "degraded"}
        print(f"{len(granted)} granted, {dict(bypassed)}; {len(waiting)} waited at the kill")
        # Who had a place kept it, and the order is the one of before.
        kept = [ticket for ticket in waiting if ticket in granted]
        assert len(waiting) > 200
        assert len(kept) > 0.9 * len(waiting)
        print(f"{len(kept)} of them were granted after it")
        order = [granted[ticket] for ticket in kept]
        assert order == sorted(order)
        await nothing_is_left(service)


async def test_a_cancellation_storm(start_gate: StartGate, caplog: pytest.LogCaptureFixture) -> None:
    service = start_gate(ceiling=10_000)
    ended: Counter[str] = Counter()

    async def work(gate: AsyncGate, number: int) -> None:
        try:
            async with gate.lease(session_id=f"s{number}", reservation_tokens=100):
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended["cancelled"] += 1
            raise

    async with AsyncGate(service.url) as gate:
        tasks = [asyncio.create_task(work(gate, number)) for number in range(2000)]
        order = random.sample(tasks, len(tasks))
        for start in range(0, len(order), 100):
            # In all moments: before the call, in it, in the wait, in the work, in the release.
            for task in order[start : start + 100]:
                task.cancel()
            await asyncio.sleep(random.uniform(0.0, 0.1))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert Counter(type(result).__name__ for result in results) == {"CancelledError": 2000}
        await nothing_is_left(service)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_local_bypasses_reach_the_real_gate(start_gate: StartGate) -> None:
    service = start_gate()
    service.process.kill()
    config = GateConfig(url=service.url, breaker_open_s=0.2)
    async with AsyncGate(config) as gate:
        for number in range(20):
            async with gate.lease(session_id=f"s{number}", reservation_tokens=1) as lease:
                assert lease.action == "bypass"
        assert sum(gate.local_bypasses().values()) == 20
        await asyncio.to_thread(service.start)
        began = time.monotonic()
        while True:
            async with gate.lease(session_id="s", reservation_tokens=1) as lease:
                if lease.action == "admit":
                    break
            assert time.monotonic() - began < 30
        assert gate.local_bypasses() == {}
