"""When to ask, when to ask again, and when to go on without the gate.

Plain values with the clock as an argument: the rules of the contract's "Rules for clients", without I/O.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping

log = logging.getLogger("kvgate")

CLAIM_GRACE_S = 10.0
"""Grace that is assumed until the gate tells its own."""
BOUND_SLACK_S = 5.0
"""Added to the last `bypass_in_s`: the hard bound of a wait."""

UNREACHABLE = "unreachable"
"""No good answer: local bypass."""
REFUSED = "refused"
"""The gate does not take the call: local bypass."""
BREAKER = "breaker"
"""The gate was not asked, since it failed just now: local bypass."""


def jittered(pause_s: float) -> float:
    """Three quarters to five quarters of a pause, so that callers do not come back together."""
    return pause_s * random.uniform(0.75, 1.25)


class Pause:
    """A pause that doubles from `first_s` to `most_s`, with jitter, until it is reset."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def next_s(self) -> float:
        pause_s = self._next_s
        self._next_s = min(self._most_s, pause_s * 2)
        return min(self._most_s, jittered(pause_s))

    def reset(self) -> None:
        self._next_s = self._first_s


def place_pause() -> Pause:
    """Between two attempts of a waiting ticket: the first within 250 ms, then up to 2 s."""
    return Pause(0.2, 2.0)


class Breaker:
    """Skips calls for a while after a few failures in a row, so that a dead gate costs next to nothing.

    When the while is over one call goes out as a trial; the others are skipped until it has ended. Any
    success closes the breaker, also one of a waiting ticket or a retried release.
    """

    def __init__(self, failures_max: int, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._failures_max = failures_max
        self._open_s = open_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until: float | None = None

    def allows(self) -> bool:
        """Whether a new call may go out. True is used up by asking: it may be the trial."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._clock() < self._open_until:
                return False
            self._open_until = self._clock() + jittered(self._open_s)
            return True

    def is_open(self) -> bool:
        """Whether calls are skipped now."""
        with self._lock:
            return self._open_until is not None

    def note(self, *, failed: bool, calls: int = 1) -> None:
        """Takes notice of what came of a call, or of so many that shared a batch: they count each, as if they had
        gone by themselves."""
        if failed:
            self.failed(calls)
        else:
            self.succeeded()

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._open_until = None

    def failed(self, calls: int = 1) -> None:
        with self._lock:
            self._failures += calls
            # One that is open stays open until its own trial: others that ask again all the time, such as waiting
            # tickets, must not put the trial off.
            if self._failures >= self._failures_max and self._open_until is None:
                self._open_until = self._clock() + jittered(self._open_s)


class LocalBypasses:
    """What was decided without the gate and not yet told to it: reason to count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, reason: str) -> None:
        self.put_back({reason: 1})

    def take(self) -> dict[str, int]:
        """All counts, for a call. A call that does not get through puts them back."""
        with self._lock:
            counts, self._counts = self._counts, {}
            return counts

    def put_back(self, counts: Mapping[str, int]) -> None:
        with self._lock:
            for reason, count in counts.items():
                self._counts[reason] = self._counts.get(reason, 0) + count

    def peek(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Place:
    """A place in the gate's queue that would be lost by going on too early.

    The grace runs from the last sign of the gate: its last answer, or the moment an open call was cut, since
    until then the gate knew that the caller was there. The hard bound does not move with anything but the
    gate's own `bypass_in_s`.
    """

    def __init__(self, now: float) -> None:
        self._sign_at = now
        self._is_cut = False
        self._grace_s = CLAIM_GRACE_S
        self._bound_at: float | None = None

    def heard(self, now: float, bypass_in_s: float | None = None, claim_grace_s: float | None = None) -> None:
        """The gate answered. The two numbers come with every answer that says `wait`."""
        self._sign_at = now
        self._is_cut = False
        if claim_grace_s is not None:
            self._grace_s = claim_grace_s
        # A gate that says 0 again and again is one that should have decided: its word moves nothing any more.
        if bypass_in_s is not None and (bypass_in_s > 0 or self._bound_at is None):
            self._bound_at = now + bypass_in_s + BOUND_SLACK_S

    def cut(self, now: float) -> None:
        """An open call broke. Only the first since the last answer counts: what takes calls and cuts them all
        is no gate."""
        if not self._is_cut:
            self._is_cut = True
            self._sign_at = now

    def grace_ends_at(self) -> float:
        """When a caller that hears nothing more goes on."""
        return min(self._sign_at + self._grace_s, self.bound_at())

    def bound_at(self) -> float:
        """When a caller goes on whatever the gate says."""
        return self._sign_at + self._grace_s if self._bound_at is None else self._bound_at


class OnceWarnings:
    """Warns once for each kind of trouble, so that a rollout of thousands of requests keeps its log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[str] = set()

    def warn(self, kind: str, message: str, *args: object) -> None:
        with self._lock:
            again = kind in self._seen
            self._seen.add(kind)
        log.log(logging.DEBUG if again else logging.WARNING, message, *args)
