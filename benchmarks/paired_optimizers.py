"""Losses of every optimizer minus the losses of AdamW, in paired runs at three sizes, with intervals over seeds.

    python -m benchmarks.paired_optimizers --results benchmarks/results/2-core-epyc

Writes paired_optimizers.md and paired_optimizers.json. The runs of a pair have the same seed, initial weights and
batches, bit for bit, and differ in the optimizer alone. The learning rate of each optimizer is chosen at each size
with a seed that no pair uses. A repeated command continues with what is missing in the JSON file.
"""

from __future__ import annotations

import argparse
import functools
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import stats

from benchmarks.optimizers import optimizer_settings
from benchmarks.saved_results import read_results, write_results
from benchmarks.setting import describe_load, describe_setting, markdown_table
from benchmarks.transfer_sweep import HELD_OUT, LENGTH, VOCAB, read_rows, training_order
from lm_trainer.core.batch import Batch
from lm_trainer.run.build.model import trace_model
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.run.config.run_config import RunConfig

WIDTHS, HEAD_DIM, LAYERS = (32, 64, 128), 16, 2
BASELINE = "adam"
TUNING_SEED = 1000
COARSE = (-2, 0, 2, 4, 6)
"""Powers of two, times the default of the optimizer, that are tried as learning rates at the smallest width first."""
LEVEL = 0.95

Train = Callable[[float, int], float]
"""`train(rate, seed)` returns the loss on held-out rows after training at a peak learning rate."""


def make_config(width: int, optimizer: Mapping[str, Any], rows: int, seed: int = 0) -> RunConfig:
    sizes = {"hidden_dim": width, "intermediate_dim": 3 * width, "num_layers": LAYERS}
    heads = {"num_heads": width // HEAD_DIM, "num_kv_heads": width // HEAD_DIM}
    # 1 / sqrt(width), as for a model of any width.
    shape = {**sizes, **heads, "initializer_range": width**-0.5, "gradient_checkpointing": False}
    return RunConfig.model_validate(
        {
            "model": {"type": "llama", "seq_len": LENGTH, "scan_layers": True, **shape},
            "optimizer": {"warmup": 0.1, **optimizer},
            "trainer": {"train_batch_size": rows, "elastic_shards": 1, "seed": seed},
        }
    )


@functools.cache
def initial_weights(width: int, seed: int) -> dict[str, np.ndarray]:
    """Returns the initial weights of a seed, which all optimizers start from."""
    model = trace_model(make_config(width, {"type": BASELINE}, 1, seed), VOCAB)
    return {name: np.asarray(x) for name, x in jax.jit(model.init)().items()}


def to_batch(rows: np.ndarray) -> Batch:
    shape = len(rows), LENGTH
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape).copy()
    segments, weights = np.zeros(shape, np.int32), np.ones(shape, np.float32)
    tokens, targets = (np.ascontiguousarray(x) for x in (rows[:, :-1], rows[:, 1:]))
    return Batch(tokens, targets, weights, positions, segments, None)  # pyright: ignore[reportArgumentType]


def build_training(width: int, optimizer: Mapping[str, Any], text: np.ndarray, steps: int, rows: int) -> Train:
    """Returns the training of an optimizer with the steps of `lmt train`, compiled once for all rates and seeds."""
    setup = build_setup(make_config(width, optimizer, rows), VOCAB, jax.devices()[:1])
    setup.step.compile(to_batch(text[:rows]))
    held_out = [to_batch(text[first : first + rows]) for first in range(0, HELD_OUT, rows)]

    def train(rate: float, seed: int) -> float:
        order = training_order(text, seed)
        rates = peak_schedule(setup, rate, steps)
        state = setup.from_weights(initial_weights(width, seed))
        for step in range(steps):
            batch = to_batch(text[np.take(order, range(step * rows, (step + 1) * rows), mode="wrap")])
            state, _ = setup.step(state, setup.step.put(batch, step), rates(step))
        weights = setup.weights_to_evaluate(state)[""]
        loss = setup.evaluate(weights, held_out)["loss"]
        return loss if math.isfinite(loss) else math.inf

    return train


def peak_schedule(setup: TrainingSetup, rate: float, steps: int) -> Callable[[int], float]:
    """Returns the schedule of the optimizer with another peak. Rates of other parameters keep their ratio to it."""
    optimizer: Any = setup.optimizer
    return optimizer.model_copy(update={"learning_rate": rate}).schedule(steps)


def choose_rate(train: Train, start: float, factors: Sequence[int]) -> float:
    """Returns the rate with the lowest loss, whose half and double were tried too.

    `factors` are powers of two, times `start`, that are tried first. From the best of them, the search goes on in
    factors of two to where the loss rises.
    """
    losses = {power: train(start * 2.0**power, TUNING_SEED) for power in factors}
    while True:
        best = min(losses, key=losses.__getitem__)
        missing = {best - 1, best + 1} - losses.keys()
        if not missing:
            return start * 2.0**best
        losses |= {power: train(start * 2.0**power, TUNING_SEED) for power in missing}


def difference(losses: Sequence[float], baseline: Sequence[float]) -> tuple[float, float]:
    """Returns the mean difference over the pairs, and half the width of its interval by Student's t."""
    values = [a - b for a, b in zip(losses, baseline, strict=True)]
    quantile = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1))
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def describe(options: argparse.Namespace, results: Mapping[str, Any], load_before: str) -> str:
    command = shlex.join(["python", "-m", "benchmarks.paired_optimizers", *sys.argv[1:]])
    heads = ["optimizer", *(f"width {width}: rate" for width in WIDTHS), *(f"width {width}: loss" for width in WIDTHS)]
    heads += [f"width {width}: minus AdamW's" for width in WIDTHS]
    table = []
    for name, result in results.items():
        losses = [result["losses"][str(width)] for width in WIDTHS]
        baselines = [results[BASELINE]["losses"][str(width)] for width in WIDTHS]
        pairs = [difference(*both) for both in zip(losses, baselines, strict=True)]
        means = [f"{statistics.mean(x):.3f}" for x in losses]
        differences = ["-" if name == BASELINE else f"{mean:+.3f} ± {half:.3f}" for mean, half in pairs]
        rates = [f"{result['rates'][str(width)]:.2g}" for width in WIDTHS]
        table.append([f"`{name}`", *rates, *means, *differences])
    return "\n".join(
        [
            "# Optimizers in paired runs",
            "",
            f"`{command}`: {describe_setting('jax', 'optax')} {load_before} {describe_load()}",
            "",
            f"A Llama of {LAYERS} layers and three widths trains for {options.steps} steps of {options.rows} rows",
            f"of {LENGTH} bytes of Python's language reference, with a warm-up of a tenth of the steps and the other",
            "defaults of the optimizer, such as its schedule. The loss is of held-out rows, in nats per byte. The",
            "runs of a pair have the same initial weights and batches. The peak rate is the best at each width, in",
            "factors of two, with a seed that no pair uses. Differences are means over",
            f"{options.seeds} seeds with their {LEVEL:.0%} interval by Student's t; a negative one is a lower loss",
            "than AdamW's. The interval covers the seeds, not the choice of the rate, the model or the length of",
            "training.",
            "",
            markdown_table(heads, table),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="training steps of each run")
    parser.add_argument("--rows", type=int, default=16, help="rows of a batch, a divisor of 64")
    parser.add_argument("--seeds", type=int, default=5, help="pairs at each size, at least 2")
    parser.add_argument("--types", nargs="+", help="optimizers besides AdamW; by default all")
    parser.add_argument("--results", type=Path, help="directory for the files; by default the table is printed")
    options = parser.parse_args()
    load_before, text = describe_load("at the start"), read_rows()
    settings = {name: getattr(options, name) for name in ("steps", "rows", "seeds")}
    path = None if options.results is None else options.results / "paired_optimizers.json"
    results = read_results(path, settings)
    types = [name for name, keys in optimizer_settings().items() if keys == {"type": name}]
    if unknown := set(options.types or ()) - set(types):
        parser.error(f"--types: there is no {', '.join(sorted(unknown))}; there are {', '.join(types)}")
    for name in dict.fromkeys([BASELINE, *(options.types or types)]):
        result = results.setdefault(name, {"losses": {}, "rates": {}})
        default: Any = make_config(WIDTHS[0], {"type": name}, options.rows).optimizer
        start, factors = default.learning_rate, COARSE
        for width in WIDTHS:
            if str(width) not in result["losses"]:
                train = build_training(width, {"type": name}, text, options.steps, options.rows)
                rate = choose_rate(train, start, factors)
                losses = [train(rate, seed) for seed in range(options.seeds)]
                result["rates"][str(width)], result["losses"][str(width)] = rate, losses
                print(name, width, f"{rate:.2g}", " ".join(f"{x:.3f}" for x in losses), flush=True)
                write_results(path, settings, results)
            # Best rates of neighbouring widths are close, so the search for the next one starts here.
            start, factors = result["rates"][str(width)], (0,)
    report = describe(options, results, load_before)
    if path is None:
        print(report)
        return
    path.with_suffix(".md").write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
