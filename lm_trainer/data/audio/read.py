"""Reads audio: decodes it, and converts it to one channel and one sampling rate.

Shape letters: T samples, C channels.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, ClassVar

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.audio.mel import SAMPLING_RATE

_PACKAGES = "pip install 'lm_trainer[audio]'"


class BadAudio(Exception):
    """Unusable audio. The message gives the reason."""


@dataclass(frozen=True)
class AudioRules:
    """Requirements for audio, and the treatment of audio that does not meet them."""

    rate: ClassVar[int] = SAMPLING_RATE
    """Number of output samples per second."""

    resample: bool = True
    """False rejects audio with another sampling rate."""
    mix_channels: bool = True
    """False rejects audio with several channels."""

    def read(self, source: bytes | BinaryIO, max_seconds: float | None = None) -> np.ndarray:
        """Decodes a file in any format that libsndfile supports (wav, flac, mp3, ogg) to float32 [T].

        Args:
            source: the content of the file, or the open file.
            max_seconds: maximum length in seconds; longer audio is rejected without decoding it.

        Raises:
            BadAudio: if the audio is damaged or empty, or does not meet the requirements.
            UserError: if a package is missing.
        """
        try:
            import soundfile
        except ImportError:
            raise UserError(f"reading audio needs a package; run: {_PACKAGES}") from None
        if source == b"":
            raise BadAudio("the audio file is empty")
        try:
            with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
                _check_length(file.frames / file.samplerate, max_seconds)
                return self.convert_samples(file.read(dtype="float32", always_2d=True), file.samplerate, max_seconds)
        except (soundfile.SoundFileError, ZeroDivisionError) as error:
            reason = getattr(error, "error_string", str(error)).strip().rstrip(".")
            raise BadAudio(f"the audio cannot be decoded: {reason}") from None

    def convert_samples(self, samples: np.ndarray, rate: float, max_seconds: float | None = None) -> np.ndarray:
        """Converts samples [T] or [T, C] to one channel at the output rate. Otherwise like `read`."""
        if not samples.size:
            raise BadAudio("the audio holds no samples")
        if not np.isfinite(samples).all():
            raise BadAudio("the audio holds samples that are no numbers")
        _check_length(len(samples) / rate, max_seconds)
        if samples.ndim == 2 and samples.shape[1] > 1 and not self.mix_channels:
            raise BadAudio(f"the audio has {samples.shape[1]} channels, and data.format.mix_channels is false")
        mono_T = samples if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32)
        if rate == SAMPLING_RATE:
            return mono_T.astype(np.float32, copy=False)
        if not self.resample:
            raise BadAudio(
                f"the audio has {rate:g} samples a second, not {SAMPLING_RATE}, and data.format.resample is false"
            )
        try:
            import soxr
        except ImportError:
            raise UserError(f"audio of another sampling rate needs a package; run: {_PACKAGES}") from None
        return soxr.resample(mono_T.astype(np.float32, copy=False), rate, SAMPLING_RATE)


def _check_length(seconds: float, max_seconds: float | None) -> None:
    if max_seconds is not None and seconds > max_seconds:
        raise BadAudio(f"the audio lasts {seconds:.2f} s, longer than a row of {max_seconds:g} s; cut it into pieces")


def find_samples(value: Mapping[str, object]) -> tuple[np.ndarray, float] | None:
    """Returns the samples and the rate of an object with `array` and `sampling_rate`; None if it has no samples.

    Raises:
        BadAudio: if samples or rate are not valid numbers.
    """
    if value.get("array") is None:
        return None
    try:
        samples = np.asarray(value["array"], np.float32)
    except (ValueError, TypeError):
        samples = np.zeros((0, 0, 0))
    rate = value.get("sampling_rate")
    if samples.ndim not in (1, 2) or isinstance(rate, bool) or not isinstance(rate, int | float) or rate <= 0:
        raise BadAudio("an object with an array of samples needs numbers in it, and a sampling_rate above 0")
    # Arrays with several channels are channels-first in Hugging Face data sets, and channels-last here.
    return (samples.T if samples.ndim == 2 and samples.shape[0] < samples.shape[1] else samples), float(rate)
