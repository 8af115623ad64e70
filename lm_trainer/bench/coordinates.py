"""Coordinate check: how much a few steps change the activations of models of several widths and depths.

With hyperparameters that suit every size, the changes do not depend on the size (Yang et al. 2022, arXiv 2203.03466,
appendix D.1).

Shape letters: B rows, S positions, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.nn.attention import make_context
from lm_trainer.optim.learning_rate import LearningRateConfig
from lm_trainer.plot.image import new_figure, write_figure
from lm_trainer.profile.timing import BenchResult
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import loss_function, trace_model
from lm_trainer.run.config.parametrization import StandardConfig, TransferConfig
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.vocabulary import find_vocabulary
from lm_trainer.step.state.model_def import ModelDef, Params

ACTIVATIONS = ("embedding", "last layer", "logits")
"""Names of the activations: the inputs of the first layer, the results of the last one, and the logits."""
FLAT = (-0.6, 0.25)
"""Exponents that the verdict calls flat. A part of a change is a sum over random initial weights, which shrinks with
the root of the size: its exponent is -1/2, and it is most of the change after a few small steps."""


class Size(NamedTuple):
    """Size of a model, as multiples of the base."""

    width: int
    depth: int


@dataclass(frozen=True)
class Coordinates:
    """Result of a coordinate check."""

    parametrization: str
    changes: Mapping[Size, Mapping[str, float]]
    """Root mean square of the change of each activation, by size and name."""

    def exponent(self, activation: str, over: str) -> float | None:
        """Returns the exponent of the change as a power of `width` or `depth`; None if that does not vary.

        It is the least-squares solution of log change = a log width + b log depth + c.
        """
        sizes = list(self.changes)
        axes = [axis for axis in Size._fields if len({getattr(size, axis) for size in sizes}) > 1]
        if over not in axes:
            return None
        inputs = np.array([[*(math.log(getattr(size, axis)) for axis in axes), 1.0] for size in sizes])
        outputs = np.array([math.log(self.changes[size][activation]) for size in sizes])
        return float(np.linalg.lstsq(inputs, outputs)[0][axes.index(over)])

    def exponents(self) -> dict[str, dict[str, float]]:
        """Returns the exponents by activation and axis."""
        return {
            name: {axis: value for axis in Size._fields if (value := self.exponent(name, axis)) is not None}
            for name in ACTIVATIONS
        }

    @property
    def is_flat(self) -> bool:
        """True if no activation changes more with the size."""
        return all(FLAT[0] <= value <= FLAT[1] for values in self.exponents().values() for value in values.values())


def measure_coordinates(
    config: RunConfig,
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    steps: int,
    standard: bool = False,
    on_size: Callable[[Size], object] = lambda _: None,
) -> Coordinates:
    """Trains models of all sizes for a few steps on one batch of random tokens, at the peak learning rate and without
    dropout.

    Args:
        config: configuration with the base.
        widths: multiples of the base's sizes, except the number of layers.
        depths: multiples of the base's number of layers.
        steps: number of steps.
        standard: train the same models under `parametrization: standard`, for comparison.
        on_size: called with each size before it is measured.

    Raises:
        UserError: if the parametrization has no base, or the optimizer needs the curvature.
    """
    if isinstance(config.parametrization, StandardConfig):
        raise UserError(
            "parametrization: standard has no base, so no sizes to compare; write type: mup or completep, with a base"
        )
    if not isinstance(config.optimizer, LearningRateConfig) or config.optimizer.curvature is not None:
        raise UserError(
            f"optimizer.type: {config.optimizer.type} needs estimates of the curvature, which this check lacks; write "
            f"optimizer.type: adam"
        )
    if len(depths) > 1 and "num_layers" not in config.parametrization.base:
        raise UserError("--depths needs the depth of a base: write parametrization.type: completep, or --depths 1")
    changes = {}
    for size in (Size(width, depth) for width in widths for depth in depths):
        on_size(size)
        changes[size] = _measure_changes(_sized_config(config, config.parametrization, size, standard), steps)
    return Coordinates("standard" if standard else config.parametrization.type, changes)


def _sized_config(config: RunConfig, parametrization: TransferConfig, size: Size, standard: bool) -> RunConfig:
    """Returns the configuration of a model of a size, at a constant learning rate."""
    base = {
        key: value * (size.depth if key == "num_layers" else size.width)
        for key, value in parametrization.base.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    # As a loop, whose compile time does not grow with the depth.
    sizes = {**parametrization.base, **base, "scan_layers": True}
    model = parametrization.model_copy(update={"base": sizes}).base_model(config.model)
    assert isinstance(config.optimizer, LearningRateConfig)
    rate = {"lr_schedule": "constant", "warmup": 0, "cycles": None, "cycle_length": None, "cycle_peaks": None}
    optimizer = config.optimizer.model_copy(update=rate)
    update = {"model": model, "optimizer": optimizer}
    return config.model_copy(update={**update, "parametrization": StandardConfig()} if standard else update)


def _measure_changes(config: RunConfig, steps: int) -> dict[str, float]:
    """Trains in one program, which compiles faster than the programs of a run, and computes the same up to rounding."""
    vocab_size = find_vocabulary(config).rows
    model, loss = trace_model(config, vocab_size), loss_function(config)
    params = model.optimizer_params()
    rule = config.optimizer.build(params)
    batch = random_batch(config.trainer.batch_schedule.at(0), config.model.seq_len, vocab_size)

    def take_step(
        batch: Batch, constant: Params, trained: Params, state: optax.OptState
    ) -> tuple[Params, optax.OptState]:
        def mean_loss(trained: Params) -> jax.Array:
            total, weight, _ = loss(model.merge({**constant, **trained}), batch, None)
            return total / weight

        value, grads = jax.value_and_grad(mean_loss)(trained)
        scalars = {"loss": value, "grad_norm": optax.tree.norm(grads), "weight": jnp.asarray(batch.weights).sum()}
        rate = jnp.float32(config.optimizer.learning_rate)
        updates, state = rule.update(grads, state, trained, learning_rate=rate, **scalars)
        return optax.apply_updates(trained, updates), state  # pyright: ignore[reportReturnType]

    # The batch is an argument, because XLA takes long to fold constants.
    @jax.jit
    def measure(batch: Batch) -> tuple[jax.Array, ...]:
        initial = model.init()
        constant = {name: x for name, x in initial.items() if name not in params}
        trained = {name: initial[name] for name in params}
        body = lambda _, carry: take_step(batch, constant, *carry)  # noqa: E731
        after, _ = jax.lax.fori_loop(0, steps, body, (trained, rule.init(trained)))
        pairs = zip(_activations(model, initial, batch), _activations(model, {**constant, **after}, batch), strict=True)
        return tuple(jnp.sqrt(jnp.mean(jnp.square(new - old))) for old, new in pairs)

    return dict(zip(ACTIVATIONS, map(float, measure(batch)), strict=True))


def _activations(model: ModelDef, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the values of `ACTIVATIONS`, float32."""
    decoder = model.merge(params)
    tokens_BS, positions_BS, segments_BS = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
    first_BSD = decoder.embed_input(tokens_BS, positions_BS, dtype=jnp.float32, key=None)
    context = make_context(decoder.spec.blocks, positions_BS, segments_BS)
    last_BSD = decoder.run_layers(first_BSD, tokens_BS, context)[0]
    logits_BSV = decoder.logits(decoder.head_input(last_BSD, tokens_BS, segments_BS, key=None))
    return first_BSD, last_BSD, logits_BSV


def describe_coordinates(coordinates: Coordinates) -> BenchResult:
    """Returns the changes of all sizes, the exponents, and the verdict."""
    header = ("size", "  ".join(f"{name:>12}" for name in ACTIVATIONS))
    table = [
        (f"width x{size.width}, depth x{size.depth}", "  ".join(f"{values[name]:>12.4g}" for name in ACTIVATIONS))
        for size, values in coordinates.changes.items()
    ]
    exponents = coordinates.exponents()
    axes = [axis for axis in Size._fields if axis in exponents[ACTIVATIONS[0]]]
    powers = [
        (f"exponent of the {axis}", "  ".join(f"{exponents[name][axis]:>12.2f}" for name in ACTIVATIONS))
        for axis in axes
    ]
    over = " and ".join(f"{axis}s" for axis in axes)
    verdict = (
        f"flat over {over}" if coordinates.is_flat else f"not flat over {over}: exponents of {FLAT[0]} to {FLAT[1]} are"
    )
    values = {
        "parametrization": coordinates.parametrization,
        "changes": [{**size._asdict(), **values} for size, values in coordinates.changes.items()],
        "exponents": exponents,
        "flat": coordinates.is_flat,
    }
    return BenchResult([header, *table, *powers, (coordinates.parametrization, verdict)], values)


def draw_coordinates(coordinates: Sequence[Coordinates], path: Path) -> None:
    """Draws the change of each activation against the width, with one curve for each depth and parametrization.

    Args:
        coordinates: results for the same sizes.
        path: a PNG, SVG or PDF file.

    Raises:
        UserError: if the file has another type or cannot be written, or matplotlib is not installed.
    """
    figure = new_figure(path, (4.0 * len(ACTIVATIONS), 3.4))
    axes = figure.subplots(1, len(ACTIVATIONS), squeeze=False)[0]
    for axis, activation in zip(axes, ACTIVATIONS, strict=True):
        for result, style in zip(coordinates, ("-", "--"), strict=False):
            for depth in dict.fromkeys(size.depth for size in result.changes):
                points = [(s.width, values[activation]) for s, values in result.changes.items() if s.depth == depth]
                label = f"{result.parametrization}, depth x{depth}"
                axis.plot(*zip(*points, strict=True), style, marker="o", markersize=4, linewidth=1.2, label=label)
        axis.set(xscale="log", yscale="log", xlabel="width, as a multiple of the base", title=activation)
    axes[0].set_ylabel("change, root mean square")
    axes[0].legend(fontsize="x-small")
    write_figure(figure, path)
