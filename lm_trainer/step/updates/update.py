"""Last part of a step: computes new parameters from summed gradients, bit-identical on every mesh."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim import Optimizer
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.parallel.no_fma import without_fma
from lm_trainer.parallel.rehearsal import join_parts, local_devices
from lm_trainer.parallel.sharded_array import replicate, shards_by_device
from lm_trainer.step.dispatch.program import Program, create_programs
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import TrainedShardings

Metrics = dict[str, jax.Array]
UpdateFn = Callable[..., tuple[Params, PyTree, Metrics]]
"""`update(params, opt_state, grads, curvature, scalars)`; see `make_update`."""


def make_update(optimizer: Optimizer, tx: optax.GradientTransformationExtraArgs) -> UpdateFn:
    """Creates a function that computes one update. The function must be compiled.

    Its arguments are the parameters, the optimizer state, the summed gradients, the optimizer's curvature estimate
    (None if there is none in this step), and a dict of float32 scalars: `loss`, `weight` and the other metrics of the
    loss, as sums; `squares`, the sum of squares of the gradients; and `learning_rate`. A step whose loss or gradient is
    not finite leaves parameters and optimizer unchanged, except for the number of skipped steps. If all weights are 0,
    loss and gradient are 0.
    """

    def update(
        params: Params,
        opt_state: optax.OptState,
        grads: Params,
        curvature: Params | None,
        scalars: Mapping[str, jax.Array],
    ) -> tuple[Params, PyTree, Metrics]:
        sums = dict(scalars)
        weight, squares, learning_rate = sums.pop("weight"), sums.pop("squares"), sums.pop("learning_rate")
        # If all weights are 0, there is no mean: division by infinity turns every finite number into 0.
        divisor = jnp.where(weight == 0, jnp.inf, weight)
        # Divided once, after all sums, because a mean of means would depend on the division into microbatches.
        means = {name: total / divisor for name, total in sums.items()}
        grad_norm = jnp.sqrt(squares) / divisor
        mean_grads = jax.tree.map(lambda g: g / divisor.astype(g.dtype), grads)
        extra_args: dict[str, PyTree] = {
            "learning_rate": learning_rate,
            "grad_norm": grad_norm,
            "loss": means["loss"],
        }
        if optimizer.curvature is not None:
            extra_args |= {"curvature": curvature, "weight": weight}
        if optimizer.skips_steps:
            extra_args |= {"weight": weight}
        updates, new_opt_state = tx.update(mean_grads, opt_state, params, **extra_args)
        finite = jnp.isfinite(means["loss"]) & jnp.isfinite(grad_norm)
        # Selected on the device, because a decision on the host would have to wait for every step.
        keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
        new_params = jax.tree.map(keep, optax.apply_updates(params, updates), params)
        # An optimizer that itself skips bad steps restores its state except for its history, and counts the skipped
        # step.
        selected = new_opt_state if optimizer.skips_steps else jax.tree.map(keep, new_opt_state, opt_state)
        metrics = {**means, "grad_norm": grad_norm, "tokens": weight, **optimizer.metrics(selected)}
        return new_params, selected, metrics

    return update


class ShardedUpdate:
    """Update in which every device updates its own shard of the state."""

    def __init__(self, update: UpdateFn, shardings: TrainedShardings, mesh: Mesh):
        replicated = NamedSharding(mesh, PartitionSpec())
        # Fusion depends on the shapes on a device, and determines which operations are contracted to FMAs.
        rounded = without_fma(update)
        self._mesh = mesh
        # Donates parameters and optimizer state; argument 0 is the zero of `without_fma`.
        jitted = jax.jit(rounded, out_shardings=(*shardings, replicated), donate_argnums=(1, 2))
        # The new state reuses the memory of the old state.
        self._update = Program("update", jitted, "new state", elementwise=True)

    @cached_property
    def _zero(self) -> jax.Array:
        """The zero for `without_fma`. Sent once, in the first step, because devices in plans do not exist."""
        return replicate(np.uint32(0), self._mesh)

    def __call__(self, *args: PyTree) -> tuple[Params, PyTree, Metrics]:
        """Computes the update. Consumes parameters and optimizer state."""
        return wait_on_cpu(self._update(self._zero, *args))


class ReplicatedUpdate:
    """Update in which every device computes everything, in a program that does not depend on the mesh.

    For update rules that compute something over several parameters (such as clipping by the norm of the full update),
    and for optax transformations, which may compute anything. If they were sharded over devices, their order of
    additions would depend on the mesh, and no device can update one parameter without the others. Each device therefore
    needs the memory and does the work of the full update.
    """

    def __init__(self, update: UpdateFn, shardings: TrainedShardings, mesh: Mesh):
        # The gathered copies are donated, so that the new state reuses their memory.
        self._jitted = jax.jit(update, donate_argnums=(0, 1))
        self._mesh = mesh
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        gather = jax.jit(lambda x: x, out_shardings=self._everywhere)
        self._gather = Program("update: gather", gather, "whole")
        scatter = jax.jit(lambda x: x, out_shardings=tuple(shardings))
        self._scatter = Program("update: scatter", scatter, "new state")
        self._devices = local_devices(mesh)
        self._updates: dict[Hashable, list[Program]] = {}

    def __call__(self, *args: PyTree) -> tuple[Params, PyTree, Metrics]:
        """Computes the update. Consumes parameters and optimizer state."""
        gathered = wait_on_cpu(self._gather(args))
        leaves, structure = jax.tree.flatten(gathered)
        programs = self._get_programs(structure, leaves)
        # All parts are extracted before a program runs, because a program deletes its part together with the global
        # array.
        parts = [shards_by_device(x) for x in leaves]
        local = [jax.tree.unflatten(structure, [part[device] for part in parts]) for device in self._devices]
        results = [program(*args) for program, args in zip(programs, local, strict=True)]
        params, opt_state, metrics = jax.tree.map(self._join, *results)
        return (*wait_on_cpu(self._scatter((params, opt_state))), metrics)

    def _join(self, *parts: jax.Array) -> jax.Array:
        return join_parts(parts[0].shape, self._everywhere, parts)

    def _get_programs(self, structure: Hashable, leaves: list[jax.Array]) -> list[Program]:
        if structure not in self._updates:

            def argument_shapes(index: int) -> tuple[PyTree, ...]:
                on = SingleDeviceSharding(self._devices[index])
                shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on) for x in leaves]
                return jax.tree.unflatten(structure, shapes)

            program, devices = Program("update", self._jitted, "new state"), [[device] for device in self._devices]
            self._updates[structure] = create_programs(
                program, lambda _: self._jitted, argument_shapes, devices, "the update"
            )
        return self._updates[structure]
