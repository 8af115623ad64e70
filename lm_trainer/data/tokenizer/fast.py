"""A faster tokenizer backend, which is used if it is installed and produces the same ids."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import available_cores
from lm_trainer.data.sources import Row, Shard
from lm_trainer.data.sources.base import full_text, replace_surrogates
from lm_trainer.data.tokenizer.base import HfTokenizer

logger = logging.getLogger(__name__)

Backend = Literal["auto", "tokenizers", "fastokens"]

_MAX_THREADS = 8

SAMPLE_SHARDS, SAMPLE_ROWS, SAMPLE_CHARS = 16, 64, 200_000
"""Size of the sample to compare: number of shards per source, and of rows and characters per shard."""


class FastTokenizer(HfTokenizer):
    """Runs a `tokenizer.json` with the package `fastokens`, which is several times as fast on long texts."""

    backend = "fastokens"
    package = "fastokens"

    def __init__(
        self,
        content: str,
        settings: Mapping[str, object] | None = None,
        extras: Mapping[str, bytes] | None = None,
        *,
        eos_token: str | None = None,
        origin: str = "the tokenizer",
    ):
        super().__init__(content, settings, extras, eos_token=eos_token, origin=origin)
        from fastokens import Tokenizer

        # The batch size is proportional to the number of encoding threads, which Rayon reads from the environment. The
        # stages of the pipeline exchange the interpreter lock between batches, which would take as long as the encoding
        # of a small batch. The text of a larger batch would not fit into a core's cache.
        num_threads = os.environ.get("RAYON_NUM_THREADS", "")
        threads = int(num_threads) if num_threads.isdigit() and int(num_threads) else available_cores()
        self.batch_bytes = 2 * min(threads, _MAX_THREADS) * HfTokenizer.batch_bytes
        self._fast = Tokenizer.from_json_str(self._content)
        self._fast.no_truncation()
        self._fast.no_padding()

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        # All ids share one buffer, because making a Python list per document would take as long as the encoding.
        ids, offsets = self._fast.encode_batch_flat(list(texts), split_special_tokens=True)
        all_ids, bounds = np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).tolist()
        return [all_ids[start:end] for start, end in itertools.pairwise(bounds)]


def choose_backend(
    tokenizer: HfTokenizer, requested: Backend, sources: Sequence[Sequence[Shard]], built_with: str | None
) -> HfTokenizer:
    """Returns the tokenizer with the requested backend.

    Args:
        tokenizer: the tokenizer, with the backend `tokenizers`.
        requested: the backend; `auto` uses fastokens if it is installed and agrees on a sample of every source.
        sources: the shards to tokenise, grouped by source.
        built_with: the backend of an existing cache, which `auto` keeps.

    Raises:
        UserError: if the requested backend is missing or disagrees, or a source cannot be read.
    """
    if type(tokenizer) is not HfTokenizer:
        return tokenizer
    # An existing cache keeps its backend, which is part of its identity, so that installing a package later does not
    # invalidate the cache.
    name = (built_with or "fastokens") if requested == "auto" else requested
    if name != "fastokens":
        return tokenizer
    optional = requested == "auto" and built_with is None
    if importlib.util.find_spec("fastokens") is None:
        if optional:
            return tokenizer
        reason = "data.tokenizer_backend asks for it" if requested != "auto" else "the cache was built with it"
        raise UserError(f"the package fastokens is not installed, but {reason}; run: pip install fastokens")
    fast, problem = _try_fast(tokenizer, sources)
    if problem is None:
        return fast
    if optional:
        logger.warning("tokenising with tokenizers, not with the faster fastokens: %s", problem)
        return tokenizer
    raise UserError(f"fastokens cannot be used: {problem}; set data.tokenizer_backend: tokenizers")


def _try_fast(tokenizer: HfTokenizer, sources: Sequence[Sequence[Shard]]) -> tuple[HfTokenizer, str | None]:
    """Tries the fastokens backend. Returns a tokenizer, and the reason why the backend cannot be used, if any."""
    try:
        fast = tokenizer.with_backend(FastTokenizer)
        return fast, find_different_ids(tokenizer, fast, sources)
    except UserError:  # raised by a source
        raise
    except Exception as error:  # the package has its own error types for unsupported tokenizers
        return tokenizer, f"it cannot run this tokenizer ({error})"


def find_different_ids(first: HfTokenizer, second: HfTokenizer, sources: Sequence[Sequence[Shard]]) -> str | None:
    """Compares two tokenizers on a sample of every source. Describes the first row with different ids, if any."""
    for shards in sources:
        # Samples from many shards, since they may be in different languages.
        every = max(1, len(shards) // SAMPLE_SHARDS)
        for shard in shards[::every][:SAMPLE_SHARDS]:
            rows = list(_sample_texts(shard))
            texts = [text for _, text in rows]
            for (location, _), a, b in zip(rows, first.encode_batch(texts), second.encode_batch(texts), strict=True):
                if not np.array_equal(a, b):
                    return f"it gives other ids for {location}"
    return None


def _sample_texts(shard: Shard) -> Iterator[tuple[str, str]]:
    left = SAMPLE_CHARS
    for row in itertools.islice(shard.rows(), SAMPLE_ROWS):
        if isinstance(row, Row) and left > 0:
            text = replace_surrogates(full_text(row))[:left]
            left -= len(text)
            yield row.where, text
