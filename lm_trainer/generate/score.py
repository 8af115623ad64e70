"""Log probabilities of continuations.

A context that has several continuations is read once, and each of them goes on from its key-value cache.

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

_LOGITS = 1 << 26
"""Logits that are there at a time, in numbers."""


class Context(NamedTuple):
    """A context with its continuations; neither is empty, and each pair fits into the model's context and one more."""

    tokens: Sequence[int]
    continuations: Sequence[Sequence[int]]


class Score(NamedTuple):
    """A continuation's score."""

    log_prob: float
    """Sum of log p of its tokens, in nats."""
    is_greedy: bool
    """True if each of its tokens is the likeliest one."""


def score(
    model: Decoder, contexts: Sequence[Context], *, dtype: DTypeLike = jnp.float32, tokens_at_once: int = 4096
) -> Iterator[tuple[int, list[Score]]]:
    """Yields the number of each context with the scores of its continuations, batch by batch.

    Args:
        model: with its parameters.
        contexts: what is asked.
        dtype: of the computation.
        tokens_at_once: positions of a batch, about.

    Raises:
        UserError: for a token that the model has no row for.
    """
    _check_ids(contexts, model.spec.vocab_size)
    graphdef, state = nnx.split(model, nnx.Param)
    engine, most = _Engine(graphdef, nnx.to_pure_dict(state), jnp.dtype(dtype)), model.spec.num_positions
    shared = [i for i, each in enumerate(contexts) if _is_shared(each, most)]
    for batch, width in _batches(shared, [len(contexts[i].tokens) for i in shared], tokens_at_once, most):
        yield from zip(batch, engine.shared([contexts[i] for i in batch], width), strict=True)
    apart = [
        (i, Context(contexts[i].tokens, [tokens]))
        for i in sorted({*range(len(contexts))} - {*shared})
        for tokens in contexts[i].continuations
    ]
    scores: dict[int, Score] = {}
    for batch, width in _batches(range(len(apart)), [_length(each) for _, each in apart], tokens_at_once, most):
        scores |= zip(batch, engine.whole([apart[at][1] for at in batch], width), strict=True)
    for i, group in itertools.groupby(range(len(apart)), key=lambda at: apart[at][0]):
        yield i, [scores[at] for at in group]


def _check_ids(contexts: Sequence[Context], vocab_size: int) -> None:
    for tokens in itertools.chain.from_iterable((each.tokens, *each.continuations) for each in contexts):
        if max(tokens) >= vocab_size:
            raise UserError(f"a text has the token {max(tokens)}, but the model knows 0 to {vocab_size - 1}")


def _is_shared(context: Context, most: int) -> bool:
    """Tells whether a context is read once for all of its continuations."""
    longest = max(map(len, context.continuations))
    # Beside a short context, going on from a cache costs more than it saves. Filled up, continuations must stay within
    # the model's positions, behind which nothing is a number.
    return (
        len(context.continuations) > 1
        and len(context.tokens) >= longest
        and len(context.tokens) + _width(longest) - 1 <= most
    )


def _length(context: Context) -> int:
    # The last token is predicted, and never read.
    return len(context.tokens) + len(context.continuations[0]) - 1


def _batches(
    numbers: Sequence[int], lengths: Sequence[int], tokens_at_once: int, most: int
) -> Iterator[tuple[list[int], int]]:
    """Batches of like lengths, the longest first, with the width of each."""
    order = sorted(range(len(numbers)), key=lambda at: -lengths[at])
    while order:
        width = min(_width(lengths[order[0]]), most)
        # A power of two, which needs no rows of padding.
        rows = 1 << (max(tokens_at_once // width, 1).bit_length() - 1)
        yield [numbers[at] for at in order[:rows]], width
        order = order[rows:]


def _width(length: int) -> int:
    """The length rounded up to one of few, so that few programs are compiled: 1, 4, 8, 16, 24, 32, 48, 64, 96, ..."""
    if length <= 1:
        return 1
    step = 4
    while step * 4 <= length:
        step *= 2
    return -(-length // step) * step


class _Engine(NamedTuple):
    graphdef: Any
    params: Any
    dtype: Any

    def whole(self, contexts: Sequence[Context], width: int) -> list[Score]:
        """Scores of contexts with one continuation each, read together with them."""
        rows = [[*each.tokens, *each.continuations[0]] for each in contexts]
        tokens_BT, targets_BT = _padded([row[:-1] for row in rows], width), _padded([row[1:] for row in rows], width)
        found = _whole(self._program(), self.params, tokens_BT, targets_BT)
        log_probs_BT, greedy_BT = jax.device_get(found)
        starts = [len(each.tokens) - 1 for each in contexts]
        ends = [len(row) - 1 for row in rows]
        return [
            Score(float(np.sum(log_probs_BT[i, start:end], dtype=np.float64)), bool(np.all(greedy_BT[i, start:end])))
            for i, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]

    def shared(self, contexts: Sequence[Context], width: int) -> list[list[Score]]:
        """Scores of contexts with several continuations each."""
        longest = max(len(tokens) for each in contexts for tokens in each.continuations)
        room = _width(longest)
        tokens_BT = _padded([each.tokens for each in contexts], width)
        # Rows of padding have a token as well, for there to be a last one.
        lengths_B = np.ones(len(tokens_BT), np.int32)
        lengths_B[: len(contexts)] = [len(each.tokens) for each in contexts]
        cache, logits_BV = _read(self._program(width + room), self.params, tokens_BT, lengths_B)
        scores: list[list[Score]] = [[] for _ in contexts]
        for choice in range(max(len(each.continuations) for each in contexts)):
            # A row that has no such continuation computes with another one.
            asked = [each.continuations[min(choice, len(each.continuations) - 1)] for each in contexts]
            continuations_BT = _padded(asked, room)
            found = _go_on(self._program(), self.params, cache, logits_BV, lengths_B, continuations_BT)
            log_probs_BT, greedy_BT = jax.device_get(found)
            for i, each in enumerate(contexts):
                if choice < len(each.continuations):
                    count = len(each.continuations[choice])
                    total = float(np.sum(log_probs_BT[i, :count], dtype=np.float64))
                    scores[i].append(Score(total, bool(np.all(greedy_BT[i, :count]))))
        return scores

    def _program(self, capacity: int = 0) -> _Program:
        return _Program(self.graphdef, self.dtype, capacity)


class _Program(NamedTuple):
    """Static arguments."""

    graphdef: Any
    dtype: Any
    capacity: int
    """Positions that a cache has room for."""


def _padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """The rows filled up with zeros to the width, and rows of zeros up to a power of two of them: one of few shapes."""
    tokens_BT = np.zeros((1 << (len(rows) - 1).bit_length(), width), np.int32)
    for at, row in enumerate(rows):
        tokens_BT[at, : len(row)] = row
    return tokens_BT


@functools.partial(jax.jit, static_argnums=0)
def _whole(program: _Program, params: Any, tokens_BT: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log probabilities of the targets, and where they are the likeliest tokens, [B, T] each."""
    model: Decoder = nnx.merge(program.graphdef, params)
    h_BTD = model.hidden(tokens_BT, _positions(tokens_BT), jnp.zeros_like(tokens_BT), dtype=program.dtype)
    return _targets(model, h_BTD, targets_BT)


@functools.partial(jax.jit, static_argnums=0)
def _read(program: _Program, params: Any, tokens_BT: jax.Array, lengths_B: jax.Array) -> tuple[KvCache, jax.Array]:
    """The cache after the contexts, and the logits [B, V] after each one's last token."""
    model: Decoder = nnx.merge(program.graphdef, params)
    cache = model.init_cache(tokens_BT.shape[0], program.capacity, dtype=program.dtype)
    h_BTD, cache = model.decode_hidden(tokens_BT, _positions(tokens_BT), cache)
    return cache, model.logits(h_BTD[jnp.arange(tokens_BT.shape[0]), lengths_B - 1])


@functools.partial(jax.jit, static_argnums=0)
def _go_on(
    program: _Program,
    params: Any,
    cache: KvCache,
    logits_BV: jax.Array,
    lengths_B: jax.Array,
    continuations_BT: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """As `_whole`, of continuations of what the cache has read."""
    model: Decoder = nnx.merge(program.graphdef, params)
    first = _of_logits(logits_BV, continuations_BT[:, 0])
    if continuations_BT.shape[1] == 1:
        return first[0][:, None], first[1][:, None]
    inputs_BT = continuations_BT[:, :-1]
    h_BTD, _ = model.decode_hidden(inputs_BT, lengths_B[:, None] + _positions(inputs_BT), cache)
    rest = _targets(model, h_BTD, continuations_BT[:, 1:])
    log_probs_BT, greedy_BT = (jnp.concatenate([a[:, None], b], axis=1) for a, b in zip(first, rest, strict=True))
    return log_probs_BT, greedy_BT


def _positions(tokens_BT: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)


def _targets(model: Decoder, h_BTD: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `_whole`, from hidden states; no more than `_LOGITS` logits are there at a time."""
    h_ND, targets_N = h_BTD.reshape(-1, h_BTD.shape[-1]), targets_BT.reshape(-1)
    size = min(max(_LOGITS // model.spec.vocab_size, 1), len(targets_N))
    missing = -len(targets_N) % size
    blocks = (
        jnp.pad(h_ND, ((0, missing), (0, 0))).reshape(-1, size, h_ND.shape[-1]),
        jnp.pad(targets_N, (0, missing)).reshape(-1, size),
    )
    found = jax.lax.map(lambda block: _of_logits(model.logits(block[0]), block[1]), blocks)
    log_probs_BT, greedy_BT = (x.reshape(-1)[: len(targets_N)].reshape(targets_BT.shape) for x in found)
    return log_probs_BT, greedy_BT


def _of_logits(logits_NV: jax.Array, targets_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    chosen_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=-1)[:, 0]
    log_probs_N = chosen_N - jax.nn.logsumexp(logits_NV, axis=-1)
    return log_probs_N, jnp.argmax(logits_NV, axis=-1) == targets_N
