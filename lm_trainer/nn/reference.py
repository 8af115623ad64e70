"""The reference model of losses that compare the trained model with a frozen one.

The reference is the model without its adapters or, if the model has none, a second model with separate parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from flax import nnx

from lm_trainer.nn.linear import Adaptable

if TYPE_CHECKING:
    from lm_trainer.nn.decoder import Decoder

T = TypeVar("T")

REFERENCE = "reference"
"""Name of the attribute with the reference. It is part of the names of its parameters."""
_PREFIX = f"{REFERENCE}."


def attach_reference(model: nnx.Module, reference: nnx.Module) -> None:
    """Makes `reference` the frozen reference of a model that is trained in full."""
    setattr(model, REFERENCE, nnx.data(reference))


def has_reference(model: nnx.Module) -> bool:
    """Returns True if a reference is attached to the model."""
    return getattr(model, REFERENCE, None) is not None


def reference_model(model: Decoder) -> Decoder:
    """Returns the reference of a model: the attached one, or the model without its adapters."""
    reference: Any = getattr(model, REFERENCE, None)
    return without_adapters(model) if reference is None else reference


def without_adapters(model: Decoder) -> Decoder:
    """Returns a copy of the model, with the same arrays but without adapters."""
    copy = nnx.merge(*nnx.split(model))
    for _, node in nnx.iter_graph(copy):
        if isinstance(node, Adaptable):
            node.remove_adapter()
    return copy


def is_reference_param(name: str) -> bool:
    """Returns True if the dotted name belongs to a parameter of an attached reference."""
    return name.startswith(_PREFIX)


def name_in_reference(name: str) -> str:
    """Returns the dotted name of a parameter in the attached reference."""
    return _PREFIX + name


def name_outside_reference(name: str) -> str:
    """Returns the dotted name that a parameter of the attached reference has in the reference itself."""
    return name.removeprefix(_PREFIX)


def policy_params(params: Mapping[str, T]) -> dict[str, T]:
    """Returns the parameters, by dotted name, of the model without an attached reference."""
    return {name: x for name, x in params.items() if not is_reference_param(name)}
