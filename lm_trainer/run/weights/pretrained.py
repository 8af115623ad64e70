"""Hugging Face checkpoints to start from: found, compared with the run, and read straight to the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from pydantic import ValidationError

from lm_trainer.checkpoint.store import committed_steps
from lm_trainer.core.bucket import Bucket, StoragePath
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expanded
from lm_trainer.data.tokenizer import HfTokenizer, Pretrained, Tokenizer
from lm_trainer.data.tokenizer.compare import find_difference, has_rows_for
from lm_trainer.data.tokenizer.hf import load_pretrained
from lm_trainer.export.huggingface import blame, read_hf_config, read_hf_settings
from lm_trainer.export.settings import HfSettings
from lm_trainer.export.tensor_file import Region
from lm_trainer.export.weights import Weights
from lm_trainer.models import DecoderConfig, hf
from lm_trainer.models.hf_section import adopt_hf_config, compare_with_hf_config
from lm_trainer.models.hf_stream import SourceSlice, read_block
from lm_trainer.parallel.sharded_array import HOST_BYTES, make_sharded_array
from lm_trainer.profile.flops import parameter_count
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.directory import checkpoint_directory, run_id
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.weights.hf_transfer import fetch_directory
from lm_trainer.run.weights.saved_model import read_config, read_settings, read_vocabulary
from lm_trainer.step.state.model_def import ModelDef, Params


@dataclass(frozen=True)
class HfStart:
    """The beginning of a run that goes on from a Hugging Face checkpoint."""

    config: RunConfig
    """The run, with the model section as it is used."""
    vocab_size: int
    """Rows of the embedding."""
    source: HfCheckpoint | None
    """None: the run has a checkpoint of its own, and needs the other one for frozen weights alone."""
    notes: tuple[str, ...] = ()
    """For the person at the terminal."""

    def check_tokenizer(self, tokenizer: Tokenizer) -> int:
        """The rows of the embedding; raises `UserError` where the tokenizer's ids mean something else to them."""
        if self.source is not None:
            self.source.check_tokenizer(tokenizer)
        return self.vocab_size

    def settings(self, tokenizer: HfTokenizer) -> HfSettings | None:
        """The settings of the checkpoint, for exports of the run; None: it has them from an earlier attempt."""
        source = self.source
        return None if source is None else source.settings.for_tokenizer(tokenizer, source.directory)

    def attach(self, model: ModelDef) -> ModelDef:
        """The model, with the checkpoint's values to start from."""

        def load(shapes: Mapping[str, Any], shardings: Mapping[str, Sharding]) -> Params:
            source = self.source or HfCheckpoint.open(self.config)
            return source.load(self.config.model, shapes, shardings)

        return dataclasses.replace(model, load=load)


def find_start(config: RunConfig, run: str) -> HfStart | None:
    """Finds the Hugging Face checkpoint that a run begins from, and the model section that follows; None without one.

    Whatever does not fit is found here, before text is tokenised and anything large is read.

    Raises:
        UserError: when there is no such checkpoint, it is damaged, or it is not what the configuration describes.
        MachineError: when the hub cannot be reached.
    """
    if not config.initialize_from_hf:
        return None
    if own := _resumed(config, checkpoint_directory(config.trainer, run)):
        return own
    source = HfCheckpoint.open(config)
    section, notes = _section(config, source.directory, source.config, source.vocab_size)
    # Only headers are read: a missing tensor is named before text is tokenised.
    source.plan(section)
    differing = (note,) if (note := section.differs_from_hf()) is not None else ()
    tokenizer = config.data.tokenizer_config
    if isinstance(tokenizer, Pretrained):
        source.check_tokenizer(load_pretrained(tokenizer))
    return HfStart(
        _with_model(config, section), source.vocab_size, source, (source.describe(section), *notes, *differing)
    )


def carried_settings(
    config: RunConfig, start: HfStart | None, tokenizer: HfTokenizer, own: StoragePath
) -> HfSettings | None:
    """The settings of the published model that a run comes from; None: it comes from none.

    Args:
        config: the run.
        start: the checkpoint in Hugging Face's layout that it begins from.
        tokenizer: the run's.
        own: directory of its checkpoints, which has the settings beside the first of them.
    """
    # A run that goes on needs nothing of where it was begun.
    if committed_steps(own):
        return read_settings(own)
    if start is not None:
        return start.settings(tokenizer)
    trainer = config.trainer
    resumed = None if trainer.load_checkpoint is False else trainer.load_checkpoint_path
    other = resumed or trainer.initialize_from
    return None if other is None else read_settings(find_checkpoints(other)[0])


def resolve_model(config: RunConfig, name: str) -> RunConfig:
    """The configuration with the model section that training would use; nothing but config.json is read.

    Args:
        config: the run.
        name: what to call it if neither the configuration nor the environment names it.

    Raises:
        UserError: as `find_start`.
        MachineError: when the hub cannot be reached.
    """
    if not config.use_hf_model_config:
        return config
    if own := _resumed(config, checkpoint_directory(config.trainer, run_id(config, name))):
        return own.config
    directory = _locate(config, weights=False)
    return _with_model(config, _section(config, directory, *read_hf_config(directory))[0])


def stored_vocabulary(config: RunConfig) -> int:
    """Rows of the embedding in the checkpoint that `initialize_from_hf` means; raises as `resolve_model`."""
    return read_hf_config(_locate(config, weights=False))[1]


def _section(
    config: RunConfig, directory: Path, theirs: DecoderConfig, vocab_size: int
) -> tuple[DecoderConfig, list[str]]:
    """The model section as it is used, and what to say about it."""
    given = config.model.model_fields_set if "model" in config.model_fields_set else set()
    with blame(directory / "config.json"):
        if config.use_hf_model_config:
            return adopt_hf_config(config.model, given, theirs, vocab_size), []
        return config.model, compare_with_hf_config(config.model, given, theirs, vocab_size)


def _resumed(config: RunConfig, own: StoragePath) -> HfStart | None:
    """The start of a run that has a checkpoint: with the model that it was begun with."""
    if config.trainer.load_checkpoint is False:
        return None
    if isinstance(own, Bucket):
        own.probe("trainer.checkpointer.base_path")
    if not committed_steps(own):
        return None
    if config.use_hf_model_config:
        config = _with_model(config, read_config(own).model)
    note = f"the run has a checkpoint of its own and does not begin at {source_name(config)} again"
    return HfStart(config, read_vocabulary(own)[0], None, (note,))


def _with_model(config: RunConfig, section: DecoderConfig) -> RunConfig:
    """The configuration with another model section, checked anew."""
    # Only the keys that were written, so that defaults stay known as defaults.
    try:
        return RunConfig(**{**{name: getattr(config, name) for name in config.model_fields_set}, "model": section})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"with the model of the checkpoint: {reason}") from None


@dataclass(frozen=True)
class HfCheckpoint:
    """A checkpoint in Hugging Face's layout, of which the headers are read and nothing else."""

    name: str
    """As the user wrote it."""
    directory: Path
    config: DecoderConfig
    """The model section that config.json describes."""
    vocab_size: int
    weights: Weights
    settings: HfSettings
    """Everything that is beside the weights."""

    @classmethod
    def open(cls, config: RunConfig) -> HfCheckpoint:
        """Finds the checkpoint that `initialize_from_hf` means; raises as `find_start`."""
        directory = _locate(config)
        model, vocab_size, settings = read_hf_settings(directory)
        return cls(source_name(config), directory, model, vocab_size, Weights(directory), settings)

    def describe(self, model: DecoderConfig) -> str:
        """One line: what it is, and what stays of it where a run trains `model`."""
        files = f"{len(self.weights.files)} file{'s' * (len(self.weights.files) > 1)}"
        count = parameter_count(self.config.spec(self.vocab_size))
        dtypes, context = ", ".join(sorted(self.weights.dtypes)), self.config.seq_len
        text = f"starting from the weights of {self.name}: {self.config.type}, {count:,} parameters, {dtypes}, {files}"
        return f"{text}; exports keep its context of {context:,} tokens" if model.seq_len < context else text

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises `UserError` where the ids of the tokenizer mean something else to this checkpoint."""
        remedy = f"write data.tokenizer: {self.name.partition('@')[0]}"
        assert isinstance(tokenizer, HfTokenizer)
        if not has_rows_for(tokenizer, self.vocab_size):
            raise UserError(
                f"data.tokenizer has ids up to {tokenizer.vocab_size - 1:,}, but {self.name} has {self.vocab_size:,} "
                f"rows for them; use its own: {remedy}"
            )
        if not (self.directory / "tokenizer.json").is_file():
            raise UserError(
                f"initialize_from_hf: {self.directory} has no tokenizer.json to compare data.tokenizer with; copy it "
                f"there, from where the checkpoint is from"
            )
        if difference := find_difference(tokenizer, self.directory):
            raise UserError(f"data.tokenizer is not that of {self.name}: {difference}; use its own: {remedy}")

    def plan(self, model: DecoderConfig) -> hf.ReadPlan:
        """Finds every parameter of the model in the files.

        Raises:
            UserError: for missing, unknown and misshapen tensors and those of dtypes that cannot be read exactly.
        """
        with blame(self.directory):
            stored = hf.plan_reading(model, self.vocab_size, *self.weights.headers())
        for name in {piece.tensor for pieces in stored.pieces.values() for piece in pieces}:
            # For its error: a dtype that NumPy cannot hold exactly.
            _ = self.weights.stored[name].numpy_dtype
        return stored

    def load(
        self, model: DecoderConfig, shapes: Mapping[str, jax.ShapeDtypeStruct], shardings: Mapping[str, Sharding]
    ) -> Params:
        """The parameters of the model, of which each process reads the slices that its devices hold.

        The host holds a part of one tensor at a time.

        Raises:
            UserError: as `plan`; and for two copies of one tensor that differ.
            MachineError: when a file cannot be read any more.
        """
        stored = self.plan(model)
        # Files of tied models may hold the tensor twice; copies that differ would be two models.
        for copy, first in stored.repeated.items():
            if not self.weights.are_equal(copy, first):
                raise UserError(
                    f"{self.directory}: {copy} differs from {first}, but this model has one tensor for both"
                )
        return {name: self._assemble(pieces, shapes[name], shardings[name]) for name, pieces in stored.pieces.items()}

    def _assemble(self, pieces: list[SourceSlice], like: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
        most = HOST_BYTES // np.dtype(like.dtype).itemsize
        return make_sharded_array(
            like.shape,
            like.dtype,
            sharding,
            lambda block: read_block(pieces, block, self._read, max_elements=most),
        )

    def _read(self, name: str, region: Region) -> np.ndarray:
        return self.weights.stored[name].read(region)


def _locate(config: RunConfig, *, weights: bool = True) -> Path:
    name = expanded(source_name(config))
    # The name of a directory may have an @ of its own.
    path, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    return fetch_directory(path, revision=revision or None, weights=weights)


def source_name(config: RunConfig) -> str:
    """The directory or hub name that `initialize_from_hf` means."""
    if isinstance(config.initialize_from_hf, str):
        return config.initialize_from_hf
    name = config.model.reference_checkpoint or config.model.hf_family().reference
    if name is None:
        raise UserError(
            f"initialize_from_hf: no checkpoint of {config.model.type} is known best; write a directory or a name on "
            f"the hub, here or as model.reference_checkpoint"
        )
    return name
