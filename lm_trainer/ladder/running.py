"""Running the sizes of a ladder, each an ordinary run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from lm_trainer.bench.session import bench_session
from lm_trainer.core.errors import UserError
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.rungs import run_config, run_folder, run_name
from lm_trainer.profile.matmul import MatmulProbe
from lm_trainer.profile.mfu import measure
from lm_trainer.run.config.earlier_runs import config_as_begun
from lm_trainer.run.config.run_config import RunConfig, numeric_differences, numeric_identity
from lm_trainer.run.files.records import RUN, identity_of, read_run_record
from lm_trainer.run.summary import Summary
from lm_trainer.run.train import train
from lm_trainer.trackers import Progress

# Lists with one entry for each period, which a longer run only adds to.
_GROWS = ("optimizer.cycles", "optimizer.decay", "optimizer.cycle_peaks")


def run_rung(
    ladder: LadderConfig, size_spec: str, *, seed: int | None = None, progress: Progress | None = None
) -> Summary:
    """Trains one size; a run that was stopped goes on, and one of a shorter ladder is made longer.

    WSD-S makes that possible: the learning rate of a longer run is the same until where the shorter one ends.

    Raises:
        UserError: when its directory holds the run of another ladder; and as `lm_trainer.run.train.train`.
    """
    config = run_config(ladder, size_spec, seed)
    longer = _is_longer(ladder, run_folder(ladder, size_spec, seed), config)
    progress = progress or Progress(config.trainer.num_train_steps)
    return train(config, name=run_name(ladder, size_spec, seed), progress=progress, allow_config_change=longer)


def _is_longer(ladder: LadderConfig, folder: Path, config: RunConfig) -> bool:
    if not (folder / RUN).exists():
        return False
    identity = identity_of(read_run_record(folder), folder)
    config = config_as_begun(config, identity)
    wanted = numeric_identity(config)
    if found := changes(identity, wanted, config):
        raise UserError(
            f"{folder} holds a run of another ladder, or of an earlier form of {ladder.name}:\n  "
            + "\n  ".join(found)
            + "\nSet dir of the ladder to a directory of its own, or undo these changes"
        )
    # All differences that are left are those of a longer run.
    return bool(numeric_differences(identity, wanted, config))


def changes(old: Mapping[str, Any], new: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Lines about how two identities of a run differ beyond their length: one may be the beginning of the other."""
    pairs = [(_at(old, key), _at(new, key)) for key in _GROWS]
    steps = old["trainer"]["num_train_steps"], new["trainer"]["num_train_steps"]
    # A list that changed while the length did not is another recipe, even if it begins like the other.
    one_begins = all(_begins(*pair) for pair in pairs)
    length = {"trainer.num_train_steps", *_GROWS} if one_begins and steps[0] != steps[1] else set()
    found = numeric_differences(dict(old), dict(new), config)
    return [line for line in found if re.split(r"[:\s]", line, maxsplit=1)[0] not in length]


def _at(identity: Mapping[str, Any], key: str) -> Any:
    section, name = key.split(".")
    return identity[section].get(name)


def _begins(a: list[float] | None, b: list[float] | None) -> bool:
    if a is None or b is None:
        return a is b
    # The shorter one ends the comparison.
    return all(x == y for x, y in zip(a, b, strict=False))


def benchmark_rung(
    ladder: LadderConfig, size_spec: str, *, seed: int | None = None, steps: int = 10, warmup: int = 3
) -> dict[str, Any]:
    """Times the training step of a size, as `lmt bench mfu` does; the report as plain data."""
    with bench_session(run_config(ladder, size_spec, seed)) as session:
        probe = MatmulProbe(jax.devices()[: session.device_count], session.dtype)
        return measure(session, probe, samples=steps, warmup=warmup).as_dict()
