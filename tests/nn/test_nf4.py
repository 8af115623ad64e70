"""Linear maps with a weight in 4 bits, beside the same maps with its values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.core.errors import UserError
from lm_trainer.core.nf4 import dequantize_matrix, quantize_matrix
from lm_trainer.nn.init import LOGICAL_AXES, Initializer
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.nf4 import CodeParam, Nf4Weight, quantize_linears

INIT = Initializer(nnx.Rngs(0), 0.02, 0.02)


def test_products_and_gradients_are_of_the_dequantized_weight() -> None:
    x_BSNH = np.random.default_rng(1).standard_normal((2, 5, 3, 6)).astype(np.float32)
    w_OI = np.random.default_rng(0).standard_normal((24, 18)).astype(np.float32)
    linear = Linear({"heads": 3, "head_size": 6}, {"embed": 4, "mlp": 6}, bias=True, init=INIT)
    linear.freeze_in_nf4()
    matrix, values = quantize_matrix(w_OI), dequantize_matrix(quantize_matrix(w_OI))
    for name, array in matrix._asdict().items():
        setattr(linear.weight, name, CodeParam(jnp.asarray(array)))
    w_IO = values.T.reshape(3, 6, 4, 6)
    np.testing.assert_array_equal(linear.matrix(), w_IO)
    y, pull_back = jax.vjp(linear, jnp.asarray(x_BSNH))
    np.testing.assert_allclose(y, np.einsum("bsnh,nhem->bsem", x_BSNH, w_IO), atol=1e-4)
    np.testing.assert_allclose(
        pull_back(jnp.ones_like(y))[0], np.broadcast_to(w_IO.sum((2, 3)), x_BSNH.shape), atol=1e-4
    )


def test_no_value_of_a_weight_is_kept_for_the_backward_pass() -> None:
    linear = Linear({"embed": 64}, {"mlp": 96}, bias=False, init=INIT)
    linear.freeze_in_nf4()
    _, pull_back = jax.vjp(lambda x: linear(x).sum(), jnp.ones((2, 64)))
    assert all(x.size < 64 * 96 for x in jax.tree.leaves(pull_back))


def test_arrays_are_sharded_like_the_weight() -> None:
    linear = Linear({"embed": 64}, {"heads": 4, "head_size": 8}, bias=False, init=INIT)
    linear.freeze_in_nf4()
    assert isinstance(linear.weight, Nf4Weight)
    arrays = nnx.state(linear.weight, CodeParam)
    axes = {str(path[0]): variable.get_metadata()[LOGICAL_AXES] for path, variable in nnx.to_flat_state(arrays)}
    assert axes == {"codes": ("heads", "embed"), "scales": ("embed",), "group_scales": (None,), "offset": ()}


def test_an_odd_number_of_inputs_is_refused() -> None:
    model = nnx.Dict(blocks=nnx.Dict({"0": Linear({"embed": 7}, {"mlp": 4}, bias=False, init=INIT)}))
    with pytest.raises(UserError, match=r"base_quantization: model\.blocks\.0 has 7 inputs"):
        quantize_linears(model)
