"""Everything of a client that belongs to one event loop, and the way of an acquire through it."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from ._calls import BACKGROUND_SENDERS, Calls, acquire, cancel
from ._courier import Courier
from ._room import UNKNOWN, Room, Seat
from ._wire import Reply, Wire, keep_quiet, silent, stop_all
from .config import GateConfig
from .fail_open import (
    BREAKER,
    REFUSED,
    UNREACHABLE,
    Breaker,
    LocalBypasses,
    OnceWarnings,
    Pause,
    Place,
    log,
    place_pause,
)
from .models import Decision, Scope, TicketCancelled, id_fault, number, text, tokens, whole

FLUSH_STEP_S = 0.02
"""How often a client that is being closed looks whether all is delivered."""


@dataclass
class Shared:
    """What all event loops of one process share. After a fork there is a new one."""

    config: GateConfig
    breaker: Breaker
    bypasses: LocalBypasses
    warnings: OnceWarnings


@dataclass(frozen=True)
class Ask:
    """An acquire as it is asked for."""

    ticket_id: str
    session_id: str
    request_id: str
    body: Mapping[str, Any]
    reservation_tokens: int
    fault: str | None
    """Why the gate would refuse it; then it is not even asked."""


def ask(
    *,
    session_id: str,
    prompt_tokens: int | None,
    max_new_tokens: int | None,
    reservation_tokens: int | None,
    ticket_id: str | None,
    protected: bool,
    scope: Scope,
    ttl_s: float,
    client: str | None,
) -> Ask:
    """Checks the form of a call, which is its author's, and looks at the values, which are the rollout's."""
    parts = {"prompt_tokens": whole(prompt_tokens), "max_new_tokens": whole(max_new_tokens)}
    total = {"reservation_tokens": whole(reservation_tokens)}
    if (reservation_tokens is None) == (prompt_tokens is None or max_new_tokens is None):
        raise TypeError("a lease needs prompt_tokens and max_new_tokens, or reservation_tokens")
    if reservation_tokens is not None and (prompt_tokens is not None or max_new_tokens is not None):
        raise TypeError("a lease takes prompt_tokens and max_new_tokens, or reservation_tokens, not both")
    counts = parts if reservation_tokens is None else total
    faults = [f"{name} is {value!r}" for name, value in counts.items() if tokens(value) is None]
    if ticket_id is None:
        # The session's name in front is for people who read the gate's lists.
        ticket_id = f"{str(session_id)[:64]}/{uuid.uuid4().hex}"
        faults += [f"session_id: {fault}" for fault in [id_fault(session_id)] if fault]
    else:
        names = {"session_id": session_id, "ticket_id": ticket_id}
        faults += [f"{name}: {fault}" for name, value in names.items() if (fault := id_fault(value))]
    # Of one length, so that none is a prefix of another: engines abort by prefix.
    request_id = uuid.uuid4().hex
    body: dict[str, Any] = {
        "ticket_id": ticket_id,
        "session_id": session_id,
        **counts,
        "scope": scope,
        "protected": bool(protected),
        "ttl_s": ttl_s,
        "request_id": request_id,
    }
    if client is not None:
        body["client"] = client
    known = [count for count in counts.values() if tokens(count) is not None]
    return Ask(ticket_id, session_id, request_id, body, sum(c or 0 for c in known), "; ".join(faults) or None)


class Home:
    """The client's part of one event loop."""

    def __init__(self, shared: Shared) -> None:
        self.loop = asyncio.get_running_loop()
        self.shared = shared
        config = shared.config
        self.wire = Wire(config)
        self.calls = Calls(self.wire, shared.breaker, shared.bypasses)
        self.room = Room(self.wire, shared.breaker, config, shared.warnings)
        self._background = Calls(self.wire, shared.breaker, shared.bypasses, BACKGROUND_SENDERS)
        self.courier = Courier(self._background, shared.breaker, config, shared.warnings)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        # A loop that ends closes its asynchronous generators. So a caller that forgets `aclose`, as a plain
        # `asyncio.run` does, leaves no open connection behind and no release undelivered.
        self._guard = self._close_with_loop()
        with contextlib.suppress(StopIteration):
            self._guard.__anext__().__await__().send(None)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs `work` beside the caller. Its faults are logged by itself."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(keep_quiet)
        return task

    async def close(self, within_s: float) -> None:
        """Waits a while for what is still to be delivered, then ends the connections."""
        if self._closed:
            return
        self._closed = True
        ends_at = self.loop.time() + within_s
        try:
            self.courier.resume()
            while not (self.calls.idle() and self.courier.idle()) and self.loop.time() < ends_at:  # noqa: ASYNC110
                await asyncio.sleep(FLUSH_STEP_S)
        finally:
            await self.courier.stop()
            await self.calls.stop()
            await self._background.stop()
            await self.room.stop()
            await stop_all(self._tasks)
            await self.wire.close()

    async def leave(self) -> None:
        """As `close`, by the caller's own will: with all the patience that it configured."""
        await self.close(self.shared.config.flush_s)
        await self._guard.aclose()

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self.close(self.shared.config.call_timeout_s)

    # ---- acquire -------------------------------------------------------------------------------------

    async def acquire(self, ask: Ask) -> Decision:
        """Asks until there is a decision, or reason to go on without one. Raises `TicketCancelled`, and passes
        the caller's own cancellation on when the ticket is on its way out of the gate's books."""
        if ask.fault is not None:
            self.shared.warnings.warn(f"fault/{ask.fault}", "kvgate: a request goes on without a lease: %s", ask.fault)
            return self._alone(ask, REFUSED)
        if not self.shared.breaker.allows():
            return self._alone(ask, BREAKER)
        try:
            decision = await self._decide(ask)
        except TicketCancelled:
            raise
        except Exception:  # noqa: BLE001  a fault of ours must not reach a rollout
            log.exception("kvgate: a fault of the client; a request goes on without a lease")
            self.courier.send(cancel(ask.ticket_id))
            return self._alone(ask, UNREACHABLE)
        return decision

    async def _decide(self, ask: Ask) -> Decision:
        patience_s = self.shared.config.call_timeout_s
        item = self.calls.put(acquire(ask.body), patience_s)
        place: Place | None = None
        try:
            reply = await self.calls.outcome(item)
            pause = place_pause()
            # The first time that the gate knows the ticket no more it is asked at once. One that forgets all the time
            # is not asked in a hurry.
            forgotten: Pause | None = None
            while True:
                if (decision := _decision(ask, reply)) is not None:
                    return decision
                now = self.loop.time()
                if (told := _wait(reply)) is not None:
                    place = place or Place(now)
                    place.heard(now, *told)
                    pause.reset()
                elif place is None or (reply is not UNKNOWN and reply.refuses and not reply.fails_over):
                    return self._without(ask, reply, has_place=place is not None)
                elif reply is UNKNOWN:
                    if forgotten is not None:
                        await asyncio.sleep(min(forgotten.next_s(), max(0.0, place.bound_at() - now)))
                    forgotten = forgotten or place_pause()
                elif place.grace_ends_at() <= now:
                    return self._without(ask, reply, has_place=True)
                else:
                    await asyncio.sleep(min(pause.next_s(), place.grace_ends_at() - now))
                if place.bound_at() <= self.loop.time():
                    return self._without(ask, silent("timeout"), has_place=True)
                if told is None:
                    # What the gate forgot, or could not answer, is asked for anew.
                    item = self.calls.put(acquire(ask.body), patience_s)
                    reply = await self.calls.outcome(item)
                else:
                    reply = await self.room.attend(Seat(ask.ticket_id, ask.body, place))
                    if not reply.answered:
                        return self._without(ask, reply, has_place=True)
        except asyncio.CancelledError:
            unseen = self.calls.withdraw(item)
            if place is not None or not unseen:
                # A second cancellation ends this wait, not the delivery.
                await self.courier.deliver(cancel(ask.ticket_id))
            raise

    def _without(self, ask: Ask, reply: Reply, *, has_place: bool) -> Decision:
        """Goes on without the gate."""
        refused = reply.refuses
        kind = f"{reply.status}/{reply.code}" if refused else "silent"
        self.shared.warnings.warn(f"acquire/{kind}", "kvgate: a request goes on without a lease: %s", reply)
        if has_place or reply.fails_over or not refused:
            # The gate may have granted it. A ticket that was refused at once may be another caller's.
            self.courier.send(cancel(ask.ticket_id))
        return self._alone(ask, REFUSED if refused else UNREACHABLE)

    def _alone(self, ask: Ask, reason: str) -> Decision:
        self.shared.bypasses.add(reason)
        return Decision(
            "bypass",
            reason,
            ask.ticket_id,
            ask.session_id,
            reservation_tokens=ask.reservation_tokens,
            local=True,
        )


def _decision(ask: Ask, reply: Reply) -> Decision | None:
    """The decision of an answer; None when it is none."""
    if reply.status != 200:
        return None
    body = reply.body
    action, reason, lease_id = body.get("action"), text(body.get("reason")), body.get("lease_id")
    if action == "cancelled":
        raise TicketCancelled(ask.ticket_id, ask.session_id, reason)
    if action == "admit" and isinstance(lease_id, str) and lease_id:
        given = lease_id
    elif action == "bypass":
        given = None
    else:
        return None
    reservation = tokens(body.get("reservation_tokens"))
    return Decision(
        "bypass" if given is None else "admit",
        reason,
        ask.ticket_id,
        ask.session_id,
        lease_id=given,
        reservation_tokens=ask.reservation_tokens if reservation is None else reservation,
        epoch=tokens(body.get("epoch")) or 0,
        ttl_s=number(body.get("ttl_s"), number(ask.body["ttl_s"])),
        waited_s=number(body.get("waited_s")),
        repeated=body.get("repeated") is True,
        session_reopened=body.get("session_reopened") is True,
    )


def _wait(reply: Reply) -> tuple[float, float] | None:
    """`bypass_in_s` and `claim_grace_s` of an answer that says `wait`. Without them it bounds nothing, and is none."""
    told = [number(reply.body.get(name), -1.0) for name in ("bypass_in_s", "claim_grace_s")]
    if not reply.ok or reply.body.get("action") != "wait" or min(told) < 0:
        return None
    return told[0], told[1]
