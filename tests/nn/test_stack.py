from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.layer_sections import find_sections, slot_of_each_layer
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
    "prefix": (OTHER, OTHER, LAYERED, LAYERED, LAYERED),
}


def spec_of(name, **fields):
    return make_spec(blocks=PATTERNS[name], prefix=2 if name == "prefix" else 0, **fields)


@pytest.mark.parametrize(
    ("kinds", "prefix", "slots"),
    [
        ("a", 0, ["0"]),
        ("aaa", 0, ["012"]),
        ("abab", 0, ["02", "13"]),
        ("ababa", 0, ["024", "13"]),
        ("abb", 0, ["0", "1", "2"]),
        ("abb", 1, ["0", "12"]),
        ("aaabbb", 3, ["012", "345"]),
        ("aabcbcb", 2, ["01", "246", "35"]),
        ("abacdcd", 3, ["02", "1", "35", "46"]),
        ("aaa", 3, ["012"]),
    ],
)
def test_layers_of_a_slot(kinds, prefix, slots):
    sections = find_sections(kinds, prefix)
    layers_by_slot = [layers for section in sections for layers in section.layers_by_slot]
    assert ["".join(map(str, layers)) for layers in layers_by_slot] == slots
    assert [slot for section in sections for slot in section.slots] == [*range(len(slots))]
    assert "".join(slots[slot][row] for slot, row in slot_of_each_layer(layers_by_slot)) == "0123456"[: len(kinds)]


@pytest.mark.parametrize("name", PATTERNS)
def test_parameters_are_stacked_over_the_layers_of_a_slot(name):
    spec = spec_of(name)
    model = nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0)))
    assert len(model.blocks) == len(spec.layers_by_slot)
    assert [*spec.layers_by_prefix.items()] == [(f"blocks.{i}.", x) for i, x in enumerate(spec.layers_by_slot)]
    for slot, layers in enumerate(spec.layers_by_slot):
        assert {PATTERNS[name][layer] for layer in layers} == {PATTERNS[name][layers.start]}
        weight, width = model.blocks[str(slot)].mlp.up.weight, PATTERNS[name][layers.start].mlp.hidden_dim
        assert weight.get_value().shape == (len(layers), 16, width)
        assert weight.get_metadata("logical_axes") == ("layers", "embed", "mlp")


def test_layers_of_a_kind_are_compiled_once():
    spec, batch = spec_of("prefix", scan=True), make_batch(2, 12, 37)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0))), nnx.Param)
    rows = [jnp.asarray(x) for x in (batch.tokens, batch.positions, batch.segments)]
    run = lambda p: nnx.merge(graphdef, p)(*rows)  # noqa: E731
    loops = [eqn for eqn in jax.make_jaxpr(run)(params).eqns if eqn.primitive.name == "scan"]
    assert [loop.params["length"] for loop in loops] == [2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut short", "same", "prefix"])
def test_loop_equals_unrolled(name):
    blocks: tuple[BlockSpec, ...] = tuple(dataclasses.replace(block, dropout=0.2) for block in PATTERNS[name])
    batch = make_batch(2, 12, 37)
    results = []
    for scan in (False, True):
        graphdef, params = init(dataclasses.replace(spec_of(name), blocks=blocks, scan=scan))

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
