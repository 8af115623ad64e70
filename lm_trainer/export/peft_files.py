"""Reads a directory written by PEFT as a model: the adapter merged into its base."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.safe_names import path_inside
from lm_trainer.export.peft_changes import Change, find_changes, is_head
from lm_trainer.export.tensor_file import read_header
from lm_trainer.export.weights import Weights, read_json
from lm_trainer.models.hf import config_from_hf

ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_COMPUTED = frozenset(
    {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
    | {"fan_in_fan_out", "target_parameters"}
)
"""Settings of PEFT's LoraConfig that the product depends on. Ranks are taken from the shapes of the tensors, and
`fan_in_fan_out` from the family."""
_WITHOUT_EFFECT = frozenset(
    # Settings for the program that reads or trains the adapter.
    {"task_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config", "lora_dropout", "megatron_core"}
    # VeLoRA changes only the backward pass.
    | {"revision", "velora_config"}
    # Choice of the layers that have an adapter. The names of the tensors show which ones do.
    | {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
    # An adapter of an embedding that is the head too is compared with the adapter of the head.
    | {"ensure_weight_tying"}
    # Details of a setting in `_ONLY`; they have no effect without it.
    | {"eva_config", "corda_config", "loftq_config", "lora_ga_config", "qalora_group_size"}
)
"""Settings that do not affect the contribution of a trained adapter."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    # Other values change the weights of the base model when an adapter is created, and when it is loaded.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
    "bias": ("none",),
    "modules_to_save": (),
    "trainable_token_indices": (),
    "layer_replication": (),
    "lora_bias": (),
    "use_dora": (),
    "use_qalora": (),
    "use_bdlora": (),
    "alora_invocation_tokens": (),
    "megatron_config": (),
    "monteclora_config": (),
    "arrow_config": (),
    "kasa_config": (),
}
"""Settings, each with the values (besides null, false and empty) for which an adapter is just a sum of products."""
KNOWN_SETTINGS = _COMPUTED | _WITHOUT_EFFECT | _ONLY.keys()


def is_adapter_directory(path: Path) -> bool:
    """Returns True if `path` looks like an adapter of PEFT and contains no complete model."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def base_model_directory(directory: Path) -> Path:
    """Finds the directory of the base model that is named in an adapter_config.json.

    Raises:
        UserError: if the base model is not on this machine.
    """
    name = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(f"{directory / ADAPTER_CONFIG}: base_model_name_or_path is missing: of which model?")
    # The path as written, then relative to the adapter, for users who move both together.
    for path in (Path(name), directory / name):
        if (path / "config.json").is_file():
            return path
    raise UserError(
        f"{directory / ADAPTER_CONFIG}: the model that the adapter is for, {name}, is no directory on this machine; "
        f"download it (`hf download {name} --local-dir DIR`) and write DIR as base_model_name_or_path"
    )


class AdaptedWeights(Weights):
    """Tensors of the base model with the products of the adapter added to them, in float32; see `Weights`.

    Computes W += scale B A as in LoRA (https://arxiv.org/abs/2106.09685, equation 3), where scale is alpha / R, or
    alpha / sqrt(R) for rank-stabilised LoRA.

    Raises:
        UserError: when opened, for an adapter that is not a sum of this form, or does not fit the base model.
    """

    def __init__(self, directory: Path, base: Path):
        super().__init__(base)
        file = directory / ADAPTER_CONFIG
        self._config = _check_adapter_config(read_json(file), file)
        self._by_inputs = _has_inputs_first(base, self._config)
        try:
            stored_tensors = read_header(path_inside(directory, _ADAPTER_WEIGHTS, directory))
        except FileNotFoundError:
            raise UserError(f"{directory}: no {_ADAPTER_WEIGHTS}") from None
        targets = self._config.get("target_parameters") or ()
        self._changes = find_changes(stored_tensors, targets, self.stored, directory / _ADAPTER_WEIGHTS)
        for name, change in self._changes.items():
            shape = self.stored[name].shape
            if not change.is_consistent() or change.shape(inputs_first=self._has_inputs_first(change)) != shape:
                raise UserError(
                    f"{directory / _ADAPTER_WEIGHTS}: {list(change.b.shape)} times {list(change.a.shape)} for {name}, "
                    f"which is {list(shape)} in {base}: it is the adapter of another model"
                )

    def __getitem__(self, name: str) -> np.ndarray:
        weight = super().__getitem__(name)
        if name not in self._changes:
            return weight
        change = self._changes[name]
        scale = self._adapter_scale(change.module, change.rank)
        return weight + change.values(scale, inputs_first=self._has_inputs_first(change))

    def _has_inputs_first(self, change: Change) -> bool:
        # The head is an ordinary linear layer in every family.
        return self._by_inputs and not is_head(change.module)

    def _adapter_scale(self, module: str, rank: int) -> float:
        patterns = self._config.get("alpha_pattern") or {}
        alphas = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(alphas, self._config.get("lora_alpha", rank))
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


def _has_inputs_first(base: Path, config: Mapping[str, Any]) -> bool:
    """Returns True if the weights of the base have the input dimension before the output dimension, as in GPT-2.

    The family decides, as in PEFT, which corrects the setting `fan_in_fan_out` by the class of the layer.
    """
    if not (base / "config.json").is_file():
        return bool(config.get("fan_in_fan_out"))
    family = config_from_hf(read_json(base / "config.json"))[0].hf_family()
    return not any(tensor.transposed for tensor in family.tensors)


def _check_adapter_config(config: dict[str, Any], file: Path) -> dict[str, Any]:
    if config.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type {config.get('peft_type')!r} is not read; merge it with PEFT, or use LORA")
    for key, value in config.items():
        if value and (key not in KNOWN_SETTINGS or (key in _ONLY and value not in _ONLY[key])):
            note = "" if key in KNOWN_SETTINGS else ", and what it means is not known here"
            raise UserError(f"{file}: {key}: {value!r} is not read{note}; merge it with PEFT (`merge_and_unload`)")
    return config
