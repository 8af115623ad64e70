"""Norms and histograms of gradients, parameters, updates and optimizer state, every so many steps.

They are computed by a program of their own, beside the step: watching changes no bit of what is trained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.histogram import histogram
from lm_trainer.core.tree import leaf_name
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.ordered_sum import squares_by_layer
from lm_trainer.parallel.sharding import ParamSharding
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import StateSharding
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.step.updates.watch import Target, WatchConfig


class Watched(NamedTuple):
    """Norms and histograms of one step, as trackers take them."""

    step: int
    """Steps done."""
    scalars: dict[str, float]
    histograms: dict[str, tuple[np.ndarray, np.ndarray]]
    """name -> (counts, edges)."""


class Watcher:
    """Looks at a step from outside: `before` and `after` it, and `report` when its values are wanted.

    Args:
        config: what to look at.
        sharding: where the state lies.
        axes: the logical axes of every parameter.
    """

    def __init__(self, config: WatchConfig, sharding: StateSharding, axes: Mapping[str, tuple[str | None, ...]]):
        self._config, self._mesh, self._layouts = config, sharding.mesh, sharding.params
        self._layered = {name for name, names in axes.items() if names[:1] == ("layers",)}
        self._copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
        self._measure = jax.jit(self._values, out_shardings=NamedSharding(self._mesh, PartitionSpec()))
        self._pending: list[tuple[int, Any]] = []

    def due(self, step: int) -> bool:
        """Returns true if the step after which `step` steps are done is to be looked at."""
        return self._config.enabled and step % self._config.interval == 0

    def due_between(self, step: int, last: int) -> bool:
        """Returns true if a step after `step` and up to `last` is to be looked at."""
        return self._config.enabled and (step // self._config.interval + 1) * self._config.interval <= last

    def compile(self, state: TrainState) -> None:
        """Compiles for states like this one, so that no step that is looked at takes longer for it."""
        if "updates" in self._config.watch_targets:
            self._copy.lower(state.params).compile()
        # Gradients and copies have the shapes of the parameters, and lie as they do.
        before = state.params if "updates" in self._config.watch_targets else None
        self._measure.lower(self._given(before, state.params, state)).compile()

    def before(self, state: TrainState) -> Params | None:
        """A copy of what is needed of the state before the step, which the step consumes."""
        return self._copy(state.params) if "updates" in self._config.watch_targets else None

    def after(self, before: Params | None, grads: Params, weight: jax.Array, state: TrainState) -> None:
        """Enqueues the computation and returns at once.

        Args:
            before: what `before` returned.
            grads: sums over the batch, in storage.
            weight: what to divide them by.
            state: the state after the step.
        """
        values = wait_on_cpu(self._measure(self._given(before, grads, state)))
        self._pending.append((state.step, (weight, values)))

    def report(self, until: int | None = None) -> list[Watched]:
        """Reports the steps looked at since the last report, up to step `until`; waits until they are computed."""
        due = [(step, values) for step, values in self._pending if until is None or step <= until]
        self._pending = self._pending[len(due) :]
        return [self._watched(step, jax.tree.map(_to_host, values)) for step, values in due]

    def _given(self, before: Params | None, grads: Params, state: TrainState) -> dict[str, Any]:
        """The arrays that the targets are measured from."""
        targets = self._config.watch_targets
        return {
            "before": before,
            "grads": grads if "grads" in targets else None,
            "params": state.params if {"params", "updates", "opt_state"} & {*targets} else None,
            "opt_state": state.opt_state if "opt_state" in targets else None,
        }

    def _values(self, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """By target: `squares` [1 or layers], `counts` and `edges` by name; those of `grads` are of the sums."""
        return {target: self._measured(*self._leaves(target, given)) for target in self._config.watch_targets}

    def _leaves(
        self, target: Target, given: Mapping[str, Any]
    ) -> tuple[Params, dict[str, ParamSharding], Collection[str]]:
        """The arrays of a target, their shardings, and the names of those with one index for each layer in front."""
        params = given["params"]
        if target == "opt_state":
            return self._moments(given["opt_state"], params)
        arrays = given["grads"] if target == "grads" else params
        if target == "updates":
            arrays = {n: x.astype(jnp.float32) - given["before"][n].astype(jnp.float32) for n, x in arrays.items()}
        return arrays, {name: self._layouts[name] for name in arrays}, self._layered & arrays.keys()

    def _moments(self, opt_state: Any, params: Params) -> tuple[Params, dict[str, ParamSharding], Collection[str]]:
        arrays, param_shardings, layered = {}, {}, set()
        for name, param, x in _moments(opt_state, params):
            arrays[name] = x
            whole = PartitionSpec(*(None,) * x.ndim)
            same = x.shape == params[param].shape
            param_shardings[name] = self._layouts[param] if same else ParamSharding(whole, whole, None, 1)
            if param in self._layered and x.shape[0] == params[param].shape[0]:
                layered.add(name)
        return arrays, param_shardings, layered

    def _measured(
        self, arrays: Params, param_shardings: Mapping[str, ParamSharding], layered: Collection[str]
    ) -> dict[str, Any]:
        config, result = self._config, {}
        if config.include_norms or config.include_per_parameter_norms:
            split = layered if config.split_scan_layers else ()
            result["squares"] = squares_by_layer(arrays, param_shardings, self._mesh, split)
        if config.include_histograms:
            groups = {name: x if name in layered else x[None] for name, x in arrays.items()}
            shared = not config.split_scan_layers
            both = {name: histogram(x, shared_edges=shared) for name, x in groups.items()}
            result["counts"] = {name: counts for name, (counts, _) in both.items()}
            result["edges"] = {name: edges for name, (_, edges) in both.items()}
        return result

    def _watched(self, step: int, values: tuple[Any, Any]) -> Watched:
        weight, targets = values
        scalars, histograms = {}, {}
        for target, seen in targets.items():
            # The gradient of a batch in which nothing has a weight is 0, as the step takes it.
            scale = 1 / (float(weight) or math.inf) if target == "grads" else 1.0
            squares = seen.get("squares", {})
            if self._config.include_norms:
                # Rounded once, so that the order of the parameters does not matter.
                total = math.fsum(float(x) for each in squares.values() for x in each)
                scalars[f"{target}/norm/total"] = math.sqrt(total) * scale
            if self._config.include_per_parameter_norms:
                norms = {name: np.sqrt(each.astype(np.float64)) * scale for name, each in squares.items()}
                scalars |= {f"{target}/norm/{name}": float(x) for name, x in _split(norms)}
            counts = seen.get("counts", {})
            if not self._config.split_scan_layers:
                counts = {name: each.sum(0, keepdims=True, dtype=np.int64) for name, each in counts.items()}
            edges = dict(_split({name: seen["edges"][name][: len(each)] for name, each in counts.items()}))
            for name, each in _split(counts):
                histograms[f"{target}/histogram/{name}"] = (
                    each.astype(np.int64),
                    edges[name].astype(np.float64) * scale,
                )
        return Watched(step, scalars, histograms)


def _moments(opt_state: Any, params: Params) -> Iterator[tuple[str, str, jax.Array]]:
    """The optimizer's arrays for each parameter, as (name, parameter, array). A name is `mu/blocks.0.mlp.up.weight` or,
    where two parts of the optimizer have such an array, `0.mu/blocks.0.mlp.up.weight`.
    """
    found = []
    for path, x in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        at = next((i for i, key in enumerate(path) if getattr(key, "key", None) in params), None)
        if at is not None and x.ndim and jnp.issubdtype(x.dtype, jnp.floating):
            found.append((leaf_name(path[:at]), path[at].key, leaf_name(path[at:]), x))
    short = {(prefix.rsplit(".", 1)[-1], leaf) for prefix, _, leaf, _ in found}
    for prefix, param, leaf, x in found:
        kind = prefix.rsplit(".", 1)[-1] if len(short) == len(found) else prefix
        yield f"{kind}/{leaf}", param, x


def _split(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """The entries along the first dimension, named by their index where there are several."""
    for name, each in arrays.items():
        for i, x in enumerate(each):
            yield (f"{name}/{i}" if len(each) > 1 else name), x


def _to_host(x: jax.Array) -> np.ndarray:
    """The value of a replicated array; waits until it is computed."""
    return np.asarray(x.addressable_data(0))
