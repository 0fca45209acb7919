"""A small agent harness: sessions of several turns, a model request and a tool call in each.

    python examples/agents.py --router http://127.0.0.1:30000 --gate http://127.0.0.1:7070 --sessions 16 --turns 4

Each turn takes a lease for its whole prefix and what it may write, sends the prefix to `/generate` of the router (or of
one engine), gives the lease back with what was really used, and runs a tool before the next turn. While the tool runs
no lease is held: that is the point of admission at request boundaries. At its end each session is closed, so that the
engines can drop its KV. The last line of the output is a JSON summary.

The prompts are made-up token ids, so any model will do; the tool is real: it runs a line of Python in a process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from typing import Any

import aiohttp

from kvgate import AsyncGate, GateConfig, Lease, Session, TicketCancelled

SYSTEM_TOKENS = 400
"""Prefix that all sessions share."""
TASK_TOKENS = 300
TRIES = 3
"""How often a request is sent that the router has no room for (408, 429, 503)."""


class Harness:
    """What all sessions share."""

    def __init__(self, gate: AsyncGate, http: aiohttp.ClientSession, router: str, options: argparse.Namespace) -> None:
        self.gate = gate
        self.http = http
        self.router = router.rstrip("/")
        self.turns: int = options.turns
        self.max_new_tokens: int = options.max_new_tokens
        self.seen: Counter[str] = Counter()
        self.waited_s = 0.0

    async def run(self, number: int) -> None:
        """One session, from its task to its last turn."""
        draw = random.Random(number)
        prefix = [token % 90 + 10 for token in range(SYSTEM_TOKENS)]
        prefix += [draw.randrange(10, 100) for _ in range(TASK_TOKENS)]
        try:
            async with self.gate.session(f"agent-{number}") as session:
                for _ in range(self.turns):
                    prefix += await self.turn(session, prefix, draw)
                    prefix += await call_tool(draw)
                    self.seen["tools"] += 1
        except TicketCancelled:
            self.seen["cancelled"] += 1
            return
        self.seen["sessions"] += 1

    async def turn(self, session: Session, prefix: list[int], draw: random.Random) -> list[int]:
        """The model's part of a turn: the tokens that it wrote."""
        for _ in range(TRIES):
            async with session.lease(prompt_tokens=len(prefix), max_new_tokens=self.max_new_tokens) as lease:
                self.seen[lease.action] += 1
                self.waited_s += lease.waited_s
                answer = await self.generate(prefix, lease)
            if answer is not None:
                self.seen["turns"] += 1
                meta = answer["meta_info"]
                for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
                    self.seen[name] += int(meta[name])
                written: list[int] = answer.get("output_ids") or []
                return written or [draw.randrange(10, 100) for _ in range(int(meta["completion_tokens"]))]
            # The router is full although there was a lease: it is given back before the next try.
            await asyncio.sleep(draw.uniform(0.2, 0.5))
        raise RuntimeError("the router takes no request")

    async def generate(self, prefix: list[int], lease: Lease) -> dict[str, Any] | None:
        """The answer of the engine, or None when the router is full."""
        body = {
            "input_ids": prefix,
            "sampling_params": {"max_new_tokens": self.max_new_tokens, "temperature": 1.0},
            **lease.engine_fields(),
        }
        async with self.http.post(f"{self.router}/generate", json=body) as response:
            if response.status in {408, 429, 503}:
                return None
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
        lease.report_answer(answer)
        return answer


async def call_tool(draw: random.Random) -> list[int]:
    """Runs a line of Python and reads its output, as tokens of one digit each."""
    line = f"print({draw.randrange(10**6)} * {draw.randrange(10**6)})"
    tool = await asyncio.create_subprocess_exec(sys.executable, "-c", line, stdout=asyncio.subprocess.PIPE)
    output, _ = await tool.communicate()
    return [int(digit) + 10 for digit in output.decode().strip()]


async def main(options: argparse.Namespace) -> None:
    config = GateConfig(url=options.gate, client="agents") if options.gate else GateConfig(client="agents")
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with AsyncGate(config) as gate, aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        harness = Harness(gate, http, options.router, options)
        await asyncio.gather(*(harness.run(number) for number in range(options.sessions)))
        report = await gate.report(1)
    summary: dict[str, Any] = {**harness.seen, "waited_s": round(harness.waited_s, 1)}
    if report:
        summary["report"] = report
    print(json.dumps(summary))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--router", required=True, help="address that serves /generate")
    parser.add_argument("--gate", help="address of kvgate; KVGATE_URL without it")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(arguments()))
