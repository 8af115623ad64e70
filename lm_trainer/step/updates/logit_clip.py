"""QK-Clip after an update: scales the weights of heads whose largest attention logit exceeds a limit.

Kimi K2 (arXiv 2507.20534), section 2.1 and algorithm 1. The gradient of a `lm_trainer.nn.logit_clip.LogitParam` is the
largest logit of each head over the global batch. A maximum is exact, so its bits do not depend on the mesh.

Shape letters: L layers, N heads, H head size.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.logit_clip import LogitClip
from lm_trainer.parallel.cpu_sync import wait_on_cpu
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.state_sharding import TrainedShardings
from lm_trainer.step.updates.split import split_inputs
from lm_trainer.step.updates.update import Metrics, UpdateFn

LogitClips = Mapping[str, LogitClip]
"""Name of a parameter with largest logits -> the clip of its heads."""


def find_factors(
    old: Params,
    maxima: Params,
    scalars: Mapping[str, jax.Array],
    sizes: Mapping[str, int],
    clips: LogitClips,
) -> tuple[Params, Params, Metrics]:
    """Returns the new parameters with largest logits, the factors of weights, and metrics. It must be compiled.

    If loss or gradient are not finite, no weight is scaled, and the parameters stay the same.

    Args:
        old: largest logits of the last step by name, [L, N].
        maxima: largest logits of this step; -inf for a head without a pair of positions.
        scalars: `loss` and `squares`, as for `make_update`.
        sizes: name of each weight that may be scaled -> H.
        clips: clips of the parameters.

    Returns:
        The largest logits; float32 factors [L, N, H] of each weight; and the largest logit of all heads with the number
        of clipped heads.
    """
    finite = jnp.isfinite(scalars["loss"]) & jnp.isfinite(scalars["squares"])
    new, factors, clipped = {}, {}, []
    for name, clip in clips.items():
        known_LN = finite & jnp.isfinite(maxima[name])
        new[name] = jnp.where(known_LN, maxima[name], old[name])
        clipped_LN = known_LN & (new[name] > clip.limit)
        factor_LN = jnp.where(clipped_LN, clip.limit / new[name], 1.0)
        clipped.append(jnp.sum(clipped_LN))
        for weight, first, last, power in clip.scales:
            scaled_LN = factor_LN if power == 1.0 else jnp.sqrt(factor_LN)
            whole_LNH = factors.get(weight, jnp.ones((*factor_LN.shape, sizes[weight]), jnp.float32))
            factors[weight] = whole_LNH.at[..., first:last].set(scaled_LN[..., None])
    metrics = {
        "qk_largest_logit": jnp.max(jnp.stack([jnp.max(x) for x in new.values()])),
        "qk_clipped_heads": jnp.sum(jnp.stack(clipped)).astype(jnp.float32),
    }
    return new, factors, metrics


def scale_weights(weights: Params, factors: Params) -> Params:
    """Multiplies weights [L, ..., N, H] by their factors [L, N, H] in float32."""

    def scale(weight: jax.Array, factor_LNH: jax.Array) -> jax.Array:
        lead, *heads = factor_LNH.shape
        aligned = factor_LNH.reshape(lead, *(1,) * (weight.ndim - 3), *heads)
        return (weight.astype(jnp.float32) * aligned).astype(weight.dtype)

    return {name: scale(weight, factors[name]) for name, weight in weights.items()}


def scaled_weights(clips: LogitClips) -> list[str]:
    """Returns the names of the weights that clips may scale."""
    return list(dict.fromkeys(scale.weight for clip in clips.values() for scale in clip.scales))


def with_logit_clips(update: UpdateFn, clips: LogitClips) -> UpdateFn:
    """Returns `update` followed by the clips, as one function."""
    if not clips:
        return update

    def update_and_clip(
        params: Params,
        opt_state: PyTree,
        grads: Params,
        curvature: Params | None,
        scalars: Mapping[str, jax.Array],
    ) -> tuple[Params, PyTree, Metrics]:
        params, grads, curvature, old, maxima = split_inputs(params, grads, curvature, clips)
        sizes = {name: params[name].shape[-1] for name in scaled_weights(clips)}
        new, factors, measured = find_factors(old, maxima, scalars, sizes, clips)
        params, opt_state, metrics = update(params, opt_state, grads, curvature, scalars)
        scaled = scale_weights({name: params[name] for name in factors}, factors)
        return {**params, **scaled, **new}, opt_state, {**metrics, **measured}

    return update_and_clip


class LogitClipUpdate:
    """Update of all parameters: an update of the optimizer's parameters, and then the clips.

    Args:
        update: update of the other parameters.
        clips: clips of the parameters with largest logits.
        shapes: shapes of the parameters by name.
        shardings: shardings of the state.
        mesh: device mesh.
    """

    def __init__(
        self,
        update: UpdateFn,
        clips: LogitClips,
        shapes: Mapping[str, jax.ShapeDtypeStruct],
        shardings: TrainedShardings,
        mesh: Mesh,
    ):
        everywhere = NamedSharding(mesh, PartitionSpec())
        weights = scaled_weights(clips)
        sizes = {name: shapes[name].shape[-1] for name in weights}
        stored = {name: shardings.params[name] for name in clips}

        # Every device computes all factors, in a program that does not depend on the mesh: divisions and roots may be
        # rounded differently in programs for a part of the heads.
        def compute(old: Params, maxima: Params, scalars: Mapping[str, jax.Array]) -> tuple[Params, Params, Metrics]:
            old, maxima = (jax.lax.with_sharding_constraint(tree, everywhere) for tree in (old, maxima))
            return jax.lax.with_sharding_constraint(find_factors(old, maxima, scalars, sizes, clips), everywhere)

        self._update, self._clips, self._weights = update, clips, weights
        self._compute = Program("update: clip factors", jax.jit(compute, out_shardings=everywhere), "new state")
        self._store = Program("update: store logits", jax.jit(lambda x: x, out_shardings=stored), "new state")
        scale = jax.jit(
            scale_weights, out_shardings={name: shardings.params[name] for name in weights}, donate_argnums=0
        )
        self._scale = Program("update: clip", scale, "new state", elementwise=True)

    def __call__(
        self,
        params: Params,
        opt_state: PyTree,
        grads: Params,
        curvature: Params | None,
        scalars: Mapping[str, jax.Array],
    ) -> tuple[Params, PyTree, Metrics]:
        """Computes the update. Consumes parameters and optimizer state."""
        params, grads, curvature, old, maxima = split_inputs(params, grads, curvature, self._clips)
        needed = {name: scalars[name] for name in ("loss", "squares")}
        new, factors, measured = wait_on_cpu(self._compute(old, maxima, needed))
        stored = wait_on_cpu(self._store(new))
        params, opt_state, metrics = self._update(params, opt_state, grads, curvature, scalars)
        scaled = wait_on_cpu(self._scale({name: params[name] for name in self._weights}, factors))
        return {**params, **scaled, **stored}, opt_state, {**metrics, **measured}
