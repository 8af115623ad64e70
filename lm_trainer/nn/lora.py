"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): the trained product of two thin matrices, added to a frozen
matrix.

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
"""Maps a parameter name to the modules that hold the parameter under other names, one per layer."""

_LORA = "lora"


class Lora(nnx.Module):
    """Adapter of one linear layer, stacked over layers as that layer is; its result is added to the layer's result."""

    def __init__(self, linear: Linear, config: LoraConfig, *, index: int, rngs: nnx.Rngs):
        axes = linear.weight.get_metadata(LOGICAL_AXES)
        # The leading `layers` axis if the weight is stacked over layers; its adapter is then stacked too.
        lead = len(axes) - len(linear.in_shape) - len(linear.out_shape)
        layers, inputs = linear.weight.shape[:lead], math.prod(linear.in_shape)
        into, out = axes[: lead + len(linear.in_shape)], axes[lead + len(linear.in_shape) :]
        # The bound of torch's linear layers, which PEFT also uses for A: kaiming_uniform with a = sqrt(5).
        bound = 1.0 / math.sqrt(inputs)
        shape = (*layers, *linear.in_shape, config.rank)
        values = jax.random.uniform(rngs.params(), shape, jnp.float32, minval=-bound, maxval=bound)
        self.a = nnx.Param(values, logical_axes=(*into, None))
        zeros = jnp.zeros((*layers, config.rank, *linear.out_shape), jnp.float32)
        self.b = nnx.Param(zeros, logical_axes=(*axes[:lead], None, *out))
        self.rank, self.scale, self.dropout, self.place = config.rank, config.scale, config.dropout, index

    def __call__(self, x_MI: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns scale * (x A) B, [M, O] in the dtype of `x_MI`; `key` is the block's key."""
        # A block passes the same key to all its adapters.
        adapter_key = None if key is None else jax.random.fold_in(key, self.place)
        a_IR = read(self.a, x_MI.dtype).reshape(-1, self.rank)
        b_RO = read(self.b, x_MI.dtype).reshape(self.rank, -1)
        # x A first, because it is thin; A B would be as large as the weight itself.
        return self.scale * jnp.matmul(jnp.matmul(dropout(x_MI, self.dropout, adapter_key), a_IR), b_RO)


def attach_lora(model: nnx.Module, config: LoraConfig, aliases: ModuleNames, *, rngs: nnx.Rngs) -> None:
    """Adds adapters to the linear layers selected by `config`.

    Raises:
        UserError: if a pattern matches no linear layer of the blocks, only some of the layers of a kind, or experts.
    """
    linears = {_join_path(path): node for path, node in nnx.iter_graph(model) if isinstance(node, Linear)}
    linears = {name: linear for name, linear in linears.items() if name.startswith("blocks.")}
    selected = _select_layers(config, list(linears), _find_expert_params(model), aliases)
    # Numbers all linear layers, so that the dropout of an adapter does not depend on the other selected layers.
    for number, (name, linear) in enumerate(linears.items()):
        if name in selected:
            linear.set_adapter(Lora(linear, config, index=number, rngs=rngs))


def is_adapter_param(name: str) -> bool:
    """Returns true if the dotted name belongs to a parameter of an adapter."""
    return name.split(".")[-2:-1] == [_LORA]


def adapted_layer_name(name: str) -> str:
    """Returns the dotted name of the linear layer whose adapter has the parameter `name`."""
    return name.rsplit(".", 2)[0]


def merge_lora(params: Mapping[str, Any], config: LoraConfig) -> dict[str, Any]:
    """Merges adapters into the weights. Returns the parameters, by dotted name, of a model without adapters."""
    merged = {name: x for name, x in params.items() if not is_adapter_param(name)}
    for layer in sorted({adapted_layer_name(name) for name in params if is_adapter_param(name)}):
        weight, a, b = (params[f"{layer}.{leaf}"] for leaf in ("weight", "lora.a", "lora.b"))
        layers = weight.shape[0]
        a_LIR, b_LRO = a.reshape(layers, -1, config.rank), b.reshape(layers, config.rank, -1)
        # In float32: the change is small compared to the weight, and their sum is rounded only once.
        change = (config.scale * (a_LIR.astype("float32") @ b_LRO.astype("float32"))).reshape(weight.shape)
        merged[f"{layer}.weight"] = (weight.astype("float32") + change).astype(weight.dtype)
    return merged


def _join_path(path: Iterable[object]) -> str:
    return ".".join(map(str, path))


def _find_expert_params(model: nnx.Module) -> list[str]:
    """Lists the names of the parameters of routed experts."""
    variables = {_join_path(path): node for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)}
    return [name for name, variable in variables.items() if "experts" in variable.get_metadata(LOGICAL_AXES)]


def _select_layers(config: LoraConfig, layers: Sequence[str], experts: Sequence[str], aliases: ModuleNames) -> set[str]:
    if config.patterns is None:
        return set(layers)
    selected: set[str] = set()
    for pattern in config.patterns:
        for name in experts:
            if expert := next((n for n in (name, *aliases.get(name, ())) if config.matches(pattern, n)), None):
                raise UserError(
                    f"adapter.target_modules: {pattern!r} names {expert}, but routed experts cannot have adapters; "
                    f"name linear layers alone: {', '.join(_layer_names(layers, aliases))}"
                )
        matched = {
            layer for layer in layers if _matches_layer(config, pattern, layer, aliases.get(f"{layer}.weight", ()))
        }
        if not matched:
            names = _layer_names(layers, aliases)
            near = difflib.get_close_matches(pattern, [*names, *(name.rsplit(".", 1)[-1] for name in names)], 1)
            raise UserError(
                f"adapter.target_modules: {pattern!r} matches no linear layer of the blocks"
                + (f"; did you mean {near[0]!r}?" if near else ".")
                + f" There are: {', '.join(names)}"
            )
        selected |= matched
    return selected


def _matches_layer(config: LoraConfig, pattern: str, layer: str, module_names: Sequence[str]) -> bool:
    if config.matches(pattern, layer):
        return True
    matched = [name for name in module_names if config.matches(pattern, name)]
    if matched and len(matched) < len(module_names):
        other = next(name for name in module_names if name not in matched)
        raise UserError(
            f"adapter.target_modules: {pattern!r} matches {matched[0]} but not {other}; layers of one kind are adapted "
            f"together, so write '*' or a pattern for any number in place of the layer's"
        )
    return bool(matched)


def _layer_names(layers: Sequence[str], aliases: ModuleNames) -> list[str]:
    """Returns the shortest names by which a list may select the linear layers, our own names first."""
    own_names = [layer.split(".", 2)[-1] for layer in layers]
    alias_names = [
        re.sub(r"^.*?\.\d+\.", "", name) for layer in layers for name in aliases.get(f"{layer}.weight", ())[:1]
    ]
    return list(dict.fromkeys([*own_names, *alias_names]))
