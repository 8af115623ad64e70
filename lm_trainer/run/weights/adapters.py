"""Runs that train an adapter: the frozen model behind it, what it costs, and the model that the two make together."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from lm_trainer.checkpoint.digest import digests
from lm_trainer.checkpoint.store import CheckpointError, CheckpointStore, Restored, committed_steps, read_record
from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expanded
from lm_trainer.core.tree import named_leaves, nested_from_names
from lm_trainer.models.hf import param_infos
from lm_trainer.nn.lora import is_adapter_param, merge_lora
from lm_trainer.profile.flops import FlopsCount
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.weights.pretrained import HfCheckpoint, source_name
from lm_trainer.run.weights.saved_model import LoadedModel, load_model, read_config
from lm_trainer.step.state.model_def import ModelDef, Params

FROZEN = "frozen"
"""In the record of a checkpoint: `frozen_digest`."""
_BASE_STEP = "base_step"
_INDECISIVE = frozenset(
    {"dropout", "init_std", "scan", "remat", "backend", "block_size", "upcast", "balance_coef", "z_coef"}
    | {"vocab_size", "num_positions"}
)
"""Fields of a spec that act on training or on speed alone, or that the shapes of parameters show."""


@dataclass(frozen=True)
class Base:
    """The checkpoint of a run whose weights stay frozen while an adapter is trained."""

    directory: StoragePath
    step: int | None
    """None: the newest."""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the record of every checkpoint, by which the base stays at its step even if its run goes on."""
        return {_BASE_STEP: self.step}

    def attach(self, model: ModelDef) -> ModelDef:
        """The model, with the values of this checkpoint to start from."""

        def load(shapes: Mapping[str, Any], shardings: Mapping[str, Sharding]) -> Params:
            loaded = load_whole(self.directory, self.step).params
            named = {name: np.asarray(x) for name, x in named_leaves(loaded).items()}
            _check_same_model(
                self.directory, named, {name: x for name, x in shapes.items() if not is_adapter_param(name)}
            )
            return {name: jax.device_put(x.astype(shapes[name].dtype), shardings[name]) for name, x in named.items()}

        return dataclasses.replace(model, load=load)


def find_base(config: RunConfig, store: CheckpointStore) -> Base | None:
    """The frozen model of a run with an adapter; None where it is no other run's.

    It is at the step that the run's own newest checkpoint names, else the one that the configuration names, else the
    newest.

    Raises:
        UserError: when there is no such run, or it computes something else than the model section says.
    """
    if config.adapter is None or config.trainer.initialize_from is None:
        return None
    directory, step = find_checkpoints(config.trainer.initialize_from)
    _check_same_function(directory, read_config(directory), config)
    # A base that trains on would change the model below the adapter between two attempts.
    if (pinned := _recorded_step(store)) is not None:
        return Base(directory, pinned)
    return Base(directory, max(committed_steps(directory), default=None) if step is None else step)


def _recorded_step(store: CheckpointStore) -> int | None:
    for step in reversed(store.steps()):
        with contextlib.suppress(CheckpointError):
            return read_record(store.directory, step).get(_BASE_STEP)
    return None


def _check_same_function(where: StoragePath, theirs: RunConfig, ours: RunConfig) -> None:
    """Refuses a base that computes something else, even where its parameters have the right shapes."""
    found, wanted = (_decisive(config.model.spec(1)) for config in (theirs, ours))
    lines = [
        f"{key}: {found.get(key)} there, {wanted.get(key)} here"
        for key in dict.fromkeys([*found, *wanted])
        if found.get(key) != wanted.get(key)
    ]
    if lines:
        raise UserError(
            f"trainer.initialize_from: {where} is a model that computes something else than the model section says; "
            f"take over the one of {where / 'config.yaml'}:\n  " + "\n  ".join(lines[:8])
        )


def _decisive(spec: Any, path: str = "") -> dict[str, Any]:
    """The fields of a spec that decide the results of a trained model, by dotted name."""
    if dataclasses.is_dataclass(spec):
        parts = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    elif isinstance(spec, tuple):
        parts = dict(enumerate(spec))
    else:
        return {path: spec}
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if name not in _INDECISIVE:
            found |= _decisive(part, f"{path}.{name}" if path else str(name))
    return found


def _check_same_model(where: StoragePath, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    theirs, ours = ({name: tuple(x.shape) for name, x in each.items()} for each in (found, wanted))
    lines = [
        f"{name}: {theirs.get(name)} there, {ours.get(name)} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]
    if lines:
        raise UserError(f"trainer.initialize_from: {where} is another model:\n  " + "\n  ".join(lines[:8]))


def frozen_digest(frozen: Mapping[str, Any]) -> str:
    """16 hex digits that two sets of frozen parameters share when they are equal, however they are sharded."""
    # Of the digests, not of the arrays: those are computed where the shards are, and nothing is gathered.
    text = json.dumps(digests(frozen), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_frozen(restored: Restored, frozen: Params) -> None:
    """Refuses to go on with other frozen parameters than those that a checkpoint was trained beside.

    Raises:
        UserError: when they differ.
    """
    saved, now = restored.record.get(FROZEN), frozen_digest(frozen)
    if saved != now:
        raise UserError(
            f"the checkpoint of step {restored.step} was trained beside other frozen weights (digest {saved}, now "
            f"{now}): put back the model that it was trained on, or set trainer.id to start another run"
        )


def training_flops(count: FlopsCount, model: ModelDef) -> int:
    """Operations of a training step per token, for a model all of whose parameters are trained or none but adapters."""
    adapted = any(map(is_adapter_param, model.trainable))
    return count.adapted(2 * _size(model, trained=True)) if adapted else count.training


def describe_size(model: ModelDef) -> str:
    """For people: `1,234 parameters`, or how many of them are trained."""
    trained, frozen = _size(model, trained=True), _size(model, trained=False)
    return f"{trained:,} trained and {frozen:,} frozen parameters" if frozen else f"{trained:,} parameters"


def _size(model: ModelDef, *, trained: bool) -> int:
    return sum(math.prod(x.shape) for name, x in model.shapes.items() if (name in model.trainable) == trained)


def load_whole(
    run: str | StoragePath, step: int | None = None, *, devices: Sequence[Any] | None = None, averaged: bool = True
) -> LoadedModel:
    """As `load_model`; an adapter is merged into the model that it was trained on.

    Raises:
        UserError: also when that model is not there or not the same any more.
    """
    loaded = load_model(run, step, devices=devices, averaged=averaged)
    lora = loaded.config.adapter
    if lora is None:
        return loaded
    dtype = loaded.config.trainer.mp.param_dtype
    # In the run's parameter dtype, in which the digest of the frozen weights was taken.
    base = {name: np.asarray(x).astype(dtype) for name, x in _base_params(run, loaded).items()}
    if frozen_digest(base) != loaded.record.get(FROZEN):
        raise UserError(
            f"{run} is an adapter for other weights than those that are now in {base_name(loaded.config)}; put back "
            f"the model that it was trained on"
        )
    # Merged in the dtype that the base was trained beside, so that logits are those of the run.
    merged = merge_lora({**base, **named_leaves(loaded.params)}, lora)
    return dataclasses.replace(loaded, params=nested_from_names(merged))


def base_name(config: RunConfig) -> str:
    """The frozen model of a run with an adapter, as its configuration names it."""
    return expanded(config.trainer.initialize_from or source_name(config))


def _base_params(run: str | StoragePath, loaded: LoadedModel) -> dict[str, Any]:
    config = loaded.config
    try:
        if config.trainer.initialize_from is not None:
            directory, _ = find_checkpoints(config.trainer.initialize_from)
            return named_leaves(load_whole(directory, loaded.record[_BASE_STEP]).params)
        leaves = param_infos(config.model, loaded.vocab_size)
        here = SingleDeviceSharding(jax.local_devices()[0])
        shapes = {name: jax.ShapeDtypeStruct(leaf.shape, np.float32) for name, leaf in leaves.items()}
        return HfCheckpoint.open(config).load(config.model, shapes, dict.fromkeys(leaves, here))
    except UserError as error:
        raise type(error)(f"{run} is an adapter, and the model that it is for cannot be read: {error}") from None
