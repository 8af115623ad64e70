"""A model without values: shapes, names and logical axes of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import jax
from flax import nnx
from jax.sharding import NamedSharding

from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import PyTree
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.nn.logit_clip import LOGIT_CLIP, LogitClip, LogitParam
from lm_trainer.nn.norm import norm_kinds
from lm_trainer.nn.read import PARAM_NAME
from lm_trainer.nn.router import LOAD_RATE, LoadParam
from lm_trainer.optim import Multipliers, Param

Params = dict[str, jax.Array]
"""Dotted name -> array. Used for parameters everywhere outside a model."""


LoadFn = Callable[[Mapping[str, jax.ShapeDtypeStruct], Mapping[str, NamedSharding]], Params]
"""Maps the shapes and shardings of all parameters to values for some of them."""


@dataclass(frozen=True)
class ModelDef:
    """A model without values, with everything that is needed to put parameters back into a module."""

    graphdef: nnx.GraphDef
    abstract: PyTree
    """Nested dict of `ShapeDtypeStruct`, as returned by `nnx.to_pure_dict`."""
    axes: Mapping[str, tuple[str | None, ...]]
    """Dotted parameter name -> logical axis of each dimension; None for a dimension that is never sharded."""
    norms: Mapping[str, str]
    """Dotted name of each parameter of a norm -> class of the norm."""
    build: Callable[[], nnx.Module]
    trainable: frozenset[str]
    """Names of the trained parameters; all others are frozen."""
    load: LoadFn | None = None
    """Reads initial values directly to their devices; None: the values that `build` makes are used."""
    constants: frozenset[str] = frozenset()
    """Names of the frozen parameters that are saved in checkpoints."""
    loads: Mapping[str, float | None] = field(default_factory=dict)
    """Name -> rate of each trained parameter that is set from the load of experts, and not by the optimizer; see
    `lm_trainer.step.updates.load`."""
    logit_clips: Mapping[str, LogitClip] = field(default_factory=dict)
    """Name -> clip of each trained parameter that is set from attention logits, and not by the optimizer; see
    `lm_trainer.step.updates.logit_clip`. The names of its weights are names in the model."""
    multipliers: Mapping[str, Multipliers] = field(default_factory=dict)
    """Name -> multipliers of the optimizer's settings; parameters that are missing here have none."""

    @classmethod
    def trace(cls, build: Callable[[], nnx.Module], is_trainable: Callable[[str], bool] = lambda _: True) -> ModelDef:
        """Builds the model abstractly, without memory and devices.

        Args:
            build: creates the model.
            is_trainable: returns true if the parameter with this dotted name is trained.

        Raises:
            UserError: if no parameter is trained, or the logical axes of a parameter do not fit its shape.
        """
        module = nnx.eval_shape(build)
        for path, variable in nnx.iter_graph(module):
            if isinstance(variable, nnx.Param):
                variable.set_metadata(**{PARAM_NAME: ".".join(map(str, path))})
        graphdef, state = nnx.split(module, nnx.Param)
        axes = {}
        for path, variable in nnx.to_flat_state(state):
            name = ".".join(map(str, path))
            unsharded = (None,) * len(variable.shape)
            axes[name] = tuple(variable.get_metadata().get("logical_axes", unsharded))
            if len(axes[name]) != len(unsharded):
                raise UserError(f"{name}: shape {variable.shape} but logical_axes {axes[name]}")
        trainable = frozenset(filter(is_trainable, axes))
        if not trainable:
            raise UserError("no parameter of the model is trained: is_trainable is false for every name")
        loads = {
            ".".join(map(str, path)): variable.get_metadata(LOAD_RATE)
            for path, variable in nnx.to_flat_state(state)
            if isinstance(variable, LoadParam)
        }
        loads = {name: rate for name, rate in loads.items() if name in trainable}
        clips = {
            ".".join(map(str, path)): variable.get_metadata(LOGIT_CLIP).within(".".join(map(str, path[:-1])))
            for path, variable in nnx.to_flat_state(state)
            if isinstance(variable, LogitParam)
        }
        arrays, norms = nnx.to_pure_dict(state), norm_kinds(module)
        return cls(graphdef, arrays, axes, norms, build, trainable, loads=loads, logit_clips=clips)

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns dotted name -> shape and dtype of each parameter."""
        return named_leaves(self.abstract)

    @property
    def measured(self) -> Collection[str]:
        """Names of the trained parameters that the optimizer does not update."""
        return self.loads.keys() | self.logit_clips.keys()

    def optimizer_params(self) -> dict[str, Param]:
        """Returns dotted name -> each parameter that the optimizer updates, as it sees it."""
        return {
            name: Param(name, x.shape, self.axes[name], self.norms.get(name), self.multipliers.get(name, Multipliers()))
            for name, x in self.shapes.items()
            if name in self.trainable and name not in self.measured
        }

    def nest(self, params: Mapping[str, PyTree]) -> PyTree:
        """Returns the nested dict for `nnx.merge`."""
        return from_named_leaves(self.abstract, dict(params))

    def flatten(self, nested: PyTree) -> dict[str, PyTree]:
        """Returns parameters by dotted name; the inverse of `nest`."""
        return named_leaves(nested)

    def merge(self, params: Mapping[str, PyTree]) -> PyTree:
        """Returns the module with these parameters."""
        return nnx.merge(self.graphdef, self.nest(params))

    def merge_some(self, params: Mapping[str, PyTree]) -> PyTree:
        """Returns the module with these parameters. The other parameters are only shapes, and must not be read.

        A parameter may have a shape other than in the model, for example the shape of one layer of stacked layers.
        """
        return nnx.merge(self.graphdef, self.nest({**self.shapes, **params}))

    def init(self) -> Params:
        """Returns all parameters with initial values. Call it under `jax.jit`: eager initialisers differ by an ulp."""
        return named_leaves(nnx.to_pure_dict(nnx.state(self.build(), nnx.Param)))
