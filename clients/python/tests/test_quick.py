import asyncio
from kvgate import AsyncGate, Gate, TicketCancelled

async def test_admit(fake_gate):
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="s", prompt_tokens=10, max_new_tokens=5) as lease:
            assert lease.action == "admit"
            assert fake_gate.reserved == 15
            lease.report_usage(prompt_tokens=10, completion_tokens=3)
        assert fake_gate.reserved == 0
    assert fake_gate.usage == [{"prompt_tokens": 10, "completion_tokens": 3}]

async def test_many(fake_gate):
    fake_gate.set_capacity(100)
    done = []
    async with AsyncGate(fake_gate.url) as gate:
        async def one(i):
            async with gate.lease(session_id=f"s{i}", reservation_tokens=10) as lease:
                done.append((lease.action, i))
        async with asyncio.TaskGroup() as g:
            for i in range(500):
                g.create_task(one(i))
    assert fake_gate.reserved == 0
    assert len(done) == 500 and {a for a, _ in done} == {"admit"}

async def test_cancel(fake_gate):
    fake_gate.set_capacity(100)
    async with AsyncGate(fake_gate.url) as gate:
        async with gate.lease(session_id="a", reservation_tokens=100):
            async def w():
                async with gate.lease(session_id="b", reservation_tokens=100):
                    pass
            t = asyncio.create_task(w())
            while not fake_gate.waiting:
                await asyncio.sleep(0.01)
            t.cancel()
            try:
                await t
            except asyncio.CancelledError:
                pass
            assert fake_gate.waiting == []
        assert fake_gate.reserved == 0

def test_sync(fake_gate):
    with Gate(fake_gate.url) as gate:
        with gate.lease(session_id="a", reservation_tokens=100) as lease:
            assert lease.action == "admit"
            assert fake_gate.reserved == 100
        assert fake_gate.reserved == 0

def test_plain_run(fake_gate):
    gate = AsyncGate(fake_gate.url)
    async def main():
        async with gate.lease(session_id="a", reservation_tokens=100) as lease:
            assert lease.action == "admit"
    asyncio.run(main())
    asyncio.run(main())
    assert fake_gate.reserved == 0
