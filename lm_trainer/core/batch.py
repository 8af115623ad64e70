"""The batch, which is the data structure that the loader passes through the training step to the model.

Shape letters: B rows (examples), S positions in a row, F frames of audio, M mel channels.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from lm_trainer.core.html_table import html_table

Array = np.ndarray | jax.Array


class Batch(NamedTuple):
    """Rows of tokens with everything a causal language model needs to train on them.

    Packed, padded and plain rows use the same structure, and therefore the same code path.
    """

    tokens: Array
    """int32 [B, S]: the inputs."""
    targets: Array
    """int32 [B, S]: the token that follows each input."""
    weights: Array
    """float32 [B, S]: 1 where the target counts in the loss, 0 for padding and across document ends."""
    positions: Array
    """int32 [B, S]: position within the document, from 0."""
    segments: Array
    """int32 [B, S]: index of the document within the row. Attention never crosses segments. -1 is padding."""
    features: Array | None = None
    """float32 [B, F, M]: the log-mel spectrogram for an audio encoder; None for text-only rows, whose programs have no
    such argument. Code that iterates over the arrays of a batch uses `jax.tree.map`, which skips None."""
    frozen: dict[str, Array] | None = None
    """Values of a frozen model, such as a reference or a teacher, at each position, by name: [B, S, ...]. None unless
    they were computed before training (`loss.precompute`)."""

    def _repr_html_(self) -> str:
        """Returns shape, dtype and range of each array, for a notebook. Waits for arrays on a device."""
        named = {**self._asdict(), "frozen": None, **{f"frozen.{name}": x for name, x in (self.frozen or {}).items()}}
        arrays = {name: np.asarray(x) for name, x in named.items() if x is not None}
        rows = [
            (name, list(x.shape), x.dtype, f"{x.min():g} to {x.max():g}" if x.size else "empty")
            for name, x in arrays.items()
        ]
        return html_table(rows, ("array", "shape", "dtype", "values"))
