"""Time, CPU time and memory of a step with every optimizer, each next to AdamW.

    python -m benchmarks.optimizers --results benchmarks/results/2-core-epyc
    python -m benchmarks.optimizers --shape tiny --pairs 4 --types muon soap

Writes optimizers_SHAPE.md and optimizers_SHAPE.json. Each optimizer is measured in a process of its own, where its
steps alternate with steps of AdamW on the same batch. Memory is the optimizer state that `lmt plan` counts. A repeated
command continues with what is missing in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.shapes import SHAPES, Shape
from benchmarks.saved_results import read_results, write_results
from benchmarks.setting import describe_load, describe_setting, markdown_table

WARM_UP = 3
"""Pairs that are not timed, because the first ones compile."""
VARIANTS: dict[str, dict[str, Any]] = {
    "muon, qk_clip": {"type": "muon", "qk_clip": 100.0},
    "adam, bfloat16": {"type": "adam", "state_dtype": "bfloat16"},
    "adam, float8": {"type": "adam", "state_dtype": "float8"},
}
"""Settings in addition to the defaults of every type."""
HEADS = [
    "optimizer",
    "s of a step",
    "quartiles",
    "time / AdamW",
    "quartiles",
    "CPU s of a step",
    "CPU / AdamW",
    "state, bytes per parameter",
]
Costs = Mapping[str, Any]
"""`seconds`, `cpu`, `adam_seconds` and `adam_cpu`, one value for each pair, and `state` in bytes per parameter."""


def optimizer_settings() -> dict[str, dict[str, Any]]:
    """Returns the settings of every optimizer of the registry, and of `VARIANTS`, by name in the table."""
    from lm_trainer.optim import OPTIMIZERS

    types = [member.model_fields["type"].default for member in OPTIMIZERS]
    return {name: {"type": name} for name in types} | VARIANTS


def make_config(shape: Shape, optimizer: Mapping[str, Any]) -> Any:
    from lm_trainer.run.config.run_config import RunConfig

    model = {**shape.model_section(), "scan_layers": True, "gradient_checkpointing": False}
    sections = {"model": model, "data": {"tokenizer": "bytes"}, "trainer": {"train_batch_size": shape.rows}}
    return RunConfig.model_validate({**sections, "optimizer": {"warmup": 0, **optimizer}})


def measure(shape: Shape, optimizer: Mapping[str, Any], pairs: int) -> dict[str, Any]:
    """Measures an optimizer and AdamW in turn. Returns `Costs`."""
    import jax

    from lm_trainer.run.build.setup import build_setup
    from lm_trainer.step.dispatch.memory import state_bytes
    from lm_trainer.step.state.train_state import abstract_state

    setup = build_setup(make_config(shape, optimizer), shape.vocab, jax.devices()[:1])
    planned = state_bytes(abstract_state(setup.model.shapes, setup.tx, setup.sharding))
    count = sum(x.size for x in setup.model.shapes.values())
    steps = {"": make_step(setup, shape), "adam_": make_step(make_adam_setup(shape), shape)}
    costs: dict[str, list[float]] = {prefix + kind: [] for prefix in steps for kind in ("seconds", "cpu")}
    for number in range(pairs + WARM_UP):
        # The order changes, so that neither always follows the other.
        for prefix in steps if number % 2 else reversed(steps):
            seconds, cpu = steps[prefix]()
            if number >= WARM_UP:
                costs[f"{prefix}seconds"].append(seconds)
                costs[f"{prefix}cpu"].append(cpu)
    return {**costs, "state": planned.get("optimizer state", 0) / count}


def make_adam_setup(shape: Shape) -> Any:
    import jax

    from lm_trainer.run.build.setup import build_setup

    return build_setup(make_config(shape, {"type": "adam"}), shape.vocab, jax.devices()[:1])


def make_step(setup: Any, shape: Shape) -> Callable[[], tuple[float, float]]:
    """Returns a function that runs a step and returns its wall and CPU seconds."""
    import jax

    from lm_trainer.profile.workload import random_batch

    batch = random_batch(shape.rows, shape.seq_len, shape.vocab)
    setup.step.compile(batch)
    placed, state = setup.step.put(batch), setup.init()

    def step() -> tuple[float, float]:
        nonlocal state
        started, used = time.perf_counter(), time.process_time()
        # The time of a step does not depend on the rate.
        state, metrics = setup.step(state, placed, 1e-4)
        jax.block_until_ready((state.params, state.opt_state, metrics))
        return time.perf_counter() - started, time.process_time() - used

    return step


def measure_in_process(options: argparse.Namespace, name: str) -> Costs:
    """Measures in a new process, so that no optimizer uses memory or programs of another one."""
    command = [sys.executable, "-m", "benchmarks.optimizers", "--only", name]
    command += ["--shape", options.shape, "--pairs", str(options.pairs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def quartiles(values: Sequence[float], digits: str) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:{digits}} to {high:{digits}}"


def table_row(name: str, costs: Costs) -> list[str]:
    times = [a / b for a, b in zip(costs["seconds"], costs["adam_seconds"], strict=True)]
    return [
        f"`{name}`",
        f"{statistics.median(costs['seconds']):.3f}",
        quartiles(costs["seconds"], ".3f"),
        f"{statistics.median(times):.2f}",
        quartiles(times, ".2f"),
        f"{statistics.mean(costs['cpu']):.3f}",
        f"{sum(costs['cpu']) / sum(costs['adam_cpu']):.2f}",
        f"{costs['state']:.2f}",
    ]


def describe(options: argparse.Namespace, results: Mapping[str, Costs], load_before: str) -> str:
    command = shlex.join(["python", "-m", "benchmarks.optimizers", *sys.argv[1:]])
    return "\n".join(
        [
            f"# Optimizers on a model of the shape {options.shape}",
            "",
            f"`{command}`: {describe_setting('jax', 'jaxlib', 'optax')} {load_before} {describe_load()}",
            "",
            f"{SHAPES[options.shape].describe()}; float32, one device, the defaults of every optimizer.",
            "",
            markdown_table(HEADS, [table_row(name, costs) for name, costs in results.items()]),
            "",
            f"Times are of whole steps: medians and quartiles over {options.pairs} pairs of a step with the optimizer",
            "and a step with AdamW, in alternating order; the ratios are of the two steps of a pair. CPU seconds are",
            "of all threads, means over all steps, and so include work that is not done in every step: the curvature",
            "of Sophia, the bases of SOAP. `kron` updates its factors in each of its first 500 steps, as here, and",
            "later less often. The state is what `lmt plan` counts.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="30m", help="shape of benchmarks.peers")
    parser.add_argument("--pairs", type=int, default=20, help="steps of each optimizer")
    parser.add_argument("--types", nargs="+", help="names in the table; by default all optimizers")
    parser.add_argument("--results", type=Path, help="directory for the files; by default the table is printed")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = optimizer_settings()
    if options.only is not None:
        print(json.dumps(measure(SHAPES[options.shape], settings[options.only], options.pairs)))
        return
    if unknown := set(options.types or ()) - settings.keys():
        parser.error(f"--types: there is no {', '.join(sorted(unknown))}; there are {', '.join(settings)}")
    load_before = describe_load("at the start")
    path = None if options.results is None else options.results / f"optimizers_{options.shape}.json"
    measured = {"shape": options.shape, "pairs": options.pairs}
    results = read_results(path, measured)
    for name in options.types or settings:
        if name not in results:
            results[name] = measure_in_process(options, name)
            write_results(path, measured, results)
            print(" | ".join(table_row(name, results[name])), file=sys.stderr, flush=True)
    text = describe(options, results, load_before)
    if path is None:
        print(text)
    else:
        path.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
