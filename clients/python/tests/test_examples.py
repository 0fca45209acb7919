"""The examples run as they stand, against the demo's fleet and a real gate in front of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import StartGate
from processes import ROOT, Fleet, Service, wait_until

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str, gate: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = os.environ | {"KVGATE_URL": gate}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_quick_start(start_gate: StartGate) -> None:
    service = start_gate()
    lines = run("quickstart.py", gate=service.url).splitlines()
    assert len(lines) == 24
    assert any("admit (capacity_available)" in line for line in lines)
    assert service.state()["budget"]["reserved"] == 0


def test_agents_call_tools_between_their_turns(fleet: Fleet, tmp_path: Path) -> None:
    # Through the router, as beside a real fleet, and with room for a few turns at a time.
    service = Service(
        tmp_path / "gate",
        *("--router", fleet.router, "--program-admission", "--session-lifecycle", "--admission-headroom", "0.005"),
    )
    service.start()
    try:
        service.wait_for_state(lambda state: not state["degraded"], "the fleet is read")
        output = run(
            "agents.py", "--router", fleet.router, "--gate", service.url, "--sessions", "16", "--turns", "3",
            gate="http://127.0.0.1:9",
        )  # fmt: skip
        summary = json.loads(output.splitlines()[-1])
        assert (summary["sessions"], summary["turns"], summary["tools"]) == (16, 48, 48)
        # A machine that is busy elsewhere may make a reading late, and a turn a bypass.
        assert summary["admit"] + summary.get("bypass", 0) == 48
        assert summary["admit"] > 24
        assert summary["waited_s"] > 0
        assert summary["report"]["agentic_kv/admission/admit"] == summary["admit"]
        # Turns find what earlier ones left in the cache.
        assert 0 < summary["cached_tokens"] < summary["prompt_tokens"]
        assert summary["completion_tokens"] >= 48
        wait_until(lambda: service.state()["budget"]["reserved"] == 0, "nothing is reserved")
        wait_until(lambda: service.state()["closes"]["pending"] == 0, "all sessions are closed")
        assert service.state()["closes"]["failed"] == 0
    finally:
        service.close()


def test_the_launch_script_starts_both_features() -> None:
    script = EXAMPLES / "launch_sglang.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    for flag in (
        "--enable-session-radix-cache",
        "--radix-eviction-policy priority",
        "--program-admission",
        "--session-lifecycle",
    ):
        assert flag in text
