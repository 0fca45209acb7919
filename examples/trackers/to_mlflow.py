"""Step reports in MLflow's file store: `python examples/trackers/to_mlflow.py --to mlruns`. Needs `kvgate` and
`mlflow-skinny` or `mlflow`. A tracking server takes the same calls: give `set_tracking_uri` its address."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import mlflow

from kvgate import Gate, GateConfig

# Newer versions of MLflow open a file store only for those who ask for it; older ones do not know the variable.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")


def rollout(gate: Gate, step: int) -> None:
    """Stands for the rollouts of one training step."""
    for number in range(4):
        with gate.lease(session_id=f"step-{step}-{number}", prompt_tokens=2_000, max_new_tokens=500):
            pass  # The request to the engine or router.


def main(options: argparse.Namespace) -> None:
    mlflow.set_tracking_uri(Path(options.to).absolute().as_uri())
    mlflow.set_experiment("kvgate")
    with Gate(GateConfig(run=options.run)) as gate, mlflow.start_run(run_name=options.run):
        for step in range(1, options.steps + 1):
            rollout(gate, step)
            # The dictionary as it stands. A report that could not be had is empty: the training goes on.
            mlflow.log_metrics(gate.report(step), step=step)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step reports in MLflow")
    parser.add_argument("--to", default="mlruns", help="folder of the file store")
    parser.add_argument("--run", default=None, help="name of the run at the gate; a fresh one without it")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
