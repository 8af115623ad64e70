"""Texts of what a model hears, token by token, with cached keys and values of the encoder.

Shape letters: B rows, M frames, P features of a frame, T prompt positions, V vocabulary, G new tokens, R = B
* beams.
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
from lm_trainer.generate.beam import search_beams
from lm_trainer.generate.speech_rules import SpeechRules, TimestampState, timestamps_only
from lm_trainer.nn.encoder_decoder import EncodedCache, EncoderDecoder


def write_heard(  # noqa: PLR0913 - the choices of a transcription
    model: EncoderDecoder,
    features_BMP: np.ndarray,
    rules: SpeechRules,
    *,
    prompt: Sequence[int] | None = None,
    language: str | None = None,
    task: str | None = None,
    timestamps: bool = False,
    max_new_tokens: int | None = None,
    beams: int = 1,
    dtype: DTypeLike = jnp.float32,
) -> list[list[int]]:
    """Writes what each row of features says, by the likeliest tokens, and returns the new tokens alone.

    A text ends with `rules.eos_id` (which is part of it), after `max_new_tokens`, or where prompt and text fill the
    decoder's context. The tokens are those of `generate` in transformers for one window.

    Args:
        model: with its parameters.
        features_BMP: float32, as the model was trained with.
        rules: special tokens.
        prompt: tokens that every text begins with; None: as `language`, `task` and `timestamps` say.
        language: such as `en`; None: as the rules say, or heard, for each row by itself.
        task: `transcribe` or `translate`; None: as the rules say.
        timestamps: writes timestamps.
        max_new_tokens: None: as many as there is room for.
        beams: texts that grow side by side, of which the likeliest is returned (`search_beams`); 1: each token is the
            likeliest after those before it.
        dtype: of the computation and of the cache.

    Raises:
        UserError: for features of another shape, for what the rules have no token for, for tokens that the
            vocabulary lacks, and for rules of beam search that are unknown.
    """
    rules.check_beams(beams)
    begin = list(prompt) if prompt is not None else rules.prompt(language, task, timestamps=timestamps)
    room = model.spec.num_positions - len(begin)
    room = room if max_new_tokens is None else min(room, max_new_tokens)
    if room < 1 or not len(features_BMP):
        return [[] for _ in features_BMP]
    inputs = _Inputs.of(rules, model.spec.vocab_size)
    graphdef, state = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(state)
    program = _Program(graphdef, len(begin) + room, room, timestamps, beams, jnp.dtype(dtype))
    cache = _listen(program, params, jnp.asarray(features_BMP))
    heard_B = np.zeros(len(features_BMP), np.int32)
    if None in begin:
        heard_B = _hear_language(program, params, cache, inputs, np.array(sorted(rules.languages.values()), np.int32))
    columns = [heard_B if token is None else np.full_like(heard_B, token) for token in begin]
    write = _write if beams == 1 else _write_by_beams
    tokens_BG, counts_B = jax.device_get(write(program, params, cache, jnp.stack(columns, axis=1), inputs))
    return [row[:count].tolist() for row, count in zip(tokens_BG, counts_B, strict=True)]


def heard_languages(
    model: EncoderDecoder, features_BMP: np.ndarray, rules: SpeechRules, dtype: DTypeLike = jnp.float32
) -> list[int]:
    """The token of the likeliest language of each row; arguments as of `write_heard`."""
    graphdef, state = nnx.split(model, nnx.Param)
    params, program = nnx.to_pure_dict(state), _Program(graphdef, 1, 1, False, 1, jnp.dtype(dtype))
    cache, inputs = _listen(program, params, jnp.asarray(features_BMP)), _Inputs.of(rules, model.spec.vocab_size)
    languages_L = np.array(sorted(rules.languages.values()), np.int32)
    return _hear_language(program, params, cache, inputs, languages_L).tolist()


class _Program(NamedTuple):
    """Static arguments: another value of any of them compiles another program."""

    graphdef: Any
    capacity: int
    """Tokens that the cache has room for."""
    room: int
    """New tokens, the G of the shapes."""
    timestamps: bool
    beams: int
    dtype: np.dtype


class _Inputs(NamedTuple):
    """Dynamic arguments: they change without compiling again."""

    start_id: jax.Array
    eos_id: jax.Array
    first_stamp: jax.Array
    latest_first: jax.Array
    suppressed_V: jax.Array
    """bool."""
    begin_suppressed_V: jax.Array
    """bool: those of the first token."""
    length_penalty: jax.Array

    @classmethod
    def of(cls, rules: SpeechRules, vocab_size: int) -> _Inputs:
        """Those of some rules; raises `UserError` for tokens that the vocabulary lacks."""
        every = (rules.start_id, rules.eos_id, *rules.suppressed, *rules.begin_suppressed, *rules.languages.values())
        if unknown := sorted(token for token in every if not 0 <= token < vocab_size):
            raise UserError(
                f"model.generation_config names the token {unknown[0]}, but the model knows 0 to {vocab_size - 1}"
            )
        first = vocab_size if rules.no_timestamps_id is None else rules.no_timestamps_id + 1
        latest = vocab_size if rules.max_initial_timestamp is None else first + rules.max_initial_timestamp
        never, not_first = np.zeros((2, vocab_size), bool)
        never[list(rules.suppressed)] = True
        not_first[[*rules.suppressed, *rules.begin_suppressed]] = True
        start, end, first, latest = map(jnp.int32, (rules.start_id, rules.eos_id, first, latest))
        penalty = jnp.float32(rules.length_penalty)
        return cls(start, end, first, latest, jnp.asarray(never), jnp.asarray(not_first), penalty)


class _Loop(NamedTuple):
    """Decoding after some steps."""

    step: jax.Array
    tokens_BG: jax.Array
    counts_B: jax.Array
    """New tokens that count in each row."""
    cache: EncodedCache
    logits_BV: jax.Array
    """Logits of the next token."""
    stamps: TimestampState
    done_B: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def _listen(program: _Program, params: Any, features_BMP: jax.Array) -> EncodedCache:
    model: EncoderDecoder = nnx.merge(program.graphdef, params)
    return model.encode(features_BMP, program.capacity, dtype=program.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _after(program: _Program, params: Any, cache: EncodedCache, tokens_BT: jax.Array) -> tuple[EncodedCache, jax.Array]:
    """The cache after tokens from the first position on, and the logits [B, V] after the last of them."""
    model: EncoderDecoder = nnx.merge(program.graphdef, params)
    at_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
    h_BTD, cache = model.decode_hidden(tokens_BT, at_BT, cache)
    return cache, model.logits(h_BTD[:, -1])


def _hear_language(
    program: _Program, params: Any, cache: EncodedCache, inputs: _Inputs, languages_L: np.ndarray
) -> np.ndarray:
    """The likeliest token of a language after the first token, int32 [B]."""
    starts_B1 = jnp.full((cache.self_attention.k.shape[1], 1), inputs.start_id, jnp.int32)
    logits_BV = np.asarray(_after(program, params, cache, starts_B1)[1])
    return languages_L[logits_BV[:, languages_L].argmax(axis=-1)]


def _allowed(
    program: _Program, inputs: _Inputs, logits_BV: jax.Array, stamps: TimestampState, step: jax.Array
) -> jax.Array:
    """The logits, or log-probabilities, with -inf for the tokens that the rules forbid at a step."""
    masked_V = jnp.where(step == 0, inputs.begin_suppressed_V, inputs.suppressed_V)
    logits_BV = jnp.where(masked_V[None], -jnp.inf, logits_BV)
    if program.timestamps:
        logits_BV = timestamps_only(logits_BV, stamps, inputs.eos_id, inputs.first_stamp, inputs.latest_first)
    return logits_BV


@functools.partial(jax.jit, static_argnums=0)
def _write(
    program: _Program, params: Any, cache: EncodedCache, prompt_BT: jax.Array, inputs: _Inputs
) -> tuple[jax.Array, jax.Array]:
    """The new tokens, int32 [B, G], and how many of them count in each row, int32 [B]."""
    model: EncoderDecoder = nnx.merge(program.graphdef, params)
    rows, length = prompt_BT.shape

    def unfinished(loop: _Loop) -> jax.Array:
        return jnp.any(~loop.done_B) & (loop.step < program.room)

    def body(loop: _Loop) -> _Loop:
        allowed_BV = _allowed(program, inputs, loop.logits_BV, loop.stamps, loop.step)
        next_B = jnp.argmax(allowed_BV, axis=-1).astype(jnp.int32)
        tokens_BG = jax.lax.dynamic_update_slice(loop.tokens_BG, next_B[:, None], (0, loop.step))
        # A row that is done goes on computing, since all share one program; its tokens do not count.
        counts_B = loop.counts_B + ~loop.done_B
        at_B1 = jnp.broadcast_to(length + loop.step, (rows, 1))
        h_B1D, cache = model.decode_hidden(next_B[:, None], at_B1, loop.cache)
        stamps = loop.stamps.after(next_B, inputs.first_stamp)
        done_B = loop.done_B | (next_B == inputs.eos_id)
        return _Loop(loop.step + 1, tokens_BG, counts_B, cache, model.logits(h_B1D[:, 0]), stamps, done_B)

    cache, logits_BV = _after(program, params, cache, prompt_BT)
    zeros_BG, zeros_B = jnp.zeros((rows, program.room), jnp.int32), jnp.zeros(rows, jnp.int32)
    start = TimestampState.start(rows)
    loop = _Loop(jnp.int32(0), zeros_BG, zeros_B, cache, logits_BV, start, jnp.zeros(rows, bool))
    done = jax.lax.while_loop(unfinished, body, loop)
    return done.tokens_BG, done.counts_B


@functools.partial(jax.jit, static_argnums=0)
def _write_by_beams(
    program: _Program, params: Any, cache: EncodedCache, prompt_BT: jax.Array, inputs: _Inputs
) -> tuple[jax.Array, jax.Array]:
    """As `_write`, for the likeliest text of each row."""
    model: EncoderDecoder = nnx.merge(program.graphdef, params)
    rows, length = prompt_BT.shape

    def log_probs(logits_RV: jax.Array, stamps: TimestampState, step: jax.Array) -> jax.Array:
        # What is forbidden keeps its share of the probability.
        return _allowed(program, inputs, jax.nn.log_softmax(logits_RV, axis=-1), stamps, step)

    def advance(carry: Any, step: jax.Array, came_R: jax.Array, next_R: jax.Array) -> tuple[Any, jax.Array]:
        own, stamps = carry
        own = jax.tree.map(lambda x: x[:, came_R], own)
        stamps = jax.tree.map(lambda x: x[came_R], stamps).after(next_R, inputs.first_stamp)
        at_R1 = jnp.broadcast_to(length + step, (len(next_R), 1))
        h_R1D, filled = model.decode_hidden(next_R[:, None], at_R1, cache._replace(self_attention=own))
        return (filled.self_attention, stamps), log_probs(model.logits(h_R1D[:, 0]), stamps, step + 1)

    filled, logits_BV = _after(program, params, cache, prompt_BT)
    own = jax.tree.map(lambda x: jnp.repeat(x, program.beams, axis=1), filled.self_attention)
    stamps = TimestampState.start(rows * program.beams)
    logits_RV = jnp.repeat(logits_BV, program.beams, axis=0)
    return search_beams(
        (own, stamps),
        log_probs(logits_RV, stamps, jnp.int32(0)),
        advance,
        beams=program.beams,
        room=program.room,
        eos_id=inputs.eos_id,
        length_penalty=inputs.length_penalty,
    )
