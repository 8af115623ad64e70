"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax

_WHOLE_WEIGHTS = "heads and their size count as one dimension, layers and experts as weights of their own"


class SoapConfig(OptimizerConfig):
    """SOAP (Vyas et al. 2024, arXiv 2409.11321, algorithm 3).

    The first step only computes the bases and does not change the weights.

    Biases and scales of norms are updated as in Adam.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {
        **OptimizerConfig.refused_keys,
        "merge_small_dims": _WHOLE_WEIGHTS,
        "target_merged_dim_size": _WHOLE_WEIGHTS,
        "mu_dtype": "moments have the dtype of the parameters; see `trainer.mp`",
        "precond_dtype": "eigenvectors need float32",
        "schedule_list": "use `lr_schedule` with `cycles`",
    }

    type: Literal["soap"] = "soap"
    learning_rate: PositiveFloat = 6e-4
    """Peak learning rate; the paper uses 3e-3."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""
    beta1: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of squared gradients."""
    shampoo_beta: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of G G^T and G^T G."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    precondition_frequency: PositiveInt = 10
    """Number of steps between updates of the eigenvectors."""
    max_precond_dim: PositiveInt = 10000
    """Dimensions larger than this, such as a vocabulary, have no preconditioner."""
    one_diag: bool = False
    """Omit the preconditioner of the larger dimension of each matrix, which halves the memory and reduces the work."""
    partition_grads_into_blocks: bool = True
    """Split matrices into blocks with separate bases."""
    block_size: PositiveInt = 256
    """Maximum block size; the size of a block is the largest divisor of the dimension up to this."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns Adam's update in the eigenbases, rotated back."""
        from lm_trainer.optim.soap_update import scale_by_soap

        return scale_by_soap(self, params)
