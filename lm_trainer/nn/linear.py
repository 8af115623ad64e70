"""Linear maps, dropout and activations.

Shape letters: M rows, I inputs of a linear map, O its outputs, all flattened; `...` any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from lm_trainer.core.broadcast import with_rank_of
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.nf4 import Nf4Weight
from lm_trainer.nn.read import read
from lm_trainer.nn.spec import Activation

DROPOUT_MASK = "dropout mask"
"""Name, for `jax.checkpoint`, of the boolean masks of dropout."""
MatmulFn = Callable[[jax.Array, jax.Array], jax.Array]
"""`matmul(x_MI, w_IO)` returns the matrix product, [M, O] in the dtype of `x_MI`."""


class Adapter(Protocol):
    """A trained module whose result is added to the result of a linear map."""

    def __call__(self, x_MI: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns [M, O] in the dtype of `x_MI`. The key is for dropout; None disables it."""
        ...


@runtime_checkable
class Adaptable(Protocol):
    """A module that may have adapters."""

    def remove_adapter(self) -> None:
        """Makes later calls compute without adapters."""
        ...


class Linear(nnx.Module):
    """Maps the trailing dimensions `inputs` of an array to `outputs`; the weight has the shape inputs + outputs.

    The weight keeps its separate dimensions, for example (embed, heads, head_size), so a mesh can shard any of them.
    """

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        *,
        bias: bool,
        init: Initializer,
        residual: bool = False,
    ):
        self.in_shape, self.out_shape = tuple(inputs.values()), tuple(outputs.values())
        self.weight: nnx.Param | Nf4Weight = init.normal({**inputs, **outputs}, residual=residual)
        self.bias = init.constant(outputs, 0.0, residual=residual) if bias else None
        self.matmul: MatmulFn = jnp.matmul
        # The name of this attribute is part of the names of adapter parameters in checkpoints: `<module path>.lora.a`.
        self.lora: Adapter | None = None

    def set_matmul(self, matmul: MatmulFn) -> None:
        """Makes later calls compute the product with `matmul`, for example with operands rounded to 8 bits."""
        self.matmul = matmul

    def set_adapter(self, adapter: Adapter) -> None:
        """Makes later calls add the result of the module `adapter` to their result."""
        self.lora = nnx.data(adapter)

    def freeze_in_nf4(self) -> None:
        """Replaces the weight by zero codes in 4 bits, for values that are loaded later."""
        assert isinstance(self.weight, nnx.Param)
        self.weight = Nf4Weight(self.weight, len(self.in_shape), len(self.out_shape))

    def remove_adapter(self) -> None:
        """Makes later calls compute the result of the linear map alone."""
        self.lora = None

    def matrix(self, dtype: DTypeLike | None = None) -> jax.Array:
        """Returns the weight, [*inputs, *outputs] in `dtype` (None: its own), with the leading dimensions of stacked
        layers.
        """
        return self.weight.matrix(dtype) if isinstance(self.weight, Nf4Weight) else read(self.weight, dtype)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Maps [..., *inputs] to [..., *outputs] in the dtype of `x`, to which weight and bias are cast.

        The key is for dropout in an adapter; None disables it.
        """
        leading_shape = x.shape[: x.ndim - len(self.in_shape)]
        x_MI, y_MO = self._multiply(x)
        if self.lora is not None:
            y_MO = y_MO + self.lora(x_MI, key)
        y = y_MO.reshape(*leading_shape, *self.out_shape)
        return y if self.bias is None else y + with_rank_of(read(self.bias, x.dtype), y)

    def _multiply(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the rows of `x`, [M, I], and their products with the weight, [M, O]."""
        # A product of two matrices, because XLA:CPU computes the gradients of batched products far more slowly.
        if isinstance(self.weight, Nf4Weight):
            x_MI = x.reshape(-1, math.prod(self.in_shape))
            return x_MI, self.weight.product(x_MI, self.matmul)
        w_IO = read(self.weight, x.dtype).reshape(math.prod(self.in_shape), -1)
        x_MI = x.reshape(-1, w_IO.shape[0])
        return x_MI, self.matmul(x_MI, w_IO)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales the others so that the mean is unchanged. Returns `x`
    unchanged if `key` is None.
    """
    if key is None or rate == 0.0:
        return x
    keep_mask = checkpoint_name(jax.random.bernoulli(key, 1.0 - rate, x.shape), DROPOUT_MASK)
    return jnp.where(keep_mask, x / (1.0 - rate), jnp.zeros((), x.dtype))


def gelu_new(x: jax.Array) -> jax.Array:
    """Computes the tanh approximation of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return jax.nn.gelu(x, approximate=True)


def gelu(x: jax.Array) -> jax.Array:
    """Computes exact GELU: x times the cumulative distribution function of the standard normal distribution at x."""
    return jax.nn.gelu(x, approximate=False)


def quick_gelu(x: jax.Array) -> jax.Array:
    """Computes the sigmoid approximation of GELU (Hendrycks and Gimpel 2016, section 2)."""
    return x * jax.nn.sigmoid(1.702 * x)


def relu2(x: jax.Array) -> jax.Array:
    """Computes the square of ReLU (So et al. 2021, arXiv 2109.08668)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: Mapping[Activation, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "quick_gelu": quick_gelu,
    "tanh": jnp.tanh,
    "relu2": relu2,
}
