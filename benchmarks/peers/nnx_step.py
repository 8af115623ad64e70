"""The same step in plain Flax NNX, without `lm_trainer`: modules, `nnx.Optimizer` and `nnx.jit`, as in Flax's guides.

Modules have the names of transformers without the prefix. For the shape letters see `jax_twin`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.peers.jax_twin import Params, adamw, attention, read_params, rotate
from benchmarks.peers.kinds import euclidean_norm
from benchmarks.peers.shapes import NORM_EPSILON, Shape, is_decayed, make_batches

_WEIGHTS = ("kernel", "scale", "embedding")
"""Names in Flax of what transformers calls `weight`."""


class Gpt2Block(nnx.Module):
    def __init__(self, shape: Shape, **options: Any):
        width, self.shape = shape.width, shape
        self.ln_1 = nnx.LayerNorm(width, epsilon=NORM_EPSILON, **options)
        self.ln_2 = nnx.LayerNorm(width, epsilon=NORM_EPSILON, **options)
        self.attn = nnx.Dict(c_attn=nnx.Linear(width, 3 * width, **options), c_proj=nnx.Linear(width, width, **options))
        self.mlp = nnx.Dict(
            c_fc=nnx.Linear(width, 4 * width, **options), c_proj=nnx.Linear(4 * width, width, **options)
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        split = (*x_BSD.shape[:2], self.shape.heads, self.shape.head_dim)
        q_BSNH, k_BTNH, v_BTNH = (y.reshape(split) for y in jnp.split(self.attn.c_attn(self.ln_1(x_BSD)), 3, axis=-1))
        x_BSD = x_BSD + self.attn.c_proj(attention(q_BSNH, k_BTNH, v_BTNH))
        return x_BSD + self.mlp.c_proj(nnx.gelu(self.mlp.c_fc(self.ln_2(x_BSD))))


class Gpt2(nnx.Module):
    def __init__(self, shape: Shape, **options: Any):
        self.wte = nnx.Embed(shape.vocab, shape.width, **options)
        self.wpe = nnx.Embed(shape.seq_len, shape.width, **options)
        self.h = nnx.List([Gpt2Block(shape, **options) for _ in range(shape.layers)])
        self.ln_f = nnx.LayerNorm(shape.width, epsilon=NORM_EPSILON, **options)

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        x_BSD = self.wte(tokens_BS) + self.wpe(jnp.arange(tokens_BS.shape[1]))
        for block in self.h:
            x_BSD = block(x_BSD)
        return self.wte.attend(self.ln_f(x_BSD))


class LlamaBlock(nnx.Module):
    def __init__(self, shape: Shape, **options: Any):
        width, self.shape = shape.width, shape
        key_width, no_bias = shape.kv_heads * shape.head_dim, {**options, "use_bias": False}
        self.input_layernorm = nnx.RMSNorm(width, epsilon=NORM_EPSILON, **options)
        self.post_attention_layernorm = nnx.RMSNorm(width, epsilon=NORM_EPSILON, **options)
        self.self_attn = nnx.Dict(
            q_proj=nnx.Linear(width, width, **no_bias),
            k_proj=nnx.Linear(width, key_width, **no_bias),
            v_proj=nnx.Linear(width, key_width, **no_bias),
            o_proj=nnx.Linear(width, width, **no_bias),
        )
        self.mlp = nnx.Dict(
            gate_proj=nnx.Linear(width, shape.mlp_width, **no_bias),
            up_proj=nnx.Linear(width, shape.mlp_width, **no_bias),
            down_proj=nnx.Linear(shape.mlp_width, width, **no_bias),
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        split = (*x_BSD.shape[:2], -1, self.shape.head_dim)
        y_BSD, layers = self.input_layernorm(x_BSD), self.self_attn
        q_BSNH, k_BTKH, v_BTKH = (f(y_BSD).reshape(split) for f in (layers.q_proj, layers.k_proj, layers.v_proj))
        x_BSD = x_BSD + layers.o_proj(attention(rotate(q_BSNH), rotate(k_BTKH), v_BTKH))
        y_BSD = self.post_attention_layernorm(x_BSD)
        return x_BSD + self.mlp.down_proj(nnx.silu(self.mlp.gate_proj(y_BSD)) * self.mlp.up_proj(y_BSD))


class Llama(nnx.Module):
    def __init__(self, shape: Shape, **options: Any):
        self.embed_tokens = nnx.Embed(shape.vocab, shape.width, **options)
        self.layers = nnx.List([LlamaBlock(shape, **options) for _ in range(shape.layers)])
        self.norm = nnx.RMSNorm(shape.width, epsilon=NORM_EPSILON, **options)
        self.lm_head = nnx.Linear(shape.width, shape.vocab, use_bias=False, **options)

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        x_BSD = self.embed_tokens(tokens_BS)
        for block in self.layers:
            x_BSD = block(x_BSD)
        return self.lm_head(self.norm(x_BSD))


def mean_loss(model: Gpt2 | Llama, tokens_BS: jax.Array, targets_BS: jax.Array) -> jax.Array:
    logits_BSV = model(tokens_BS).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits_BSV, targets_BS).mean()


@nnx.jit
def train_step(model: Gpt2 | Llama, optimizer: nnx.Optimizer, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(mean_loss)(model, tokens, targets)
    optimizer.update(model, grads)
    return loss


class NnxTrainer:
    """A `Trainer` in plain Flax NNX."""

    def __init__(self, shape: Shape, weights: Path):
        self.facts: dict[str, float] = {}
        self.device = jax.default_backend()
        make_model = Gpt2 if shape.family == "gpt2" else Llama
        dtype = jnp.float32 if self.device == "cpu" else jnp.bfloat16
        self._model = make_model(shape, dtype=dtype, rngs=nnx.Rngs(0))
        load_weights(self._model, read_params(shape, weights))
        self._optimizer = nnx.Optimizer(self._model, adamw(decay_mask), wrt=nnx.Param)
        self._batches = [jax.device_put(batch, jax.devices()[0]) for batch in make_batches(shape)]

    def step(self, index: int) -> float:
        loss = train_step(self._model, self._optimizer, *self._batches[index % len(self._batches)])
        jax.block_until_ready((nnx.state(self._model), nnx.state(self._optimizer)))
        return float(loss)

    def norm(self) -> float:
        return euclidean_norm(jax.tree.leaves(nnx.state(self._model, nnx.Param)))


def load_weights(model: Gpt2 | Llama, params: Params) -> None:
    """Replaces the parameters of a model, given by their transformers names."""
    state = nnx.state(model, nnx.Param)
    for path, param in nnx.to_flat_state(state):
        param.value = params[transformers_name(path)]
    nnx.update(model, state)


def transformers_name(path: tuple[Any, ...]) -> str:
    *modules, last = map(str, path)
    return ".".join([*modules, "weight" if last in _WEIGHTS else last])


def decay_mask(params: nnx.State) -> nnx.State:
    flat = [(path, is_decayed(transformers_name(path), x.shape)) for path, x in nnx.to_flat_state(params)]
    return nnx.from_flat_state(flat)


def make(shape: Shape, weights: Path) -> NnxTrainer:
    return NnxTrainer(shape, weights)
