"""Configuration of low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from lm_trainer.core.config import Config


class LoraConfig(Config):
    """Low-rank adapters: each selected linear layer W of a frozen model computes x W + scale * (x A) B, where only A
    and B are trained. The scale is alpha / rank. B starts at zero, so training starts from the unchanged model.
    """

    refused_keys: ClassVar[Mapping[str, str]] = {
        "r": "written in full; use `rank`",
        "lora_alpha": "use `alpha`",
        "lora_dropout": "use `dropout`",
        "targets": "use `target_modules`",
        "bias": "biases stay frozen; remove it",
        "modules_to_save": "what is not adapted stays frozen; remove it",
        "layers_to_transform": "layers are adapted together; remove it",
        "fan_in_fan_out": "follows from the model; remove it",
        "load_in_4bit": "use `base_quantization: nf4`",
        "use_dora": "DoRA normalizes the adapted weights and is no sum of products; remove it",
        "init_lora_weights": "A is uniform and B zero at the start; other initial values (PiSSA, OLoRA, LoftQ, ...) "
        "change the base model; remove it",
        "alora_invocation_tokens": "adapters act on all tokens; remove it",
        "rank_pattern": "all adapters have the same rank; remove it",
        "alpha_pattern": "all adapters have the same alpha; remove it",
        "layer_replication": "layers are not repeated; remove it",
        "trainable_token_indices": "name the embedding in `target_modules`, which adapts all rows; remove it",
        "target_parameters": "name experts in `target_modules`",
    }

    type: Literal["lora"] = "lora"
    rank: PositiveInt = 8
    """Number of columns of A and of rows of B."""
    alpha: PositiveFloat = 8.0
    """The product of the adapter is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate for the input of an adapter; the input of the frozen layer is not dropped."""
    target_modules: str | tuple[str, ...] | None = None
    """Layers that get an adapter; null or `all-linear`: all linear layers of the blocks. A list of names, such
    as `[q_proj, v_proj]` or `[attention.*]`: each must equal the end of a layer's name, in whole components, here or in
    `transformers`; `*` matches anything. A string: a regular expression that matches the complete name in either
    form. Experts (`experts.gate_up_proj`, `experts.down_proj`), the embedding (`embed_tokens`) and the head (`lm_head`)
    are adapted if they are named."""
    base_quantization: Literal["nf4"] | None = None
    """Store the linear layers of the frozen model's blocks in 4 bits, as QLoRA does: NF4 with blocks of 64 elements and
    8-bit scales (Dettmers et al. 2023, arXiv 2305.14314). A layer dequantizes its weight to compute with it. null:
    keep the weights in the parameter dtype."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead, so the size of updates does not shrink as the rank grows (Kalajdzievski
    2023, arXiv 2312.03732)."""

    @field_validator("target_modules")
    @classmethod
    def _can_match(cls, value: Any) -> Any:
        if value is not None and (not value or "" in tuple(value)):
            raise ValueError("names nothing; write a list such as [q_proj, v_proj], or null for all linear layers")
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(
                    f"not a regular expression: {error}; write one such as '.*self_attn.*', or a list of names"
                ) from error
        return value

    @property
    def scale(self) -> float:
        """Factor by which the product of an adapter is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """Patterns in `target_modules`, each of which must match a layer; None: every layer is selected."""
        if self.target_modules in (None, "all-linear"):
            return None
        return (self.target_modules,) if isinstance(self.target_modules, str) else self.target_modules

    def matches(self, pattern: str, name: str) -> bool:
        """Returns true if `pattern`, one of `patterns`, matches the module with this dotted name."""
        if isinstance(self.target_modules, str):
            return re.fullmatch(pattern, name) is not None
        parts = name.split(".")
        return any(fnmatch.fnmatchcase(".".join(parts[i:]), pattern) for i in range(len(parts)))


AnyAdapter = LoraConfig
"""Kinds of adapter that `adapter:` accepts."""
