"""Layer 2: model families. To add one, add a module to this package and one line to the union below."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from lm_trainer.models.apertus import ApertusConfig
from lm_trainer.models.arcee import ArceeConfig
from lm_trainer.models.backpack import BackpackConfig
from lm_trainer.models.base import DecoderConfig
from lm_trainer.models.cohere import Cohere2Config
from lm_trainer.models.custom import CustomConfig
from lm_trainer.models.deepseek import DeepseekV2Config, DeepseekV3Config
from lm_trainer.models.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from lm_trainer.models.gemma4 import Gemma4Config
from lm_trainer.models.glm import Glm4Config
from lm_trainer.models.glm_moe import Glm4MoeConfig
from lm_trainer.models.gpt2 import Gpt2Config
from lm_trainer.models.gpt_oss import GptOssConfig
from lm_trainer.models.granite import GraniteConfig
from lm_trainer.models.granite4 import Granite4Config
from lm_trainer.models.llama import LlamaConfig
from lm_trainer.models.llama4 import Llama4Config
from lm_trainer.models.mamba import Mamba2Config
from lm_trainer.models.minicpm import MiniCpm3Config
from lm_trainer.models.mistral import MistralConfig
from lm_trainer.models.mixtral import MixtralConfig
from lm_trainer.models.mpt import MptConfig
from lm_trainer.models.nanochat import NanochatConfig
from lm_trainer.models.neox import GptNeoxConfig
from lm_trainer.models.olmo import Olmo2Config, Olmo3Config
from lm_trainer.models.olmoe import OlmoeConfig
from lm_trainer.models.phi import Phi3Config
from lm_trainer.models.qwen import Qwen2Config, Qwen3Config
from lm_trainer.models.qwen2_moe import Qwen2MoeConfig
from lm_trainer.models.qwen35 import Qwen35Config, Qwen35MoeConfig
from lm_trainer.models.qwen_moe import Qwen3MoeConfig
from lm_trainer.models.qwen_next import Qwen3NextConfig
from lm_trainer.models.seed_oss import SeedOssConfig
from lm_trainer.models.smollm import SmolLm3Config
from lm_trainer.models.starcoder import StarCoder2Config
from lm_trainer.models.whisper import WhisperConfig

AnyFamily = (
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
    | SmolLm3Config
    | GraniteConfig
    | Cohere2Config
    | StarCoder2Config
    | Glm4Config
    | ApertusConfig
    | ArceeConfig
    | SeedOssConfig
    | NanochatConfig
    | DeepseekV3Config
    | DeepseekV2Config
    | Qwen3NextConfig
    | MiniCpm3Config
    | Mamba2Config
    | GptNeoxConfig
    | MixtralConfig
    | Qwen3MoeConfig
    | Qwen2MoeConfig
    | OlmoeConfig
    | Glm4MoeConfig
    | GptOssConfig
    | Llama4Config
    | Granite4Config
    | Gemma4Config
    | Qwen35Config
    | Qwen35MoeConfig
    | MptConfig
    | BackpackConfig
    | WhisperConfig
)
"""The configuration of a model family."""

AnyModel = Annotated[AnyFamily | CustomConfig, Field(discriminator="type")]
"""Type of the `model:` section; `type` selects the family, or code of the user."""

MODEL_CONFIGS: tuple[type[DecoderConfig], ...] = get_args(AnyFamily)
"""The classes of all families."""

__all__ = [
    "MODEL_CONFIGS",
    "AnyFamily",
    "AnyModel",
    "ApertusConfig",
    "ArceeConfig",
    "BackpackConfig",
    "Cohere2Config",
    "CustomConfig",
    "DecoderConfig",
    "DeepseekV2Config",
    "DeepseekV3Config",
    "Gemma2Config",
    "Gemma3Config",
    "Gemma4Config",
    "GemmaConfig",
    "Glm4Config",
    "Glm4MoeConfig",
    "Gpt2Config",
    "GptNeoxConfig",
    "GptOssConfig",
    "Granite4Config",
    "GraniteConfig",
    "Llama4Config",
    "LlamaConfig",
    "Mamba2Config",
    "MiniCpm3Config",
    "MistralConfig",
    "MixtralConfig",
    "MptConfig",
    "NanochatConfig",
    "Olmo2Config",
    "Olmo3Config",
    "OlmoeConfig",
    "Phi3Config",
    "Qwen2Config",
    "Qwen2MoeConfig",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "Qwen3NextConfig",
    "Qwen35Config",
    "Qwen35MoeConfig",
    "SeedOssConfig",
    "SmolLm3Config",
    "StarCoder2Config",
    "WhisperConfig",
]
