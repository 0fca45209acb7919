"""The drop-in adapter inside real Ray actors, one for each shard, all against one real gate.

`KVGATE_RAY_SHARDS` is the number of actors: 4 unless it says otherwise.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import StartGate
from processes import wait_until

from kvgate import AdmissionClient, GateConfig

ray = pytest.importorskip("ray", reason="the group `ray` of pyproject.toml is not installed")

SHARDS = int(os.environ.get("KVGATE_RAY_SHARDS", "4"))
CEILING = 4_000

# Ray warns about many things of its own.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Its sockets need a short path.
    folder = tempfile.mkdtemp(prefix="ray")
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def shard_class() -> Any:
    # Inside a function, so that the actors get it by value and need not import this file.
    class Shard:
        """What a framework's shard does with its admission client."""

        def __init__(self, client: AdmissionClient, name: str) -> None:
            self.client = client
            self.name = name
            self.most_held = 0
            self.held = 0

        async def rollout(self, requests: int) -> dict[str, int]:
            seen: Counter[str] = Counter()

            async def request(number: int) -> None:
                ticket = f"{self.name}-{number}:0"
                answer = await self.client.acquire(
                    {"ticket_id": ticket, "reservation_tokens": 100, "protected": number % 20 == 0}
                )
                seen[f"{answer['action']} {answer['reason']}"] += 1
                try:
                    self.held += answer["lease_id"] is not None
                    self.most_held = max(self.most_held, self.held)
                    await asyncio.sleep(0.01)
                finally:
                    if answer["lease_id"] is not None:
                        self.held -= 1
                        await self.client.release(answer["lease_id"])

            await asyncio.gather(*(request(number) for number in range(requests)))
            return dict(seen)

        async def cancelled(self) -> dict[str, Any]:
            await self.client.cancel(f"{self.name}-x:0")
            return await self.client.acquire({"ticket_id": f"{self.name}-x:0", "reservation_tokens": 1})

        async def metrics(self) -> dict[str, float]:
            return await self.client.metrics(reset=True)

    return ray.remote(Shard)


def test_shards_share_one_budget(cluster: None, start_gate: StartGate) -> None:
    assert cluster is None
    service = start_gate(ceiling=CEILING)
    client = AdmissionClient(GateConfig(url=service.url, client="shard"))
    shard = shard_class().options(num_cpus=0, max_concurrency=1000)
    shards = [shard.remote(client, f"shard-{number}") for number in range(SHARDS)]
    pending = [actor.rollout.remote(200) for actor in shards]
    most = 0

    def ended() -> bool:
        nonlocal most
        most = max(most, service.state()["budget"]["reserved"])
        return len(ray.wait(pending, num_returns=len(pending), timeout=0)[1]) == 0

    wait_until(ended, "all shards are done")
    seen: Counter[str] = sum((Counter(told) for told in ray.get(pending)), Counter())
    assert seen["bypass protected"] == 10 * SHARDS
    # A machine that is busy elsewhere may make a reading late, and a request a bypass.
    assert seen["admit capacity_available"] + seen["bypass degraded"] == 190 * SHARDS
    assert seen["admit capacity_available"] > 95 * SHARDS
    assert 0 < most <= CEILING
    for answer in ray.get([actor.cancelled.remote() for actor in shards]):
        assert (answer["action"], answer["reason"], answer["lease_id"]) == ("bypass", "cancelled", None)
    assert isinstance(ray.get(shards[0].metrics.remote()), dict)
    assert service.state()["budget"]["reserved"] == 0


def test_a_killed_gate_is_no_exception_in_a_shard(cluster: None, start_gate: StartGate) -> None:
    assert cluster is None
    service = start_gate(ceiling=CEILING)
    client = AdmissionClient(GateConfig(url=service.url))
    shard = shard_class().options(num_cpus=0, max_concurrency=1000)
    actor = shard.remote(client, "alone")
    service.process.kill()
    seen = ray.get(actor.rollout.remote(100))
    assert sum(seen.values()) == 100
    assert set(seen) <= {"bypass unreachable", "bypass breaker"}
