"""Measures the memory of a training process by part, next to PyTorch's.

    python -m benchmarks.process_memory [SHAPE ...]

Each process compiles a step, and trains four. Its resident memory is measured from the start, and the peak counts. The
parts of `lmt`'s peak are measured in the same process (packages, and what compiled programs take), or planned (all
arrays, in the phase of a step that takes the most). What remains is memory that was freed, and that the allocator
keeps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.process import ROOT, Worker, worker_environment
from benchmarks.peers.shapes import SHAPES
from benchmarks.peers.worker import peak_bytes
from benchmarks.setting import describe_setting, markdown_table
from lm_trainer.core.runtime import prepare_process, resident_bytes, return_freed_memory

STEPS = 4
PEERS = ("torch compile", "torch eager")
PARTS: Mapping[str, tuple[str, ...]] = {
    "packages": ("packages",),
    "programs": ("programs",),
    "state": ("state",),
    "gradients": ("gradients", "gradients of a layer"),
    "gathered layers": ("gathered layers",),
    "activations": ("activations of layers",),
    "temporary": ("temporary",),
}
"""Column -> parts that it adds up: measured ones, and parts of the largest phase of a step."""


def measure_parts(name: str) -> dict[str, int]:
    """Trains in this process. Returns the bytes of each part, and of the `peak`."""
    prepare_process()
    import jax

    from benchmarks.peers.lmt_step import run_config
    from lm_trainer.plan.memory import StepMemory
    from lm_trainer.profile.workload import random_batch
    from lm_trainer.run.build.setup import build_setup

    shape, devices = SHAPES[name], jax.devices()[:1]
    config = run_config(shape, "elastic")
    setup = build_setup(config, shape.vocab, devices)
    packages = resident_bytes() or 0
    batch = random_batch(shape.rows, shape.seq_len, shape.vocab)
    setup.step.compile(batch)
    return_freed_memory()
    programs = (resident_bytes() or 0) - packages
    state = setup.init()
    for _ in range(STEPS):
        state, metrics = setup.step(state, setup.step.put(batch), config.optimizer.learning_rate)
        jax.block_until_ready((state.params, metrics))
    peak = peak_bytes()
    arrays = StepMemory(config, shape.vocab, devices, "cpu").plan().peak.parts
    return {"packages": packages, "programs": programs, **arrays, "peak": peak}


def measure_in_own_process(name: str) -> dict[str, int]:
    """Runs `measure_parts` in a new process."""
    command = [sys.executable, "-m", "benchmarks.process_memory", name, "--parts"]
    done = subprocess.run(command, cwd=ROOT, env=worker_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_peers(name: str) -> list[int]:
    """Returns the peak memory of each of `PEERS` in bytes."""
    with tempfile.TemporaryDirectory() as directory:
        weights = Path(directory) / "weights.npz"
        command = [sys.executable, "-m", "benchmarks.peers.lmt_step", name, str(weights)]
        subprocess.run(command, cwd=ROOT, check=True)
        peaks = []
        for kind in PEERS:
            with Worker(kind, name, weights) as worker:
                peaks.append(worker.run(STEPS).peak)
        return peaks


def table_row(name: str) -> list[str]:
    """Returns the table row of a shape, in MiB."""
    parts, peers = measure_in_own_process(name), measure_peers(name)
    sums = [sum(parts.get(part, 0) for part in added) for added in PARTS.values()]
    sizes = [*sums, parts["peak"] - sum(sums), parts["peak"], *peers]
    ratios = [f"{parts['peak'] / peak:.2f}" for peak in peers]
    return [name, *(f"{size / 2**20:,.0f}" for size in sizes), *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="of benchmarks.peers; default: 30m llama-30m 124m")
    parser.add_argument("--results", type=Path, help="write the report to this file too")
    parser.add_argument("--parts", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts:
        print(json.dumps(measure_parts(options.shapes[0])))
        return
    rows = []
    for name in options.shapes or ("30m", "llama-30m", "124m"):
        rows.append(table_row(name))
        print(*rows[-1], sep="  ", flush=True)
    heads = ["shape", *PARTS, "kept by the allocator", "lmt", *PEERS, *(f"lmt / {peer}" for peer in PEERS)]
    report = f"""# Memory of a training process, by part

`python -m benchmarks.process_memory`: {describe_setting("jax", "jaxlib", "flax", "optax", "torch")}
The shapes of `python -m benchmarks.peers`, in float32, with AdamW and without recomputation; MiB.

{markdown_table(heads, rows)}

A process compiles a step, and trains {STEPS}; `lmt` and `torch` are the peaks of resident memory from the start.
Packages and programs are measured when nothing else is in memory, and the arrays from state to temporary are planned,
in the phase of a step that takes the most. The allocator keeps freed memory, because giving it back costs time in
every step.
"""
    print(report)
    if options.results:
        options.results.write_text(report)


if __name__ == "__main__":
    main()
