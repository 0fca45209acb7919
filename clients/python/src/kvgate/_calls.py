"""Calls that are answered at once, gathered under load.

A few calls are under way at a time. What is asked for while all of them are busy gathers, and the next free one
takes all of it in one `/v1/batch`. So a quiet client sends each call by itself and at once, while thousands of
callers share a handful of connections, and no timer decides which it is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._wire import LATE_S, Reply, Wire, segment, settled, silent, stop_all
from .fail_open import Breaker, LocalBypasses, log

SENDERS = 8
"""Calls under way at a time. More would only make smaller batches."""
BACKGROUND_SENDERS = 4
"""The same for what nobody waits long for. It has senders of its own, so that its patience holds up no others."""
BATCH_MAX = 256
"""Operations of one batch: a quarter of the gate's bound, which keeps the longest ids below its 4 MiB."""


@dataclass(frozen=True)
class Operation:
    """One call, in both its forms: by itself, and inside a batch."""

    op: str
    method: str
    path: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Body of the call by itself."""
    named: Mapping[str, Any] = field(default_factory=dict)
    """What the path says, for a batch."""
    alone: bool = False
    """Whether it never rides in a batch."""


def acquire(body: Mapping[str, Any]) -> Operation:
    """Never waits: a ticket that has to is told so at once."""
    return Operation("acquire", "POST", "/v1/leases", {**body, "wait_s": 0})


def release(lease_id: str, usage: Mapping[str, Any]) -> Operation:
    return Operation("release", "POST", f"/v1/leases/{segment(lease_id)}/release", usage, {"lease_id": lease_id})


def renew(lease_id: str, ttl_s: float) -> Operation:
    path = f"/v1/leases/{segment(lease_id)}/renew"
    return Operation("renew", "POST", path, {"ttl_s": ttl_s}, {"lease_id": lease_id})


def cancel(ticket_id: str) -> Operation:
    return Operation("cancel", "DELETE", f"/v1/tickets/{segment(ticket_id)}", {}, {"ticket_id": ticket_id})


def close(session_id: str, body: Mapping[str, Any]) -> Operation:
    """By itself, since it is answered by more than one body."""
    return Operation("close", "POST", f"/v1/sessions/{segment(session_id)}/close", body, alone=True)


class Item:
    """An operation on its way."""

    def __init__(self, operation: Operation, ends_at: float, reply: asyncio.Future[Reply]) -> None:
        self.operation = operation
        self.ends_at = ends_at
        self.reply = reply
        self.sent = False
        """Whether the gate may have seen it."""
        self.alone = operation.alone

    def settle(self, reply: Reply) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


class Calls:
    """Calls of one event loop that have the same patience."""

    def __init__(self, wire: Wire, breaker: Breaker, bypasses: LocalBypasses, senders: int = SENDERS) -> None:
        self._senders_max = senders
        self._wire = wire
        self._breaker = breaker
        self._bypasses = bypasses
        self._queue: deque[Item] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    def put(self, operation: Operation, within_s: float) -> Item:
        """Puts an operation on its way. Its reply comes within `within_s`, the time in the queue included."""
        loop = asyncio.get_running_loop()
        item = Item(operation, loop.time() + within_s, loop.create_future())
        self._queue.append(item)
        if len(self._senders) < self._senders_max:
            sender = loop.create_task(self._sender(), name="kvgate-calls")
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return item

    async def ask(self, operation: Operation, within_s: float) -> Reply:
        """Puts an operation on its way and waits for what comes of it."""
        return await self.outcome(self.put(operation, within_s))

    async def outcome(self, item: Item) -> Reply:
        # A little longer than the call itself, which knows better what became of it.
        await settled(item.reply, item.ends_at - asyncio.get_running_loop().time() + LATE_S)
        item.settle(silent("timeout"))
        return item.reply.result()

    def withdraw(self, item: Item) -> bool:
        """Takes back what nobody waits for any more; true when the gate cannot have seen it."""
        if not item.sent and not item.reply.done():
            item.reply.cancel()
        return not item.sent

    def idle(self) -> bool:
        return not self._senders and not self._queue

    async def stop(self) -> None:
        """Ends what is under way: as calls whose connection broke."""
        await stop_all(self._senders)

    async def _sender(self) -> None:
        while bunch := self._next_bunch():
            again = False
            try:
                again = await self._send(bunch)
            except Exception:  # noqa: BLE001  a fault of ours must not reach a rollout
                log.exception("kvgate: a fault of the client; %d calls are given up", len(bunch))
            finally:
                # Also when the sender itself is cancelled: nobody is left waiting.
                if not again:
                    for item in bunch:
                        item.settle(silent("cut"))

    def _next_bunch(self) -> list[Item]:
        now = asyncio.get_running_loop().time()
        bunch: list[Item] = []
        while self._queue and len(bunch) < BATCH_MAX:
            item = self._queue[0]
            if item.reply.done():
                self._queue.popleft()
            elif item.ends_at <= now:
                self._queue.popleft()
                item.settle(silent("timeout"))
            elif item.alone and bunch:
                break
            else:
                bunch.append(self._queue.popleft())
                if item.alone:
                    break
        return bunch

    async def _send(self, bunch: list[Item]) -> bool:
        """Sends a bunch and settles it; true when it went back into the queue instead."""
        within_s = max(item.ends_at for item in bunch) - asyncio.get_running_loop().time()
        bodies = [dict(item.operation.fields) for item in bunch]
        carrier = next((i for i, item in enumerate(bunch) if item.operation.op == "acquire"), None)
        told = {} if carrier is None else self._bypasses.take()
        if told and carrier is not None:
            bodies[carrier]["local_bypasses"] = told
        for item in bunch:
            item.sent = True
        replies: list[Reply] = []
        try:
            if len(bunch) == 1:
                replies = [await self._single(bunch[0].operation, bodies[0], within_s)]
            else:
                replies = await self._batch(bunch, bodies, within_s)
        finally:
            if told and not (carrier is not None and replies and replies[carrier].ok):
                self._bypasses.put_back(told)
        if not replies:
            for item in bunch:
                item.alone = True
            self._queue.extendleft(reversed(bunch))
            return True
        for item, reply in zip(bunch, replies, strict=True):
            item.settle(reply)
        return False

    async def _single(self, operation: Operation, body: Mapping[str, Any], within_s: float) -> Reply:
        sent = body if operation.method == "POST" else None
        reply = await self._wire.call(operation.method, operation.path, sent, within_s)
        self._breaker.note(failed=reply.fails_over)
        return reply

    async def _batch(self, bunch: list[Item], bodies: list[dict[str, Any]], within_s: float) -> list[Reply]:
        """The replies in order; none when one of them spoils the whole and each has to go by itself."""
        operations = [
            {"op": item.operation.op, **item.operation.named, **body} for item, body in zip(bunch, bodies, strict=True)
        ]
        reply = await self._wire.call("POST", "/v1/batch", {"operations": operations}, within_s)
        if reply.status in {400, 413, 422}:
            return []
        results = _results(reply, len(bunch)) if reply.ok else None
        if reply.ok and results is None:
            reply = silent("garbage")
        self._breaker.note(failed=reply.fails_over, calls=len(bunch))
        return [reply] * len(bunch) if results is None else results


def _results(reply: Reply, count: int) -> list[Reply] | None:
    rows = reply.body.get("results")
    if not isinstance(rows, list) or len(rows) != count:
        return None
    results = []
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("status"), int):
            return None
        body = row.get("body")
        results.append(Reply(row["status"], body if isinstance(body, dict) else {}))
    return results
