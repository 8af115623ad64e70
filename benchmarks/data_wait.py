"""Measures the fraction of a run's time spent waiting for data, which is `throughput/data_wait` in its metrics.

    python -m benchmarks.data_wait

Runs a shortened small configuration in a temporary directory. On a CPU, the prefetch threads compete with the training
step for cores, so only the waiting time during a step is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.setting import LMT, describe_load, describe_setting, markdown_table

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/gpt2_nano.yaml")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        command = [*LMT, "train", str(options.config.resolve())]
        command += [f"trainer.num_train_steps={options.steps}", f"trainer.steps_per_eval={options.steps}"]
        subprocess.run(command, cwd=directory, check=True, stdout=sys.stderr)
        (file,) = Path(directory).glob("**/metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [line for line in lines if "throughput/data_wait" in line]
    shares = [100 * line["throughput/data_wait"] for line in steps]
    step = statistics.median(1e3 * line["throughput/step_time"] for line in steps)
    row = [str(len(shares)), f"{step:.0f}", f"{statistics.median(shares):.3f}", f"{max(shares):.3f}"]
    print("# The share of a run that waits for data\n")
    print(describe_setting("jax", "grain"), f"{options.config.name}, {options.steps} steps.", describe_load())
    print(f"\n{markdown_table(['steps that tell', 'ms a step, median', 'waiting, %, median', 'most'], [row])}")


if __name__ == "__main__":
    main()
