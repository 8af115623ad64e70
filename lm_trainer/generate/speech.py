"""Transcription of audio features, token by token, with cached keys and values of the encoder.

Shape letters: B rows, M frames, P features of a frame, T prompt positions, V vocabulary, G new tokens, R = B * beams.
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
from lm_trainer.generate.speech_rules import SpeechRules, TimestampState, mask_by_timestamp_rules
from lm_trainer.nn.encoder_decoder import EncodedCache, EncoderDecoder


def transcribe_features(  # noqa: PLR0913 - the choices of a transcription
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
    """Transcribes each row of features with the most likely tokens, and returns only the new tokens.

    A text ends with `rules.eos_id` (which is included), after `max_new_tokens` tokens, or when prompt and text fill the
    decoder's context. The tokens equal those that `generate` of transformers returns for one window.

    Args:
        model: the model with its parameters.
        features_BMP: float32 features, computed as for the model's training.
        rules: special tokens of the model.
        prompt: tokens at the beginning of every text. None: derived from `language`, `task` and `timestamps`.
        language: language code such as `en`. None: the default language of the rules, or detected for each row.
        task: `transcribe` or `translate`; None: the default task of the rules.
        timestamps: True generates timestamps as well.
        max_new_tokens: maximum number of new tokens of each row; None: as many as the context allows.
        beams: number of beams of `search_beams`, which returns the most likely text; 1: greedy decoding.
        dtype: dtype of the computation and of the cache.

    Raises:
        UserError: for features with a wrong shape, for a language, task or timestamps without a token in the rules, for
            tokens outside the vocabulary, and for unsupported rules of beam search.
    """
    rules.check_beams(beams)
    prompt_ids = list(prompt) if prompt is not None else rules.prompt_tokens(language, task, timestamps=timestamps)
    limit = model.spec.num_positions - len(prompt_ids)
    limit = limit if max_new_tokens is None else min(limit, max_new_tokens)
    if limit < 1 or not len(features_BMP):
        return [[] for _ in features_BMP]
    inputs = _Inputs.from_rules(rules, model.spec.vocab_size)
    graphdef, state = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(state)
    program = _Program(graphdef, len(prompt_ids) + limit, limit, timestamps, beams, jnp.dtype(dtype))
    cache = _encode(program, params, jnp.asarray(features_BMP))
    languages_B = np.zeros(len(features_BMP), np.int32)
    if None in prompt_ids:
        languages_B = _detect_language(
            program, params, cache, inputs, np.array(sorted(rules.languages.values()), np.int32)
        )
    columns = [languages_B if token is None else np.full_like(languages_B, token) for token in prompt_ids]
    decode = _decode_greedily if beams == 1 else _decode_by_beams
    tokens_BG, counts_B = jax.device_get(decode(program, params, cache, jnp.stack(columns, axis=1), inputs))
    return [row[:count].tolist() for row, count in zip(tokens_BG, counts_B, strict=True)]


def detect_languages(
    model: EncoderDecoder, features_BMP: np.ndarray, rules: SpeechRules, dtype: DTypeLike = jnp.float32
) -> list[int]:
    """Returns the token of the most likely language of each row. Arguments are as for `transcribe_features`."""
    graphdef, state = nnx.split(model, nnx.Param)
    params, program = nnx.to_pure_dict(state), _Program(graphdef, 1, 1, False, 1, jnp.dtype(dtype))
    cache, inputs = (
        _encode(program, params, jnp.asarray(features_BMP)),
        _Inputs.from_rules(rules, model.spec.vocab_size),
    )
    languages_L = np.array(sorted(rules.languages.values()), np.int32)
    return _detect_language(program, params, cache, inputs, languages_L).tolist()


class _Program(NamedTuple):
    """Static arguments of the compiled functions. Each combination of values compiles its own program."""

    graphdef: nnx.GraphDef[EncoderDecoder]
    capacity: int
    """Capacity of the cache in tokens."""
    max_new_tokens: int
    """Maximum number of new tokens; G in array shapes."""
    timestamps: bool
    beams: int
    dtype: np.dtype


class _Inputs(NamedTuple):
    """Dynamic arguments, which can change without recompilation."""

    start_id: jax.Array
    eos_id: jax.Array
    first_stamp: jax.Array
    latest_first: jax.Array
    suppressed_V: jax.Array
    """bool: True for tokens that are suppressed at every step."""
    begin_suppressed_V: jax.Array
    """bool: True for tokens that are suppressed at the first step."""
    length_penalty: jax.Array

    @classmethod
    def from_rules(cls, rules: SpeechRules, vocab_size: int) -> _Inputs:
        """Makes the inputs from rules; raises `UserError` for tokens outside the vocabulary."""
        all_tokens = (
            rules.start_id,
            rules.eos_id,
            *rules.suppressed,
            *rules.begin_suppressed,
            *rules.languages.values(),
        )
        if unknown := sorted(token for token in all_tokens if not 0 <= token < vocab_size):
            raise UserError(
                f"model.generation_config names the token {unknown[0]}, but the model knows 0 to {vocab_size - 1}"
            )
        first = vocab_size if rules.no_timestamps_id is None else rules.no_timestamps_id + 1
        latest = vocab_size if rules.max_initial_timestamp is None else first + rules.max_initial_timestamp
        suppressed, begin_suppressed = np.zeros((2, vocab_size), bool)
        suppressed[list(rules.suppressed)] = True
        begin_suppressed[[*rules.suppressed, *rules.begin_suppressed]] = True
        start, end, first, latest = map(jnp.int32, (rules.start_id, rules.eos_id, first, latest))
        penalty = jnp.float32(rules.length_penalty)
        return cls(start, end, first, latest, jnp.asarray(suppressed), jnp.asarray(begin_suppressed), penalty)


class _Loop(NamedTuple):
    """State of decoding after a number of steps."""

    step: jax.Array
    tokens_BG: jax.Array
    counts_B: jax.Array
    """Number of valid new tokens in each row."""
    cache: EncodedCache
    logits_BV: jax.Array
    """Logits of the next token."""
    stamps: TimestampState
    done_B: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def _encode(program: _Program, params: dict[str, Any], features_BMP: jax.Array) -> EncodedCache:
    model: EncoderDecoder = nnx.merge(program.graphdef, params)
    return model.encode(features_BMP, program.capacity, dtype=program.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(
    program: _Program, params: dict[str, Any], cache: EncodedCache, tokens_BT: jax.Array
) -> tuple[EncodedCache, jax.Array]:
    """Computes the cache after tokens that start at position 0, and the logits [B, V] after the last token."""
    model: EncoderDecoder = nnx.merge(program.graphdef, params)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
    h_BTD, cache = model.decode_hidden(tokens_BT, positions_BT, cache)
    return cache, model.logits(h_BTD[:, -1])


def _detect_language(
    program: _Program, params: dict[str, Any], cache: EncodedCache, inputs: _Inputs, languages_L: np.ndarray
) -> np.ndarray:
    """Returns the most likely language token after the first token, int32 [B]."""
    starts_B1 = jnp.full((cache.self_attention.k.shape[1], 1), inputs.start_id, jnp.int32)
    logits_BV = np.asarray(_prefill(program, params, cache, starts_B1)[1])
    return languages_L[logits_BV[:, languages_L].argmax(axis=-1)]


def _mask_forbidden(
    program: _Program, inputs: _Inputs, logits_BV: jax.Array, stamps: TimestampState, step: jax.Array
) -> jax.Array:
    """Sets the logits (or log-probabilities) of the tokens that the rules forbid at a step to -inf."""
    masked_V = jnp.where(step == 0, inputs.begin_suppressed_V, inputs.suppressed_V)
    logits_BV = jnp.where(masked_V[None], -jnp.inf, logits_BV)
    if program.timestamps:
        logits_BV = mask_by_timestamp_rules(logits_BV, stamps, inputs.eos_id, inputs.first_stamp, inputs.latest_first)
    return logits_BV


@functools.partial(jax.jit, static_argnums=0)
def _decode_greedily(
    program: _Program, params: dict[str, Any], cache: EncodedCache, prompt_BT: jax.Array, inputs: _Inputs
) -> tuple[jax.Array, jax.Array]:
    """Decodes greedily. Returns the new tokens, int32 [B, G], and the number of valid tokens of each row, int32 [B]."""
    model: EncoderDecoder = nnx.merge(program.graphdef, params)
    rows, length = prompt_BT.shape

    def is_unfinished(loop: _Loop) -> jax.Array:
        return jnp.any(~loop.done_B) & (loop.step < program.max_new_tokens)

    def body(loop: _Loop) -> _Loop:
        allowed_BV = _mask_forbidden(program, inputs, loop.logits_BV, loop.stamps, loop.step)
        next_B = jnp.argmax(allowed_BV, axis=-1).astype(jnp.int32)
        tokens_BG = jax.lax.dynamic_update_slice(loop.tokens_BG, next_B[:, None], (0, loop.step))
        # Rows that are done are still computed, since all rows share one program, but their tokens are ignored.
        counts_B = loop.counts_B + ~loop.done_B
        positions_B1 = jnp.broadcast_to(length + loop.step, (rows, 1))
        h_B1D, cache = model.decode_hidden(next_B[:, None], positions_B1, loop.cache)
        stamps = loop.stamps.advance(next_B, inputs.first_stamp)
        done_B = loop.done_B | (next_B == inputs.eos_id)
        return _Loop(loop.step + 1, tokens_BG, counts_B, cache, model.logits(h_B1D[:, 0]), stamps, done_B)

    cache, logits_BV = _prefill(program, params, cache, prompt_BT)
    zeros_BG, zeros_B = jnp.zeros((rows, program.max_new_tokens), jnp.int32), jnp.zeros(rows, jnp.int32)
    start = TimestampState.start(rows)
    loop = _Loop(jnp.int32(0), zeros_BG, zeros_B, cache, logits_BV, start, jnp.zeros(rows, bool))
    done = jax.lax.while_loop(is_unfinished, body, loop)
    return done.tokens_BG, done.counts_B


@functools.partial(jax.jit, static_argnums=0)
def _decode_by_beams(
    program: _Program, params: dict[str, Any], cache: EncodedCache, prompt_BT: jax.Array, inputs: _Inputs
) -> tuple[jax.Array, jax.Array]:
    """Decodes with beam search; otherwise the same as `_decode_greedily`."""
    model: EncoderDecoder = nnx.merge(program.graphdef, params)
    rows, length = prompt_BT.shape

    def log_probs(logits_RV: jax.Array, stamps: TimestampState, step: jax.Array) -> jax.Array:
        # Masked after the softmax, so forbidden tokens keep their share of the probability.
        return _mask_forbidden(program, inputs, jax.nn.log_softmax(logits_RV, axis=-1), stamps, step)

    def advance(carry: Any, step: jax.Array, parents_R: jax.Array, next_R: jax.Array) -> tuple[Any, jax.Array]:
        self_cache, stamps = carry
        self_cache = jax.tree.map(lambda x: x[:, parents_R], self_cache)
        stamps = jax.tree.map(lambda x: x[parents_R], stamps).advance(next_R, inputs.first_stamp)
        positions_R1 = jnp.broadcast_to(length + step, (len(next_R), 1))
        h_R1D, filled = model.decode_hidden(next_R[:, None], positions_R1, cache._replace(self_attention=self_cache))
        return (filled.self_attention, stamps), log_probs(model.logits(h_R1D[:, 0]), stamps, step + 1)

    filled, logits_BV = _prefill(program, params, cache, prompt_BT)
    self_cache = jax.tree.map(lambda x: jnp.repeat(x, program.beams, axis=1), filled.self_attention)
    stamps = TimestampState.start(rows * program.beams)
    logits_RV = jnp.repeat(logits_BV, program.beams, axis=0)
    return search_beams(
        (self_cache, stamps),
        log_probs(logits_RV, stamps, jnp.int32(0)),
        advance,
        beams=program.beams,
        max_new_tokens=program.max_new_tokens,
        eos_id=inputs.eos_id,
        length_penalty=inputs.length_penalty,
    )
