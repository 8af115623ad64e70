"""Data: sources -> tokenizer -> cache -> order -> batches.

DataConfig        the `data` section of a configuration
RayConfig         a Ray cluster to tokenise on
open_data         tokenises what is missing and opens the rest: `Data`
load_tokenizer    reads the tokenizer that a run saved
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_trainer.data.config import DataConfig
from lm_trainer.data.tokenize.ray_backend import RayConfig
from lm_trainer.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from lm_trainer.data.dataset import Data
    from lm_trainer.data.tokenize.build import BuildProgress, OnProgress


def open_data(
    config: DataConfig,
    *,
    seq_len: int,
    seed: int,
    on_progress: OnProgress | None = None,
    ray: RayConfig | None = None,
    background: bool = False,
) -> Data:
    """Tokenises what is not yet cached, and opens it; see `lm_trainer.data.pipeline.open_data`."""
    # Processes that only tokenise import this package too, and must not pay for JAX and Grain.
    from lm_trainer.data import pipeline

    return pipeline.open_data(
        config, seq_len=seq_len, seed=seed, on_progress=on_progress, ray=ray, background=background
    )


__all__ = ["BuildProgress", "Data", "DataConfig", "OnProgress", "RayConfig", "Tokenizer", "load_tokenizer", "open_data"]
