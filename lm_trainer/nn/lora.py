"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): the trained product of two thin matrices, added to a frozen
matrix.

Shape letters: L layers, M rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.init import LOGICAL_AXES
from lm_trainer.nn.linear import Linear, dropout
from lm_trainer.nn.lora_config import LoraConfig
from lm_trainer.nn.lora_targets import ModuleNames, find_weights, select_targets
from lm_trainer.nn.lora_weights import SUFFIX, WeightLora
from lm_trainer.nn.read import read

_LORA = "lora"


class Lora(nnx.Module):
    """Adapter of one linear layer, stacked over layers as that layer is; its result is added to the layer's result."""

    def __init__(self, linear: Linear, config: LoraConfig, *, index: int, rngs: nnx.Rngs):
        # The base is quantized after its adapters are attached.
        weight = linear.weight
        assert isinstance(weight, nnx.Param)
        axes = weight.get_metadata(LOGICAL_AXES)
        # The leading `layers` axis if the weight is stacked over layers; its adapter is then stacked too.
        lead = len(axes) - len(linear.in_shape) - len(linear.out_shape)
        layers, inputs = weight.shape[:lead], math.prod(linear.in_shape)
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
    """Adds adapters to the linear layers, the embedding, the head and the experts that are selected by `config`.

    Raises:
        UserError: if a pattern matches nothing that can be adapted, or only some of the layers of a kind, or dropout is
            set for a weight whose adapter has none.
    """
    linears = {".".join(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, Linear)}
    linears = {name: linear for name, linear in linears.items() if name.startswith("blocks.")}
    weights = find_weights(model)
    selected = select_targets(config, list(linears), weights, aliases)
    # Numbers all linear layers, so that the dropout of an adapter does not depend on the other selected layers.
    for number, (name, linear) in enumerate(linears.items()):
        if name in selected:
            linear.set_adapter(Lora(linear, config, index=number, rngs=rngs))
    for name, weight in weights.items():
        if name in selected:
            kind = {"outputs_first": name == "head", "of_tokens": name == "embed.tokens"}
            adapter = WeightLora(weight.param, config, **kind, rngs=rngs)
            setattr(weight.module, name.rpartition(".")[2] + SUFFIX, nnx.data(adapter))


def is_adapter_param(name: str) -> bool:
    """Returns true if the dotted name belongs to a parameter of an adapter."""
    module = name.split(".")[-2:-1]
    return bool(module) and (module[0] == _LORA or module[0].endswith(SUFFIX))


def adapted_weight_name(name: str) -> str:
    """Returns the dotted name of the weight whose adapter has the parameter `name`."""
    adapter = name.rpartition(".")[0]
    if adapter.endswith(SUFFIX):
        return adapter.removesuffix(SUFFIX)
    return f"{adapter.removesuffix(_LORA)}weight"


def adapter_name(weight: str) -> str:
    """Returns the dotted name of the adapter of a weight; the inverse of `adapted_weight_name`."""
    module, _, leaf = weight.rpartition(".")
    return f"{module}.{_LORA}" if leaf == "weight" else f"{weight}{SUFFIX}"


def merge_lora(params: Mapping[str, Any], config: LoraConfig) -> dict[str, Any]:
    """Merges adapters into the weights. Returns the parameters, by dotted name, of a model without adapters."""
    merged = {name: x for name, x in params.items() if not is_adapter_param(name)}
    for name in sorted({adapted_weight_name(name) for name in params if is_adapter_param(name)}):
        weight, a, b = params[name], *(params[f"{adapter_name(name)}.{factor}"] for factor in ("a", "b"))
        if name.endswith(".weight"):
            layers = weight.shape[0]
            a, b = a.reshape(layers, -1, config.rank), b.reshape(layers, config.rank, -1)
        # In float32: the change is small compared to the weight, and their sum is rounded only once.
        change = config.scale * (a.astype("float32") @ b.astype("float32"))
        # The head has its outputs first.
        change = change.T if name == "head" else change.reshape(weight.shape)
        merged[name] = (weight.astype("float32") + change).astype(weight.dtype)
    return merged
