"""Log probabilities of continuations.

A context with several continuations is read once, and each continuation starts from its KV cache.

Shape letters: B rows, T positions of a context or of a continuation, V vocabulary, D hidden dimension.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.core.errors import UserError
from lm_trainer.nn.cache import KvCache
from lm_trainer.nn.decoder import Decoder

_MAX_LOGITS = 1 << 26
"""Maximum number of logits computed at a time."""


class Context(NamedTuple):
    """A context and its continuations, all non-empty.

    A context and one continuation together have at most one token more than the model's context.
    """

    tokens: Sequence[int]
    continuations: Sequence[Sequence[int]]


class Score(NamedTuple):
    """Score of a continuation."""

    log_prob: float
    """Sum of log p of the continuation's tokens, in nats."""
    is_greedy: bool
    """True if each token of the continuation is the most likely token at its position."""


def score(
    model: Decoder, contexts: Sequence[Context], *, dtype: DTypeLike = jnp.float32, tokens_at_once: int = 4096
) -> Iterator[tuple[int, list[Score]]]:
    """Yields the index of each context and the scores of its continuations, batch by batch.

    Args:
        model: the model with its parameters.
        contexts: contexts and continuations to score.
        dtype: compute dtype.
        tokens_at_once: approximate number of positions per batch.

    Raises:
        UserError: for a token outside the model's vocabulary.
    """
    _check_ids(contexts, model.spec.vocab_size)
    graphdef, state = nnx.split(model, nnx.Param)
    engine, max_positions = _Engine(graphdef, nnx.to_pure_dict(state), jnp.dtype(dtype)), model.spec.num_positions
    shared = [i for i, context in enumerate(contexts) if _is_shared(context, max_positions)]
    for batch, width in _batch_by_length(
        shared, [len(contexts[i].tokens) for i in shared], tokens_at_once, max_positions
    ):
        yield from zip(batch, engine.score_shared([contexts[i] for i in batch], width), strict=True)
    separate = [
        (i, Context(contexts[i].tokens, [tokens]))
        for i in sorted({*range(len(contexts))} - {*shared})
        for tokens in contexts[i].continuations
    ]
    scores: dict[int, Score] = {}
    for batch, width in _batch_by_length(
        range(len(separate)), [_input_length(context) for _, context in separate], tokens_at_once, max_positions
    ):
        scores |= zip(batch, engine.score_separately([separate[index][1] for index in batch], width), strict=True)
    for i, group in itertools.groupby(range(len(separate)), key=lambda index: separate[index][0]):
        yield i, [scores[index] for index in group]


def _check_ids(contexts: Sequence[Context], vocab_size: int) -> None:
    for tokens in itertools.chain.from_iterable((context.tokens, *context.continuations) for context in contexts):
        if max(tokens) >= vocab_size:
            raise UserError(f"a text has the token {max(tokens)}, but the model knows 0 to {vocab_size - 1}")


def _is_shared(context: Context, max_positions: int) -> bool:
    """Returns True if a context is read once for all of its continuations."""
    longest = max(map(len, context.continuations))
    # For a short context, continuing from a cache costs more than it saves. Padded continuations must stay within the
    # model's positions, because later positions give NaN.
    return (
        len(context.continuations) > 1
        and len(context.tokens) >= longest
        and len(context.tokens) + _bucket_length(longest) - 1 <= max_positions
    )


def _input_length(context: Context) -> int:
    # The last token is only predicted, never read.
    return len(context.tokens) + len(context.continuations[0]) - 1


def _batch_by_length(
    indices: Sequence[int], lengths: Sequence[int], tokens_at_once: int, max_width: int
) -> Iterator[tuple[list[int], int]]:
    """Yields batches of rows with similar lengths, the longest first, and the width of each batch."""
    order = sorted(range(len(indices)), key=lambda index: -lengths[index])
    while order:
        width = min(_bucket_length(lengths[order[0]]), max_width)
        # The number of rows is a power of two, which needs no padding rows.
        rows = 1 << (max(tokens_at_once // width, 1).bit_length() - 1)
        yield [indices[index] for index in order[:rows]], width
        order = order[rows:]


def _bucket_length(length: int) -> int:
    """Rounds the length up to 1, 4, 8, 16, 24, 32, 48, 64, 96, ..., to limit the number of compiled programs."""
    if length <= 1:
        return 1
    step = 4
    while step * 4 <= length:
        step *= 2
    return -(-length // step) * step


class _Engine(NamedTuple):
    graphdef: nnx.GraphDef[Decoder]
    params: dict[str, Any]
    dtype: np.dtype

    def score_separately(self, contexts: Sequence[Context], width: int) -> list[Score]:
        """Scores contexts with one continuation each. Context and continuation are read together."""
        rows = [[*context.tokens, *context.continuations[0]] for context in contexts]
        tokens_BT, targets_BT = (
            _pad_rows([row[:-1] for row in rows], width),
            _pad_rows([row[1:] for row in rows], width),
        )
        results = _score_full(self._program(), self.params, tokens_BT, targets_BT)
        log_probs_BT, greedy_BT = jax.device_get(results)
        starts = [len(context.tokens) - 1 for context in contexts]
        ends = [len(row) - 1 for row in rows]
        return [
            Score(float(np.sum(log_probs_BT[i, start:end], dtype=np.float64)), bool(np.all(greedy_BT[i, start:end])))
            for i, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]

    def score_shared(self, contexts: Sequence[Context], width: int) -> list[list[Score]]:
        """Scores contexts with several continuations each."""
        longest = max(len(tokens) for context in contexts for tokens in context.continuations)
        continuation_width = _bucket_length(longest)
        tokens_BT = _pad_rows([context.tokens for context in contexts], width)
        # Padding rows get one token, so that they have a last token.
        lengths_B = np.ones(len(tokens_BT), np.int32)
        lengths_B[: len(contexts)] = [len(context.tokens) for context in contexts]
        cache, logits_BV = _prefill(self._program(width + continuation_width), self.params, tokens_BT, lengths_B)
        scores: list[list[Score]] = [[] for _ in contexts]
        for choice in range(max(len(context.continuations) for context in contexts)):
            # A row without a continuation of this number repeats another continuation.
            selected = [context.continuations[min(choice, len(context.continuations) - 1)] for context in contexts]
            continuations_BT = _pad_rows(selected, continuation_width)
            results = _continue_from_cache(self._program(), self.params, cache, logits_BV, lengths_B, continuations_BT)
            log_probs_BT, greedy_BT = jax.device_get(results)
            for i, context in enumerate(contexts):
                if choice < len(context.continuations):
                    count = len(context.continuations[choice])
                    total = float(np.sum(log_probs_BT[i, :count], dtype=np.float64))
                    scores[i].append(Score(total, bool(np.all(greedy_BT[i, :count]))))
        return scores

    def _program(self, capacity: int = 0) -> _Program:
        return _Program(self.graphdef, self.dtype, capacity)


class _Program(NamedTuple):
    """Static arguments of the compiled functions."""

    graphdef: nnx.GraphDef[Decoder]
    dtype: np.dtype
    capacity: int
    """Capacity of the cache in positions."""


def _pad_rows(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Pads rows with zeros to `width`, and adds rows of zeros up to a power of two, to limit the number of compiled
    shapes.
    """
    tokens_BT = np.zeros((1 << (len(rows) - 1).bit_length(), width), np.int32)
    for index, row in enumerate(rows):
        tokens_BT[index, : len(row)] = row
    return tokens_BT


@functools.partial(jax.jit, static_argnums=0)
def _score_full(
    program: _Program, params: dict[str, Any], tokens_BT: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the log probabilities of the targets, and whether each is the most likely token, [B, T] each."""
    model: Decoder = nnx.merge(program.graphdef, params)
    h_BTD = model.hidden(tokens_BT, _position_ids(tokens_BT), jnp.zeros_like(tokens_BT), dtype=program.dtype)
    return _score_hidden(model, h_BTD, targets_BT)


@functools.partial(jax.jit, static_argnums=0)
def _prefill(
    program: _Program, params: dict[str, Any], tokens_BT: jax.Array, lengths_B: jax.Array
) -> tuple[KvCache, jax.Array]:
    """Computes the cache after the contexts, and the logits [B, V] after the last token of each context."""
    model: Decoder = nnx.merge(program.graphdef, params)
    cache = model.init_cache(tokens_BT.shape[0], program.capacity, dtype=program.dtype)
    h_BTD, cache = model.decode_hidden(tokens_BT, _position_ids(tokens_BT), cache, lengths_B)
    return cache, model.logits(h_BTD[jnp.arange(tokens_BT.shape[0]), lengths_B - 1])


@functools.partial(jax.jit, static_argnums=0)
def _continue_from_cache(
    program: _Program,
    params: dict[str, Any],
    cache: KvCache,
    logits_BV: jax.Array,
    lengths_B: jax.Array,
    continuations_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the same as `_score_full`, for continuations of the cached contexts."""
    model: Decoder = nnx.merge(program.graphdef, params)
    first = _score_logits(logits_BV, continuations_BT[:, 0])
    if continuations_BT.shape[1] == 1:
        return first[0][:, None], first[1][:, None]
    inputs_BT = continuations_BT[:, :-1]
    h_BTD, _ = model.decode_hidden(inputs_BT, lengths_B[:, None] + _position_ids(inputs_BT), cache)
    remaining = _score_hidden(model, h_BTD, continuations_BT[:, 1:])
    log_probs_BT, greedy_BT = (jnp.concatenate([a[:, None], b], axis=1) for a, b in zip(first, remaining, strict=True))
    return log_probs_BT, greedy_BT


def _position_ids(tokens_BT: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)


def _score_hidden(model: Decoder, h_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the same as `_score_full` from hidden states. Computes at most `_MAX_LOGITS` logits at a time."""
    h_ND, targets_N = h_BTD.reshape(-1, h_BTD.shape[-1]), targets_BT.reshape(-1)
    size = min(max(_MAX_LOGITS // model.spec.vocab_size, 1), len(targets_N))
    padding = -len(targets_N) % size
    blocks = (
        jnp.pad(h_ND, ((0, padding), (0, 0))).reshape(-1, size, h_ND.shape[-1]),
        jnp.pad(targets_N, (0, padding)).reshape(-1, size),
    )
    results = jax.lax.map(lambda block: _score_logits(model.logits(block[0]), block[1]), blocks)
    log_probs_BT, greedy_BT = (x.reshape(-1)[: len(targets_N)].reshape(targets_BT.shape) for x in results)
    return log_probs_BT, greedy_BT


def _score_logits(logits_NV: jax.Array, targets_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    chosen_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=-1)[:, 0]
    log_probs_N = chosen_N - jax.nn.logsumexp(logits_NV, axis=-1)
    return log_probs_N, jnp.argmax(logits_NV, axis=-1) == targets_N
