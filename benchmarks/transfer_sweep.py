"""Sweeps of the learning rate over widths and depths, with `parametrization: standard` and `completep`.

    python -m benchmarks.transfer_sweep --results benchmarks/results/2-core-epyc

Writes transfer_sweep.md with the best rate of each size, transfer_sweep.svg with all losses, and transfer_sweep.json.
Widths vary at the depth of the base, and depths at its width. Each model trains on the bytes of the language reference
included with Python; the loss is the mean over held-out text. A repeated command continues with what is missing in the
JSON file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import pydoc_data.topics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.saved_results import read_results, write_results
from benchmarks.setting import describe_load, describe_setting, markdown_table
from lm_trainer.core.batch import Batch
from lm_trainer.ladder.fit.rate import parabola_minimum
from lm_trainer.plot.image import new_figure, write_figure
from lm_trainer.run.build.model import loss_function, trace_model
from lm_trainer.run.config.run_config import RunConfig

BASE = {"hidden_dim": 16, "intermediate_dim": 48, "num_heads": 1, "num_kv_heads": 1, "num_layers": 2}
WIDTHS, DEPTHS = (1, 2, 4, 8), (1, 4, 16)
RATES = tuple(2.0**power for power in range(-9, -1))
VOCAB, LENGTH, HELD_OUT = 256, 64, 64
WARMUP = 0.1


class Size(NamedTuple):
    """Multiples of the base."""

    width: int
    depth: int


SIZES = [*(Size(width, 1) for width in WIDTHS), *(Size(1, depth) for depth in DEPTHS[1:])]
Losses = Mapping[tuple[str, Size], list[float]]
"""Losses at `RATES` by parametrization and size."""


def make_config(kind: str, size: Size, rows: int, seed: int = 0) -> RunConfig:
    """Returns the configuration of a model with a multiple of the base's sizes."""
    factors = {key: size.depth if key == "num_layers" else size.width for key in BASE}
    sizes = {key: value * factors[key] for key, value in BASE.items()}
    parametrization = {"type": kind} if kind == "standard" else {"type": kind, "base": BASE}
    return RunConfig.model_validate(
        {
            "model": {"type": "llama", "seq_len": LENGTH, "scan_layers": True, "initializer_range": 0.25, **sizes},
            "optimizer": {"type": "adam", "weight_decay": 0.0},
            "trainer": {"train_batch_size": rows, "elastic_shards": 1, "seed": seed},
            "parametrization": parametrization,
        }
    )


def read_rows() -> np.ndarray:
    """Returns all rows of the text, int32 [rows, LENGTH + 1], in random order."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    count = len(text) // (LENGTH + 1)
    rows = np.frombuffer(text[: count * (LENGTH + 1)], np.uint8).astype(np.int32).reshape(count, -1)
    return np.random.default_rng(0).permutation(rows)


def training_order(text: np.ndarray, seed: int) -> np.ndarray:
    """Returns the indices of the rows that are not held out, in the order of a seed."""
    return np.random.default_rng(seed).permutation(len(text) - HELD_OUT) + HELD_OUT


def to_batch(rows: Any) -> Batch:
    count = rows.shape[0]
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], (count, LENGTH))
    segments = jnp.zeros((count, LENGTH), jnp.int32)
    return Batch(rows[:, :-1], rows[:, 1:], jnp.ones((count, LENGTH)), positions, segments, None)  # pyright: ignore[reportArgumentType]


def build_training(kind: str, size: Size, text: np.ndarray, steps: int, rows: int) -> Callable[[float, int], float]:
    """Returns a function from the peak learning rate and a seed to the loss on held-out rows, compiled once."""
    config = make_config(kind, size, rows)
    model, loss = trace_model(config, VOCAB), loss_function(config)
    rule = config.optimizer.build(model.optimizer_params())
    held_out = to_batch(jnp.asarray(text[:HELD_OUT]))

    def mean_loss(params: Any, batch: Batch) -> jax.Array:
        total, weight, _ = loss(model.merge(params), batch, None)
        return total / weight

    # The text is an argument, because XLA takes long to fold constants.
    @jax.jit
    def train(peak: jax.Array, initial: Any, text: jax.Array, held_out: Batch) -> jax.Array:
        def step(index: jax.Array, carry: Any) -> Any:
            params, state = carry
            start = (index * rows) % (text.shape[0] - rows)
            batch = to_batch(jax.lax.dynamic_slice_in_dim(text, start, rows))
            value, grads = jax.value_and_grad(mean_loss)(params, batch)
            done = index / steps
            rate = peak * jnp.minimum(done / WARMUP + 1 / steps, (1 - done) / (1 - WARMUP))
            scalars = {"learning_rate": rate, "loss": value, "grad_norm": optax.tree.norm(grads)}
            updates, state = rule.update(grads, state, params, **scalars)
            return optax.apply_updates(params, updates), state

        params, _ = jax.lax.fori_loop(0, steps, step, (initial, rule.init(initial)))
        return mean_loss(params, held_out)

    @functools.cache
    def start(seed: int) -> tuple[Any, jax.Array]:
        """Returns the initial weights of a seed, and the training rows in its order."""
        weights = trace_model(make_config(kind, size, rows, seed), VOCAB).init()
        return weights, jnp.asarray(text[training_order(text, seed)])

    return lambda peak, seed: float(train(jnp.float32(peak), *start(seed), held_out))


def best_rate(losses: list[float]) -> float:
    """Returns the base-2 logarithm of the best rate, by a parabola through the lowest loss and its neighbours."""
    index = int(np.nanargmin(losses))
    low, high = index - 1, index + 1
    if low < 0 or high >= len(losses) or not np.isfinite(losses[high]):
        return math.log2(RATES[index])
    return math.log2(parabola_minimum(RATES[low : high + 1], losses[low : high + 1]))


def describe(losses: Losses, options: argparse.Namespace) -> str:
    """Returns the content of the Markdown file."""
    heads = ["size", *(f"{kind}: best rate" for kind in KINDS), *(f"{kind}: loss there" for kind in KINDS)]
    heads += [f"{kind}: loss at the base's rate" for kind in KINDS]
    at_base = {kind: int(np.nanargmin(losses[kind, Size(1, 1)])) for kind in KINDS}
    table = [
        [
            f"width x{size.width}, depth x{size.depth}",
            *(f"2^{best_rate(losses[kind, size]):.2f}" for kind in KINDS),
            *(f"{np.nanmin(losses[kind, size]):.3f}" for kind in KINDS),
            *(f"{losses[kind, size][at_base[kind]]:.3f}" for kind in KINDS),
        ]
        for size in SIZES
    ]
    moves = {
        kind: {
            "width": best_rate(losses[kind, Size(WIDTHS[-1], 1)]) - best_rate(losses[kind, Size(1, 1)]),
            "depth": best_rate(losses[kind, Size(1, DEPTHS[-1])]) - best_rate(losses[kind, Size(1, 1)]),
        }
        for kind in KINDS
    }
    lines = [
        f"- {kind}: over {WIDTHS[-1]} times the width, the best rate moves by a factor of 2^{move['width']:.2f}; over "
        f"{DEPTHS[-1]} times the depth, by 2^{move['depth']:.2f}."
        for kind, move in moves.items()
    ]
    return "\n".join(
        [
            "# Learning rates over widths and depths",
            "",
            describe_setting("jax") + " " + describe_load(),
            "",
            f"`python -m benchmarks.transfer_sweep --steps {options.steps} --rows {options.rows} --seeds "
            f"{options.seeds}`: a Llama of hidden size {BASE['hidden_dim']} and {BASE['num_layers']} layers is the "
            f"base; bytes of Python's language reference in rows of {LENGTH}, AdamW without weight decay, warm-up and "
            f"linear decay to 0. Losses are means over the seeds, which draw the weights and the order of the rows. "
            f"Rates are 2^{math.log2(RATES[0]):.0f} to 2^{math.log2(RATES[-1]):.0f} in factors of 2; the best rate is "
            f"the minimum of a parabola through three losses.",
            "",
            markdown_table(heads, table),
            "",
            *lines,
            "",
            "![Losses against learning rates](transfer_sweep.svg)",
            "",
        ]
    )


KINDS = ("standard", "completep")


def draw(losses: Losses, path: Path) -> None:
    """Draws a panel for each parametrization, over widths and over depths."""
    figure = new_figure(path, (9.0, 6.4))
    axes = figure.subplots(len(KINDS), 2, sharex=True, sharey=True)
    for row, kind in zip(axes, KINDS, strict=True):
        for axis, over in zip(row, Size._fields, strict=True):
            other = "depth" if over == "width" else "width"
            for size in (size for size in SIZES if getattr(size, other) == 1):
                axis.plot(RATES, losses[kind, size], "o-", markersize=3, label=f"{over} x{getattr(size, over)}")
            axis.set(xscale="log", title=f"{kind}, over the {over}")
            axis.set_xscale("log", base=2)
            axis.legend(fontsize="small")
        row[0].set_ylabel("loss on held-out text, nats per byte")
    for axis in axes[-1]:
        axis.set_xlabel("peak learning rate")
    best = min(min(values) for values in losses.values())
    axes[0, 0].set_ylim(best - 0.1, best + 2.0)
    write_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="training steps of each run")
    parser.add_argument("--rows", type=int, default=8, help="rows of a batch")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each size and rate")
    parser.add_argument("--results", type=Path, help="directory for the table and the picture")
    options = parser.parse_args()
    text, losses = read_rows(), {}
    settings = {name: getattr(options, name) for name in ("steps", "rows", "seeds")}
    path = None if options.results is None else options.results / "transfer_sweep.json"
    results = read_results(path, settings)
    for kind, size in itertools.product(KINDS, SIZES):
        name = f"{kind}, width x{size.width}, depth x{size.depth}"
        if name not in results:
            train = build_training(kind, size, text, options.steps, options.rows)
            means = [np.mean([train(rate, seed) for seed in range(options.seeds)]) for rate in RATES]
            results[name] = [float(mean) if math.isfinite(mean) else math.inf for mean in means]
            write_results(path, settings, results)
            print(name, " ".join(f"{mean:.3f}" for mean in means), flush=True)
        losses[kind, size] = results[name]
    table = describe(losses, options)
    if path is None:
        print(table)
        return
    path.with_suffix(".md").write_text(table, encoding="utf-8")
    draw(losses, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
