"""Matrix products in 8 bits: int8 or fp8 operands with one scale per row or column, computed by `qwix`, or MXFP8
operands.

Shape letters: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import importlib.util
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    import jax
    from flax import nnx
    from jax.typing import DTypeLike

    from lm_trainer.nn.linear import MatmulFn


class QuantizationConfig(Config):
    """Linear maps that compute in 8 bits. Weights, gradients and the optimizer stay in the parameter dtype. The head,
    the embedding, attention scores and routed experts are not quantized.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {
        "amax_history_length": "scales are taken from each product's own operands, so there is no history; remove it",
        "compute_dtype": "`trainer.mp` decides the dtype of everything that is not quantized; remove it",
    }

    refused_types: ClassVar[Mapping[str, str]] = {
        "nvfp4": "training in 4 bits needs more than products (rotations of the operands of weights' gradients, "
        "gradients rounded by chance, some layers in 16 bits; arXiv 2509.25149), which are not here: write mxfp8"
    }

    respelt_keys: ClassVar[Mapping[str, Mapping[Any, tuple[str, Any]]]] = {"fp8": {True: ("type", "fp8")}}

    targets: str | tuple[str, ...] | None = None
    """Linear maps, by their path in the model: a regular expression that matches the complete path, such as `.*mlp.*`,
    or a list of parts of it, such as `[mlp, attention.out]`; null: all of them."""
    backward: bool = False
    """Quantize the incoming gradients as well, so the products of the backward pass are in 8 bits too."""

    @abstractmethod
    def make_matmul(self) -> MatmulFn:
        """Returns the matrix product that the linear maps use."""

    def unsupported_reason(self, inputs: int, outputs: int) -> str | None:
        """Returns the reason why a linear map of this size cannot compute in this format; None if it can."""
        del inputs, outputs
        return None

    def selects(self, path: str) -> bool:
        """Returns true if the linear map at this dotted path of the model computes in 8 bits."""
        match self.targets:
            case None:
                return True
            case str():
                return re.fullmatch(self.targets, path) is not None
            case parts:
                return any(part in path for part in parts)


class ChannelwiseConfig(QuantizationConfig):
    """Products with one scale per row of the activations and per column of the weights."""

    @model_validator(mode="after")
    def _qwix_is_installed(self) -> ChannelwiseConfig:
        if importlib.util.find_spec("qwix") is None:
            raise ValueError(
                'quantization needs the package qwix; install it with pip install "lm_trainer[quantization]"'
            )
        return self

    @abstractmethod
    def dtypes(self) -> tuple[DTypeLike, DTypeLike | None]:
        """Dtypes of operands and of incoming gradients (None: not quantized)."""

    def make_matmul(self) -> MatmulFn:
        return make_quantized_matmul(*self.dtypes())


class Int8Config(ChannelwiseConfig):
    """8-bit integers: 256 even steps for each row or column (Dettmers et al. 2022, arXiv 2208.07339, section 2.1)."""

    type: Literal["int8"] = "int8"

    def dtypes(self) -> tuple[DTypeLike, DTypeLike | None]:
        import jax.numpy as jnp

        return jnp.int8, jnp.int8 if self.backward else None


class Fp8Config(ChannelwiseConfig):
    """8-bit floats: e4m3 for operands, e5m2 for gradients (Micikevicius et al. 2022, arXiv 2209.05433)."""

    type: Literal["fp8"] = "fp8"

    def dtypes(self) -> tuple[DTypeLike, DTypeLike | None]:
        import jax.numpy as jnp

        return jnp.float8_e4m3fn, jnp.float8_e5m2 if self.backward else None


class Mxfp8Config(QuantizationConfig):
    """8-bit floats (e4m3); blocks of 32 share a power of two as scale (Mishra et al. 2025, arXiv 2506.08027)."""

    type: Literal["mxfp8"] = "mxfp8"
    backward: bool = True
    """Quantize the incoming gradients as well, so the products of the backward pass are in 8 bits too."""

    def make_matmul(self) -> MatmulFn:
        from lm_trainer.nn.mxfp8 import Mxfp8Matmul

        return Mxfp8Matmul(self.backward)

    def unsupported_reason(self, inputs: int, outputs: int) -> str | None:
        from lm_trainer.nn.mxfp8 import block_size_mismatch

        return block_size_mismatch(inputs, outputs)


AnyQuantization = Annotated[Int8Config | Fp8Config | Mxfp8Config, Field(discriminator="type")]


def quantize(model: nnx.Module, config: QuantizationConfig) -> None:
    """Makes the linear maps selected by `config` compute in 8 bits. Does not change any parameter.

    Raises:
        UserError: if `config` selects no linear map, or one whose size the format does not support.
    """
    from flax import nnx

    from lm_trainer.nn.linear import Linear

    linears = {".".join(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, Linear)}
    selected = [path for path in linears if config.selects(path)]
    if not selected:
        raise UserError(
            f"trainer.quantization.targets: {config.targets!r} selects no linear map; there are: "
            f"{', '.join(sorted(linears))}"
        )
    # One object for all layers, because programs are retraced for each matmul that differs from the previous one.
    matmul = config.make_matmul()
    for path in selected:
        linear = linears[path]
        if reason := config.unsupported_reason(math.prod(linear.in_shape), math.prod(linear.out_shape)):
            raise UserError(f"trainer.quantization: model.{path}: {reason}")
        linear.set_matmul(matmul)


def make_quantized_matmul(dtype: DTypeLike, gradient_dtype: DTypeLike | None) -> MatmulFn:
    """Returns `matmul(x_MI, w_IO)`: the product of the matrices, rounded to `dtype`, in the dtype of `x_MI`.

    Each row of x and each column of w is scaled by its largest absolute value. The gradient ignores the rounding
    (straight-through). Incoming gradients are rounded to `gradient_dtype` unless it is None.
    """
    # The part of qwix below its interception of modules, because the interception finds parameters only by object
    # identity.
    from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt

    # With gradients of 16 or 32 bits, the backward pass multiplies them with the unrounded operands.
    config = DotGeneralQtConfig(
        lhs_qtype=dtype,
        rhs_qtype=dtype,
        dlhs_grad_qtype=gradient_dtype,
        drhs_grad_qtype=gradient_dtype,
        use_original_residuals=gradient_dtype is None,
    )
    return _QuantizedMatmul(dot_general_qt, config)


class _QuantizedMatmul:
    """A matrix product that is equal only to itself, so that programs are traced once."""

    def __init__(self, product: Callable[..., jax.Array], config: Any):
        self._product, self._config = product, config

    def __call__(self, x_MI: jax.Array, w_IO: jax.Array) -> jax.Array:
        return self._product(x_MI, w_IO, (((1,), (0,)), ((), ())), self._config).astype(x_MI.dtype)
