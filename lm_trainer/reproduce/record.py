"""Record of a run: the files of its directory, opened read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from lm_trainer.run.files.find_run import find_checkpoints_of_run, find_run, run_start_directory
from lm_trainer.run.files.records import RUN, read_attempts, read_run_record, recorded_identity
from lm_trainer.trackers import read_metrics

_IGNORED = ("time", "step", "alert", "message")
_COMPUTED = ("train/", "optim/", "data/loss_tokens", "fingerprint")
"""Prefixes of metrics that do not depend on when and where a step is computed."""


@dataclass(frozen=True)
class RunRecord:
    """A run directory, of a finished or running run."""

    path: Path
    """Absolute path of the run directory."""
    id: str
    checkpoints: StoragePath
    identity: Mapping[str, Any]
    """The part of the last configuration that affects the numbers."""
    changes: Sequence[Mapping[str, Any]]
    """Configuration changes: `step`, `differences`, and `config_before`, the file with the previous configuration."""
    attempts: Sequence[Mapping[str, Any]]
    """The environments in which the run was computed, each starting at its `step`."""
    steps: Mapping[int, Mapping[str, Any]]
    """Metrics by number of steps done, in order; all lines of a step are merged."""

    @classmethod
    def read(cls, run: str | Path) -> RunRecord:
        """Reads a run by its id (in `logs`), its directory, or the URL of its checkpoints in a bucket.

        Raises:
            UserError: if there is no such run, or it has not written any metrics.
        """
        path = find_run(run)
        content, attempts = read_run_record(path), read_attempts(path)
        steps: dict[int, dict[str, Any]] = {}
        if (path / "metrics.jsonl").is_file():
            # A step has several lines: metrics, evaluation, fingerprint of its checkpoint.
            for line in read_metrics(path):
                steps.setdefault(line["step"], {}).update(line)
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
            {step: {k: v for k, v in steps[step].items() if k not in _IGNORED} for step in sorted(steps)},
        )

    @property
    def start(self) -> int:
        """Steps done when the run began: 0, except for a run that continued another run's checkpoint."""
        return self.attempts[0]["step"]

    @property
    def first_chain(self) -> str:
        """The hash of the steps before the run began: empty, except for a run that continued another run."""
        return self.attempts[0].get("chain", "")

    @property
    def covers_all_steps(self) -> bool:
        """True if fingerprints cover all steps from 0 on; in branches, older versions' fingerprints do not."""
        return not self.start or "chain" in self.attempts[0]

    @cached_property
    def computed(self) -> dict[int, dict[str, Any]]:
        """The metrics of `steps` that do not depend on when and where they are computed, without empty steps."""
        computed = {
            step: {name: value for name, value in metrics.items() if name.startswith(_COMPUTED)}
            for step, metrics in self.steps.items()
        }
        return {step: metrics for step, metrics in computed.items() if metrics}

    @property
    def last(self) -> int:
        """The last recorded step."""
        return max(self.computed, default=self.start)

    def checkpoint_steps(self) -> list[int]:
        """The steps with a checkpoint at present; a running run replaces its temporary ones."""
        return list_steps(self.checkpoints)

    def read_checkpoint(self, step: int) -> dict[str, Any]:
        """Reads the JSON of a checkpoint; empty if it is missing or unreadable."""
        try:
            return read_record(self.checkpoints, step) if step in self.checkpoint_steps() else {}
        except CheckpointError:
            return {}

    def attempt_at(self, step: int) -> Mapping[str, Any]:
        """The environment in which a step was computed; steps count from 1."""
        # A step computed twice, after a crash, is recorded by the last attempt.
        return next((a for a in reversed(self.attempts) if a["step"] < step), self.attempts[0])

    def last_reachable_step(self, start: int) -> int:
        """The last step that can be computed from the checkpoint at `start` under one configuration."""
        # Another configuration gives other numbers.
        later = [change["step"] for change in self.changes if change["step"] > start]
        return min(later, default=self.load_config(start + 1).trainer.num_train_steps)

    def identity_at(self, step: int) -> Mapping[str, Any]:
        """The part of a step's configuration that affects the numbers."""
        earlier = any(step <= change["step"] for change in self.changes)
        return numeric_identity(self.load_config(step)) if earlier else self.identity

    @cached_property
    def root(self) -> Path:
        """The directory in which the run was started, to which relative paths of its configuration refer."""
        return run_start_directory(self.path, self.load_config(self.last).trainer.log_dir)

    def load_config(self, step: int, overrides: Sequence[str] = ()) -> RunConfig:
        """Loads the configuration of a step.

        Args:
            step: counted from 1.
            overrides: settings that override it, of keys that do not affect the numbers.

        Raises:
            UserError: if the run used a custom training loop, or a setting would change its numbers.
        """
        if not {"model", "data"} <= self.identity.keys():
            raise UserError(
                f"{self.path}: this run was made with a loop of one's own, of which the directory knows neither model "
                f"nor data; it cannot be computed again from there"
            )
        # Each configuration change kept the previous file, which applies up to the step of the change.
        name = next((change["config_before"] for change in self.changes if step <= change["step"]), "config.yaml")
        file = path_inside(self.path, name, self.path / "run.json")
        # Without trackers, whose packages may not be installed on this machine.
        plain = self._load_config_file(file)
        if not overrides:
            return plain
        config = self._load_config_file(file, overrides)
        if changed := numeric_differences(numeric_identity(plain), numeric_identity(config)):
            raise UserError("these settings would give other numbers than the run's:\n  " + "\n  ".join(changed))
        return config

    def _load_config_file(self, file: Path, overrides: Sequence[str] = ()) -> RunConfig:
        loaded = load(file, ["trainer.tracker=[]", *overrides], RunConfig)
        return config_with_recorded_keys(loaded.config, loaded.data)


def is_bitwise_equal(a: Any, b: Any) -> bool:
    """Returns True if two recorded values are equal, bit for bit; NaN equals NaN."""
    return a == b or (a != a and b != b)
