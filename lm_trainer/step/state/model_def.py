"""A model without its numbers: the shapes, names and logical axes of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.nn.norm import norms_of
from lm_trainer.nn.read import PARAM_NAME
from lm_trainer.optim import Param

Params = dict[str, jax.Array]
"""Dotted name -> array; every place that handles parameters outside a model uses this form."""


LoadFn = Callable[[Mapping[str, jax.ShapeDtypeStruct], Mapping[str, NamedSharding]], Params]
"""From the shapes and shardings of all parameters to those that it has values for."""


@dataclass(frozen=True)
class ModelDef:
    """A model without its numbers: what is needed to put parameters back into a module."""

    graphdef: nnx.GraphDef
    abstract: Any
    """Nested dict of `ShapeDtypeStruct`, as `nnx.to_pure_dict` gives it."""
    axes: Mapping[str, tuple[str | None, ...]]
    """Dotted parameter name -> logical axis of each dimension; None for one that is never cut."""
    norms: Mapping[str, str]
    """Dotted name of a norm's parameter -> the class of the norm."""
    build: Callable[[], nnx.Module]
    trainable: frozenset[str]
    """The parameters that are trained; the others stay as they are."""
    load: LoadFn | None = None
    """Reads the values to start from straight to where they lie; None: `build` makes them."""
    constants: frozenset[str] = frozenset()
    """Parameters that are not trained, and that checkpoints hold all the same."""

    @classmethod
    def trace(cls, build: Callable[[], nnx.Module], is_trainable: Callable[[str], bool] = lambda _: True) -> ModelDef:
        """Builds the model abstractly: no memory, no device.

        Args:
            build: makes the model.
            is_trainable: by the dotted name of a parameter.

        Raises:
            UserError: when no parameter is trained, or one has logical axes that do not fit its shape.
        """
        module = nnx.eval_shape(build)
        for path, variable in nnx.iter_graph(module):
            if isinstance(variable, nnx.Param):
                variable.set_metadata(**{PARAM_NAME: ".".join(map(str, path))})
        graphdef, state = nnx.split(module, nnx.Param)
        axes = {}
        for path, variable in nnx.to_flat_state(state):
            name = ".".join(map(str, path))
            whole = (None,) * len(variable.shape)
            axes[name] = tuple(variable.get_metadata().get("logical_axes", whole))
            if len(axes[name]) != len(whole):
                raise UserError(f"{name}: shape {variable.shape} but logical_axes {axes[name]}")
        trainable = frozenset(filter(is_trainable, axes))
        if not trainable:
            raise UserError("no parameter of the model is trained: is_trainable is false for every name")
        return cls(graphdef, nnx.to_pure_dict(state), axes, norms_of(module), build, trainable)

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Dotted name -> shape and dtype of each parameter."""
        return named_leaves(self.abstract)

    def optimizer_params(self) -> dict[str, Param]:
        """Dotted name -> each parameter that is trained, as an optimizer sees it."""
        return {
            name: Param(name, x.shape, self.axes[name], self.norms.get(name))
            for name, x in self.shapes.items()
            if name in self.trainable
        }

    def nested(self, params: Mapping[str, Any]) -> Any:
        """The nested dict that `nnx.merge` takes."""
        return from_named_leaves(self.abstract, dict(params))

    def named(self, nested: Any) -> dict[str, Any]:
        """The inverse of `nested`."""
        return named_leaves(nested)

    def merge(self, params: Mapping[str, Any]) -> Any:
        """The module with these parameters."""
        return nnx.merge(self.graphdef, self.nested(params))

    def merge_some(self, params: Mapping[str, Any]) -> Any:
        """The module with these parameters, and shapes alone in the places of the others, which nothing may read.

        A parameter may have another shape than in the model, as one layer of several that are stacked.
        """
        return nnx.merge(self.graphdef, self.nested({**self.shapes, **params}))

    def init(self) -> Params:
        """Fresh parameters, all of them. Call it under `jax.jit`: run eagerly, initialisers differ by an ulp."""
        return named_leaves(nnx.to_pure_dict(nnx.state(self.build(), nnx.Param)))
