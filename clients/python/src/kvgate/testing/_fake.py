"""The fake gate: see the package."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import unquote

from aiohttp import web

Behaviour = Literal["normal", "hang", "cut", "garbage", "empty", "draining", "recovering", "overloaded", "unauthorized"]
"""What a path does: answer, stay silent, break the connection, answer with bytes that are no JSON or with an object
that says nothing, or with a problem."""

PROBLEMS = {"draining": 503, "recovering": 503, "overloaded": 503, "unauthorized": 401}
PATIENCE_S = 30.0
T = TypeVar("T")


@dataclass(frozen=True)
class Recorded:
    """A request as it came in."""

    method: str
    path: str
    body: Mapping[str, Any]


@dataclass
class _Ticket:
    ticket_id: str
    session_id: str
    sent: tuple[Any, ...]
    tokens: int
    state: Literal["waiting", "held", "bypassed", "ended"] = "waiting"
    reason: str = ""
    lease_id: str = ""
    enqueued_at: float = 0.0
    waited_s: float = 0.0
    told: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)


class FakeGate:
    """A gate in this process. The properties may be read from any thread."""

    def __init__(
        self, *, capacity_tokens: int = 1_000_000, max_wait_s: float = 30.0, claim_grace_s: float = 10.0
    ) -> None:
        self._capacity = capacity_tokens
        self._max_wait_s = max_wait_s
        self._claim_grace_s = claim_grace_s
        self._behaviours: dict[str, Behaviour | tuple[int, str]] = {}
        self._slow_s = 0.0
        self._ages = self._waits = self._takes_usage = True
        self._tickets: dict[str, _Ticket] = {}
        self._queue: list[_Ticket] = []
        self._by_lease: dict[str, _Ticket] = {}
        self._issued = 0
        self._requests: list[Recorded] = []
        self._changed = threading.Condition()
        self.bypass_reason: str | None = None
        """When set, every new acquire is a bypass with this reason."""
        self.granted: list[str] = []
        """Tickets in the order of their grants."""
        self.usage: list[Mapping[str, Any]] = []
        """What releases reported."""
        self.local_bypasses: Counter[str] = Counter()
        """What callers decided by themselves and told."""
        self.closes: list[tuple[str, Mapping[str, Any]]] = []
        """Sessions that were closed, with the body of the call."""
        self.serves_sessions = True
        """Whether closes and step reports are served."""
        self._hold = _socket(0)
        self._port = int(self._hold.getsockname()[1])
        self._runner: web.AppRunner | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-gate", daemon=True)

    # ---- life ----------------------------------------------------------------------------------------

    def __enter__(self) -> FakeGate:
        self._thread.start()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()
        self._hold.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listens, at the same port as before."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(PATIENCE_S)

    def stop(self) -> None:
        """Breaks all connections and refuses new ones. Leases and queue stay, as in a store."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(PATIENCE_S)

    async def _start(self) -> None:
        if self._runner is not None:
            return
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.SockSite(self._runner, _socket(self._port), backlog=4096).start()

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        server = runner.server
        for site in list(runner.sites):
            await site.stop()
        for connection in list(server.connections) if server is not None else []:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def _end(self) -> None:
        # A connection may have been accepted in the last moment: what is left of it is ended in order.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    # ---- what tests do and see -----------------------------------------------------------------------

    def behave(self, behaviour: Behaviour, path: str = "*") -> None:
        """From now on paths that begin with `path` behave so; `*` stands for all others."""
        self._do(lambda: self._behaviours.__setitem__(path, behaviour))

    def refuse(self, status: int, path: str = "*", *, code: str = "") -> None:
        """The same with a refusal of this status. Without a code it is one that a proxy on the way makes up."""
        self._do(lambda: self._behaviours.__setitem__(path, (status, code)))

    def slow(self, seconds: float) -> None:
        """Every answer takes so much longer from now on."""
        self._do(lambda: setattr(self, "_slow_s", seconds))

    def set_capacity(self, tokens: int) -> None:
        """Another ceiling from now on; waiting tickets that fit are granted."""

        def change() -> None:
            self._capacity = tokens
            self._pass()

        self._do(change)

    @property
    def reserved(self) -> int:
        return self._do(lambda: sum(ticket.tokens for ticket in self._by_lease.values()))

    @property
    def leases(self) -> list[str]:
        """Tickets that hold a lease."""
        return self._do(lambda: [ticket.ticket_id for ticket in self._by_lease.values()])

    @property
    def waiting(self) -> list[str]:
        """Tickets in the queue, the head first."""
        return self._do(lambda: [ticket.ticket_id for ticket in self._queue])

    @property
    def requests(self) -> list[Recorded]:
        return self._do(lambda: list(self._requests))

    def expire(self, ticket_id: str) -> None:
        """Ends the lease of a ticket, as its TTL would."""

        def change() -> None:
            ticket = self._tickets.pop(ticket_id)
            self._by_lease.pop(ticket.lease_id, None)
            self._pass()

        self._do(change)

    def forget(self, ticket_id: str) -> None:
        """Drops a waiting ticket from the queue, as the gate does with one whose caller stays away."""

        def change() -> None:
            self._queue.remove(self._tickets.pop(ticket_id))
            self._pass()

        self._do(change)

    def never_ages(self) -> None:
        """From now on no waiting ticket is bypassed for its age, whatever the answers say."""
        self._ages = False

    def never_waits(self) -> None:
        """From now on calls answer `wait` at once, as those of a gate with too many open calls."""
        self._waits = False

    def refuse_usage(self) -> None:
        """From now on usage reports are refused, as those of a newer client might be."""
        self._takes_usage = False

    def wait_for(self, condition: Callable[[FakeGate], bool], within_s: float = PATIENCE_S) -> None:
        """Waits until `condition` holds; it is looked at after every request. For synchronous tests: in an
        asynchronous one it goes into a thread."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), within_s):
                raise TimeoutError("the condition did not become true")

    def _do(self, work: Callable[[], T]) -> T:
        if threading.current_thread() is self._thread or not self._thread.is_alive():
            return work()

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    # ---- HTTP ----------------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0]
        try:
            body = json.loads(await request.read() or b"{}")
        except ValueError:
            return _problem(400, "invalid_json")
        self._requests.append(Recorded(request.method, path, body))
        self._notify()
        if self._slow_s:
            await asyncio.sleep(self._slow_s)
        odd = await self._misbehave(request, path)
        if odd is not None:
            return odd
        status, answer = await self._answer(request.method, path, body)
        self._notify()
        return _problem(status, answer["code"]) if status >= 400 else web.json_response(answer, status=status)

    def _notify(self) -> None:
        # Conditions ask this thread for their values, so they are woken from another one.
        def wake() -> None:
            with self._changed:
                self._changed.notify_all()

        self._loop.run_in_executor(None, wake)

    async def _misbehave(self, request: web.Request, path: str) -> web.Response | None:
        known = [prefix for prefix in self._behaviours if prefix != "*" and path.startswith(prefix)]
        behaviour = self._behaviours.get(max(known, key=len) if known else "*", "normal")
        if isinstance(behaviour, tuple):
            status, code = behaviour
            return _problem(status, code) if code else web.Response(status=status, text="<html>no gate")
        if behaviour == "hang":
            await asyncio.Event().wait()
        if behaviour == "cut" and request.transport is not None:
            request.transport.abort()
            return web.Response()
        if behaviour == "garbage":
            return web.Response(body=b"\x00<html>no gate", content_type="application/json")
        if behaviour == "empty":
            return web.json_response({})
        if behaviour in PROBLEMS:
            return _problem(PROBLEMS[behaviour], behaviour)
        return None

    async def _answer(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if not self.serves_sessions and parts[1:2] in (["sessions"], ["steps"]):
            return 404, {"code": "not_found"}
        match [method, *parts]:
            case ["POST", "v1", "leases"]:
                return await self._acquire(body, float(body.get("wait_s", 25)))
            case ["POST", "v1", "leases", lease_id, "release"]:
                return self._release(lease_id, body)
            case ["DELETE", "v1", "leases", lease_id]:
                return self._release(lease_id, {})
            case ["POST", "v1", "leases", lease_id, "renew"]:
                ticket = self._by_lease.get(lease_id)
                return (410, {"code": "lease_expired"}) if ticket is None else (200, {"lease_id": lease_id})
            case ["DELETE", "v1", "tickets", ticket_id]:
                return 200, {"outcome": self._cancel(ticket_id)}
            case ["POST", "v1", "wait"]:
                return await self._wait(body)
            case ["POST", "v1", "batch"]:
                results = []
                for operation in body["operations"]:
                    status, answer = await self._operation(operation)
                    results.append({"status": status, "body": answer})
                return 200, {"results": results}
            case ["POST", "v1", "sessions", session_id, "close"]:
                return self._close(session_id, body)
            case ["POST", "v1", "steps"]:
                metrics = {"agentic_kv/budget/reserved": float(sum(t.tokens for t in self._by_lease.values()))}
                return 200, {"run": body["run"], "step": body["step"], "metrics": metrics}
            case ["GET", "v1", "steps", "current"]:
                return 200, {
                    "run": "",
                    "step": None,
                    "metrics": {"agentic_kv/admission/waiting": float(len(self._queue))},
                }
            case ["GET", "v1", "state"]:
                reserved = sum(ticket.tokens for ticket in self._by_lease.values())
                return 200, {
                    "budget": {"ceiling": self._capacity, "reserved": reserved},
                    "queue": {"waiting": len(self._queue)},
                    "leases": {"count": len(self._by_lease)},
                    "features": {"program_admission": True, "session_lifecycle": True, "paused": False},
                }
        return 404, {"code": "not_found"}

    async def _operation(self, operation: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        fields = {name: value for name, value in operation.items() if name != "op"}
        match operation.get("op"):
            case "acquire":
                return await self._acquire(fields, 0.0)
            case "release":
                return self._release(fields.pop("lease_id"), fields)
            case "cancel":
                return 200, {"outcome": self._cancel(fields["ticket_id"])}
            case "renew":
                return await self._answer("POST", f"/v1/leases/{fields['lease_id']}/renew", fields)
        return 422, {"code": "invalid_request"}

    # ---- decisions -----------------------------------------------------------------------------------

    async def _acquire(self, body: Mapping[str, Any], wait_s: float) -> tuple[int, dict[str, Any]]:
        sum_tokens = body.get("reservation_tokens")
        parts = (body.get("prompt_tokens"), body.get("max_new_tokens"))
        tokens = sum_tokens if sum_tokens is not None else sum(parts)  # type: ignore[arg-type]
        sent = (body["session_id"], sum_tokens, *parts)
        ticket = self._tickets.get(body["ticket_id"])
        if ticket is not None and ticket.sent and ticket.sent != sent:
            return 409, {"code": "ticket_conflict"}
        self.local_bypasses.update(body.get("local_bypasses") or {})
        if ticket is None:
            ticket = _Ticket(body["ticket_id"], body["session_id"], sent, tokens)
            self._tickets[ticket.ticket_id] = ticket
            self._decide(ticket, protected=bool(body.get("protected")))
        if ticket.state == "waiting" and wait_s > 0 and self._waits:
            await self._until(ticket, wait_s)
        return self._told(ticket)

    def _decide(self, ticket: _Ticket, *, protected: bool) -> None:
        loop = asyncio.get_running_loop()
        if self.bypass_reason is not None or protected:
            self._settle(ticket, "bypassed", self.bypass_reason or "protected")
        elif ticket.tokens > self._capacity:
            self._settle(ticket, "bypassed", "oversize")
        else:
            ticket.enqueued_at = loop.time()
            self._queue.append(ticket)
            loop.call_later(self._max_wait_s, self._age, ticket)
            self._pass()

    def _pass(self) -> None:
        while self._queue:
            head = self._queue[0]
            if sum(ticket.tokens for ticket in self._by_lease.values()) + head.tokens > self._capacity:
                return
            self._queue.pop(0)
            self._issued += 1
            head.lease_id = f"fake-{self._issued}"
            self._by_lease[head.lease_id] = head
            self.granted.append(head.ticket_id)
            self._settle(head, "held", "capacity_available")

    def _age(self, ticket: _Ticket) -> None:
        if ticket in self._queue and self._ages:
            self._queue.remove(ticket)
            self._settle(ticket, "bypassed", "aged")
            self._pass()

    def _settle(self, ticket: _Ticket, state: Literal["held", "bypassed", "ended"], reason: str) -> None:
        if ticket.state == "waiting" and ticket.enqueued_at:
            ticket.waited_s = asyncio.get_running_loop().time() - ticket.enqueued_at
        ticket.state, ticket.reason = state, reason
        ticket.decided.set()

    def _told(self, ticket: _Ticket) -> tuple[int, dict[str, Any]]:
        answer: dict[str, Any] = {
            "ticket_id": ticket.ticket_id,
            "session_id": ticket.session_id,
            "reservation_tokens": ticket.tokens,
            "epoch": 1,
            "session_reopened": False,
        }
        if ticket.state == "waiting":
            age_s = asyncio.get_running_loop().time() - ticket.enqueued_at
            return 202, {
                **answer,
                "action": "wait",
                "reason": "capacity_exhausted" if self._queue[0] is ticket else "behind_older",
                "position": self._queue.index(ticket) + 1,
                "age_s": age_s,
                "bypass_in_s": max(0.0, self._max_wait_s - age_s),
                "poll_after_s": 0.0 if self._waits else 1.0,
                "claim_grace_s": self._claim_grace_s,
            }
        repeated, ticket.told = ticket.told, True
        answer |= {"reason": ticket.reason, "waited_s": ticket.waited_s, "repeated": repeated}
        if ticket.state == "held":
            return 200, {**answer, "action": "admit", "lease_id": ticket.lease_id, "ttl_s": 600.0}
        return 200, {**answer, "action": "bypass" if ticket.state == "bypassed" else "cancelled"}

    async def _until(self, ticket: _Ticket, wait_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ticket.decided.wait(), wait_s)

    async def _wait(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        if not body["ticket_ids"]:
            return 422, {"code": "invalid_request"}

        def decided() -> list[dict[str, Any]]:
            results = []
            for ticket_id in body["ticket_ids"]:
                ticket = self._tickets.get(ticket_id)
                if ticket is None:
                    results.append({"ticket_id": ticket_id, "action": "unknown"})
                elif ticket.state != "waiting":
                    results.append(self._told(ticket)[1])
            return results

        results = decided()
        if not results and self._waits:
            waits = [asyncio.ensure_future(self._tickets[ticket_id].decided.wait()) for ticket_id in body["ticket_ids"]]
            try:
                await asyncio.wait(waits, timeout=float(body.get("wait_s", 25)), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            results = decided()
        return (200 if results else 202), {"results": results}

    def _release(self, lease_id: str, usage: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        ticket = self._by_lease.pop(lease_id, None)
        if usage and not self._takes_usage:
            if ticket is not None:
                self._by_lease[lease_id] = ticket
            return 422, {"code": "invalid_request"}
        if ticket is None:
            known = any(known.lease_id == lease_id for known in self._tickets.values())
            return (200, {"outcome": "already_released"}) if known else (410, {"code": "lease_expired"})
        if usage:
            self.usage.append(usage)
        self._settle(ticket, "ended", "ticket_finished")
        self._pass()
        return 200, {"outcome": "released"}

    def _cancel(self, ticket_id: str, reason: str = "ticket_finished") -> str:
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            marker = _Ticket(ticket_id, "", (), 0, state="ended", reason=reason)
            self._tickets[ticket_id] = marker
            return "unknown"
        outcome = {"waiting": "withdrawn", "held": "released", "bypassed": "bypassed"}.get(
            ticket.state, "already_finished"
        )
        if ticket in self._queue:
            self._queue.remove(ticket)
        self._by_lease.pop(ticket.lease_id, None)
        if ticket.state != "ended":
            self._settle(ticket, "ended", reason)
        self._pass()
        return outcome

    def _close(self, session_id: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        for ticket in [waiting for waiting in self._queue if waiting.session_id == session_id]:
            self._cancel(ticket.ticket_id, "session_closed")
        self.closes.append((session_id, body))
        return 202, {"close_id": f"close-{len(self.closes)}", "session_id": session_id, "state": "done", "engines": []}


def _socket(port: int) -> socket.socket:
    """A loopback socket. The first one holds the port while nobody listens."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    return sock


def _problem(status: int, code: str) -> web.Response:
    body = {"type": f"/problems/{code}", "title": code, "status": status, "detail": code, "code": code}
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response(body, status=status, headers=headers, content_type="application/problem+json")
