"""Layer 2: families of models. To add one: a file beside this one, and one line in each of the two unions below."""

from __future__ import annotations

from lm_trainer.models.gpt2 import Gpt2Config

AnyModel = Gpt2Config
"""Whatever may stand under `model:`; told apart by `type`."""

MODEL_CONFIGS: tuple[type[Gpt2Config], ...] = (Gpt2Config,)

__all__ = ["MODEL_CONFIGS", "AnyModel", "Gpt2Config"]
