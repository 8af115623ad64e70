"""Adam-mini: AdamW with one second moment for each block of a weight, which halves the memory of the optimizer.

Second moments keep the rank of their parameter; the dimensions of a block have size 1. For 12 layers with 8 heads of
size 64 and hidden dimension 512:

    parameter                     block                second moments
    q.weight  (12, 512, 8, 64)    a head               (12, 1, 8, 1)
    v.weight  (12, 512, 8, 64)    an output            (12, 1, 8, 64)
    up.weight (12, 512, 2048)     an output            (12, 1, 2048)
    tokens    (50257, 512)        a token              (50257, 1)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from lm_trainer.optim.base import OptimizerConfig
from lm_trainer.optim.params import Arrays, Param, Params

if TYPE_CHECKING:
    import jax
    import optax

_HEADS = ("heads", "kv_heads")


class AdamMiniConfig(OptimizerConfig):
    """Adam-mini (Zhang et al. 2024, arXiv 2406.16793, algorithms 2 and 3).

    A block is a head of queries or keys, an output of any other linear map, or a token or position of a table or head.
    Biases and scales of norms have a second moment for each element, as in AdamW.
    """

    # No fields: averages of squares have one element per block, and averages of vectors stay in float32.
    squares_in_state: ClassVar[tuple[str, ...] | None] = ()
    transfers: ClassVar[bool] = True

    type: Literal["mini"] = "mini"
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the average of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the average of the mean squared gradient of a block."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    def transform(self, params: Params) -> optax.GradientTransformation:
        """Returns the average gradient over the root of its block's second moment, both corrected for bias."""
        import optax

        blocks = {name: block_axes(param) for name, param in params.items() if param.role != "vector"}
        mini = _scale_by_blocks(blocks, params, self.beta1, self.beta2, self.epsilon)
        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon)
        labels = {name: "mini" if name in blocks else "adam" for name in params}
        return optax.partition({"mini": mini, "adam": adam}, labels)


def block_axes(param: Param) -> tuple[int, ...]:
    """Returns the dimensions of a matrix or table that a block spans; the other dimensions index the blocks."""
    # The Hessian of a transformer is nearly block-diagonal: by heads for queries and keys, by outputs for other linear
    # maps, and by tokens for tables (section 2 of the paper). One learning rate per block is therefore enough.
    axes = param.axes
    inside = range(param.lead, len(axes))
    if param.role in ("embedding", "head"):
        return tuple(i for i in inside if axes[i] not in ("vocab", "position"))
    if {"q", "k"} & set(param.name.split(".")):
        return tuple(i for i in inside if axes[i] not in _HEADS)
    outputs = 2 if axes[-1] == "head_size" and axes[-2] in _HEADS else 1
    return tuple(inside)[:-outputs]


class MiniState(NamedTuple):
    """State for the parameters that have blocks."""

    count: jax.Array
    """int32 []; number of steps so far."""
    mu: Arrays
    """Average of gradients, in the shapes of the parameters."""
    nu: dict[str, jax.Array]
    """float32; the shape of each parameter, with size 1 for the dimensions of a block."""


def _scale_by_blocks(
    blocks: dict[str, tuple[int, ...]], params: Params, beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformation:
    """Adam with the mean square of each block instead of the square; `blocks` are the axes inside a block."""
    import jax
    import jax.numpy as jnp
    import optax

    shapes = {name: [1 if i in axes else n for i, n in enumerate(params[name].shape)] for name, axes in blocks.items()}

    def init(weights: Arrays) -> MiniState:
        nu = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
        return MiniState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, weights), nu)

    def update(updates: Arrays, state: MiniState, weights: Arrays | None = None) -> tuple[Arrays, MiniState]:
        del weights
        count = state.count + 1
        mu = optax.tree_utils.tree_update_moment(updates, state.mu, beta1, 1)
        # float32 even for bfloat16 gradients, because a block can be as large as a row.
        squares = {
            name: jnp.mean(jnp.square(updates[name].astype(jnp.float32)), axis=axes, keepdims=True)
            for name, axes in blocks.items()
        }
        nu = optax.tree_utils.tree_update_moment(squares, state.nu, beta2, 1)
        mu_hat = optax.tree_utils.tree_bias_correction(mu, beta1, count)
        nu_hat = optax.tree_utils.tree_bias_correction(nu, beta2, count)
        # One division per block instead of one per element.
        scales = {name: 1 / (jnp.sqrt(v) + epsilon) for name, v in nu_hat.items()}
        scaled = {name: m * scales[name].astype(m.dtype) if name in scales else m for name, m in mu_hat.items()}
        return scaled, MiniState(count, mu, nu)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]
