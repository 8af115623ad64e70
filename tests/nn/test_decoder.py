from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, DecoderSpec, EmbeddingSpec, MlpSpec, NormSpec
from lm_trainer.parallel.mesh import LOGICAL_AXES
from tests.nn.common import init, make_batch, make_spec


def test_initial_weights():
    norm = NormSpec()
    block = BlockSpec(AttentionSpec(4, 16), MlpSpec(256), pre_norm=norm)
    spec = DecoderSpec(500, 64, 128, (block,) * 8, norm, EmbeddingSpec(learned_positions=True), init_std=0.05)
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Decoder(spec, rngs=nnx.Rngs(0)), nnx.Param)))()
    layers = params["blocks"]["0"]
    plain = [params["embed"]["tokens"], params["embed"]["positions"], layers["mlp"]["up"]["weight"]]
    plain += [layers["attention"][name]["weight"] for name in "qkv"]
    for weight in plain:
        assert abs(float(jnp.std(weight)) / 0.05 - 1) < 0.03
    for weight in (layers["attention"]["out"]["weight"], layers["mlp"]["down"]["weight"]):
        assert abs(float(jnp.std(weight)) / (0.05 / math.sqrt(16)) - 1) < 0.03
    assert not np.any(layers["mlp"]["up"]["bias"])
    assert np.all(np.asarray(layers["mlp_pre_norm"]["scale"]) == 1)


def test_parameters_are_named_and_have_known_axes():
    model = nnx.eval_shape(lambda: Decoder(make_spec(), rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    axes = {
        ".".join(map(str, path)): variable.get_metadata("logical_axes") for path, variable in nnx.to_flat_state(state)
    }
    assert axes["embed.tokens"] == ("vocab", "embed")
    assert axes["embed.positions"] == ("position", "embed")
    assert axes["blocks.0.attention.q.weight"] == ("layers", "embed", "heads", "head_size")
    assert axes["blocks.0.attention.out.weight"] == ("layers", "heads", "head_size", "embed")
    assert axes["blocks.0.mlp.down.bias"] == ("layers", "embed")
    assert {name for names in axes.values() for name in names} <= set(LOGICAL_AXES)
    for path, variable in nnx.to_flat_state(state):
        assert len(variable.get_metadata("logical_axes")) == variable.get_value().ndim, path


def test_the_structure_is_a_value():
    graphdefs = [nnx.split(nnx.eval_shape(lambda: Decoder(make_spec(), rngs=nnx.Rngs(0))), nnx.Param)[0] for _ in "ab"]
    assert graphdefs[0] == graphdefs[1]
    assert hash(graphdefs[0]) == hash(graphdefs[1])


def test_tokens_and_positions_outside_their_tables_are_not_silent():
    graphdef, params = init(make_spec())
    run = jax.jit(lambda tokens, positions: nnx.merge(graphdef, params)(tokens, positions, jnp.zeros_like(tokens)))
    batch = make_batch(1, 6, 37)
    assert np.isfinite(run(batch.tokens, batch.positions)).all()
    assert np.isnan(run(np.full((1, 6), 37, np.int32), batch.positions)).all()
    assert np.isnan(run(batch.tokens, batch.positions + 24)).all()


def test_logits_are_float32_of_products_in_the_compute_dtype():
    graphdef, params = init(make_spec())
    batch = make_batch(2, 12, 37)

    def run(dtype):
        model = nnx.merge(graphdef, params)
        hidden = model.hidden(batch.tokens, batch.positions, batch.segments, dtype=dtype)
        return hidden, model(batch.tokens, batch.positions, batch.segments, dtype=dtype)

    exact, rounded = jax.jit(run, static_argnums=0)(jnp.float32), jax.jit(run, static_argnums=0)(jnp.bfloat16)
    assert rounded[0].dtype == jnp.bfloat16
    assert rounded[1].dtype == jnp.float32
    assert 1e-4 < np.abs(rounded[1] - exact[1]).mean() < 0.1
