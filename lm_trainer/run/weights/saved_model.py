"""Models read from checkpoints, by the id or any directory of a run, and written to them."""

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
from lm_trainer.checkpoint.store import CheckpointError, CheckpointStore, committed_steps, read_record, read_step
from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.bucket_files import local_copy
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.files import local_path, write_atomically
from lm_trainer.core.tree import named_leaves, nested_from_names
from lm_trainer.data import Tokenizer, load_tokenizer
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.export.settings import HfSettings
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.files.records import identity_beside
from lm_trainer.step.state.inference_sharding import inference_shardings
from lm_trainer.step.state.model_def import ModelDef

if TYPE_CHECKING:
    from lm_trainer.models.base import DecoderConfig
    from lm_trainer.run.config.run_config import RunConfig

logger = logging.getLogger(__name__)

PARAMS = "params."
"""Prefix of the names of parameters among the arrays of a checkpoint."""
AVERAGED = "averaged."
"""Prefix of the weights to export, where they are others than those that are trained."""
TOKENIZER = "tokenizer"
"""Directory of the tokenizer beside the checkpoints, and key of the digests of its files in their records."""
SETTINGS = "hf"
"""Directory of the settings that a run carries from the published model that it comes from, beside its checkpoints."""


@dataclass(frozen=True)
class LoadedModel:
    """A model of a checkpoint, with all that it takes to use it."""

    config: RunConfig
    params: dict[str, Any]
    """Nested dicts of arrays in the parameter dtype, as `nnx.to_pure_dict` gives them: on the devices that were asked
    for, each with a part, or in NumPy's memory. Of a run that trains an adapter, the adapter's alone."""
    step: int
    vocab_size: int
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    tokenizer: HfTokenizer
    name: str
    """The run's id, or the name of the directory."""
    record: Mapping[str, Any]
    """The JSON that was saved with it: `train_loss` and `eval_losses` where they are known."""
    settings: HfSettings | None = None
    """Those of the published model that it comes from."""


def load_model(
    run: str | StoragePath, step: int | None = None, *, devices: Sequence[Any] | None = None, averaged: bool = True
) -> LoadedModel:
    """Reads the weights of a run's newest checkpoint that is intact, or of the given step.


    Args:
        run: a run id, a run directory (`logs/ID`), a checkpoint directory (`checkpoints/ID`) or one step in it.
        step: which checkpoint; None: the newest.
        devices: over which the weights are cut, of this process; None: all of them.
        averaged: the average where the run keeps one of its weights, else the weights that were trained.

    Raises:
        UserError: when there is no such run or step, or no checkpoint is intact.
    """
    directory, named_step = find_checkpoints(run)
    config = read_config(directory)
    _compare_config(directory, config)
    steps = committed_steps(directory)
    wanted = step if step is not None else named_step
    if not steps or (wanted is not None and wanted not in steps):
        what = f"checkpoint of step {wanted}" if wanted is not None else "checkpoint"
        raise UserError(f"{directory}: there is no {what} (there are: {', '.join(map(str, steps)) or 'none'})")
    problems = []
    for candidate in [wanted] if wanted is not None else reversed(steps):
        try:
            return _load_step(directory, candidate, config, devices or jax.local_devices(), averaged)
        except CheckpointError as error:
            problems.append(f"step {candidate}: {error}")
            logger.error("%s: the checkpoint of step %d cannot be used: %s", directory, candidate, error)
    raise UserError(f"{directory}: no checkpoint can be used:\n  " + "\n  ".join(problems))


def read_vocabulary(run: str | StoragePath) -> tuple[int, Tokenizer]:
    """Rows of the embedding and the tokenizer of the model that `load_model` would read, without reading its weights.

    Raises:
        UserError: as `load_model`.
    """
    directory, step = find_checkpoints(run)
    for candidate in [step] if step is not None else reversed(committed_steps(directory)):
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
        # No device need hold the whole model: it may be one that was trained on many.
        wanted, lies = model.shapes, inference_shardings(model, devices)
    else:
        wanted = _saved_arrays(record, prefix)
        lies = dict.fromkeys(wanted, SingleDeviceSharding(devices[0]))
    like = {
        prefix + name: jax.ShapeDtypeStruct(x.shape, _saved_dtype(record, prefix + name, x.dtype), sharding=lies[name])
        for name, x in wanted.items()
    }
    restored = read_step(directory, step, like, prefix=prefix)
    params = {name.removeprefix(prefix): x for name, x in restored.arrays.items()}
    if config.adapter is not None:
        params = {name: np.asarray(x) for name, x in params.items()}
    copy = local_copy(directory, TOKENIZER) / TOKENIZER
    _compare_tokenizer(directory, copy, record)
    tokenizer = load_tokenizer(copy)
    name = config.trainer.id or directory.name
    settings = read_settings(directory)
    return LoadedModel(config, nested_from_names(params), step, vocab_size, tokenizer, name, restored.record, settings)


def _compare_config(directory: StoragePath, config: RunConfig) -> None:
    """Warns where config.yaml is another configuration than the run's, by the copy of its record beside it."""
    from lm_trainer.run.config.run_config import numeric_differences, numeric_identity

    identity = identity_beside(directory)
    if identity and (differences := numeric_differences(identity, numeric_identity(config), config)):
        logger.warning(
            "%s is not the configuration of the run, and was damaged or changed: %s",
            directory / "config.yaml",
            "; ".join(differences),
        )


def _compare_tokenizer(directory: StoragePath, copy: Path, record: Mapping[str, Any]) -> None:
    """Warns where a file of the tokenizer is another than when the step was saved."""
    for name, digest in record.get(TOKENIZER, {}).items():
        file = copy / name
        if not file.is_file() or _digest(file.read_bytes()) != digest:
            logger.warning("%s is not the file of the run's tokenizer", directory / TOKENIZER / name)


def tokenizer_digests(tokenizer: HfTokenizer) -> dict[str, str]:
    """Digests of the files of a tokenizer, saved with every checkpoint by the key TOKENIZER."""
    return {name: _digest(content) for name, content in tokenizer.files().items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def read_settings(directory: StoragePath) -> HfSettings | None:
    """The settings of the published model that a run comes from, beside its checkpoints; None where there are none.

    Raises:
        UserError: when they are damaged.
    """
    copy = local_copy(directory, SETTINGS) / SETTINGS
    return HfSettings.read(copy) if copy.is_dir() else None


def _saved_arrays(record: Mapping[str, Any], prefix: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array of a checkpoint whose name begins with `prefix`, by the rest of its name."""
    described = {name: x.rstrip("]").split("[") for name, x in record["shapes"].items() if name.startswith(prefix)}
    return {
        name.removeprefix(prefix): jax.ShapeDtypeStruct(
            tuple(map(int, filter(None, sizes.split(",")))), jax.numpy.dtype(dtype)
        )
        for name, (dtype, sizes) in described.items()
    }


def _saved_dtype(record: Mapping[str, Any], name: str, default: Any) -> Any:
    described = record["shapes"].get(name)
    return default if described is None else jax.numpy.dtype(described.split("[")[0])


def read_config(directory: StoragePath, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that a checkpoint directory was written with, with `KEY=VALUE` settings over it.

    Raises:
        UserError: when it is missing or no longer valid.
    """
    from lm_trainer.config.loader import load
    from lm_trainer.run.config.earlier_runs import config_as_begun
    from lm_trainer.run.config.run_config import RunConfig

    # Without trackers, whose packages need not be installed where the weights are used.
    loaded = load(local_copy(directory, "config.yaml") / "config.yaml", ["trainer.tracker=[]", *overrides], RunConfig)
    return config_as_begun(loaded.config, loaded.data)


def write_model(
    out: Path,
    *,
    model_config: DecoderConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    vocab_size: int,
    settings: HfSettings | None = None,
) -> None:
    """Writes weights as a checkpoint of step 0, to train from (`trainer.initialize_from`), sample from or export.

    `out` is complete afterwards, or does not exist.

    Args:
        out: the new checkpoint directory.
        model_config: the family and its settings.
        params: nested dicts of arrays.
        tokenizer: written beside the weights.
        vocab_size: rows of the embedding.
        settings: of the published model that they come from.

    Raises:
        UserError: when `out` exists and is not empty, or cannot be written.
        MachineError: when the disk is full.
    """
    from lm_trainer.config.render import to_yaml
    from lm_trainer.run.config.run_config import RunConfig

    if (out := local_path(out)).exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another directory")
    # Beside its place and renamed: a directory that is there is complete.
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
