"""Factors of the forward pass, folded into weights: every family computes the same logits as with the factors in its
spec.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.folded_factors import FoldedFactor, folded_factors
from lm_trainer.nn.mixer_spec import LatentSpec
from lm_trainer.nn.spec import AttentionSpec, DecoderSpec
from lm_trainer.nn.transfer import ForwardFactors
from tests.compiling import quick_jit
from tests.conftest import ROOT
from tests.run.test_configs import load_config

VOCAB = 32
# Powers of two, so that folding them into weights adds no rounding.
RESIDUAL, EMBEDDING, HEAD_INPUT, QUERIES = 0.5, 4.0, 0.125, 0.25
WITHOUT_RULES = {"backpack", "whisper"}
FAMILIES = [
    path
    for path in sorted((ROOT / "configs").glob("*_nano.yaml"))
    if not path.stem.startswith(("ladder", "transfer", "distill", "dpo", "sft"))
    and path.stem.removesuffix("_nano") not in WITHOUT_RULES
]


def with_factors(spec: DecoderSpec, queries: float) -> DecoderSpec:
    """A spec whose forward pass has the factors."""

    def with_query_factor(mixer: Any) -> Any:
        if not isinstance(mixer, AttentionSpec | LatentSpec):
            return mixer
        scale = mixer.head_dim**-0.5 if mixer.scores.scale is None else mixer.scores.scale
        return replace(mixer, scores=replace(mixer.scores, scale=scale * queries))

    blocks = tuple(
        replace(
            block,
            mixer=with_query_factor(block.mixer),
            residual_scale=RESIDUAL if block.residual_scale is None else RESIDUAL * block.residual_scale,
        )
        for block in spec.blocks
    )
    embedding = EMBEDDING if spec.embedding.scale is None else EMBEDDING * spec.embedding.scale
    # The table of a tied head has the factor of the embedding too.
    logits = HEAD_INPUT * (EMBEDDING if spec.head.tied else 1.0)
    norm = spec.final_norm
    assert norm is not None
    final_norm = replace(norm, factor=logits if norm.factor is None else logits * norm.factor)
    return replace(spec, blocks=blocks, final_norm=final_norm, embedding=replace(spec.embedding, scale=embedding))


def random_params(model: Decoder) -> dict[tuple[Any, ...], jax.Array]:
    """Values of all parameters, also of the ones that start at 0 or 1."""
    rng = np.random.default_rng(0)
    return {
        path: jnp.asarray(0.3 * rng.standard_normal(variable.shape) + 0.1, jnp.float32)
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def compute_logits(cls: type[Decoder], spec: DecoderSpec, params: dict[tuple[Any, ...], jax.Array]) -> np.ndarray:
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (2, 8)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32)[None], (2, 8))

    def compute(params: dict[tuple[Any, ...], jax.Array]) -> jax.Array:
        model = cls(spec, rngs=nnx.Rngs(0))
        for path, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Param):
                variable.set_value(params[path])
        return model(tokens, positions, jnp.zeros((2, 8), jnp.int32))

    return np.asarray(quick_jit(compute)(params))


@pytest.mark.slow
@pytest.mark.parametrize("path", FAMILIES, ids=[path.stem.removesuffix("_nano") for path in FAMILIES])
def test_folded_factors_compute_the_same_logits(path: Any) -> None:
    config = load_config(path).model
    spec, cls = config.spec(VOCAB), config.module_class()
    # Without a gain, queries take up no factor, and the head has none to take up.
    first = next((b.mixer for b in spec.blocks if isinstance(b.mixer, AttentionSpec)), None)
    has_gain = first is None or first.qk_norm is None or first.qk_norm.norm.scale
    queries = QUERIES if has_gain else 1.0
    factors = ForwardFactors(
        depth=2.0,
        residual=RESIDUAL,
        embedding=EMBEDDING,
        head_input=HEAD_INPUT,
        queries={block.mixer: queries for block in spec.blocks},
        residual_std=1.0,
    )
    model = nnx.eval_shape(lambda: cls(spec, rngs=nnx.Rngs(0)))
    params, folded = random_params(model), folded_factors(model, factors)
    assert folded.keys() <= {".".join(map(str, name)) for name in params}
    scaled = {
        name: folded.get(".".join(map(str, name)), FoldedFactor()).scale(x, initial=1.0) for name, x in params.items()
    }
    expected = compute_logits(cls, with_factors(spec, queries), params)
    actual = compute_logits(cls, spec, scaled)
    spread = float(np.std(expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * spread + 1e-6)
    assert not np.allclose(compute_logits(cls, spec, params), expected, rtol=0, atol=1e-3 * spread)
