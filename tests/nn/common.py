"""Small decoders and rows for the tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.nn.attention import ForwardContext, make_context
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, DecoderSpec, EmbeddingSpec, MlpSpec, NormSpec
from tests.compiling import quick_jit

BLOCK = BlockSpec(AttentionSpec(num_heads=2, head_dim=8), MlpSpec(hidden_dim=24), pre_norm=NormSpec())


def make_spec(*, blocks: tuple[BlockSpec, ...] = (BLOCK,) * 2, **fields: Any) -> DecoderSpec:
    values = {"vocab_size": 37, "hidden_dim": 16, "num_positions": 24, "final_norm": NormSpec(), "init_std": 0.3}
    values["embedding"] = EmbeddingSpec(learned_positions=True)
    return DecoderSpec(blocks=blocks, **{**values, **fields})


M = TypeVar("M", bound=nnx.Module)


def built(make: Callable[[], M]) -> M:
    """The module that `make` makes, with parameters that are computed under jit."""
    graphdef, _ = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graphdef, jax.jit(lambda: nnx.state(make()))())


def weight_of(linear: Linear) -> nnx.Param:
    """The weight of a layer that is not kept in 4 bits."""
    assert isinstance(linear.weight, nnx.Param)
    return linear.weight


def make_init(std: float = 1.0) -> Initializer:
    return Initializer(nnx.Rngs(0), std=std, residual_std=std)


def context(segments: np.ndarray, attention: AttentionSpec = BLOCK.attention) -> ForwardContext:
    """For rows of one or more documents, with positions from the start of each row."""
    positions = np.tile(np.arange(segments.shape[1], dtype=np.int32), (len(segments), 1))
    block = dataclasses.replace(BLOCK, mixer=attention)
    return jax.jit(lambda *rows: make_context((block,), *rows))(positions, segments)


@functools.cache
def init(spec: DecoderSpec, seed: int = 0) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The structure, and parameters made under jit with random norms and biases in place of ones and zeros."""
    graphdef = nnx.split(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0))), nnx.Param)[0]
    params = quick_jit(lambda: nnx.to_pure_dict(nnx.state(Decoder(spec, rngs=nnx.Rngs(seed)), nnx.Param)))()
    rng = np.random.default_rng(seed)

    def disturb(path: Any, leaf: jax.Array) -> Any:
        if path[-1].key not in ("bias", "scale"):
            return leaf
        return jnp.asarray(np.asarray(leaf) + 0.2 * rng.standard_normal(leaf.shape, np.float32))

    return graphdef, jax.tree_util.tree_map_with_path(disturb, params)


def make_batch(rows: int, seq_len: int, vocab_size: int, *, seed: int = 0) -> Batch:
    """Random rows, each one document, with weights that are not all equal."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (rows, seq_len + 1)).astype(np.int32)
    return Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        rng.choice([0.0, 0.5, 1.0], (rows, seq_len)).astype(np.float32),
        np.tile(np.arange(seq_len, dtype=np.int32), (rows, 1)),
        np.zeros((rows, seq_len), np.int32),
    )
