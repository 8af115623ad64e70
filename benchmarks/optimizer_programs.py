"""Time of an update of Muon, SOAP and Kron, each next to a straightforward optax program of the same rule.

    python -m benchmarks.optimizer_programs --results benchmarks/results/2-core-xeon

Writes optimizer_programs.md. The programs of a pair take the same gradients and settings, and run in turn in one
process.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from operator import truediv
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from benchmarks.optimizers import make_config, quartiles
from benchmarks.peers.shapes import SHAPES
from benchmarks.plain_optimizers import RATE, WEIGHT_DECAY, Arrays, plain_kron, plain_muon, plain_soap
from benchmarks.setting import describe_load, describe_setting, markdown_table
from lm_trainer.optim import Param
from lm_trainer.run.build.setup import build_setup

WARM_UP = 3
"""Pairs that are not timed, because the first ones compile."""
MAX_GRAD_NORM = 1.0
PLAIN: dict[str, Callable[[Mapping[str, Param]], optax.GradientTransformation]] = {
    "muon": plain_muon,
    "soap": plain_soap,
    "kron": plain_kron,
}
SETTINGS: dict[str, dict[str, object]] = {
    "muon": {},
    "soap": {"partition_grads_into_blocks": False},
    "kron": {"partition_grads_into_blocks": False},
}
"""Settings with which our rule computes what the plain program computes."""


def make_update(rule: optax.GradientTransformation, weights: Arrays, grads: Arrays) -> Callable[[], float]:
    """Returns a function that updates the weights with these gradients and returns its seconds."""

    def update(weights: Arrays, state: optax.OptState, grads: Arrays) -> tuple[Arrays, optax.OptState]:
        updates, state = rule.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state  # pyright: ignore[reportReturnType]

    program = jax.jit(update, donate_argnums=(0, 1))
    state = jax.jit(rule.init)(weights)

    def run() -> float:
        nonlocal weights, state
        started = time.perf_counter()
        weights, state = jax.block_until_ready(program(weights, state, grads))
        return time.perf_counter() - started

    return run


def with_scalars(rule: optax.GradientTransformationExtraArgs) -> optax.GradientTransformation:
    """Gives a rule of this library what a step computes before it: the norm, the rate and the loss."""

    def update(grads: Arrays, state: optax.OptState, weights: Arrays | None = None) -> tuple[Arrays, optax.OptState]:
        scalars = {"learning_rate": jnp.float32(RATE), "loss": jnp.float32(1), "grad_norm": optax.global_norm(grads)}
        return rule.update(grads, state, weights, **scalars)  # pyright: ignore[reportReturnType, reportArgumentType]

    return optax.GradientTransformation(rule.init, update)  # pyright: ignore[reportArgumentType]


def measure(shape: str, name: str, pairs: int) -> dict[str, list[float]]:
    """Returns the seconds of both updates of each pair, `ours` and `plain`."""
    optimizer = {"type": name, **SETTINGS[name], "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_GRAD_NORM}
    setup = build_setup(make_config(SHAPES[shape], optimizer), SHAPES[shape].vocab, jax.devices()[:1])
    params = setup.model.optimizer_params()
    keys = dict(zip(params, jax.random.split(jax.random.key(0), len(params)), strict=True))
    grads = {name: 0.02 * jax.random.normal(keys[name], param.shape) for name, param in params.items()}

    def as_matrices(arrays: Arrays) -> Arrays:
        return {name: x if params[name].role == "vector" else params[name].to_matrices(x) for name, x in arrays.items()}

    plain = optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), PLAIN[name](params))
    updates = {
        "ours": make_update(with_scalars(setup.tx), jax.tree.map(jnp.copy, grads), grads),
        "plain": make_update(plain, as_matrices(jax.tree.map(jnp.copy, grads)), as_matrices(grads)),
    }
    seconds: dict[str, list[float]] = {program: [] for program in updates}
    for number in range(pairs + WARM_UP):
        for program in updates if number % 2 else reversed(updates):
            elapsed = updates[program]()
            if number >= WARM_UP:
                seconds[program].append(elapsed)
    return seconds


def table_row(name: str, seconds: Mapping[str, list[float]]) -> list[str]:
    ratios = [*map(truediv, seconds["ours"], seconds["plain"])]
    medians = [f"{statistics.median(seconds[program]):.3f}" for program in ("ours", "plain")]
    mean = sum(seconds["ours"]) / sum(seconds["plain"])
    return [f"`{name}`", *medians, f"{statistics.median(ratios):.2f}", quartiles(ratios, ".2f"), f"{mean:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="30m", help="shape of benchmarks.peers")
    parser.add_argument("--pairs", type=int, default=20, help="updates of each program, a multiple of 10 for SOAP")
    parser.add_argument("--types", nargs="+", choices=list(PLAIN), default=list(PLAIN), help="optimizers")
    parser.add_argument("--results", type=Path, help="directory for the table; by default it is printed")
    options = parser.parse_args()
    load_before = describe_load("at the start")
    rows = [table_row(name, measure(options.shape, name, options.pairs)) for name in options.types]
    heads = ["optimizer", "s of an update", "s of the plain program", "ratio", "quartiles", "ratio of the means"]
    text = "\n".join(
        [
            f"# Updates next to straightforward optax programs, for weights of the shape {options.shape}",
            "",
            f"`{shlex.join(['python', '-m', 'benchmarks.optimizer_programs', *sys.argv[1:]])}`: "
            f"{describe_setting('jax', 'jaxlib', 'optax')} {load_before} {describe_load()}",
            "",
            markdown_table(heads, rows),
            "",
            f"Medians over {options.pairs} pairs of an update, in alternating order; float32, one device, with the",
            "clipping of the gradient and the change of the weights. The plain programs are in",
            "`benchmarks/plain_optimizers.py`; Muon is `optax.contrib.muon`. No matrix is split into blocks. The means",
            "include what is not done in every update, such as the bases of SOAP.",
            "",
        ]
    )
    if options.results is None:
        print(text)
    else:
        (options.results / "optimizer_programs.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
