"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): a trained product of two thin matrices beside a frozen one.

Shape letters: L layers, M rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.core.errors import UserError
from lm_trainer.nn.init import LOGICAL_AXES
from lm_trainer.nn.linear import Linear, dropout
from lm_trainer.nn.lora_config import LoraConfig
from lm_trainer.nn.read import read

ModuleNames = Mapping[str, Sequence[str]]
"""From a parameter to the modules of other names that hold it, one for each layer."""

_LORA = "lora"


class Lora(nnx.Module):
    """The adapter of one linear layer, stacked over layers as that is; its result is added to that of the layer."""

    def __init__(self, linear: Linear, config: LoraConfig, *, place: int, rngs: nnx.Rngs):
        axes = linear.weight.get_metadata(LOGICAL_AXES)
        # The leading `layers` axis, where the weight is stacked over layers: its adapter is stacked likewise.
        lead = len(axes) - len(linear.in_shape) - len(linear.out_shape)
        layers, inputs = linear.weight.shape[:lead], math.prod(linear.in_shape)
        into, out = axes[: lead + len(linear.in_shape)], axes[lead + len(linear.in_shape) :]
        # The bound of torch's linear layers, from which PEFT draws A as well: kaiming_uniform with a = sqrt(5).
        bound = 1.0 / math.sqrt(inputs)
        shape = (*layers, *linear.in_shape, config.rank)
        values = jax.random.uniform(rngs.params(), shape, jnp.float32, minval=-bound, maxval=bound)
        self.a = nnx.Param(values, logical_axes=(*into, None))
        zeros = jnp.zeros((*layers, config.rank, *linear.out_shape), jnp.float32)
        self.b = nnx.Param(zeros, logical_axes=(*axes[:lead], None, *out))
        self.rank, self.scale, self.dropout, self.place = config.rank, config.scale, config.dropout, place

    def __call__(self, x_MI: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns scale * (x A) B, [M, O] in the dtype of `x_MI`; `key` is that of the block."""
        # A block hands one key to all its adapters.
        own = None if key is None else jax.random.fold_in(key, self.place)
        a_IR = read(self.a, x_MI.dtype).reshape(-1, self.rank)
        b_RO = read(self.b, x_MI.dtype).reshape(self.rank, -1)
        # First x A, which is thin: A B would be as large as the weight itself.
        return self.scale * jnp.matmul(jnp.matmul(dropout(x_MI, self.dropout, own), a_IR), b_RO)


def attach_lora(model: nnx.Module, config: LoraConfig, aliases: ModuleNames, *, rngs: nnx.Rngs) -> None:
    """Gives the linear layers that `config` chooses their adapters.

    Raises:
        UserError: when a pattern matches no linear layer of the blocks, or some layers of a kind but not others, or
            experts.
    """
    linears = {_dotted(path): node for path, node in nnx.iter_graph(model) if isinstance(node, Linear)}
    linears = {place: linear for place, linear in linears.items() if place.startswith("blocks.")}
    chosen = _chosen(config, list(linears), _experts(model), aliases)
    # Every layer is counted, so that the dropout of an adapter does not depend on which others are chosen.
    for number, (place, linear) in enumerate(linears.items()):
        if place in chosen:
            linear.set_adapter(Lora(linear, config, place=number, rngs=rngs))


def is_adapter_param(name: str) -> bool:
    """Returns true for the dotted name of an adapter's parameter."""
    return name.split(".")[-2:-1] == [_LORA]


def adapted_layer(name: str) -> str:
    """The dotted name of the linear layer whose adapter has the parameter `name`."""
    return name.rsplit(".", 2)[0]


def merge_lora(params: Mapping[str, Any], config: LoraConfig) -> dict[str, Any]:
    """The parameters of a model without adapters that computes what `params`, by dotted name, compute with them."""
    merged = {name: x for name, x in params.items() if not is_adapter_param(name)}
    for layer in sorted({adapted_layer(name) for name in params if is_adapter_param(name)}):
        weight, a, b = (params[f"{layer}.{leaf}"] for leaf in ("weight", "lora.a", "lora.b"))
        layers = weight.shape[0]
        a_LIR, b_LRO = a.reshape(layers, -1, config.rank), b.reshape(layers, config.rank, -1)
        # In float32: the change is small beside the weight, and their sum is rounded once.
        change = (config.scale * (a_LIR.astype("float32") @ b_LRO.astype("float32"))).reshape(weight.shape)
        merged[f"{layer}.weight"] = (weight.astype("float32") + change).astype(weight.dtype)
    return merged


def _dotted(path: Iterable[Any]) -> str:
    return ".".join(map(str, path))


def _experts(model: nnx.Module) -> list[str]:
    """The parameters that routed experts have."""
    variables = {_dotted(path): node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)}
    return [name for name, variable in variables.items() if "experts" in variable.get_metadata(LOGICAL_AXES)]


def _chosen(config: LoraConfig, layers: Sequence[str], experts: Sequence[str], aliases: ModuleNames) -> set[str]:
    if config.patterns is None:
        return set(layers)
    chosen: set[str] = set()
    for pattern in config.patterns:
        for name in experts:
            if found := next((n for n in (name, *aliases.get(name, ())) if config.matches(pattern, n)), None):
                raise UserError(
                    f"adapter.target_modules: {pattern!r} names {found}, but routed experts cannot have adapters; "
                    f"name linear layers alone: {', '.join(_short_names(layers, aliases))}"
                )
        matched = {layer for layer in layers if _means(config, pattern, layer, aliases.get(f"{layer}.weight", ()))}
        if not matched:
            names = _short_names(layers, aliases)
            near = difflib.get_close_matches(pattern, [*names, *(name.rsplit(".", 1)[-1] for name in names)], 1)
            raise UserError(
                f"adapter.target_modules: {pattern!r} matches no linear layer of the blocks"
                + (f"; did you mean {near[0]!r}?" if near else ".")
                + f" There are: {', '.join(names)}"
            )
        chosen |= matched
    return chosen


def _means(config: LoraConfig, pattern: str, layer: str, others: Sequence[str]) -> bool:
    if config.matches(pattern, layer):
        return True
    found = [name for name in others if config.matches(pattern, name)]
    if found and len(found) < len(others):
        left = next(name for name in others if name not in found)
        raise UserError(
            f"adapter.target_modules: {pattern!r} matches {found[0]} but not {left}; layers of one kind are adapted "
            f"together, so write '*' or a pattern for any number in place of the layer's"
        )
    return bool(found)


def _short_names(layers: Sequence[str], aliases: ModuleNames) -> list[str]:
    """Each linear layer in the shortest words that a list may hold, ours first."""
    ours = [layer.split(".", 2)[-1] for layer in layers]
    theirs = [re.sub(r"^.*?\.\d+\.", "", name) for layer in layers for name in aliases.get(f"{layer}.weight", ())[:1]]
    return list(dict.fromkeys([*ours, *theirs]))
