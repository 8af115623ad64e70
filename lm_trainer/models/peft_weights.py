"""Adapters of the embedding, the head and the experts in PEFT's format.

Shape letters: V vocabulary, D hidden dimension, E experts, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lm_trainer.models.hf_table import FileTensor, HfFamily, file_name
from lm_trainer.nn.lora import adapter_name
from lm_trainer.nn.lora_targets import EMBEDDING, HEAD

_PREFIX = "base_model.model."
_WEIGHT = ".weight"
_EXPERT = re.compile(r"^(?P<layer>.*\.)\w+\.experts\.\d+\.\w+\.weight$")
_JOINED = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
"""Parameter of transformers' experts that contains each of our weights; gate and up are joined, gate first."""
_TIED_NAMES = frozenset({"embed_tokens", "lm_head"})
"""Names by which PEFT recognizes an embedding whose adapter it also applies to a head with the same weight."""


@dataclass
class WeightAdapters:
    """The part of an adapter that is not of linear layers."""

    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """Tensors of the file."""
    modules: list[str] = field(default_factory=list)
    """Entries of `target_modules`."""
    parameters: dict[str, int] = field(default_factory=dict)
    """Entries of `target_parameters`, each with the number of our adapters that it joins."""
    weights: set[str] = field(default_factory=set)
    """Names of our weights that may be among them."""
    ties: bool = False
    """The adapter of the embedding is the adapter of the head too."""


def expert_parameter(entry: FileTensor) -> str | None:
    """Returns the name of the parameter of transformers' model with the experts of a tensor; None for other tensors."""
    match, leaf = _EXPERT.match(entry.name), entry.parts[0].path.rpartition(".")[2]
    return f"{match['layer']}mlp.experts.{_JOINED[leaf]}" if match and leaf in _JOINED else None


def weight_names(family: HfFamily, entries: Sequence[FileTensor]) -> dict[str, list[str]]:
    """Maps the embedding, the head and the experts to the modules and parameters of transformers that contain them."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        path, parameter = entry.parts[0].path, expert_parameter(entry)
        if path in (EMBEDDING, HEAD):
            names[path] = [file_name(family, entry.name).removesuffix(_WEIGHT)]
        elif parameter is not None:
            names.setdefault(path, []).append(file_name(family, parameter))
    # The experts of a layer are one parameter.
    return {path: list(dict.fromkeys(modules)) for path, modules in names.items()}


def weight_adapters_to_peft(
    family: HfFamily, entries: Sequence[FileTensor], params: Mapping[str, np.ndarray]
) -> WeightAdapters:
    """Returns the tensors and the targets of the adapters of embedding, head and experts.

    Args:
        family: table of the file's names.
        entries: all tensors of the model's file.
        params: the adapters' parameters by dotted name.
    """
    names = weight_names(family, entries)
    result = WeightAdapters(weights=set(names))
    if (factors := _factors(params, EMBEDDING)) is not None:
        module, (a_VR, b_RD) = names[EMBEDDING][0], factors
        result.modules.append(module)
        result.tensors[f"{_PREFIX}{module}.lora_embedding_A"] = np.ascontiguousarray(a_VR.T)
        result.tensors[f"{_PREFIX}{module}.lora_embedding_B"] = np.ascontiguousarray(b_RD.T)
        if HEAD not in names:
            _add_tied_head(family, module, (b_RD.T, a_VR.T), result)
    if (factors := _factors(params, HEAD)) is not None:
        result.modules.append(names[HEAD][0])
        _add_linear(names[HEAD][0], *factors, result)
    for parameter, parts in _expert_parts(family, entries, params):
        module, _, leaf = parameter.rpartition(".")
        # PEFT wraps the parameters of a module in their order, so the adapter of the first one is inside.
        down = f"{parts[0][0].rpartition('.')[0]}.down"
        inner = leaf == _JOINED["up"] and _factors(params, down) is not None
        a_EIR, b_ERO = _join_experts([factors for _, factors in parts])
        wrapper = f"{module}.base_layer" if inner else module
        result.tensors[f"{_PREFIX}{wrapper}.lora_A.weight"] = _rows_by_expert(a_EIR)
        result.tensors[f"{_PREFIX}{wrapper}.lora_B.weight"] = _columns_by_rank(b_ERO)
        result.parameters[f"mlp.experts.{leaf}"] = sum(factors is not None for _, factors in parts)
    return result


def _factors(params: Mapping[str, np.ndarray], weight: str) -> tuple[np.ndarray, np.ndarray] | None:
    name = adapter_name(weight)
    return (np.asarray(params[f"{name}.a"]), np.asarray(params[f"{name}.b"])) if f"{name}.a" in params else None


def _add_linear(module: str, a_IR: np.ndarray, b_RO: np.ndarray, result: WeightAdapters) -> None:
    result.tensors[f"{_PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(a_IR.T)
    result.tensors[f"{_PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(b_RO.T)


def _add_tied_head(
    family: HfFamily, embedding: str, factors: tuple[np.ndarray, np.ndarray], result: WeightAdapters
) -> None:
    """Adds the adapter of a head with the weight of the embedding: the transpose of the embedding's."""
    head = next((name.removesuffix(_WEIGHT) for name in family.tied), "lm_head")
    _add_linear(head, *factors, result)
    result.ties = embedding.rpartition(".")[2] in _TIED_NAMES
    if not result.ties:
        result.modules.append(head)


_Part = tuple[str, tuple[np.ndarray, np.ndarray] | None]


def _expert_parts(
    family: HfFamily, entries: Sequence[FileTensor], params: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, list[_Part]]]:
    """Yields each parameter of experts with an adapter, and the path and factors of each of its parts in that layer."""
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for entry in entries:
        if (name := expert_parameter(entry)) is not None:
            slot = entry.parts[0]
            parts.setdefault(file_name(family, name), {}).setdefault(slot.path, slot.index[:-1])
    for name, layers in parts.items():
        # By name, gate comes before up.
        adapters = [(path, _factors(params, path), layer) for path, layer in sorted(layers.items())]
        if any(factors is not None for _, factors, _ in adapters):
            yield name, [(path, None if x is None else (x[0][i], x[1][i])) for path, x, i in adapters]


def _join_experts(parts: Sequence[tuple[np.ndarray, np.ndarray] | None]) -> tuple[np.ndarray, np.ndarray]:
    """Joins the factors of weights whose outputs are concatenated: A [E, I, R] and B [E, R, O] with the sum of ranks.

    B is zero for the outputs of a part and the ranks of another part.
    """
    present = [part for part in parts if part is not None]
    a_EIR = np.concatenate([a for a, _ in present], axis=-1)
    outputs, rank = present[0][1].shape[-1], present[0][0].shape[-1]
    b_ERO = np.zeros((len(a_EIR), a_EIR.shape[-1], outputs * len(parts)), a_EIR.dtype)
    start = 0
    for i, part in enumerate(parts):
        if part is not None:
            b_ERO[:, start : start + rank, i * outputs : (i + 1) * outputs] = part[1]
            start += rank
    return a_EIR, b_ERO


def _rows_by_expert(a_EIR: np.ndarray) -> np.ndarray:
    """Returns A as PEFT stores it: [E x R, I], the ranks of an expert together."""
    return np.ascontiguousarray(a_EIR.swapaxes(-1, -2).reshape(-1, a_EIR.shape[1]))


def _columns_by_rank(b_ERO: np.ndarray) -> np.ndarray:
    """Returns B as PEFT stores it: [O, R x E], the experts of a rank together."""
    return np.ascontiguousarray(b_ERO.transpose(2, 1, 0).reshape(b_ERO.shape[2], -1))
