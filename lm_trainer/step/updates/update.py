"""The last piece of a step: from summed gradients to new parameters, bit for bit the same on every mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lm_trainer.optim import Optimizer
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.no_fma import without_fma
from lm_trainer.parallel.rehearsal import join_parts, local_devices
from lm_trainer.parallel.sharded_array import by_device, replicate
from lm_trainer.step.dispatch.program import Program, on_each
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import TrainedShardings

Metrics = dict[str, jax.Array]
UpdateFn = Callable[..., tuple[Params, Any, Metrics]]
"""`update(params, opt_state, grads, curvature, scalars)`: see `make_update`."""


def make_update(optimizer: Optimizer, tx: optax.GradientTransformationExtraArgs) -> UpdateFn:
    """One update as a function to be compiled.

    Its arguments are parameters, optimizer state, summed gradients, the optimizer's curvature estimate (None where it
    takes none at this step), and a dict of float32 scalars: `loss`, `weight` and what else the loss reports, as sums;
    `squares`, the sum of squares of the gradients; `learning_rate`. A step whose loss or gradient is not finite leaves
    parameters and optimizer as they were, but for the count of skipped steps. Where no token has a weight, loss and
    gradient are 0.
    """

    def update(
        params: Params, opt_state: Any, grads: Params, curvature: Any, scalars: Mapping[str, jax.Array]
    ) -> tuple[Params, Any, Metrics]:
        sums = dict(scalars)
        weight, squares, learning_rate = sums.pop("weight"), sums.pop("squares"), sums.pop("learning_rate")
        # A batch without a token that counts has no mean: divided by infinity, all that is finite becomes 0.
        divisor = jnp.where(weight == 0, jnp.inf, weight)
        # Divided once, after all sums: a mean of means would depend on how the batch is cut.
        means = {name: total / divisor for name, total in sums.items()}
        grad_norm = jnp.sqrt(squares) / divisor
        mean_grads = jax.tree.map(lambda g: g / divisor.astype(g.dtype), grads)
        given = {"learning_rate": learning_rate, "grad_norm": grad_norm, "loss": means["loss"]}
        if optimizer.curvature is not None:
            given |= {"curvature": curvature, "weight": weight}
        if optimizer.skips_steps:
            given |= {"weight": weight}
        updates, new_opt_state = tx.update(mean_grads, opt_state, params, **given)
        finite = jnp.isfinite(means["loss"]) & jnp.isfinite(grad_norm)
        # Selected on the device: if the host decided, it would wait for every step.
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        new_params = jax.tree.map(keep, optax.apply_updates(params, updates), params)
        # An optimizer that skips bad steps leaves all but its history as it was, and counts the step.
        kept = new_opt_state if optimizer.skips_steps else jax.tree.map(keep, new_opt_state, opt_state)
        metrics = {**means, "grad_norm": grad_norm, "tokens": weight, **optimizer.metrics(kept)}
        return new_params, kept, metrics

    return update


class ShardedUpdate:
    """Every device updates the part of the state that it holds."""

    def __init__(self, update: UpdateFn, shardings: TrainedShardings, mesh: Mesh):
        replicated = NamedSharding(mesh, PartitionSpec())
        # How a program is fused depends on the shapes that a device holds, and with it what is contracted.
        rounded = without_fma(update)
        self._mesh = mesh
        # Consumes parameters and optimizer state: argument 0 is the zero of `without_fma`.
        jitted = jax.jit(rounded, out_shardings=(*shardings, replicated), donate_argnums=(1, 2))
        # The new state takes the memory of the old one.
        self._update = Program("update", jitted, "new state", elementwise=True)

    @cached_property
    def _zero(self) -> jax.Array:
        """The zero of `without_fma`, sent once, and not before a step: plans are for devices that are not there."""
        return replicate(np.uint32(0), self._mesh)

    def __call__(self, *args: Any) -> tuple[Params, Any, Metrics]:
        """Consumes parameters and optimizer state."""
        return wait_on_cpu(self._update(self._zero, *args))


class ReplicatedUpdate:
    """Every device computes the whole update, in a program of its own that knows nothing of the mesh.

    For update rules that compute something over several parameters, such as a norm of the whole update by which they
    are clipped, or a transformation of optax, of which nobody can tell: cut over devices, their order of additions
    would depend on the mesh, and no device can update one parameter without the others. Costs each device the memory
    and the work of the whole update.
    """

    def __init__(self, update: UpdateFn, shardings: TrainedShardings, mesh: Mesh):
        # Donated are the gathered copies, so that the new state lies in their memory.
        self._jitted = jax.jit(update, donate_argnums=(0, 1))
        self._mesh = mesh
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        gather = jax.jit(lambda x: x, out_shardings=self._everywhere)
        self._gather = Program("update: gather", gather, "whole")
        scatter = jax.jit(lambda x: x, out_shardings=tuple(shardings))
        self._scatter = Program("update: scatter", scatter, "new state")
        self._devices = local_devices(mesh)
        self._updates: dict[Any, list[Program]] = {}

    def __call__(self, *args: Any) -> tuple[Params, Any, Metrics]:
        """Consumes parameters and optimizer state."""
        whole = wait_on_cpu(self._gather(args))
        leaves, structure = jax.tree.flatten(whole)
        programs = self._programs(structure, leaves)
        # All parts are taken before a program runs: it consumes its own, and with it the array that they belong to.
        parts = [by_device(x) for x in leaves]
        local = [jax.tree.unflatten(structure, [part[device] for part in parts]) for device in self._devices]
        results = [program(*args) for program, args in zip(programs, local, strict=True)]
        params, opt_state, metrics = jax.tree.map(self._join, *results)
        return (*wait_on_cpu(self._scatter((params, opt_state))), metrics)

    def _join(self, *parts: jax.Array) -> jax.Array:
        return join_parts(parts[0].shape, self._everywhere, parts)

    def _programs(self, structure: Any, leaves: list[jax.Array]) -> list[Program]:
        if structure not in self._updates:

            def arguments(index: int) -> Any:
                on = SingleDeviceSharding(self._devices[index])
                shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on) for x in leaves]
                return jax.tree.unflatten(structure, shapes)

            program, devices = Program("update", self._jitted, "new state"), [[device] for device in self._devices]
            self._updates[structure] = on_each(program, lambda _: self._jitted, arguments, devices, "the update")
        return self._updates[structure]
