"""Closes and step reports with the real binary, whether this build serves them yet or not: a gate without them must
not trouble a rollout either. The gate's own OpenAPI document says which it is."""

from __future__ import annotations

import pytest
from conftest import StartGate

from kvgate import AsyncGate


async def test_closes(start_gate: StartGate, caplog: pytest.LogCaptureFixture) -> None:
    service = start_gate("--session-lifecycle")
    served = "/v1/sessions/{session_id}/close" in service.get("/openapi.json")["paths"]
    async with AsyncGate(service.url) as gate:
        async with gate.session("s/1") as session, session.lease(reservation_tokens=1) as lease:
            assert lease.action == "admit"
        close = await gate.close_session("s/2", wait_s=20.0)
    assert close.session_id == "s/2"
    if served:
        assert close.state == "done"
        assert close.close_id
        assert sum(close.counts.values()) == 1
        assert "refused" not in caplog.text
    else:
        assert close.state == "refused"
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert service.state()["budget"]["reserved"] == 0


async def test_step_reports(start_gate: StartGate) -> None:
    service = start_gate()
    served = "/v1/steps" in service.get("/openapi.json")["paths"]
    async with AsyncGate(service.url) as gate:
        async with gate.lease(session_id="s", reservation_tokens=1):
            pass
        report = await gate.report(1)
        again = await gate.report(1)
    if served:
        assert report is not None
        assert report.metrics["agentic_kv/admission/admit"] == 1.0
        assert report == again
    else:
        assert report is None
