"""Generation with a key-value cache: one compiled program reads the prompts, another writes the rest.

Shape letters: B rows, T prompt positions, V vocabulary, D hidden dimension, G new tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.core.errors import UserError
from lm_trainer.generate.sampling import draw, filter_logits
from lm_trainer.nn.cache import KvCache
from lm_trainer.nn.decoder import Decoder

_ROUND = 32
"""Lengths are rounded up to multiples of this, so that similar calls share one compiled program."""


def generate(  # noqa: PLR0913 - the settings of sampling are what callers spell out
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_id: int | None = None,
    seed: int = 0,
    dtype: DTypeLike = jnp.float32,
) -> list[list[int]]:
    """Continues every prompt and returns the new tokens alone.

    A continuation ends with `eos_id` (which is part of it), after `max_new_tokens`, or where prompt and continuation
    together fill the model's context. Prompts of different lengths are processed together without influence on one
    another; the draws of row i depend on (`seed`, i) alone.

    Args:
        model: with its parameters.
        prompts: token ids, at least one each.
        max_new_tokens: the longest continuation.
        temperature: 0 takes the likeliest token.
        top_k: how many of the likeliest tokens to draw from; 0: all.
        top_p: draw from the likeliest tokens whose probabilities reach this; order as in `filter_logits`.
        eos_id: ends a continuation; None: nothing does.
        seed: of the draws.
        dtype: compute dtype, also of the cache.

    Raises:
        UserError: for an empty prompt, one that is longer than the context, or a token that the model lacks.
    """
    if not prompts or max_new_tokens < 1:
        return [[] for _ in prompts]
    prepared = Prepared.make(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_id=eos_id,
        seed=seed,
        dtype=dtype,
    )
    tokens_BG, counts_B = jax.device_get(prepared.write(*prepared.read()))
    return [row[:count].tolist() for row, count in zip(tokens_BG, counts_B, strict=True)]


class Prepared(NamedTuple):
    """A call of `generate` in its two parts."""

    static: _Static
    params: Any
    tokens_BT: np.ndarray
    lengths_B: np.ndarray
    settings: _Settings

    @classmethod
    def make(  # noqa: PLR0913 - as `generate`
        cls,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_id: int | None = None,
        seed: int = 0,
        dtype: DTypeLike = jnp.float32,
    ) -> Prepared:
        """Checks and pads the prompts, of which there is one at least; arguments and errors as for `generate`."""
        context = model.spec.num_positions
        _check_prompts(prompts, context=context, vocab_size=model.spec.vocab_size)
        lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
        width = _rounded(int(lengths_B.max()), context)
        tokens_BT = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(tokens_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        graphdef, state = nnx.split(model, nnx.Param)
        room = min(max_new_tokens, context - int(lengths_B.min()))
        static = _Static(
            graphdef=graphdef,
            capacity=_rounded(min(int(lengths_B.max()) + room, context), context),
            buffer=_rounded(room, context),
            greedy=temperature == 0,
            top_k=top_k,
            dtype=jnp.dtype(dtype),
        )
        settings = _Settings(
            key=jax.random.key(seed),
            temperature=jnp.float32(temperature or 1.0),
            top_p=jnp.float32(top_p),
            eos_id=jnp.int32(-1 if eos_id is None else eos_id),
            limits_B=jnp.asarray(np.minimum(room, context - lengths_B)),
        )
        return cls(static, nnx.to_pure_dict(state), tokens_BT, lengths_B, settings)

    def read(self) -> tuple[KvCache, jax.Array]:
        """The cache after the prompts, and the logits [B, V] after each prompt's last token."""
        return _prefill(self.static, self.params, self.tokens_BT, self.lengths_B)

    def write(self, cache: KvCache, logits_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """New tokens [B, G], and how many of them count in each row."""
        return _write(self.static, self.params, cache, logits_BV, self.lengths_B, self.settings)


class _Static(NamedTuple):
    """What a compiled program is made for."""

    graphdef: Any
    capacity: int
    buffer: int
    greedy: bool
    top_k: int
    dtype: np.dtype


class _Settings(NamedTuple):
    """What may change without compiling again."""

    key: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    eos_id: jax.Array
    limits_B: jax.Array
    """New tokens that each row may have."""


def _rounded(count: int, most: int) -> int:
    return min(-(-count // _ROUND) * _ROUND, most)


def _check_prompts(prompts: Sequence[Sequence[int]], *, context: int, vocab_size: int) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index} is empty; give it a token to start from, such as the one that ends texts")
        if len(prompt) > context:
            raise UserError(f"prompt {index} has {len(prompt)} tokens, but the model reads at most {context}")
        if unknown := [token for token in prompt if not 0 <= token < vocab_size]:
            raise UserError(f"prompt {index} has the token {unknown[0]}, but the model knows 0 to {vocab_size - 1}")


@functools.partial(jax.jit, static_argnums=0)
def _prefill(static: _Static, params: Any, tokens_BT: jax.Array, lengths_B: jax.Array) -> tuple[KvCache, jax.Array]:
    """The cache after the prompts, and the logits after each prompt's last token."""
    model: Decoder = nnx.merge(static.graphdef, params)
    rows, width = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    cache = model.init_cache(rows, static.capacity, dtype=static.dtype)
    h_BTD, cache = model.decode_hidden(tokens_BT, positions_BT, cache)
    last_BD = h_BTD[jnp.arange(rows), lengths_B - 1]
    return cache, model.logits(last_BD)


@functools.partial(jax.jit, static_argnums=0)
def _write(
    static: _Static, params: Any, cache: KvCache, logits_BV: jax.Array, lengths_B: jax.Array, settings: _Settings
) -> tuple[jax.Array, jax.Array]:
    """New tokens [B, G], and how many of them count in each row."""
    model: Decoder = nnx.merge(static.graphdef, params)
    rows = logits_BV.shape[0]
    row_keys = jax.vmap(functools.partial(jax.random.fold_in, settings.key))(jnp.arange(rows))

    def choose(step: jax.Array, logits_BV: jax.Array) -> jax.Array:
        if static.greedy:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        filtered_BV = filter_logits(
            logits_BV, temperature=settings.temperature, top_k=static.top_k, top_p=settings.top_p
        )
        return draw(jax.vmap(lambda key: jax.random.fold_in(key, step))(row_keys), filtered_BV)

    def unfinished(state: Any) -> jax.Array:
        return jnp.any(~state[-1])

    def body(state: Any) -> Any:
        step, tokens_BG, counts_B, cache, logits_BV, done_B = state
        next_B = choose(step, logits_BV)
        tokens_BG = jax.lax.dynamic_update_slice(tokens_BG, next_B[:, None], (0, step))
        counts_B = counts_B + ~done_B
        done_B = done_B | (next_B == settings.eos_id) | (counts_B >= settings.limits_B)
        logits_B1V, cache = model.decode(next_B[:, None], (lengths_B + step)[:, None], cache)
        return step + 1, tokens_BG, counts_B, cache, logits_B1V[:, 0], done_B

    start = (
        jnp.int32(0),
        jnp.zeros((rows, static.buffer), jnp.int32),
        jnp.zeros(rows, jnp.int32),
        cache,
        logits_BV,
        settings.limits_B < 1,
    )
    _, tokens_BG, counts_B, *_ = jax.lax.while_loop(unfinished, body, start)
    return tokens_BG, counts_B
