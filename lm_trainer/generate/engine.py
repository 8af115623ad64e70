"""Generation with a KV cache: one compiled program reads the prompts, another decodes the continuations.

Shape letters: B rows, T prompt positions, V vocabulary, D hidden dimension, G new tokens, E tokens that end a text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm_trainer.core.errors import UserError
from lm_trainer.generate.sampling import GenerateSettings, filter_logits, penalize_seen, sample_tokens
from lm_trainer.nn.cache import KvCache
from lm_trainer.nn.decoder import Decoder

_ROUND = 32
"""Lengths are rounded up to multiples of this, so similar calls share one compiled program."""

Stop = Callable[[int, Sequence[int]], bool]
"""`stop(row, new tokens)` returns True if a continuation is complete, for example if it contains a stop text."""


def generate(model: Decoder, prompts: Sequence[Sequence[int]], settings: GenerateSettings) -> list[list[int]]:
    """Continues every prompt and returns only the new tokens.

    A continuation ends with a token of `eos_id` (which is included), after `max_new_tokens` tokens, or when prompt and
    continuation together fill the model's context. Prompts of different lengths are batched without influencing each
    other; the samples of row i depend only on (`seed`, i).

    Args:
        model: the model with its parameters.
        prompts: token ids, at least one each.
        settings: end conditions and sampling settings.

    Raises:
        UserError: for an empty prompt, a prompt longer than the context, or a token outside the vocabulary.
    """
    if not prompts or settings.max_new_tokens < 1:
        return [[] for _ in prompts]
    generation = Generation.prepare(model, prompts, settings)
    tokens_BG, counts_B = jax.device_get(generation.decode(*generation.prefill()))
    return [row[:count].tolist() for row, count in zip(tokens_BG, counts_B, strict=True)]


class Continuation(NamedTuple):
    """The new tokens of a row so far."""

    tokens: list[int]
    log_probs: list[float]
    """Log p of each token from the unfiltered logits; empty unless `GenerateSettings.log_probs` is set."""


def generate_stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    settings: GenerateSettings,
    *,
    stop: Stop = lambda *_: False,
    chunk: int = 8,
) -> Iterator[list[Continuation]]:
    """Continues every prompt with the same tokens as `generate`, and yields the continuations after every few tokens.

    Args:
        model: the model with its parameters.
        prompts: token ids of at least one prompt.
        settings: end conditions and sampling settings.
        stop: called for every row after each chunk.
        chunk: number of tokens of each row between two calls of `stop`.

    Yields:
        The continuation of every row.

    Raises:
        UserError: for the same reasons as in `generate`.
    """
    generation = Generation.prepare(model, prompts, settings)
    yield from generation.decode_in_chunks(*generation.prefill(), chunk=chunk, stop=stop)


class Generation(NamedTuple):
    """A prepared call of `generate`, which runs in two parts: `prefill` and `decode`."""

    program: _Program
    params: dict[str, Any]
    tokens_BT: np.ndarray
    lengths_B: np.ndarray
    inputs: _Inputs

    @classmethod
    def prepare(cls, model: Decoder, prompts: Sequence[Sequence[int]], settings: GenerateSettings) -> Generation:
        """Checks and pads the prompts. There must be at least one. Arguments and errors are as for `generate`."""
        context = model.spec.num_positions
        _check_prompts(prompts, context=context, vocab_size=model.spec.vocab_size)
        lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
        width = _round_up(int(lengths_B.max()), context)
        # Padded on the right, so that the positions of prompt and continuation are consecutive. Padding in the cache is
        # overwritten before any query can see it.
        tokens_BT = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(tokens_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        graphdef, state = nnx.split(model, nnx.Param)
        # The shortest prompt leaves room for the longest continuation.
        max_new = min(settings.max_new_tokens, context - int(lengths_B.min()))
        program = _Program(
            graphdef=graphdef,
            capacity=_round_up(min(int(lengths_B.max()) + max_new, context), context),
            buffer=_round_up(max_new, context),
            greedy=settings.temperature == 0,
            top_k=settings.top_k,
            nucleus=settings.top_p < 1,
            log_probs=settings.log_probs,
            penalized=settings.repetition_penalty != 1.0,
            dtype=jnp.dtype(settings.dtype),
        )
        inputs = _Inputs(
            key=jax.random.key(settings.seed),
            # A greedy program does not use it.
            temperature=jnp.float32(settings.temperature or 1.0),
            top_p=jnp.float32(settings.top_p),
            penalty=jnp.float32(settings.repetition_penalty),
            end_ids_E=jnp.asarray(settings.end_ids, jnp.int32),
            limits_B=jnp.asarray(np.minimum(max_new, context - lengths_B)),
        )
        return cls(program, nnx.to_pure_dict(state), tokens_BT, lengths_B, inputs)

    def prefill(self) -> tuple[KvCache, jax.Array]:
        """Computes the cache after the prompts, and the logits [B, V] after each prompt's last token."""
        return _prefill(self.program, self.params, self.tokens_BT, self.lengths_B)

    def decode(self, cache: KvCache, logits_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the new tokens, int32 [B, G], and the number of valid tokens of each row, int32 [B]."""
        loop = self._initial_loop(cache, logits_BV)
        done = _decode(self.program, self.params, loop, self.lengths_B, self.inputs, self.program.buffer)
        return done.tokens_BG, done.counts_B

    def decode_in_chunks(
        self, cache: KvCache, logits_BV: jax.Array, *, chunk: int, stop: Stop
    ) -> Iterator[list[Continuation]]:
        """Computes the same tokens as `decode`, but yields the continuations after every `chunk` tokens."""
        loop = self._initial_loop(cache, logits_BV)
        while not bool(np.all(loop.done_B)):
            until = int(loop.step) + chunk
            loop = _decode_chunk(self.program, self.params, loop, self.lengths_B, self.inputs, until)
            tokens_BG, log_probs_BG, counts_B, done_B = jax.device_get(
                (loop.tokens_BG, loop.log_probs_BG, loop.counts_B, loop.done_B)
            )
            rows = [
                Continuation(tokens[:count].tolist(), log_probs[:count].tolist())
                for tokens, log_probs, count in zip(tokens_BG, log_probs_BG, counts_B, strict=True)
            ]
            yield rows
            ended = [bool(done) or stop(i, row.tokens) for i, (done, row) in enumerate(zip(done_B, rows, strict=True))]
            loop = loop._replace(done_B=jnp.asarray(ended))

    def _initial_loop(self, cache: KvCache, logits_BV: jax.Array) -> _Loop:
        rows, vocab_size = logits_BV.shape
        tokens_BG = jnp.zeros((rows, self.program.buffer), jnp.int32)
        log_probs_BG = jnp.zeros((rows, self.program.buffer if self.program.log_probs else 0), jnp.float32)
        seen_BV = np.zeros((rows, vocab_size if self.program.penalized else 0), bool)
        if self.program.penalized:
            for seen_row, tokens, length in zip(seen_BV, self.tokens_BT, self.lengths_B, strict=True):
                seen_row[tokens[:length]] = True
        counts_B, done_B = jnp.zeros(rows, jnp.int32), self.inputs.limits_B < 1
        return _Loop(jnp.int32(0), tokens_BG, log_probs_BG, counts_B, cache, logits_BV, jnp.asarray(seen_BV), done_B)


class _Program(NamedTuple):
    """Static arguments of the compiled functions. Each combination of values compiles its own program."""

    graphdef: nnx.GraphDef[Decoder]
    capacity: int
    """Capacity of the cache in tokens."""
    buffer: int
    """Capacity of a continuation in tokens; G in array shapes."""
    greedy: bool
    top_k: int
    nucleus: bool
    """True if `top_p` removes tokens."""
    log_probs: bool
    penalized: bool
    """True if the repetition penalty is active."""
    dtype: np.dtype


class _Inputs(NamedTuple):
    """Dynamic arguments, which can change without recompilation."""

    key: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    penalty: jax.Array
    end_ids_E: jax.Array
    limits_B: jax.Array
    """Maximum number of new tokens of each row."""


class _Loop(NamedTuple):
    """State of decoding after a number of steps."""

    step: jax.Array
    tokens_BG: jax.Array
    log_probs_BG: jax.Array
    """float32: log p of each new token from the unfiltered logits; [B, 0] unless requested."""
    counts_B: jax.Array
    """Number of valid new tokens in each row."""
    cache: KvCache
    logits_BV: jax.Array
    """Logits of the next token."""
    seen_BV: jax.Array
    """bool: True for tokens that occur in the prompt or the continuation; [B, 0] without a repetition penalty."""
    done_B: jax.Array


def _round_up(count: int, limit: int) -> int:
    """Rounds `count` up to a multiple of `_ROUND`, but at most to `limit`."""
    return min(-(-count // _ROUND) * _ROUND, limit)


def _check_prompts(prompts: Sequence[Sequence[int]], *, context: int, vocab_size: int) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index} is empty; give it a token to start from, such as the one that ends texts")
        if len(prompt) > context:
            raise UserError(f"prompt {index} has {len(prompt)} tokens, but the model reads at most {context}")
        if unknown := [token for token in prompt if not 0 <= token < vocab_size]:
            raise UserError(f"prompt {index} has the token {unknown[0]}, but the model knows 0 to {vocab_size - 1}")


@functools.partial(jax.jit, static_argnums=0)
def _prefill(
    program: _Program, params: dict[str, Any], tokens_BT: jax.Array, lengths_B: jax.Array
) -> tuple[KvCache, jax.Array]:
    """Computes the cache after the prompts, and the logits [B, V] after each prompt's last token."""
    model: Decoder = nnx.merge(program.graphdef, params)
    rows, width = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    cache = model.init_cache(rows, program.capacity, dtype=program.dtype)
    h_BTD, cache = model.decode_hidden(tokens_BT, positions_BT, cache, lengths_B)
    # Only the logits of the last positions, because logits of all positions would take V / D times the memory.
    last_BD = h_BTD[jnp.arange(rows), lengths_B - 1]
    return cache, model.logits(last_BD)


def _decode_until(
    program: _Program,
    params: dict[str, Any],
    loop: _Loop,
    lengths_B: jax.Array,
    inputs: _Inputs,
    until: jax.Array | int,
) -> _Loop:
    """Decodes up to the step `until` (exclusive), or until all rows are done."""
    model: Decoder = nnx.merge(program.graphdef, params)
    # One key per row, so that the samples of a row do not depend on the number of rows.
    row_keys = jax.vmap(functools.partial(jax.random.fold_in, inputs.key))(jnp.arange(loop.logits_BV.shape[0]))

    def choose(step: jax.Array, logits_BV: jax.Array) -> jax.Array:
        if program.greedy:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        top_p = inputs.top_p if program.nucleus else None
        filtered_BV = filter_logits(logits_BV, temperature=inputs.temperature, top_k=program.top_k, top_p=top_p)
        return sample_tokens(jax.vmap(lambda key: jax.random.fold_in(key, step))(row_keys), filtered_BV)

    def is_unfinished(loop: _Loop) -> jax.Array:
        return jnp.any(~loop.done_B) & (loop.step < until)

    def body(loop: _Loop) -> _Loop:
        logits_BV, seen_BV = loop.logits_BV, loop.seen_BV
        if program.penalized:
            logits_BV = penalize_seen(logits_BV, seen_BV, inputs.penalty)
        next_B = choose(loop.step, logits_BV)
        if program.penalized:
            seen_BV = seen_BV.at[jnp.arange(len(next_B)), next_B].set(True)
        tokens_BG = jax.lax.dynamic_update_slice(loop.tokens_BG, next_B[:, None], (0, loop.step))
        log_probs_BG = loop.log_probs_BG
        if program.log_probs:
            log_p_BV = jax.nn.log_softmax(loop.logits_BV.astype(jnp.float32), axis=-1)
            of_next_B1 = jnp.take_along_axis(log_p_BV, next_B[:, None], axis=-1)
            log_probs_BG = jax.lax.dynamic_update_slice(log_probs_BG, of_next_B1, (0, loop.step))
        # Rows that are done are still computed, since all rows share one program, but their tokens are ignored.
        counts_B = loop.counts_B + ~loop.done_B
        done_B = (
            loop.done_B | jnp.any(next_B[:, None] == inputs.end_ids_E[None], axis=-1) | (counts_B >= inputs.limits_B)
        )
        logits_B1V, cache = model.decode(next_B[:, None], (lengths_B + loop.step)[:, None], loop.cache)
        return _Loop(loop.step + 1, tokens_BG, log_probs_BG, counts_B, cache, logits_B1V[:, 0], seen_BV, done_B)

    return jax.lax.while_loop(is_unfinished, body, loop)


_decode = functools.partial(jax.jit, static_argnums=0)(_decode_until)
# Between chunks, this is the only reference to the cache, so the cache can be donated instead of copied.
_decode_chunk = functools.partial(jax.jit, static_argnums=0, donate_argnums=2)(_decode_until)
