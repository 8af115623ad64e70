"""Compares data with the data that a run was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.data import Data, open_data
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.train import open_training_data
from lm_trainer.trackers import Progress


def open_complete_data(config: RunConfig, progress: Progress) -> Data:
    """Opens the data of a run, and waits until all text is tokenised. Raises as `open_data`."""
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
