from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.nn.attend import attend, choose_backend
from lm_trainer.nn.attention import causal_bias
from lm_trainer.nn.spec import AttentionSpec, ScoreSpec

SPEC = AttentionSpec(4, 64, num_kv_heads=2, window=16, scores=ScoreSpec(backend="auto"))
B, S, N, K, H = 2, 11, 4, 2, 8
RNG = np.random.default_rng(0)
Q, KEYS, V = (jnp.asarray(RNG.standard_normal((B, S, heads, H)), jnp.float32) for heads in (N, K, K))
SEGMENTS = jnp.asarray([[0] * 4 + [1] * 7, [0] * 11])


def scored(**fields: object) -> AttentionSpec:
    return dataclasses.replace(SPEC, scores=dataclasses.replace(SPEC.scores, **fields))  # pyright: ignore[reportArgumentType]


def test_auto_takes_cudnn_where_it_can():
    assert choose_backend(SPEC, "gpu", jnp.bfloat16).backend == "cudnn"
    assert choose_backend(scored(backend="xla"), "gpu", jnp.bfloat16).backend == "xla"


@pytest.mark.parametrize(
    ("spec", "platform", "dtype", "reason"),
    [
        (SPEC, "cpu", jnp.bfloat16, "the platform is cpu"),
        (SPEC, "tpu", jnp.bfloat16, "the platform is tpu"),
        (SPEC, "gpu", jnp.float32, "not float32"),
        (dataclasses.replace(SPEC, head_dim=12), "gpu", jnp.bfloat16, "head_dim=12"),
        (dataclasses.replace(SPEC, head_dim=256), "gpu", jnp.bfloat16, "head_dim=256"),
        (scored(softcap=5.0), "gpu", jnp.bfloat16, "softcap"),
        (scored(dropout=0.1), "gpu", jnp.bfloat16, "dropout"),
        (scored(upcast=True), "gpu", jnp.bfloat16, "upcast_attn"),
        (scored(block_size=8), "gpu", jnp.bfloat16, "flash_attention_block_size"),
    ],
)
def test_a_backend_that_cannot_do_it_is_not_chosen(spec, platform, dtype, reason):
    choice = choose_backend(spec, platform, dtype)
    assert choice.backend == "xla"
    assert reason in choice.reason
    forced = dataclasses.replace(spec, scores=dataclasses.replace(spec.scores, backend="cudnn"))
    with pytest.raises(UserError, match="attn_backend: cudnn cannot be used"):
        choose_backend(forced, platform, dtype)


def brute_force(spec: AttentionSpec) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (Q, KEYS, V))
    out = np.zeros((B, S, N, H))
    for b, s, n in np.ndindex(B, S, N):
        first = max(0, s + 1 - (spec.window or S))
        seen = [t for t in range(first, s + 1) if SEGMENTS[b, t] == SEGMENTS[b, s]]
        scores = np.array([q[b, s, n] @ k[b, t, n // (N // K)] for t in seen])
        if (cap := spec.scores.softcap) is not None:
            scores = cap * np.tanh(scores / cap)
        p = np.exp(scores - scores.max())
        out[b, s, n] = p / p.sum() @ v[b, seen, n // (N // K)]
    return out


@pytest.mark.parametrize("block_size", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_groups_windows_softcaps_and_blocks(block_size, softcap):
    scores = ScoreSpec(softcap=softcap, block_size=block_size)
    spec = AttentionSpec(N, H, num_kv_heads=K, window=3, scores=scores)
    found = attend(spec, Q, KEYS, V, causal_bias(SEGMENTS, 3))
    np.testing.assert_allclose(found, brute_force(spec), atol=1e-5)


def test_blocks_have_the_gradients_of_the_whole_and_keep_no_scores():
    bias = causal_bias(SEGMENTS)

    def loss(block_size: int | None):
        spec = AttentionSpec(N, H, num_kv_heads=K, scores=ScoreSpec(block_size=block_size))
        return lambda q, k, v: jnp.sum(jnp.sin(attend(spec, q, k, v, bias)))

    whole, blocks = (jax.jit(jax.grad(loss(size), argnums=(0, 1, 2)))(Q, KEYS, V) for size in (None, 4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, atol=1e-5), whole, blocks)

    def kept(size: int | None) -> int:
        _, backward = jax.eval_shape(lambda *args: jax.vjp(loss(size), *args), Q, KEYS, V)
        return max(leaf.size for leaf in jax.tree.leaves(backward))

    assert kept(None) >= B * N * S * S
    assert kept(4) < B * N * S * S
