"""`AsyncGate`: leases for asyncio rollouts.

A gate object is plain: it can be made anywhere, pickled into an actor, used from several event loops and after a
fork. Connections are made where and when they are needed. Trouble with the gate never reaches the caller; what a
caller sees is a lease, a bypass, or `TicketCancelled`.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import uuid
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ._calls import close, release, renew
from ._home import Ask, Home, Shared, ask
from ._wire import Reply, segment
from .config import GateConfig
from .fail_open import Breaker, LocalBypasses, OnceWarnings, Pause, log
from .models import (
    Action,
    Close,
    CloseMode,
    CloseReason,
    Decision,
    Scope,
    number,
    text,
    tokens,
    whole,
)

RENEWALS_A_LIFE = 3
"""A lease is renewed at this part of its life, so that two renewals may fail before it ends."""
CLOSE_WAIT_MAX_S = 60.0
"""The gate's own bound of a close's `wait_s`: one beyond it would be refused, and the close with it."""


class Lease:
    """Leave to run one request. `action` is `admit` when it holds a lease, else `bypass`."""

    def __init__(self, home: Home, ask: Ask, decision: Decision) -> None:
        self._home = home
        self._request_id = ask.request_id
        self._decision = decision
        self._usage: dict[str, Any] = {}
        self._holds = decision.lease_id is not None
        self._timer: asyncio.TimerHandle | None = None
        self._renew_in(decision.ttl_s / RENEWALS_A_LIFE)

    @property
    def action(self) -> Action:
        return self._decision.action

    @property
    def reason(self) -> str:
        """Why, in the gate's words; `unreachable`, `refused` or `breaker` when the client decided by itself."""
        return self._decision.reason

    @property
    def waited_s(self) -> float:
        """Time in the gate's queue."""
        return self._decision.waited_s

    @property
    def ticket_id(self) -> str:
        return self._decision.ticket_id

    @property
    def session_id(self) -> str:
        return self._decision.session_id

    @property
    def lease_id(self) -> str | None:
        return self._decision.lease_id

    @property
    def decision(self) -> Decision:
        """All that was answered."""
        return self._decision

    @property
    def held(self) -> bool:
        """Whether the lease is held: granted, not released, and not known to be lost."""
        return self._holds

    def engine_fields(self) -> dict[str, str]:
        """What the engine request needs, so that engines tag the session's KV: `session_id` and a `rid` of fixed
        length that is no prefix of another."""
        return {"session_id": self._decision.session_id, "rid": self._request_id}

    def report_usage(
        self,
        *,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        cached_tokens: int | None = None,
        engine: str | None = None,
    ) -> None:
        """Says what the request really used, and on which engine. It goes to the gate with the release. What is no
        token count is left out."""
        counts = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "cached_tokens": cached_tokens,
        }
        known = {name: whole(count) for name, count in counts.items()}
        self._usage.update({name: count for name, count in known.items() if tokens(count) is not None})
        if isinstance(engine, str) and engine and engine.isprintable() and len(engine.encode()) <= 2048:
            self._usage["engine"] = engine

    def report_answer(self, answer: object, *, engine: str | None = None) -> None:
        """The same from the body of an engine's answer: SGLang's `meta_info`, or `usage` of the OpenAI form."""
        body = answer if isinstance(answer, Mapping) else {}
        meta, usage = body.get("meta_info"), body.get("usage")
        if isinstance(meta, Mapping):
            counts = [meta.get(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
        elif isinstance(usage, Mapping):
            details = usage.get("prompt_tokens_details")
            cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
            counts = [usage.get("prompt_tokens"), usage.get("completion_tokens"), cached]
        else:
            counts = [None, None, None]
        self.report_usage(prompt_tokens=counts[0], completion_tokens=counts[1], cached_tokens=counts[2], engine=engine)

    async def renew(self, ttl_s: float | None = None) -> bool:
        """Begins the lease's life anew. A held lease is renewed by itself; this is for those who know that a long
        pause comes. False when there is no lease, or the gate did not answer."""
        if not self._holds or self._decision.lease_id is None:
            return False
        ttl_s = self._decision.ttl_s if ttl_s is None else ttl_s
        reply = await self._home.calls.ask(
            renew(self._decision.lease_id, ttl_s), self._home.shared.config.call_timeout_s
        )
        return self._renewed(reply)

    async def release(self) -> None:
        """Gives the lease back; once is enough, and leaving the context does it."""
        lease_id = self._end()
        if lease_id is None:
            return
        try:
            await self._home.courier.deliver(release(lease_id, dict(self._usage)))
        except Exception:  # noqa: BLE001  a fault of ours must not reach a rollout
            log.exception("kvgate: a fault of the client; lease %s is left to its TTL", lease_id)

    # ---- how it stays alive --------------------------------------------------------------------------

    def _end(self) -> str | None:
        """Ends the renewals; the lease id when there is something to give back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._holds = self._holds, False
        return self._decision.lease_id if held else None

    def _renew_in(self, seconds: float) -> None:
        if self._holds and seconds > 0:
            # A lease that nobody refers to any more must not be kept alive by its own timer.
            self._timer = self._home.loop.call_later(seconds, Lease._renew_later, weakref.ref(self))

    @staticmethod
    def _renew_later(reference: weakref.ref[Lease]) -> None:
        lease = reference()
        if lease is not None and lease._holds:
            lease._home.spawn(Lease._keep(reference, lease._home, str(lease.lease_id), lease._decision.ttl_s))

    @staticmethod
    async def _keep(reference: weakref.ref[Lease], home: Home, lease_id: str, ttl_s: float) -> None:
        """One renewal, tried again while the lease may still be alive."""
        pause = Pause(min(0.25, ttl_s / 20), 5.0)
        ends_at = home.loop.time() + ttl_s
        while home.loop.time() < ends_at:
            reply = await home.calls.ask(renew(lease_id, ttl_s), home.shared.config.call_timeout_s)
            lease = reference()
            if lease is None or not lease._holds:
                return
            if lease._renewed(reply) or not reply.fails_over:
                lease._renew_in(ttl_s / RENEWALS_A_LIFE)
                return
            del lease
            await asyncio.sleep(pause.next_s())

    def _renewed(self, reply: Reply) -> bool:
        if reply.ok:
            return True
        if reply.status in {404, 410} and not reply.may_pass_later and self._holds:
            # The work goes on: a lease is a budget, and running work is never interrupted.
            self._holds = False
            self._home.shared.warnings.warn(
                "lost",
                "kvgate: lease %s of ticket %s ended before its work: %s",
                self.lease_id,
                self.ticket_id,
                reply,
            )
        return False


class LeaseContext:
    """`async with gate.lease(...) as lease:`"""

    def __init__(self, gate: AsyncGate, ask: Ask) -> None:
        self._gate = gate
        self._ask = ask
        self._session: Session | None = None
        self._lease: Lease | None = None

    async def __aenter__(self) -> Lease:
        home = self._gate._home()
        lease = Lease(home, self._ask, await home.acquire(self._ask))
        self._lease = lease
        if self._session is not None:
            self._session._entered(lease)
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            await lease.release()
        finally:
            if self._session is not None:
                self._session._left(lease)


class Session:
    """One multi-turn program. Its end closes the session at the gate, once its own bypassed work has ended: the
    gate itself joins the leases, but it cannot see what runs without one."""

    def __init__(self, gate: AsyncGate, session_id: str, mode: CloseMode) -> None:
        self.session_id = session_id
        self._gate = gate
        self._mode: CloseMode = mode
        self._bypassed: set[Lease] = set()
        self._joined = asyncio.Event()
        self._joined.set()

    def lease(
        self,
        *,
        prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
        reservation_tokens: int | None = None,
        ticket_id: str | None = None,
        protected: bool = False,
        scope: Scope = "train",
        ttl_s: float | None = None,
    ) -> LeaseContext:
        """A lease of this session; see `AsyncGate.lease`."""
        context = self._gate.lease(
            session_id=self.session_id,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            reservation_tokens=reservation_tokens,
            ticket_id=ticket_id,
            protected=protected,
            scope=scope,
            ttl_s=ttl_s,
        )
        context._session = self
        return context

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reason: CloseReason = "terminal" if kind is None else "dropped"
        # Beside the caller, so that one that is cancelled leaves the close on its way.
        closing = self._gate._home().spawn(self._close(reason))
        if self._joined.is_set() or kind is None or not issubclass(kind, asyncio.CancelledError):
            await asyncio.wait({closing})

    async def _close(self, reason: CloseReason) -> None:
        await self._joined.wait()
        await self._gate.close_session(self.session_id, mode=self._mode, reason=reason)

    def _entered(self, lease: Lease) -> None:
        if lease.action == "bypass":
            self._bypassed.add(lease)
            self._joined.clear()

    def _left(self, lease: Lease) -> None:
        self._bypassed.discard(lease)
        if not self._bypassed:
            self._joined.set()


class AsyncGate:
    """The gate, for asyncio. One object serves a whole process; `async with` or `aclose` ends its connections."""

    def __init__(self, config: GateConfig | str | None = None) -> None:
        if isinstance(config, str):
            config = GateConfig(url=config)
        self.config = config or GateConfig()
        self._process = _Process(self.config)
        self._inherited: list[_Process] = []

    def __reduce__(self) -> tuple[type[AsyncGate], tuple[GateConfig]]:
        return AsyncGate, (self.config,)

    def __repr__(self) -> str:
        return f"AsyncGate({self.config!r})"

    async def __aenter__(self) -> AsyncGate:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Delivers what is still to be delivered, for some seconds, and ends the connections of this event loop.
        A later call opens new ones."""
        home = self._here().leave(asyncio.get_running_loop())
        if home is not None:
            await home.leave()

    # ---- leases --------------------------------------------------------------------------------------

    def lease(
        self,
        *,
        session_id: str,
        prompt_tokens: int | None = None,
        max_new_tokens: int | None = None,
        reservation_tokens: int | None = None,
        ticket_id: str | None = None,
        protected: bool = False,
        scope: Scope = "train",
        ttl_s: float | None = None,
    ) -> LeaseContext:
        """A context that begins when the request may start, and gives the lease back at its end.

        The reservation is `prompt_tokens` + `max_new_tokens`, or `reservation_tokens`. `ticket_id` names one attempt:
        a fresh one is made when it is not given. Raises `TicketCancelled` when the request must not start, and
        nothing else of its own.
        """
        asked = ask(
            session_id=session_id,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            reservation_tokens=reservation_tokens,
            ticket_id=ticket_id,
            protected=protected,
            scope=scope,
            ttl_s=self.config.ttl_s if ttl_s is None else ttl_s,
            client=self.config.client,
        )
        return LeaseContext(self, asked)

    # ---- sessions and reports ------------------------------------------------------------------------

    def session(self, session_id: str, *, mode: CloseMode = "join") -> Session:
        """A context for one multi-turn program, which is closed at its end."""
        return Session(self, session_id, mode)

    async def close_session(
        self,
        session_id: str,
        *,
        mode: CloseMode = "join",
        reason: CloseReason = "terminal",
        wait_s: float = 0.0,
    ) -> Close:
        """Lets the engines drop the session's KV. With `wait_s` it waits for the end of the close, for 60 s at most.
        A close that is not answered is tried again in the background."""
        operation = close(session_id, {"mode": mode, "reason": reason})
        home = self._home()
        reply: Reply | None
        if wait_s > 0 and not home.shared.breaker.is_open():
            wait_s = min(wait_s, CLOSE_WAIT_MAX_S)
            path = f"{operation.path}?wait_s={wait_s:g}"
            reply = await home.wire.call("POST", path, operation.fields, wait_s + self.config.call_timeout_s)
            if reply.may_pass_later:
                home.courier.send(operation)
        else:
            parcel = await home.courier.deliver(operation)
            reply = parcel.first.result() if parcel.first.done() else None
        if reply is None or reply.may_pass_later:
            return Close(session_id, "unanswered")
        if not reply.ok:
            return Close(session_id, "refused")
        engines, counts = reply.body.get("engines"), reply.body.get("counts")
        return Close(
            session_id,
            text(reply.body.get("state"), "unanswered"),
            text(reply.body.get("close_id")) or None,
            tuple(row for row in engines if isinstance(row, dict)) if isinstance(engines, list) else (),
            {name: tokens(n) or 0 for name, n in counts.items()} if isinstance(counts, dict) else {},
        )

    async def report(self, step: int, *, run: str | None = None) -> dict[str, float]:
        """What happened since this run's last step: a flat dictionary of `agentic_kv/...` keys and floats, which a
        tracker takes as it stands. A key without a value is absent. The same step again gives the same report. It is
        empty, after a warning, when the gate has none to give: asked again later, nothing of it is lost. One process
        of a run reports."""
        return self._report(await self._ask("POST", "/v1/steps", {"run": self._run(run), "step": step}))

    async def peek(self, *, run: str | None = None) -> dict[str, float]:
        """The same for the step that is under way, without ending it."""
        return self._report(await self._ask("GET", f"/v1/steps/current?run={segment(self._run(run))}", None))

    def _run(self, run: str | None) -> str:
        return run or self.config.run or self._here().run

    def _report(self, reply: Reply) -> dict[str, float]:
        metrics = reply.body.get("metrics") if reply.ok else None
        if not isinstance(metrics, dict):
            self._here().shared.warnings.warn("report", "kvgate: no step report: %s", reply)
            return {}
        return {name: float(value) for name, value in metrics.items() if number(value, math.nan) == value}

    async def state(self) -> Mapping[str, Any] | None:
        """`/v1/state`: budget, queue, leases, features. None when the gate does not answer."""
        reply = await self._ask("GET", "/v1/state", None)
        return reply.body if reply.ok else None

    def local_bypasses(self) -> Mapping[str, int]:
        """What was decided without the gate since the last acquire that got through: reason to count."""
        return self._here().shared.bypasses.peek()

    # ---- where it runs -------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Reply:
        home = self._home()
        if not home.shared.breaker.allows():
            return Reply(0, {}, "refused")
        reply = await home.wire.call(method, path, body, self.config.call_timeout_s)
        home.shared.breaker.note(failed=reply.fails_over)
        return reply

    def _here(self) -> _Process:
        process = self._process
        if process.pid != os.getpid():
            # The parent's sockets are left alone: what is kept is not closed by the garbage collector.
            self._inherited.append(process)
            self._process = process = _Process(self.config)
            log.debug("kvgate: a new process, new connections")
        return process

    def _home(self) -> Home:
        return self._here().home()


class _Process:
    """What one process has: its homes by event loop, and what they share."""

    def __init__(self, config: GateConfig) -> None:
        self.pid = os.getpid()
        self.run = uuid.uuid4().hex
        self.shared = Shared(
            config,
            Breaker(config.breaker_failures, config.breaker_open_s),
            LocalBypasses(),
            OnceWarnings(),
        )
        self._lock = threading.Lock()
        self._homes: dict[asyncio.AbstractEventLoop, Home] = {}

    def home(self) -> Home:
        loop = asyncio.get_running_loop()
        with self._lock:
            home = self._homes.get(loop)
            if home is None:
                for ended in [known for known in self._homes if known.is_closed()]:
                    del self._homes[ended]
                home = self._homes[loop] = Home(self.shared)
            return home

    def leave(self, loop: asyncio.AbstractEventLoop) -> Home | None:
        with self._lock:
            return self._homes.pop(loop, None)
