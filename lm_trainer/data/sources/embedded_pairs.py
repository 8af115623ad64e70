"""A source of preference pairs, made from the embedded corpus, for trying out preference losses without a download."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split, read_record
from lm_trainer.data.sources.generated import GeneratedShard, read_embedded_text


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
        return [*EmbeddedPairsShard.make_all(self, split, fields)]


@dataclass(frozen=True)
class EmbeddedPairsShard(GeneratedShard):
    """The rows [start, stop) of a split."""

    source: EmbeddedPairs

    @property
    def size(self) -> int:
        return (self.stop - self.start) * 8 * (self.source.prompt_words + 2 * self.source.answer_words)

    def corpus(self) -> str:
        return "".join(_read_words(self.split))

    def make_row(self, index: int, rng: np.random.Generator) -> Row | BadRow:
        prompt, chosen, rejected = _draw_pair(self.source, _read_words(self.split), rng)
        desirable = index % 2 == 0
        completion = chosen if desirable else rejected
        record = {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": rejected,
            "completion": completion,
            "label": desirable,
        }
        return read_record(record, "prompt", self.fields)


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
    return tuple(re.findall(r"\s*\S+", read_embedded_text(split)))
