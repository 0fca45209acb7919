"""2,000 callers in one Python process wait for the same gate: memory, CPU, and how fast grants reach them.

    python bench/waiters.py [--waiters 2000] aiohttp httpx kvgate

`aiohttp` and `httpx` send the calls of the contract by hand, one connection for each waiter. `kvgate` is the
package. Each runs in a process of its own against its own gate (`KVGATE_BIN`, best a release build) in front of the
demo's fleet. Three figures count: what 2,000 open waits cost in memory and CPU, how long after one big release all
of them have their grant, and how long a lease takes from one waiter to the next when there is room for one only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from processes import Fleet, Service, binary, serve_arguments

WINDOW_S = 25.0
IDLE_S = 5.0
HANDOVERS = 300

Acquire = Callable[[str, int], Awaitable[str]]
Release = Callable[[str], Awaitable[None]]


def memory_mib() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize() / 2**20


async def measure(url: str, waiters: int, acquire: Acquire, release: Release) -> dict[str, float]:
    state = Service.__new__(Service)
    state.url = url
    ceiling = state.state()["budget"]["ceiling"]
    out: dict[str, float] = {}
    holder = await acquire("holder", ceiling)
    before_mib, before_cpu = memory_mib(), time.process_time()
    granted_at: list[float] = []

    async def wait(number: int) -> None:
        lease = await acquire(f"w{number}", ceiling // waiters)
        granted_at.append(time.perf_counter())
        await release(lease)

    async def queue_is(count: int) -> None:
        while (await asyncio.to_thread(state.state))["queue"]["waiting"] != count:
            await asyncio.sleep(0.02)

    began = time.perf_counter()
    tasks = [asyncio.create_task(wait(number)) for number in range(waiters)]
    await queue_is(waiters)
    out["queued_after_s"] = time.perf_counter() - began
    out["cpu_to_queue_s"] = time.process_time() - before_cpu
    await asyncio.sleep(1.0)
    out["memory_mib"] = memory_mib() - before_mib
    out["connections"] = sum(
        1 for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and "socket:" in str(fd.readlink())
    )
    cpu = time.process_time()
    await asyncio.sleep(IDLE_S)
    out["cpu_idle_percent"] = 100 * (time.process_time() - cpu) / IDLE_S
    cpu, released_at = time.process_time(), time.perf_counter()
    await release(holder)
    await asyncio.gather(*tasks)
    latencies = sorted(at - released_at for at in granted_at)
    out["all_granted_p50_ms"] = 1e3 * statistics.median(latencies)
    out["all_granted_p99_ms"] = 1e3 * latencies[int(len(latencies) * 0.99)]
    out["cpu_grants_s"] = time.process_time() - cpu

    # One at a time: each needs the whole budget.
    holder = await acquire("holder-2", ceiling)
    handed: list[float] = []
    released = 0.0

    async def one(number: int) -> None:
        nonlocal released
        lease = await acquire(f"h{number}", ceiling)
        handed.append(time.perf_counter() - released)
        await release_timed(lease)

    async def release_timed(lease: str) -> None:
        nonlocal released
        released = time.perf_counter()
        await release(lease)

    tasks = [asyncio.create_task(one(number)) for number in range(HANDOVERS)]
    await queue_is(HANDOVERS)
    await release_timed(holder)
    await asyncio.gather(*tasks)
    out["handover_p50_ms"] = 1e3 * statistics.median(handed)
    out["handover_p99_ms"] = 1e3 * sorted(handed)[int(HANDOVERS * 0.99)]
    return out


def body(ticket: str, tokens: int) -> dict[str, Any]:
    return {"ticket_id": ticket, "session_id": ticket, "reservation_tokens": tokens, "wait_s": WINDOW_S}


async def with_aiohttp(url: str, waiters: int) -> dict[str, float]:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:

        async def acquire(ticket: str, tokens: int) -> str:
            while True:
                async with http.post(f"{url}/v1/leases", json=body(ticket, tokens)) as answer:
                    told = await answer.json()
                if told["action"] == "admit":
                    return str(told["lease_id"])

        async def release(lease: str) -> None:
            async with http.post(f"{url}/v1/leases/{lease}/release") as answer:
                await answer.read()

        return await measure(url, waiters, acquire, release)


async def with_httpx(url: str, waiters: int) -> dict[str, float]:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as http:

        async def acquire(ticket: str, tokens: int) -> str:
            while True:
                told = (await http.post(f"{url}/v1/leases", json=body(ticket, tokens))).json()
                if told["action"] == "admit":
                    return str(told["lease_id"])

        async def release(lease: str) -> None:
            await http.post(f"{url}/v1/leases/{lease}/release")

        return await measure(url, waiters, acquire, release)


async def with_kvgate(url: str, waiters: int) -> dict[str, float]:
    from kvgate import AsyncGate
    from kvgate.aio import Lease, LeaseContext

    held: dict[str, tuple[LeaseContext, Lease]] = {}
    async with AsyncGate(url) as gate:

        async def acquire(ticket: str, tokens: int) -> str:
            context = gate.lease(session_id=ticket, ticket_id=ticket, reservation_tokens=tokens)
            lease = await context.__aenter__()
            assert lease.action == "admit", lease.decision
            held[str(lease.lease_id)] = (context, lease)
            return str(lease.lease_id)

        async def release(lease: str) -> None:
            context, _ = held.pop(lease)
            await context.__aexit__(None, None, None)

        return await measure(url, waiters, acquire, release)


KINDS = {"aiohttp": with_aiohttp, "httpx": with_httpx, "kvgate": with_kvgate}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--waiters", type=int, default=2000)
    parser.add_argument("--url", help="a gate that runs; used for the process of one kind")
    chosen = parser.parse_args()
    if chosen.url:
        print(json.dumps(asyncio.run(KINDS[chosen.kinds[0]](chosen.url, chosen.waiters))))
        return
    print(f"{chosen.waiters} waiters, Python {sys.version.split()[0]}, {binary().parent.name} build")
    with tempfile.TemporaryDirectory() as data, contextlib.ExitStack() as running:
        fleet = Fleet(Path(data, "fleet"))
        running.callback(fleet.close)
        engines = list(fleet.engines())
        for kind in chosen.kinds:
            service = Service(Path(data, kind), *serve_arguments(engines, "--admission-max-wait-s", "300"))
            service.start()
            running.callback(service.process.kill)
            service.wait_for_state(lambda state: not state["degraded"], "the fleet is read")
            command = [sys.executable, __file__, kind, "--url", service.url, "--waiters", str(chosen.waiters)]
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            figures = json.loads(result.stdout)
            print(f"{kind:8}", "  ".join(f"{name} {value:.1f}" for name, value in figures.items()), flush=True)
            service.close()


if __name__ == "__main__":
    main()
