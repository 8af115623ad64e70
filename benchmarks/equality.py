"""Checks that runs are bitwise identical on any devices and processes, with a table of hashes and random runs.

For the table, `lmt launch local` trains one tiny model for 50 steps with each combination of processes and devices. The
loss of every step and all final weights are compared. With `--killed`, the last row is a run whose processes are killed
every few steps, and which resumes each time with other processes and devices. The random runs come from
tests/step/random_runs.py. Each runs on one device and on another mesh. Results are saved one by one, and a second start
skips the saved ones.

    python benchmarks/equality.py --out benchmarks/results/equality.md
    python benchmarks/equality.py --killed --determinism layerwise --out ...
    python benchmarks/equality.py --shapes 30 --families 30 --out ...
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import pydoc_data.topics
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICES = 8
KINDS = {
    "shapes": "parameters of random shapes",
    "families": "language models",
    "layerwise": "language models that are computed layer by layer",
    "uneven": "language models on 3, 5, 6 and 7 devices, every second one layer by layer",
}
"""Kinds of random runs."""
ROOT = Path(__file__).resolve().parent.parent
STEPS = 50

RUN: dict[str, Any] = {
    "model": {"type": "gpt2", "seq_len": 32, "hidden_dim": 48, "num_layers": 2, "num_heads": 4, "scan_layers": True},
    "data": {"tokenizer": "bytes", "num_workers": 0},
    "trainer": {
        "id": "run",
        # On a CPU, XLA splits sums by the number of threads, so every combination uses the same number of threads.
        "cpu_threads": DEVICES,
        "train_batch_size": 16,
        "elastic_shards": 8,
        "num_train_steps": STEPS,
        "steps_per_eval": 25,
        "max_eval_batches": 2,
        "sample_tokens": 0,
        "checkpointer": {"save_interval": "1h"},
    },
    "optimizer": {"learning_rate": 3e-3, "warmup": 0.1},
}
"""Configuration with dropout, mixed precision and recomputation."""
RUN["model"] |= {"resid_pdrop": 0.1, "embed_pdrop": 0.1, "attn_pdrop": 0.1, "gradient_checkpointing": True}
RUN["trainer"] |= {"mp": "p=f32,c=bfloat16", "determinism": "elastic"}

DIVISIONS: list[tuple[int, int, tuple[str, ...]]] = [
    (1, 1, ()),
    (1, 2, ()),
    (1, 4, ()),
    (1, 8, ()),
    (2, 2, ()),
    (4, 1, ()),
    (2, 4, ()),
    (1, 4, ("trainer.fsdp_axis=null",)),
    (2, 2, ("trainer.fsdp_axis=mlp", "trainer.replica_dcn_axis_size=2")),
    (1, 3, ()),
    (1, 7, ()),
    (3, 2, ()),
]
"""Number of processes, number of devices per process, and overrides for the sharding of the state."""

CHANGES = [(1, 1), (1, 3), (2, 2), (1, 6), (4, 1), (1, 7), (2, 4)]
"""Numbers of processes and of devices per process of the successive attempts of the killed run."""
SAVE_EVERY = 3
"""Number of steps between checkpoints of the killed run."""


def write_run(directory: Path) -> Path:
    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    for name, part in (("train", topics[:-8]), ("validation", topics[-8:])):
        (directory / f"{name}.txt").write_text("\n".join(part), encoding="utf-8")
    data = {f"{name}_urls": [str(directory / f"{name}.txt")] for name in ("train", "validation")}
    config = directory / "run.yaml"
    config.write_text(json.dumps({**RUN, "data": {**RUN["data"], **data}}))
    return config


def train(config: Path, processes: int, devices: int, overrides: tuple[str, ...]) -> dict[str, str]:
    """Trains one run in a new directory. Returns the hashes of its results."""
    directory = config.parent / "-".join([str(processes), str(devices), *overrides]).replace("/", "_")
    directory.mkdir()
    wait_for_launcher(launch(config, directory, processes, devices, overrides))
    return hash_results(directory)


def train_killed(config: Path) -> dict[str, str]:
    """Trains one run that is killed with each combination of processes and devices except the last."""
    directory = config.parent / "killed"
    directory.mkdir()
    metrics, began = directory / "logs" / "run" / "metrics.jsonl", []
    keep = (f"trainer.checkpointer.keep=[{{every: {SAVE_EVERY}}}]",)
    for number, (processes, devices) in enumerate(CHANGES):
        began.append(f"{processes} x {devices} from {newest_checkpoint(directory)}")
        launcher = launch(config, directory, processes, devices, keep)
        if number + 1 == len(CHANGES):
            wait_for_launcher(launcher)
            return {"state": f"killed: {', '.join(began)}", **hash_results(directory)}
        target = STEPS * (number + 1) // len(CHANGES)
        while launcher.poll() is None and not (
            last_step(metrics) >= target <= newest_checkpoint(directory) + SAVE_EVERY
        ):
            time.sleep(0.005)
        if launcher.poll() is None:
            # Kill the processes directly, because the launcher would ask them to stop and they would save.
            for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        output = launcher.communicate()[0]
        if f"signal {int(signal.SIGKILL)}" not in output and "SIGKILL" not in output:
            raise SystemExit(f"the run on {processes} x {devices} devices ended before it was killed:\n{output}")
    raise AssertionError("the last one returns")


def launch(
    config: Path, directory: Path, processes: int, devices: int, overrides: tuple[str, ...]
) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "cli", "launch", "local", str(config), "-n", str(processes)]
    return subprocess.Popen(
        [*program, "--devices-per-process", str(devices), *overrides],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_launcher(launcher: subprocess.Popen[str]) -> None:
    output = launcher.communicate()[0]
    if launcher.returncode:
        raise SystemExit(f"{launcher.args} ended with {launcher.returncode}:\n{output}")


def newest_checkpoint(directory: Path) -> int:
    return max((int(path.name) for path in directory.glob("checkpoints/run/*") if path.name.isdigit()), default=0)


def last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    # The last line may be incomplete.
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return steps[-1] if steps else 0


def hash_results(directory: Path) -> dict[str, str]:
    """Returns the hashes of a finished run's results."""
    from lm_trainer.core.tree import named_leaves
    from lm_trainer.run.weights.saved_model import load_model

    log = directory / "logs" / "run"
    # Numbers stay text, so that the digits in the file are hashed.
    lines = [json.loads(line, parse_float=str) for line in (log / "metrics.jsonl").read_text().splitlines()]
    keys = ("train/loss", "optim/grad_norm", "eval/loss")
    # A run with more checkpoints has more fingerprint lines.
    series = [[line["step"], *(line.get(key) for key in keys)] for line in lines if any(key in line for key in keys)]
    weights = hashlib.sha256()
    for name, x in sorted(named_leaves(load_model(directory / "checkpoints" / "run").params).items()):
        weights.update(name.encode() + x.tobytes())
    return {
        "steps": str(sum("train/loss" in line for line in lines)),
        "losses": hashlib.sha256(json.dumps(series).encode()).hexdigest()[:16],
        "weights": weights.hexdigest()[:16],
        "program": json.loads((log / "env.json").read_text())[-1]["program"],
    }


def compare_random_runs(
    kind: str, count: int, steps: int, write: Callable[[str, Any], None], results: dict[str, Any]
) -> None:
    """Compares those runs of one kind that have no saved result, each over a number of steps."""
    from tests.step import random_runs

    random_runs.STEPS = steps

    draws = {
        "shapes": random_runs.draw_shapes,
        "families": random_runs.draw_family,
        "layerwise": random_runs.draw_layerwise,
        "uneven": random_runs.draw_uneven,
    }
    for number in range(count):
        run = draws[kind](number)
        key = f"{kind}/{number}/{hashlib.sha256(repr(run).encode()).hexdigest()[:8]}"
        if key not in results:
            write(key, {"run": str(run), "steps": steps, "difference": random_runs.difference(run)})


def report(results: dict[str, Any]) -> str:
    import jax

    git = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    lines = [
        "# Equality of bits",
        "",
        f"Written by `benchmarks/equality.py`: commit {git.stdout.strip()}, jax {jax.__version__}, Python "
        f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPU cores; devices are emulated.",
    ]
    if table := [results[key] for key in results if key.startswith("table/")]:
        lines += _results_table(table)
    for kind in KINDS:
        runs = {key: value for key, value in results.items() if key.startswith(f"{kind}/")}
        unequal = [f"- {value['run']}: {value['difference']}" for value in runs.values() if value["difference"]]
        if runs:
            lines += ["", f"## Runs drawn at random: {KINDS[kind]}", ""]
            steps = ", ".join(sorted({str(value.get("steps", 4)) for value in runs.values()}))
            equal = len(runs) - len(unequal)
            lines += [
                f"{len(runs)} runs of {steps} steps on one device and on another mesh, {equal} equal.",
                *unequal,
            ]
            lines += ["", *(f"- {value['run']}" for value in runs.values())]
    return "\n".join(lines) + "\n"


def _results_table(rows: list[dict[str, Any]]) -> list[str]:
    equal = len({(row["losses"], row["weights"]) for row in rows}) <= 1
    return [
        "",
        f"## {STEPS} steps of one model on processes x devices",
        "",
        f"GPT-2 with dropout, bfloat16 computation and recomputation, `determinism: {RUN['trainer']['determinism']}`.",
        "Losses: a hash of the loss and gradient norm of every step and the validation losses. Weights: a hash of all",
        "weights at the end. Program: that of a microbatch.",
        "",
        "| processes | devices in each | state | steps | losses | weights | program |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['processes']} | {row['devices']} | {row['state'] or 'default'} | {row['steps']} | "
            f"`{row['losses']}` | `{row['weights']}` | `{row['program']}` |"
            for row in rows
        ),
        "",
        "All rows are equal." if equal else "**Rows differ.**",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, drawn in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, default=0, help=f"number of runs of {drawn}")
    parser.add_argument("--steps", type=int, default=4, help="steps of each random run")
    parser.add_argument("--no-table", action="store_true", help="skip the table of processes and devices")
    parser.add_argument("--killed", action="store_true", help="in the table, only one device and the killed run")
    parser.add_argument("--determinism", choices=("elastic", "layerwise"), default="elastic", help="of the table")
    parser.add_argument("--out", type=Path, required=True, help="the report; its data are saved next to it as .json")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
    sys.path.insert(0, str(ROOT))
    data_file = arguments.out.with_suffix(".json")
    results: dict[str, Any] = json.loads(data_file.read_text()) if data_file.exists() else {}

    def write(key: str, value: Any) -> None:
        results[key] = value
        data_file.parent.mkdir(parents=True, exist_ok=True)
        data_file.write_text(json.dumps(results, indent=1) + "\n")
        arguments.out.write_text(report(results))
        print(key, value, flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        RUN["trainer"]["determinism"] = arguments.determinism
        config = write_run(Path(scratch))
        group_divisions = (
            [(2, 2, ("trainer.microbatches_per_gather=1",))] if arguments.determinism == "layerwise" else []
        )
        divisions = DIVISIONS[:1] if arguments.killed else [*DIVISIONS, *group_divisions]
        for processes, devices, state in () if arguments.no_table else divisions:
            key = f"table/{processes}x{devices} {' '.join(state)}"
            if key not in results:
                hashes = train(config, processes, devices, state)
                write(key, {"processes": processes, "devices": devices, "state": " ".join(state), **hashes})
        if arguments.killed and "table/killed" not in results:
            write("table/killed", {"processes": "several", "devices": "several", **train_killed(config)})
    for kind in KINDS:
        compare_random_runs(kind, getattr(arguments, kind), arguments.steps, write, results)
    arguments.out.write_text(report(results))
    unequal = [key for key, value in results.items() if value.get("difference")]
    rows = {(value["losses"], value["weights"]) for key, value in results.items() if key.startswith("table/")}
    sys.exit(1 if unequal or len(rows) > 1 else 0)


if __name__ == "__main__":
    main()
