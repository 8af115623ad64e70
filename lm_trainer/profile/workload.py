"""Random batches for measurements."""

from __future__ import annotations

import numpy as np

from lm_trainer.core.batch import Batch


def random_batch(
    rows: int, seq_len: int, vocab_size: int, features: tuple[int, int] | None = None, seed: int = 0
) -> Batch:
    """Makes a batch of random tokens, one document per row, with random features if their shape is given."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (rows, seq_len + 1), dtype=np.int32)
    audio = None if features is None else np.random.default_rng(seed + 1).standard_normal((rows, *features), np.float32)
    positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), (rows, seq_len))
    return Batch(
        np.ascontiguousarray(tokens[:, :-1]),
        np.ascontiguousarray(tokens[:, 1:]),
        np.ones((rows, seq_len), np.float32),
        np.ascontiguousarray(positions),
        np.zeros((rows, seq_len), np.int32),
        audio,
    )
