"""Layer 2: families of models. To add one: a file beside this one, and one line in the union below."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from lm_trainer.models.base import DecoderConfig
from lm_trainer.models.gpt2 import Gpt2Config
from lm_trainer.models.llama import LlamaConfig

AnyModel = Annotated[
    Gpt2Config | LlamaConfig,
    Field(discriminator="type"),
]
"""Whatever may stand under `model:`; told apart by `type`."""

MODEL_CONFIGS: tuple[type[DecoderConfig], ...] = get_args(get_args(AnyModel)[0])

__all__ = ["MODEL_CONFIGS", "AnyModel", "DecoderConfig", "Gpt2Config", "LlamaConfig"]
