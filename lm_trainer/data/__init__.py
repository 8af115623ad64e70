"""The data of a run: sources -> tokenizer -> cache -> order -> batches.

DataConfig        the `data` section of a configuration
RayConfig         a Ray cluster to tokenise on
open_data         tokenises text that is not cached yet, and opens the data
Data              the opened data
load_tokenizer    reads the tokenizer saved by a run
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_trainer.data.config import DataConfig
from lm_trainer.data.tokenize.progress import BuildProgress, OnProgress
from lm_trainer.data.tokenize.ray_config import RayConfig
from lm_trainer.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from lm_trainer.data.pipeline import Data, open_data
else:

    def __getattr__(name: str) -> object:
        # Processes that only tokenise also import this package, and must not pay for importing JAX and Grain, which
        # these two names need. Hidden from type checkers, which would otherwise accept any name.
        if name in ("Data", "open_data"):
            from lm_trainer.data import pipeline

            return getattr(pipeline, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["BuildProgress", "Data", "DataConfig", "OnProgress", "RayConfig", "Tokenizer", "load_tokenizer", "open_data"]
