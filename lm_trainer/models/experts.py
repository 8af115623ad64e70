"""Settings and tensors that families with a mixture of experts share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.hf_table import HfTensor
from lm_trainer.models.rotary import BLOCK, RotaryConfig
from lm_trainer.nn.expert_spec import BalanceScope, MoeSpec, RouterSpec, SharedExpertSpec

_PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class ExpertsConfig(RotaryConfig):
    """Settings of a decoder with experts."""

    newer_fields: ClassVar[frozenset[str]] = RotaryConfig.newer_fields | {
        "lbl_over",
        "selection_bias_rate",
        "expert_kernel",
    }
    implied_settings: ClassVar[Mapping[str, Any]] = {"lbl_over": "microbatch"}

    n_routed_experts: int = Field(default=8, gt=0)
    """Number of experts in each layer."""
    num_experts_per_tok: int = Field(default=2, gt=0)
    """Number of experts that process each token."""
    lbl_coef: float = Field(default=0.01, ge=0)
    """Weight of the experts' load-balancing loss; 0: no such loss. It affects only the gradient, and is not part of the
    reported loss."""
    lbl_over: BalanceScope = "batch"
    """Tokens over which the load-balancing loss takes the load of an expert. `microbatch`: the microbatch, so the
    weight of the loss depends on the size of microbatches. `batch`: the global batch of the previous step, which is the
    same for every division into microbatches. `row`: the row of each token, as in DeepSeek-V3."""
    selection_bias_rate: float | None = Field(default=None, ge=0)
    """Balances the load without a loss: each step raises a bias of experts with less than the mean load of the global
    batch by this rate, and lowers it for the others. The bias affects only the selection of experts. 0: the bias stays
    the same. Unset: no bias."""
    rzl_coef: float = Field(default=0.001, ge=0)
    """Weight of the z-loss, which penalises large router logits; 0: no such loss. It affects only the gradient."""
    expert_kernel: Literal["auto", "dense", "grouped"] | None = None
    """Computation of the experts. `grouped`: only the experts that a token chose, by grouped products (CPUs, TPUs, and
    GPUs of NVIDIA since Ampere); `dense`: every expert for every token; `auto`: grouped where there is a kernel,
    otherwise dense. Unset: dense, and on TPUs XLA's grouped product, as in earlier versions."""

    @model_validator(mode="after")
    def _check_enough_experts(self) -> "ExpertsConfig":
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than n_routed_experts={self.n_routed_experts}"
            )
        return self

    def moe_spec(
        self, width: int, *, router: RouterSpec | None = None, shared: SharedExpertSpec | None = None
    ) -> MoeSpec:
        """Builds the spec of a layer's mixture of experts.

        Args:
            width: width of one expert.
            router: selection of the experts. The settings of balance replace the ones in it.
            shared: expert that all tokens pass.
        """
        return MoeSpec(
            hidden_dim=width,
            num_experts=self.n_routed_experts,
            top_k=self.num_experts_per_tok,
            activation=self.activation_function,
            router=replace(
                router or RouterSpec(),
                selection_bias=self.selection_bias_rate,
                balance_coef=self.lbl_coef,
                balance_over=self.lbl_over,
                z_coef=self.rzl_coef,
            ),
            shared=shared,
            kernel=self.expert_kernel,
        )


class GroupedExpertsConfig(ExpertsConfig):
    """Settings of the families that came after the choice of kernels and losses, with the better defaults."""

    newer_fields: ClassVar[frozenset[str]] = RotaryConfig.newer_fields
    implied_settings: ClassVar[Mapping[str, Any]] = {}

    lbl_coef: float = Field(default=0.001, ge=0)
    """Weight of the experts' load-balancing loss; 0: no such loss. It affects only the gradient, and is not part of the
    reported loss."""
    expert_kernel: Literal["auto", "dense", "grouped"] = "auto"
    """Computation of the experts. `grouped`: only the experts that a token chose, by grouped products (CPUs, TPUs, and
    GPUs of NVIDIA since Ampere); `dense`: every expert for every token; `auto`: grouped where there is a kernel,
    otherwise dense."""


class OptionalExpertsConfig(GroupedExpertsConfig):
    """Settings of a decoder with or without experts."""

    n_routed_experts: int = Field(default=0, ge=0)
    """Number of experts in each layer. 0: no experts, so only the MLP that processes every token."""
    num_experts_per_tok: int = Field(default=0, ge=0)
    """Number of experts that process each token."""

    @model_validator(mode="after")
    def _check_some_experts(self) -> "OptionalExpertsConfig":
        if self.n_routed_experts and not self.num_experts_per_tok:
            raise ValueError(f"num_experts_per_tok=0 of n_routed_experts={self.n_routed_experts} leave out all experts")
        return self


def check_expert_groups(config: ExpertsConfig, n_group: int, topk_group: int) -> None:
    """Raises ValueError if the experts cannot be divided into groups, or a token cannot choose enough of them."""
    if config.n_routed_experts % n_group or config.n_routed_experts < 2 * n_group:
        raise ValueError(
            f"n_routed_experts={config.n_routed_experts} cannot be divided into n_group={n_group} groups of two or "
            f"more experts"
        )
    if topk_group > n_group or config.num_experts_per_tok > topk_group * (config.n_routed_experts // n_group):
        raise ValueError(
            f"topk_group={topk_group} of n_group={n_group} groups do not have "
            f"num_experts_per_tok={config.num_experts_per_tok} experts"
        )


def expert_tensors(router: str, experts: str, names: Mapping[str, str] = _PROJECTIONS) -> tuple[HfTensor, ...]:
    """Lists the tensors of the router and the experts of a layer.

    Args:
        router: name of the router in the file.
        experts: name of the list of experts in the file.
        names: names of the matrices gate, up and down of an expert in the file.
    """
    # The file has one linear layer per expert, with outputs before inputs. Here there is one array with an `experts`
    # axis.
    matrices = {name: f"{experts}.{{expert}}.{hf}.weight" for name, hf in names.items()}
    return (
        HfTensor(f"{router}.weight", (f"{BLOCK}.mlp.router",), transposed=True),
        *(HfTensor(hf, (f"{BLOCK}.mlp.{name}",), transposed=True) for name, hf in matrices.items()),
    )


def selection_bias_tensor(name: str) -> HfTensor:
    """Describes the bias of a layer's selection of experts. `name` is its name in the file."""
    return HfTensor(name, (f"{BLOCK}.mlp.selection_bias",))


def shared_expert_tensors(expert: str, gate: str | None = None) -> tuple[HfTensor, ...]:
    """Lists the tensors of the expert that all tokens pass, and of its gate.

    Args:
        expert: name of the expert in the file.
        gate: name of its gate in the file; None: it has none.
    """
    matrices = (
        HfTensor(f"{expert}.{hf}.weight", (f"{BLOCK}.mlp.shared.mlp.{name}.weight",), transposed=True)
        for name, hf in _PROJECTIONS.items()
    )
    gates = () if gate is None else (HfTensor(f"{gate}.weight", (f"{BLOCK}.mlp.shared.gate",), transposed=True),)
    return (*matrices, *gates)
