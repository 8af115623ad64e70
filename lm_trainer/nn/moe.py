"""A mixture of experts instead of the MLP: a router selects a few experts for each token.

Shape letters: B rows, S positions, M tokens (B x S), D hidden dimension, F width of an expert, E experts, K experts per
token, A assignments (M x K), Y experts and their widths (E x F).
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import ACTIVATIONS
from lm_trainer.nn.read import read
from lm_trainer.nn.spec import MoeSpec
from lm_trainer.parallel.collectives import all_gather, axis_index, axis_size, group_sum, reduce_scatter
from lm_trainer.parallel.local_rows import map_local_rows
from lm_trainer.parallel.target_platform import target_platform

logger = logging.getLogger(__name__)


class RouterStats(NamedTuple):
    """Router statistics, summed over layers and non-padding tokens; float32 scalars."""

    balance: jax.Array
    """Multiplied by the number of tokens: E * sum_e f_e P_e, with f_e the number of assignments to expert e per token
    and P_e its mean probability (Fedus et al. 2021, equation 4). K if experts share the tokens equally, larger
    otherwise."""
    z: jax.Array
    """log(sum(exp(router logits)))^2 (Zoph et al. 2022, equation 5)."""
    overload: jax.Array
    """Multiplied by the number of tokens: the number of assignments of the busiest expert over the mean number."""
    penalty: jax.Array
    """Multiplied by the number of tokens: the sum of `balance` and `z`, each times its coefficient in the spec."""


def zero_router_stats() -> RouterStats:
    """Returns the initial values of the sums, zeros."""
    return RouterStats(*(jnp.zeros((), jnp.float32),) * len(RouterStats._fields))


class Moe(nnx.Module):
    """Computes all selected experts of every token (no capacity limit, no dropped tokens), and adds their results,
    weighted by the router.
    """

    def __init__(self, spec: MoeSpec, dim: int, *, init: Initializer):
        self.spec = spec
        up = {"experts": spec.num_experts, "embed": dim, "mlp": spec.hidden_dim}
        down = {"experts": spec.num_experts, "mlp": spec.hidden_dim, "embed": dim}
        self.router = init.normal({"embed": dim, "experts": spec.num_experts})
        self.gate = init.normal(up)
        self.up = init.normal(up)
        self.down = init.normal(down, residual=True)

    def __call__(self, x_BSD: jax.Array, valid_BS: jax.Array) -> tuple[jax.Array, RouterStats]:
        """Returns the result in the dtype of `x_BSD`, and the statistics over the tokens for which the boolean
        `valid_BS` is true.
        """
        spec = self.spec
        x_MD = x_BSD.reshape(-1, x_BSD.shape[-1])
        # The columns of the router are sharded like their experts, but a token chooses among all experts.
        router_DE = all_gather(read(self.router), "expert", 1)
        # In float32, because rounding would change the selected experts (Fedus et al. 2021, section 2.4).
        logits_ME = x_MD.astype(jnp.float32) @ router_DE.astype(jnp.float32)
        probs_ME = jax.nn.softmax(logits_ME, axis=-1)
        # Mapped over local rows, because XLA would compute the top-k of all devices' rows on each device.
        weights_MK, experts_MK = map_local_rows(lambda probs_ME: jax.lax.top_k(probs_ME, spec.top_k), (probs_ME,), ())
        if spec.renormalize:
            weights_MK = weights_MK * (1.0 / jnp.sum(weights_MK, axis=-1, keepdims=True))
        y_MD = self._mix_experts(x_MD, experts_MK, weights_MK)
        stats = _router_stats(spec, logits_ME, probs_ME, experts_MK, valid_BS.reshape(-1))
        return y_MD.reshape(x_BSD.shape), stats

    def _mix_experts(self, x_MD: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array) -> jax.Array:
        """Adds the results of the experts of each token, weighted by the router.

        If devices share the experts, each device computes its local experts for the tokens of all devices, and receives
        the sums of its local tokens. Tokens are never dropped, and only tokens are communicated.
        """
        x_MD, experts_MK, weights_MK = (all_gather(x, "expert", 0) for x in (x_MD, experts_MK, weights_MK))
        if _uses_dense(self.spec):
            return reduce_scatter(self._compute_dense_experts(x_MD, experts_MK, weights_MK), "expert", 0)
        # Inside the map: sorting the rows of all devices together would send every token to every device.
        weights = [read(w, x_MD.dtype) for w in (self.gate, self.up, self.down)]
        y_MKD = map_local_rows(self._grouped_experts, (x_MD, experts_MK), weights)
        y_MD = jnp.sum(y_MKD * weights_MK[..., None].astype(y_MKD.dtype), axis=1)
        return reduce_scatter(y_MD, "expert", 0)

    def _compute_dense_experts(self, x_MD: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array) -> jax.Array:
        """Computes the experts of this device as one wide MLP in which unselected experts have a weight of 0."""
        dtype, count = x_MD.dtype, self.gate[...].shape[0]
        first = axis_index("expert") * count if axis_size("expert") > 1 else 0
        chosen_MKE = experts_MK[:, :, None] == first + jnp.arange(count)[None, None, :]
        weights_ME = jnp.sum(jnp.where(chosen_MKE, weights_MK[..., None], 0.0), axis=1).astype(dtype)

        def product(w: nnx.Param) -> jax.Array:
            w_DEF = read(w, dtype).transpose(1, 0, 2)
            return jnp.matmul(x_MD, w_DEF.reshape(x_MD.shape[1], -1)).reshape(-1, *w_DEF.shape[1:])

        # Weighted before the last product, which is linear: the product then sums over experts and their widths at
        # once.
        h_MEF = ACTIVATIONS[self.spec.activation](product(self.gate)) * product(self.up) * weights_ME[..., None]
        down_YD = read(self.down, dtype).reshape(-1, x_MD.shape[1])
        return jnp.matmul(h_MEF.reshape(x_MD.shape[0], -1), down_YD)

    def _grouped_experts(
        self, x_MD: jax.Array, experts_MK: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, down_EFD: jax.Array
    ) -> jax.Array:
        """Computes the results of the experts of each token, [M, K, D]; zero for experts of other devices.

        Assignments are sorted by expert, multiplied in groups, and restored to their original order.
        """
        top_k, shared = self.spec.top_k, axis_size("expert") > 1
        experts_A, count = experts_MK.reshape(-1), gate_EDF.shape[0]
        if shared:
            experts_A = experts_A - axis_index("expert") * count
            # Assignments to experts of other devices get a number past all local experts, so that they are sorted to
            # the end.
            experts_A = jnp.where((experts_A >= 0) & (experts_A < count), experts_A, count)
        # Stable, so that the order of the tokens of an expert, and of the sums over them, is fixed.
        order_A = jnp.argsort(experts_A, stable=True)
        inverse_A = jnp.argsort(order_A, stable=True)
        counts_E = jnp.bincount(experts_A, length=count + shared)[:count].astype(jnp.int32)
        x_AD = _permute(jnp.repeat(x_MD, top_k, axis=0), order_A, inverse_A)
        # `ragged_dot` guarantees nothing for rows past the last group, so these rows are zeroed before and after it.
        local_A1 = (jnp.arange(x_AD.shape[0]) < jnp.sum(counts_E))[:, None] if shared else True
        x_AD = jnp.where(local_A1, x_AD, 0) if shared else x_AD
        gate_AF = jax.lax.ragged_dot(x_AD, gate_EDF, counts_E)
        up_AF = jax.lax.ragged_dot(x_AD, up_EDF, counts_E)
        h_AF = ACTIVATIONS[self.spec.activation](gate_AF) * up_AF
        y_AD = jax.lax.ragged_dot(h_AF, down_EFD, counts_E)
        y_AD = jnp.where(local_A1, y_AD, 0) if shared else y_AD
        return _permute(y_AD, inverse_A, order_A).reshape(-1, top_k, x_MD.shape[-1])


@functools.cache
def _log_dense_experts(platform: str) -> None:
    logger.info(
        "every expert is computed for every token: a %s takes fewer operations for that than for groups", platform
    )


def _uses_dense(spec: MoeSpec) -> bool:
    """Returns `spec.dense` with its default resolved.

    XLA has a grouped product only for TPUs. On other platforms its grouped product computes every expert for every
    assignment, which is `top_k` times the work of the dense form.
    """
    platform = target_platform()
    if spec.dense is None and platform != "tpu":
        _log_dense_experts(platform)
        return True
    return bool(spec.dense)


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Returns x[order]. Its gradient is a permutation too; the gradient of a gather would add in a varying order."""
    del inverse
    return x[order]


def _permute_forward(x: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _permute(x, order, inverse), inverse


def _permute_backward(inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    return cotangent[inverse], None, None


_permute.defvjp(_permute_forward, _permute_backward)


def _router_stats(
    spec: MoeSpec, logits_ME: jax.Array, probs_ME: jax.Array, experts_MK: jax.Array, valid_M: jax.Array
) -> RouterStats:
    # The statistics are computed over the full microbatch because they are not linear. Each device that shares the
    # microbatch then reports a share of them, and the shares add up.
    valid_M1 = valid_M.astype(jnp.float32)[:, None]
    tokens = jnp.sum(valid_M1)
    inverse_tokens = 1.0 / jnp.maximum(group_sum(tokens), 1.0)
    # The counts have no gradient; the gradient of the balance flows through the probabilities (Fedus et al. 2021,
    # section 2.2).
    chosen_ME = jnp.sum(experts_MK[:, :, None] == jnp.arange(spec.num_experts)[None, None, :], axis=1)
    load_E = inverse_tokens * group_sum(jnp.sum(chosen_ME * valid_M1, axis=0))
    balance = (
        spec.num_experts * jnp.sum(load_E * inverse_tokens * jnp.sum(probs_ME * valid_M1, axis=0)) * group_sum(tokens)
    )
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits_ME, axis=-1, keepdims=True)) * valid_M1)
    overload = jnp.max(load_E) * (spec.num_experts / spec.top_k) * tokens
    return RouterStats(balance, z, overload, spec.balance_coef * balance + spec.z_coef * z)
