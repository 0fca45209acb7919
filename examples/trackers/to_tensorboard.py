"""Step reports in TensorBoard: `python examples/trackers/to_tensorboard.py --to runs/exp-7`, then `tensorboard --logdir
runs`. Needs `kvgate` and `tensorboardX`; `torch.utils.tensorboard` has the same writer."""

from __future__ import annotations

import argparse

from tensorboardX import SummaryWriter

from kvgate import Gate, GateConfig


def rollout(gate: Gate, step: int) -> None:
    """Stands for the rollouts of one training step."""
    for number in range(4):
        with gate.lease(session_id=f"step-{step}-{number}", prompt_tokens=2_000, max_new_tokens=500):
            pass  # The request to the engine or router.


def main(options: argparse.Namespace) -> None:
    with Gate(GateConfig(run=options.run)) as gate, SummaryWriter(options.to) as writer:
        for step in range(1, options.steps + 1):
            rollout(gate, step)
            # All keys begin with `agentic_kv/`, so they are one group of the page. A report that could not be had is
            # empty: the training goes on.
            for key, value in gate.report(step).items():
                writer.add_scalar(key, value, step)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step reports in TensorBoard")
    parser.add_argument("--to", default="runs/kvgate", help="folder of the event files")
    parser.add_argument("--run", default=None, help="name of the run at the gate; a fresh one without it")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
