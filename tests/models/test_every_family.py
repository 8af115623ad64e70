"""Properties that every family must have; a new one is tested through its line in `tests/models/common.py`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import TypeAdapter

from lm_trainer.core.batch import Batch
from lm_trainer.core.tree import named_leaves
from lm_trainer.models import MODEL_CONFIGS, AnyModel, WhisperConfig
from lm_trainer.nn.decoder import Decoder, Embedding
from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.loss import token_loss
from lm_trainer.nn.mixer_spec import softmax_spec
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.profile.flops import flops_per_token, parameter_count
from tests.compiling import quick_jit
from tests.models.common import SEQ, TINY, VOCAB, WITHOUT_OWN_PARTS, change, graphdef, params, parts, positions, tokens

EVERY = pytest.mark.parametrize("config", TINY.values(), ids=TINY)
FEATURES = ("gpt2", "gemma3")
"""Families that together have most parts of the decoder that execution could treat differently."""
LOADS = (".selection_bias", ".load")
"""Ends of the names of parameters that no gradient trains."""
REPEATED = pytest.mark.exhaustive
"""For families without parts of their own, where others show the same."""
OWN_GRADIENTS = ("mamba2", "qwen3_next", "deepseek_v3", "mpt", "gpt_oss", "backpack")
"""Families with a way of mixing positions that neither of `FEATURES` has."""


def families(slow: Sequence[str]) -> Any:
    """Runs a test of `FEATURES` always, of the families of `slow` among the slow tests, of others if exhaustive."""
    return pytest.mark.parametrize(
        "config",
        [
            pytest.param(
                config, id=name, marks=() if name in FEATURES else pytest.mark.slow if name in slow else REPEATED
            )
            for name, config in TINY.items()
        ],
    )


QUICK = families([name for name in TINY if name not in WITHOUT_OWN_PARTS])


def run(model: Decoder, tokens: Any, positions: Any, segments: Any) -> jax.Array:
    return model(jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segments))


def logits(config: AnyModel, tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Logits of two rows of the longest sequence, always in these shapes, so that a family is compiled once."""
    return np.asarray(_logits(config.module(), config.spec(VOCAB))(params(config), tokens, positions, segments))


@functools.cache
def _logits(module: type[Decoder], spec: DecoderSpec) -> Any:
    """`(params, tokens, positions, segments) -> logits`."""
    graph = nnx.split(nnx.eval_shape(lambda: module(spec, rngs=nnx.Rngs(0))), nnx.Param)[0]
    return quick_jit(lambda p, *rows: run(nnx.merge(graph, p), *rows))


@functools.cache
def _loss_and_grads(module: type[Decoder], spec: DecoderSpec, *, block: int | None = None) -> Any:
    """`(params, batch) -> (loss, gradients)`."""
    graph = nnx.split(nnx.eval_shape(lambda: module(spec, rngs=nnx.Rngs(0))), nnx.Param)[0]

    def loss(p: Any, batch: Batch) -> jax.Array:
        return token_loss(nnx.merge(graph, p), batch, block_size=block)[0] / batch.weights.sum()

    return quick_jit(jax.value_and_grad(loss))


def training_rows() -> Batch:
    rows = tokens(2, SEQ + 1)
    weights = np.ones((2, SEQ), np.float32)
    return Batch(rows[:, :-1], rows[:, 1:], weights, positions(), np.zeros((2, SEQ), np.int32))


def loss_and_grads(config: AnyModel, *, block: int | None = None, weights: Any = None) -> Any:
    return _loss_and_grads(config.module(), config.spec(VOCAB), block=block)(weights or params(config), training_rows())


@functools.cache
def plain(name: str) -> Any:
    """Loss and gradients, unrolled and without rematerialisation."""
    return loss_and_grads(TINY[name])


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    want = named_leaves(expected[1])
    for name, leaf in named_leaves(actual[1]).items():
        np.testing.assert_allclose(leaf, want[name], rtol=1e-4, atol=2e-6, err_msg=name)


@EVERY
def test_every_family_is_tested(config):
    assert {type(tiny) for tiny in TINY.values()} == set(MODEL_CONFIGS) - {WhisperConfig}
    assert TINY[config.type] is config


def test_families_without_parts_of_their_own_have_none() -> None:
    parts_of_families = {name: set(parts(config.spec(VOCAB))) for name, config in TINY.items()}
    parts_elsewhere = set().union(*(parts_of_families[name] for name in TINY if name not in WITHOUT_OWN_PARTS))
    assert not [
        (name, part) for name in WITHOUT_OWN_PARTS for part in sorted(parts_of_families[name] - parts_elsewhere)
    ]


@EVERY
def test_a_block_chooses_its_family_by_type(config):
    written = config.model_dump(mode="json")
    assert TypeAdapter(AnyModel).validate_python(written) == config


@QUICK
def test_causal_and_inside_segments(config):
    """Another token at one position changes no bit of what must not see it, and moves all that may."""
    rows = np.repeat(tokens(1), SEQ, axis=0)
    other = np.where(np.eye(SEQ, dtype=bool), (rows + 1) % VOCAB, rows)
    segments = np.array([[0] * 7 + [1] * (SEQ - 7)] * 2, np.int32)
    plain = logits(config, rows[:2], positions(), segments)[0]
    pairs = [logits(config, pair, positions(), segments) for pair in np.split(other, SEQ // 2)]
    influence = np.abs(np.concatenate(pairs) - plain).max(axis=-1).T
    assert_seen(config, influence, segments[:1])


def assert_seen(config: AnyModel, influence: np.ndarray, segments: np.ndarray) -> None:
    """`influence[i, j]`: of position j on the logits at i."""
    attentions = [softmax_spec(block.mixer) for block in config.spec(VOCAB).blocks]
    reach = sum((SEQ if spec is None or spec.window is None else spec.window) - 1 for spec in attentions)
    distances = np.arange(SEQ)[:, None] - np.arange(SEQ)
    allowed = (distances >= 0) & (distances <= reach) & (segments == segments.T)
    assert (influence[~allowed] == 0).all()
    assert (influence[allowed] > 0).all()


@families(OWN_GRADIENTS)
def test_causal_by_gradient(config):
    """The gradient of a logit with respect to what it must not see is zero, exactly."""
    graph, weights, row = graphdef(config), params(config), tokens(1)
    segments = np.array([[0] * 7 + [1] * (SEQ - 7)], np.int32)
    embed, width = Embedding.lookup, config.spec(VOCAB).hidden_dim

    def chosen(extra_BSD: jax.Array, position: jax.Array) -> jax.Array:
        model = nnx.merge(graph, weights)
        with mock.patch.object(Embedding, "lookup", lambda self, t: embed(self, t) + extra_BSD):
            return jnp.sum(jnp.sin(run(model, row, positions(1), segments)[0, position]))

    # A loop: not every operation of a mixture of experts has a form for batches of gradients.
    zeros = jnp.zeros((1, SEQ, width))
    seen_SD = quick_jit(lambda: jax.lax.map(lambda position: jax.grad(chosen)(zeros, position), jnp.arange(SEQ)))()
    assert_seen(config, np.abs(np.asarray(seen_SD)[:, 0]).max(axis=-1), segments)


@QUICK
def test_packed_equals_unpacked(config):
    first, second = tokens(1, 6, seed=1), tokens(1, 9, seed=2)
    packed = np.concatenate([first, second, tokens(1, 1)], axis=1)
    packed_positions = np.concatenate([positions(1, 6), positions(1, 9), positions(1, 1)], axis=1)
    segments = np.array([[4] * 6 + [9] * 9 + [-1]], np.int32)
    packed_logits = logits(config, *(np.repeat(x, 2, axis=0) for x in (packed, packed_positions, segments)))[0]
    alone = np.concatenate([np.pad(x, ((0, 0), (0, SEQ - x.shape[1]))) for x in (first, second)])
    expected = logits(config, alone, positions(), np.zeros((2, SEQ), np.int32))
    np.testing.assert_allclose(packed_logits[:6], expected[0, :6], atol=1e-5)
    np.testing.assert_allclose(packed_logits[6:15], expected[1, :9], atol=1e-5)


EXECUTION = (
    {"gradient_checkpointing": "dots", "scan_layers": True},
    {"gradient_checkpointing": True},
    {"flash_attention_block_size": 5},
    {"scan_layers": True},
    {"gradient_checkpointing": "dots_no_batch"},
    {"gradient_checkpointing": {"save_block_internals": ["attention"]}},
    {"gradient_checkpointing": {"save_carries": "offload", "offload_block_internals": ["mlp"]}},
    {"gradient_checkpointing": {"nested": 2}, "scan_layers": True},
)


def executions() -> list[Any]:
    """Every way for families that together have most parts, the first for all that have parts of their own."""
    return [
        pytest.param(config, fields, id=f"{name}-{fields}", marks=marks)
        for name, config in TINY.items()
        for i, fields in enumerate(EXECUTION if name in FEATURES else EXECUTION[:1])
        for marks in [() if name in FEATURES and i < 2 else REPEATED if name in WITHOUT_OWN_PARTS else pytest.mark.slow]
    ]


@pytest.mark.parametrize(("config", "fields"), executions())
def test_execution_changes_no_number(config, fields):
    other = change(config, **fields)
    jax.tree.map(np.testing.assert_array_equal, params(other), params(config))
    assert_close(loss_and_grads(other), plain(config.type))


@QUICK
def test_a_step_against_the_gradient_lowers_the_loss(config):
    value, grads = plain(config.type)
    # What stands for the gradient of a load is the load.
    grads = jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.zeros_like(leaf) if path[-1].key in ("selection_bias", "load") else leaf, grads
    )
    # So long a step that the loss falls by 0.01 where it is linear.
    length = 0.01 / sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(grads))
    stepped = jax.tree.map(lambda p, g: np.asarray(p) - np.float32(length) * np.asarray(g), params(config), grads)
    loss_after, _ = loss_and_grads(config, weights=stepped)
    assert value - 0.015 < loss_after < value - 0.005
    trained = {name: leaf for name, leaf in named_leaves(grads).items() if not name.endswith(LOADS)}
    assert all(np.any(leaf) for leaf in trained.values()), "a parameter without a gradient"


@pytest.mark.parametrize("config", [TINY[name] for name in FEATURES], ids=FEATURES)
def test_blockwise_loss_equals_whole(config):
    assert_close(loss_and_grads(config, block=5), plain(config.type))


@pytest.mark.slow
@pytest.mark.parametrize("config", [TINY[name] for name in FEATURES], ids=FEATURES)
def test_gradient_checkpointing_keeps_less(config):
    sizes: dict[str, int] = {}

    def saved_size(policy: Any) -> int:
        if str(policy) not in sizes:
            sizes[str(policy)] = measure(policy)
        return sizes[str(policy)]

    def measure(policy: Any) -> int:
        wide = change(config, gradient_checkpointing=policy, num_layers=2, scan_layers=False)
        graph, rows = graphdef(wide), tokens()

        def loss(p: Any) -> jax.Array:
            return jnp.sum(run(nnx.merge(graph, p), rows, positions(), np.zeros_like(rows)))

        _, backward = jax.eval_shape(lambda p: jax.vjp(loss, p), params(wide))
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    assert (
        saved_size("full")
        == saved_size("recompute")
        == saved_size(True)
        < saved_size("dots_no_batch")
        < saved_size("dots")
        < saved_size(False)
    )
    assert (
        saved_size("save_all")
        == saved_size({"disable": True})
        == saved_size({"save_block_internals": True})
        == saved_size(False)
    )
    names = [saved_size({"save_block_internals": list(names)}) for names in ((), ("mlp",), ("mlp", "attention"))]
    assert saved_size(True) == names[0] <= names[1] < names[2] < saved_size("dots_no_batch")
    if config.spec(VOCAB).blocks[0].post_norm is not None:
        # Without a norm after it, what the MLP adds is kept in any case, as a part of the next block's input.
        assert names[0] < names[1]


@pytest.mark.parametrize(
    ("config", "scan"),
    [
        *(
            pytest.param(config, False, id=f"{name}-unrolled", marks=() if name in FEATURES else REPEATED)
            for name, config in TINY.items()
        ),
        *(
            pytest.param(config, True, id=name, marks=REPEATED if name in WITHOUT_OWN_PARTS else pytest.mark.slow)
            for name, config in TINY.items()
        ),
    ],
)
def test_decoding_with_a_cache_equals_the_full_forward_pass(config, scan):
    rows, lengths = tokens(), np.array([5, 2])
    expected = logits(config, rows, positions(), np.zeros((2, SEQ), np.int32))
    graph = graphdef(change(config, scan_layers=scan))

    def decode_once(p: Any, cache: Any, tokens: Any, next_positions: Any, counts: Any = None) -> Any:
        return nnx.merge(graph, p).decode(tokens, next_positions, cache, counts)

    decode = quick_jit(decode_once)
    cache = nnx.merge(graph, params(config)).init_cache(2, SEQ + 4)
    # Rows of lengths 5 and 2 are read together, so that the shorter one leaves rubbish behind its end.
    actual, cache = decode(params(config), cache, rows[:, :7], positions(2, 7), lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(actual[row, :length], expected[row, :length], atol=1e-5)
    next_positions = lengths[:, None] + np.arange(7)
    actual, cache = decode(
        params(config), cache, np.take_along_axis(rows, next_positions, axis=1), next_positions.astype(np.int32)
    )
    np.testing.assert_allclose(actual, np.take_along_axis(expected, next_positions[..., None], axis=1), atol=1e-5)


@QUICK
def test_dropout(config):
    fields = [name for name in type(config).model_fields if name.endswith("_pdrop")]
    if not fields:
        pytest.skip("this family has no dropout")
    small, rows = change(config, num_layers=1), tokens(2, SEQ + 1)
    batch = Batch(rows[:, :-1], rows[:, 1:], np.ones((2, SEQ), np.float32), positions(), np.zeros((2, SEQ), np.int32))

    def losses(rates: dict[str, float], keys: list[jax.Array] | None) -> list[float]:
        graph = graphdef(change(small, **rates))
        loss = quick_jit(lambda p, key: token_loss(nnx.merge(graph, p), batch, key=key)[0] / batch.weights.size)
        return [float(loss(params(small), key)) for key in keys or [None]]

    keys = [jax.random.key(seed) for seed in (0, 0, *range(1, 40))]
    (exact,) = losses({}, None)
    assert losses({}, keys[:1]) == [exact]
    assert losses(dict.fromkeys(fields, 0.3), None) == [exact]
    for name in fields:
        one, repeated, *losses_of_other_keys = losses({name: 0.1}, keys)
        assert one == repeated, name
        assert len({one, *losses_of_other_keys}) > 35, name
        # The mean of what is dropped stays, so the loss moves by what is of second order in it.
        assert abs(np.mean(losses_of_other_keys) - exact) < 0.1 * exact, name


def shapes(config: AnyModel) -> Any:
    """Shapes of the parameters, without allocating them."""
    return jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(config.build(VOCAB, rngs=nnx.Rngs(0)), nnx.Param)))


@EVERY
def test_parameter_count(config):
    counted = sum(leaf.size for name, leaf in named_leaves(shapes(config)).items() if not name.endswith(LOADS))
    assert parameter_count(config.spec(VOCAB)) == counted


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=pytest.mark.slow if name in WITHOUT_OWN_PARTS else ())
        for name, config in TINY.items()
    ],
)
def test_flops_are_those_of_the_program(config):
    """By XLA's own count, before it optimises anything."""
    sizes: dict[str, Any] = {"hidden_dim": 512, "intermediate_dim": 1024, "moe_intermediate_dim": 512, "head_dim": 64}
    # Layers that use keys of others follow a layer of each kind.
    sizes |= {"num_layers": 3 if getattr(config, "num_kv_shared_layers", 0) else 2, "mlp_only_layers": (0,)}
    # XLA counts one iteration of the loop over the blocks of a grouped product.
    sizes |= {"expert_kernel": "dense"}
    # Logits need none of the modules that predict later tokens.
    sizes |= {"mtp_depth": 0}
    wide_sizes = {name: size for name, size in sizes.items() if name in type(config).model_fields}
    wide = change(config, seq_len=64, scan_layers=False, **wide_sizes)
    graph, rows = graphdef(wide), tokens(2, 64)
    forward = jax.jit(lambda p: run(nnx.merge(graph, p), rows, positions(2, 64), np.zeros_like(rows)))
    cost = forward.lower(shapes(wide)).cost_analysis()
    assert cost is not None
    expected = flops_per_token(wide.spec(VOCAB), 64).forward + unused_experts(wide.spec(VOCAB))
    assert expected * rows.size == pytest.approx(cost["flops"], rel=0.03)


def unused_experts(spec: DecoderSpec) -> int:
    """FLOPs per token of experts that the router did not choose: on a CPU every token goes through every expert."""
    return sum(
        (block.mlp.num_experts - block.mlp.top_k) * 6 * spec.hidden_dim * block.mlp.hidden_dim
        for block in spec.all_blocks
        if isinstance(block.mlp, MoeSpec)
    )
