"""A source of Morse code: sound synthesised on the fly from words of the embedded corpus."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from lm_trainer.data.audio.mel import SAMPLING_RATE
from lm_trainer.data.audio.morse import MorseVoice, num_time_units
from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split, read_record
from lm_trainer.data.sources.generated import GeneratedShard, read_embedded_text

_LEAD_SECONDS = 0.1


class Morse(SourceConfig):
    """Texts in Morse code, each with a random speed, pitch and noise level, and their transcripts.

    A model can only write the text by listening. For use with `data.format: {type: audio}`.
    """

    type: Literal["morse"] = "morse"
    rows: int = Field(default=4096, ge=1)
    """Number of training rows."""
    validation_rows: int = Field(default=256, ge=0)
    """Number of validation rows, whose texts differ from the training rows'."""
    max_chars: int = Field(default=8, ge=1)
    """Maximum length of a text in characters."""
    seconds: float = Field(default=2.0, gt=0)
    """Maximum length of the sound in seconds; longer texts are left out."""
    unit_seconds: tuple[float, float] = (0.022, 0.034)
    """Minimum and maximum length of a dot in seconds."""
    pitch: tuple[float, float] = (400.0, 1000.0)
    """Minimum and maximum pitch in Hz."""
    noise: tuple[float, float] = (0.05, 0.4)
    """Minimum and maximum standard deviation of the noise; tones have an amplitude of 1."""
    signal: bool = True
    """False omits the tones, so that the same texts have the same noise without any signal. The result is a baseline
    for a model that does not listen."""
    seed: int = Field(default=0, ge=0)
    """Seed for drawing texts and sounds."""

    takes_urls: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        for name in ("unit_seconds", "pitch", "noise"):
            low, high = getattr(self, name)
            if not 0 <= low <= high or (name != "noise" and low == 0):
                raise ValueError(f"{name}: {low:g} to {high:g} is no range of values above 0 that rises")
        if self.seconds < num_time_units("aaaa") * self.unit_seconds[1] + _LEAD_SECONDS:
            raise ValueError(f"seconds: in {self.seconds:g} s there is no time for a word; raise it")
        return self

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls, text_key
        return [*MorseShard.make_all(self, split, fields)]

    @property
    def voice(self) -> MorseVoice:
        return MorseVoice(self.unit_seconds, self.pitch, self.noise)

    def is_short_enough(self, text: str) -> bool:
        """Returns True if a text is short enough even at the lowest speed."""
        longest = num_time_units(text) * self.unit_seconds[1] + _LEAD_SECONDS
        return len(text) <= self.max_chars and longest <= self.seconds


@dataclass(frozen=True)
class MorseShard(GeneratedShard):
    """The rows [start, stop) of a split."""

    source: Morse

    @property
    def size(self) -> int:
        return int((self.stop - self.start) * self.source.seconds * SAMPLING_RATE * 2)

    def corpus(self) -> str:
        return " ".join(_read_words(self.split))

    def make_row(self, index: int, rng: np.random.Generator) -> Row | BadRow:
        del index
        source = self.source
        text = _draw_text(source, _read_words(self.split), rng)
        samples = source.voice.speak(text, SAMPLING_RATE, rng, signal=source.signal)
        record = {"audio": {"array": samples, "sampling_rate": SAMPLING_RATE}, "text": text}
        named = dict(zip(self.fields, record.values(), strict=False)) if self.fields else record
        return read_record(named, "text", self.fields)


def _draw_text(source: Morse, words: tuple[str, ...], rng: np.random.Generator) -> str:
    """Draws as many consecutive words as fit."""
    while True:
        index = int(rng.integers(len(words)))
        text, longer = words[index], words[index]
        while source.is_short_enough(longer):
            text, index = longer, (index + 1) % len(words)
            longer = f"{text} {words[index]}"
        if source.is_short_enough(text):
            return text


@lru_cache(maxsize=2)
def _read_words(split: Split) -> tuple[str, ...]:
    """Returns all words of a part of the embedded corpus, in order."""
    return tuple(re.findall(r"[a-z0-9]+", read_embedded_text(split).lower()))
