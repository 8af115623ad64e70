"""Selection of the experts of each token, and the statistics and losses that balance their load.

The load-balancing loss of a layer is the sum over the tokens t of sum_e f_e p_te, times a factor. p_te are the scores
of a token, normalized to sum to 1. f_e is the load of expert e: the number of its assignments per token, a constant of
the gradient. `RouterSpec.balance_over` selects the tokens over which f_e is taken, and the factor:

- `microbatch`: the microbatch; factor E (Fedus et al. 2021, equation 4). The loss depends on the size of microbatches.
- `batch`: the global batch of the previous step; factor E. This is the loss of Qiu et al. 2025 (arXiv 2501.11873),
  section 3, who take the load of the current batch. The load of another batch needs no second forward pass. In
  expectation, its gradient is the gradient of the loss over all data. The load of the same tokens would also pull each
  batch towards a balance of its own, the effect for which the paper avoids small batches.
- `row`: the row of the token; factor E / K (arXiv 2412.19437, equations 17 to 20).

Shape letters: B rows, S positions, M tokens (B x S), D hidden dimension, E experts, K experts per token, G groups, J
experts of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.nn.attention_kernel import is_differentiating_twice
from lm_trainer.nn.expert_spec import ExpertGroupsSpec, MoeSpec, RouterSpec
from lm_trainer.nn.measured import MeasuredParam
from lm_trainer.parallel.collectives import axis_sum, group_sum


class LoadParam(MeasuredParam):
    """A parameter with one value per expert whose gradient is the load of the experts: the number of tokens of the
    microbatch that chose each expert. Like all gradients it is summed over the global batch. Its update rule is
    `lm_trainer.step.updates.load`.
    """


LOAD_RATE = "load_rate"
"""Metadata key of the rate of a `LoadParam` that is a selection bias; None: the parameter is the relative load."""


def is_relative_load(name: str) -> bool:
    """Returns True for the dotted name of a relative load, which affects only the balance loss."""
    return name.endswith(".mlp.load")


class RouterStats(NamedTuple):
    """Router statistics, summed over layers and non-padding tokens; float32 scalars."""

    balance: jax.Array
    """Load-balancing loss. Divided by the number of tokens, it is K (for `row`: 1) if experts share the tokens equally,
    and larger otherwise."""
    z: jax.Array
    """log(sum(exp(router logits)))^2 (Zoph et al. 2022, equation 5)."""
    overload: jax.Array
    """Multiplied by the number of tokens: the number of assignments of the busiest expert over the mean number."""
    penalty: jax.Array
    """Multiplied by the number of tokens: the sum of `balance` and `z`, each times its coefficient in the spec."""


class Routing(NamedTuple):
    """The decision of a router for each token."""

    weights_MK: jax.Array
    """float32 weights of the selected experts."""
    experts_MK: jax.Array
    """int32 selected experts."""


def zero_router_stats() -> RouterStats:
    """Returns the initial values of the sums, zeros."""
    return RouterStats(*(jnp.zeros((), jnp.float32),) * len(RouterStats._fields))


def compute_scores(spec: RouterSpec, logits_ME: jax.Array) -> jax.Array:
    """Computes the scores of the experts, float32 [M, E], from float32 logits."""
    return jax.nn.softmax(logits_ME, axis=-1) if spec.scores == "softmax" else jax.nn.sigmoid(logits_ME)


def select_experts(spec: MoeSpec, scores_ME: jax.Array, bias_E: jax.Array | None) -> Routing:
    """Selects the experts of each token from its scores, and computes their weights."""
    router = spec.router
    if bias_E is None and router.groups is None:
        weights_MK, experts_MK = jax.lax.top_k(scores_ME, spec.top_k)
    else:
        # No gradient flows through a selection.
        choice_ME = jax.lax.stop_gradient(scores_ME)
        choice_ME = choice_ME if bias_E is None else choice_ME + jax.lax.stop_gradient(bias_E)[None, :]
        if router.groups is not None:
            choice_ME = _keep_best_groups(router.groups, choice_ME)
        experts_MK = jax.lax.top_k(choice_ME, spec.top_k)[1]
        weights_MK = take_values(scores_ME, experts_MK)
    if router.renormalize:
        weights_MK = weights_MK * (1.0 / jnp.sum(weights_MK, axis=-1, keepdims=True))
    return Routing(weights_MK if router.scale is None else weights_MK * router.scale, experts_MK)


def take_values(values_ME: jax.Array, experts_MK: jax.Array) -> jax.Array:
    """Returns the values of the experts of each token, [M, K]. With one row, all tokens have the same values."""
    # A comparison instead of a gather, whose gradient would be a scatter.
    chosen_MKE = experts_MK[:, :, None] == jnp.arange(values_ME.shape[1])[None, None, :]
    return jnp.sum(jnp.where(chosen_MKE, values_ME[:, None, :], 0.0), axis=-1)


def _keep_best_groups(groups: ExpertGroupsSpec, choice_ME: jax.Array) -> jax.Array:
    """Replaces the scores of experts outside the best groups of a token by minus infinity."""
    choice_MGJ = choice_ME.reshape(choice_ME.shape[0], groups.count, -1)
    if groups.score == "max":
        group_scores_MG = jnp.max(choice_MGJ, axis=-1)
    else:
        group_scores_MG = jnp.sum(jax.lax.top_k(choice_MGJ, 2)[0], axis=-1)
    best_MT = jax.lax.top_k(group_scores_MG, groups.top)[1]
    kept_MG = jnp.any(best_MT[:, :, None] == jnp.arange(groups.count)[None, None, :], axis=1)
    return jnp.where(kept_MG[:, :, None], choice_MGJ, -jnp.inf).reshape(choice_ME.shape)


class RouterValues(NamedTuple):
    """Values from which the statistics of a router are computed."""

    logits_ME: jax.Array
    scores_ME: jax.Array
    experts_MK: jax.Array
    valid_BS: jax.Array
    """True for the tokens that count."""
    load_E: jax.Array | None = None
    """Relative load of the experts in the previous step, of mean 1, for `balance_over: batch`."""


def compute_stats(spec: MoeSpec, values: RouterValues, load_params: tuple[jax.Array, ...] = ()) -> RouterStats:
    """Computes the statistics of a layer, and makes the load of its experts the gradient of `load_params`, each [E]."""
    router, logits_ME, experts_MK = spec.router, values.logits_ME, values.experts_MK
    # The statistics are computed over the full microbatch because they are not linear. Each device that shares the
    # microbatch then reports a share of them, and the shares add up.
    valid_M1 = values.valid_BS.reshape(-1).astype(jnp.float32)[:, None]
    tokens = jnp.sum(valid_M1)
    inverse_tokens = 1.0 / jnp.maximum(group_sum(tokens), 1.0)
    # The counts have no gradient; the gradient of the balance flows through the probabilities (Fedus et al. 2021,
    # section 2.2).
    chosen_ME = jnp.sum(experts_MK[:, :, None] == jnp.arange(spec.num_experts)[None, None, :], axis=1)
    counts_E = jnp.sum(chosen_ME * valid_M1, axis=0)
    load_E = inverse_tokens * group_sum(counts_E)
    probs_ME = values.scores_ME
    if router.scores == "sigmoid":
        probs_ME = probs_ME * (1.0 / jnp.sum(probs_ME, axis=-1, keepdims=True))
    match router.balance_over:
        case "microbatch":
            # Evaluated in this order, so that the programs of older runs stay the same.
            mean_probs = load_E * inverse_tokens * jnp.sum(probs_ME * valid_M1, axis=0)
            balance = spec.num_experts * jnp.sum(mean_probs) * group_sum(tokens)
        case "batch":
            assert values.load_E is not None
            # Load per token: the relative load times K / E.
            balance = spec.top_k * jnp.sum(jax.lax.stop_gradient(values.load_E) * jnp.sum(probs_ME * valid_M1, axis=0))
        case "row":
            balance = _balance_of_rows(spec, chosen_ME * valid_M1, probs_ME * valid_M1, values.valid_BS)
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits_ME, axis=-1, keepdims=True)) * valid_M1)
    overload = jnp.max(load_E) * (spec.num_experts / spec.top_k) * tokens
    penalty = router.balance_coef * balance + router.z_coef * z
    # Estimates of curvature do not use the load, and forward mode cannot differentiate what reports it.
    for param_E in () if is_differentiating_twice() else load_params:
        penalty = penalty + _report_load(param_E, jax.lax.stop_gradient(counts_E))
    return RouterStats(balance, z, overload, penalty)


def _balance_of_rows(spec: MoeSpec, chosen_ME: jax.Array, probs_ME: jax.Array, valid_BS: jax.Array) -> jax.Array:
    counts_BE, probs_BE = (
        jnp.sum(x_ME.reshape(*valid_BS.shape, spec.num_experts), axis=1) for x_ME in (chosen_ME, probs_ME)
    )
    # Devices may share the positions of a row.
    counts_BE = axis_sum(counts_BE, "context")
    tokens_B1 = axis_sum(jnp.sum(valid_BS.astype(jnp.float32), axis=1, keepdims=True), "context")
    load_BE = counts_BE * (1.0 / jnp.maximum(tokens_B1, 1.0))
    return (spec.num_experts / spec.top_k) * jnp.sum(load_BE * probs_BE)


@jax.custom_vjp
def _report_load(param_E: jax.Array, load_E: jax.Array) -> jax.Array:
    """Returns 0. The gradient of `param_E` is `load_E`, for any cotangent."""
    del param_E, load_E
    return jnp.zeros((), jnp.float32)


def _report_forward(param_E: jax.Array, load_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _report_load(param_E, load_E), load_E


def _report_backward(load_E: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    del cotangent
    return load_E, jnp.zeros_like(load_E)


_report_load.defvjp(_report_forward, _report_backward)
