"""A way to the real gate that can be made slow or wrong: a loopback proxy, byte for byte, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["pass", "slow", "garbage", "unauthorized"]

UNAUTHORIZED = (
    b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer\r\nContent-Type: application/problem+json\r\n"
    b'Content-Length: 38\r\n\r\n{"code":"unauthorized","detail":"no."}'
)


class Proxy:
    """`mode` and `cut_after_s` may be changed at any time; they hold for what comes in from then on."""

    def __init__(self, target: str, *, slow_s: float = 0.0, cut_after_s: float | None = None) -> None:
        parts = urlsplit(target)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self.mode: Mode = "pass"
        self.slow_s = slow_s
        self.cut_after_s = cut_after_s
        self.cuts = 0
        self.url = ""
        self._stop: asyncio.Event | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        # Its connections end by themselves now; a cancelled one would be an error in asyncio's log.
        while self._connections:
            await asyncio.wait(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            upstream, up = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        pumps = [
            asyncio.create_task(self._requests(reader, up, writer)),
            asyncio.create_task(self._answers(upstream, writer)),
            asyncio.create_task(self._ended()),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in (writer, up):
                end.close()

    async def _ended(self) -> None:
        assert self._stop is not None
        await self._stop.wait()

    async def _requests(
        self, reader: asyncio.StreamReader, up: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if self.mode == "garbage":
                    back.write(b"\x16\x03\x01 what is this \x00\xff")
                    return
                if self.mode == "unauthorized":
                    back.write(UNAUTHORIZED)
                    await back.drain()
                    continue
                up.write(data)
                await up.drain()

    async def _answers(self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                try:
                    data = await asyncio.wait_for(upstream.read(65536), self.cut_after_s)
                except asyncio.TimeoutError:
                    # As load balancers do after a time without a byte.
                    self.cuts += 1
                    return
                if not data:
                    return
                if self.mode == "slow":
                    await asyncio.sleep(self.slow_s)
                writer.write(data)
                await writer.drain()
