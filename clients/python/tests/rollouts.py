"""A rollout in small: sessions that ask for leases turn by turn, and what it cost them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvgate import AsyncGate


@dataclass
class Costs:
    """What the sessions saw."""

    actions: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    added_most_s: float = 0.0
    """The longest time that the gate added to one request, its queue left out."""
    added_by_session_s: list[float] = field(default_factory=list)


async def rollout(
    gate: AsyncGate,
    *,
    sessions: int,
    turns: int,
    tokens: int,
    work_s: float = 0.05,
    after_turn: Callable[[int], None] | None = None,
) -> Costs:
    """Runs all sessions at once to their end. Any exception of any of them is raised."""
    costs = Costs()
    loop = asyncio.get_running_loop()

    async def session(number: int) -> None:
        added_s = 0.0
        for turn in range(turns):
            asked_at = loop.time()
            context = gate.lease(
                session_id=f"s{number}", ticket_id=f"s{number}/{turn}", prompt_tokens=tokens - 1, max_new_tokens=1
            )
            async with context as lease:
                before_s = loop.time() - asked_at - lease.waited_s
                # Not in step with each other, so that leases are held whenever trouble begins.
                await asyncio.sleep(work_s * random.uniform(0.5, 1.5))
                lease.report_usage(prompt_tokens=tokens - 1, completion_tokens=1)
                ends_at = loop.time()
            took_s = before_s + loop.time() - ends_at
            added_s += took_s
            costs.added_most_s = max(costs.added_most_s, took_s)
            costs.actions[f"{lease.action} {lease.reason}"] += 1
            costs.turns += 1
            if after_turn is not None:
                after_turn(costs.turns)
        costs.added_by_session_s.append(added_s)

    await asyncio.gather(*(session(number) for number in range(sessions)))
    return costs
