"""Branches: runs that share the steps of another run up to some step, and go on with a changed configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_trainer.checkpoint.pins import pin_step, unpin_step
from lm_trainer.checkpoint.store import PERMANENT_KEY, CheckpointStore, list_steps
from lm_trainer.config.loader import load
from lm_trainer.core.bucket import Bucket
from lm_trainer.core.errors import UserError
from lm_trainer.core.result_keys import find_result_effect
from lm_trainer.reproduce.branch_changes import (
    Change,
    changes_data,
    changes_measurements,
    changes_optimizer,
    find_refusal,
)
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.reproduce.rerun import Rerun, configure_as_recorded, open_rerun
from lm_trainer.reproduce.same_data import check_text_exists
from lm_trainer.reproduce.verify import Difference, Segment, compare_step, verify_segment
from lm_trainer.run.config.recorded_keys import config_with_recorded_keys
from lm_trainer.run.config.result_parts import select_numeric_settings
from lm_trainer.run.config.run_config import RunConfig, changed_keys, numeric_differences, numeric_identity
from lm_trainer.run.config.run_id import explain_invalid_run_id
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.branch import BranchPoint
from lm_trainer.run.files.directory import RunDirectory, checkpoint_directory
from lm_trainer.run.files.environment import describe_environment, environment_differences
from lm_trainer.run.files.records import RUN
from lm_trainer.run.training.checkpoints import EMPTY_STEPS
from lm_trainer.run.weights.saved_model import copy_model_files
from lm_trainer.run.weights.saved_state import save_state
from lm_trainer.trackers import Progress


@dataclass(frozen=True)
class BranchPlan:
    """A branch that has passed all checks that need no data.

    Attributes:
        record: the parent.
        name: run ID of the branch.
        config: configuration of the branch.
        point: start of the branch.
    """

    record: RunRecord
    name: str
    config: RunConfig
    point: BranchPoint

    @property
    def replayed(self) -> int:
        """Number of steps to compute again before the branch can begin."""
        return self.point.step - self.point.checkpoint


def plan_branch(record: RunRecord, step: int, name: str, overrides: Sequence[str]) -> BranchPlan:
    """Checks that a run can branch after `step` steps with these settings.

    Args:
        record: the parent.
        step: number of completed steps that the branch shares with its parent.
        name: run ID of the branch.
        overrides: settings `KEY=VALUE` that override the parent's configuration.

    Raises:
        UserError: if the parent has no such step, or a change makes no sense after it.
    """
    _check_step(record, step)
    if problem := explain_invalid_run_id(name):
        raise UserError(f"NAME: {problem}")
    if name == record.id:
        raise UserError(f"NAME: {name} is the run to branch; choose another name")
    if any(override.lstrip("-").startswith("trainer.id") for override in overrides):
        raise UserError("trainer.id: the branch is named by NAME; remove the setting")
    parent, config = load_branch_configs(record, step, name, overrides)
    old, new = numeric_identity(parent), numeric_identity(config)
    change = Change(parent, config, step, changed_keys(old, new, config))
    if reason := find_refusal(change):
        raise UserError(reason)
    with contextlib.chdir(record.root):
        directory = checkpoint_directory(config.trainer, name)
        if str(directory if isinstance(directory, Bucket) else directory.absolute()) == str(record.checkpoints):
            raise UserError(
                f"the branch would write into {record.checkpoints}, the checkpoints of {record.id}: set "
                "trainer.checkpointer.base_path or append_run_id_to_base_path"
            )
    point = BranchPoint(
        record.id,
        str(record.checkpoints if isinstance(record.checkpoints, Bucket) else record.path),
        step,
        record.find_start(step, step),
        tuple(numeric_differences(old, new, config)),
        fresh_optimizer=changes_optimizer(change),
        other_measurements=changes_measurements(change),
        other_data=changes_data(change),
        cpu_threads=record.attempt_at(step).get("cpu_threads"),
    )
    return BranchPlan(record, name, config, point)


def _check_step(record: RunRecord, step: int) -> None:
    if step < 1:
        raise UserError("--at: a branch shares at least one step; `lmt train` starts a new run")
    if step < record.start:
        if record.branch is not None:
            raise UserError(
                f"{record.id} begins at step {record.start}, as a branch of {record.branch.parent}: branch that run, "
                f"`lmt branch {record.branch.parent} --at {step} NAME`"
            )
        raise UserError(
            f"{record.id} begins at step {record.start}, from the checkpoint of another run: branch that run"
        )
    last = max([record.last, *record.checkpoint_steps()])
    if step > last:
        raise UserError(f"{record.id} has done {last} steps so far: --at can be at most {last}")


def load_branch_configs(
    record: RunRecord, step: int, name: str, overrides: Sequence[str]
) -> tuple[RunConfig, RunConfig]:
    """Returns the configurations of the parent after `step` steps, and of the branch."""
    parent = record.load_config(step + 1)
    loaded = load(record.config_file(step + 1), [*overrides, f"trainer.id={name}"], RunConfig)
    config = config_with_recorded_keys(loaded.config, loaded.data)
    trainer = config.trainer
    if not any(override.lstrip("-").startswith("trainer.tracker") for override in overrides):
        trackers = tuple(_without_names(tracker) for tracker in trainer.trackers)
        trainer = trainer.model_copy(update={"tracker": trackers})
    # The branch has its own first checkpoint, so it does not load another one.
    trainer = trainer.model_copy(update={"load_checkpoint_path": None, "load_checkpoint": None})
    return parent, config.model_copy(update={"trainer": trainer})


def _without_names(tracker: Any) -> Any:
    """Returns the configuration of a tracker without the parent's name, so that it uses the ID of the branch."""
    names = [key for key in ("id", "name") if getattr(tracker, key, None) is not None]
    return tracker.model_copy(update=dict.fromkeys(names))


def prepare_branch(plan: BranchPlan, progress: Progress) -> Path:
    """Creates the branch with its first checkpoint, and returns its run directory. A branch that exists is kept.

    Raises:
        UserError: if there is another run of this name, or the steps of the parent cannot be reproduced.
    """
    with contextlib.chdir(plan.record.root):
        directory = RunDirectory(plan.config.trainer, plan.config, plan.name)
        if not _is_prepared(plan, directory):
            # Before anything is written.
            check_text_exists(plan.name, plan.config.data)
            # Before a checkpoint is read, which starts the backends.
            configure_as_recorded(plan.record, plan.config.trainer, plan.point.step)
            _prepare(plan, directory, progress)
        return directory.path.absolute()


def _is_prepared(plan: BranchPlan, directory: RunDirectory) -> bool:
    record = directory.read_own_record()
    if record is None:
        return False
    existing = BranchPoint.from_record(record, directory.path / RUN)
    if existing is None:
        raise UserError(f"{directory.path} is a run that is no branch; choose another NAME")
    if not existing.same_start(plan.point):
        changes = ", ".join(existing.differences) or "no change"
        raise UserError(
            f"{directory.path} is a branch of {existing.parent} at step {existing.step}, with {changes}; choose "
            f"another NAME, or give the same step and settings to go on with it"
        )
    return bool(list_steps(directory.checkpoints))


def _prepare(plan: BranchPlan, directory: RunDirectory, progress: Progress) -> None:
    record, point = plan.record, plan.point
    pinned = point.checkpoint in record.checkpoint_steps()
    if pinned:
        pin_step(record.checkpoints, point.checkpoint, plan.name)
    links = not plan.replayed and pinned and not isinstance(record.checkpoints, Bucket)
    try:
        if pinned and point.checkpoint not in record.checkpoint_steps():
            raise UserError(
                f"{record.id} has replaced its checkpoint of step {point.checkpoint} meanwhile; start again"
            )
        if links and not isinstance(directory.checkpoints, Bucket):
            _link_checkpoint(plan, directory)
            return
        _replay_checkpoint(plan, directory, progress)
    except BaseException:
        if pinned:
            unpin_step(record.checkpoints, point.checkpoint, plan.name)
        raise
    # The branch has its own copy of the state.
    if pinned:
        unpin_step(record.checkpoints, point.checkpoint, plan.name)


def _link_checkpoint(plan: BranchPlan, directory: RunDirectory) -> None:
    """Makes the parent's checkpoint the first checkpoint of the branch. It is not copied, because it may be large."""
    step, target = plan.point.step, directory.checkpoints
    assert isinstance(target, Path)
    with directory:
        directory.set_branch(plan.point)
        copy_model_files(plan.record.checkpoints, target)
        pin_step(target, step, plan.name)
        # Resolved, because the parent may itself be a branch whose first checkpoint is a link.
        (target / str(step)).symlink_to((Path(str(plan.record.checkpoints)) / str(step)).resolve())


def _replay_checkpoint(plan: BranchPlan, directory: RunDirectory, progress: Progress) -> None:
    """Computes the steps from the parent's checkpoint on again, and saves the first checkpoint of the branch."""
    record, point = plan.record, plan.point
    segment = Segment(point.checkpoint, point.step)
    config = _with_operational_keys(record.load_config(point.step), plan.config.trainer)
    with open_rerun(record, point.checkpoint, config=config, progress=progress) as rerun:
        while rerun.state.step < point.step:
            progress.phase(f"step {rerun.state.step + 1} of {record.id}, on the way to {point.step}")
            if difference := compare_step(record, segment, rerun):
                raise UserError(_explain_difference(record, difference))
        with directory:
            directory.set_branch(point)
            copy_model_files(record.checkpoints, directory.checkpoints)
            _save_checkpoint(plan, directory, rerun)


def _with_operational_keys(parent: RunConfig, trainer: TrainerConfig) -> RunConfig:
    """Returns the parent's configuration with those keys of the branch that do not affect the results."""
    values = {
        key: getattr(trainer, key)
        for key in TrainerConfig.model_fields
        if (effect := find_result_effect(TrainerConfig, key)) is not None and effect.part is None
    }
    settings, recorded = trainer.jax_config, parent.trainer.jax_config
    if select_numeric_settings(settings) == select_numeric_settings(recorded):
        values["jax_config"] = settings
    return parent.model_copy(update={"trainer": parent.trainer.model_copy(update=values)})


def _save_checkpoint(plan: BranchPlan, directory: RunDirectory, rerun: Rerun) -> None:
    record, step = plan.record, plan.point.step
    saved, metrics = record.read_checkpoint(plan.point.checkpoint), record.computed.get(step, {})
    values = {
        **rerun.run.facts,
        "data_fingerprint": rerun.run.data.fingerprints(step),
        "train_loss": metrics.get("train/loss", saved.get("train_loss")),
        "eval_losses": {},
        EMPTY_STEPS: saved.get(EMPTY_STEPS, 0),
        "fingerprint": rerun.compute_fingerprint(),
        "chain": rerun.chain,
        "hashes": rerun.compute_hashes(),
        PERMANENT_KEY: True,
    }
    with closing(CheckpointStore(directory.checkpoints, plan.config.trainer.checkpointer, directory)) as store:
        save_state(store, rerun.state, rerun.run.setup, {name: x for name, x in values.items() if x is not None})


def _explain_difference(record: RunRecord, difference: Difference) -> str:
    changes = environment_differences(record.attempt_at(difference.step), describe_environment())
    present = ", ".join(map(str, record.checkpoint_steps())) or "none"
    because = f" (what runs here differs: {', '.join(changes)})" if changes else ""
    return (
        f"step {difference.step} of {record.id} comes out otherwise here: {difference.what} was "
        f"{difference.recorded!r}, now {difference.now!r}{because}. A branch at a checkpoint needs no replay (there "
        f"are: {present})"
    )


def check_steps(record: RunRecord, step: int, count: int, *, overrides: Sequence[str], progress: Progress) -> Segment:
    """Computes the `count` steps after `step` again, and compares all bits with the recorded ones.

    Starts from the nearest checkpoint, and also compares the steps before `step`, and every checkpoint on the way.

    Raises:
        UserError: if the run has not recorded these steps, or as for `open_rerun`.
    """
    _check_step(record, step)
    if step + count > record.last:
        raise UserError(
            f"{record.id} has recorded {record.last} steps, so {record.last - step} can be compared after step {step}: "
            f"lower --check or --at"
        )
    segment = Segment(record.find_start(step, step + count), step + count)
    return verify_segment(record, segment, overrides=overrides, progress=progress)
