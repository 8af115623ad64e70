"""Update of the parameters that a router sets from the load of its experts over the global batch.

The gradient of such a parameter is the number of assignments of each expert (`lm_trainer.nn.router.LoadParam`). These
are whole numbers, so their float32 sum is exact up to 2^24 assignments, and its order never depends on the mesh.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.jax_types import PyTree
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import TrainedShardings
from lm_trainer.step.updates.split import split_inputs
from lm_trainer.step.updates.update import Metrics, UpdateFn

LoadRates = Mapping[str, float | None]
"""Name of a load parameter -> rate of a selection bias, or None for the relative load."""


def update_loads(
    params: Params, loads: Params, scalars: Mapping[str, jax.Array], rates: LoadRates
) -> tuple[Params, Metrics]:
    """Returns the new load parameters, and metrics of the load, which are means over routers. It must be compiled.

    A selection bias rises by its rate for an expert below the mean load and falls by it above (Wang et al. 2024, arXiv
    2408.15664, algorithm 1). A relative load becomes the load divided by its mean. If loss or gradient are not finite,
    or no token was routed, the parameters stay the same.

    Args:
        params: the load parameters by name, [E] or [layers, E].
        loads: their gradients, summed over the global batch.
        scalars: `loss` and `squares`, as for `make_update`.
        rates: rates of the parameters.
    """
    finite = jnp.isfinite(scalars["loss"]) & jnp.isfinite(scalars["squares"])
    updated, measured = {}, {}
    for name, old in params.items():
        load, rate = loads[name].astype(jnp.float32), rates[name]
        mean = jnp.mean(load, axis=-1, keepdims=True)
        routed = mean > 0
        relative = load / jnp.where(routed, mean, 1.0)
        new = relative if rate is None else old + rate * jnp.sign(mean - load)
        updated[name] = jnp.where(finite & routed, new, old)
        # Both parameters of a router have the same load.
        measured[name.rpartition(".")[0]] = relative.reshape(-1, load.shape[-1])
    overload_R = jnp.concatenate([jnp.max(x, axis=-1) for x in measured.values()])
    unused_R = jnp.concatenate([jnp.sum(x == 0, axis=-1) for x in measured.values()])
    return updated, {
        "router_batch_overload": jnp.mean(overload_R),
        "router_unused_experts": jnp.mean(unused_R.astype(jnp.float32)),
    }


def with_loads(update: UpdateFn, rates: LoadRates) -> UpdateFn:
    """Returns `update` for parameters among which are load parameters, as one function."""
    if not rates:
        return update

    def update_all(
        params: Params,
        opt_state: PyTree,
        grads: Params,
        curvature: Params | None,
        scalars: Mapping[str, jax.Array],
    ) -> tuple[Params, PyTree, Metrics]:
        params, grads, curvature, loads, counts = split_inputs(params, grads, curvature, rates)
        params, opt_state, metrics = update(params, opt_state, grads, curvature, scalars)
        loads, of_load = update_loads(loads, counts, scalars, rates)
        return {**params, **loads}, opt_state, {**metrics, **of_load}

    return update_all


class LoadUpdate:
    """Update of all parameters: an update of the optimizer's parameters, and a program for the load parameters.

    Args:
        update: update of the optimizer's parameters.
        rates: rates of the load parameters.
        shardings: shardings of the state.
        mesh: device mesh.
    """

    def __init__(self, update: UpdateFn, rates: LoadRates, shardings: TrainedShardings, mesh: Mesh):
        everywhere = NamedSharding(mesh, PartitionSpec())
        stored = {name: shardings.params[name] for name in rates}

        def compute(params: Params, loads: Params, scalars: Mapping[str, jax.Array]) -> tuple[Params, Metrics]:
            # Every device computes all of it, because the bits of a sum over a shard would depend on the mesh.
            params, loads = (jax.lax.with_sharding_constraint(tree, everywhere) for tree in (params, loads))
            return jax.lax.with_sharding_constraint(update_loads(params, loads, scalars, rates), everywhere)

        computed = jax.jit(compute, out_shardings=everywhere)
        self._rates, self._update = rates, update
        self._compute = Program("update: load", computed, "new state")
        self._store = Program("update: store load", jax.jit(lambda x: x, out_shardings=stored), "new state")

    def __call__(
        self,
        params: Params,
        opt_state: PyTree,
        grads: Params,
        curvature: Params | None,
        scalars: Mapping[str, jax.Array],
    ) -> tuple[Params, PyTree, Metrics]:
        """Computes the update. Consumes parameters and optimizer state."""
        params, grads, curvature, loads, counts = split_inputs(params, grads, curvature, self._rates)
        needed = {name: scalars[name] for name in ("loss", "squares")}
        new_loads, of_load = wait_on_cpu(self._compute(loads, counts, needed))
        stored = wait_on_cpu(self._store(new_loads))
        params, opt_state, metrics = self._update(params, opt_state, grads, curvature, scalars)
        return {**params, **stored}, opt_state, {**metrics, **of_load}
