"""The rules of the single-actor coordinator: what kvgate decides, in one process's memory.

A queue of tickets, oldest first, a sum of tokens against a ceiling, each ticket charged once, sessions accounted for,
leases reclaimed at their end. Time is an argument. Nothing is durable.
"""

import collections
import heapq

FINISHED_MAX = 262_144


class Ticket:
    """One ticket that waits or holds a lease."""

    __slots__ = ("asked", "client", "deadline", "fields", "lease", "request_id", "scope", "session", "tokens", "ttl_s")

    def __init__(self, now, session, prompt, new, scope, ttl_s, request_id, client):
        self.asked = now
        self.session = session
        self.fields = (session, prompt, new)
        self.tokens = prompt + new
        self.scope = scope
        self.ttl_s = ttl_s
        self.request_id = request_id
        self.client = client
        self.lease = None
        self.deadline = None


class Session:
    """What a session holds and waits for."""

    __slots__ = ("leases", "tokens", "used", "waiting")

    def __init__(self):
        self.leases = self.tokens = self.waiting = 0
        self.used = 0.0


class Ledger:
    """Decides; answers are tuples whose first word says what."""

    def __init__(self, ceiling):
        self.ceiling = ceiling
        self.reserved = self.issued = self.admits = self.waits = self.expired = 0
        self.tickets = {}
        self.queue = collections.OrderedDict()
        self.sessions = {}
        self.deadlines = []
        self.finished = collections.OrderedDict()

    def acquire(self, now, ticket, session, prompt, new, scope, protected, ttl_s, request_id, client):
        known = self.tickets.get(ticket)
        if known is not None:
            if known.fields != (session, prompt, new):
                return ("conflict",)
            return ("wait",) if known.lease is None else ("admit", known.lease)
        if ticket in self.finished:
            return ("cancelled",)
        if protected:
            return ("bypass", "protected")
        if prompt + new > self.ceiling:
            return ("bypass", "oversize")
        row = Ticket(now, session, prompt, new, scope, ttl_s, request_id, client)
        self.tickets[ticket] = row
        if not self.queue and self.reserved + row.tokens <= self.ceiling:
            return ("admit", self._charge(now, ticket, row))
        self.queue[ticket] = row
        self.waits += 1
        self.sessions.setdefault(session, Session()).waiting += 1
        return ("wait",)

    def release(self, now, ticket, lease):
        """What became of it, and the grants that it caused: tickets with their leases."""
        row = self.tickets.get(ticket)
        if row is None:
            return ("already_released" if self.finished.get(ticket) == lease else "lease_not_found"), []
        if row.lease != lease:
            return "lease_expired", []
        self._discharge(ticket, row)
        self.finished[ticket] = lease
        if len(self.finished) > FINISHED_MAX:
            self.finished.popitem(last=False)
        return "released", self._advance(now)

    def cancel(self, now, ticket):
        """A ticket that waits leaves the queue."""
        row = self.queue.pop(ticket, None)
        if row is None:
            return []
        del self.tickets[ticket]
        self.sessions[row.session].waiting -= 1
        self.finished[ticket] = None
        return self._advance(now)

    def sweep(self, now):
        """Reclaims the leases whose end has come."""
        while self.deadlines and self.deadlines[0][0] <= now:
            _, ticket, lease = heapq.heappop(self.deadlines)
            row = self.tickets.get(ticket)
            if row is not None and row.lease == lease:
                self._discharge(ticket, row)
                self.expired += 1
        return self._advance(now)

    def _charge(self, now, ticket, row):
        self.issued += 1
        self.admits += 1
        self.reserved += row.tokens
        row.lease = f"1-{self.issued}"
        row.deadline = now + row.ttl_s
        heapq.heappush(self.deadlines, (row.deadline, ticket, row.lease))
        session = self.sessions.setdefault(row.session, Session())
        session.leases += 1
        session.tokens += row.tokens
        session.used = now
        return row.lease

    def _discharge(self, ticket, row):
        del self.tickets[ticket]
        self.reserved -= row.tokens
        session = self.sessions[row.session]
        session.leases -= 1
        session.tokens -= row.tokens

    def _advance(self, now):
        granted = []
        while self.queue:
            ticket, row = next(iter(self.queue.items()))
            if self.reserved + row.tokens > self.ceiling:
                break
            del self.queue[ticket]
            self.sessions[row.session].waiting -= 1
            granted.append((ticket, self._charge(now, ticket, row)))
        return granted
