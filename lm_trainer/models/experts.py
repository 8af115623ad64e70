"""Settings and tensors that families with a mixture of experts share."""

from collections.abc import Mapping

from pydantic import Field, model_validator

from lm_trainer.models.hf_table import HfTensor
from lm_trainer.models.rotary import BLOCK, RotaryConfig
from lm_trainer.nn.expert_spec import MoeSpec, RouterSpec


class ExpertsConfig(RotaryConfig):
    """Settings of a decoder with experts."""

    n_routed_experts: int = Field(default=8, gt=0)
    """Number of experts in each layer."""
    num_experts_per_tok: int = Field(default=2, gt=0)
    """Number of experts that process each token."""
    lbl_coef: float = Field(default=0.01, ge=0)
    """Weight of the experts' load-balancing loss; 0: no such loss. It affects only the gradient, and is not part of the
    reported loss."""
    rzl_coef: float = Field(default=0.001, ge=0)
    """Weight of the z-loss, which penalises large router logits; 0: no such loss. It affects only the gradient."""

    @model_validator(mode="after")
    def _check_enough_experts(self) -> "ExpertsConfig":
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than n_routed_experts={self.n_routed_experts}"
            )
        return self

    def moe_spec(self, width: int, *, renormalize: bool = True) -> MoeSpec:
        """Builds the spec of a layer's mixture of experts. `width` is the width of one expert."""
        return MoeSpec(
            hidden_dim=width,
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            activation=self.activation_function,
            router=RouterSpec(renormalize=renormalize, balance_coef=self.lbl_coef, z_coef=self.rzl_coef),
        )


def expert_tensors(router: str, names: Mapping[str, str]) -> tuple[HfTensor, ...]:
    """Lists router and experts of a layer. `names` maps gate, up and down to their names in the file (`{expert}`)."""
    # The file has one linear layer per expert, with outputs before inputs. Here there is one array with an `experts`
    # axis.
    return (
        HfTensor(f"{router}.weight", (f"{BLOCK}.mlp.router",), transposed=True),
        *(HfTensor(f"{hf}.weight", (f"{BLOCK}.mlp.{name}",), transposed=True) for name, hf in names.items()),
    )
