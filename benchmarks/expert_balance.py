"""Compares ways to balance the load of experts: the same nano mixture trained with each of them.

    python -m benchmarks.expert_balance

Each way is a run of `lmt train configs/olmoe_nano.yaml` with the same seed, data and steps. A selection bias with a
rate of 0 stays 0, and only lets a run report the load of the global batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.setting import LMT, describe_load, describe_setting, markdown_table

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs/olmoe_nano.yaml"
EXPERTS_PER_TOKEN = 2
WAYS = {
    "none": {"lbl_coef": 0, "selection_bias_rate": 0},
    "loss over the microbatch": {"lbl_coef": 0.01, "lbl_over": "microbatch", "selection_bias_rate": 0},
    "loss over the batch": {"lbl_coef": 0.01, "lbl_over": "batch", "selection_bias_rate": 0},
    # With even load, this loss is 1, and the others are the number of experts per token.
    "loss over the row": {"lbl_coef": 0.01 * EXPERTS_PER_TOKEN, "lbl_over": "row", "selection_bias_rate": 0},
    "selection bias": {"lbl_coef": 0, "selection_bias_rate": 0.001},
}
"""Name of each way -> settings of `model`."""
OVERLOAD, UNUSED, OVERLOAD_OF_MICROBATCHES = (
    "train/router_batch_overload", "train/router_unused_experts", "train/router_overload"
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for number, (name, settings) in enumerate(WAYS.items()):
            metrics = train(Path(directory), f"way{number}", settings, options.steps, options.rows)
            rows.append([name, *summarize(metrics, options.steps)])
    print("# Balance of experts\n")
    print(describe_setting("jax"), describe_load("at the end"))
    print(f"\n`configs/olmoe_nano.yaml`, {options.steps} steps of {options.rows} rows, one seed.\n")
    first, last = f"steps 1 to {options.steps // 10}", f"last {options.steps // 5} steps"
    heads = ["balance", f"overload, {first}", f"overload, {last}", "of microbatches", "unused experts", "eval loss"]
    print(markdown_table(heads, rows))
    print("\nOverload: load of the busiest expert over the mean, in the global batch; a mean over layers and steps.")


def train(directory: Path, run: str, settings: dict[str, Any], steps: int, rows: int) -> list[dict[str, Any]]:
    """Trains with settings of `model`, and returns the metrics of each step."""
    overrides = [f"model.{name}={value}" for name, value in settings.items()]
    trainer = {"id": run, "num_train_steps": steps, "steps_per_eval": steps, "train_batch_size": rows}
    overrides += [f"trainer.{name}={value}" for name, value in trainer.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [*LMT, "train", str(CONFIG), *overrides], cwd=directory, env=environment, check=True, capture_output=True
    )
    lines = (directory / "logs" / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def summarize(metrics: list[dict[str, Any]], steps: int) -> list[str]:
    """Returns the columns of the table for one run."""

    def mean(name: str, first: int, last: int) -> float:
        values = [line[name] for line in metrics if name in line and first <= line["step"] <= last]
        return statistics.fmean(values)

    late = steps - steps // 5 + 1
    loss = next(line["eval/loss"] for line in reversed(metrics) if "eval/loss" in line)
    return [
        f"{mean(OVERLOAD, 1, steps // 10):.2f}",
        f"{mean(OVERLOAD, late, steps):.2f}",
        f"{mean(OVERLOAD_OF_MICROBATCHES, late, steps):.2f}",
        f"{mean(UNUSED, late, steps):.2f}",
        f"{loss:.3f}",
    ]


if __name__ == "__main__":
    main()
