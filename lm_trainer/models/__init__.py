"""Layer 2: model families. To add one, add a module to this package and one line to the union below."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from lm_trainer.models.backpack import BackpackConfig
from lm_trainer.models.base import DecoderConfig
from lm_trainer.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from lm_trainer.models.gpt2 import Gpt2Config
from lm_trainer.models.llama import LlamaConfig
from lm_trainer.models.mistral import MistralConfig
from lm_trainer.models.mixtral import MixtralConfig
from lm_trainer.models.mpt import MptConfig
from lm_trainer.models.neox import GptNeoxConfig
from lm_trainer.models.olmo import Olmo2Config, Olmo3Config
from lm_trainer.models.phi import Phi3Config
from lm_trainer.models.qwen import Qwen2Config, Qwen3Config
from lm_trainer.models.qwen_moe import Qwen3MoeConfig
from lm_trainer.models.whisper import WhisperConfig

AnyModel = Annotated[
    Gpt2Config
    | LlamaConfig
    | MistralConfig
    | Qwen2Config
    | Qwen3Config
    | Olmo2Config
    | Olmo3Config
    | GemmaConfig
    | Gemma2Config
    | Gemma3Config
    | Phi3Config
    | GptNeoxConfig
    | MixtralConfig
    | Qwen3MoeConfig
    | MptConfig
    | BackpackConfig
    | WhisperConfig,
    Field(discriminator="type"),
]
"""Type of the `model:` section; `type` selects the family."""

MODEL_CONFIGS: tuple[type[DecoderConfig], ...] = get_args(get_args(AnyModel)[0])

__all__ = [
    "MODEL_CONFIGS",
    "AnyModel",
    "BackpackConfig",
    "DecoderConfig",
    "Gemma2Config",
    "Gemma3Config",
    "GemmaConfig",
    "Gpt2Config",
    "GptNeoxConfig",
    "LlamaConfig",
    "MistralConfig",
    "MixtralConfig",
    "MptConfig",
    "Olmo2Config",
    "Olmo3Config",
    "Phi3Config",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "WhisperConfig",
]
