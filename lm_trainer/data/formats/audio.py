"""Audio format: recordings, and the texts that a model writes when it hears them.

Shape letters: T tokens of a document, F frames, M mel channels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expanded
from lm_trainer.data.audio.augment import SpecAugment
from lm_trainer.data.audio.mel import FRAMES_PER_SECOND, LogMel
from lm_trainer.data.audio.read import AudioRules, BadAudio, samples_in
from lm_trainer.data.formats.base import EncodedDocument, FormatConfig, PreparedRow, UnusableRow
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import kind_of, replace_surrogates
from lm_trainer.data.tokenizer import HfTokenizer, Tokenizer

START_TOKEN, NO_TIMESTAMPS_TOKEN = "<|startoftranscript|>", "<|notimestamps|>"


class _Heard(NamedTuple):
    """A row that is ready to be encoded."""

    samples_T: np.ndarray | None
    """None where features are not kept."""
    text: str
    language: str | None


class AudioFormat(FormatConfig):
    """Every row is a recording and its text, for models that hear (`model: {type: whisper}`); one row, one document.

    The recording is a file of wav, flac, mp3 or ogg: its bytes, its path, an `Audio` column of Hugging Face, or an
    object of `array` and `sampling_rate`. Features are those of `WhisperFeatureExtractor`.
    """

    type: Literal["audio"] = "audio"
    audio_key: str = "audio"
    """The field with the recording. A path in it is relative to the file that the row is in."""
    text_key: str = "text"
    """The field with the text. An empty one says that there is nothing to write."""
    language_key: str | None = None
    """The field with the language of the row, such as `en`; null: `language` is that of all."""
    sampling_rate: Literal[16_000] = 16_000
    """Samples a second that features are made of; recordings of another rate are brought to it."""
    num_mels: int = Field(default=80, gt=0)
    """Channels of the log-mel spectrogram; `model.num_mels`."""
    seconds: int = Field(default=30, gt=0)
    """The longest recording; shorter ones are filled up with silence. `model.num_frames` is this times 100."""
    language: str | None = None
    """The language of all rows, such as `en`, for tokenizers that have tokens of languages; null: none is written."""
    task: Literal["transcribe", "translate"] | None = None
    """The task, for tokenizers that have tokens of tasks; null: none is written."""
    timestamps: bool = False
    """True if texts hold timestamps such as `<|1.20|>`, which are read as tokens. Else the token that says that there
    are none is written, where the tokenizer has it."""
    prompt: list[str] | None = Field(default=None, min_length=1)
    """Special tokens that every text begins with, in place of those that `language`, `task` and `timestamps` make."""
    mask_prompt: bool = True
    """True to leave the tokens of the prompt out of the loss."""
    resample: bool = True
    """False refuses recordings of another rate than `sampling_rate`."""
    mix_channels: bool = True
    """False refuses recordings of several channels; else their mean is heard."""
    allow_silence: bool = False
    """False refuses recordings that are silent from beginning to end and have a text."""
    features: Literal["cached", "on_the_fly"] = "cached"
    """`cached` computes features once and keeps them beside the tokens: 4 bytes x frames x channels, 0.96 MB for a row
    of 30 s and 80 channels. `on_the_fly` keeps nothing, and decodes and transforms the recordings of each batch again:
    some 50 ms for a row of 30 s, on a core of the machine that trains."""
    spec_augment: SpecAugment | None = None
    """Masks over the features of training; null: none."""

    has_loss_mask: ClassVar[bool] = True
    adds_bos: ClassVar[bool] = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = self.fields()
        if len(set(names)) < len(names):
            raise ValueError(f"audio_key, text_key and language_key name one field twice ({', '.join(names)})")
        if self.prompt is not None and (self.language or self.language_key or self.task):
            raise ValueError("prompt names all tokens before the text; remove it, or language, language_key and task")
        if self.language is not None and self.language_key is not None:
            raise ValueError("language and language_key both say the language; remove one")
        return self

    @property
    def features_shape(self) -> tuple[int, int]:
        return self.seconds * FRAMES_PER_SECOND, self.num_mels

    @property
    def keeps_features(self) -> bool:
        return self.features == "cached"

    @property
    def log_mel(self) -> LogMel:
        """The transformation of samples into features."""
        return LogMel(*self.features_shape)

    def fields(self) -> tuple[str, ...]:
        return (self.audio_key, self.text_key, *([] if self.language_key is None else [self.language_key]))

    def cached_settings(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"spec_augment"})

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        # Asked for here, so that a token that is missing is found before any recording is read.
        return {**self.cached_settings(), "prompt_ids": self.prompt_ids(tokenizer, self.language)}

    def prompt_ids(self, tokenizer: Tokenizer, language: str | None) -> list[int]:
        """The tokens before the text of a row.

        Raises:
            UserError: for one that the tokenizer lacks.
        """
        assert isinstance(tokenizer, HfTokenizer)
        known = tokenizer.special_tokens()
        names = self.prompt or self._names(known, language)
        if not names:
            return [tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id]
        for name in names:
            if name not in known:
                raise UserError(
                    f"data.format: the tokenizer has no special token {name!r}; name another data.tokenizer"
                )
        return [known[name] for name in names]

    def _names(self, known: Mapping[str, int], language: str | None) -> list[str]:
        names = [f"<|{name}|>" for name in (language, self.task) if name is not None]
        if not names and START_TOKEN not in known:
            return []
        no_stamps = [NO_TIMESTAMPS_TOKEN] if NO_TIMESTAMPS_TOKEN in known and not self.timestamps else []
        return [START_TOKEN, *names, *no_stamps]

    def prepare(self, row: Row) -> PreparedRow:
        record = row.record or {}
        if not record:
            return PreparedRow(None, 0)
        for field in self.fields()[1:]:
            if not isinstance(record[field], str):
                raise UnusableRow(f"the field {field!r} is {kind_of(record[field])}, not a string")
        text = replace_surrogates(record[self.text_key])
        samples_T = self._samples(record[self.audio_key], row.where)
        if text and not self.allow_silence and not samples_T.any():
            raise UnusableRow("the recording is silent from beginning to end, and yet there is a text")
        language = record[self.language_key] if self.language_key else self.language
        size = len(text.encode("utf-8")) + 1
        beside = 4 * math.prod(self.features_shape) if self.keeps_features else 0
        heard = _Heard(samples_T if self.keeps_features else None, text, language)
        return PreparedRow(heard, size, text is not record[self.text_key], beside)

    def hear(self, row: Row) -> np.ndarray:
        """Computes the features float32 [F, M] of a row that `prepare` accepts.

        Raises:
            UnusableRow: if its recording cannot be read any more.
        """
        return self.log_mel(self._samples((row.record or {})[self.audio_key], row.where))

    def _samples(self, value: Any, where: str) -> np.ndarray:
        rules = AudioRules(self.resample, self.mix_channels)
        try:
            if isinstance(value, Mapping):
                if (found := samples_in(value)) is not None:
                    return self._checked(rules.of_samples(*found, self.seconds))
                value = value.get("bytes") or value.get("path")
            if isinstance(value, bytes):
                return self._checked(rules.read(value, self.seconds))
            if not isinstance(value, str):
                raise UnusableRow(
                    f"the field {self.audio_key!r} is {kind_of(value)}, neither a path nor the bytes of a recording"
                )
            import fsspec

            with fsspec.open(_beside(value, where), "rb") as file:
                return self._checked(rules.read(file.read(), self.seconds))  # pyright: ignore[reportAttributeAccessIssue]
        except BadAudio as error:
            raise UnusableRow(str(error)) from None
        except (OSError, ValueError) as error:
            raise UnusableRow(f"the recording {value} cannot be read: {error}") from None

    def _checked(self, samples_T: np.ndarray) -> np.ndarray:
        # Resampling rounds up, and makes a sample too many of a recording that fills the row.
        return samples_T[: self.log_mel.num_samples]

    def encode(self, values: Sequence[Any], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        assert isinstance(tokenizer, HfTokenizer)
        heard: Sequence[_Heard] = values
        if self.timestamps:
            texts: list[Any] = [tokenizer.encode_template(each.text)[0] for each in heard]
        else:
            texts = list(tokenizer.encode_batch([each.text for each in heard]))
        return [self._encode(each, ids, tokenizer) for each, ids in zip(heard, texts, strict=True)]

    def _encode(self, heard: _Heard, ids: Any, tokenizer: Tokenizer) -> EncodedDocument | UnusableRow:
        try:
            prompt = self.prompt_ids(tokenizer, heard.language)
        except UserError as error:
            # Of a row by itself, since its language is its own.
            return UnusableRow(str(error))
        # With its end, which is learnt even after no text at all.
        ids_T = np.concatenate([prompt, np.asarray(ids, np.int64), [tokenizer.eos_id]]).astype(np.int64)
        mask_T = np.ones(len(ids_T), bool)
        if self.mask_prompt:
            mask_T[: len(prompt)] = False
        features_FM = None if heard.samples_T is None else self.log_mel(heard.samples_T)
        return EncodedDocument(ids_T, mask_T, features_FM)


def _beside(path: str, where: str) -> str:
    """The place of a recording that a row names: a relative path begins where the file with the row lies.

    Raises:
        UnusableRow: for a row from elsewhere that names a file of this machine.
    """
    origin, scheme = (text.partition("://")[0] if "://" in text else "" for text in (where, path))
    if origin not in ("", "file") and (
        scheme not in ("", "http", "https", origin) or "::" in path or os.path.isabs(expanded(path))
    ):
        raise UnusableRow(f"it names the recording {path}, which a list from elsewhere may not: only what is there too")
    if "://" in path or os.path.isabs(expanded(path)):
        return expanded(path)
    listing, colon, number = where.rpartition(":")
    if colon and number.isdigit():
        folder, slash, _ = listing.rpartition("/")
        return f"{folder}{slash}{path}"
    return str(Path(path))
