"""Transcription of recordings of any length, window by window, and output as text, JSON, SRT or WebVTT.

Shape letters: F frames of a recording, M mel channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.audio.mel import FRAMES_PER_SECOND, LogMel
from lm_trainer.data.audio.read import AudioRules, BadAudio
from lm_trainer.generate.speech import detect_languages, transcribe_features
from lm_trainer.generate.speech_rules import SpeechRules

if TYPE_CHECKING:
    from lm_trainer.data.tokenizer import Tokenizer
    from lm_trainer.export.huggingface import TextModel

STAMP_SECONDS = 0.02
"""Seconds between consecutive timestamps of the vocabulary."""
_FRAMES_PER_STAMP = 2


class Segment(NamedTuple):
    """A segment of a recording."""

    start: float
    """Start in seconds from the beginning of the recording."""
    end: float
    text: str
    tokens: list[int]
    """Tokens with timestamps, without the end token."""


@dataclass(frozen=True)
class Transcript:
    """The text of a recording."""

    file: str
    seconds: float
    language: str | None
    """Name of the language as in the model's language tokens; None for a model without languages."""
    text: str
    segments: list[Segment]


@dataclass(frozen=True, kw_only=True)
class TranscribeSettings:
    """Settings of a transcription."""

    language: str | None = None
    task: str | None = None
    timestamps: bool = False
    max_new_tokens: int | None = None
    """Maximum number of new tokens per window; None: as many as the context allows."""
    beams: int = 1
    """Number of beams; 1: greedy decoding."""


class Transcriber:
    """Transcribes recordings. Generates the same tokens as `generate` of transformers.

    Args:
        source: the model.
        settings: the settings.
        devices: devices to shard the model over; None: all devices of this process.

    Raises:
        UserError: for a model without audio input, or without a feature that the settings request.
    """

    def __init__(self, source: TextModel, settings: TranscribeSettings, devices: Sequence[Any] | None = None):
        config: Any = source.config
        if config.features_shape is None:
            raise UserError(f"{source.name} reads text and hears nothing; transcribe needs a model of type whisper")
        self._tokenizer: Tokenizer = source.tokenizer
        self._settings, (self._frames, self._mels) = settings, config.features_shape
        self._rules = SpeechRules.from_config(
            config.generation_config, start_id=config.decoder_start_token_id, eos_id=source.tokenizer.eos_id
        )
        # Called only for its errors, before the weights are placed on devices.
        self._rules.prompt_tokens(settings.language, settings.task, timestamps=settings.timestamps)
        self._rules.check_beams(settings.beams)
        self._model: Any = source.build(devices)

    def transcribe(self, path: Path) -> Transcript:
        """Transcribes a recording.

        A recording longer than the model's input is split into windows. Each window begins at the last timestamp of the
        previous window (Radford et al. 2022, section 3.8), or at its end if there are no timestamps.

        Raises:
            UserError: for a file that is missing, damaged or empty.
        """
        samples_T = read_recording(path)
        features_FM = self._extract_features(samples_T)
        stamps = self._settings.timestamps or (len(features_FM) > self._frames and self._rules.has_timestamps)
        prompt, language = self._choose_prompt(features_FM, stamps)
        segments, seek = list[Segment](), 0
        while seek < len(features_FM):
            frames = min(len(features_FM) - seek, self._frames)
            window_FM = np.zeros((self._frames, self._mels), np.float32)
            window_FM[:frames] = features_FM[seek : seek + frames]
            (tokens,) = transcribe_features(
                self._model,
                window_FM[None],
                self._rules,
                prompt=prompt,
                timestamps=stamps,
                max_new_tokens=self._settings.max_new_tokens,
                beams=self._settings.beams,
            )
            window_segments, frames_done = self._split_window(tokens, seek, frames, stamps)
            segments += window_segments
            seek += frames_done
        seconds = len(samples_T) / AudioRules.rate
        segments = [segment._replace(end=min(segment.end, seconds)) for segment in segments if segment.start <= seconds]
        text = (
            "".join(segment.text for segment in segments) if stamps else " ".join(segment.text for segment in segments)
        )
        return Transcript(str(path), seconds, language, text.strip(), segments)

    def _extract_features(self, samples_T: np.ndarray) -> np.ndarray:
        """Computes the features of a full recording, float32 [F, M]. Only a short recording is padded with silence."""
        frames = max(self._frames, len(samples_T) * FRAMES_PER_SECOND // AudioRules.rate)
        return LogMel(frames, self._mels)(samples_T)

    def _choose_prompt(self, features_FM: np.ndarray, stamps: bool) -> tuple[list[int], str | None]:
        """Returns the tokens before every text, and the language, which by default is detected in the first window."""
        settings, rules = self._settings, self._rules
        prompt = rules.prompt_tokens(settings.language, settings.task, timestamps=stamps)
        if None in prompt:
            (language_id,) = detect_languages(self._model, features_FM[None, : self._frames], rules)
            prompt = [language_id if token is None else token for token in prompt]
        names = {token: name.strip("<|>") for name, token in rules.languages.items()}
        language = next((names[token] for token in prompt if token in names), None)
        return [token for token in prompt if token is not None], language

    def _split_window(self, tokens: list[int], seek: int, frames: int, stamps: bool) -> tuple[list[Segment], int]:
        """Returns the segments of a window, and the number of frames to the start of the next window."""
        ids = tokens[:-1] if tokens and tokens[-1] == self._rules.eos_id else tokens
        # Timestamps that were not requested follow no rules, and might not advance.
        pieces, frames_done = split_at_stamps(ids, self._rules.first_stamp if stamps else None, frames)
        offset = seek / FRAMES_PER_SECOND
        return [self._make_segment(offset + start, offset + end, piece) for start, end, piece in pieces], frames_done

    def _make_segment(self, start: float, end: float, ids: list[int]) -> Segment:
        first = self._rules.first_stamp
        words = [token for token in ids if first is None or token < first]
        return Segment(start, end, self._tokenizer.decode(words), ids)


def split_at_stamps(
    ids: list[int], first_stamp: int | None, frames: int
) -> tuple[list[tuple[float, float, list[int]]], int]:
    """Splits the tokens of a window at pairs of timestamps.

    Args:
        ids: tokens of the window without the end token.
        first_stamp: the token of 0 s; None: no timestamps.
        frames: number of audio frames in the window.

    Returns:
        (start, end, tokens) of each segment, in seconds from the start of the window, and the number of completed
        frames. If the window ends within a segment, the next window repeats that segment from its beginning; otherwise
        all frames are completed.
    """
    is_stamp = [first_stamp is not None and token >= first_stamp for token in ids]
    ends_with_single_stamp = is_stamp[-2:] == [False, True]
    cuts = [index + 1 for index in range(len(ids) - 1) if is_stamp[index] and is_stamp[index + 1]]
    first = first_stamp or 0
    if not cuts:
        last = next((token for token, stamp in zip(ids[::-1], is_stamp[::-1], strict=True) if stamp), first)
        end = (last - first) * STAMP_SECONDS if last != first else frames / FRAMES_PER_SECOND
        return ([(0.0, end, ids)] if ids else []), frames
    if ends_with_single_stamp:
        cuts.append(len(ids))
    pieces = []
    for begin, stop in zip([0, *cuts[:-1]], cuts, strict=True):
        piece = ids[begin:stop]
        pieces.append(((piece[0] - first) * STAMP_SECONDS, (piece[-1] - first) * STAMP_SECONDS, piece))
    return pieces, frames if ends_with_single_stamp else (ids[cuts[-1] - 1] - first) * _FRAMES_PER_STAMP


def read_recording(path: Path) -> np.ndarray:
    """Reads a file as float32 samples of one channel, 16,000 per second.

    Raises:
        UserError: for a file that is missing, damaged or empty.
    """
    try:
        return AudioRules().read(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except BadAudio as error:
        raise UserError(f"{path}: {error}") from None


def as_json(transcript: Transcript) -> dict[str, Any]:
    """Returns the content of a JSON file."""
    return {**asdict(transcript), "segments": [segment._asdict() for segment in transcript.segments]}


def as_srt(transcript: Transcript) -> str:
    """Returns the content of an SRT file."""
    blocks = [
        f"{number}\n{_format_clock(segment.start, ',')} --> {_format_clock(segment.end, ',')}\n{segment.text.strip()}\n"
        for number, segment in enumerate(transcript.segments, 1)
    ]
    return "\n".join(blocks)


def as_vtt(transcript: Transcript) -> str:
    """Returns the content of a WebVTT file."""
    # An arrow in the text would begin another cue.
    blocks = [
        f"{_format_clock(segment.start, '.')} --> {_format_clock(segment.end, '.')}\n"
        f"{segment.text.strip().replace('-->', '->')}\n"
        for segment in transcript.segments
    ]
    return "\n".join(["WEBVTT\n", *blocks])


def _format_clock(seconds: float, point: str) -> str:
    whole_seconds, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole_seconds // 3600:02}:{whole_seconds // 60 % 60:02}:{whole_seconds % 60:02}{point}{thousandths:03}"
