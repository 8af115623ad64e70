"""The audio format, for recordings and their transcripts, which train speech models.

Shape letters: T tokens of a document, F frames, M mel channels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expand_home
from lm_trainer.data.audio.augment import SpecAugment
from lm_trainer.data.audio.mel import FRAMES_PER_SECOND, LogMel
from lm_trainer.data.audio.read import AudioRules, BadAudio, find_samples
from lm_trainer.data.formats.base import EncodedDocument, FormatConfig, PreparedRow, TokenIds, UnusableRow
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import json_type_name, replace_surrogates
from lm_trainer.data.tokenizer import HfTokenizer, Tokenizer

START_TOKEN, NO_TIMESTAMPS_TOKEN = "<|startoftranscript|>", "<|notimestamps|>"


class _PreparedAudio(NamedTuple):
    """A row that is ready to be encoded."""

    samples_T: np.ndarray | None
    """float32: samples of the recording; None if features are not cached."""
    text: str
    language: str | None


class AudioFormat(FormatConfig):
    """Every row is a recording with its text, for speech models (`model: {type: whisper}`). A row is one document.

    The recording is given as the bytes or the path of a wav, flac, mp3 or ogg file, as an `Audio` column of Hugging
    Face, or as an object with `array` and `sampling_rate`. The features equal the output of `WhisperFeatureExtractor`.
    """

    type: Literal["audio"] = "audio"
    audio_key: str = "audio"
    """The field with the recording. A path is relative to the file that contains the row."""
    text_key: str = "text"
    """The field with the text. It may be empty for a recording without words."""
    language_key: str | None = None
    """The field with the language of the row, such as `en`; null means that all rows have the language `language`."""
    sampling_rate: Literal[16_000] = 16_000
    """Number of samples per second for the features; other recordings are resampled to this rate."""
    num_mels: int = Field(default=80, gt=0)
    """Number of channels of the log-mel spectrogram; equals `model.num_mels`."""
    seconds: int = Field(default=30, gt=0)
    """Maximum length of a recording in seconds; shorter ones are padded with silence. `model.num_frames` is 100 times
    this number."""
    language: str | None = None
    """The language of all rows, such as `en`, for tokenizers with language tokens; null means no language token."""
    task: Literal["transcribe", "translate"] | None = None
    """The task, for tokenizers with task tokens; null means no task token."""
    timestamps: bool = False
    """True if texts contain timestamps such as `<|1.20|>`, which are encoded as tokens. If False, the prompt ends
    with the no-timestamps token, if the tokenizer has one."""
    prompt: list[str] | None = Field(default=None, min_length=1)
    """Special tokens at the start of every text, instead of the tokens for `language`, `task` and `timestamps`."""
    mask_prompt: bool = True
    """True to exclude the prompt tokens from the loss."""
    resample: bool = True
    """False rejects recordings whose rate is not `sampling_rate`."""
    mix_channels: bool = True
    """False rejects recordings with several channels; true averages the channels."""
    allow_silence: bool = False
    """False rejects recordings that have a text but are silent from beginning to end."""
    features: Literal["cached", "on_the_fly"] = "cached"
    """`cached` computes features once and stores them with the tokens, in 4 bytes x frames x channels, or 0.96 MB for a
    row of 30 s and 80 channels. `on_the_fly` stores no features, and decodes and transforms the recordings for every
    batch, which takes about 50 ms for a row of 30 s on one core of the training machine."""
    spec_augment: SpecAugment | None = None
    """Masks for the training features; null means no masks."""

    has_loss_mask: ClassVar[bool] = True
    adds_bos: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_settings_fit(self) -> Self:
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
        """The transformation from samples to features."""
        return LogMel(*self.features_shape)

    def fields(self) -> tuple[str, ...]:
        return (self.audio_key, self.text_key, *([] if self.language_key is None else [self.language_key]))

    def settings_for_cache(self) -> dict[str, object]:
        return self.model_dump(mode="json", exclude={"spec_augment"})

    def identity(self, tokenizer: Tokenizer) -> dict[str, object] | None:
        # Includes the prompt ids, so that a missing token is reported before any recording is read.
        return {**self.settings_for_cache(), "prompt_ids": self.prompt_ids(tokenizer, self.language)}

    def prompt_ids(self, tokenizer: Tokenizer, language: str | None) -> list[int]:
        """Returns the ids of the prompt tokens that precede the text of a row.

        Raises:
            UserError: if the tokenizer does not have one of the tokens.
        """
        assert isinstance(tokenizer, HfTokenizer)
        special_ids = tokenizer.special_tokens()
        names = self.prompt or self._prompt_names(special_ids, language)
        if not names:
            return [tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id]
        for name in names:
            if name not in special_ids:
                raise UserError(
                    f"data.format: the tokenizer has no special token {name!r}; name another data.tokenizer"
                )
        return [special_ids[name] for name in names]

    def _prompt_names(self, special_ids: Mapping[str, int], language: str | None) -> list[str]:
        names = [f"<|{name}|>" for name in (language, self.task) if name is not None]
        if not names and START_TOKEN not in special_ids:
            return []
        no_stamps = [NO_TIMESTAMPS_TOKEN] if NO_TIMESTAMPS_TOKEN in special_ids and not self.timestamps else []
        return [START_TOKEN, *names, *no_stamps]

    def prepare(self, row: Row) -> PreparedRow:
        record = row.record or {}
        if not record:
            return PreparedRow(None, 0)
        for field in self.fields()[1:]:
            if not isinstance(record[field], str):
                raise UnusableRow(f"the field {field!r} is {json_type_name(record[field])}, not a string")
        text = replace_surrogates(record[self.text_key])
        samples_T = self._read_samples(record[self.audio_key], row.where)
        if text and not self.allow_silence and not samples_T.any():
            raise UnusableRow("the recording is silent from beginning to end, and yet there is a text")
        language = record[self.language_key] if self.language_key else self.language
        size = len(text.encode("utf-8")) + 1
        extra_bytes = 4 * math.prod(self.features_shape) if self.keeps_features else 0
        prepared = _PreparedAudio(samples_T if self.keeps_features else None, text, language)
        return PreparedRow(prepared, size, text is not record[self.text_key], extra_bytes)

    def compute_features(self, row: Row) -> np.ndarray:
        """Computes the features float32 [F, M] of a row that `prepare` has accepted.

        Raises:
            UnusableRow: if the recording can no longer be read.
        """
        return self.log_mel(self._read_samples((row.record or {})[self.audio_key], row.where))

    def _read_samples(self, value: object, row_location: str) -> np.ndarray:
        rules = AudioRules(self.resample, self.mix_channels)
        try:
            if isinstance(value, Mapping):
                if (samples := find_samples(value)) is not None:
                    return self._trim_samples(rules.convert_samples(*samples, self.seconds))
                value = value.get("bytes") or value.get("path")
            if isinstance(value, bytes):
                return self._trim_samples(rules.read(value, self.seconds))
            if not isinstance(value, str):
                raise UnusableRow(
                    f"the field {self.audio_key!r} is {json_type_name(value)}, neither a path nor the bytes of a "
                    "recording"
                )
            import fsspec

            with fsspec.open(_recording_path(value, row_location), "rb") as file:
                return self._trim_samples(rules.read(file.read(), self.seconds))  # pyright: ignore[reportAttributeAccessIssue]
        except BadAudio as error:
            raise UnusableRow(str(error)) from None
        except (OSError, ValueError) as error:
            raise UnusableRow(f"the recording {value} cannot be read: {error}") from None

    def _trim_samples(self, samples_T: np.ndarray) -> np.ndarray:
        # Resampling rounds up, so a recording of exactly the maximum length may have one extra sample.
        return samples_T[: self.log_mel.num_samples]

    def encode(self, values: Sequence[_PreparedAudio], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        assert isinstance(tokenizer, HfTokenizer)
        if self.timestamps:
            texts = [tokenizer.encode_template(row.text)[0] for row in values]
        else:
            texts = list(tokenizer.encode_batch([row.text for row in values]))
        return [self._encode(row, ids, tokenizer) for row, ids in zip(values, texts, strict=True)]

    def _encode(self, row: _PreparedAudio, ids: TokenIds, tokenizer: Tokenizer) -> EncodedDocument | UnusableRow:
        try:
            prompt = self.prompt_ids(tokenizer, row.language)
        except UserError as error:
            # Only this row is unusable, since every row may have another language.
            return UnusableRow(str(error))
        # The model learns to write the end-of-document token even after an empty text.
        ids_T = np.concatenate([prompt, np.asarray(ids, np.int64), [tokenizer.eos_id]]).astype(np.int64)
        mask_T = np.ones(len(ids_T), bool)
        if self.mask_prompt:
            mask_T[: len(prompt)] = False
        features_FM = None if row.samples_T is None else self.log_mel(row.samples_T)
        return EncodedDocument(ids_T, mask_T, features_FM)


def _recording_path(path: str, row_location: str) -> str:
    """Resolves the path of a recording relative to the file that contains the row.

    Raises:
        UnusableRow: if a remote row refers to a file on this machine.
    """
    origin, scheme = (text.partition("://")[0] if "://" in text else "" for text in (row_location, path))
    if origin not in ("", "file") and (
        scheme not in ("", "http", "https", origin) or "::" in path or os.path.isabs(expand_home(path))
    ):
        raise UnusableRow(f"it names the recording {path}, which a list from elsewhere may not: only what is there too")
    if "://" in path or os.path.isabs(expand_home(path)):
        return expand_home(path)
    listing, colon, number = row_location.rpartition(":")
    if colon and number.isdigit():
        folder, slash, _ = listing.rpartition("/")
        return f"{folder}{slash}{path}"
    return str(Path(path))
