"""Measures the cost of a check of the hardware: steps with and without it, alternating.

    python -m benchmarks.cross_check_cost --shapes nano 30m > benchmarks/results/2-core-epyc/cross_check_cost.md

Each pair is a step without and a step with a check, in alternating order, on the same state and batch. The CPU time of
all threads of the process is compared, which other work on the machine changes less than it changes wall time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from typing import Any

from benchmarks.setting import describe_load, describe_setting, markdown_table

EVERY = 200
HEADS = ["shape", "devices", "gather", "microbatches of a device", "s without", "s with", "one check, of a step",
         "quartiles", f"`every: {EVERY}`"]  # fmt: skip
GATHERS = {"model": "elastic", "layer": "layerwise"}


def main() -> None:
    """Prints a table with a row for each shape, number of devices and way to gather."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["nano"], help="shapes of benchmarks.peers")
    parser.add_argument("--devices", nargs="+", type=int, default=[1], help="numbers of emulated devices")
    parser.add_argument("--gather", nargs="+", choices=list(GATHERS), default=["model"])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(" | ".join(measure(options.shapes[0], options.devices[0], options.gather[0], options.pairs)))
        return
    before, rows = describe_load("at the start"), []
    for shape in options.shapes:
        for devices in options.devices:
            rows += [_measure_in_process(shape, devices, gather, options.pairs) for gather in options.gather]
    print("# The cost of a check of the hardware\n")
    command = shlex.join(["python", "-m", "benchmarks.cross_check_cost", *sys.argv[1:]])
    print(f"`{command}`: {describe_setting('jax', 'jaxlib')}", before, describe_load())
    print(f"\n{markdown_table(HEADS, rows)}\n")
    print(
        f"CPU seconds of a step, medians of {options.pairs} pairs. The cost of a check is the median over the pairs of "
        f"the difference by the step without it. Emulated devices share the cores of the machine."
    )


def _measure_in_process(shape: str, devices: int, gather: str, pairs: int) -> list[str]:
    """Measures in a new process, because the number of emulated devices is fixed when JAX starts."""
    command = [sys.executable, "-m", "benchmarks.cross_check_cost", "--only", "--shapes", shape]
    command += ["--devices", str(devices), "--gather", gather, "--pairs", str(pairs)]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row = done.stdout.splitlines()[-1]
    # An interrupted measurement leaves the rows so far.
    print(row, file=sys.stderr)
    return row.split(" | ")


def measure(shape_name: str, devices: int, gather: str, pairs: int) -> list[str]:
    """Returns the cells of a row of the table."""
    from benchmarks.elastic_cost import build_setup_of_kind, make_batch
    from benchmarks.peers.shapes import SHAPES
    from lm_trainer.step.check.cross_check import CrossCheck
    from lm_trainer.step.check.settings import CrossCheckConfig

    shape = SHAPES[shape_name]
    size = Namespace(shape=shape_name, seq_len=shape.seq_len, batch=shape.rows, mp="f32")
    setup, batch = build_setup_of_kind(GATHERS[gather], devices, size), make_batch(size)
    setup.step.compile(batch)
    check = CrossCheck(CrossCheckConfig(every=1), 0, print)
    state = setup.init()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(pairs + 2):
        for checked in (False, True) if number % 2 else (True, False):
            state, took = _time_step(setup, state, batch, check if checked else None)
            # The first pairs compile.
            if number >= 2:
                seconds[checked].append(took)
    costs = [after / before - 1 for before, after in zip(seconds[False], seconds[True], strict=True)]
    low, cost, high = statistics.quantiles(costs, n=4)
    plan = setup.step.plans.at(0)
    return [
        shape_name,
        str(devices),
        gather,
        f"{plan.count / devices:g}",
        *(f"{statistics.median(seconds[checked]):.3f}" for checked in (False, True)),
        f"{cost:.1%}",
        f"{low:.1%} to {high:.1%}",
        f"{cost / EVERY:.3%}",
    ]


def _time_step(setup: Any, state: Any, batch: Any, check: Any) -> tuple[Any, float]:
    """Returns the state after a step, and the CPU seconds of the step."""
    import jax

    started = time.process_time()
    state, metrics = setup.take_step(state, batch, None, check)
    jax.block_until_ready((state.params, metrics))
    return state, time.process_time() - started


if __name__ == "__main__":
    main()
