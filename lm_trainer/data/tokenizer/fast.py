"""Faster backend for tokenizers, used where it is installed and gives the same ids."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import available_cores
from lm_trainer.data.sources import Row, Shard
from lm_trainer.data.sources.base import all_text, replace_surrogates
from lm_trainer.data.tokenizer.base import HfTokenizer

logger = logging.getLogger(__name__)

Backend = Literal["auto", "tokenizers", "fastokens"]

_MOST_PARTS = 8

SAMPLE_SHARDS, SAMPLE_ROWS, SAMPLE_CHARS = 16, 64, 200_000
"""Shards of each source that are compared, and the rows and characters of each."""


class FastTokenizer(HfTokenizer):
    """Runs a `tokenizer.json` by the package `fastokens`, several times as fast on long texts."""

    backend = "fastokens"
    package = "fastokens"

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        from fastokens import Tokenizer

        # A part for each thread that encodes, as many as its Rayon is told. Between batches the stages hand the
        # interpreter's lock to one another, which small ones spend as long on as on their text; in larger ones it does
        # not stay in a core's cache.
        told = os.environ.get("RAYON_NUM_THREADS", "")
        threads = int(told) if told.isdigit() and int(told) else available_cores()
        self.batch_bytes = 2 * min(threads, _MOST_PARTS) * HfTokenizer.batch_bytes
        self._fast = Tokenizer.from_json_str(self._content)
        self._fast.no_truncation()
        self._fast.no_padding()

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        # All ids in one buffer: a Python list of each document's would cost as much as the encoding.
        ids, offsets = self._fast.encode_batch_flat(list(texts), split_special_tokens=True)
        together, cuts = np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).tolist()
        return [together[start:end] for start, end in itertools.pairwise(cuts)]


def choose_backend(
    tokenizer: HfTokenizer, wanted: Backend, sources: Sequence[Sequence[Shard]], built_with: str | None
) -> HfTokenizer:
    """Returns the tokenizer, run by the backend that is wanted.

    Args:
        tokenizer: run by `tokenizers`.
        wanted: `auto` takes the fast one where it is installed and agrees on a sample of every source.
        sources: the shards that will be tokenised, source by source.
        built_with: the backend of a cache that exists, which `auto` keeps to.

    Raises:
        UserError: where the wanted backend is not installed or disagrees, or a source cannot be read.
    """
    if type(tokenizer) is not HfTokenizer:
        return tokenizer
    # A cache keeps its backend, whose name is part of its identity: a package installed later must not make it unfit.
    name = (built_with or "fastokens") if wanted == "auto" else wanted
    if name != "fastokens":
        return tokenizer
    optional = wanted == "auto" and built_with is None
    if importlib.util.find_spec("fastokens") is None:
        if optional:
            return tokenizer
        why = "data.tokenizer_backend asks for it" if wanted != "auto" else "the cache was built with it"
        raise UserError(f"the package fastokens is not installed, but {why}; run: pip install fastokens")
    fast, problem = _try_fast(tokenizer, sources)
    if problem is None:
        return fast
    if optional:
        logger.warning("tokenising with tokenizers, not with the faster fastokens: %s", problem)
        return tokenizer
    raise UserError(f"fastokens cannot be used: {problem}; set data.tokenizer_backend: tokenizers")


def _try_fast(tokenizer: HfTokenizer, sources: Sequence[Sequence[Shard]]) -> tuple[HfTokenizer, str | None]:
    """Returns the tokenizer run by fastokens, and the reason why it cannot be used, if there is one."""
    try:
        fast = tokenizer.with_backend(FastTokenizer)
        return fast, find_different_ids(tokenizer, fast, sources)
    except UserError:  # of a source
        raise
    except Exception as error:  # the package has errors of its own for tokenizers that it cannot run
        return tokenizer, f"it cannot run this tokenizer ({error})"


def find_different_ids(one: HfTokenizer, other: HfTokenizer, sources: Sequence[Sequence[Shard]]) -> str | None:
    """Finds a row of a sample of every source for which two tokenizers give other ids; None if there is none."""
    for shards in sources:
        # Spread over the shards, which may be of different languages.
        every = max(1, len(shards) // SAMPLE_SHARDS)
        for shard in shards[::every][:SAMPLE_SHARDS]:
            rows = list(_sample(shard))
            texts = [text for _, text in rows]
            for (where, _), a, b in zip(rows, one.encode_batch(texts), other.encode_batch(texts), strict=True):
                if not np.array_equal(a, b):
                    return f"it gives other ids for {where}"
    return None


def _sample(shard: Shard) -> Iterator[tuple[str, str]]:
    left = SAMPLE_CHARS
    for row in itertools.islice(shard.rows(), SAMPLE_ROWS):
        if isinstance(row, Row) and left > 0:
            text = replace_surrogates(all_text(row))[:left]
            left -= len(text)
            yield row.where, text
