"""Closes and step reports with the real binary. This build serves both, so nothing of it may be refused."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from conftest import StartGate
from processes import Fleet, Service, serve_arguments

from kvgate import AdmissionClient, AsyncGate, GateConfig


async def test_closes(start_gate: StartGate, caplog: pytest.LogCaptureFixture) -> None:
    service = start_gate("--session-lifecycle")
    async with AsyncGate(service.url) as gate:
        async with gate.session("s/1") as session, session.lease(reservation_tokens=1) as lease:
            assert lease.action == "admit"
        # Longer than the gate would take.
        close = await gate.close_session("s/2", wait_s=90.0)
    assert close.session_id == "s/2"
    assert close.state == "done"
    assert close.close_id
    assert sum(close.counts.values()) == 1
    assert service.state()["budget"]["reserved"] == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


async def test_a_gate_without_the_lifecycle_says_so(start_gate: StartGate) -> None:
    async with AsyncGate(start_gate().url) as gate:
        assert (await gate.close_session("s")).state == "disabled"


async def test_a_step_report_is_a_flat_dictionary_for_trackers(
    start_gate: StartGate, caplog: pytest.LogCaptureFixture
) -> None:
    """REP1, API: the report is the gate's own, key by key; the same step gives the same one, over a restart too."""
    service = start_gate("--session-lifecycle", ceiling=1_000)
    async with AsyncGate(GateConfig(url=service.url, run="exp-7")) as gate:
        for number in range(3):
            async with gate.session(f"s{number}") as session, session.lease(reservation_tokens=400) as lease:
                assert lease.action == "admit"
        async with gate.lease(session_id="long", reservation_tokens=700) as held:
            look = await gate.peek()
            report = await gate.report(1)
        again = await gate.report(1)
        (listed,) = service.get("/v1/steps?run=exp-7")["items"]
        await asyncio.to_thread(service.process.kill)
        await asyncio.to_thread(service.start)
        after = await gate.report(1)
        nothing_new = await gate.report(2)
    assert held.action == "admit"
    assert type(report) is dict
    assert all(type(value) is float and math.isfinite(value) for value in report.values())
    assert report == again == after == listed["metrics"]
    assert report["agentic_kv/session/lifecycle_enabled"] == 1.0
    assert report["agentic_kv/session/close"] == 3.0
    assert report["agentic_kv/admission/admit"] == look["agentic_kv/admission/admit"] == 4.0
    assert report["agentic_kv/budget/ceiling"] == 1_000.0
    assert report["agentic_kv/budget/reserved"] == 700.0
    assert report["agentic_kv/budget/reserved_utilization"] == 0.7
    assert "agentic_kv/admission/admit" not in nothing_new
    assert nothing_new["agentic_kv/budget/reserved"] == 0.0
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []


async def test_a_coordinators_metrics_begin_anew_in_every_process(start_gate: StartGate) -> None:
    config = GateConfig(url=start_gate().url, run="exp-7")
    for process in range(2):
        async with AsyncGate(config) as gate:
            client = AdmissionClient(gate)
            answer = await client.acquire({"ticket_id": f"t:{process}", "reservation_tokens": 1})
            await client.release(answer["lease_id"])
            assert (await client.metrics())["admission/admit"] == 1.0
            assert (await client.metrics(reset=True))["admission/admit"] == 1.0
            assert "admission/admit" not in await client.metrics(reset=True)


async def test_the_keys_of_a_report_suit_trackers(start_gate: StartGate) -> None:
    """Trackers split keys at the first `/`: all keys of a report are one panel. None of them is the folder of another
    one, since a file store makes a path of each."""
    service = start_gate("--session-lifecycle", ceiling=10)
    async with AsyncGate(service.url) as gate:
        async with gate.lease(session_id="a", reservation_tokens=5):
            for asked in (20, 5):
                async with gate.lease(session_id="b", reservation_tokens=asked, protected=asked == 5) as lease:
                    assert lease.action
            report = await gate.report(1)
    assert report["agentic_kv/admission/bypass"] == 1.0 + report.get("agentic_kv/admission/bypass_protected", 0.0)
    assert {key.partition("/")[0] for key in report} == {"agentic_kv"}
    parts = {tuple(key.split("/")) for key in report}
    assert all(len(key) == 3 for key in parts)
    assert {key[1] for key in parts} == {"session", "admission", "budget"}


async def test_a_gate_that_asks_for_tokens(fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The gate's own token file serves as a client's; with a wrong token the work goes on, unguarded."""
    tokens = tmp_path / "tokens"
    tokens.write_text("rollout:client:token-of-the-rollout-1\n")
    tokens.chmod(0o600)
    service = Service(tmp_path / "data", *serve_arguments(fleet.engines(), "--token-file", str(tokens)))
    try:
        service.start()
        async with AsyncGate(GateConfig(url=service.url, token_file=tokens)) as gate:
            async with gate.lease(session_id="s", reservation_tokens=1) as lease:
                assert lease.reason in {"capacity_available", "degraded"}
            assert (await gate.close_session("s")).state == "disabled"
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
        async with AsyncGate(GateConfig(url=service.url, token="token-of-nobody-at-all")) as gate:
            async with gate.lease(session_id="s", reservation_tokens=1) as lease:
                assert (lease.action, lease.reason) == ("bypass", "refused")
        assert "status 401 unauthorized" in caplog.text
        assert "token-of" not in caplog.text
    finally:
        service.close()
