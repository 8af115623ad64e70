"""A directory that PEFT wrote, read as the model that it stands for: its adapter merged into its base.

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
from lm_trainer.core.inside import path_inside
from lm_trainer.export.tensor_file import StoredTensor, read_header
from lm_trainer.export.weights import Weights, read_json

ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_COMPUTED = frozenset(
    {"peft_type", "base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
    | {"fan_in_fan_out"}
)
"""Settings of PEFT's LoraConfig that the product is computed by; ranks are those of the tensors."""
_WITHOUT_EFFECT = frozenset(
    # Of the program that reads or trains the adapter.
    {"task_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config", "lora_dropout", "megatron_core"}
    # VeLoRA changes the backward pass alone.
    | {"revision", "velora_config"}
    # Layers that have an adapter: those of which there are tensors.
    | {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
    # Adapters of the embedding or the head are refused as tensors.
    | {"ensure_weight_tying"}
    # Details of a setting in `_ONLY`, without which they count for nothing.
    | {"eva_config", "corda_config", "loftq_config", "lora_ga_config", "qalora_group_size"}
)
"""Settings that change nothing of what a trained adapter adds."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    # The others change the weights of the base when an adapter is made, and again when it is loaded.
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
"""Settings with the values, beside null, false and what is empty, with which an adapter is a sum of products alone."""
KNOWN_SETTINGS = _COMPUTED | _WITHOUT_EFFECT | _ONLY.keys()


def is_adapter_directory(path: Path) -> bool:
    """Returns True if `path` looks like an adapter of PEFT and holds no model of its own."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file()


def adapter_base(directory: Path) -> Path:
    """The directory of the model that an adapter is for, as its adapter_config.json names it.

    Raises:
        UserError: when it is not on this machine.
    """
    name = read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(f"{directory / ADAPTER_CONFIG}: base_model_name_or_path is missing: of which model?")
    # As it was written, and for those who move both together.
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
    """The name of the layer in PEFT."""
    a: StoredTensor
    """[R, I]."""
    b: StoredTensor
    """[O, R]."""


class AdaptedWeights(Weights):
    """The tensors of the base with the adapter's products added to them, in float32; see `Weights`.

    W += scale B A, of LoRA (https://arxiv.org/abs/2106.09685, equation 3), with scale = alpha / R, or alpha / sqrt(R)
    of rank-stabilised LoRA.

    Raises:
        UserError: at opening, for a kind of adapter that is no such sum, and one that does not fit the base.
    """

    def __init__(self, directory: Path, base: Path):
        super().__init__(base)
        file = directory / ADAPTER_CONFIG
        self._config = _checked(read_json(file), file)
        try:
            found = read_header(path_inside(directory, _ADAPTER_WEIGHTS, directory))
        except FileNotFoundError:
            raise UserError(f"{directory}: no {_ADAPTER_WEIGHTS}") from None
        # A module of PEFT, and the tensor of the base that it adapts, may differ in their prefix.
        pairs = _pairs(found, directory)
        self._pairs = {self._target(module, directory): _Adapter(module, *pair) for module, pair in pairs.items()}
        for name, (_, a, b) in self._pairs.items():
            shape = self.stored[name].shape
            outputs, inputs = shape[::-1] if self._by_inputs else shape
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
        change_OI = self._scale(module, len(a_RI)) * (b_OR @ a_RI)
        return weight + (change_OI.T if self._by_inputs else change_OI)

    @property
    def _by_inputs(self) -> bool:
        """True of weights that have inputs before outputs, as GPT-2's."""
        return bool(self._config.get("fan_in_fan_out"))

    def _target(self, name: str, directory: Path) -> str:
        # Some bases are saved without the prefix that their heads give to all names.
        for candidate in (f"{name}.weight", f"{name.partition('.')[2]}.weight"):
            if candidate in self.stored:
                return candidate
        raise UserError(f"{directory / _ADAPTER_WEIGHTS}: an adapter for {name}, which {self.directory} does not have")

    def _scale(self, module: str, rank: int) -> float:
        patterns = self._config.get("alpha_pattern") or {}
        found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(found, self._config.get("lora_alpha", rank))
        return float(alpha) / (math.sqrt(rank) if self._config.get("use_rslora") else rank)


def _checked(config: dict[str, Any], file: Path) -> dict[str, Any]:
    if config.get("peft_type") != "LORA":
        raise UserError(f"{file}: peft_type {config.get('peft_type')!r} is not read; merge it with PEFT, or use LORA")
    for key, value in config.items():
        if value and (key not in KNOWN_SETTINGS or (key in _ONLY and value not in _ONLY[key])):
            known = "" if key in KNOWN_SETTINGS else ", and what it means is not known here"
            raise UserError(f"{file}: {key}: {value!r} is not read{known}; merge it with PEFT (`merge_and_unload`)")
    return config


def _pairs(found: dict[str, StoredTensor], directory: Path) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """Module -> A [R, I] and B [O, R]."""
    file = directory / _ADAPTER_WEIGHTS
    modules = [name.removesuffix(_A) for name in found if name.endswith(_A)]
    known = {f"{module}{end}" for module in modules for end in (_A, _B)}
    if strange := sorted(found.keys() ^ known):
        raise UserError(f"{file}: {strange[0]} is not half of a pair of matrices {_A} and {_B}; merge it with PEFT")
    return {module.removeprefix(_PREFIX): (found[f"{module}{_A}"], found[f"{module}{_B}"]) for module in modules}
