"""Opens models for export or sampling, from a run or from a directory in Hugging Face format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lm_trainer.core.bucket import Bucket, is_bucket
from lm_trainer.core.bucket_files import local_copy
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path
from lm_trainer.core.tree import named_leaves
from lm_trainer.export.adapter import AdapterModel
from lm_trainer.export.card import TrainingFacts
from lm_trainer.export.huggingface import TextModel, is_hf_directory, read_hf
from lm_trainer.export.output import is_export, list_exported_files
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.weights.adapters import base_model_name, load_merged_model
from lm_trainer.run.weights.saved_model import LoadedModel, load_model, read_config


def open_model(source: str, *, step: int | None = None, devices: Sequence[Any] | None = None) -> TextModel:
    """Reads a model from a Hugging Face directory or from a checkpoint of a run. Merges an adapter into its base model.

    Args:
        source: a run ID, a run directory, a checkpoint directory, one step in it, or a directory in Hugging Face
            format.
        step: step of the checkpoint, if `source` is a run; None means the newest intact step.
        devices: devices to shard the weights of a checkpoint over; None means all devices of this process.

    Raises:
        UserError: if the model does not exist or is damaged.
    """
    path = find_hf_directory(source)
    if path is not None:
        if step is not None:
            raise UserError(f"{source} is a model in Hugging Face's layout and has no steps; leave --step away")
        return read_hf(path)
    return _build_text_model(load_merged_model(source, step, devices=devices))


def find_hf_directory(source: str) -> Path | None:
    """Returns the local path of a directory in Hugging Face format, or None if `source` is not one.

    A directory in a bucket is copied to this machine.
    """
    if not is_bucket(source):
        path = local_path(source)
        return path if is_hf_directory(path) else None
    bucket = Bucket(source)
    return local_copy(bucket, sizes=list_exported_files(bucket)) if is_export(bucket) else None


def local_devices(count: int) -> Sequence[Any]:
    """Returns the first `count` devices of this process, or all devices if `count` is 0.

    Raises:
        UserError: if the process has fewer devices.
    """
    devices = jax.local_devices()
    if not 0 <= count <= len(devices):
        raise UserError(
            f"--devices {count}: there are {len(devices)} devices here; write 1 to {len(devices)}, or 0 for all"
        )
    return devices[: count or None]


def open_for_export(source: str, *, step: int | None = None, merge: bool = False) -> TextModel | AdapterModel:
    """Like `open_model`, but returns the adapter of a run without its base model unless `merge` is set.

    Raises:
        UserError: as for `open_model`, and if `merge` is set for a model without an adapter.
    """
    if not merge and find_hf_directory(source) is None:
        loaded = load_model(source, step)
        if loaded.config.adapter is None:
            return _build_text_model(loaded)
        return AdapterModel(
            loaded.config.model,
            loaded.vocab_size,
            loaded.config.adapter,
            named_leaves(loaded.params),
            base_model_name(loaded.config),
            loaded.tokenizer,
            loaded.name,
            _training_facts(loaded),
        )
    if merge and (find_hf_directory(source) is not None or read_config(find_checkpoints(source)[0]).adapter is None):
        raise UserError(f"{source} has no adapter, so there is nothing to merge; leave --merge away")
    return open_model(source, step=step)


def _build_text_model(loaded: LoadedModel) -> TextModel:
    config, facts = loaded.config.model, _training_facts(loaded)
    return TextModel(config, loaded.vocab_size, loaded.params, loaded.tokenizer, loaded.name, facts, loaded.settings)


def _training_facts(loaded: LoadedModel) -> TrainingFacts:
    if loaded.step == 0:
        return TrainingFacts()
    return TrainingFacts(
        step=loaded.step,
        tokens=loaded.config.trainer.batch_schedule.rows_before(loaded.step) * loaded.config.model.seq_len,
        train_loss=_finite_or_none(loaded.record.get("train_loss")),
        validation_losses=_parse_losses(loaded.record.get("eval_losses")),
    )


def _parse_losses(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    losses = {str(name): _finite_or_none(loss) for name, loss in value.items()}
    return {name: loss for name, loss in losses.items() if loss is not None}


def _finite_or_none(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
