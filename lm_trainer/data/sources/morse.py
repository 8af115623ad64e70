"""Morse code as a source: sound made on the spot from words that every Python carries."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lm_trainer.data.audio.mel import SAMPLING_RATE
from lm_trainer.data.audio.morse import MorseVoice, units_of
from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split, read_record
from lm_trainer.data.sources.embedded import Embedded

_SHARD_ROWS = 1024
_CORPUS_BYTES = 4 << 20
_LEAD_SECONDS = 0.1


class Morse(SourceConfig):
    """Words in Morse code, at a speed, pitch and loudness of their own and in noise, and the text to write.

    A model has to listen in order to write them. For `data.format: {type: audio}`.
    """

    type: Literal["morse"] = "morse"
    rows: int = Field(default=4096, ge=1)
    """Rows to train on."""
    validation_rows: int = Field(default=256, ge=0)
    """Rows to evaluate on, of other texts."""
    max_chars: int = Field(default=8, ge=1)
    """The longest text."""
    seconds: float = Field(default=2.0, gt=0)
    """The longest sound; texts that may take longer are left out."""
    unit_seconds: tuple[float, float] = (0.022, 0.034)
    """The least and the greatest length of a dot."""
    pitch: tuple[float, float] = (400.0, 1000.0)
    """The lowest and the highest tone, in Hz."""
    noise: tuple[float, float] = (0.05, 0.4)
    """The least and the greatest standard deviation of the noise, where a tone has the amplitude 1."""
    signal: bool = True
    """False leaves the tones out: the same texts in the same noise, and nothing to hear. What a model reaches with this
    is what it knows without listening."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draws of texts and sounds."""

    takes_urls: ClassVar[bool] = False

    @model_validator(mode="after")
    def _ranges_rise(self) -> Self:
        for name in ("unit_seconds", "pitch", "noise"):
            low, high = getattr(self, name)
            if not 0 <= low <= high or (name != "noise" and low == 0):
                raise ValueError(f"{name}: {low:g} to {high:g} is no range of values above 0 that rises")
        if self.seconds < units_of("aaaa") * self.unit_seconds[1] + _LEAD_SECONDS:
            raise ValueError(f"seconds: in {self.seconds:g} s there is no time for a word; raise it")
        return self

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls, text_key
        count = self.rows if split == "train" else self.validation_rows
        return [
            MorseShard(self, split, start, min(start + _SHARD_ROWS, count), fields)
            for start in range(0, count, _SHARD_ROWS)
        ]

    @property
    def voice(self) -> MorseVoice:
        return MorseVoice(self.unit_seconds, self.pitch, self.noise)

    def fits(self, text: str) -> bool:
        """Tells if a text is short enough, however slowly it is keyed."""
        longest = units_of(text) * self.unit_seconds[1] + _LEAD_SECONDS
        return len(text) <= self.max_chars and longest <= self.seconds


@dataclass(frozen=True)
class MorseShard:
    """The rows [start, stop) of a split."""

    source: Morse
    split: Split
    start: int
    stop: int
    fields: tuple[str, ...]

    @property
    def size(self) -> int:
        return int((self.stop - self.start) * self.source.seconds * SAMPLING_RATE * 2)

    @property
    def text_size(self) -> None:
        return None

    def identity(self) -> dict[str, Any]:
        words = hashlib.sha256(" ".join(_words(self.split)).encode()).hexdigest()
        settings = self.source.model_dump(mode="json", exclude={"rows", "validation_rows"})
        return {
            **settings,
            "split": self.split,
            "rows": [self.start, self.stop],
            "fields": list(self.fields),
            "sha256": words,
        }

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        for number in range(start, self.stop - self.start):
            record = self._record(self.start + number)
            named = dict(zip(self.fields, record.values(), strict=False)) if self.fields else record
            row = read_record(named, "text", self.fields)
            yield row._replace(number=number, where=f"data.source.{self.split}[{self.start + number}]")

    def _record(self, row: int) -> dict[str, Any]:
        source = self.source
        # Each row by its own number: any of them can be made alone.
        rng = np.random.Generator(np.random.Philox(key=(source.seed, 2 * row + (self.split == "validation"))))
        text = _draw_text(source, _words(self.split), rng)
        samples = source.voice.speak(text, SAMPLING_RATE, rng, signal=source.signal)
        return {"audio": {"array": samples, "sampling_rate": SAMPLING_RATE}, "text": text}


def _draw_text(source: Morse, words: tuple[str, ...], rng: np.random.Generator) -> str:
    """Takes words that follow one another, as many as fit."""
    while True:
        at = int(rng.integers(len(words)))
        text, longer = words[at], words[at]
        while source.fits(longer):
            text, at = longer, (at + 1) % len(words)
            longer = f"{text} {words[at]}"
        if source.fits(text):
            return text


@lru_cache(maxsize=2)
def _words(split: Split) -> tuple[str, ...]:
    """All words of a part of the embedded corpus, in order."""
    shards = Embedded(max_bytes=_CORPUS_BYTES).shards(split)
    text = "\n".join(row.text for shard in shards for row in shard.rows() if isinstance(row, Row))
    return tuple(re.findall(r"[a-z0-9]+", text.lower()))
