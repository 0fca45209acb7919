"""Cases from the field (Q01 to Q09), as a caller of this client meets them, with the real binary.

Times are shorter than in the cases. Q06 (the ceiling falls below what is reserved) has no part for a client: it is
tested beside the service.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter

from conftest import StartGate, until
from processes import Service, wait_until
from proxy import Proxy

from kvgate import AsyncGate, GateConfig

CEILING = 9_000


def reserved(service: Service) -> int:
    return int(service.state()["budget"]["reserved"])


def waiting(service: Service) -> list[str]:
    return [item["ticket_id"] for item in service.get("/v1/queue?limit=1000")["items"]]


def count_of_leases(service: Service) -> int:
    return int(service.state()["leases"]["count"])


async def turn(gate: AsyncGate, ticket: str, tokens: int, granted: list[str]) -> None:
    async with gate.lease(session_id=ticket, ticket_id=ticket, reservation_tokens=tokens) as lease:
        assert lease.action == "admit", lease.decision
        granted.append(ticket)


def test_q01_a_client_that_dies_in_its_wait_loses_its_place_after_the_grace(start_gate: StartGate) -> None:
    service = start_gate("--claim-grace-s", "1", ceiling=CEILING)
    program = """
import sys
from kvgate import Gate
with Gate(sys.argv[1]) as gate, gate.lease(session_id=sys.argv[2], ticket_id=sys.argv[2], reservation_tokens=5000):
    pass
"""

    async def main() -> None:
        async with AsyncGate(service.url) as gate:
            granted: list[str] = []
            async with gate.lease(session_id="t1", ticket_id="t1", reservation_tokens=8000):
                died = await asyncio.create_subprocess_exec(sys.executable, "-c", program, service.url, "t2")
                await until(lambda: waiting(service) == ["t2"], "t2 waits")
                behind = asyncio.create_task(turn(gate, "t3", 5000, granted))
                await until(lambda: waiting(service) == ["t2", "t3"], "t3 waits behind it")
                died.kill()
                await died.wait()
                await until(lambda: waiting(service) == ["t3"], "t2 left the line")
            await behind
            assert granted == ["t3"]

    asyncio.run(main())
    wait_until(lambda: reserved(service) == 0, "nothing is reserved")
    assert count_of_leases(service) == 0


async def test_q02_a_grant_that_meets_a_cancellation_is_owned_by_nobody_for_long(start_gate: StartGate) -> None:
    service = start_gate(ceiling=CEILING)
    async with AsyncGate(service.url) as gate:
        outcomes: Counter[str] = Counter()
        for number in range(100):
            granted: list[str] = []
            holder = gate.lease(session_id="holder", reservation_tokens=8000)
            await holder.__aenter__()
            waiter = asyncio.create_task(turn(gate, f"t{number}", 5000, granted))
            await asyncio.sleep(random.uniform(0.002, 0.006))
            release = asyncio.create_task(holder.__aexit__(None, None, None))
            await asyncio.sleep(random.uniform(0, 0.004))
            waiter.cancel()
            results = await asyncio.gather(release, waiter, return_exceptions=True)
            outcomes["granted" if granted else type(results[1]).__name__] += 1
            # The next one is not kept waiting by the one that left.
            await asyncio.wait_for(turn(gate, f"next-{number}", CEILING - 100, []), 20)
        assert sum(outcomes.values()) == 100
    wait_until(lambda: reserved(service) == 0 and count_of_leases(service) == 0, "nothing is reserved", 15)


async def test_q03_a_ticket_is_charged_once_however_often_it_asks(start_gate: StartGate) -> None:
    service = start_gate(ceiling=CEILING)
    async with AsyncGate(service.url) as gate:
        contexts = [gate.lease(session_id="s1", ticket_id="t1", reservation_tokens=3000) for _ in range(3)]
        first, second = await asyncio.gather(contexts[0].__aenter__(), contexts[1].__aenter__())
        assert first.lease_id == second.lease_id
        assert reserved(service) == 3000
        service.process.kill()
        service.start()
        third = await contexts[2].__aenter__()
        assert third.lease_id == first.lease_id
        assert reserved(service) == 3000
        for context in contexts:
            await context.__aexit__(None, None, None)
        assert reserved(service) == 0


async def test_q04_releases_too_often_and_too_late_do_nothing(start_gate: StartGate) -> None:
    service = start_gate(ceiling=CEILING)
    async with AsyncGate(service.url) as gate:
        late = await gate.lease(session_id="s2", ticket_id="t2", reservation_tokens=2000, ttl_s=1).__aenter__()
        async with gate.lease(session_id="s1", ticket_id="t1", reservation_tokens=3000) as lease:
            await asyncio.gather(*(lease.release() for _ in range(3)))
            await until(lambda: reserved(service) == 2000, "one release counts")
        assert late._timer is not None
        late._timer.cancel()
        await until(lambda: reserved(service) == 0, "t2 expired")
        await late.release()
        assert reserved(service) == 0


async def test_q05_what_fits_nowhere_passes_at_once(start_gate: StartGate) -> None:
    service = start_gate(ceiling=CEILING)
    async with AsyncGate(service.url) as gate:
        async with gate.lease(session_id="s1", reservation_tokens=9500) as large:
            assert (large.action, large.reason) == ("bypass", "oversize")
            async with gate.lease(session_id="s2", reservation_tokens=10) as small:
                assert small.action == "admit"


async def test_q07_a_proxy_that_cuts_long_answers_cuts_no_wait(start_gate: StartGate) -> None:
    service = start_gate("--admission-max-wait-s", "60", ceiling=CEILING)
    with Proxy(service.url, cut_after_s=2.0) as proxy:
        async with AsyncGate(service.url) as gate, AsyncGate(GateConfig(url=proxy.url, window_s=1.0)) as behind:
            granted: list[str] = []
            async with gate.lease(session_id="t1", reservation_tokens=8000):
                waiter = asyncio.create_task(turn(behind, "t2", 5000, granted))
                await until(lambda: waiting(service) == ["t2"], "t2 waits")
                # Several of its calls end and begin meanwhile; the place is the same.
                await asyncio.sleep(4.5)
                assert waiting(service) == ["t2"]
                assert service.get("/v1/queue")["items"][0]["age_s"] > 4.0
            await waiter
            assert granted == ["t2"]
        assert proxy.cuts == 0


async def test_q08_a_lease_of_slow_work_lives_as_long_as_its_work(start_gate: StartGate) -> None:
    service = start_gate(ceiling=CEILING)
    async with AsyncGate(service.url) as gate:
        silent = await gate.lease(session_id="s9", reservation_tokens=500, ttl_s=1).__aenter__()
        assert silent._timer is not None
        silent._timer.cancel()
        async with gate.lease(session_id="s1", reservation_tokens=8000, ttl_s=1) as lease:
            # The one that is not renewed ends; the other one outlives several of its lives.
            await until(lambda: reserved(service) == 8000, "the silent one expired")
            await asyncio.sleep(3.0)
            assert reserved(service) == 8000
            assert lease.held
        assert reserved(service) == 0


async def test_q09_a_burst_gets_what_fits_and_not_more(start_gate: StartGate) -> None:
    service = start_gate(ceiling=CEILING)
    held: list[str] = []
    done = asyncio.Event()

    async def work(gate: AsyncGate, number: int) -> None:
        async with gate.lease(session_id=f"s{number}", reservation_tokens=50) as lease:
            held.append(lease.ticket_id)
            await done.wait()

    async with AsyncGate(service.url) as gate:
        tasks = [asyncio.create_task(work(gate, number)) for number in range(2000)]
        await until(lambda: len(held) == 180, "180 run")
        state = await asyncio.to_thread(service.state)
        assert state["budget"]["reserved"] == CEILING
        await until(lambda: service.state()["queue"]["waiting"] == 1820, "the others wait")
        assert len(held) == 180
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    wait_until(lambda: reserved(service) == 0 and not waiting(service), "all is given back", 15)
