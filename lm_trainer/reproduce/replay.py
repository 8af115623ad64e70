"""Recomputes one step of a run, and reports its gradients, norms and token losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.files import local_path
from lm_trainer.data.provenance import RowDocuments, documents_of_step
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.reproduce.rerun import Rerun, open_rerun
from lm_trainer.reproduce.tokens import HardToken, compute_token_losses, find_hardest_tokens
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import TrainState, to_host
from lm_trainer.step.updates.norms import Watcher
from lm_trainer.step.updates.watch import WatchConfig
from lm_trainer.trackers import Progress


@dataclass(frozen=True)
class Norms:
    """L2 norms of one parameter."""

    gradient: float
    """Norm of the gradient of the mean loss, before clipping."""
    update: float
    """Norm of the update in this step."""
    parameter: float
    """Norm of the parameter after the step."""


@dataclass(frozen=True)
class Replay:
    """Recorded and recomputed values of a step."""

    step: int
    """The step, counted from 1."""
    start: int
    """Number of completed steps at the checkpoint, or at the start of the run, from which the step was recomputed."""
    recorded: dict[str, Any]
    """Recorded metrics of the step; empty if there are none."""
    now: dict[str, float]
    norms: dict[str, Norms]
    """Norms of each parameter by name, in the order of the model."""
    tokens: list[HardToken]
    """Tokens of the batch with the highest losses, computed without dropout and with the weights before the step."""
    rows: list[RowDocuments]
    """Documents in each row of the batch."""
    gradients: Path | None
    """Path of the file with the gradients; None if they were not written."""

    def source_of_token(self, token: HardToken) -> str:
        """Returns the source of the document that contains a token."""
        passages, left = self.rows[token.row].passages, token.position
        for passage in passages:
            if left < passage.tokens:
                return passage.where
            left -= passage.tokens
        return passages[-1].where

    @property
    def applied(self) -> bool:
        """True if the weights were updated. They are not updated if the loss or the gradient norm is not finite."""
        return math.isfinite(self.now["train/loss"]) and math.isfinite(self.now["optim/grad_norm"])


class _StepObserver:
    """Step observer that stores the gradients and measures the norms of each parameter."""

    def __init__(self, recomputed_run: Rerun):
        program = recomputed_run.run.setup
        config = WatchConfig(watch_targets=("grads", "params", "updates"), split_scan_layers=True, interval=1)
        self._watcher = Watcher(config, program.sharding, program.model.axes)
        self.grads: Params = {}
        self.weight = 1.0

    def before_step(self, state: TrainState) -> Any:
        return self._watcher.before_step(state)

    def after_step(self, before: Any, grads: Params, weight: jax.Array, state: TrainState) -> None:
        self.grads, self.weight = grads, float(np.asarray(weight.addressable_data(0)))
        self._watcher.after_step(before, grads, weight, state)

    def compute_norms(self) -> dict[str, Norms]:
        (report,) = self._watcher.report()
        norms_by_name: dict[str, dict[str, float]] = {}
        for key, value in report.scalars.items():
            target, _, name = key.split("/", 2)
            norms_by_name.setdefault(name, {})[target] = value
        norms_by_name.pop("total", None)
        return {
            name: Norms(values["grads"], values["updates"], values["params"]) for name, values in norms_by_name.items()
        }


def replay_step(
    record: RunRecord,
    step: int,
    *,
    top_k: int,
    dump_grads: Path | None = None,
    overrides: Sequence[str] = (),
    progress: Progress,
) -> Replay:
    """Recomputes a step from the nearest earlier checkpoint, and returns what was observed.

    Args:
        record: the run.
        step: number of the step in metrics.jsonl, counted from 1.
        top_k: number of tokens to report.
        dump_grads: directory for the file `gradients-N.safetensors`, where N is the step. The file contains one float32
            array per parameter, the gradient of the mean loss before clipping. None writes no file.
        overrides: settings `KEY=VALUE` that override the configuration and do not affect the numbers.
        progress: shows the current phase.

    Raises:
        UserError: if the run has no such step, or as for `open_rerun`.
        MachineError: if the gradients cannot be written.
    """
    start = find_start_of_step(record, step)
    directory = None if dump_grads is None else local_path(dump_grads).absolute()
    with open_rerun(record, start, overrides=overrides, progress=progress) as recomputed_run:
        recomputed_run.run_until(step - 1)
        data, config, batch = recomputed_run.run.data, recomputed_run.run.config, recomputed_run.next_batch()
        progress.phase("losses of the tokens")
        # The losses are computed before the step, because the step donates the state.
        losses = compute_token_losses(recomputed_run.run.setup, config, recomputed_run.state, batch)
        observer = _StepObserver(recomputed_run)
        recomputed_metrics = recomputed_run.run_step(observer)
        return Replay(
            step,
            start,
            dict(record.computed.get(step, {})),
            recomputed_metrics,
            observer.compute_norms(),
            find_hardest_tokens(losses, batch, data.tokenizer, top_k),
            list(documents_of_step(data, config.trainer.batch_schedule, step)),
            None if directory is None else _write_gradients(directory / f"gradients-{step}.safetensors", observer),
        )


def find_start_of_step(record: RunRecord, step: int) -> int:
    """Returns the nearest point from which a step, counted from 1, can be computed.

    Raises:
        UserError: if the run has no such step, or as for `RunRecord.find_start`.
    """
    total = record.load_config(step).trainer.num_train_steps
    if not record.start < step <= total:
        raise UserError(f"the run {record.id} has the steps {record.start + 1} to {total}; there is no step {step}")
    return record.find_start(step - 1, step)


def _write_gradients(file: Path, observer: _StepObserver) -> Path:
    from safetensors.numpy import save_file

    # The step provides the sum of the gradients over all tokens, which the optimizer update divides by the total
    # weight.
    sums, weight = to_host(observer.grads), np.float32(observer.weight or math.inf)
    mean = {name: np.asarray(x, np.float32) / weight for name, x in sums.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # safetensors writes raw memory and ignores strides, so the arrays must be contiguous.
        save_file({name: np.ascontiguousarray(x) for name, x in mean.items()}, file)
    except OSError as error:
        raise MachineError(f"{file}: cannot be written ({error.strerror or error})") from error
    return file
