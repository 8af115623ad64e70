"""Reads models from checkpoints, given the ID or any directory of a run, and writes them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from lm_trainer.checkpoint.policy import CheckpointerConfig
from lm_trainer.checkpoint.store import CheckpointError, CheckpointStore, list_steps, read_record, read_step
from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.bucket_files import local_copy, staging_directory
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.files import local_path, write_atomically
from lm_trainer.core.tree import named_leaves, nest_named_leaves
from lm_trainer.data import Tokenizer, load_tokenizer
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.export.settings import HfSettings
from lm_trainer.nn.logit_clip import is_largest_logits
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.files.records import read_identity_from_copy
from lm_trainer.step.state.inference_sharding import inference_shardings
from lm_trainer.step.state.model_def import ModelDef

if TYPE_CHECKING:
    from lm_trainer.models.base import DecoderConfig
    from lm_trainer.run.config.run_config import RunConfig

logger = logging.getLogger(__name__)

PARAMS = "params."
"""Prefix of the parameters in the array names of a checkpoint."""
AVERAGED = "averaged."
"""Prefix of the weights to export in the array names, if these weights differ from the trained weights."""
TOKENIZER = "tokenizer"
"""Name of the tokenizer directory next to the checkpoints, and key of the digests of its files in checkpoint records.
"""
SETTINGS = "hf"
"""Name of the directory next to the checkpoints with the settings of the published model that a run started from."""


@dataclass(frozen=True)
class LoadedModel:
    """A model read from a checkpoint, with everything needed to use it."""

    config: RunConfig
    params: dict[str, Any]
    """Nested dicts of arrays in the parameter dtype, structured like the result of `nnx.to_pure_dict`. The arrays are
    sharded over the requested devices. For a run that trains an adapter, they are only the adapter parameters, as NumPy
    arrays."""
    step: int
    vocab_size: int
    """Number of rows of the token embedding, at least the size of the tokenizer's vocabulary."""
    tokenizer: HfTokenizer
    name: str
    """The run ID, or the name of the checkpoint directory if the configuration has no ID."""
    record: Mapping[str, Any]
    """JSON record of the checkpoint, which contains `train_loss` and `eval_losses` if they are known."""
    settings: HfSettings | None = None
    """Settings of the published model that the run started from, if any."""


def load_model(
    run: str | StoragePath,
    step: int | None = None,
    *,
    devices: Sequence[Any] | None = None,
    averaged: bool = True,
) -> LoadedModel:
    """Reads the weights from the newest intact checkpoint of a run, or from the given step.

    Args:
        run: a run ID, a run directory (`logs/ID`), a checkpoint directory (`checkpoints/ID`) or one step in it.
        step: step of the checkpoint; None means the newest intact step.
        devices: devices of this process to shard the weights over; None means all of them.
        averaged: read the averaged weights instead of the trained weights if the run keeps them.

    Raises:
        UserError: if the run or the step does not exist, or no checkpoint is intact.
    """
    directory, named_step = find_checkpoints(run)
    config = read_config(directory)
    _compare_config(directory, config)
    steps = list_steps(directory)
    requested = step if step is not None else named_step
    if not steps or (requested is not None and requested not in steps):
        description = f"checkpoint of step {requested}" if requested is not None else "checkpoint"
        raise UserError(f"{directory}: there is no {description} (there are: {', '.join(map(str, steps)) or 'none'})")
    problems = []
    for candidate in [requested] if requested is not None else reversed(steps):
        try:
            return _load_step(directory, candidate, config, devices or jax.local_devices(), averaged)
        except CheckpointError as error:
            problems.append(f"step {candidate}: {error}")
            logger.error("%s: the checkpoint of step %d cannot be used: %s", directory, candidate, error)
    raise UserError(f"{directory}: no checkpoint can be used:\n  " + "\n  ".join(problems))


def read_vocabulary(run: str | StoragePath) -> tuple[int, Tokenizer]:
    """Returns the number of embedding rows and the tokenizer of the model that `load_model` would read.

    Does not read the weights.

    Raises:
        UserError: as for `load_model`.
    """
    directory, step = find_checkpoints(run)
    for candidate in [step] if step is not None else reversed(list_steps(directory)):
        with contextlib.suppress(CheckpointError):
            record = read_record(directory, candidate)
            return record["vocab_size"], load_tokenizer(local_copy(directory, TOKENIZER) / TOKENIZER)
    raise UserError(f"{directory}: there is no checkpoint that can be read")


def _load_step(
    directory: StoragePath, step: int, config: RunConfig, devices: Sequence[Any], averaged: bool
) -> LoadedModel:
    record = read_record(directory, step)
    vocab_size = record["vocab_size"]
    prefix = AVERAGED if averaged and any(name.startswith(AVERAGED) for name in record["shapes"]) else PARAMS
    if config.adapter is None:
        model = ModelDef.trace(lambda: config.model.build(vocab_size, rngs=nnx.Rngs(0)))
        # The model is sharded, because a model that was trained on many devices may not fit on one.
        shapes, shardings = model.shapes, inference_shardings(model, devices)
        # Verified like the weights, but the model has no such parameters outside of training.
        measured = {name: x for name, x in _recorded_shapes(record, prefix).items() if is_largest_logits(name)}
        shapes = {**shapes, **measured}
        shardings = {**shardings, **dict.fromkeys(measured, SingleDeviceSharding(devices[0]))}
    else:
        shapes = _recorded_shapes(record, prefix)
        shardings = dict.fromkeys(shapes, SingleDeviceSharding(devices[0]))
    like = {
        prefix + name: jax.ShapeDtypeStruct(
            x.shape, _recorded_dtype(record, prefix + name, x.dtype), sharding=shardings[name]
        )
        for name, x in shapes.items()
    }
    restored = read_step(directory, step, like, selects=lambda name: name.startswith(prefix))
    params = {name.removeprefix(prefix): x for name, x in restored.arrays.items() if not is_largest_logits(name)}
    if config.adapter is not None:
        params = {name: np.asarray(x) for name, x in params.items()}
    copy = local_copy(directory, TOKENIZER) / TOKENIZER
    _compare_tokenizer(directory, copy, record)
    tokenizer = load_tokenizer(copy)
    name = config.trainer.id or directory.name
    settings = read_published_settings(directory)
    return LoadedModel(config, nest_named_leaves(params), step, vocab_size, tokenizer, name, restored.record, settings)


def _compare_config(directory: StoragePath, config: RunConfig) -> None:
    """Warns if config.yaml differs from the configuration in the copy of run.json next to the checkpoints."""
    from lm_trainer.run.config.run_config import numeric_differences, numeric_identity

    identity = read_identity_from_copy(directory)
    if identity and (differences := numeric_differences(identity, numeric_identity(config), config)):
        logger.warning(
            "%s is not the configuration of the run, and was damaged or changed: %s",
            directory / "config.yaml",
            "; ".join(differences),
        )


def _compare_tokenizer(directory: StoragePath, copy: Path, record: Mapping[str, Any]) -> None:
    """Warns if a tokenizer file has changed since the checkpoint was saved."""
    for name, digest in record.get(TOKENIZER, {}).items():
        file = copy / name
        if not file.is_file() or _digest(file.read_bytes()) != digest:
            logger.warning("%s is not the file of the run's tokenizer", directory / TOKENIZER / name)


def tokenizer_digests(tokenizer: HfTokenizer) -> dict[str, str]:
    """Returns the digests of a tokenizer's files, which every checkpoint record contains under the key TOKENIZER."""
    return {name: _digest(content) for name, content in tokenizer.files().items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def read_published_settings(directory: StoragePath) -> HfSettings | None:
    """Reads the settings of the published model that a run started from; None if there are none.

    The settings are saved next to the checkpoints of the run.

    Raises:
        UserError: if the files are damaged.
    """
    copy = local_copy(directory, SETTINGS) / SETTINGS
    return HfSettings.read(copy) if copy.is_dir() else None


def copy_model_files(source: StoragePath, target: StoragePath) -> None:
    """Copies the tokenizer and the settings of a published model that are next to the checkpoints of another run."""
    for name in (TOKENIZER, SETTINGS):
        files = local_copy(source, name) / name
        if files.is_dir():
            with staging_directory(target) as directory:
                # Links stay links, which readers of these files refuse if they lead elsewhere.
                shutil.copytree(files, directory / name, symlinks=True, dirs_exist_ok=True)


def _recorded_shapes(record: Mapping[str, Any], prefix: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of the checkpoint arrays with a name prefix, by name without the prefix."""
    parts = {name: x.rstrip("]").split("[") for name, x in record["shapes"].items() if name.startswith(prefix)}
    return {
        name.removeprefix(prefix): jax.ShapeDtypeStruct(
            tuple(map(int, filter(None, sizes.split(",")))), jax.numpy.dtype(dtype)
        )
        for name, (dtype, sizes) in parts.items()
    }


def _recorded_dtype(record: Mapping[str, Any], name: str, default: Any) -> Any:
    text = record["shapes"].get(name)
    return default if text is None else jax.numpy.dtype(text.split("[")[0])


def read_config(directory: StoragePath, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads the configuration in a checkpoint directory and applies `KEY=VALUE` overrides.

    Raises:
        UserError: if the configuration is missing or no longer valid.
    """
    from lm_trainer.config.loader import load
    from lm_trainer.run.config.recorded_keys import config_with_recorded_keys
    from lm_trainer.run.config.run_config import RunConfig

    # Removes the trackers, because their packages may not be installed on this machine.
    loaded = load(local_copy(directory, "config.yaml") / "config.yaml", ["trainer.tracker=[]", *overrides], RunConfig)
    return config_with_recorded_keys(loaded.config, loaded.data)


def write_model(
    out: Path,
    *,
    model_config: DecoderConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    vocab_size: int,
    settings: HfSettings | None = None,
) -> None:
    """Writes weights as a checkpoint of step 0, for training (`trainer.initialize_from`), sampling or export.

    `out` is written atomically: it is either complete or does not exist.

    Args:
        out: the checkpoint directory to create.
        model_config: model section of the configuration.
        params: nested dicts of arrays.
        tokenizer: tokenizer to save with the weights.
        vocab_size: number of rows of the token embedding.
        settings: settings of the published model that the weights come from, if any.

    Raises:
        UserError: if `out` exists and is not empty, or cannot be written.
        MachineError: if the disk is full.
    """
    from lm_trainer.config.render import to_yaml
    from lm_trainer.run.config.run_config import RunConfig

    if (out := local_path(out)).exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another directory")
    # Writes to a directory next to `out` and renames it at the end, so that `out` is complete if it exists.
    draft = out.absolute().with_name(f".{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        store = CheckpointStore(draft, CheckpointerConfig())
        arrays = {PARAMS + name: jax.numpy.asarray(x) for name, x in named_leaves(dict(params)).items()}
        store.save(0, arrays, {"vocab_size": vocab_size})
        store.close()
        write_atomically(draft / "config.yaml", to_yaml(RunConfig(model=model_config)))  # pyright: ignore[reportArgumentType]
        tokenizer.save(draft / TOKENIZER)
        if settings is not None:
            settings.write(draft / SETTINGS)
        if out.is_dir():
            out.rmdir()
        draft.rename(out)
    except OSError as error:
        raise MachineError(f"{out}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
