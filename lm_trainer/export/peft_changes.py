"""Changes of weights that the tensors of a PEFT adapter describe.

Shape letters: V vocabulary, D hidden dimension, E experts, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.export.mxfp4_tensor import Mxfp4Tensor
from lm_trainer.export.nf4_files import Nf4Tensor
from lm_trainer.export.tensor_file import StoredTensor

_PREFIX = "base_model.model."
_ENDS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
"""Ends of the names of the two factors: of a linear layer or experts, and of an embedding."""
_INNER = ".base_layer"
_EXPERTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")),
    "down_proj": (("down_proj", "w2"),),
}
"""Parameters of the experts, in the order in which PEFT wraps them. Each joins the outputs of some matrices of a file,
which have one of several names."""
_EXPERT_TENSOR = re.compile(r"(?P<layer>.*)\.\w+\.experts\.(?P<expert>\d+)\.(?P<leaf>\w+)\.weight")


@dataclass(frozen=True)
class Change:
    """The product of two factors that is added to a tensor of the base model."""

    module: str
    """Name of the layer or the parameter in PEFT."""
    a: StoredTensor
    """[R, I]; for experts [E x R, I]; for an embedding [R, V]."""
    b: StoredTensor
    """[O, R]; for experts [O, R x E]; for an embedding [D, R]."""
    expert: int = 0
    experts: int = 1
    part: int = 0
    """Index of the matrix among those whose outputs are joined."""
    parts: int = 1
    of_tokens: bool = False
    """The tensor is an embedding, with a row per token."""

    @property
    def rank(self) -> int:
        """Rank of the product, which follows from the shapes."""
        return self.a.shape[0] // self.experts

    def shape(self, *, inputs_first: bool) -> tuple[int, int]:
        """Returns the shape of the tensor that the product fits."""
        outputs, inputs = self.b.shape[0] // self.parts, self.a.shape[1]
        return (inputs, outputs) if inputs_first or self.of_tokens else (outputs, inputs)

    def is_consistent(self) -> bool:
        """Returns True if the two factors have the same rank."""
        return len(self.a.shape) == len(self.b.shape) == 2 and self.b.shape[1] == self.a.shape[0]

    def values(self, scale: float, *, inputs_first: bool) -> np.ndarray:
        """Returns scale * B A in float32, in the order of the dimensions of the tensor."""
        a_RI, b_OR = (tensor.read().astype(np.float32) for tensor in (self.a, self.b))
        a_RI = a_RI.reshape(self.experts, self.rank, -1)[self.expert]
        b_OR = b_OR.reshape(len(b_OR), self.rank, self.experts)[:, :, self.expert]
        b_OR = np.split(b_OR, self.parts)[self.part]
        change_OI = scale * (b_OR @ a_RI)
        return change_OI.T if inputs_first or self.of_tokens else change_OI


def find_changes(
    stored: Mapping[str, StoredTensor],
    targets: Collection[str],
    base: Mapping[str, StoredTensor | Mxfp4Tensor | Nf4Tensor],
    file: Path,
) -> dict[str, Change]:
    """Returns the change of each tensor of the base model.

    Args:
        stored: tensors of the adapter.
        targets: setting `target_parameters`.
        base: tensors of the base model.
        file: file of the adapter, for messages.

    Raises:
        UserError: for a factor without the other one, for a module that the base model does not have, and for another
            embedding than the base model's.
    """
    names = base.keys()
    wrapped = [name for name in _EXPERTS if any(target.rpartition(".")[2] == name for target in targets)]
    changes: dict[str, Change] = {}
    heads: list[Change] = []
    factors = {name: x for name, x in stored.items() if not _is_copy(name, x, base, file)}
    for change in _pair_factors(factors, file):
        module = change.module.replace(_INNER, "")
        if wrapped and module.endswith(".experts"):
            parameter = wrapped[len(wrapped) - 1 - change.module.count(_INNER)]
            changes |= _changes_of_experts(module, parameter, change, names, file)
        elif (name := _find_tensor(change.module, names)) is not None:
            changes[name] = change
        else:
            heads.append(change)
    for head in heads:
        if not any(_is_transposed(head, change) for change in changes.values()):
            raise UserError(f"{file}: an adapter for {head.module}, which the base model does not have")
    _check_tied(changes, heads, names, file)
    return changes


def _is_copy(
    name: str, tensor: StoredTensor, base: Mapping[str, StoredTensor | Mxfp4Tensor | Nf4Tensor], file: Path
) -> bool:
    """Returns True for an embedding or head of the base model, which PEFT stores beside its adapter."""
    module = name.removesuffix(f"{_INNER}.weight")
    if module == name:
        return False
    original = _find_tensor(module.removeprefix(_PREFIX), base.keys())
    # A head without a tensor of its own is compared as the embedding.
    if original is not None and not np.array_equal(tensor.read(), base[original].read()):
        raise UserError(f"{file}: {name} differs from {original} of the base model; merge it with PEFT")
    return True


def is_head(module: str) -> bool:
    """Returns True if the module with this dotted name computes logits."""
    return module.rpartition(".")[2] in ("lm_head", "embed_out")


def _pair_factors(stored: Mapping[str, StoredTensor], file: Path) -> Iterator[Change]:
    paired: set[str] = set()
    for first, second in _ENDS:
        for name in stored:
            module = name.removesuffix(first)
            if module != name and f"{module}{second}" in stored:
                paired |= {name, f"{module}{second}"}
                of_tokens = first == _ENDS[1][0]
                yield Change(
                    module.removeprefix(_PREFIX), stored[name], stored[f"{module}{second}"], of_tokens=of_tokens
                )
    if unpaired := sorted(stored.keys() - paired):
        raise UserError(f"{file}: {unpaired[0]} is not half of a pair of matrices A and B; merge it with PEFT")


def _find_tensor(module: str, names: Collection[str]) -> str | None:
    # Some base models are saved without the prefix that a model with a head has.
    candidates = (f"{module}.weight", f"{module.partition('.')[2]}.weight")
    return next((name for name in candidates if name in names), None)


def _changes_of_experts(
    module: str, parameter: str, change: Change, names: Collection[str], file: Path
) -> dict[str, Change]:
    layer, parts = module.rpartition(".experts")[0].rpartition(".")[0], _EXPERTS[parameter]
    tensors = {}
    for name in names:
        match = _EXPERT_TENSOR.fullmatch(name)
        # Names in the base's files may lack the prefix of the model.
        if match and match["layer"] in (layer, layer.partition(".")[2]):
            part = next((i for i, leaves in enumerate(parts) if match["leaf"] in leaves), None)
            if part is not None:
                tensors[name] = int(match["expert"]), part
    if not tensors:
        raise UserError(f"{file}: an adapter for {module}.{parameter}, which the base model does not have")
    experts = 1 + max(expert for expert, _ in tensors.values())
    return {
        name: Change(f"{module}.{parameter}", change.a, change.b, expert, experts, part, len(parts))
        for name, (expert, part) in tensors.items()
    }


def _is_transposed(head: Change, embedding: Change) -> bool:
    """Returns True if the adapter of a head is the adapter of an embedding with the same weight."""
    if not embedding.of_tokens or (head.a.shape, head.b.shape) != (embedding.b.shape[::-1], embedding.a.shape[::-1]):
        return False
    same = np.array_equal(head.a.read(), embedding.b.read().T)
    return same and np.array_equal(head.b.read(), embedding.a.read().T)


def _check_tied(changes: Mapping[str, Change], heads: Collection[Change], names: Collection[str], file: Path) -> None:
    """Raises `UserError` for an adapter of an embedding that is the head too, unless the head has the same adapter."""
    embedding = next((change.module for change in changes.values() if change.of_tokens), None)
    has_head = any(is_head(name.removesuffix(".weight")) for name in names)
    if embedding is not None and not heads and not has_head:
        raise UserError(
            f"{file}: an adapter for {embedding}, whose weight is the head's too, but the adapter is not "
            f"(ensure_weight_tying); merge it with PEFT into a model with a separate head"
        )
