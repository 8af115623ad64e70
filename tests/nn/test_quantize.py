"""8-bit products against NumPy, and what they change of a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.models import Gpt2Config, LlamaConfig
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.quantize import Fp8Config, Int8Config, Mxfp8Config, make_quantized_matmul, quantize

X, W = np.random.default_rng(0).standard_normal((2, 24, 24)).astype(np.float32)


def test_int8_rounds_each_row_and_column_to_even_steps() -> None:
    product = np.asarray(jax.jit(make_quantized_matmul(*Int8Config().dtypes()))(X, W))
    # Half a step at most, of a step that is 1 / 127.5 of the largest absolute value of the row or column.
    dx = np.broadcast_to(np.abs(X).max(axis=1, keepdims=True) / 255 * 1.001, X.shape)
    dw = np.broadcast_to(np.abs(W).max(axis=0, keepdims=True) / 255 * 1.001, W.shape)
    bound = np.abs(X) @ dw + dx @ np.abs(W) + dx @ dw
    error = np.abs(product - X @ W)
    assert (error <= bound).all()
    assert (error / bound).mean() > 0.02, "eight bits are not enough to be nearly exact"


def test_fp8_is_rounding_to_three_bits_of_mantissa() -> None:
    product = np.asarray(jax.jit(make_quantized_matmul(*Fp8Config().dtypes()))(X, W))
    error = np.linalg.norm(product - X @ W) / np.linalg.norm(X @ W)
    assert 0.01 < error < 0.06


@pytest.mark.parametrize("config", [Int8Config(), Fp8Config(), Int8Config(backward=True), Fp8Config(backward=True)])
def test_the_gradient_passes_straight_through(config: Int8Config | Fp8Config) -> None:
    product = make_quantized_matmul(*config.dtypes())
    g = np.random.default_rng(1).standard_normal((24, 24)).astype(np.float32)
    dx, dw = jax.jit(jax.grad(lambda x, w: jnp.sum(product(x, w) * g), argnums=(0, 1)))(X, W)
    for actual, exact in ((dx, g @ W.T), (dw, X.T @ g)):
        error = np.linalg.norm(actual - exact) / np.linalg.norm(exact)
        assert error < (0.1 if config.backward else 1e-5)
        assert config.backward == (error > 1e-3)


def without_numbers(config: Gpt2Config | LlamaConfig) -> nnx.Module:
    """A model that has the shapes of its parameters alone."""
    return nnx.eval_shape(lambda: config.build(11, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("targets", "chosen"),
    [
        (None, {"q", "k", "v", "out", "up", "down"}),
        (".*mlp.*", {"up", "down"}),
        (("attention.out", "up"), {"out", "up"}),
    ],
)
def test_targets(targets: str | tuple[str, ...] | None, chosen: set[str]) -> None:
    model = without_numbers(Gpt2Config(seq_len=8, hidden_dim=16, num_layers=1, num_heads=2))
    quantize(model, Int8Config(targets=targets))
    linears = {str(path[-1]): node for path, node in nnx.iter_graph(model) if isinstance(node, Linear)}
    assert {name for name, node in linears.items() if node.matmul is not jnp.matmul} == chosen


def test_targets_that_match_nothing_are_refused_with_what_there_is() -> None:
    model = without_numbers(Gpt2Config(seq_len=8, hidden_dim=16, num_layers=1, num_heads=2))
    with pytest.raises(UserError, match=r"'mpl' selects no linear map; there are: .*mlp\.up"):
        quantize(model, Int8Config(targets="mpl"))


@pytest.mark.parametrize("scan", [True, False])
def test_a_size_that_blocks_do_not_divide_is_refused_when_the_model_is_built(scan: bool) -> None:
    config = LlamaConfig(
        seq_len=8, hidden_dim=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_dim=80, scan_layers=scan
    )
    model = without_numbers(config)
    quantize(model, Mxfp8Config(targets=("attention",)))
    with pytest.raises(UserError, match=r"model\.\S*mlp\.up: .* 32 inputs and 80 outputs; choose multiples of 32.*fp8"):
        quantize(model, Mxfp8Config(targets=(".mlp.up",)))


def test_what_has_no_meaning_here_says_so() -> None:
    assert {"amax_history_length", "compute_dtype"} <= set(Fp8Config.refused_keys)
    with pytest.raises(ValidationError):
        Int8Config.model_validate({"amax_history_length": 1024})
