"""A tiny model that hears, and rows for it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.models import WhisperConfig
from tests.compiling import quick_jit
from tests.models.common import positions, tokens

VOCAB, SEQ, FRAMES, MELS = 61, 16, 12, 5

TINY = WhisperConfig(
    seq_len=SEQ,
    hidden_dim=32,
    num_layers=2,
    num_heads=4,
    intermediate_dim=48,
    encoder_layers=3,
    encoder_heads=2,
    encoder_intermediate_dim=40,
    num_mels=MELS,
    num_frames=FRAMES,
    initializer_range=0.1,
    gradient_checkpointing=False,
    scan_layers=False,
)


def graphdef(config: WhisperConfig) -> nnx.GraphDef[Any]:
    return nnx.split(nnx.eval_shape(lambda: config.build(VOCAB, rngs=nnx.Rngs(0))), nnx.Param)[0]


@functools.cache
def params() -> dict[str, Any]:
    """Fresh parameters of `TINY`."""
    return quick_jit(lambda: nnx.to_pure_dict(nnx.state(TINY.build(VOCAB, rngs=nnx.Rngs(0)), nnx.Param)))()


def features(count: int = 2) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, FRAMES, MELS)).astype(np.float32)


def rows(count: int = 2) -> Batch:
    """Rows of tokens that belong to no audio, and features that are noise."""
    drawn = tokens(count, SEQ + 1)
    weights, segments = np.ones((count, SEQ), np.float32), np.zeros((count, SEQ), np.int32)
    return Batch(drawn[:, :-1], drawn[:, 1:], weights, positions(count, SEQ), segments, features(count))
