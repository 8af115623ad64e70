"""Generation with a key-value cache: one compiled program reads the prompts, another decodes the rest.

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
from lm_trainer.generate.sampling import GenerateSettings, draw, filter_logits, penalize
from lm_trainer.nn.cache import KvCache
from lm_trainer.nn.decoder import Decoder

_ROUND = 32
"""Lengths are rounded up to multiples of this, so that similar calls share one compiled program."""

Stop = Callable[[int, Sequence[int]], bool]
"""`stop(row, new tokens)`: true where a continuation has come to an end, such as a text in it."""


def generate(model: Decoder, prompts: Sequence[Sequence[int]], settings: GenerateSettings) -> list[list[int]]:
    """Continues every prompt and returns the new tokens alone.

    A continuation ends with a token of `eos_id` (which is part of it), after `max_new_tokens`, or where prompt and
    continuation together fill the model's context. Prompts of different lengths are processed together without
    influence on one another; the draws of row i depend on (`seed`, i) alone.

    Args:
        model: with its parameters.
        prompts: token ids, at least one each.
        settings: the end of a continuation, and the choice of its tokens.

    Raises:
        UserError: for an empty prompt, one that is longer than the context, or a token that the model lacks.
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
    """Log p of each, before the logits are filtered; empty unless `GenerateSettings.log_probs` asks for them."""


def generate_stream(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    settings: GenerateSettings,
    *,
    stop: Stop = lambda *_: False,
    chunk: int = 8,
) -> Iterator[list[Continuation]]:
    """Continues every prompt as `generate` does, with the same tokens, and yields what there is after every few tokens.

    Args:
        model: as for `generate`, as are `prompts` and `settings`.
        prompts: there is at least one.
        settings: the end of a continuation, and the choice of its tokens.
        stop: asked for every row after each chunk.
        chunk: tokens of each row between two looks.

    Yields:
        The continuation of every row.

    Raises:
        UserError: as `generate`.
    """
    generation = Generation.prepare(model, prompts, settings)
    yield from generation.decode_in_chunks(*generation.prefill(), chunk=chunk, stop=stop)


class Generation(NamedTuple):
    """A call of `generate`, ready to be run in its two parts."""

    program: _Program
    params: Any
    tokens_BT: np.ndarray
    lengths_B: np.ndarray
    inputs: _Inputs

    @classmethod
    def prepare(cls, model: Decoder, prompts: Sequence[Sequence[int]], settings: GenerateSettings) -> Generation:
        """Checks and pads the prompts, of which there is at least one; arguments and errors as for `generate`."""
        context = model.spec.num_positions
        _check_prompts(prompts, context=context, vocab_size=model.spec.vocab_size)
        lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
        width = _rounded(int(lengths_B.max()), context)
        # Padded on the right: positions of prompt and continuation then follow one another without a gap, and the
        # padding is overwritten in the cache before any query can see it.
        tokens_BT = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(tokens_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        graphdef, state = nnx.split(model, nnx.Param)
        # The shortest prompt leaves the most room.
        room = min(settings.max_new_tokens, context - int(lengths_B.min()))
        program = _Program(
            graphdef=graphdef,
            capacity=_rounded(min(int(lengths_B.max()) + room, context), context),
            buffer=_rounded(room, context),
            greedy=settings.temperature == 0,
            top_k=settings.top_k,
            nucleus=settings.top_p < 1,
            log_probs=settings.log_probs,
            penalized=settings.repetition_penalty != 1.0,
            dtype=jnp.dtype(settings.dtype),
        )
        inputs = _Inputs(
            key=jax.random.key(settings.seed),
            # A greedy program does not read it.
            temperature=jnp.float32(settings.temperature or 1.0),
            top_p=jnp.float32(settings.top_p),
            penalty=jnp.float32(settings.repetition_penalty),
            end_ids_E=jnp.asarray(settings.end_ids, jnp.int32),
            limits_B=jnp.asarray(np.minimum(room, context - lengths_B)),
        )
        return cls(program, nnx.to_pure_dict(state), tokens_BT, lengths_B, inputs)

    def prefill(self) -> tuple[KvCache, jax.Array]:
        """Computes the cache after the prompts, and the logits [B, V] after each prompt's last token."""
        return _prefill(self.program, self.params, self.tokens_BT, self.lengths_B)

    def decode(self, cache: KvCache, logits_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the new tokens, int32 [B, G], and how many of them count in each row, int32 [B]."""
        loop = self._start(cache, logits_BV)
        done = _decode(self.program, self.params, loop, self.lengths_B, self.inputs, self.program.buffer)
        return done.tokens_BG, done.counts_B

    def decode_in_chunks(
        self, cache: KvCache, logits_BV: jax.Array, *, chunk: int, stop: Stop
    ) -> Iterator[list[Continuation]]:
        """As `decode`, with what there is after every `chunk` tokens."""
        loop = self._start(cache, logits_BV)
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

    def _start(self, cache: KvCache, logits_BV: jax.Array) -> _Loop:
        rows, vocab_size = logits_BV.shape
        tokens_BG = jnp.zeros((rows, self.program.buffer), jnp.int32)
        log_probs_BG = jnp.zeros((rows, self.program.buffer if self.program.log_probs else 0), jnp.float32)
        seen_BV = np.zeros((rows, vocab_size if self.program.penalized else 0), bool)
        if self.program.penalized:
            for seen, tokens, length in zip(seen_BV, self.tokens_BT, self.lengths_B, strict=True):
                seen[tokens[:length]] = True
        counts_B, done_B = jnp.zeros(rows, jnp.int32), self.inputs.limits_B < 1
        return _Loop(jnp.int32(0), tokens_BG, log_probs_BG, counts_B, cache, logits_BV, jnp.asarray(seen_BV), done_B)


class _Program(NamedTuple):
    """Static arguments: another value of any of them compiles another program."""

    graphdef: Any
    capacity: int
    """Tokens that the cache has room for."""
    buffer: int
    """Tokens that a continuation has room for, the G of the shapes."""
    greedy: bool
    top_k: int
    nucleus: bool
    """True if `top_p` cuts tokens off."""
    log_probs: bool
    penalized: bool
    """True if tokens that were seen become less likely."""
    dtype: np.dtype


class _Inputs(NamedTuple):
    """Dynamic arguments: they change without compiling again."""

    key: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    penalty: jax.Array
    end_ids_E: jax.Array
    limits_B: jax.Array
    """New tokens that each row may have."""


class _Loop(NamedTuple):
    """Decoding after some steps."""

    step: jax.Array
    tokens_BG: jax.Array
    log_probs_BG: jax.Array
    """float32: log p of each new token, before the logits are filtered; [B, 0] unless they are asked for."""
    counts_B: jax.Array
    """New tokens that count in each row."""
    cache: KvCache
    logits_BV: jax.Array
    """Logits of the next token."""
    seen_BV: jax.Array
    """bool: the token is in the prompt or among the new tokens; [B, 0] unless that matters."""
    done_B: jax.Array


def _rounded(count: int, most: int) -> int:
    """Rounds up to a multiple of `_ROUND`, but not above `most`."""
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
def _prefill(program: _Program, params: Any, tokens_BT: jax.Array, lengths_B: jax.Array) -> tuple[KvCache, jax.Array]:
    """The cache after the prompts, and the logits [B, V] after each prompt's last token."""
    model: Decoder = nnx.merge(program.graphdef, params)
    rows, width = tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (rows, width))
    cache = model.init_cache(rows, program.capacity, dtype=program.dtype)
    h_BTD, cache = model.decode_hidden(tokens_BT, positions_BT, cache)
    # Logits of these alone: those of all positions would take V / D times the memory.
    last_BD = h_BTD[jnp.arange(rows), lengths_B - 1]
    return cache, model.logits(last_BD)


def _decode_until(
    program: _Program, params: Any, loop: _Loop, lengths_B: jax.Array, inputs: _Inputs, until: jax.Array | int
) -> _Loop:
    """Decodes up to the step `until`, or until all rows are done."""
    model: Decoder = nnx.merge(program.graphdef, params)
    # A key for each row, so that its draws do not depend on how many rows there are.
    row_keys = jax.vmap(functools.partial(jax.random.fold_in, inputs.key))(jnp.arange(loop.logits_BV.shape[0]))

    def choose(step: jax.Array, logits_BV: jax.Array) -> jax.Array:
        if program.greedy:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        top_p = inputs.top_p if program.nucleus else None
        filtered_BV = filter_logits(logits_BV, temperature=inputs.temperature, top_k=program.top_k, top_p=top_p)
        return draw(jax.vmap(lambda key: jax.random.fold_in(key, step))(row_keys), filtered_BV)

    def unfinished(loop: _Loop) -> jax.Array:
        return jnp.any(~loop.done_B) & (loop.step < until)

    def body(loop: _Loop) -> _Loop:
        logits_BV, seen_BV = loop.logits_BV, loop.seen_BV
        if program.penalized:
            logits_BV = penalize(logits_BV, seen_BV, inputs.penalty)
        next_B = choose(loop.step, logits_BV)
        if program.penalized:
            seen_BV = seen_BV.at[jnp.arange(len(next_B)), next_B].set(True)
        tokens_BG = jax.lax.dynamic_update_slice(loop.tokens_BG, next_B[:, None], (0, loop.step))
        log_probs_BG = loop.log_probs_BG
        if program.log_probs:
            log_p_BV = jax.nn.log_softmax(loop.logits_BV.astype(jnp.float32), axis=-1)
            of_next_B1 = jnp.take_along_axis(log_p_BV, next_B[:, None], axis=-1)
            log_probs_BG = jax.lax.dynamic_update_slice(log_probs_BG, of_next_B1, (0, loop.step))
        # A row that is done goes on computing, since all share one program; its tokens do not count.
        counts_B = loop.counts_B + ~loop.done_B
        done_B = (
            loop.done_B | jnp.any(next_B[:, None] == inputs.end_ids_E[None], axis=-1) | (counts_B >= inputs.limits_B)
        )
        logits_B1V, cache = model.decode(next_B[:, None], (lengths_B + loop.step)[:, None], loop.cache)
        return _Loop(loop.step + 1, tokens_BG, log_probs_BG, counts_B, cache, logits_B1V[:, 0], seen_BV, done_B)

    return jax.lax.while_loop(unfinished, body, loop)


_decode = functools.partial(jax.jit, static_argnums=0)(_decode_until)
# Between chunks nobody else has the cache, which then need not be copied.
_decode_chunk = functools.partial(jax.jit, static_argnums=0, donate_argnums=2)(_decode_until)
