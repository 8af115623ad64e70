"""Runs the sizes of a ladder, each as an ordinary run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from lm_trainer.bench.session import open_bench_session
from lm_trainer.core.errors import UserError
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.rungs import run_config, run_folder, run_name
from lm_trainer.profile.matmul import MatmulProbe
from lm_trainer.profile.mfu import measure_mfu
from lm_trainer.run.config.recorded_keys import config_with_recorded_keys
from lm_trainer.run.config.run_config import RunConfig, numeric_differences, numeric_identity
from lm_trainer.run.files.records import RUN, read_run_record, recorded_identity
from lm_trainer.run.summary import Summary
from lm_trainer.run.train import train
from lm_trainer.trackers import Progress

# Lists with one entry per period. A longer run only appends to them.
_GROWS = ("optimizer.cycles", "optimizer.decay", "optimizer.cycle_peaks")


def run_rung(
    ladder: LadderConfig, size_spec: str, *, seed: int | None = None, progress: Progress | None = None
) -> Summary:
    """Trains one size. Resumes a run that was stopped, and extends a run of a shorter ladder.

    WSD-S makes this possible, because the learning rates of both runs are identical until the shorter run ends.

    Args:
        ladder: the ladder.
        size_spec: the size.
        seed: seed of the run; by default the first seed of the ladder.
        progress: receives the progress of the run.

    Raises:
        UserError: if the directory contains a run of another ladder, or for the same reasons as in
            `lm_trainer.run.train.train`.
    """
    config = run_config(ladder, size_spec, seed)
    longer = _is_longer(ladder, run_folder(ladder, size_spec, seed), config)
    progress = progress or Progress(config.trainer.num_train_steps)
    return train(config, name=run_name(ladder, size_spec, seed), progress=progress, allow_config_change=longer)


def _is_longer(ladder: LadderConfig, folder: Path, config: RunConfig) -> bool:
    if not (folder / RUN).exists():
        return False
    identity = recorded_identity(read_run_record(folder), folder)
    config = config_with_recorded_keys(config, identity)
    expected = numeric_identity(config)
    if differences := describe_changes(identity, expected, config):
        raise UserError(
            f"{folder} holds a run of another ladder, or of an earlier form of {ladder.name}:\n  "
            + "\n  ".join(differences)
            + "\nSet dir of the ladder to a directory of its own, or undo these changes"
        )
    # All remaining differences result from the longer length.
    return bool(numeric_differences(identity, expected, config))


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Describes the differences between two run identities, except those that result from a longer length."""
    pairs = [(_lookup(old, key), _lookup(new, key)) for key in _GROWS]
    steps = old["trainer"]["num_train_steps"], new["trainer"]["num_train_steps"]
    # If a list changed but the length did not, the recipe differs, even if the lists begin with the same values.
    one_begins = all(_is_prefix(*pair) for pair in pairs)
    length = {"trainer.num_train_steps", *_GROWS} if one_begins and steps[0] != steps[1] else set()
    differences = numeric_differences(dict(old), dict(new), config)
    return [line for line in differences if re.split(r"[:\s]", line, maxsplit=1)[0] not in length]


def _lookup(identity: Mapping[str, Any], key: str) -> Any:
    section, name = key.split(".")
    return identity[section].get(name)


def _is_prefix(a: list[float] | None, b: list[float] | None) -> bool:
    if a is None or b is None:
        return a is b
    # Compared up to the end of the shorter list.
    return all(x == y for x, y in zip(a, b, strict=False))


def benchmark_rung(
    ladder: LadderConfig, size_spec: str, *, seed: int | None = None, steps: int = 10, warmup: int = 3
) -> dict[str, Any]:
    """Times the training step of a size like `lmt bench mfu`. Returns the report as plain data."""
    with open_bench_session(run_config(ladder, size_spec, seed)) as session:
        probe = MatmulProbe(jax.devices()[: session.device_count], session.dtype)
        return measure_mfu(session, probe, samples=steps, warmup=warmup).as_dict()
