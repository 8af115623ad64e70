"""One step of a run, computed again and observed from inside."""

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
from lm_trainer.reproduce.rerun import Rerun, rerun
from lm_trainer.reproduce.tokens import HardToken, hardest, token_losses
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import TrainState, to_host
from lm_trainer.step.updates.norms import Watcher
from lm_trainer.step.updates.watch import WatchConfig
from lm_trainer.trackers import Progress


@dataclass(frozen=True)
class Norms:
    """L2 norms of one parameter."""

    gradient: float
    """The norm of the gradient of the mean loss, before clipping."""
    update: float
    """The norm of the update that the step added."""
    parameter: float
    """The norm of the parameter after the step."""


@dataclass(frozen=True)
class Replay:
    """A step as it was recorded and as it came out again."""

    step: int
    """The step, counted from 1."""
    start: int
    """Steps done at the checkpoint (or the start) from which it was reached."""
    recorded: dict[str, Any]
    """The metrics of the run; empty if it recorded none of this step."""
    now: dict[str, float]
    norms: dict[str, Norms]
    """By parameter, in the order of the model."""
    tokens: list[HardToken]
    """The hardest of the batch, without dropout, for the weights before the step."""
    rows: list[RowDocuments]
    """The documents of the batch."""
    gradients: Path | None
    """The file that they were written to; None if they were not."""

    def source(self, token: HardToken) -> str:
        """The origin of the document that a token stands in."""
        passages, left = self.rows[token.row].passages, token.position
        for passage in passages:
            if left < passage.tokens:
                return passage.where
            left -= passage.tokens
        return passages[-1].where

    @property
    def applied(self) -> bool:
        """True if the weights changed, which a step whose loss or gradient is not finite does not."""
        return math.isfinite(self.now["train/loss"]) and math.isfinite(self.now["optim/grad_norm"])


class _StepObserver:
    """Observer of a step that keeps its gradients and measures norms by parameter."""

    def __init__(self, again: Rerun):
        program = again.run.setup
        config = WatchConfig(watch_targets=("grads", "params", "updates"), split_scan_layers=True, interval=1)
        self._watcher = Watcher(config, program.sharding, program.model.axes)
        self.grads: Params = {}
        self.weight = 1.0

    def before(self, state: TrainState) -> Any:
        return self._watcher.before(state)

    def after(self, before: Any, grads: Params, weight: jax.Array, state: TrainState) -> None:
        self.grads, self.weight = grads, float(np.asarray(weight.addressable_data(0)))
        self._watcher.after(before, grads, weight, state)

    def norms(self) -> dict[str, Norms]:
        (seen,) = self._watcher.report()
        found: dict[str, dict[str, float]] = {}
        for key, value in seen.scalars.items():
            target, _, name = key.split("/", 2)
            found.setdefault(name, {})[target] = value
        found.pop("total", None)
        return {name: Norms(each["grads"], each["updates"], each["params"]) for name, each in found.items()}


def replay(
    record: RunRecord,
    step: int,
    *,
    top_k: int,
    dump_grads: Path | None = None,
    overrides: Sequence[str] = (),
    progress: Progress,
) -> Replay:
    """Computes a step again, from the nearest checkpoint before it, under observation.

    Args:
        record: the run.
        step: as in metrics.jsonl, so the first is 1.
        top_k: the number of tokens to name.
        dump_grads: a directory for `gradients-N.safetensors`, an array for each parameter: the gradient of the mean
            loss, before clipping, in float32.
        overrides: settings that change no number.
        progress: shows the phases.

    Raises:
        UserError: when the run has no such step, or as `rerun`.
        MachineError: when the gradients cannot be written.
    """
    start = _nearest(record, step)
    where = None if dump_grads is None else local_path(dump_grads).absolute()
    with rerun(record, start, overrides=overrides, progress=progress) as again:
        while again.state.step < step - 1:
            progress.phase(f"step {again.state.step + 1}, on the way to {step}")
            again.step()
        data, config, batch = again.run.data, again.run.config, again.next_batch()
        progress.phase("losses of the tokens")
        # Before the step, which donates the state.
        losses = token_losses(again.run.setup, config, again.state, batch)
        observer = _StepObserver(again)
        now = again.step(observer)
        return Replay(
            step,
            start,
            dict(record.computed.get(step, {})),
            now,
            observer.norms(),
            hardest(losses, batch, data.tokenizer, top_k),
            list(documents_of_step(data, config.trainer.batch_schedule, step)),
            None if where is None else _write(where / f"gradients-{step}.safetensors", observer),
        )


def _nearest(record: RunRecord, step: int) -> int:
    total = record.config(step).trainer.num_train_steps
    if not record.start < step <= total:
        raise UserError(f"the run {record.id} has the steps {record.start + 1} to {total}; there is no step {step}")
    start = max(s for s in (record.start, *record.saved()) if s < step)
    if step > record.reach(start):
        raise UserError(
            f"step {step} cannot be reached: the configuration changed after step {record.reach(start)}, and there is "
            f"no checkpoint between it and step {step} (there are: {record.saved()})"
        )
    return start


def _write(file: Path, observer: _StepObserver) -> Path:
    from safetensors.numpy import save_file

    # The step hands out the sum over all tokens, which is divided by their weight only at the update.
    sums, weight = to_host(observer.grads), np.float32(observer.weight or math.inf)
    mean = {name: np.asarray(x, np.float32) / weight for name, x in sums.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # safetensors writes the memory as it lies, whatever the strides say.
        save_file({name: np.ascontiguousarray(x) for name, x in mean.items()}, file)
    except OSError as error:
        raise MachineError(f"{file}: cannot be written ({error.strerror or error})") from error
    return file
