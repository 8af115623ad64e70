"""The same step in plain JAX, without `lm_trainer`: functions over a dict of arrays, and one jitted step with optax.

Linear maps are products of two matrices, which XLA:CPU computes faster than batches of products. Parameters have their
transformers names without the prefix. Matrices have the shape (inputs, outputs).

Shape letters: B rows, S queries, T keys, D width, N query heads, K key and value heads, G query heads per KV head, H
head size, F pairs of a head, M rows of a matrix, V vocabulary.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers.kinds import euclidean_norm, read_weights
from benchmarks.peers.shapes import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NORM_EPSILON,
    ROPE_THETA,
    WEIGHT_DECAY,
    Shape,
    is_decayed,
    make_batches,
)

Params = dict[str, jax.Array]


def linear(p: Params, name: str, x: jax.Array) -> jax.Array:
    w = p[f"{name}.weight"].astype(x.dtype)
    y = (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], -1)
    return y + p[f"{name}.bias"].astype(x.dtype) if f"{name}.bias" in p else y


def layer_norm(p: Params, name: str, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + NORM_EPSILON)
    return (y * p[f"{name}.weight"] + p[f"{name}.bias"]).astype(x.dtype)


def rms_norm(p: Params, name: str, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + NORM_EPSILON)
    return (y * p[f"{name}.weight"]).astype(x.dtype)


def attention(q_BSNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    """Computes causal attention, [B, S, D]."""
    rows, length, heads, size = q_BSNH.shape
    q_BSKGH = (q_BSNH * size**-0.5).reshape(rows, length, k_BTKH.shape[2], -1, size)
    scores_BKGST = jnp.einsum("bskgh,btkh->bkgst", q_BSKGH, k_BTKH).astype(jnp.float32)
    # Every query sees itself, so no row is -inf everywhere, which would give NaN.
    scores_BKGST = jnp.where(jnp.tri(length, dtype=bool), scores_BKGST, -jnp.inf)
    probabilities_BKGST = jax.nn.softmax(scores_BKGST, axis=-1).astype(v_BTKH.dtype)
    return jnp.einsum("bkgst,btkh->bskgh", probabilities_BKGST, v_BTKH).reshape(rows, length, heads * size)


def gpt2_hidden(shape: Shape, p: Params, tokens_BS: jax.Array, dtype: Any) -> jax.Array:
    split = (*tokens_BS.shape, shape.heads, shape.head_dim)
    x_BSD = (p["wte.weight"][tokens_BS] + p["wpe.weight"]).astype(dtype)
    for i in range(shape.layers):
        qkv = linear(p, f"h.{i}.attn.c_attn", layer_norm(p, f"h.{i}.ln_1", x_BSD))
        q_BSNH, k_BTNH, v_BTNH = (part.reshape(split) for part in jnp.split(qkv, 3, axis=-1))
        x_BSD = x_BSD + linear(p, f"h.{i}.attn.c_proj", attention(q_BSNH, k_BTNH, v_BTNH))
        up = linear(p, f"h.{i}.mlp.c_fc", layer_norm(p, f"h.{i}.ln_2", x_BSD))
        x_BSD = x_BSD + linear(p, f"h.{i}.mlp.c_proj", jax.nn.gelu(up, approximate=True))
    return layer_norm(p, "ln_f", x_BSD)


def rotate(x_BSNH: jax.Array) -> jax.Array:
    """Applies rotary position embeddings in float32."""
    length, size = x_BSNH.shape[1], x_BSNH.shape[-1]
    angles_S1F = np.outer(np.arange(length), ROPE_THETA ** -(np.arange(0, size, 2) / size))[:, None].astype(np.float32)
    first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    cos_S1F, sin_S1F = jnp.cos(angles_S1F), jnp.sin(angles_S1F)
    rotated = (first * cos_S1F - second * sin_S1F, second * cos_S1F + first * sin_S1F)
    return jnp.concatenate(rotated, axis=-1).astype(x_BSNH.dtype)


def llama_hidden(shape: Shape, p: Params, tokens_BS: jax.Array, dtype: Any) -> jax.Array:
    split = (*tokens_BS.shape, -1, shape.head_dim)
    x_BSD = p["embed_tokens.weight"][tokens_BS].astype(dtype)
    for i in range(shape.layers):
        prefix = f"layers.{i}"
        y_BSD = rms_norm(p, f"{prefix}.input_layernorm", x_BSD)
        q_BSNH, k_BTKH, v_BTKH = (linear(p, f"{prefix}.self_attn.{n}_proj", y_BSD).reshape(split) for n in "qkv")
        o_BSD = attention(rotate(q_BSNH), rotate(k_BTKH), v_BTKH)
        x_BSD = x_BSD + linear(p, f"{prefix}.self_attn.o_proj", o_BSD)
        y_BSD = rms_norm(p, f"{prefix}.post_attention_layernorm", x_BSD)
        gated = jax.nn.silu(linear(p, f"{prefix}.mlp.gate_proj", y_BSD)) * linear(p, f"{prefix}.mlp.up_proj", y_BSD)
        x_BSD = x_BSD + linear(p, f"{prefix}.mlp.down_proj", gated)
    return rms_norm(p, "norm", x_BSD)


def mean_loss(shape: Shape, dtype: Any, p: Params, tokens_BS: jax.Array, targets_BS: jax.Array) -> jax.Array:
    hidden = gpt2_hidden if shape.family == "gpt2" else llama_hidden
    h_MD = hidden(shape, p, tokens_BS, dtype).reshape(-1, shape.width)
    w_DV = p["wte.weight"].T if shape.family == "gpt2" else p["lm_head.weight"]
    logits_MV = jnp.matmul(h_MD, w_DV.astype(dtype), preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_MV, targets_BS.reshape(-1)).mean()


def adamw(decay_mask: Any) -> optax.GradientTransformation:
    """Returns AdamW after clipping; `decay_mask` is a tree of booleans, or a function of the parameters."""
    return optax.chain(
        optax.clip_by_global_norm(MAX_GRAD_NORM),
        optax.adamw(LEARNING_RATE, *BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, mask=decay_mask),
    )


class TwinTrainer:
    """A `Trainer` in plain JAX."""

    def __init__(self, shape: Shape, params: Params):
        self.facts: dict[str, float] = {}
        self.device = jax.default_backend()
        dtype = jnp.float32 if self.device == "cpu" else jnp.bfloat16
        optimizer = adamw({name: is_decayed(name, x.shape) for name, x in params.items()})
        gradient = jax.value_and_grad(functools.partial(mean_loss, shape, dtype))

        def step(params: Params, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Params, Any, jax.Array]:
            loss, grads = gradient(params, tokens, targets)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss  # pyright: ignore[reportReturnType]

        # Donated, as in any training loop, so that the new state reuses the memory of the old state.
        self._step = jax.jit(step, donate_argnums=(0, 1))
        # Outputs of the step are committed to their device. If the first arguments were not, the step would compile
        # twice.
        self._params, self._state = jax.device_put((params, optimizer.init(params)), jax.devices()[0])
        self._batches = [jax.device_put(batch, jax.devices()[0]) for batch in make_batches(shape)]

    def step(self, index: int) -> float:
        batch = self._batches[index % len(self._batches)]
        self._params, self._state, loss = self._step(self._params, self._state, *batch)
        jax.block_until_ready((self._params, self._state))
        return float(loss)

    def norm(self) -> float:
        return euclidean_norm(self._params.values())


def read_params(shape: Shape, weights: Path) -> Params:
    """Reads weights with their transformers names without the prefix, and matrices as (inputs, outputs)."""
    prefix = "transformer." if shape.family == "gpt2" else "model."
    params = {}
    for name, x in read_weights(weights).items():
        # The matrices of a Llama are stored with the shape (outputs, inputs).
        transposed = name.endswith(("_proj.weight", "lm_head.weight")) and shape.family == "llama"
        params[name.removeprefix(prefix)] = jnp.array(x.T if transposed else x)
    return params


def make(shape: Shape, weights: Path) -> TwinTrainer:
    return TwinTrainer(shape, read_params(shape, weights))
