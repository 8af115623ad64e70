"""The batch: the one shape of data from the loader through the step into the model.

Shape letters: B rows (examples), S positions in a row, F frames of audio, M mel channels.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

Array = np.ndarray | jax.Array


class Batch(NamedTuple):
    """Rows of tokens with everything a causal language model needs to train on them.

    Packed, padded and plain rows share this shape, and so one code path.
    """

    tokens: Array
    """int32 [B, S]: the inputs."""
    targets: Array
    """int32 [B, S]: the token that follows each input."""
    weights: Array
    """float32 [B, S]: 1 where the target counts in the loss, 0 for padding and across document ends."""
    positions: Array
    """int32 [B, S]: position inside the document, from 0."""
    segments: Array
    """int32 [B, S]: which document of the row; attention never crosses segments. -1 is padding."""
    features: Array | None = None
    """float32 [B, F, M]: the log-mel spectrogram that an encoder hears; None where rows are text alone, and then no
    program has such an argument. Code that goes over the arrays of a batch uses `jax.tree.map`, which skips it."""
