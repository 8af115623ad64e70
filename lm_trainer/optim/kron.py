"""PSGD Kron: a preconditioner with a factor for the inputs of each matrix and a factor for its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Params

if TYPE_CHECKING:
    import optax
_WHOLE_WEIGHTS = "heads and their size count as one dimension, layers and experts as weights of their own"


class KronConfig(OptimizerConfig):
    """PSGD Kron (Li 2015, arXiv 1512.04202; Li 2024, arXiv 2402.11858), with momentum applied before the
    preconditioner.

    The factors are updated at every step for `update_prob_flat_start` steps, and less and less often after that.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {
        **OptimizerConfig.refused_keys,
        "merge_small_dims": _WHOLE_WEIGHTS,
        "target_merged_dim_size": _WHOLE_WEIGHTS,
        "min_ndim_triangular": "vectors always have diagonal factors, matrices follow `memory_save_mode`",
        "mu_dtype": "the momentum has the dtype of the parameters; see `trainer.mp`",
        "precond_dtype": "factors are float32",
        **dict.fromkeys(("precond_update_precision", "precond_grads_precision"), "products are float32"),
        **dict.fromkeys(("lax_map_scanned_layers", "lax_map_batch_size"), "layers are always computed together"),
        **dict.fromkeys(("params_sharding", "preconditioner_sharding"), "factors lie on every device"),
    }

    type: Literal["kron"] = "kron"
    learning_rate: PositiveFloat = 6e-4
    """Peak learning rate; a third of the learning rate of AdamW is a good start."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the average of gradients."""
    normalize_grads: bool = False
    """First divide the gradient of each weight by its norm."""
    preconditioner_update_probability: float = Field(default=0.05, gt=0, le=1)
    """Minimum frequency of factor updates: 0.05 means every 20 steps."""
    update_prob_flat_start: NonNegativeInt = 500
    """Number of initial steps that all update the factors. After them, the frequency falls by a factor of e every 1000
    steps."""
    max_size_triangular: PositiveInt = 25000
    """A dimension larger than this has a diagonal factor."""
    memory_save_mode: Literal["one_diag", "all_diag"] | None = None
    """`one_diag`: the larger dimension of each matrix has a diagonal factor; `all_diag`: both dimensions do; null:
    neither."""
    preconditioner_lr: PositiveFloat = 0.1
    """Learning rate of the factors."""
    preconditioner_init_scale: PositiveFloat = 1.0
    """The preconditioner starts as the identity times the square of this number."""
    partition_grads_into_blocks: bool = True
    """Split dimensions that have triangular factors into blocks with separate factors."""
    block_size: PositiveInt = 256
    """Maximum block size; the size of a block is the largest divisor of the dimension up to this."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the preconditioned momentum, with a root mean square of at most 1.1 for each weight."""
        from lm_trainer.optim.kron_update import scale_by_kron

        return scale_by_kron(self, params)
