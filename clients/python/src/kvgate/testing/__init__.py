"""A fake gate for tests: the contract over HTTP on loopback, with a ledger and a FIFO queue in memory.

    with FakeGate(capacity_tokens=50_000) as gate:
        ...  # AsyncGate(gate.url) or Gate(gate.url)
        assert gate.reserved == 0

It can be made to misbehave (`gate.behave("hang")`), stopped and started again at the same port. It runs in a
thread of its own, so that it serves synchronous and asynchronous tests alike. It decides as the gate does where a
caller can see it, and leaves out what no caller sees: engines, pressure, TTLs, durability.

`pytest_plugins = ["kvgate.testing.plugin"]` brings the fixture `fake_gate`.
"""

from ._fake import Behaviour, FakeGate, Recorded

__all__ = ["Behaviour", "FakeGate", "Recorded"]
