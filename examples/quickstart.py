"""The smallest rollout with leases: `KVGATE_URL=http://127.0.0.1:7070 python examples/quickstart.py`."""

from __future__ import annotations

import asyncio

from kvgate import AsyncGate, TicketCancelled


async def generate(body: dict[str, object]) -> dict[str, object]:
    """Your request to the engine or router; here it only takes its time."""
    await asyncio.sleep(0.1)
    prompt_tokens = body["prompt_tokens"]
    return {"meta_info": {"prompt_tokens": prompt_tokens, "completion_tokens": 200, "cached_tokens": 0}}


async def program(gate: AsyncGate, session_id: str) -> None:
    """One session of three turns. It is closed at the end, so that the engines can drop its KV."""
    prompt_tokens = 2_000
    async with gate.session(session_id) as session:
        for turn in range(3):
            try:
                async with session.lease(prompt_tokens=prompt_tokens, max_new_tokens=1_024) as lease:
                    # The fields carry the session's id and the request's own, so that engines can tag its KV.
                    answer = await generate({"prompt_tokens": prompt_tokens, **lease.engine_fields()})
                    lease.report_answer(answer)
            except TicketCancelled:
                return
            print(f"{session_id} turn {turn}: {lease.action} ({lease.reason}), waited {lease.waited_s:.1f} s")
            prompt_tokens += 1_500


async def main() -> None:
    async with AsyncGate() as gate:
        await asyncio.gather(*(program(gate, f"session-{number}") for number in range(8)))


if __name__ == "__main__":
    asyncio.run(main())
