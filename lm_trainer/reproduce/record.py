"""Record of a run, read from the files in its directory without changing them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_trainer.checkpoint.store import CheckpointError, list_steps, read_record
from lm_trainer.config.loader import load
from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.errors import UserError
from lm_trainer.core.safe_names import check_relative_path, path_inside
from lm_trainer.run.config.recorded_keys import config_with_recorded_keys
from lm_trainer.run.config.run_config import RunConfig, numeric_differences, numeric_identity
from lm_trainer.run.files.branch import BranchPoint
from lm_trainer.run.files.find_run import find_checkpoints_of_run, find_run, run_start_directory
from lm_trainer.run.files.records import RUN, read_attempts, read_run_record, recorded_identity
from lm_trainer.trackers.json_lines import METRICS, decode_non_finite, read_record_blocks

_COMPUTED = ("train/", "optim/", "data/loss_tokens", "fingerprint")
"""Prefixes of metrics that do not depend on when and where a step is computed."""


@dataclass(frozen=True)
class RunRecord:
    """The recorded facts and metrics of a run, which may be finished or in progress."""

    path: Path
    """Absolute path of the run directory."""
    id: str
    checkpoints: StoragePath
    identity: Mapping[str, Any]
    """The part of the newest configuration that affects the numbers."""
    changes: Sequence[Mapping[str, Any]]
    """Configuration changes, each with the keys `step`, `differences`, and `config_before` (the file with the previous
    configuration)."""
    attempts: Sequence[Mapping[str, Any]]
    """Environment of each attempt. The attempt starts after the number of steps in `step`."""
    steps: Mapping[int, Mapping[str, Any]]
    """Metrics by number of completed steps, in ascending order, but for those that depend on when and where a step is
    computed. All lines of a step are merged."""
    branch: BranchPoint | None = None
    """Start of the run if it is a branch."""

    @classmethod
    def read(cls, run: str | Path) -> RunRecord:
        """Reads a run, given its ID (in `logs`), its directory, or the URL of its checkpoints in a bucket.

        Raises:
            UserError: if there is no such run, or if it has neither metrics nor checkpoints.
        """
        path = find_run(run)
        content, attempts = read_run_record(path), read_attempts(path)
        steps = _read_computed_metrics(path / METRICS)
        checkpoints = find_checkpoints_of_run(path)
        if not attempts or not (steps or list_steps(checkpoints)):
            raise UserError(f"{path}: this run has not done a step yet")
        return cls(
            path,
            check_relative_path(content.get("id", path.name), path / RUN),
            checkpoints,
            recorded_identity(content, path),
            content.get("changes", []),
            attempts,
            steps,
            BranchPoint.from_record(content, path / RUN),
        )

    @property
    def location(self) -> str:
        """The checkpoints in a bucket, or the run directory. Equal for records of the same run."""
        # Files of a run in a bucket are read from a temporary copy.
        return str(self.path if isinstance(self.checkpoints, Path) else self.checkpoints)

    @cached_property
    def parent(self) -> RunRecord | None:
        """The run that this run is a branch of; None for other runs, or if the parent is gone."""
        if self.branch is None:
            return None
        moved = path_inside(self.path.parent, self.branch.parent, self.path / RUN)
        for directory in (self.branch.directory, moved):
            with contextlib.suppress(UserError):
                parent = RunRecord.read(directory)
                if parent.id == self.branch.parent:
                    return parent
        return None

    def owner(self, step: int) -> RunRecord:
        """Returns the run that computed a step: this run or, for steps that a branch shares, one of its ancestors."""
        if self.branch is None or step > self.branch.step or self.parent is None:
            return self
        return self.parent.owner(step)

    def with_past(self) -> RunRecord:
        """Returns the record with the steps that a branch shares with its ancestors."""
        if self.branch is None or self.parent is None:
            return self
        shared = {step: line for step, line in self.parent.with_past().steps.items() if step <= self.branch.step}
        return replace(self, steps={**shared, **self.steps})

    @property
    def start(self) -> int:
        """Number of completed steps when the run began.

        It is 0, unless the run continued a checkpoint of another run.
        """
        return self.attempts[0]["step"]

    @property
    def first_chain(self) -> str:
        """Hash of the steps before the run began. It is empty, unless the run continued another run."""
        return self.attempts[0].get("chain", "")

    @property
    def covers_all_steps(self) -> bool:
        """True if fingerprints cover all steps from 0 on.

        This is not the case if an older version started the run from a checkpoint of another run.
        """
        return not self.start or "chain" in self.attempts[0]

    @cached_property
    def computed(self) -> dict[int, Mapping[str, Any]]:
        """The steps with metrics."""
        return {step: metrics for step, metrics in self.steps.items() if metrics}

    @property
    def last(self) -> int:
        """Last recorded step."""
        return max(self.computed, default=self.start)

    def checkpoint_steps(self) -> list[int]:
        """Lists the steps that currently have a checkpoint. A run in progress replaces its temporary checkpoints."""
        return list_steps(self.checkpoints)

    def read_checkpoint(self, step: int) -> dict[str, Any]:
        """Reads the JSON record of a checkpoint. Returns an empty dict if the checkpoint is missing or unreadable."""
        try:
            return read_record(self.checkpoints, step) if step in self.checkpoint_steps() else {}
        except CheckpointError:
            return {}

    def attempt_at(self, step: int) -> Mapping[str, Any]:
        """Returns the environment in which a step (counted from 1) was computed."""
        # If a step was computed twice because of a crash, the recorded metrics are from the last attempt.
        return next((a for a in reversed(self.attempts) if a["step"] < step), self.attempts[0])

    def last_reachable_step(self, start: int) -> int:
        """Returns the last step that can be computed from the checkpoint of step `start` with one configuration."""
        # A different configuration results in different numbers.
        later = [change["step"] for change in self.changes if change["step"] > start]
        return min(later, default=self.load_config(start + 1).trainer.num_train_steps)

    def identity_at(self, step: int) -> Mapping[str, Any]:
        """Returns the part of the configuration of a step that affects the numbers."""
        earlier = any(step <= change["step"] for change in self.changes)
        return numeric_identity(self.load_config(step)) if earlier else self.identity

    @cached_property
    def root(self) -> Path:
        """The directory in which the run was started. Relative paths in its configuration refer to this directory."""
        return run_start_directory(self.path, self.load_config(self.last).trainer.log_dir)

    def config_file(self, step: int) -> Path:
        """Returns the path of the configuration of a step, counted from 1.

        Raises:
            UserError: if the run used a custom training loop.
        """
        if not {"model", "data"} <= self.identity.keys():
            raise UserError(
                f"{self.path}: this run was made with a loop of one's own, of which the directory knows neither model "
                f"nor data; it cannot be computed again from there"
            )
        # At each configuration change the previous file was kept. It applies up to and including the step of the
        # change.
        name = next((change["config_before"] for change in self.changes if step <= change["step"]), "config.yaml")
        return path_inside(self.path, name, self.path / RUN)

    def find_start(self, completed: int, until: int) -> int:
        """Returns the nearest point at or before `completed` steps from which the steps up to `until` can be computed.

        This is a checkpoint, or the start of the run.

        Raises:
            UserError: if the configuration changed in between, and there is no checkpoint after the change.
        """
        start = max(s for s in (self.start, *self.checkpoint_steps()) if s <= completed)
        last_reachable = self.last_reachable_step(start)
        if until > last_reachable:
            raise UserError(
                f"step {until} cannot be reached: the configuration changed after step {last_reachable}, and there is "
                f"no checkpoint between it and step {until} (there are: {self.checkpoint_steps()})"
            )
        return start

    def load_config(self, step: int, overrides: Sequence[str] = ()) -> RunConfig:
        """Loads the configuration of a step.

        Args:
            step: the step, counted from 1.
            overrides: settings `KEY=VALUE` that override the configuration. They must not affect the numbers.

        Raises:
            UserError: if the run used a custom training loop, or a setting would change its numbers.
        """
        file = self.config_file(step)
        # The trackers are removed, because their packages may not be installed on this machine.
        plain = self._load_config_file(file)
        if not overrides:
            return plain
        config = self._load_config_file(file, overrides)
        if changed := numeric_differences(numeric_identity(plain), numeric_identity(config)):
            raise UserError("these settings would give other numbers than the run's:\n  " + "\n  ".join(changed))
        return config

    def _load_config_file(self, file: Path, overrides: Sequence[str] = ()) -> RunConfig:
        # Every checkpoint asks for its configuration, and reading a file takes a tenth of a second.
        key = file, tuple(overrides)
        if key not in self._configs:
            loaded = load(file, ["trainer.tracker=[]", *overrides], RunConfig)
            self._configs[key] = config_with_recorded_keys(loaded.config, loaded.data)
        return self._configs[key]

    @cached_property
    def _configs(self) -> dict[tuple[Path, tuple[str, ...]], RunConfig]:
        """Configurations that have been read, by file and overrides."""
        return {}


def _read_computed_metrics(file: Path) -> dict[int, dict[str, Any]]:
    """Reads the metrics that do not depend on when and where a step is computed, by step in ascending order."""
    steps: dict[int, dict[str, Any]] = {}
    is_computed: dict[str, bool] = {}
    # A step may have several lines: metrics, evaluations, and the fingerprint of its checkpoint.
    for record in itertools.chain.from_iterable(read_record_blocks(file)):
        metrics = steps.setdefault(record["step"], {})
        for name, value in record.items():
            if is_computed.setdefault(name, name.startswith(_COMPUTED)):
                metrics[name] = decode_non_finite(value)
    return dict(sorted(steps.items()))


def is_bitwise_equal(a: Any, b: Any) -> bool:
    """Returns True if two recorded values have the same bits. NaN equals NaN."""
    return a == b or (a != a and b != b)
