"""Names of the weights that an adapter configuration selects."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from flax import nnx

from lm_trainer.core.errors import UserError
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.lora_config import LoraConfig
from lm_trainer.nn.moe import Moe

ModuleNames = Mapping[str, Sequence[str]]
"""Maps a parameter name to the modules that hold the parameter under other names, one per layer."""
EMBEDDING, HEAD = "embed.tokens", "head"


class AdaptableWeight(NamedTuple):
    """A weight that is no linear layer's, and can have an adapter."""

    module: nnx.Module
    """The module that reads the weight."""
    param: nnx.Param


def find_weights(model: nnx.Module) -> dict[str, AdaptableWeight]:
    """Lists the embedding, the head and the routed experts of a model by dotted name."""
    return dict(_iterate_weights(model))


def _iterate_weights(model: nnx.Module) -> Iterator[tuple[str, AdaptableWeight]]:
    # A head that reads more than a projection of its inputs uses the table of the embedding in other places too.
    if isinstance(model, Decoder) and model.spec.senses is None:
        yield EMBEDDING, AdaptableWeight(model.embed, model.embed.tokens)
        if model.head is not None:
            yield HEAD, AdaptableWeight(model, model.head)
    for path, node in nnx.iter_graph(model):
        # Not the modules that predict later tokens, which only training uses.
        if isinstance(node, Moe) and path[0] == "blocks":
            name = ".".join(map(str, path))
            yield f"{name}.gate", AdaptableWeight(node, node.gate)
            yield f"{name}.up", AdaptableWeight(node, node.up)
            yield f"{name}.down", AdaptableWeight(node, node.down)


def select_targets(
    config: LoraConfig, layers: Sequence[str], weights: Mapping[str, AdaptableWeight], aliases: ModuleNames
) -> set[str]:
    """Returns the names of the linear layers and of the other weights that get an adapter.

    Raises:
        UserError: as for `lm_trainer.nn.lora.attach_lora`.
    """
    if config.patterns is None:
        return set(layers)
    names = {layer: aliases.get(f"{layer}.weight", ()) for layer in layers}
    names |= {weight: aliases.get(weight, ()) for weight in weights}
    selected: set[str] = set()
    for pattern in config.patterns:
        matched = {target for target in names if _matches(config, pattern, target, names[target])}
        if not matched:
            listed = _target_names(names)
            near = difflib.get_close_matches(pattern, [*listed, *(name.rsplit(".", 1)[-1] for name in listed)], 1)
            raise UserError(
                f"adapter.target_modules: {pattern!r} matches no layer that can be adapted"
                + (f"; did you mean {near[0]!r}?" if near else ".")
                + f" There are: {', '.join(listed)}"
            )
        selected |= matched
    if config.dropout and (without_input := sorted(selected & weights.keys() - {HEAD})):
        raise UserError(
            f"adapter.dropout: an adapter of {without_input[0]} changes the weight itself and has no input to drop; "
            f"set dropout to 0, or remove it from target_modules"
        )
    return selected


def _matches(config: LoraConfig, pattern: str, target: str, module_names: Sequence[str]) -> bool:
    if target in (EMBEDDING, HEAD):
        # Only by name, so that a pattern for all layers does not include them.
        named = [name for name in (target, *module_names) if name.rsplit(".", 1)[-1] in pattern]
        return any(config.matches(pattern, name) for name in named)
    if config.matches(pattern, target):
        return True
    matched = [name for name in module_names if config.matches(pattern, name)]
    if matched and len(matched) < len(module_names):
        other = next(name for name in module_names if name not in matched)
        raise UserError(
            f"adapter.target_modules: {pattern!r} matches {matched[0]} but not {other}; layers of one kind are adapted "
            f"together, so write '*' or a pattern for any number in place of the layer's"
        )
    return bool(matched)


def _target_names(names: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the shortest names by which a list may select the targets, our own names first."""
    own_names = [re.sub(r"^blocks\.\d+\.", "", name) for name in names]
    alias_names = [re.sub(r"^.*?\.\d+\.", "", name) for aliases in names.values() for name in aliases[:1]]
    return list(dict.fromkeys([*own_names, *alias_names]))
