"""Where waiting tickets stand.

Few tickets ask again each by itself. From a number on they share calls of `/v1/wait`, so that thousands of
waiters need a handful of connections. Either way a call is open for each of them nearly all the time, which is
what keeps its place. While the gate is away they ask again with a growing pause, each until its grace or its
hard bound has ended.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from typing import Any

from ._wire import Reply, Wire, silent, stop_all
from .config import GateConfig
from .fail_open import Breaker, OnceWarnings, Place, jittered, log, place_pause
from .models import number

SEATS_MAX = 128
"""Tickets of one shared call. A decision for one makes the others ask again, so a call is kept small."""
GATHER_S = 0.005
"""How long tickets that come one by one gather before they share a call."""
BEAT_S = 1.0
"""Small shared calls end together at this beat, so that they merge."""
SMALL = 32
"""A shared call of fewer tickets is small."""
REST_MIN_S = 0.1
"""Shortest rest when the gate answers before its time, whatever it says."""

UNKNOWN = Reply(404, {"code": "ticket_not_found"})
"""The gate does not know the ticket any more: it is to be acquired again."""


class Seat:
    """A ticket that waits."""

    def __init__(self, ticket_id: str, body: Mapping[str, Any], place: Place) -> None:
        self.ticket_id = ticket_id
        self.body = body
        self.place = place
        self.news: asyncio.Future[Reply] | None = None

    def tell(self, reply: Reply) -> None:
        if self.news is not None and not self.news.done():
            self.news.set_result(reply)

    def waits(self) -> bool:
        return self.news is not None and not self.news.done()


class Room:
    """The waiting tickets of one event loop."""

    def __init__(self, wire: Wire, breaker: Breaker, config: GateConfig, warnings: OnceWarnings) -> None:
        self._wire = wire
        self._breaker = breaker
        self._warnings = warnings
        self._window_s = config.window_s
        self._slack_s = config.call_timeout_s
        self._share_from = config.wait_calls_from
        self._shares = True
        """False once the gate, or a proxy before it, has no shared calls."""
        self._waiting = 0
        self._idle: list[Seat] = []
        self._gathering = False
        self._calls: set[asyncio.Task[None]] = set()

    async def attend(self, seat: Seat) -> Reply:
        """Waits for news of a ticket: a decision, `wait` once more, `UNKNOWN`, a refusal, or no answer when the
        caller has to go on by itself."""
        self._waiting += 1
        try:
            if not self._shares or self._waiting < self._share_from:
                return await self._ask_alone(seat)
            return await self._ask_together(seat)
        finally:
            self._waiting -= 1

    async def stop(self) -> None:
        """Ends the shared calls."""
        await stop_all(self._calls)

    # ---- one ticket, one call ------------------------------------------------------------------------

    async def _ask_alone(self, seat: Seat) -> Reply:
        now = asyncio.get_running_loop().time
        pause = place_pause()
        while True:
            window_s = max(0.0, min(self._window_s, seat.place.bound_at() - now()))
            body = {**seat.body, "wait_s": round(window_s, 3)}
            within_s = max(0.0, min(window_s + self._slack_s, seat.place.bound_at() - now()))
            asked_at = now()
            reply = await self._wire.call_once("POST", "/v1/leases", body, within_s)
            self._breaker.note(failed=reply.fails_over)
            if reply.status == 202:
                await _rest(now() - asked_at, window_s, number(reply.body.get("poll_after_s"), BEAT_S))
            if not _away(reply):
                return reply
            if not await self._bear(reply, [seat], pause.next_s()):
                return silent("timeout")

    # ---- many tickets, one call ----------------------------------------------------------------------

    async def _ask_together(self, seat: Seat) -> Reply:
        loop = asyncio.get_running_loop()
        seat.news = loop.create_future()
        self._join([seat])
        try:
            await asyncio.wait({seat.news}, timeout=max(0.0, seat.place.bound_at() - loop.time()))
            return seat.news.result() if seat.news.done() else silent("timeout")
        finally:
            seat.news = None

    def _join(self, seats: list[Seat]) -> None:
        self._idle += seats
        if self._idle and not self._gathering:
            self._gathering = True
            asyncio.get_running_loop().call_later(GATHER_S, self._seat_all)

    def _seat_all(self) -> None:
        self._gathering = False
        idle, self._idle = [seat for seat in self._idle if seat.waits()], []
        for start in range(0, len(idle), SEATS_MAX):
            call = asyncio.get_running_loop().create_task(
                self._share(idle[start : start + SEATS_MAX]), name="kvgate-wait"
            )
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _share(self, seats: list[Seat]) -> None:
        """Keeps one shared call open for some tickets. When few of them are left, they look for others to join."""
        now = asyncio.get_running_loop().time
        pause = place_pause()
        try:
            while seats := [seat for seat in seats if seat.waits()]:
                window_s = self._window_of(seats, now())
                body = {"ticket_ids": [seat.ticket_id for seat in seats], "wait_s": round(window_s, 3)}
                asked_at = now()
                reply = await self._wire.call_once("POST", "/v1/wait", body, window_s + self._slack_s)
                if reply.ok and not isinstance(reply.body.get("results"), list):
                    # No sign of life: whoever answers so is not the gate.
                    reply = silent("garbage")
                self._breaker.note(failed=reply.fails_over)
                if _away(reply):
                    if not await self._bear(reply, seats, pause.next_s()):
                        return
                    continue
                pause = place_pause()
                if not reply.ok:
                    # It takes no shared call, or cannot answer it now: each asks by itself, and hears whether that
                    # is refused as well.
                    if reply.status in {404, 405}:
                        self._unshare(reply)
                    for seat in seats:
                        seat.tell(UNKNOWN)
                    return
                if not self._hand_out(reply, seats, now()):
                    await _rest(now() - asked_at, window_s, BEAT_S)
                if len(seats) < SMALL:
                    return
        except Exception:  # noqa: BLE001  a fault of ours must not reach a rollout
            log.exception("kvgate: a fault of the client; %d waiting requests go on without a lease", len(seats))
            for seat in seats:
                seat.tell(silent("garbage"))
        finally:
            self._join([seat for seat in seats if seat.waits()])

    def _unshare(self, reply: Reply) -> None:
        """Where one shared call leads nowhere, the next does as well."""
        self._shares = False
        self._warnings.warn("wait", "kvgate: no shared waiting calls here, each ticket asks by itself: %s", reply)

    def _window_of(self, seats: list[Seat], now: float) -> float:
        if len(seats) < SMALL:
            beat_s = BEAT_S * math.ceil(now / BEAT_S + 0.2) - now
            return min(self._window_s, beat_s)
        # Not all at the same time.
        return self._window_s * random.uniform(0.75, 1.0)

    def _hand_out(self, reply: Reply, seats: list[Seat], now: float) -> bool:
        """Tells the decided ones; whether there were any."""
        by_ticket = {seat.ticket_id: seat for seat in seats}
        for seat in seats:
            seat.place.heard(now)
        for result in reply.body["results"]:
            ticket_id = result.get("ticket_id") if isinstance(result, dict) else None
            decided = by_ticket.get(ticket_id) if isinstance(ticket_id, str) else None
            # One that still waits has no news: it stays in the shared call.
            if decided is not None and result.get("action") != "wait":
                decided.tell(UNKNOWN if result.get("action") == "unknown" else Reply(200, result))
        return not all(seat.waits() for seat in seats)

    # ---- while the gate is away ----------------------------------------------------------------------

    async def _bear(self, reply: Reply, seats: list[Seat], pause_s: float) -> bool:
        """Pauses before the next attempt. Tells those whose time is over to go on; false when all are told."""
        now = asyncio.get_running_loop().time
        if reply.trouble == "cut":
            for seat in seats:
                seat.place.cut(now())
        left = [seat for seat in seats if seat.place.grace_ends_at() > now()]
        if left:
            next_end_s = min(seat.place.grace_ends_at() for seat in left) - now()
            await asyncio.sleep(min(pause_s, next_end_s))
        over = [seat for seat in seats if seat.place.grace_ends_at() <= now()]
        for seat in over:
            seat.tell(silent("timeout"))
        return len(over) < len(seats)


async def _rest(took_s: float, window_s: float, rest_s: float) -> None:
    """A gate with too many open calls says `wait` at once. Then it is not asked again at once."""
    if took_s < window_s / 2:
        await asyncio.sleep(min(jittered(max(rest_s, REST_MIN_S)), window_s - took_s))


def _away(reply: Reply) -> bool:
    """Silent, starting or stopping: it may be back within the grace, and the place with it."""
    if reply.status == 503:
        return reply.code in {"draining", "recovering", "overloaded", ""}
    return reply.fails_over
