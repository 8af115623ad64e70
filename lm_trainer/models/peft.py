"""Adapters in PEFT's format: the content of adapter_config.json, and the tensors of adapter_model.safetensors.

If a family's file joins several of our linear layers into one, their adapters are merged into one whose rank is the sum
of their ranks. B of the merged adapter is zero where the ranks of one layer meet the outputs of another, so the product
is the same.

Shape letters: R rank, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.models.base import DecoderConfig
from lm_trainer.models.hf import param_infos
from lm_trainer.models.hf_param import ParamInfo, ParamSlice
from lm_trainer.models.hf_table import FileTensor, HfFamily, HfTensor, file_name, file_tensors
from lm_trainer.models.peft_weights import WeightAdapters, weight_adapters_to_peft, weight_names
from lm_trainer.nn.lora import adapted_weight_name
from lm_trainer.nn.lora_config import LoraConfig

_WEIGHT = ".weight"


class _Module(NamedTuple):
    """A linear layer of the file with an adapter."""

    name: str
    in_layer: str
    """End of the name, which is the same in every layer."""
    parts: int
    """Number of our adapters that are joined in this module."""
    by_inputs: bool
    """The file has inputs before outputs."""


def module_names(model_config: DecoderConfig, vocab_size: int) -> dict[str, list[str]]:
    """Maps each of our parameters to the `transformers` modules that contain it, layer by layer.

    Empty for a family that `transformers` does not have.
    """
    family = model_config.hf
    if not isinstance(family, HfFamily):
        return {}
    entries = file_tensors(family, param_infos(model_config, vocab_size))
    names: dict[str, list[str]] = weight_names(family, entries)
    for entry in filter(_is_linear, entries):
        for part in entry.parts:
            names.setdefault(part.path, []).append(_module_name(family, entry))
    return names


def adapter_to_peft(
    model_config: DecoderConfig, lora: LoraConfig, params: Mapping[str, np.ndarray], *, vocab_size: int, base: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the content of adapter_config.json, and the tensors of the safetensors file (C-contiguous, dtypes
    unchanged).

    Args:
        model_config: configuration of the adapted model.
        lora: configuration of the adapters.
        params: the adapters' parameters by dotted name.
        vocab_size: vocabulary size of the model.
        base: location of the frozen model, for users who load the adapter without naming a base model.

    Raises:
        UserError: for a family that `transformers` does not have, and for a weight whose adapter the format lacks.
    """
    family = model_config.hf
    if not isinstance(family, HfFamily):
        raise UserError(f"a {model_config.type} model has no layers in `transformers` that could hold the adapter")
    entries = file_tensors(family, param_infos(model_config, vocab_size))
    modules, weight_adapters = [], weight_adapters_to_peft(family, entries, params)
    tensors = weight_adapters.tensors
    for entry in filter(_is_linear, entries):
        pairs = [_get_adapter(part, params) for part in entry.parts]
        if any(pair is not None for pair in pairs):
            module = _make_module(family, entry, sum(pair is not None for pair in pairs))
            modules.append(module)
            a_RI, b_OR = _join_adapters(entry, pairs)
            tensors[f"base_model.model.{module.name}.lora_A.weight"] = a_RI
            tensors[f"base_model.model.{module.name}.lora_B.weight"] = b_OR
    adapted, written = {adapted_weight_name(name) for name in params}, _written_weights(entries, weight_adapters)
    if missing := sorted(adapted - written):
        raise UserError(
            f"PEFT has no adapter of {missing[0]} of a {model_config.type} model; export the merged model with --merge"
        )
    return _adapter_config(lora, modules, weight_adapters, _num_layers(model_config, vocab_size), base), tensors


def _written_weights(entries: Sequence[FileTensor], weight_adapters: WeightAdapters) -> set[str]:
    """Returns the names of the weights whose adapters are in the file, if they have one."""
    return weight_adapters.weights | {part.path for entry in entries if _is_linear(entry) for part in entry.parts}


def _is_linear(entry: FileTensor) -> bool:
    """Returns True for the matrix of a linear layer of the blocks."""
    # Embedding and head belong to no layer; experts are one array of all matrices.
    return entry.name.endswith(_WEIGHT) and "{}." in entry.table.params[0] and entry.parts[0].path.endswith(_WEIGHT)


def _module_name(family: HfFamily, entry: FileTensor) -> str:
    return file_name(family, entry.name).removesuffix(_WEIGHT)


def _make_module(family: HfFamily, entry: FileTensor, parts: int) -> _Module:
    in_layer = entry.table.hf.rpartition("{}.")[2].removesuffix(_WEIGHT)
    return _Module(_module_name(family, entry), in_layer, parts, not entry.table.transposed)


def _num_layers(model_config: DecoderConfig, vocab_size: int) -> int:
    return len(model_config.spec(vocab_size).blocks)


def _get_adapter(part: ParamSlice, params: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns A and B of one layer, or None if the layer has no adapter."""
    lora = part.path.removesuffix(_WEIGHT) + ".lora"
    if f"{lora}.a" not in params:
        return None
    return np.asarray(params[f"{lora}.a"][part.index]), np.asarray(params[f"{lora}.b"][part.index])


def _join_adapters(
    entry: FileTensor, pairs: list[tuple[np.ndarray, np.ndarray] | None]
) -> tuple[np.ndarray, np.ndarray]:
    present = [pair for pair in pairs if pair is not None]
    rank, inputs = present[0][0].shape[-1], present[0][0].ndim - 1
    a_RI = np.concatenate([a.reshape(-1, rank).T for a, _ in present])
    pieces, parts, start = [], [], 0
    for part, pair in zip(entry.parts, pairs, strict=True):
        shape, axes = part.shape[inputs:], part.axes[inputs:]
        piece = np.zeros((len(a_RI), *shape), a_RI.dtype)
        if pair is not None:
            piece[start : start + rank] = pair[1]
            start += rank
        pieces.append(piece)
        parts.append(ParamSlice(part.path, (), ParamInfo(piece.shape, ("rank", *axes))))
    # In PEFT, B has outputs before the rank, even for layers whose weights have inputs before outputs.
    table = HfTensor(entry.table.hf, entry.table.params, transposed=True, interleaved=entry.table.interleaved)
    return np.ascontiguousarray(a_RI), FileTensor(entry.name, table, tuple(parts)).join(pieces)


def _adapter_config(
    lora: LoraConfig, modules: list[_Module], weight_adapters: WeightAdapters, layers: int, base: str
) -> dict[str, Any]:
    by_suffix: dict[str, list[_Module]] = {}
    for module in modules:
        by_suffix.setdefault(module.in_layer, []).append(module)
    names = {}
    for in_layer, in_layers in by_suffix.items():
        # PEFT matches the end of a name, so a name shared by all layers is written once.
        uniform = len(in_layers) == layers and len({module.parts for module in in_layers}) == 1
        names |= {in_layer: in_layers[0].parts} if uniform else {module.name: module.parts for module in in_layers}
    joined = {name: parts for name, parts in {**names, **weight_adapters.parameters}.items() if parts > 1}
    ties = {"ensure_weight_tying": True} if weight_adapters.ties else {}
    parameters = {"target_parameters": sorted(weight_adapters.parameters)} if weight_adapters.parameters else {}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": _compact_number(lora.alpha),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.use_rslora,
        "target_modules": sorted([*names, *weight_adapters.modules]),
        "rank_pattern": {name: parts * lora.rank for name, parts in joined.items()},
        "alpha_pattern": {
            name: _compact_number(lora.alpha * _alpha_factor(lora, parts)) for name, parts in joined.items()
        },
        "fan_in_fan_out": any(module.by_inputs for module in modules),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        **parameters,
        **ties,
    }


def _alpha_factor(lora: LoraConfig, parts: int) -> float:
    """Returns the factor of alpha that keeps alpha / rank, or alpha / sqrt(rank), if the rank grows by `parts`."""
    return math.sqrt(parts) if lora.use_rslora else parts


def _compact_number(value: float) -> float:
    # PEFT writes integers without a decimal point, such as 8 and not 8.0.
    return int(value) if value == int(value) else value
