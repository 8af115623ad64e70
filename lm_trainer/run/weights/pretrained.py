"""Finds Hugging Face checkpoints for initial weights, checks that they match the run, and loads them to the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from pydantic import ValidationError

from lm_trainer.checkpoint.store import list_steps
from lm_trainer.core.bucket import Bucket, StoragePath
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expand_home
from lm_trainer.core.nf4 import Nf4Matrix, quantize_matrix
from lm_trainer.data.tokenizer import HfTokenizer, Pretrained, Tokenizer
from lm_trainer.data.tokenizer.compare import find_difference, has_rows_for
from lm_trainer.data.tokenizer.hf import load_pretrained
from lm_trainer.export.huggingface import errors_prefixed_with, read_hf_config, read_hf_settings
from lm_trainer.export.mxfp4_tensor import MXFP4
from lm_trainer.export.nf4_files import Nf4Tensor
from lm_trainer.export.settings import HfSettings
from lm_trainer.export.tensor_file import Region
from lm_trainer.export.weights import Weights
from lm_trainer.models import DecoderConfig, hf
from lm_trainer.models.hf_section import adopt_hf_config, compare_with_hf_config
from lm_trainer.models.hf_stream import SourceSlice, read_block
from lm_trainer.nn.nf4 import find_nf4_weights
from lm_trainer.parallel.sharded_array import HOST_BYTES, make_sharded_array
from lm_trainer.profile.flops import parameter_count
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.directory import checkpoint_directory, choose_run_id
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.weights.hf_transfer import fetch_directory
from lm_trainer.run.weights.nf4_base import quantized_arrays
from lm_trainer.run.weights.saved_model import read_config, read_published_settings, read_vocabulary
from lm_trainer.step.state.model_def import ModelDef, Params


@dataclass(frozen=True)
class HfStart:
    """Initial state of a run that starts from a Hugging Face checkpoint."""

    config: RunConfig
    """Configuration of the run, with the resolved model section."""
    vocab_size: int
    """Number of rows of the token embedding."""
    source: HfCheckpoint | None
    """The Hugging Face checkpoint; None if the run itself already has a checkpoint. Frozen weights are then read from
    the Hugging Face checkpoint when they are needed."""
    notes: tuple[str, ...] = ()
    """Notes to show to the user."""

    def check_tokenizer(self, tokenizer: Tokenizer) -> int:
        """Returns `vocab_size`. Raises `UserError` if the tokenizer does not match the checkpoint."""
        if self.source is not None:
            self.source.check_tokenizer(tokenizer)
        return self.vocab_size

    def export_settings(self, tokenizer: HfTokenizer) -> HfSettings | None:
        """Returns the settings of the checkpoint for exports of the run, or None if an earlier attempt saved them."""
        source = self.source
        return None if source is None else source.settings.adapt_to_tokenizer(tokenizer, source.directory)

    def with_initial_weights(self, model: ModelDef) -> ModelDef:
        """Returns the model with the weights of the checkpoint as initial values."""

        def load(shapes: Mapping[str, Any], shardings: Mapping[str, Sharding]) -> Params:
            source = self.source or HfCheckpoint.open(self.config)
            return source.load(self.config.model, shapes, shardings)

        return dataclasses.replace(model, load=load)


def find_hf_start(config: RunConfig, run: str) -> HfStart | None:
    """Finds the Hugging Face checkpoint that a run starts from, and resolves the model section.

    Returns None without one.

    All mismatches are reported here, before text is tokenised and before any large file is read.

    Raises:
        UserError: if the checkpoint does not exist, is damaged, or does not match the configuration.
        MachineError: if the hub is unreachable.
    """
    if not config.initialize_from_hf:
        return None
    if resumed := _find_resumed_start(config, checkpoint_directory(config.trainer, run)):
        return resumed
    source = HfCheckpoint.open(config)
    section, notes = _resolve_model_section(config, source.directory, source.config, source.vocab_size)
    # Reads only the file headers, to report missing tensors before text is tokenised.
    source.plan_read(section)
    difference_notes = (note,) if (note := section.describe_difference_from_hf()) is not None else ()
    tokenizer = config.data.tokenizer_config
    if isinstance(tokenizer, Pretrained):
        source.check_tokenizer(load_pretrained(tokenizer))
    return HfStart(
        _replace_model_section(config, section),
        source.vocab_size,
        source,
        (source.describe(section), *notes, *difference_notes),
    )


def published_model_settings(
    config: RunConfig, start: HfStart | None, tokenizer: HfTokenizer, checkpoints: StoragePath
) -> HfSettings | None:
    """Returns the settings of the published model that a run started from, or None if it did not start from one.

    Args:
        config: configuration of the run.
        start: the Hugging Face checkpoint that the run starts from, or None.
        tokenizer: tokenizer of the run.
        checkpoints: checkpoint directory of the run, which contains the settings after its first attempt.
    """
    # A resumed run has saved the settings, and does not need the model that it started from.
    if list_steps(checkpoints):
        return read_published_settings(checkpoints)
    if start is not None:
        return start.export_settings(tokenizer)
    trainer = config.trainer
    resumed = None if trainer.load_checkpoint is False else trainer.load_checkpoint_path
    other = resumed or trainer.initialize_from
    return None if other is None else read_published_settings(find_checkpoints(other)[0])


def resolve_model(config: RunConfig, name: str) -> RunConfig:
    """Returns the configuration with the model section used in training. Of the checkpoint, only config.json is read.

    Args:
        config: configuration of the run.
        name: name of the configuration, which is used for the run ID if neither the configuration nor the environment
            sets one.

    Raises:
        UserError: as for `find_hf_start`.
        MachineError: if the hub is unreachable.
    """
    if not config.use_hf_model_config:
        return config
    if resumed := _find_resumed_start(config, checkpoint_directory(config.trainer, choose_run_id(config, name))):
        return resumed.config
    directory = _locate_checkpoint(config, weights=False)
    return _replace_model_section(config, _resolve_model_section(config, directory, *read_hf_config(directory))[0])


def read_checkpoint_vocab_size(config: RunConfig) -> int:
    """Returns the number of embedding rows in the checkpoint `initialize_from_hf`.

    Raises the same errors as `resolve_model`.
    """
    return read_hf_config(_locate_checkpoint(config, weights=False))[1]


def _resolve_model_section(
    config: RunConfig, directory: Path, hf_config: DecoderConfig, vocab_size: int
) -> tuple[DecoderConfig, list[str]]:
    """Returns the resolved model section and notes about it for the user."""
    set_keys = config.model.model_fields_set if "model" in config.model_fields_set else set()
    with errors_prefixed_with(directory / "config.json"):
        if config.use_hf_model_config:
            return adopt_hf_config(config.model, set_keys, hf_config, vocab_size), []
        return config.model, compare_with_hf_config(config.model, set_keys, hf_config, vocab_size)


def _find_resumed_start(config: RunConfig, checkpoints: StoragePath) -> HfStart | None:
    """Returns the `HfStart` of a run that already has a checkpoint, with the recorded model section.

    Returns None if the run has no checkpoint.
    """
    if config.trainer.load_checkpoint is False:
        return None
    if isinstance(checkpoints, Bucket):
        checkpoints.check_writable("trainer.checkpointer.base_path")
    if not list_steps(checkpoints):
        return None
    if config.use_hf_model_config:
        config = _replace_model_section(config, read_config(checkpoints).model)
    note = f"the run has a checkpoint of its own and does not begin at {hf_source_name(config)} again"
    return HfStart(config, read_vocabulary(checkpoints)[0], None, (note,))


def _replace_model_section(config: RunConfig, section: DecoderConfig) -> RunConfig:
    """Returns the configuration with the given model section, and validates it."""
    # Passes only the keys that were set explicitly, so that defaults remain marked as defaults.
    try:
        return RunConfig(**{**{name: getattr(config, name) for name in config.model_fields_set}, "model": section})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"with the model of the checkpoint: {reason}") from None


@dataclass(frozen=True)
class HfCheckpoint:
    """A checkpoint in Hugging Face format. Until `load` is called, only the file headers are read."""

    name: str
    """Name of the checkpoint, as the user has written it."""
    directory: Path
    config: DecoderConfig
    """Model section that is equivalent to config.json."""
    vocab_size: int
    weights: Weights
    settings: HfSettings
    """Contents of the other files next to the weights."""
    key: str = "initialize_from_hf"
    """Key of the configuration that names the checkpoint."""

    @classmethod
    def open(cls, config: RunConfig) -> HfCheckpoint:
        """Opens the checkpoint `initialize_from_hf`. Raises the same errors as `find_hf_start`."""
        directory = _locate_checkpoint(config)
        model, vocab_size, settings = read_hf_settings(directory)
        return cls(hf_source_name(config), directory, model, vocab_size, Weights(directory), settings)

    def describe(self, model: DecoderConfig) -> str:
        """Describes the checkpoint in one line, with the context length of exports if `model` has a shorter one."""
        files = f"{len(self.weights.files)} file{'s' * (len(self.weights.files) > 1)}"
        count = parameter_count(self.config.spec(self.vocab_size))
        dtypes, context = ", ".join(sorted(self.weights.dtypes)), self.config.seq_len
        text = f"starting from the weights of {self.name}: {self.config.type}, {count:,} parameters, {dtypes}, {files}"
        if MXFP4 in self.weights.dtypes:
            text += (
                "; weights in MXFP4 are dequantized, and exports are not quantized again (bf16 holds all their values)"
            )
        if self.weights.left_out:
            text += f"; {self.weights.left_out} tensors of other parts than its text model are not read"
        return f"{text}; exports keep its context of {context:,} tokens" if model.seq_len < context else text

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises `UserError` if the token IDs of the tokenizer do not match this checkpoint."""
        remedy = f"write data.tokenizer: {self.name.partition('@')[0]}"
        assert isinstance(tokenizer, HfTokenizer)
        if not has_rows_for(tokenizer, self.vocab_size):
            raise UserError(
                f"data.tokenizer has ids up to {tokenizer.vocab_size - 1:,}, but {self.key}: {self.name} has "
                f"{self.vocab_size:,} rows for them; use its own: {remedy}"
            )
        if not (self.directory / "tokenizer.json").is_file():
            raise UserError(
                f"{self.key}: {self.directory} has no tokenizer.json to compare data.tokenizer with; copy it "
                f"there, from where the checkpoint is from"
            )
        if difference := find_difference(tokenizer, self.directory):
            name = f"{self.key}: {self.name}"
            raise UserError(f"data.tokenizer is not that of {name}: {difference}; use its own: {remedy}")

    def plan_read(self, model: DecoderConfig) -> hf.ReadPlan:
        """Finds the location of every parameter of the model in the files.

        Raises:
            UserError: for missing tensors, unknown tensors, wrong shapes, and dtypes that cannot be read exactly.
        """
        with errors_prefixed_with(self.directory):
            stored = hf.plan_reading(model, self.vocab_size, *self.weights.shapes_and_files())
        for name in {piece.tensor for pieces in stored.pieces.values() for piece in pieces}:
            # Raises for a dtype that NumPy cannot represent exactly.
            _ = self.weights.stored[name].numpy_dtype
        return stored

    def load(
        self, model: DecoderConfig, shapes: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, Sharding]
    ) -> Params:
        """Loads the parameters of the model. Each process reads only the shards on its devices.

        Host memory holds only a part of one tensor at a time. Weights that are quantized in `shapes` are read and
        quantized by every process, one weight of all layers at a time; a file with NF4 keeps its codes.

        Raises:
            UserError: as for `plan_read`, and if the copies of a tied tensor differ.
            MachineError: if a file can no longer be read.
        """
        stored = self.plan_read(model)
        # The files of a model with tied tensors may contain such a tensor twice. If the copies differ, the model is
        # ambiguous.
        for copy, first in stored.repeated.items():
            if not self.weights.are_equal(copy, first):
                raise UserError(
                    f"{self.directory}: {copy} differs from {first}, but this model has one tensor for both"
                )
        with errors_prefixed_with(self.directory):
            hf.check_constants_of(model, self.weights)
        quantized = find_nf4_weights(shapes)
        params = {
            name: self._assemble(pieces, shapes[name], shardings[name])
            for name, pieces in stored.pieces.items()
            if name not in quantized
        }
        for name, shape in quantized.items():
            read = partial(self._read_nf4, outputs=shape[-2])
            arrays = quantized_arrays(name, shape, stored.pieces[name], read)
            params |= {array: _place_on_devices(x, shardings[array]) for array, x in arrays.items()}
        return params

    def _read_nf4(self, piece: SourceSlice, outputs: int) -> Nf4Matrix:
        stored = self.weights.stored[piece.tensor]
        if not isinstance(stored, Nf4Tensor):
            w = piece.read(tuple(slice(0, size) for size in piece.shape), self._read_region)
            # Files have a row for each output; here, outputs come last.
            return quantize_matrix(w.reshape(-1, outputs).T)
        if len(piece.entry.parts) > 1:
            raise UserError(
                f"{stored.file}: {stored.name} joins {len(piece.entry.parts)} matrices of this model, whose codes "
                f"share scales; leave adapter.base_quantization out, which dequantizes them"
            )
        return stored.read_matrix()

    def _assemble(self, pieces: list[SourceSlice], like: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
        max_elements = HOST_BYTES // np.dtype(like.dtype).itemsize
        return make_sharded_array(
            like.shape,
            like.dtype,
            sharding,
            lambda block: read_block(pieces, block, self._read_region, max_elements=max_elements),
        )

    def _read_region(self, name: str, region: Region) -> np.ndarray:
        return self.weights.stored[name].read(region)


def _place_on_devices(values: np.ndarray, sharding: Sharding) -> jax.Array:
    start = (0,) * values.ndim
    return make_sharded_array(values.shape, values.dtype, sharding, lambda block: [(start, values[block])])


def _locate_checkpoint(config: RunConfig, *, weights: bool = True) -> Path:
    name = expand_home(hf_source_name(config))
    # A directory name may contain an @.
    path, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    return fetch_directory(path, revision=revision or None, weights=weights)


def hf_source_name(config: RunConfig) -> str:
    """Returns the directory or hub name of the checkpoint `initialize_from_hf`."""
    if isinstance(config.initialize_from_hf, str):
        return config.initialize_from_hf
    name = config.model.reference_checkpoint or config.model.hf_family().reference
    if name is None:
        raise UserError(
            f"initialize_from_hf: no checkpoint of {config.model.type} is known best; write a directory or a name on "
            f"the hub, here or as model.reference_checkpoint"
        )
    return name
