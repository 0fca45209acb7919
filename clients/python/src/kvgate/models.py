"""What the gate answers, as values. Names are those of the HTTP contract.

Readers take what they know and ignore the rest, since answers may grow.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Action = Literal["admit", "bypass"]
Scope = Literal["train", "eval"]
CloseMode = Literal["join", "abort"]
CloseReason = Literal["terminal", "dropped"]

TOKENS_MAX = 2**53 - 1
"""Largest token count that the contract knows."""


class TicketCancelled(Exception):  # noqa: N818  it is a decision of the gate, not an error of the client
    """The gate says: do not start this request.

    The ticket was cancelled or had ended before, or its session was closed while it waited (`reason`).
    """

    def __init__(self, ticket_id: str, session_id: str, reason: str) -> None:
        super().__init__(ticket_id, session_id, reason)
        self.ticket_id = ticket_id
        self.session_id = session_id
        self.reason = reason

    def __str__(self) -> str:
        return f"ticket {self.ticket_id!r} of session {self.session_id!r} must not start: {self.reason}"


@dataclass(frozen=True)
class Decision:
    """Leave to start a request, with a lease (`admit`) or without one (`bypass`)."""

    action: Action
    reason: str
    ticket_id: str
    session_id: str
    lease_id: str | None = None
    reservation_tokens: int = 0
    epoch: int = 0
    ttl_s: float = 0.0
    waited_s: float = 0.0
    repeated: bool = False
    session_reopened: bool = False
    local: bool = False
    """Decided by the client itself: the gate was silent, or refused the call."""


@dataclass(frozen=True)
class Close:
    """How a session close stands."""

    session_id: str
    state: str
    """`joining`, `delivering`, `done` or `disabled` as the gate says; `unanswered` while the client keeps
    trying in the background; `refused` when the gate does not take it."""
    close_id: str | None = None
    engines: tuple[Mapping[str, Any], ...] = ()
    """Every engine while it runs; of a finished close those that did not take it."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How many engines stand in each state."""


def text(value: object, default: str = "") -> str:
    """`value` when it is text."""
    return value if isinstance(value, str) else default


def number(value: object, default: float = 0.0) -> float:
    """`value` when it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return default
    return float(value)


def tokens(value: object) -> int | None:
    """`value` when it is a token count that the contract takes."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= TOKENS_MAX:
        return None
    return value


def whole(value: Any) -> Any:
    """An integer of whatever library as Python's own; anything else as it is."""
    if value is None or isinstance(value, bool | int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def id_fault(value: object) -> str | None:
    """What is wrong with a ticket or session id; the gate refuses the same ids."""
    if not isinstance(value, str):
        return "it is not text"
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if not 1 <= size <= 512:
        return "it has not 1 to 512 bytes"
    if value in {".", ".."} or any(ord(c) < 0x20 or 0x7F <= ord(c) <= 0x9F for c in value):
        return "it is `.` or `..`, or has control characters"
    return None
