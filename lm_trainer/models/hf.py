"""Conversion of models to and from the Hugging Face format: the content of config.json, and the tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import from_named_leaves, leaf_name, named_leaves
from lm_trainer.models import MODEL_CONFIGS
from lm_trainer.models.base import DecoderConfig
from lm_trainer.models.hf_constants import check_constants, constant_tensors
from lm_trainer.models.hf_known import check_fields_known
from lm_trainer.models.hf_param import ParamInfo
from lm_trainer.models.hf_stream import SourceSlice, source_slices
from lm_trainer.models.hf_table import (
    HfFamily,
    PendingTensor,
    check_tensors,
    file_name,
    file_tensors,
    params_from_tensors,
    pending_tensors,
    settings_from_hf,
    settings_to_hf,
)
from lm_trainer.models.text_part import text_config
from lm_trainer.nn.init import LOGICAL_AXES
from lm_trainer.nn.router import LOAD_RATE, LoadParam


def config_from_hf(hf: Mapping[str, Any]) -> tuple[DecoderConfig, int]:
    """Reads the model configuration and the vocabulary size from the content of a config.json.

    Reads files written by transformers 4 and 5. Settings that affect how a model runs, but not its results, keep our
    defaults. Of a model that also reads images or sound, reads the text model.

    Raises:
        UserError: for an unknown family, a setting that has no counterpart here, or a field that is not known.
    """
    # Families without a format are included, so that their files are refused with the reason.
    families = {config.hf.model_type: config for config in MODEL_CONFIGS}
    hf = text_config(hf)
    config_class = families.get(str(hf.get("model_type")))
    if config_class is None:
        supported = ", ".join(sorted(name for name, c in families.items() if isinstance(c.hf, HfFamily)))
        raise UserError(f"config.json: model_type={hf.get('model_type')!r} is not supported; supported: {supported}")
    family = config_class.hf_family()
    fields = settings_from_hf(family, hf)
    check_fields_known(config_class, hf)
    vocab_size = hf.get("vocab_size")
    # In Python a bool is an int, but in JSON it is not a number.
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size < 1:
        raise UserError(f"config.json: vocab_size={vocab_size!r} is not a positive number")
    try:
        return config_class(**fields), vocab_size
    except ValidationError as error:
        # Messages use the names in the file, which users have in front of them.
        names = {entry.setting: entry.hf for entry in family.fields}
        lines = [
            ".".join(names.get(str(key), str(key)) for key in problem["loc"]) + f": {problem['msg']}"
            for problem in error.errors()
        ]
        raise UserError("config.json: " + "; ".join(line.removeprefix(": ") for line in lines)) from None


def config_to_hf(
    model_config: DecoderConfig, *, vocab_size: int, eos_id: int | None, bos_id: int | None
) -> dict[str, Any]:
    """Returns the content of config.json.

    Raises:
        UserError: for a setting that the format cannot express.
    """
    config = settings_to_hf(model_config.hf_family(), model_config)
    return {
        **config,
        **dict.fromkeys(("vocab_size", *model_config.hf_family().vocab_sizes), vocab_size),
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        # The default of some families is a token of their original vocabulary, which this vocabulary may not have.
        "pad_token_id": config.get("pad_token_id"),
    }


def params_from_hf(model_config: DecoderConfig, vocab_size: int, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the parameters as nested dicts of NumPy arrays, with exactly the file's values and dtype.

    `tensors` may load lazily. Each tensor is read once, or twice if a file repeats a tied tensor.

    Raises:
        UserError: for missing, unknown and misshapen tensors, naming them.
    """
    check_constants_of(model_config, tensors)
    shapes = _param_info_tree(model_config, vocab_size)
    params = params_from_tensors(model_config.file_table(), _infos_by_name(shapes), tensors)
    # Without a step before, the load of experts counts as equal.
    absent = {name: np.ones(leaf.shape, np.float32) for name, leaf in named_leaves(shapes).items() if not leaf.in_files}
    return from_named_leaves(shapes, {**params, **absent})


def params_to_hf(model_config: DecoderConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, C-contiguous, in the dtype of `params`; the inverse of `params_from_hf`.

    Raises:
        UserError: for the same reasons as in `pending_params_to_hf`.
    """
    return {name: np.asarray(tensor) for name, tensor in pending_params_to_hf(model_config, params).items()}


def check_constants_of(model_config: DecoderConfig, tensors: Mapping[str, np.ndarray]) -> None:
    """Raises UserError if a constant tensor of a file has another value than the family's table.

    `tensors` may load lazily. Only constants are read.
    """
    check_constants(model_config.hf_family(), model_config.num_layers, tensors)


def pending_params_to_hf(
    model_config: DecoderConfig, params: Mapping[str, Any]
) -> dict[str, PendingTensor | np.ndarray]:
    """Returns the same as `params_to_hf`, but assembles each tensor only when NumPy requests it; allocates no memory.

    Raises:
        UserError: for a setting that the format cannot express, or parameters that do not fit the configuration.
    """
    # Called for its errors, because a setting that the format cannot express must not be lost silently.
    settings_to_hf(model_config.hf_family(), model_config)
    named = named_leaves(params)
    vocab_size = named["embed.tokens"].shape[0]
    everything = named_leaves(_param_info_tree(model_config, vocab_size))
    leaves = {name: leaf for name, leaf in everything.items() if leaf.in_files}
    named = {name: x for name, x in named.items() if name in leaves or name not in everything}
    shapes = {name: tuple(leaf.shape) for name, leaf in named.items()}
    if mismatched := sorted(
        name for name in leaves.keys() | shapes.keys() if not _shape_matches(leaves.get(name), shapes.get(name))
    ):
        raise UserError(f"the parameters are not those of this configuration: {', '.join(mismatched)}")
    family = model_config.file_table()
    tensors = pending_tensors(family, leaves, named)
    copies = {file_name(family, copy): tensors[file_name(family, first)] for copy, first in family.copies.items()}
    return {**tensors, **copies, **constant_tensors(family, model_config.num_layers, tensors)}


def check_writable(model_config: DecoderConfig) -> None:
    """Raises `UserError` if the format cannot express a setting or a parameter of the model."""
    # One token is enough, because no table depends on the vocabulary size.
    family, vocab_size = model_config.hf_family(), 1
    settings_to_hf(family, model_config)
    leaves = param_infos(model_config, vocab_size)
    entries = file_tensors(family, leaves)
    _check_mapped(family, leaves, {part.path for entry in entries for part in entry.parts})


def _check_mapped(family: HfFamily, leaves: Mapping[str, ParamInfo], mapped: Collection[str]) -> None:
    if unmapped := sorted(leaves.keys() - set(mapped)):
        raise UserError(f"a Hugging Face {family.model_type} model has no place for {', '.join(unmapped)}")


class ReadPlan(NamedTuple):
    """Plan for reading each parameter from the tensors of a file."""

    pieces: dict[str, list[SourceSlice]]
    """Slices of the tensors by dotted name of the parameter."""
    repeated: dict[str, str]
    """Tensors of the file that must equal another tensor, because this model has a single parameter for both."""


def plan_reading(
    model_config: DecoderConfig, vocab_size: int, shapes: Mapping[str, tuple[int, ...]], files: Mapping[str, str]
) -> ReadPlan:
    """Maps the tensors of a file to parameters, without reading any of them.

    Args:
        model_config: the model.
        vocab_size: number of rows of the model's embedding.
        shapes: shapes of the tensors of the file.
        files: file of each tensor, shown in messages.

    Raises:
        UserError: for missing, unknown and misshapen tensors, naming them.
    """
    family = model_config.file_table()
    leaves = param_infos(model_config, vocab_size)
    entries = file_tensors(family, leaves)
    names, repeated = check_tensors(family, entries, shapes, files)
    pieces = source_slices(entries, names)
    _check_mapped(family, leaves, pieces.keys())
    return ReadPlan(pieces, repeated)


def param_infos(model_config: DecoderConfig, vocab_size: int) -> dict[str, ParamInfo]:
    """Returns the shape and axes of every parameter in a file by dotted name; allocates no memory."""
    return _infos_by_name(_param_info_tree(model_config, vocab_size))


def _shape_matches(leaf: ParamInfo | None, shape: tuple[int, ...] | None) -> bool:
    return leaf is not None and leaf.shape == shape


def _param_info_tree(model_config: DecoderConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the parameter tree with a `ParamInfo` for each array; allocates no memory."""
    model = nnx.eval_shape(lambda: model_config.build(vocab_size, rngs=nnx.Rngs(0)))
    layers_by_prefix = model_config.spec(vocab_size).layers_by_prefix

    def to_param_info(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        in_files = not isinstance(variable, LoadParam) or variable.get_metadata(LOAD_RATE) is not None
        shape, axes, name = tuple(variable.get_value().shape), variable.get_metadata(LOGICAL_AXES), leaf_name(path)
        layers = next((layers for prefix, layers in layers_by_prefix.items() if name.startswith(prefix)), range(0))
        return variable.replace(ParamInfo(shape, axes, in_files, layers))

    state = jax.tree_util.tree_map_with_path(
        to_param_info, nnx.state(model, nnx.Param), is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return nnx.to_pure_dict(state)


def _infos_by_name(shapes: dict[str, Any]) -> dict[str, ParamInfo]:
    return {name: leaf for name, leaf in named_leaves(shapes).items() if leaf.in_files}
