"""What must arrive: releases, cancels and closes.

Each is tried at once. What fails is kept and tried again with a growing, jittered pause for some minutes; then
it is left to the lease's TTL. Nobody has to wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ._calls import Calls, Operation, release
from ._wire import Reply, settled, stop_all
from .config import GateConfig
from .fail_open import Breaker, OnceWarnings, Pause, log

ATTEMPT_S = 5.0
"""Longest time of one attempt. Nobody waits for it, so a slow gate gets time to answer."""
PARCELS_MAX = 65_536
"""Undelivered operations of one event loop; what comes beyond is left to the TTL."""


class Parcel:
    """An operation that must arrive."""

    def __init__(self, operation: Operation, gives_up_at: float, first: asyncio.Future[Reply]) -> None:
        self.operation = operation
        self.gives_up_at = gives_up_at
        self.first = first
        """What came of the first attempt."""


class Courier:
    """The deliveries of one event loop."""

    def __init__(self, calls: Calls, breaker: Breaker, config: GateConfig, warnings: OnceWarnings) -> None:
        self._calls = calls
        self._breaker = breaker
        self._warnings = warnings
        self._patience_s = config.call_timeout_s
        self._retry_for_s = config.retry_for_s
        self._waiting: list[Parcel] = []
        self._under_way = 0
        self._runner: asyncio.Task[None] | None = None
        self._stopped = False

    def send(self, operation: Operation) -> Parcel:
        """Sends an operation and sees to its arrival."""
        loop = asyncio.get_running_loop()
        parcel = Parcel(operation, loop.time() + self._retry_for_s, loop.create_future())
        self._try(parcel)
        return parcel

    async def deliver(self, operation: Operation) -> Parcel:
        """The same, and waits for the first attempt: not longer than a call may take, and not at all for a gate
        that failed just now. A caller that is cancelled meanwhile leaves the delivery as it is."""
        is_open = self._breaker.is_open()
        parcel = self.send(operation)
        if not is_open and not await settled(parcel.first, self._patience_s):
            self._breaker.failed()
        return parcel

    def resume(self) -> None:
        """Goes on with what waits, also when its task was cancelled with all others of an ending loop."""
        if self._waiting and (self._runner is None or self._runner.done()):
            self._runner = asyncio.get_running_loop().create_task(self._retry(), name="kvgate-courier")

    async def stop(self) -> None:
        """Gives up what is still undelivered."""
        self._stopped = True
        if self._runner is not None:
            await stop_all([self._runner])

    def idle(self) -> bool:
        return not self._under_way and not self._waiting

    def _try(self, parcel: Parcel, then: Callable[[], None] | None = None) -> None:
        item = self._calls.put(parcel.operation, ATTEMPT_S)
        self._under_way += 1

        def attempted(future: asyncio.Future[Reply]) -> None:
            self._under_way -= 1
            if future.cancelled():
                return
            self._settle(parcel, future.result())
            if then is not None:
                then()

        item.reply.add_done_callback(attempted)

    def _settle(self, parcel: Parcel, reply: Reply) -> None:
        loop = asyncio.get_running_loop()
        if not parcel.first.done():
            parcel.first.set_result(reply)
        operation = parcel.operation
        may_wait = not self._stopped and len(self._waiting) < PARCELS_MAX
        if reply.may_pass_later and may_wait and loop.time() < parcel.gives_up_at:
            if not reply.fails_over:
                self._warnings.warn(
                    f"{operation.op}/{reply.status}",
                    "kvgate: a %s is refused, and tried again: %s",
                    operation.op,
                    reply,
                )
            self._waiting.append(parcel)
            self.resume()
            return
        if reply.may_pass_later:
            self._warnings.warn(
                "undelivered",
                "kvgate: a %s could not be delivered: %s; it is left to the TTL",
                operation.op,
                reply,
            )
        elif reply.status == 422 and operation.op == "release" and operation.fields:
            # The usage report is refused: the lease is given back without it.
            self._warnings.warn("usage", "kvgate: the gate does not take a usage report: %s", reply)
            self.send(release(str(operation.named["lease_id"]), {}))
        elif not reply.ok and (operation.op == "close" or reply.status not in {404, 410}):
            self._warnings.warn(f"{operation.op}/{reply.status}", "kvgate: a %s is refused: %s", operation.op, reply)

    async def _retry(self) -> None:
        """Tries what waits again and again. A success shows that the gate is back, and the pause is short anew."""
        pause = Pause(0.25, 5.0)
        while self._waiting:
            await asyncio.sleep(pause.next_s())
            parcels, self._waiting = self._waiting, []
            done = asyncio.get_running_loop().create_future()
            left = len(parcels)

            def one_less(done: asyncio.Future[None] = done) -> None:
                nonlocal left
                left -= 1
                if left == 0 and not done.done():
                    done.set_result(None)

            for parcel in parcels:
                self._try(parcel, one_less)
            await done
            if len(self._waiting) < len(parcels):
                pause.reset()
            log.debug("kvgate: %d operations are still to be delivered", len(self._waiting))
