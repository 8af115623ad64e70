"""Description of a mixture of experts as plain values; a part of `lm_trainer.nn.spec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lm_trainer.nn.spec import Activation, NormSpec

BalanceScope = Literal["microbatch", "batch", "row"]
"""Tokens over which a load-balancing loss takes the load of an expert; see `lm_trainer.nn.router`."""


@dataclass(frozen=True)
class ExpertGroupsSpec:
    """Limits the experts of a token to a few groups of experts, those with the highest scores (arXiv 2405.04434,
    section 2.1.3; arXiv 2412.19437, section 2.1.2).
    """

    count: int
    """Number of groups of equal size."""
    top: int
    """Number of groups from which a token chooses its experts."""
    score: Literal["max", "top2"] = "top2"
    """Score of a group: the highest score of its experts (the first paper), or the sum of the two highest scores,
    with the selection bias (the second paper)."""


@dataclass(frozen=True)
class RouterSpec:
    """Selection and weights of the experts of a token, and the means that balance the load of the experts.

    Logits, scores and weights are float32.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function from logits to scores."""
    renormalize: bool = True
    """Normalize the weights of a token's experts so that they sum to 1."""
    scale: float | None = None
    """Factor of the weights, after their normalization."""
    expert_scale: bool = False
    """Multiply the weight of each expert by a learned number, initially 1, after its normalization."""
    groups: ExpertGroupsSpec | None = None
    logit_bias: bool = False
    """Add a trained bias to the logits."""
    selection_bias: float | None = None
    """Add a bias to the scores for the selection only. No gradient trains it: after each step, the bias of an expert
    with less than the mean load of the global batch rises by this rate, and the bias of an expert with more falls by it
    (Wang et al. 2024, arXiv 2408.15664, algorithm 1). 0: a constant bias. None: no bias."""
    balance_coef: float = 0.0
    """Coefficient of the load-balancing loss, which is a mean over layers."""
    balance_over: BalanceScope = "microbatch"
    z_coef: float = 0.0
    """Coefficient of the penalty for large router logits, which is a mean over layers."""


@dataclass(frozen=True)
class SharedExpertSpec:
    """A gated MLP without biases that every token passes in addition to its experts (Dai et al. 2024)."""

    hidden_dim: int
    gated: bool = False
    """Multiply its result by the sigmoid of a learned linear function of the input."""


@dataclass(frozen=True)
class ClampedGluSpec:
    """A gated activation with bounded arguments (arXiv 2508.10925): g sigmoid(slope g) (u + 1), where g is the gate, at
    most `limit`, and u is the linear term, bounded to `limit` in both directions.
    """

    slope: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class BranchNormSpec:
    """Separate norms for the parts of a mixture of experts, which replace the norm before it. They read the same
    stream.
    """

    router: NormSpec
    """Norm of the input of the router."""
    experts: NormSpec
    """Norms of the input and of the result of the experts, and of the input and of the result of the shared expert,
    each with a gain of its own."""


ExpertKernel = Literal["auto", "dense", "grouped", "ragged_dot"]
"""Computation of the experts. `dense`: every expert for every token; `grouped`: only the selected experts, with a
kernel for grouped products; `ragged_dot`: the same with XLA's product; `auto`: `grouped` if there is a kernel for the
devices, otherwise `dense`."""


GROUPED_PLATFORMS = ("cpu", "gpu", "tpu")
"""Platforms with a kernel for grouped products. On GPUs it needs NVIDIA Ampere or later."""


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts, which are gated MLPs. For each token a router selects a few of them (Shazeer et al. 2017)."""

    hidden_dim: int
    """Hidden dimension of one expert."""
    num_experts: int
    top_k: int
    """Number of experts per token."""
    activation: Activation = "silu"
    glu: ClampedGluSpec | None = None
    """Function of the products with both matrices of the input; None: `activation` of the gate times the other one."""
    bias: bool = False
    """Add biases to the three maps of each expert."""
    router: RouterSpec = RouterSpec()
    weighs_inputs: bool = False
    """Multiply the input of an expert by its weight, instead of its result. Only without `bias`."""
    shared: SharedExpertSpec | None = None
    branch_norm: BranchNormSpec | None = None
    """None: the router, the experts and the shared expert read the same normalized input."""
    kernel: ExpertKernel | None = None
    """None: `ragged_dot` on TPUs, `dense` elsewhere."""

    def kernel_on(self, platform: str) -> Literal["dense", "grouped", "ragged_dot"]:
        """Returns `kernel` with its default resolved, for a platform: `cpu`, `gpu` or `tpu`."""
        if self.kernel is None:
            # XLA has a grouped product only for TPUs. On other platforms its grouped product computes every expert for
            # every assignment, which is `top_k` times the work of the dense form.
            return "ragged_dot" if platform == "tpu" else "dense"
        if self.kernel == "auto":
            return "grouped" if platform in GROUPED_PLATFORMS else "dense"
        return self.kernel
