"""Runs that train an adapter: the frozen base model, the training cost, and merging the adapter into the base model.

Runs that compare the model with a frozen copy of its start find the start in the same way.
"""

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

from lm_trainer.checkpoint.digest import compute_checksums
from lm_trainer.checkpoint.store import CheckpointError, CheckpointStore, Restored, list_steps, read_record
from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expand_home
from lm_trainer.core.tree import named_leaves, nest_named_leaves
from lm_trainer.models.hf import param_infos
from lm_trainer.nn.logit_clip import is_largest_logits
from lm_trainer.nn.lora import adapter_name, is_adapter_param, merge_lora
from lm_trainer.nn.lora_targets import EMBEDDING, HEAD
from lm_trainer.nn.nf4 import num_weights
from lm_trainer.nn.router import is_relative_load
from lm_trainer.objectives import LossConfig, NextTokenConfig
from lm_trainer.profile.flops import FlopsCount
from lm_trainer.run.build.model import trace_model
from lm_trainer.run.config.loss_checks import has_separate_reference
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.weights.nf4_base import dequantize_params, expected_shapes, quantize_params
from lm_trainer.run.weights.pretrained import HfCheckpoint, hf_source_name
from lm_trainer.run.weights.saved_model import LoadedModel, load_model, read_config
from lm_trainer.step.state.model_def import ModelDef, Params

FROZEN = "frozen"
"""Key of the result of `hash_frozen_params` in the record of a checkpoint."""
_BASE_STEP = "base_step"
_NEXT_TOKEN = NextTokenConfig()
_IRRELEVANT_FIELDS = frozenset(
    {"dropout", "init_std", "scan", "remat", "backend", "block_size", "upcast", "balance_coef", "z_coef"}
    | {"balance_over", "vocab_size", "num_positions"}
)
"""Fields of a spec that only affect training or speed, or that also determine the shapes of parameters."""


@dataclass(frozen=True)
class BaseCheckpoint:
    """A checkpoint of another run that contains frozen weights: the base of an adapter, or a reference model."""

    directory: StoragePath
    step: int | None
    """Step of the checkpoint; None means the newest one."""
    key: str = "trainer.initialize_from"
    """Key of the configuration that names the checkpoint."""
    fact: str = _BASE_STEP
    """Key of the step in the record of every checkpoint."""

    @property
    def facts(self) -> dict[str, Any]:
        """Entries for the record of every checkpoint, which pin the step of the base even if its run continues."""
        return {self.fact: self.step}

    def load(self, shapes: Mapping[str, Any], shardings: Mapping[str, Sharding]) -> Params:
        """Loads the weights in the given shapes and shardings, which may include parameters of adapters.

        Weights that are quantized in `shapes` are quantized on the host.

        Raises:
            UserError: if the checkpoint contains another model.
        """
        loaded = load_merged_model(self.directory, self.step).params
        expected = {name: x for name, x in shapes.items() if not is_adapter_param(name)}
        named = with_own_loads({name: np.asarray(x) for name, x in named_leaves(loaded).items()}, expected)
        _check_same_model(f"{self.key}: {self.directory}", named, expected_shapes(named, expected))
        stored = quantize_params(named, expected)
        return {name: jax.device_put(x.astype(shapes[name].dtype), shardings[name]) for name, x in stored.items()}

    def with_initial_weights(self, model: ModelDef) -> ModelDef:
        """Returns the model with the weights of this checkpoint as initial values."""
        return dataclasses.replace(model, load=self.load)


def with_own_loads(weights: Mapping[str, np.ndarray], shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the weights of another model, with first values of the measurements that only this model has: even loads
    of experts, and logits of 0.

    Loads that only the other model has are left out. They affect only the loss that balances the experts.

    Args:
        weights: weights of the other model, by name.
        shapes: shapes and dtypes of the parameters of this model.
    """
    even = {name: np.ones(x.shape, x.dtype) for name, x in shapes.items() if is_relative_load(name)}
    logits = {name: np.zeros(x.shape, x.dtype) for name, x in shapes.items() if is_largest_logits(name)}
    used = {name: x for name, x in weights.items() if name in shapes or not is_relative_load(name)}
    return {**even, **logits, **used}


def find_base_checkpoint(config: RunConfig, store: CheckpointStore) -> BaseCheckpoint | None:
    """Returns the checkpoint of another run whose weights stay in use, frozen, during the run; None if there is none.

    It contains the base of an adapter, or the initial weights that a loss compares the model with.

    The step is the one recorded in the newest checkpoint of this run, otherwise the one given in the configuration,
    otherwise the newest step of the base run.

    Raises:
        UserError: if the base run does not exist, or its model computes a different function from the model section.
    """
    freezes = config.adapter is not None or has_separate_reference(config.loss, config.adapter)
    if not freezes or config.trainer.initialize_from is None:
        return None
    return find_frozen_checkpoint(config, store, config.trainer.initialize_from, "trainer.initialize_from", _BASE_STEP)


def find_frozen_checkpoint(
    config: RunConfig, store: CheckpointStore, source: str, key: str, fact: str
) -> BaseCheckpoint:
    """Finds a checkpoint of another run whose weights a run uses without training them.

    Args:
        config: configuration of the run.
        store: checkpoints of the run.
        source: run, checkpoint directory or step.
        key: key of the configuration that names `source`.
        fact: key of the step in the records of the run's checkpoints.

    Raises:
        UserError: as for `find_base_checkpoint`.
    """
    directory, step = find_checkpoints(source, key)
    _check_same_function(key, directory, read_config(directory), config)
    # Pins the step, because the newest checkpoint of the other run changes if that run continues.
    if (pinned := read_pinned_step(store, fact)) is not None:
        step = pinned
    return BaseCheckpoint(
        directory, max(list_steps(directory), default=None) if step is None else step, key=key, fact=fact
    )


def read_pinned_step(store: CheckpointStore, fact: str) -> int | None:
    """Returns the step of another run that the newest readable checkpoint of a run records under a key, if any."""
    for step in reversed(store.steps()):
        with contextlib.suppress(CheckpointError):
            return read_record(store.directory, step).get(fact)
    return None


def _check_same_function(key: str, base: StoragePath, recorded: RunConfig, configured: RunConfig) -> None:
    """Raises `UserError` if the base computes a different function, even if its parameters have the right shapes."""
    actual, expected = (_result_affecting_fields(config.model.spec(1)) for config in (recorded, configured))
    lines = [
        f"{key}: {actual.get(key)} there, {expected.get(key)} here"
        for key in dict.fromkeys([*actual, *expected])
        if actual.get(key) != expected.get(key)
    ]
    if lines:
        raise UserError(
            f"{key}: {base} is a model that computes something else than the model section says; "
            f"take over the one of {base / 'config.yaml'}:\n  " + "\n  ".join(lines[:8])
        )


def _result_affecting_fields(spec: Any, path: str = "") -> dict[str, Any]:
    """Returns the fields of a spec that affect the results of a trained model, by dotted name."""
    if dataclasses.is_dataclass(spec):
        parts = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    elif isinstance(spec, tuple):
        parts = dict(enumerate(spec))
    else:
        return {path: spec}
    fields: dict[str, Any] = {}
    for name, part in parts.items():
        if name not in _IRRELEVANT_FIELDS:
            fields |= _result_affecting_fields(part, f"{path}.{name}" if path else str(name))
    return fields


def _check_same_model(checkpoint: str, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    actual_shapes, expected_shapes = (
        {name: tuple(x.shape) for name, x in arrays.items()} for arrays in (actual, expected)
    )
    lines = [
        f"{name}: {actual_shapes.get(name)} there, {expected_shapes.get(name)} here"
        for name in sorted({*actual_shapes, *expected_shapes})
        if actual_shapes.get(name) != expected_shapes.get(name)
    ]
    if lines:
        raise UserError(f"{checkpoint} is another model:\n  " + "\n  ".join(lines[:8]))


def hash_frozen_params(frozen: Mapping[str, Any]) -> str:
    """Returns 16 hexadecimal digits that identify a set of frozen parameters, independently of their sharding."""
    # Hashes the digests of the arrays, which are computed on the shards without gathering the arrays.
    text = json.dumps(compute_checksums(frozen), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_frozen_params(restored: Restored, frozen: Params) -> None:
    """Checks that a checkpoint was trained with the same frozen parameters.

    Raises:
        UserError: if it was trained with different ones.
    """
    _check_frozen_digest(restored.step, restored.record.get(FROZEN), hash_frozen_params(frozen))


def check_pinned_digest(store: CheckpointStore, digest: str) -> None:
    """Like `check_frozen_params`, for the newest readable checkpoint of a run and the digest of frozen parameters."""
    for step in reversed(store.steps()):
        with contextlib.suppress(CheckpointError):
            return _check_frozen_digest(step, read_record(store.directory, step).get(FROZEN), digest)
    return None


def _check_frozen_digest(step: int, saved: str | None, current: str) -> None:
    if saved != current:
        raise UserError(
            f"the checkpoint of step {step} was trained beside other frozen weights (digest {saved}, now {current}): "
            f"put back the model that it was trained on, or set trainer.id to start another run"
        )


def training_flops(count: FlopsCount, model: ModelDef, loss: LossConfig = _NEXT_TOKEN) -> int:
    """Returns the number of FLOPs per token of a training step, whether all parameters are trained or only adapters."""
    extra = loss.step_forward_passes * count.forward
    if any(map(is_adapter_param, model.trainable)):
        return count.training_with_adapters(2 * _num_factors_per_token(model)) + extra
    return count.training + extra


def _num_factors_per_token(model: ModelDef) -> int:
    """Returns the number of adapter parameters that each token is multiplied with.

    The rows of an embedding are looked up, and the change of experts is computed once per microbatch.
    """
    looked_up = f"{adapter_name(EMBEDDING)}.a" if HEAD in model.shapes else None
    names = (name for name in model.trainable if name != looked_up and "experts" not in model.axes[name])
    return sum(math.prod(model.shapes[name].shape) for name in names)


def describe_num_params(model: ModelDef) -> str:
    """Describes the number of parameters, such as `1,234 parameters`, or the numbers of trained and frozen ones."""
    trained, frozen = _num_params(model, trained=True), _num_params(model, trained=False)
    return f"{trained:,} trained and {frozen:,} frozen parameters" if frozen else f"{trained:,} parameters"


def _num_params(model: ModelDef, *, trained: bool) -> int:
    return sum(num_weights(name, x.shape) for name, x in model.shapes.items() if (name in model.trainable) == trained)


def load_merged_model(
    run: str | StoragePath,
    step: int | None = None,
    *,
    devices: Sequence[Any] | None = None,
    averaged: bool = True,
) -> LoadedModel:
    """Like `load_model`, but merges an adapter into its base model.

    Raises:
        UserError: as for `load_model`, and if the base model is missing or has changed.
    """
    loaded = load_model(run, step, devices=devices, averaged=averaged)
    lora = loaded.config.adapter
    if lora is None:
        return loaded
    base = _load_base_params(run, loaded)
    if hash_frozen_params(base) != loaded.record.get(FROZEN):
        raise UserError(
            f"{run} is an adapter for other weights than those that are now in {base_model_name(loaded.config)}; put "
            f"back the model that it was trained on"
        )
    # Merges in the dtype that the base model had in training, so that the logits equal the logits of the run.
    shapes = {name: leaf.shape for name, leaf in param_infos(loaded.config.model, loaded.vocab_size).items()}
    merged = merge_lora({**dequantize_params(base, shapes), **named_leaves(loaded.params)}, lora)
    return dataclasses.replace(loaded, params=nest_named_leaves(merged))


def base_model_name(config: RunConfig) -> str:
    """Returns the name of the base model of a run with an adapter, as given in its configuration."""
    return expand_home(config.trainer.initialize_from or hf_source_name(config))


def _load_base_params(run: str | StoragePath, loaded: LoadedModel) -> dict[str, np.ndarray]:
    """Returns the frozen parameters as in training: in the parameter dtype of the run, or quantized."""
    config = loaded.config
    shapes = {
        name: x for name, x in trace_model(config, loaded.vocab_size).shapes.items() if not is_adapter_param(name)
    }
    try:
        if config.trainer.initialize_from is not None:
            directory, _ = find_checkpoints(config.trainer.initialize_from)
            params = named_leaves(load_merged_model(directory, loaded.record[_BASE_STEP]).params)
            params = quantize_params({name: np.asarray(x) for name, x in params.items()}, shapes)
        else:
            device_sharding = SingleDeviceSharding(jax.local_devices()[0])
            params = HfCheckpoint.open(config).load(config.model, shapes, dict.fromkeys(shapes, device_sharding))
    except UserError as error:
        raise type(error)(f"{run} is an adapter, and the model that it is for cannot be read: {error}") from None
    params = with_own_loads({name: np.asarray(x) for name, x in params.items()}, shapes)
    # The digest of the frozen weights was computed in these dtypes.
    return {name: x.astype(shapes[name].dtype) for name, x in params.items()}
