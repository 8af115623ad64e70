"""Settings and tensors that families with a mixture of experts share."""

from collections.abc import Mapping

from pydantic import Field, model_validator

from lm_trainer.models.hf_table import HfTensor
from lm_trainer.models.rotary import BLOCK, RotaryConfig
from lm_trainer.nn.spec import MoeSpec


class ExpertsConfig(RotaryConfig):
    """Settings of a decoder with experts."""

    n_routed_experts: int = Field(default=8, gt=0)
    """Number of experts in each layer."""
    num_experts_per_tok: int = Field(default=2, gt=0)
    """Number of experts that compute each token."""
    lbl_coef: float = Field(default=0.01, ge=0)
    """Weight of the load-balancing loss of the experts; 0: none. It affects only the gradient: the reported loss is the
    token loss."""
    rzl_coef: float = Field(default=0.001, ge=0)
    """Weight of the loss for large router logits (z-loss); 0: none. It affects only the gradient."""

    @model_validator(mode="after")
    def _check_enough_experts(self) -> "ExpertsConfig":
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than n_routed_experts={self.n_routed_experts}"
            )
        return self

    def moe_spec(self, width: int, *, renormalize: bool = True) -> MoeSpec:
        """Builds the mixture of a layer; `width` is the width of one expert."""
        return MoeSpec(
            hidden_dim=width,
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            activation=self.activation_function,
            renormalize=renormalize,
            balance_coef=self.lbl_coef,
            z_coef=self.rzl_coef,
        )


def expert_tensors(router: str, names: Mapping[str, str]) -> tuple[HfTensor, ...]:
    """Router and experts of a layer; `names` maps gate, up and down to their names in the file, with `{expert}`."""
    # In the file: linear layers with outputs before inputs, one per expert. Here: one array with an `experts` axis.
    return (
        HfTensor(f"{router}.weight", (f"{BLOCK}.mlp.router",), transposed=True),
        *(HfTensor(f"{hf}.weight", (f"{BLOCK}.mlp.{name}",), transposed=True) for name, hf in names.items()),
    )
