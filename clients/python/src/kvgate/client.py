"""`Gate`: the same as `AsyncGate`, for code without an event loop.

One thread of the object's own runs the asynchronous client; callers of any thread hand their calls over and wait.
The thread starts with the first call, and anew after a fork. Everything else, trouble with the gate above all, is
as in `kvgate.aio`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any, TypeVar

from . import aio
from .aio import AsyncGate
from .config import GateConfig
from .models import Action, Close, CloseMode, CloseReason, Decision, Scope

T = TypeVar("T")


class Lease:
    """Leave to run one request, as `kvgate.aio.Lease`."""

    def __init__(self, loop: _Thread, lease: aio.Lease) -> None:
        self._loop = loop
        self._lease = lease

    @property
    def action(self) -> Action:
        return self._lease.action

    @property
    def reason(self) -> str:
        return self._lease.reason

    @property
    def waited_s(self) -> float:
        return self._lease.waited_s

    @property
    def ticket_id(self) -> str:
        return self._lease.ticket_id

    @property
    def session_id(self) -> str:
        return self._lease.session_id

    @property
    def lease_id(self) -> str | None:
        return self._lease.lease_id

    @property
    def decision(self) -> Decision:
        return self._lease.decision

    @property
    def held(self) -> bool:
        return self._lease.held

    def engine_fields(self) -> dict[str, str]:
        return self._lease.engine_fields()

    def report_usage(
        self,
        *,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        cached_tokens: int | None = None,
        engine: str | None = None,
    ) -> None:
        self._lease.report_usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=cached_tokens,
            engine=engine,
        )

    def report_answer(self, answer: object, *, engine: str | None = None) -> None:
        self._lease.report_answer(answer, engine=engine)

    def renew(self, ttl_s: float | None = None) -> bool:
        return self._loop.runs() and self._loop.run(self._lease.renew(ttl_s))

    def release(self) -> None:
        if self._loop.runs():
            self._loop.run(self._lease.release())


class LeaseContext:
    """`with gate.lease(...) as lease:`"""

    def __init__(self, gate: Gate, context: aio.LeaseContext) -> None:
        self._gate = gate
        self._context = context
        self._loop: _Thread | None = None

    def __enter__(self) -> Lease:
        # The same thread at both ends, so that a fork inside the context leaves the lease to the parent.
        self._loop = self._gate._thread()
        return Lease(self._loop, self._loop.run(self._context.__aenter__()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A child process, or a gate that was closed meanwhile, has nothing to give back.
        if self._loop is not None and self._loop.runs():
            self._loop.run(self._context.__aexit__(kind, error, trace))


class Session:
    """`with gate.session(...) as session:`, as `kvgate.aio.Session`."""

    def __init__(self, gate: Gate, session: aio.Session) -> None:
        self.session_id = session.session_id
        self._gate = gate
        self._session = session

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
        context = self._session.lease(
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            reservation_tokens=reservation_tokens,
            ticket_id=ticket_id,
            protected=protected,
            scope=scope,
            ttl_s=ttl_s,
        )
        return LeaseContext(self._gate, context)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate._thread().run(self._session.__aexit__(kind, error, trace))


class Gate:
    """The gate, for threads. One object serves a whole process; `with` or `close` ends its thread."""

    def __init__(self, config: GateConfig | str | None = None) -> None:
        self._gate = AsyncGate(config)
        self.config = self._gate.config
        self._lock = threading.Lock()
        self._running: _Thread | None = None

    def __reduce__(self) -> tuple[type[Gate], tuple[GateConfig]]:
        return Gate, (self.config,)

    def __repr__(self) -> str:
        return f"Gate({self.config!r})"

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delivers what is still to be delivered, for some seconds, and ends thread and connections. A later call
        starts new ones."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.end()

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
        """A context for one request; see `AsyncGate.lease`."""
        context = self._gate.lease(
            session_id=session_id,
            prompt_tokens=prompt_tokens,
            max_new_tokens=max_new_tokens,
            reservation_tokens=reservation_tokens,
            ticket_id=ticket_id,
            protected=protected,
            scope=scope,
            ttl_s=ttl_s,
        )
        return LeaseContext(self, context)

    def session(self, session_id: str, *, mode: CloseMode = "join") -> Session:
        """A context for one multi-turn program, which is closed at its end."""
        return Session(self, self._gate.session(session_id, mode=mode))

    def close_session(
        self, session_id: str, *, mode: CloseMode = "join", reason: CloseReason = "terminal", wait_s: float = 0.0
    ) -> Close:
        """Lets the engines drop the session's KV; see `AsyncGate.close_session`."""
        return self._thread().run(self._gate.close_session(session_id, mode=mode, reason=reason, wait_s=wait_s))

    def report(self, step: int, *, run: str | None = None) -> dict[str, float]:
        """The `agentic_kv/...` values of a step; see `AsyncGate.report`."""
        return self._thread().run(self._gate.report(step, run=run))

    def peek(self, *, run: str | None = None) -> dict[str, float]:
        """The values of the step that is under way; see `AsyncGate.peek`."""
        return self._thread().run(self._gate.peek(run=run))

    def state(self) -> Mapping[str, Any] | None:
        """`/v1/state`, or None when the gate does not answer."""
        return self._thread().run(self._gate.state())

    def local_bypasses(self) -> Mapping[str, int]:
        """What was decided without the gate since the last acquire that got through: reason to count."""
        return self._gate.local_bypasses()

    def _thread(self) -> _Thread:
        running = self._running
        if running is not None and running.pid == os.getpid():
            return running
        if running is not None:
            # After a fork: the thread stayed with the parent, and the lock may be held for ever.
            self._lock = threading.Lock()
        with self._lock:
            if self._running is None or self._running.pid != os.getpid():
                self._running = _Thread(self._gate)
            return self._running


class _Thread:
    """An event loop in a thread."""

    def __init__(self, gate: AsyncGate) -> None:
        self.pid = os.getpid()
        self._gate = gate
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvgate", daemon=True)
        self._thread.start()
        # A program that ends without `close` still delivers its releases.
        reference = weakref.ref(self)
        self._at_exit = lambda: _end(reference)
        atexit.register(self._at_exit)

    def runs(self) -> bool:
        return self.pid == os.getpid() and self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the loop and waits for it. An exception in the waiting thread, such as Ctrl-C, cancels it
        and waits for what that takes."""
        ended = threading.Event()

        async def whole() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(whole(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait(self._gate.config.call_timeout_s)
            raise

    def end(self) -> None:
        """Ends loop and thread. Calls that are still under way are cancelled."""
        atexit.unregister(self._at_exit)
        if not self.runs():
            return
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._last(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _last(self) -> None:
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own and not task.get_name().startswith("kvgate")]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._gate.aclose()
        await self._loop.shutdown_asyncgens()


def _end(reference: weakref.ref[_Thread]) -> None:
    thread = reference()
    if thread is not None:
        thread.end()
