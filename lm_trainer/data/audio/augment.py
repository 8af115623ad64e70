"""SpecAugment (Park et al. 2019), which masks runs of frames and bands of channels in the features.

Shape letters: B rows, F frames, M mel channels.
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from lm_trainer.core.config import Config

_STREAM = 0x5BEC
"""Constant that distinguishes these random draws from others with the same seed."""


class SpecAugment(Config):
    """Masks over training features. They are drawn for each row at each step, from (seed, step, row) only."""

    time_masks: int = Field(default=2, ge=0)
    """Number of masked runs of frames per row."""
    time_width: int = Field(default=40, ge=1)
    """Maximum length of a run in frames. Each length is drawn from 0 to this number."""
    channel_masks: int = Field(default=2, ge=0)
    """Number of masked bands of mel channels per row."""
    channel_width: int = Field(default=10, ge=1)
    """Maximum width of a band in channels. Each width is drawn from 0 to this number."""

    def apply(self, features_BFM: np.ndarray, seed: int, positions_B: np.ndarray) -> np.ndarray:
        """Returns a copy with masked values set to 0, as in `transformers`.

        Args:
            features_BFM: float32 [B, F, M], the features.
            seed: seed of the run.
            positions_B: number of each row in the run, counted over all steps.
        """
        masked_BFM = features_BFM.copy()
        for row_FM, position in zip(masked_BFM, positions_B.tolist(), strict=True):
            frames = (0, self.time_masks, self.time_width)
            channels = (1, self.channel_masks, self.channel_width)
            draws = np.random.Generator(np.random.Philox(key=(seed, position), counter=_STREAM))
            for axis, count, widest in (frames, channels):
                length = row_FM.shape[axis]
                for _ in range(count):
                    width = int(draws.integers(0, min(widest, length) + 1))
                    start = int(draws.integers(0, length - width + 1))
                    row_FM.swapaxes(0, axis)[start : start + width] = 0
        return masked_BFM
