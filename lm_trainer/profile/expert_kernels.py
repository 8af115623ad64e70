"""Work of the kernels that compute the experts of a layer, beyond the products that a token needs."""

from __future__ import annotations

from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.spec import DecoderSpec, MlpSpec


def unneeded_expert_flops(spec: DecoderSpec, platform: str) -> int:
    """Returns the FLOPs per token of a training step for experts that the token did not choose.

    `dense` computes every expert. XLA's grouped product on TPUs computes the gradient of the weights as one product
    over all assignments for each expert. Empty slots of grouped kernels are not counted.
    """
    return sum(
        _unneeded_flops(block.mlp, spec.hidden_dim, platform) for block in spec.blocks if isinstance(block.mlp, MoeSpec)
    )


def _unneeded_flops(spec: MoeSpec, hidden: int, platform: str) -> int:
    of_expert = 2 * 3 * hidden * spec.hidden_dim
    match spec.kernel_on(platform):
        case "dense":
            return 3 * of_expert * (spec.num_experts - spec.top_k)
        case "ragged_dot":
            return of_expert * spec.top_k * (spec.num_experts - 1)
        case _:
            return 0


def expert_copies(mlp: MlpSpec | MoeSpec, hidden: int) -> int:
    """Returns the number of values per token in the copies of tokens and results that grouped products need."""
    if not isinstance(mlp, MoeSpec) or mlp.kernel in ("dense", None):
        return 0
    return 2 * mlp.top_k * hidden


def active_mlp_width(mlp: MlpSpec | MoeSpec) -> int:
    """Returns the width of the MLP that a token passes, over its experts and the shared expert."""
    if not isinstance(mlp, MoeSpec):
        return mlp.hidden_dim
    return mlp.hidden_dim * mlp.top_k + (0 if mlp.shared is None else mlp.shared.hidden_dim)
