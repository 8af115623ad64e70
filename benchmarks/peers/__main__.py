"""Times a training step of `lmt`, and the same step in PyTorch, transformers and plain JAX, in turn.

    python -m benchmarks.peers --shape nano --turns 15
    python -m benchmarks.peers --shape 124m --kinds lmt "torch compile" --results peers.md --json peers.json

Uses a GPU if there is one, with products in bfloat16. All workers hold their memory at the same time, so limit
`--kinds` to as many as fit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.agreement import BFLOAT16, FLOAT32, STEPS, Trace, find_disagreements
from benchmarks.peers.kinds import KINDS, MATMUL
from benchmarks.peers.process import ROOT, MissingPackage, Steps, Worker, worker_environment
from benchmarks.peers.report import REFERENCE, Results, report
from benchmarks.peers.shapes import SHAPES
from benchmarks.setting import busy_seconds, describe_load
from lm_trainer.core.errors import UserError


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="nano")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1, help="steps of each kind per turn")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="lmt is always included")
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    parser.add_argument("--results", type=Path, help="write the report to this file too")
    options = parser.parse_args(arguments)
    if options.turns < 1 or options.steps < 1:
        parser.error("--turns and --steps are at least 1")
    command_line = sys.argv[1:] if arguments is None else arguments
    options.command = shlex.join(["python", "-m", "benchmarks.peers", *command_line])
    try:
        results = measure(options)
    except UserError as error:
        sys.exit(f"error: {error}")
    text = "\n".join(report(results)) + "\n"
    print(text, end="")
    for path, content in ((options.results, text), (options.json, json.dumps(results.as_json(), indent=1) + "\n")):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


def measure(options: argparse.Namespace) -> Results:
    """Starts a worker for each kind, compares the first steps of all workers, and times the workers in turn.

    Raises:
        UserError: if a worker fails, or trains differently from `lmt`.
    """
    initial_load = describe_load("before")
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        weights = Path(directory) / "weights.npz"
        write_weights(options.shape, weights)
        probe = stack.enter_context(Worker(MATMUL, options.shape, weights))
        workers, traces, missing = start_workers(options.shape, options.kinds, probe, weights, stack)
        if problems := find_disagreements(traces, REFERENCE, FLOAT32 if probe.device == "cpu" else BFLOAT16):
            raise UserError("not all kinds train the same, so no times are shown:\n" + "\n".join(problems))
        turns, products, other_cores = take_turns(workers, probe, options.turns, options.steps)
        facts = workers[REFERENCE].facts
        return Results(
            shape=SHAPES[options.shape],
            device=probe.device,
            command=options.command,
            turns=turns,
            products=products,
            traces=traces,
            flops_per_token=facts["flops_per_token"],
            parameters=int(facts["parameters"]),
            missing=missing,
            other_cores=other_cores,
            load=initial_load,
        )


def start_workers(
    shape: str, kinds: Sequence[str], probe: Worker, weights: Path, stack: contextlib.ExitStack
) -> tuple[dict[str, Worker], dict[str, Trace], dict[str, str]]:
    """Starts the workers one after the other, and runs the first steps of each.

    Returns:
        The workers, the traces of their first steps, and the missing kinds with the reasons.

    Raises:
        UserError: if a worker fails, or runs on another kind of device than `probe`.
    """
    workers: dict[str, Worker] = {}
    traces: dict[str, Trace] = {}
    missing: dict[str, str] = {}
    for kind in [REFERENCE, *(kind for kind in KINDS if kind in kinds and kind != REFERENCE)]:
        if probe.device != "cpu" and kind.endswith("+alloc"):
            missing[kind] = "lmt leaves the allocator alone where there is an accelerator"
            continue
        _print_progress(f"{kind}: starting, and {STEPS} steps to compare")
        try:
            worker = stack.enter_context(Worker(kind, shape, weights))
        except MissingPackage as package:
            missing[kind] = f"{package} is not installed"
            continue
        if worker.device != probe.device:
            raise UserError(f"{kind} runs on a {worker.device}, jax on a {probe.device}; leave it out by --kinds")
        traces[kind] = Trace(worker.run(STEPS).loss, worker.weights_norm())
        workers[kind] = worker
    return workers, traces, missing


def write_weights(shape: str, path: Path) -> None:
    """Writes the weights in a new process, because memory or threads of the driver would disturb the workers."""
    command = [sys.executable, "-m", "benchmarks.peers.lmt_step", shape, str(path)]
    done = subprocess.run(command, cwd=ROOT, env=worker_environment(), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"the initial weights could not be made:\n{done.stderr[-2000:]}")


def take_turns(
    workers: dict[str, Worker], probe: Worker, turns: int, steps: int
) -> tuple[dict[str, list[Steps]], list[float], float | None]:
    """Returns the steps of every kind in every turn, the matrix product's rates, and the cores other processes used."""
    steps_by_kind: dict[str, list[Steps]] = {kind: [] for kind in workers}
    products: list[float] = []
    own_seconds, busy_before, started = -time.process_time(), busy_seconds(), time.perf_counter()
    for turn in range(turns):
        _print_progress(f"turn {turn + 1} of {turns}")
        for kind in workers if turn % 2 == 0 else reversed(workers):
            steps_by_kind[kind].append(workers[kind].run(steps))
        product = probe.run(1)
        products.append(probe.facts["flops"] / product.wall[0])
        own_seconds += sum(product.cpu)
    own_seconds += time.process_time() + sum(
        sum(timed.cpu) + timed.idle for kind_steps in steps_by_kind.values() for timed in kind_steps
    )
    busy_after, seconds = busy_seconds(), time.perf_counter() - started
    other_cores = (
        None
        if busy_before is None or busy_after is None
        else max(0.0, busy_after - busy_before - own_seconds) / seconds
    )
    return steps_by_kind, products, other_cores


def _print_progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
