"""Record of a run: the files of its directory, read without touching them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_trainer.checkpoint.store import CheckpointError, committed_steps, read_record
from lm_trainer.config.loader import load
from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.errors import UserError
from lm_trainer.core.inside import check_name, path_inside
from lm_trainer.run.config.earlier_runs import config_as_begun
from lm_trainer.run.config.run_config import RunConfig, numeric_differences, numeric_identity
from lm_trainer.run.files.find_run import checkpoints_of, find_run, root_of
from lm_trainer.run.files.records import RUN, identity_of, read_attempts, read_run_record
from lm_trainer.trackers import read_metrics

_IGNORED = ("time", "step", "alert", "message")
_COMPUTED = ("train/", "optim/", "data/loss_tokens", "fingerprint")
"""Prefixes of the metrics that are the same whenever and wherever a step is computed."""


@dataclass(frozen=True)
class RunRecord:
    """A run directory, of a run that has ended or goes on."""

    path: Path
    """Absolute."""
    id: str
    checkpoints: StoragePath
    identity: Mapping[str, Any]
    """The part of the last configuration that decides numbers."""
    changes: Sequence[Mapping[str, Any]]
    """Changes of the configuration: `step`, `differences`, and `config_before`, the file with the one before."""
    attempts: Sequence[Mapping[str, Any]]
    """The environments that computed the run, each from its `step` on."""
    steps: Mapping[int, Mapping[str, Any]]
    """Metrics by the number of steps done, those of all lines of a step together; in order."""

    @classmethod
    def read(cls, run: str | Path) -> RunRecord:
        """Reads a run by its id (in `logs`), its directory, or the URL of its checkpoints in a bucket.

        Raises:
            UserError: when there is no such run, or it has not written any metrics.
        """
        path = find_run(run)
        content, attempts = read_run_record(path), read_attempts(path)
        steps: dict[int, dict[str, Any]] = {}
        if (path / "metrics.jsonl").is_file():
            # A step has several lines: its metrics, its evaluation, the fingerprint of its checkpoint.
            for line in read_metrics(path):
                steps.setdefault(line["step"], {}).update(line)
        checkpoints = checkpoints_of(path)
        if not attempts or not (steps or committed_steps(checkpoints)):
            raise UserError(f"{path}: this run has not done a step yet")
        return cls(
            path,
            check_name(content.get("id", path.name), path / RUN),
            checkpoints,
            identity_of(content, path),
            content.get("changes", []),
            attempts,
            {step: {k: v for k, v in steps[step].items() if k not in _IGNORED} for step in sorted(steps)},
        )

    @property
    def start(self) -> int:
        """Steps that were done when the run began: 0, but for one that went on from a checkpoint of another run."""
        return self.attempts[0]["step"]

    @property
    def first_chain(self) -> str:
        """The hash of the steps before the run began: empty, but for one that went on from another run's."""
        return self.attempts[0].get("chain", "")

    @property
    def covers_all_steps(self) -> bool:
        """True if fingerprints are of all steps from 0 on, as those of older versions are not in a branch."""
        return not self.start or "chain" in self.attempts[0]

    @cached_property
    def computed(self) -> dict[int, dict[str, Any]]:
        """The metrics of `steps` that do not depend on when and where a step is computed; only steps that have any."""
        found = {
            step: {name: value for name, value in metrics.items() if name.startswith(_COMPUTED)}
            for step, metrics in self.steps.items()
        }
        return {step: metrics for step, metrics in found.items() if metrics}

    @property
    def last(self) -> int:
        """The last step whose numbers are known."""
        return max(self.computed, default=self.start)

    def saved(self) -> list[int]:
        """The steps that have a checkpoint now; a run that goes on replaces its temporary ones."""
        return committed_steps(self.checkpoints)

    def checkpoint(self, step: int) -> dict[str, Any]:
        """Reads the JSON of a checkpoint; empty if there is none that can be read."""
        try:
            return read_record(self.checkpoints, step) if step in self.saved() else {}
        except CheckpointError:
            return {}

    def attempt(self, step: int) -> Mapping[str, Any]:
        """The environment that computed a step; steps count from 1."""
        # A step that was computed twice, after a crash, is recorded by the last attempt that did it.
        return next((a for a in reversed(self.attempts) if a["step"] < step), self.attempts[0])

    def reach(self, start: int) -> int:
        """The last step that can be computed from the checkpoint of `start` steps under one configuration."""
        # A run under another configuration goes on with other numbers.
        later = [change["step"] for change in self.changes if change["step"] > start]
        return min(later, default=self.config(start + 1).trainer.num_train_steps)

    def identity_at(self, step: int) -> Mapping[str, Any]:
        """The part that decides numbers of the configuration with which a step was computed."""
        earlier = any(step <= change["step"] for change in self.changes)
        return numeric_identity(self.config(step)) if earlier else self.identity

    @cached_property
    def root(self) -> Path:
        """The directory in which the run was started, from which relative paths of its configuration count."""
        return root_of(self.path, self.config(self.last).trainer.log_dir)

    def config(self, step: int, overrides: Sequence[str] = ()) -> RunConfig:
        """Loads the configuration with which a step was computed.

        Args:
            step: counted from 1.
            overrides: settings over it, of keys that change no number.

        Raises:
            UserError: when the run is one of a loop of one's own, or a setting would change its numbers.
        """
        if not {"model", "data"} <= self.identity.keys():
            raise UserError(
                f"{self.path}: this run was made with a loop of one's own, of which the directory knows neither model "
                f"nor data; it cannot be computed again from there"
            )
        # Each change of the configuration has kept the file before it, which holds up to the step of the change.
        name = next((change["config_before"] for change in self.changes if step <= change["step"]), "config.yaml")
        file = path_inside(self.path, name, self.path / "run.json")
        # Without trackers, whose packages need not be installed where the run is computed again.
        plain = self._load(file)
        if not overrides:
            return plain
        config = self._load(file, overrides)
        if changed := numeric_differences(numeric_identity(plain), numeric_identity(config)):
            raise UserError("these settings would give other numbers than the run's:\n  " + "\n  ".join(changed))
        return config

    def _load(self, file: Path, overrides: Sequence[str] = ()) -> RunConfig:
        loaded = load(file, ["trainer.tracker=[]", *overrides], RunConfig)
        return config_as_begun(loaded.config, loaded.data)


def equal_bits(a: Any, b: Any) -> bool:
    """Returns True if two recorded values are equal, bit for bit; NaN equals NaN."""
    return a == b or (a != a and b != b)
