"""Compares data with the data that a run was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.data import Data, open_data
from lm_trainer.data.config import DataConfig
from lm_trainer.data.missing_files import find_missing_text
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.train import open_training_data
from lm_trainer.trackers import Progress


def check_text_exists(run: str, config: DataConfig) -> None:
    """Raises `UserError` if local text of a run is gone, which is needed to compute its steps.

    Args:
        run: ID of the run, for the message.
        config: the `data` section of its configuration.
    """
    for key, reason in find_missing_text(config, network=False):
        raise UserError(f"data.{key}: {reason}; put back the text of {run}, with which its steps are computed")


def open_complete_data(run: str, config: RunConfig, progress: Progress) -> Data:
    """Opens the data of a run, and waits until all text is tokenised. Raises as `check_text_exists` and `open_data`."""
    check_text_exists(run, config.data)
    data = open_training_data(config, progress)
    if data.complete:
        return data
    data.close()
    return open_data(config.data, seq_len=config.model.seq_len, seed=config.trainer.seed)


def check_same_data(run: str, data: Data, step: int, recorded: Any) -> None:
    """Compares data with the fingerprints in a checkpoint of a run.

    Args:
        run: ID of the run, for the message.
        data: complete data.
        step: step of the checkpoint.
        recorded: its `data_fingerprint`; anything but a mapping of hashes cannot be compared.

    Raises:
        UserError: if the data differ.
    """
    if not isinstance(recorded, Mapping):
        return
    now = data.fingerprints(step)
    key = next((key for key in ("tokens", "sources") if key in recorded and key in now), None)
    if key is not None and recorded[key] != now[key]:
        raise UserError(
            f"the data of {run} have changed since it was trained ({key} were {recorded[key]}, now {now[key]}): put "
            "back the text, the tokenizer, or their cache"
        )
