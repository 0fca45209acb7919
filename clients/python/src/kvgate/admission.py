"""`AdmissionClient`: the gate behind the call shape of an in-process admission coordinator.

A framework that asks a coordinator actor for leases, with `acquire`, `release`, `cancel` and `metrics` and with plain
dictionaries, changes the one constructor:

    client = AdmissionClient("http://127.0.0.1:7070")    # was: a client over the actor's handle

The object can be pickled, so each shard actor may get a copy of its own. Leases that it got are renewed until they
are released. As everything here it fails open.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ._calls import cancel, release
from ._home import ask
from .aio import AsyncGate, Lease
from .config import GateConfig
from .models import Scope, TicketCancelled

PREFIX = "agentic_kv/"


def session_of_ticket(ticket_id: str) -> str:
    """The session of a ticket that is named `REQUEST:ATTEMPT`, so that the attempts of a request share one."""
    return ticket_id.rpartition(":")[0] or ticket_id


class AdmissionClient:
    """Acquire, release, cancel and metrics with the dictionaries of the in-process coordinator."""

    def __init__(
        self,
        gate: AsyncGate | GateConfig | str | None = None,
        *,
        session_of: Callable[[str], str] = session_of_ticket,
        scope: Scope = "train",
    ) -> None:
        self._gate = gate if isinstance(gate, AsyncGate) else AsyncGate(gate)
        self._session_of = session_of
        self._scope: Scope = scope
        self._leases: dict[str, Lease] = {}
        self._step = 0

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process holds none of this one's leases.
        return {**self.__dict__, "_leases": {}, "_step": 0}

    async def acquire(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Takes `ticket_id`, `reservation_tokens`, `protected` and, when it is known, `session_id`. Answers `action`,
        `reason`, `ticket_id`, `reservation_tokens`, `lease_id`, `owner_epoch` and `wait_s`; a ticket that was
        cancelled is a bypass with the reason `cancelled`."""
        ticket_id = str(request["ticket_id"])
        asked = ask(
            session_id=str(request.get("session_id") or self._session_of(ticket_id)),
            prompt_tokens=None,
            max_new_tokens=None,
            reservation_tokens=max(0, int(request["reservation_tokens"])),
            ticket_id=ticket_id,
            protected=bool(request.get("protected")),
            scope=self._scope,
            ttl_s=self._gate.config.ttl_s,
            client=self._gate.config.client,
        )
        home = self._gate._home()
        try:
            decision = await home.acquire(asked)
        except TicketCancelled:
            return _answer("bypass", "cancelled", ticket_id, asked.reservation_tokens)
        if decision.lease_id is None:
            tokens, waited_s = decision.reservation_tokens, decision.waited_s
            return _answer("bypass", decision.reason, ticket_id, tokens, wait_s=waited_s)
        self._leases[decision.lease_id] = Lease(home, asked, decision)
        return _answer(
            "admit",
            decision.reason,
            ticket_id,
            decision.reservation_tokens,
            lease_id=decision.lease_id,
            owner_epoch=decision.epoch,
            wait_s=decision.waited_s,
        )

    async def release(self, lease_id: str) -> None:
        """Gives a lease back; a second time does nothing."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            await lease.release()
        elif lease_id:
            await self._gate._home().courier.deliver(release(lease_id, {}))

    async def cancel(self, ticket_id: str) -> None:
        """Withdraws a ticket, or gives back the lease that it holds."""
        held = [lease for lease in self._leases.values() if lease.ticket_id == ticket_id]
        for lease in held:
            self._leases.pop(str(lease.lease_id), None)
            await lease.release()
        await self._gate._home().courier.deliver(cancel(ticket_id))

    async def metrics(self, reset: bool = False) -> dict[str, float]:
        """The step's values, named without their common prefix. `reset` begins the next step; without it they are
        only looked at. One process of a run asks for them."""
        if reset:
            # A step of a named run that an earlier process used would give its report once more.
            self._step = max(self._step + 1, int(time.time() * 1000))
        report = await (self._gate.report(self._step) if reset else self._gate.peek())
        return {name.removeprefix(PREFIX): value for name, value in report.items()}

    async def shutdown(self) -> None:
        """Gives back what is held and ends the connections of this event loop."""
        leases, self._leases = list(self._leases.values()), {}
        for lease in leases:
            await lease.release()
        await self._gate.aclose()


def _answer(
    action: str,
    reason: str,
    ticket_id: str,
    reservation_tokens: int,
    *,
    lease_id: str | None = None,
    owner_epoch: int = -1,
    wait_s: float = 0.0,
) -> dict[str, Any]:
    return {
        "action": action,
        "reason": reason,
        "ticket_id": ticket_id,
        "reservation_tokens": reservation_tokens,
        "lease_id": lease_id,
        "owner_epoch": owner_epoch,
        "wait_s": wait_s,
    }
