"""Acquire and release at a single Ray actor, from 16 other actors: one JSON line a cell.

Runs in the environment that run.py makes. Callers are coroutines of the 16 shards, each with one pair after the
other, as in `kvgate bench`; the coordinator is an asyncio actor with the rules of ledger.py, not durable.
"""

import argparse
import asyncio
import itertools
import json
import os
import resource
import time

import ray
from ledger import Ledger

SHARDS = 16
PROMPT_TOKENS, MAX_NEW_TOKENS = 18_432, 4_096
SLOTS = 16
CEILINGS = {"open": 1 << 40, "contended": SLOTS * (PROMPT_TOKENS + MAX_NEW_TOKENS)}


@ray.remote(num_cpus=0, max_concurrency=8_192)
class Coordinator:
    """One writer: methods run one after the other up to their first `await`."""

    async def begin(self, ceiling):
        self.ledger = Ledger(ceiling)
        self.calls = {}

    async def acquire(self, ticket, *fields):
        answer = self.ledger.acquire(time.monotonic(), ticket, *fields)
        if answer[0] != "wait":
            return answer
        call = self.calls[ticket] = asyncio.get_running_loop().create_future()
        return await call

    async def release(self, ticket, lease):
        outcome, granted = self.ledger.release(time.monotonic(), ticket, lease)
        for other, its_lease in granted:
            self.calls.pop(other).set_result(("admit", its_lease))
        return outcome

    async def sweep(self):
        for ticket, lease in self.ledger.sweep(time.monotonic()):
            self.calls.pop(ticket).set_result(("admit", lease))

    async def usage(self):
        used = resource.getrusage(resource.RUSAGE_SELF)
        with open("/proc/self/statm") as sizes:
            pages = int(sizes.read().split()[1])
        return used.ru_utime + used.ru_stime, pages * os.sysconf("SC_PAGE_SIZE")

    async def books(self):
        ledger = self.ledger
        return ledger.admits, ledger.reserved, len(ledger.queue), len(ledger.tickets), ledger.expired


@ray.remote(num_cpus=0)
class Shard:
    """Some of the callers."""

    def __init__(self, number, coordinator):
        self.number = number
        self.coordinator = coordinator
        self.used = 0

    async def ping(self):
        return self.number

    async def run(self, callers, seconds):
        end = time.monotonic() + seconds
        done = await asyncio.gather(*(self.caller(end, f"session-{self.number:04}{n:05}") for n in range(callers)))
        return joined(done)

    async def caller(self, end, session):
        acquires, releases = [], []
        while time.monotonic() < end:
            self.used += 1
            ticket = f"bench-ticket-{self.number:03}{self.used:020}"
            began = time.monotonic()
            action, lease = await self.coordinator.acquire.remote(
                ticket, session, PROMPT_TOKENS, MAX_NEW_TOKENS, "train", False, 600, "rid-0123456789", "rollout-3"
            )
            held = time.monotonic()
            assert action == "admit", action
            assert await self.coordinator.release.remote(ticket, lease) == "released"
            acquires.append(held - began)
            releases.append(time.monotonic() - held)
        return acquires, releases


def joined(runs):
    """The times of all acquires, and of all releases."""
    return [list(itertools.chain.from_iterable(times)) for times in zip(*runs, strict=True)]


def quantiles(times):
    times = sorted(times)
    return {
        name: 1e3 * times[min(len(times) - 1, int(len(times) * part))]
        for name, part in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999))
    }


def measure(coordinator, shards, scenario, connections, seconds):
    ray.get(coordinator.begin.remote(CEILINGS[scenario]))
    shares = [connections // SHARDS + (number < connections % SHARDS) for number in range(SHARDS)]
    cpu_before, _ = ray.get(coordinator.usage.remote())
    began = time.monotonic()
    runs = [shard.run.remote(share, seconds) for shard, share in zip(shards, shares, strict=True) if share]
    while len(ray.wait(runs, num_returns=len(runs), timeout=1)[0]) < len(runs):
        ray.get(coordinator.sweep.remote())
    took = time.monotonic() - began
    acquires, releases = joined(ray.get(runs))
    cpu, rss = ray.get(coordinator.usage.remote())
    pairs = len(acquires)
    assert ray.get(coordinator.books.remote()) == (pairs, 0, 0, 0, 0), "every lease was given back"
    return {
        "system": "ray",
        "transport": "ray",
        "scenario": scenario,
        "connections": connections,
        "seconds": took,
        "pairs": pairs,
        "pairs_per_s": pairs / took,
        "acquire_ms": quantiles(acquires),
        "release_ms": quantiles(releases),
        "server_cpu_us_per_pair": 1e6 * (cpu - cpu_before) / pairs,
        "rss_bytes": rss,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", default="open:64", help="SCENARIO:CONNECTIONS, by comma")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--round", type=int, default=1)
    parser.add_argument("--folder", required=True, help="a short path for Ray's own files")
    arguments = parser.parse_args()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 << 20,
        _temp_dir=arguments.folder,
        _node_ip_address="127.0.0.1",
    )
    coordinator = Coordinator.remote()
    shards = [Shard.remote(number, coordinator) for number in range(SHARDS)]
    ray.get([shard.ping.remote() for shard in shards])
    for cell in arguments.cells.split(","):
        scenario, connections = cell.split(":")
        figures = measure(coordinator, shards, scenario, int(connections), arguments.seconds)
        print(json.dumps({**figures, "round": arguments.round, "ray": ray.__version__}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
