"""A mixture of experts instead of the MLP: a router selects a few experts for each token.

Shape letters: B rows, S positions, M tokens (B x S), D hidden dimension, F width of an expert, E experts, K experts per
token, A assignments (M x K), P slots of assignments sorted by expert, Y experts and their widths (E x F).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.core.errors import UserError
from lm_trainer.nn.attention_kernel import first_reason, is_differentiating_twice
from lm_trainer.nn.expert_exchange import return_results, send_tokens
from lm_trainer.nn.expert_slots import assign_slots, slots_to_assignments, tokens_to_slots
from lm_trainer.nn.expert_spec import MoeSpec, SharedExpertSpec
from lm_trainer.nn.grouped_product import KERNELS, GroupedKernel
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import ACTIVATIONS
from lm_trainer.nn.lora_weights import WeightLora, read_adapted
from lm_trainer.nn.mlp import Mlp
from lm_trainer.nn.norm import make_norm
from lm_trainer.nn.read import read
from lm_trainer.nn.router import (
    LoadParam,
    RouterStats,
    RouterValues,
    compute_scores,
    compute_stats,
    select_experts,
    take_values,
)
from lm_trainer.nn.spec import MlpSpec
from lm_trainer.parallel.collectives import all_gather, axis_index, axis_size
from lm_trainer.parallel.local_rows import map_local_rows
from lm_trainer.parallel.target_platform import target_platform

logger = logging.getLogger(__name__)


class Moe(nnx.Module):
    """Computes all selected experts of every token (no capacity limit, no dropped tokens), and adds their results,
    weighted by the router.

    With norms of its own, its input is the residual stream.
    """

    def __init__(self, spec: MoeSpec, dim: int, *, init: Initializer):
        self.spec = spec
        up = {"experts": spec.num_experts, "embed": dim, "mlp": spec.hidden_dim}
        down = {"experts": spec.num_experts, "mlp": spec.hidden_dim, "embed": dim}
        # The order of these lines determines the random keys, so reordering them would change the initial weights.
        self.router = init.normal({"embed": dim, "experts": spec.num_experts})
        self.gate = init.normal(up)
        self.up = init.normal(up)
        self.down = init.normal(down, residual=True)
        shared = spec.shared
        self.shared = None if shared is None else SharedExpert(shared, spec, dim, init=init)
        experts = {"experts": spec.num_experts}
        self.router_bias = init.constant(experts, 0.0) if spec.router.logit_bias else None
        rate = spec.router.selection_bias
        self.selection_bias = None if rate is None else _make_load_param(spec, 0.0, rate)
        self.load = _make_load_param(spec, 1.0, None) if spec.router.balance_over == "batch" else None
        inner, outer = {**experts, "mlp": spec.hidden_dim}, {**experts, "embed": dim}
        self.gate_bias = init.constant(inner, 0.0) if spec.bias else None
        self.up_bias = init.constant(inner, 0.0) if spec.bias else None
        self.down_bias = init.constant(outer, 0.0, residual=True) if spec.bias else None
        self.expert_scale = init.constant(experts, 1.0) if spec.router.expert_scale else None
        norms = spec.branch_norm
        axis = {"embed": dim}
        self.router_norm = make_norm(None if norms is None else norms.router, axis, init=init)
        self.pre_norm, self.post_norm, self.shared_pre_norm, self.shared_post_norm = (
            make_norm(None if norms is None else norms.experts, axis, init=init) for _ in range(4)
        )
        self.remove_adapter()

    def remove_adapter(self) -> None:
        """Makes later calls compute with the weights of the experts alone."""
        self.gate_lora: WeightLora | None = None
        self.up_lora: WeightLora | None = None
        self.down_lora: WeightLora | None = None

    def __call__(self, x_BSD: jax.Array, valid_BS: jax.Array) -> tuple[jax.Array, RouterStats]:
        """Returns the result in the dtype of `x_BSD`, and the statistics over the tokens for which the boolean
        `valid_BS` is true.
        """
        spec = self.spec
        x_MD = x_BSD.reshape(-1, x_BSD.shape[-1])
        # The columns of the router are sharded like their experts, but a token chooses among all experts.
        router_DE = all_gather(read(self.router), "expert", 1)
        # In float32, because rounding would change the selected experts (Fedus et al. 2021, section 2.4).
        logits_ME = self.router_norm(x_MD.astype(jnp.float32)) @ router_DE.astype(jnp.float32)
        if self.router_bias is not None:
            logits_ME = logits_ME + all_gather(read(self.router_bias), "expert", 0).astype(jnp.float32)[None, :]
        scores_ME = compute_scores(spec.router, logits_ME)
        bias_E, load_E = (
            None if param is None else all_gather(read(param), "expert", 0)
            for param in (self.selection_bias, self.load)
        )
        # Mapped over local rows, because XLA would compute the top-k of all devices' rows on each device.
        weights_MK, experts_MK = map_local_rows(
            lambda scores_ME, *bias: select_experts(spec, scores_ME, *bias or (None,)),
            (scores_ME,),
            () if bias_E is None else (bias_E,),
        )
        if self.expert_scale is not None:
            scale_E = all_gather(read(self.expert_scale), "expert", 0).astype(jnp.float32)
            weights_MK = weights_MK * take_values(scale_E[None, :], experts_MK)
        y_MD = self.post_norm(self._mix_experts(self.pre_norm(x_MD), experts_MK, weights_MK))
        if self.shared is not None:
            y_MD = y_MD + self.shared_post_norm(self.shared(self.shared_pre_norm(x_MD)))
        values = RouterValues(logits_ME, scores_ME, experts_MK, valid_BS, load_E)
        stats = compute_stats(spec, values, tuple(x_E for x_E in (bias_E, load_E) if x_E is not None))
        return y_MD.reshape(x_BSD.shape), stats

    def _mix_experts(self, x_MD: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array) -> jax.Array:
        """Adds the results of the experts of each token, weighted by the router.

        If devices share the experts, each device computes its local experts for the tokens that chose them, and
        receives the sums of its local tokens. Tokens are never dropped.
        """
        if axis_size("expert") == 1:
            return self._compute_experts(x_MD, experts_MK, weights_MK)
        # Each device along the batch axes exchanges its own rows only.
        send = functools.partial(send_tokens, num_local=self.gate[...].shape[0])
        received = map_local_rows(send, (x_MD, experts_MK, weights_MK), ())
        y_RD = self._compute_experts(received.x_RD, received.experts_RK, received.weights_RK)
        # The tokens of this device come first, so that rows are divided, or not, as above.
        return_rows = lambda _, *results: return_results(*results)  # noqa: E731
        return map_local_rows(return_rows, (experts_MK, y_RD, received.slots, received.exchange), ())

    def _compute_experts(self, x_MD: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array) -> jax.Array:
        """Adds the results of the experts on this device, weighted by the router."""
        kernel = _choose_kernel(self.spec)
        if kernel == "dense":
            return self._compute_dense_experts(x_MD, experts_MK, weights_MK)
        # Inside the map: sorting the rows of all devices together would send every token to every device.
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        weights = [read_adapted(w, adapter, x_MD.dtype) for w, adapter in self._expert_weights()]
        weights += [read(bias, x_MD.dtype) for bias in biases if bias is not None]
        compute = self._ragged_experts if kernel == "ragged_dot" else functools.partial(self._grouped_experts, kernel)
        if self.spec.weighs_inputs:
            # Each assignment is a token of its own, with one expert.
            x_MKD = x_MD[:, None, :] * weights_MK[..., None].astype(x_MD.dtype)
            y_A1D = map_local_rows(compute, (x_MKD.reshape(-1, x_MD.shape[1]), experts_MK.reshape(-1, 1)), weights)
            y_MD = jnp.sum(y_A1D.reshape(x_MKD.shape), axis=1)
        else:
            y_MKD = map_local_rows(compute, (x_MD, experts_MK), weights)
            y_MD = jnp.sum(y_MKD * weights_MK[..., None].astype(y_MKD.dtype), axis=1)
        return y_MD

    def _expert_weights(self) -> tuple[tuple[nnx.Param, WeightLora | None], ...]:
        """The weights gate, up and down of all experts, with their adapters."""
        return (self.gate, self.gate_lora), (self.up, self.up_lora), (self.down, self.down_lora)

    def _compute_dense_experts(self, x_MD: jax.Array, experts_MK: jax.Array, weights_MK: jax.Array) -> jax.Array:
        """Computes the experts of this device as one wide MLP in which unselected experts have a weight of 0."""
        dtype, count = x_MD.dtype, self.gate[...].shape[0]
        first = axis_index("expert") * count if axis_size("expert") > 1 else 0
        chosen_MKE = experts_MK[:, :, None] == first + jnp.arange(count)[None, None, :]
        weights_ME = jnp.sum(jnp.where(chosen_MKE, weights_MK[..., None], 0.0), axis=1).astype(dtype)

        gate, up, down = self._expert_weights()

        def product(weight: tuple[nnx.Param, WeightLora | None], bias: nnx.Param | None) -> jax.Array:
            w_DEF = read_adapted(*weight, dtype).transpose(1, 0, 2)
            y_MEF = jnp.matmul(x_MD, w_DEF.reshape(x_MD.shape[1], -1)).reshape(-1, *w_DEF.shape[1:])
            return y_MEF if bias is None else y_MEF + read(bias, dtype)[None]

        def weigh(y_MEF: jax.Array, applies: bool) -> jax.Array:
            return y_MEF * weights_ME[..., None] if applies else y_MEF

        # Weighted before the last product, which is linear: the product then sums over experts and their widths at
        # once. The products of weighted inputs are linear too: without biases, an input of zero has a result of zero.
        weighs_inputs = self.spec.weighs_inputs
        gate_MEF = _activate_gate(self.spec, weigh(product(gate, self.gate_bias), weighs_inputs))
        up_MEF = _bound_linear_term(self.spec, weigh(product(up, self.up_bias), weighs_inputs))
        h_MEF = weigh(gate_MEF * up_MEF, not weighs_inputs)
        down_YD = read_adapted(*down, dtype).reshape(-1, x_MD.shape[1])
        y_MD = jnp.matmul(h_MEF.reshape(x_MD.shape[0], -1), down_YD)
        return y_MD if self.down_bias is None else y_MD + jnp.matmul(weights_ME, read(self.down_bias, dtype))

    def _grouped_experts(
        self,
        kernel: GroupedKernel,
        x_MD: jax.Array,
        experts_MK: jax.Array,
        *weights: jax.Array,
    ) -> jax.Array:
        """Computes the results of the experts of each token, [M, K, D]; zero for experts of other devices."""
        experts_A, count = experts_MK.reshape(-1), weights[0].shape[0]
        if axis_size("expert") > 1:
            experts_A = experts_A - axis_index("expert") * count
        # A token has at most `count` experts on this device.
        limit = experts_MK.shape[0] * min(experts_MK.shape[1], count)
        slots = assign_slots(experts_A, count, limit=limit, align=kernel.align, multiple=kernel.multiple)
        x_PD = tokens_to_slots(x_MD, slots)
        # No expert for an empty slot, whose result must be zero.
        expert_of_rows = lambda: jnp.where(slots.assignment_P < experts_A.shape[0], slots.expert_P, count)  # noqa: E731
        y_PD = self._multiply_sorted(lambda x, w: kernel.product(x, w, slots), x_PD, expert_of_rows, weights)
        return slots_to_assignments(y_PD, slots).reshape(*experts_MK.shape, x_MD.shape[-1])

    def _multiply_sorted(
        self,
        product: Callable[[jax.Array, jax.Array], jax.Array],
        x_PD: jax.Array,
        expert_of_rows: Callable[[], jax.Array],
        weights: tuple[jax.Array, ...],
    ) -> jax.Array:
        """Computes the gated MLP of each row's expert, [P, D].

        Args:
            product: multiplies each row with the matrix of its expert.
            x_PD: rows, sorted by expert.
            expert_of_rows: returns the expert of each row, [P]; a number past the experts for rows without one.
            weights: matrices of gate, up and down, and then their biases if there are any.
        """
        gate_EDF, up_EDF, down_EFD, *biases = weights
        terms: list[jax.Array] = []
        if biases:
            # Products with rows of zeros and a one: the gradient of a gather would add in a varying order.
            chosen_PE = (expert_of_rows()[:, None] == jnp.arange(gate_EDF.shape[0])[None, :]).astype(x_PD.dtype)
            terms = [jnp.matmul(chosen_PE, bias, precision="highest") for bias in biases]
        gate_PF, up_PF = product(x_PD, gate_EDF), product(x_PD, up_EDF)
        if terms:
            gate_PF, up_PF = gate_PF + terms[0], up_PF + terms[1]
        y_PD = product(_activate_gate(self.spec, gate_PF) * _bound_linear_term(self.spec, up_PF), down_EFD)
        return y_PD + terms[2] if terms else y_PD

    def _ragged_experts(self, x_MD: jax.Array, experts_MK: jax.Array, *weights: jax.Array) -> jax.Array:
        """Same as `_grouped_experts` with XLA's grouped product.

        Computes the results of the experts of each token, [M, K, D]; zero for experts of other devices.

        Assignments are sorted by expert, multiplied in groups, and restored to their original order.
        """
        top_k, shared = experts_MK.shape[1], axis_size("expert") > 1
        experts_A, count = experts_MK.reshape(-1), weights[0].shape[0]
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
        product = lambda x, w: jax.lax.ragged_dot(x, w, counts_E)  # noqa: E731
        y_AD = self._multiply_sorted(product, x_AD, lambda: experts_A[order_A], weights)
        y_AD = jnp.where(local_A1, y_AD, 0) if shared else y_AD
        return _permute(y_AD, inverse_A, order_A).reshape(-1, top_k, x_MD.shape[-1])


def _activate_gate(spec: MoeSpec, x: jax.Array) -> jax.Array:
    """Computes the factor that depends on the gate."""
    if spec.glu is None:
        return ACTIVATIONS[spec.activation](x)
    x = jnp.minimum(x, spec.glu.limit)
    return x * jax.nn.sigmoid(spec.glu.slope * x)


def _bound_linear_term(spec: MoeSpec, x: jax.Array) -> jax.Array:
    """Computes the factor that is linear in the input."""
    return x if spec.glu is None else jnp.clip(x, -spec.glu.limit, spec.glu.limit) + 1.0


class SharedExpert(nnx.Module):
    """Computes the gated MLP that all tokens pass, and multiplies it by its gate if it has one."""

    def __init__(self, shared: SharedExpertSpec, spec: MoeSpec, dim: int, *, init: Initializer):
        self.mlp = Mlp(MlpSpec(shared.hidden_dim, spec.activation, bias=False, gated=True), dim, init=init)
        self.gate = init.normal({"embed": dim, "scalar": 1}) if shared.gated else None

    def __call__(self, x_MD: jax.Array) -> jax.Array:
        """Returns [M, D] in the dtype of `x_MD`."""
        y_MD = self.mlp(x_MD)
        if self.gate is None:
            return y_MD
        return y_MD * jax.nn.sigmoid(x_MD @ read(self.gate, x_MD.dtype))


def _make_load_param(spec: MoeSpec, value: float, rate: float | None) -> LoadParam:
    values = jnp.full((spec.num_experts,), value, jnp.float32)
    return LoadParam(values, logical_axes=("experts",), load_rate=rate)


@functools.cache
def _log_dense_experts(platform: str) -> None:
    logger.info(
        "every expert is computed for every token: a %s takes fewer operations for that than for groups", platform
    )


@functools.cache
def _log_lack_of_groups(reason: str) -> None:
    logger.info("every expert is computed for every token: the kernel of the chosen experts %s", reason)


def _choose_kernel(spec: MoeSpec) -> Literal["dense", "ragged_dot"] | GroupedKernel:
    """Returns the kernel for the target platform, and for the derivatives that the caller computes.

    Raises:
        UserError: if the spec asks for grouped products, and there is no kernel for them.
    """
    platform = target_platform()
    kernel = spec.kernel_on(platform)
    if kernel == "dense" and spec.kernel != "dense":
        _log_dense_experts(platform)
    if kernel != "grouped":
        return kernel
    grouped = KERNELS.get(platform)
    obstacle = None if grouped is None else grouped.find_obstacle()
    reason = first_reason(
        [
            (grouped is None, f"has no kernel for a {platform}"),
            (obstacle is not None, f"has no kernel for this device: {obstacle}"),
            (is_differentiating_twice(), "has no second derivative, which optimizer.type: sophia-h needs"),
        ]
    )
    if grouped is not None and reason is None:
        return grouped
    if spec.kernel == "auto":
        _log_lack_of_groups(str(reason))
        return "dense"
    raise UserError(f"model.expert_kernel: grouped {reason}; write dense, or auto to let it be chosen")


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
