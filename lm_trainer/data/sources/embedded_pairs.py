"""A source of preference pairs, made from the embedded corpus, for trying out preference losses without a download."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split, read_record
from lm_trainer.data.sources.embedded import Embedded

_SHARD_ROWS = 1024
_CORPUS_BYTES = 4 << 20


class EmbeddedPairs(SourceConfig):
    """Short passages of the embedded corpus. The chosen answer goes on with the next words of the corpus, and the
    rejected answer has the same words in random order.

    For use with `data.format: {type: preference}`. With `unpaired_preference`, every other row has the chosen answer
    and the label true, and the rows between have the rejected answer.
    """

    type: Literal["embedded_pairs"] = "embedded_pairs"
    rows: int = Field(default=2048, ge=1)
    """Number of training rows."""
    validation_rows: int = Field(default=256, ge=0)
    """Number of validation rows, whose passages come from other documents than the training rows'."""
    prompt_words: int = Field(default=6, ge=1)
    """Number of words of a prompt, with the blanks and line ends before them."""
    answer_words: int = Field(default=8, ge=2)
    """Number of words of an answer."""
    seed: int = Field(default=0, ge=0)
    """Seed for drawing passages and orders."""

    takes_urls: ClassVar[bool] = False

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls, text_key
        count = self.rows if split == "train" else self.validation_rows
        return [
            EmbeddedPairsShard(self, split, start, min(start + _SHARD_ROWS, count), fields)
            for start in range(0, count, _SHARD_ROWS)
        ]


@dataclass(frozen=True)
class EmbeddedPairsShard:
    """The rows [start, stop) of a split."""

    source: EmbeddedPairs
    split: Split
    start: int
    stop: int
    fields: tuple[str, ...]

    @property
    def size(self) -> int:
        return (self.stop - self.start) * 8 * (self.source.prompt_words + 2 * self.source.answer_words)

    @property
    def text_size(self) -> None:
        return None

    def identity(self) -> dict[str, object]:
        words = hashlib.sha256("".join(_read_words(self.split)).encode()).hexdigest()
        return {
            **self.source.model_dump(mode="json", exclude={"rows", "validation_rows"}),
            "split": self.split,
            "rows": [self.start, self.stop],
            "fields": list(self.fields),
            "sha256": words,
        }

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for number in range(start, self.stop - self.start):
            row = read_record(self._make_record(self.start + number), "prompt", self.fields)
            yield row._replace(number=number, where=f"data.source.{self.split}[{self.start + number}]")

    def _make_record(self, row: int) -> dict[str, object]:
        # Seeded with the row number, so that every row can be made independently.
        rng = np.random.Generator(np.random.Philox(key=(self.source.seed, 2 * row + (self.split == "validation"))))
        prompt, chosen, rejected = _draw_pair(self.source, _read_words(self.split), rng)
        desirable = row % 2 == 0
        completion = chosen if desirable else rejected
        return {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": rejected,
            "completion": completion,
            "label": desirable,
        }


def _draw_pair(source: EmbeddedPairs, words: tuple[str, ...], rng: np.random.Generator) -> tuple[str, str, str]:
    """Draws a passage, and an order of its last words that differs from the corpus."""
    while True:
        start = int(rng.integers(len(words) - source.prompt_words - source.answer_words))
        middle = start + source.prompt_words
        answer = words[middle : middle + source.answer_words]
        order = rng.permutation(len(answer)).tolist()
        chosen, rejected = "".join(answer), "".join(answer[index] for index in order)
        if chosen != rejected:
            return "".join(words[start:middle]).lstrip(), chosen, rejected


@lru_cache(maxsize=2)
def _read_words(split: Split) -> tuple[str, ...]:
    """Returns all words of a part of the embedded corpus in order, each with the blanks before it."""
    shards = Embedded(max_bytes=_CORPUS_BYTES).shards(split)
    text = "\n".join(row.text for shard in shards for row in shard.rows() if isinstance(row, Row))
    return tuple(re.findall(r"\s*\S+", text))
