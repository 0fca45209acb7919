"""Client of kvgate, a durable admission gate for the KV cache of SGLang fleets.

    async with AsyncGate() as gate:
        async with gate.lease(session_id="s-7", prompt_tokens=18432, max_new_tokens=4096) as lease:
            ...  # send the request, with lease.engine_fields()

It fails open: a gate that is away, slow or wrong never raises into the rollout.
"""

from .admission import AdmissionClient
from .aio import AsyncGate, Lease, LeaseContext, Session
from .client import Gate
from .config import GateConfig
from .models import Close, Decision, TicketCancelled

__all__ = [
    "AdmissionClient",
    "AsyncGate",
    "Close",
    "Decision",
    "Gate",
    "GateConfig",
    "Lease",
    "LeaseContext",
    "Session",
    "TicketCancelled",
]
