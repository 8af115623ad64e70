from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.spec import BlockSpec, ScoreSpec
from lm_trainer.nn.stack import unstack
from tests.compiling import quick_jit
from tests.nn.common import BLOCK, init, make_batch, make_spec

assert BLOCK.mlp is not None
OTHER = dataclasses.replace(BLOCK, mlp=dataclasses.replace(BLOCK.mlp, hidden_dim=8, activation="relu"))
LAYERED = dataclasses.replace(BLOCK, mixer=dataclasses.replace(BLOCK.attention, scores=ScoreSpec(inverse_layer=True)))
PATTERNS = {
    "one": (BLOCK,),
    "same": (BLOCK,) * 3,
    "period": (BLOCK, OTHER) * 2,
    "cut short": (LAYERED, OTHER, LAYERED, OTHER, LAYERED),
    "no repeat": (BLOCK, OTHER, OTHER),
}


@pytest.mark.parametrize(
    ("name", "period", "repeats"),
    [("one", 1, [1]), ("same", 1, [3]), ("period", 2, [2, 2]), ("cut short", 2, [3, 2]), ("no repeat", 3, [1, 1, 1])],
)
def test_parameters_are_stacked_over_the_period(name, period, repeats):
    spec = make_spec(blocks=PATTERNS[name])
    model = nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0)))
    assert spec.period == period
    for slot, count in enumerate(repeats):
        weight = model.blocks[str(slot)].mlp.up.weight
        width = PATTERNS[name][slot].mlp.hidden_dim
        assert weight.get_value().shape == (count, 16, width)
        assert weight.get_metadata("logical_axes") == ("layers", "embed", "mlp")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut short", "same", "no repeat"])
def test_loop_equals_unrolled(name):
    blocks: tuple[BlockSpec, ...] = tuple(dataclasses.replace(block, dropout=0.2) for block in PATTERNS[name])
    batch = make_batch(2, 12, 37)
    results = []
    for scan in (False, True):
        graphdef, params = init(make_spec(blocks=blocks, scan=scan))

        def loss(params, graphdef=graphdef):
            logits = nnx.merge(graphdef, params)(batch.tokens, batch.positions, batch.segments, key=jax.random.key(1))
            return jnp.mean(jnp.square(logits)), logits

        results.append((params, quick_jit(jax.grad(loss, has_aux=True))(params)))
    (params, (grads, logits)), (params_loop, (grads_loop, logits_loop)) = results
    jax.tree.map(np.testing.assert_array_equal, params, params_loop)
    np.testing.assert_allclose(logits_loop, logits, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5), grads, grads_loop)


def test_layers_start_different():
    _, params = init(make_spec(blocks=(BLOCK,) * 3))
    weights = np.asarray(params["blocks"]["0"]["mlp"]["up"]["weight"])
    assert np.abs(weights[0] - weights[1]).min() > 0
    assert np.abs(weights[1] - weights[2]).min() > 0


def test_unstack_and_its_gradient():
    tree = {"a": jnp.arange(12.0).reshape(3, 4), "b": jnp.arange(3.0)}
    rows = unstack(tree, 3)
    assert [row["b"].item() for row in rows] == [0, 1, 2]
    np.testing.assert_array_equal(rows[1]["a"], tree["a"][1])
    grads = jax.grad(lambda t: sum((i + 1) * jnp.sum(row["a"]) for i, row in enumerate(unstack(t, 3))))(tree)
    np.testing.assert_array_equal(grads["a"], np.repeat([[1.0], [2.0], [3.0]], 4, axis=1))
