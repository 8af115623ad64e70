"""Norms and histograms of gradients, parameters, updates and optimizer state at regular intervals.

A separate program computes them next to the step, so watching does not change a bit of the trained model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.histogram import histogram
from lm_trainer.core.jax_types import PyTree
from lm_trainer.core.tree import leaf_name
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.ordered_sum import squares_by_layer
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import StateSharding
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.step.updates.watch import Target, WatchConfig


class _Inputs(TypedDict):
    """Arrays from which targets are measured; None if no target needs them."""

    before: PyTree
    """Parameters before the step."""
    grads: PyTree
    """Gradients, summed over the batch."""
    params: PyTree
    opt_state: PyTree


class WatchedStep(NamedTuple):
    """Norms and histograms of one step, in the form that trackers take."""

    step: int
    """Number of completed steps."""
    scalars: dict[str, float]
    histograms: dict[str, tuple[np.ndarray, np.ndarray]]
    """Name -> (counts, edges)."""


class Watcher:
    """Observes steps. Call `before_step` and `after_step` in each step, and `report` to get the values.

    Args:
        config: configuration of the quantities to watch.
        sharding: shardings of the state.
        axes: logical axes of every parameter.
    """

    def __init__(self, config: WatchConfig, sharding: StateSharding, axes: Mapping[str, tuple[str | None, ...]]):
        self._config, self._mesh, self._layouts = config, sharding.mesh, sharding.params
        self._measured = sharding.measured
        self._layered = {name for name, names in axes.items() if names[:1] == ("layers",)}
        self._copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
        self._measure = jax.jit(self._values, out_shardings=NamedSharding(self._mesh, PartitionSpec()))
        self._pending: list[tuple[int, PyTree]] = []

    def due(self, step: int) -> bool:
        """Returns true if the step after which `step` steps are completed is to be watched."""
        return self._config.enabled and step % self._config.interval == 0

    def due_between(self, step: int, last: int) -> bool:
        """Returns true if a step after `step` and up to `last` (inclusive) is to be watched."""
        return self._config.enabled and (step // self._config.interval + 1) * self._config.interval <= last

    def compile(self, state: TrainState) -> None:
        """Compiles for states like this one, so that watched steps take no longer than necessary."""
        if "updates" in self._config.watch_targets:
            self._copy.lower(state.params).compile()
        # Gradients and copies have the shapes and shardings of the parameters.
        copies = state.params if "updates" in self._config.watch_targets else None
        self._measure.lower(self._inputs(copies, state.params, state)).compile()

    def before_step(self, state: TrainState) -> Params | None:
        """Copies the parameters if a target needs their values before the step, which consumes the state."""
        return self._copy(state.params) if "updates" in self._config.watch_targets else None

    def after_step(self, before: Params | None, grads: Params, weight: jax.Array, state: TrainState) -> None:
        """Enqueues the computation and returns at once.

        Args:
            before: the result of `before_step`.
            grads: gradients, summed over the batch, in storage sharding.
            weight: number by which to divide `grads`.
            state: state after the step.
        """
        values = wait_on_cpu(self._measure(self._inputs(before, grads, state)))
        self._pending.append((state.step, (weight, values)))

    def report(self, until: int | None = None) -> list[WatchedStep]:
        """Returns the steps watched since the last report, up to step `until`. Waits until they are computed."""
        due = [(step, values) for step, values in self._pending if until is None or step <= until]
        self._pending = self._pending[len(due) :]
        return [self._make_record(step, jax.tree.map(_to_host, values)) for step, values in due]

    def _inputs(self, before: Params | None, grads: Params, state: TrainState) -> _Inputs:
        """Returns the arrays from which the targets are measured."""
        targets = self._config.watch_targets
        params, grads = ({n: x for n, x in tree.items() if n not in self._measured} for tree in (state.params, grads))
        return {
            "before": before,
            "grads": grads if "grads" in targets else None,
            "params": params if {"params", "updates", "opt_state"} & {*targets} else None,
            "opt_state": state.opt_state if "opt_state" in targets else None,
        }

    def _values(self, inputs: _Inputs) -> dict[str, dict[str, PyTree]]:
        """Returns by target: `squares` [1 or layers], `counts` and `edges` by name. For `grads`, of the sums."""
        return {
            target: self._measure_arrays(*self._select_arrays(target, inputs)) for target in self._config.watch_targets
        }

    def _select_arrays(
        self, target: Target, inputs: _Inputs
    ) -> tuple[Params, dict[str, ParamSharding], Collection[str]]:
        """Returns the arrays of a target, their shardings, and the names of arrays with a leading layer axis."""
        params = inputs["params"]
        if target == "opt_state":
            return self._select_moments(inputs["opt_state"], params)
        arrays = inputs["grads"] if target == "grads" else params
        if target == "updates":
            arrays = {n: x.astype(jnp.float32) - inputs["before"][n].astype(jnp.float32) for n, x in arrays.items()}
        return arrays, {name: self._layouts[name] for name in arrays}, self._layered & arrays.keys()

    def _select_moments(
        self, opt_state: optax.OptState, params: Params
    ) -> tuple[Params, dict[str, ParamSharding], Collection[str]]:
        arrays, param_shardings, layered = {}, {}, set()
        for name, param, x in _find_moments(opt_state, params):
            arrays[name] = x
            replicated = PartitionSpec(*(None,) * x.ndim)
            like_param = x.shape == params[param].shape
            param_shardings[name] = (
                self._layouts[param] if like_param else ParamSharding(replicated, replicated, None, 1)
            )
            if param in self._layered and x.shape[0] == params[param].shape[0]:
                layered.add(name)
        return arrays, param_shardings, layered

    def _measure_arrays(
        self, arrays: Params, param_shardings: Mapping[str, ParamSharding], layered: Collection[str]
    ) -> dict[str, PyTree]:
        config, result = self._config, {}
        if config.include_norms or config.include_per_parameter_norms:
            split = layered if config.split_scan_layers else ()
            result["squares"] = squares_by_layer(arrays, param_shardings, self._mesh, split)
        if config.include_histograms:
            groups = {name: x if name in layered else x[None] for name, x in arrays.items()}
            shared = not config.split_scan_layers
            histograms = {name: histogram(x, shared_edges=shared) for name, x in groups.items()}
            result["counts"] = {name: counts for name, (counts, _) in histograms.items()}
            result["edges"] = {name: edges for name, (_, edges) in histograms.items()}
        return result

    def _make_record(self, step: int, values: tuple[PyTree, PyTree]) -> WatchedStep:
        weight, targets = values
        scalars, histograms = {}, {}
        for target, measured in targets.items():
            # If all weights of a batch are 0, the gradient is 0, as in the step.
            scale = 1 / (float(weight) or math.inf) if target == "grads" else 1.0
            squares = measured.get("squares", {})
            if self._config.include_norms:
                # Rounded once, so that the order of the parameters does not matter.
                total = math.fsum(float(x) for layers in squares.values() for x in layers)
                scalars[f"{target}/norm/total"] = math.sqrt(total) * scale
            if self._config.include_per_parameter_norms:
                norms = {name: np.sqrt(layers.astype(np.float64)) * scale for name, layers in squares.items()}
                scalars |= {f"{target}/norm/{name}": float(x) for name, x in _split_first_axis(norms)}
            counts = measured.get("counts", {})
            if not self._config.split_scan_layers:
                counts = {name: layers.sum(0, keepdims=True, dtype=np.int64) for name, layers in counts.items()}
            edges = dict(
                _split_first_axis({name: measured["edges"][name][: len(layers)] for name, layers in counts.items()})
            )
            for name, layer in _split_first_axis(counts):
                histograms[f"{target}/histogram/{name}"] = (
                    layer.astype(np.int64),
                    edges[name].astype(np.float64) * scale,
                )
        return WatchedStep(step, scalars, histograms)


def _find_moments(opt_state: optax.OptState, params: Params) -> Iterator[tuple[str, str, jax.Array]]:
    """Yields the optimizer's arrays for each parameter, as (name, parameter, array).

    A name is `mu/blocks.0.mlp.up.weight` or, if two parts of the optimizer have such an array,
    `0.mu/blocks.0.mlp.up.weight`.
    """
    moments: list[tuple[str, str, str, jax.Array]] = []
    for path, x in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        index = next((i for i, key in enumerate(path) if getattr(key, "key", None) in params), None)
        if index is not None and x.ndim and jnp.issubdtype(x.dtype, jnp.floating):
            moments.append((leaf_name(path[:index]), path[index].key, leaf_name(path[index:]), x))
    short = {(prefix.rsplit(".", 1)[-1], leaf) for prefix, _, leaf, _ in moments}
    for prefix, param, leaf, x in moments:
        kind = prefix.rsplit(".", 1)[-1] if len(short) == len(moments) else prefix
        yield f"{kind}/{leaf}", param, x


def _split_first_axis(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the entries along the first dimension; if there are several, the name includes their index."""
    for name, stack in arrays.items():
        for i, x in enumerate(stack):
            yield (f"{name}/{i}" if len(stack) > 1 else name), x


def _to_host(x: jax.Array) -> np.ndarray:
    """Returns the value of a replicated array. Waits until it is computed."""
    return np.asarray(x.addressable_data(0))
