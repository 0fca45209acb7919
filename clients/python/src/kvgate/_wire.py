"""One HTTP exchange with the gate: bounded in time and size, and never an exception for its trouble.

What came of a call is a `Reply`: an answer with its status, or none with the reason. Left to others: what an
answer means, and whether to ask again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import aiohttp
from yarl import URL

from .config import GateConfig

BODY_BYTES_MAX = 8 << 20
"""Largest answer that is read. A full batch stays far below it."""
LATE_S = 0.1
"""A timer that rings so much too late shows that the event loop was blocked."""
CATCH_UP_S = 0.25
"""What a call gets on top then, since its answer may lie in the socket already."""

OF_CALLER = frozenset({401, 403, 407, 421})
"""Refusals of the caller as such, whatever it asks for."""

Trouble = Literal["", "refused", "cut", "timeout", "garbage"]
T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """What a call brought: a status and a JSON object, or no good answer (`status` 0) and why."""

    status: int
    body: Mapping[str, Any] = field(default_factory=dict)
    trouble: Trouble = ""

    @property
    def answered(self) -> bool:
        return self.status != 0

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def fails_over(self) -> bool:
        """No answer, or one that blames the server: the same call may be taken later. Any other 4xx shows a gate
        that is well; what it refuses is the caller's."""
        return self.status == 0 or self.status >= 500 or self.status in {408, 425, 429}

    @property
    def refuses(self) -> bool:
        """Any 4xx: the gate, or what stands before it, does not take the call."""
        return 400 <= self.status < 500

    @property
    def may_pass_later(self) -> bool:
        """What fails over, or a refusal of the caller: a token, a host, a proxy on the way, whose words have no code
        of the gate. It says nothing about the call itself, which is taken once that is mended."""
        return self.fails_over or (self.refuses and (self.status in OF_CALLER or not self.code))

    @property
    def code(self) -> str:
        code = self.body.get("code")
        return code if isinstance(code, str) else ""

    def __str__(self) -> str:
        if not self.answered:
            return f"no answer ({self.trouble})"
        detail = self.body.get("detail")
        told = f": {detail}" if isinstance(detail, str) else ""
        return f"status {self.status} {self.code}{told}".rstrip()


def silent(trouble: Trouble) -> Reply:
    return Reply(0, {}, trouble)


def segment(text: str) -> str:
    """An id as one segment of a path."""
    return quote(text, safe="")


def keep_quiet(task: asyncio.Future[Any]) -> None:
    """Takes a result that nobody may be left to take, so that asyncio does not warn about it."""
    if not task.cancelled():
        task.exception()


async def stop_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits for their end."""
    stopped = list(tasks)
    for task in stopped:
        task.cancel()
    await asyncio.gather(*stopped, return_exceptions=True)


async def settled(future: asyncio.Future[Any], seconds: float) -> bool:
    """Whether `future` is done within so many seconds. It is left as it is.

    A rollout may block its event loop for seconds. That time is not held against the gate: when the timer
    itself comes late, what has arrived meanwhile is read first.
    """
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + seconds
    await asyncio.wait({future}, timeout=max(0.0, seconds))
    if not future.done() and loop.time() - ends_at > LATE_S:
        await asyncio.wait({future}, timeout=CATCH_UP_S)
    return future.done()


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T | None:
    """The result of `work`, or None when it takes longer; then it is cancelled."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(keep_quiet)
    try:
        return task.result() if await settled(task, seconds) else None
    finally:
        task.cancel()


class Wire:
    """The connections of one event loop."""

    def __init__(self, config: GateConfig) -> None:
        self._url = config.url
        headers = {"Authorization": f"Bearer {config.token}"} if config.token else {}
        self._http = aiohttp.ClientSession(
            # Times are bounded by `call`: aiohttp's own total would count the time in its queue as well.
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=config.connections_max, keepalive_timeout=60),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Proxies of the environment are for the way out, not for a gate on the same host.
            trust_env=False,
        )

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None, within_s: float) -> Reply:
        """One exchange. A connection that breaks is tried once more at once: it may have been a kept one whose
        gate has restarted since, and every call of the contract may be repeated."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + within_s
        reply = await self.call_once(method, path, body, within_s)
        if reply.trouble == "cut" and loop.time() < ends_at:
            reply = await self.call_once(method, path, body, ends_at - loop.time())
        return reply

    async def call_once(self, method: str, path: str, body: Mapping[str, Any] | None, within_s: float) -> Reply:
        """One exchange, for a caller that has its own way to ask again."""
        reply = await within(self._send(method, path, body), within_s)
        return silent("timeout") if reply is None else reply

    async def close(self) -> None:
        await self._http.close()

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Reply:
        url = URL(self._url + path, encoded=True)
        data = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            async with self._http.request(method, url, data=data, headers=headers, allow_redirects=False) as answer:
                return _reply(answer.status, await _read(answer))
        except aiohttp.ClientConnectorError:
            return silent("refused")
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError, OSError):
            return silent("cut")
        except (aiohttp.ClientError, ValueError):
            # What is no HTTP, or cannot be taken apart.
            return silent("garbage")
        except RuntimeError:
            # The client was closed under the call.
            return silent("cut")


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for piece in answer.content.iter_any():
        data += piece
        if len(data) > BODY_BYTES_MAX:
            raise aiohttp.ClientResponseError(answer.request_info, (), message="the answer is too large")
    return bytes(data)


def _reply(status: int, data: bytes) -> Reply:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if status >= 400:
        return Reply(status, body if isinstance(body, dict) else {})
    if 200 <= status < 300 and isinstance(body, dict):
        return Reply(status, body)
    return silent("garbage")
