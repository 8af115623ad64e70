"""Log-mel spectrograms, equal to the output of transformers' `WhisperFeatureExtractor`.

Shape letters: T samples, F frames of a row, N frames that hold samples, W samples of a window, K frequencies, M mel
channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import scipy.sparse

SAMPLING_RATE = 16_000
"""Number of samples per second of all transformed audio."""
FRAMES_PER_SECOND = 100
_HOP, _WINDOW = SAMPLING_RATE // FRAMES_PER_SECOND, 400
"""Number of samples between the beginnings of consecutive frames, and number of samples per frame."""

_FLOOR = 1e-10
_BLOCK = 4096
"""Number of frames to transform at a time."""
_RANGE = 8.0
"""Dynamic range in powers of ten. Values that are further below the maximum of a row are clipped."""

# Slaney's scale is linear up to 1000 Hz, and logarithmic above.
_LINEAR_HZ, _LINEAR_MELS, _LOG_STEP = 1000.0, 15.0, np.log(6.4) / 27.0


@dataclass(frozen=True)
class LogMel:
    """Transforms samples into frames of mel channels."""

    num_frames: int
    """F, the number of frames. Shorter audio is padded with zeros, which become frames like any other samples."""
    num_mels: int
    """M, the number of mel channels."""

    @property
    def num_samples(self) -> int:
        """Maximum number of samples of a row."""
        return self.num_frames * _HOP

    def __call__(self, samples_T: np.ndarray) -> np.ndarray:
        """Transforms at most `num_samples` samples in [-1, 1] to float32 [F, M]."""
        import scipy.fft

        padded = np.zeros(max(self.num_samples, len(samples_T)))
        padded[: len(samples_T)] = samples_T
        padded = np.pad(padded, _WINDOW // 2, mode="reflect")
        # Frames after the last sample are silent, so they skip the transform.
        num_audible = min(self.num_frames, (len(samples_T) + _WINDOW // 2) // _HOP + 1)
        windows_NW = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP][:num_audible]
        log_FM = np.full((self.num_frames, self.num_mels), np.log10(_FLOOR))
        # Works block by block, since windows overlap, and all windows of a long recording would not fit in memory.
        for start in range(0, num_audible, _BLOCK):
            block = slice(start, min(start + _BLOCK, num_audible))
            spectrum_NK: Any = scipy.fft.rfft(windows_NW[block] * _hann_window())
            power_KN = np.ascontiguousarray((spectrum_NK.real**2 + spectrum_NK.imag**2).T)
            # The filters are sparse, so each channel sums a few frequencies, in the same order with any BLAS library.
            log_FM[block] = np.log10(np.maximum(_mel_filters(self.num_mels) @ power_KN, _FLOOR)).T
        return ((np.maximum(log_FM, log_FM.max() - _RANGE) + 4.0) / 4.0).astype(np.float32)


@lru_cache(maxsize=1)
def _hann_window() -> np.ndarray:
    """Returns the periodic Hann window, [W]."""
    return np.hanning(_WINDOW + 1)[:-1]


@lru_cache(maxsize=8)
def _mel_filters(num_mels: int) -> scipy.sparse.csr_array:
    """Returns triangular filters [M, K] over the frequencies, all with the same area (Slaney's norm)."""
    import scipy.sparse

    corners = _mels_to_hertz(np.linspace(0.0, float(_hertz_to_mels(np.array([SAMPLING_RATE / 2]))[0]), num_mels + 2))
    frequencies = np.linspace(0, SAMPLING_RATE / 2, 1 + _WINDOW // 2)
    slopes = corners[:, None] - frequencies[None]
    rising, falling = -slopes[:-2] / np.diff(corners)[:-1, None], slopes[2:] / np.diff(corners)[1:, None]
    triangles_MK = np.maximum(0.0, np.minimum(rising, falling))
    return scipy.sparse.csr_array(triangles_MK * (2.0 / (corners[2:] - corners[:-2]))[:, None])


def _hertz_to_mels(hertz: np.ndarray) -> np.ndarray:
    above = _LINEAR_MELS + np.log(np.maximum(hertz, _LINEAR_HZ) / _LINEAR_HZ) / _LOG_STEP
    return np.where(hertz < _LINEAR_HZ, hertz * _LINEAR_MELS / _LINEAR_HZ, above)


def _mels_to_hertz(mels: np.ndarray) -> np.ndarray:
    above = _LINEAR_HZ * np.exp(_LOG_STEP * (np.maximum(mels, _LINEAR_MELS) - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels * _LINEAR_HZ / _LINEAR_MELS, above)
