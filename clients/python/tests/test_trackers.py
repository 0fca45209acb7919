"""The examples for trackers: what they wrote is read back and compared with the gate's own reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import StartGate
from processes import ROOT, Service

TRACKERS = ROOT / "examples" / "trackers"
STEPS = 3
Written = dict[str, dict[int, float]]
"""Value by key and step."""


def run(example: str, folder: Path, *, gate: str, **environment: str) -> None:
    command = [sys.executable, str(TRACKERS / example), "--to", str(folder), "--run", "exp-7", "--steps", str(STEPS)]
    env = os.environ | {"KVGATE_URL": gate} | environment
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "kvgate" not in done.stderr


def reported(service: Service) -> Written:
    """What the gate keeps of the run's reports."""
    reports: list[dict[str, Any]] = service.get("/v1/steps?run=exp-7")["items"]
    assert sorted(report["step"] for report in reports) == list(range(1, STEPS + 1))
    values: Written = {}
    for report in reports:
        for key, value in report["metrics"].items():
            values.setdefault(key, {})[report["step"]] = value
    assert values["agentic_kv/admission/admit"] == dict.fromkeys(range(1, STEPS + 1), 4.0)
    assert len(values) > 10
    return values


def test_tensorboard_shows_the_reports(start_gate: StartGate, tmp_path: Path) -> None:
    """Read with TensorBoard's own reader, whose page makes one group of what stands before the first `/`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    service = start_gate("--session-lifecycle")
    run("to_tensorboard.py", tmp_path / "runs", gate=service.url)
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    tags = events.Tags()["scalars"]
    written: Written = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}
    expected = reported(service)
    assert written.keys() == expected.keys()
    for key, values in expected.items():
        # TensorBoard keeps scalars in single precision.
        assert written[key] == pytest.approx(values, rel=2**-24, abs=0.0)
    assert {tag.split("/", 1)[0] for tag in tags} == {"agentic_kv"}


@pytest.mark.filterwarnings("default")
def test_mlflow_keeps_the_reports_in_its_file_store(
    start_gate: StartGate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read with MLflow's own client; each value is the gate's to the last bit."""
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for name, value in quiet.items():
        monkeypatch.setenv(name, value)
    from mlflow import MlflowClient

    service = start_gate("--session-lifecycle")
    run("to_mlflow.py", tmp_path / "mlruns", gate=service.url, MLFLOW_LOGGING_LEVEL="WARNING")
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("kvgate")
    assert experiment is not None
    (kept,) = client.search_runs([experiment.experiment_id])
    assert (kept.info.run_name, kept.info.status) == ("exp-7", "FINISHED")
    written: Written = {
        key: {point.step: point.value for point in client.get_metric_history(kept.info.run_id, key)}
        for key in kept.data.metrics
    }
    assert written == reported(service)
    assert {key.split("/", 1)[0] for key in written} == {"agentic_kv"}


@pytest.mark.parametrize("example", ["to_tensorboard.py", "to_mlflow.py"])
def test_a_training_goes_on_without_a_gate(example: str, tmp_path: Path) -> None:
    # Nothing listens at the discard port.
    command = [sys.executable, str(TRACKERS / example), "--to", str(tmp_path / "kept")]
    env = os.environ | {"KVGATE_URL": "http://127.0.0.1:9", "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "no step report" in done.stderr
