"""Reads a directory written by PEFT as a model: the adapter merged into its base.

Shape letters: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.safe_names import path_inside
from lm_trainer.export.tensor_file import StoredTensor, read_header
from lm_trainer.export.weights import Weights, read_json
from lm_trainer.models.hf import config_from_hf

ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_COMPUTED = frozenset(
    {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
    | {"fan_in_fan_out"}
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
    # Adapters of the embedding or the head are refused when their tensors are read.
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
    "target_parameters": (),
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


class _Adapter(NamedTuple):
    """The adapter of a linear layer."""

    module: str
    """Name of the layer in PEFT."""
    a: StoredTensor
    """[R, I]."""
    b: StoredTensor
    """[O, R]."""


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
        self._has_inputs_first = _has_inputs_first(base, self._config)
        try:
            stored_tensors = read_header(path_inside(directory, _ADAPTER_WEIGHTS, directory))
        except FileNotFoundError:
            raise UserError(f"{directory}: no {_ADAPTER_WEIGHTS}") from None
        # The names of a PEFT module and of the tensor that it adapts may have different prefixes.
        pairs = _pair_matrices(stored_tensors, directory)
        self._pairs = {
            self._find_target_tensor(module, directory): _Adapter(module, *pair) for module, pair in pairs.items()
        }
        for name, (_, a, b) in self._pairs.items():
            shape = self.stored[name].shape
            outputs, inputs = shape[::-1] if self._has_inputs_first else shape
            if len(a.shape) != 2 or a.shape != (a.shape[0], inputs) or b.shape != (outputs, a.shape[0]):
                raise UserError(
                    f"{directory / _ADAPTER_WEIGHTS}: {list(b.shape)} times {list(a.shape)} for {name}, which is "
                    f"{list(shape)} in {base}: it is the adapter of another model"
                )

    def __getitem__(self, name: str) -> np.ndarray:
        weight = super().__getitem__(name)
        if name not in self._pairs:
            return weight
        module, *stored = self._pairs[name]
        a_RI, b_OR = (tensor.read().astype(np.float32) for tensor in stored)
        change_OI = self._adapter_scale(module, len(a_RI)) * (b_OR @ a_RI)
        return weight + (change_OI.T if self._has_inputs_first else change_OI)

    def _find_target_tensor(self, name: str, directory: Path) -> str:
        # Some base models are saved without the prefix that a model with a head has.
        for candidate in (f"{name}.weight", f"{name.partition('.')[2]}.weight"):
            if candidate in self.stored:
                return candidate
        raise UserError(f"{directory / _ADAPTER_WEIGHTS}: an adapter for {name}, which {self.directory} does not have")

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


def _pair_matrices(
    stored_tensors: dict[str, StoredTensor], directory: Path
) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Returns the matrices A [R, I] and B [O, R] of each module."""
    file = directory / _ADAPTER_WEIGHTS
    modules = [name.removesuffix(_A) for name in stored_tensors if name.endswith(_A)]
    paired_names = {f"{module}{end}" for module in modules for end in (_A, _B)}
    if unpaired := sorted(stored_tensors.keys() ^ paired_names):
        raise UserError(f"{file}: {unpaired[0]} is not half of a pair of matrices {_A} and {_B}; merge it with PEFT")
    return {
        module.removeprefix(_PREFIX): (stored_tensors[f"{module}{_A}"], stored_tensors[f"{module}{_B}"])
        for module in modules
    }
