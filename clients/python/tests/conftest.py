"""Fixtures: a clock by hand, the real binary in front of the demo's fleet, and no warning from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from processes import PATIENCE_S, Fleet, Service, binary, serve_arguments

pytest_plugins = ["kvgate.testing.plugin"]

StartGate = Callable[..., Service]


@pytest.fixture(autouse=True)
def asyncio_says_nothing(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Tasks that were lost and exceptions that nobody took show up in asyncio's own log."""
    yield
    records = caplog.get_records("call") + caplog.get_records("teardown")
    told = [record.getMessage() for record in records if record.name == "asyncio" and record.levelname != "DEBUG"]
    assert told == []


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The demo's router and engines, for all tests of this run."""
    if not binary().exists():
        pytest.fail(f"{binary()} is missing: build it, or name another with KVGATE_BIN")
    running = Fleet(tmp_path_factory.mktemp("fleet"))
    yield running
    running.close()


@pytest.fixture
def start_gate(fleet: Fleet, tmp_path: Path) -> Iterator[StartGate]:
    """Starts a real gate with admission, in front of the largest engine: its ceiling is `ceiling` tokens."""
    services: list[Service] = []

    def start(*arguments: str, ceiling: int = 360_000) -> Service:
        engine, pool = next(iter(fleet.engines().items()))
        # Rounded up, since the ceiling itself is rounded down.
        headroom = f"{ceiling / pool + 5e-7:.6f}"
        data = tmp_path / f"gate-{len(services)}"
        named = serve_arguments([engine], "--admission-headroom", headroom, *arguments)
        service = Service(data, *named)
        services.append(service)
        service.start()
        service.wait_for_state(lambda state: not state["degraded"], "the fleet is read")
        return service

    yield start
    for service in services:
        service.close()


async def until(condition: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    """Waits in an asynchronous test until `condition` holds; it is looked at from a thread."""
    ends_at = asyncio.get_running_loop().time() + within_s
    while not await asyncio.to_thread(condition):
        assert asyncio.get_running_loop().time() < ends_at, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.01)


Serve = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(answer: Serve) -> AsyncIterator[str]:
    """An address on loopback that reads requests and hands each with its connection to `answer`."""
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                named = re.search(rb"content-length: *(\d+)", head.lower())
                body = await reader.readexactly(int(named[1])) if named else b""
                await answer(head + body, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        await server.wait_closed()


async def gather_all(works: list[Awaitable[None]]) -> None:
    """Runs all of them; the first failure of any is raised once all have ended."""
    ended = await asyncio.gather(*works, return_exceptions=True)
    faults = [fault for fault in ended if isinstance(fault, BaseException)]
    logging.getLogger("tests").debug("%d of %d failed", len(faults), len(ended))
    if faults:
        raise faults[0]
