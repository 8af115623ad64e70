"""Predictions of the frozen model of a loss (a reference or a teacher), computed before training.

The values of a row belong to its position in the run. They are computed in microbatches of the same rows as in the
step, because the last digits of a row may depend on the other rows of its microbatch.
"""

from __future__ import annotations

import bisect
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.piecewise import BatchSchedule, Piecewise
from lm_trainer.data.cache.format import BUILDER
from lm_trainer.data.cache.row_values import RowValues
from lm_trainer.data.dataset import Data
from lm_trainer.data.loader import TrainIterator
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.tokenize.lock import BuilderLock
from lm_trainer.nn.reference import name_in_reference
from lm_trainer.objectives.distillation_loss import DistillationLoss
from lm_trainer.objectives.frozen_values import FrozenValues
from lm_trainer.objectives.preference import PreferenceLoss
from lm_trainer.optim import AdamConfig
from lm_trainer.parallel.processes import gather, gather_texts, is_lead, wait_for_all
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import loss_function, teacher_config, trace_frozen_model
from lm_trainer.run.build.setup import shard_state, split_loss_into_stages
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.adapters import hash_frozen_params
from lm_trainer.step.dispatch.device_groups import DeviceGroups
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.evaluate import Evaluator
from lm_trainer.step.state.model_def import LoadFn, Params
from lm_trainer.trackers import Progress


def attach_frozen_values(
    config: RunConfig, vocab_size: int, load: LoadFn | None, data: Data, progress: Progress
) -> str:
    """Computes the predictions of the frozen model for all rows of a run that are not stored yet, and attaches them.

    The weights of the frozen model are on the devices only during this call. All processes must call it.

    Args:
        config: configuration of the run, with a loss that precomputes.
        vocab_size: number of rows of the token embedding.
        load: loads the weights of the frozen model; None if there are none.
        data: data of the run, which must be complete.
        progress: progress display in the terminal.

    Returns:
        The digest of the weights, as in the checkpoints of a run that holds them.

    Raises:
        UserError: if there are no weights, or stored values are damaged.
        MachineError: if the disk is too small.
    """
    if load is None:
        raise UserError(
            f"loss: {config.loss.type} needs the weights of its frozen model; name them as trainer.initialize_from or "
            f"initialize_from_hf"
        )
    predictor = _Predictor(config, vocab_size, load)
    evals = _eval_rows(config, data)
    sets = [_train_rows(config, data), *evals.values()]
    stored = [predictor.open_values(rows, data) for rows in sets]
    _report_size(sets, stored, predictor.title, progress)
    for rows, values in zip(sets, stored, strict=True):
        _compute_missing(rows, values, predictor, progress)
    data.attach_frozen(stored[0], dict(zip(evals, stored[1:], strict=True)))
    return predictor.digest


@dataclass(frozen=True)
class _Rows:
    """Rows of a set in batches, for which values are needed."""

    name: str
    schedule: BatchSchedule
    num_batches: int
    plans: Piecewise[MicrobatchPlan]
    """Division of each batch into microbatches."""
    read: Callable[[int, Callable[[int], Sequence[int]]], Iterable[Batch]]
    """`read(first, rows)` returns the batches from number `first` on, with the rows `rows(batch_size)`."""

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.schedule.rows_before(self.num_batches)

    def batch_of_row(self, row: int) -> int:
        """Returns the number of the batch that contains a row."""
        return bisect.bisect_right(range(self.num_batches + 1), row, key=self.schedule.rows_before) - 1


def _train_rows(config: RunConfig, data: Data) -> _Rows:
    plan, steps = config.trainer.step_plan, config.trainer.num_train_steps

    def read(first: int, rows: Callable[[int], Sequence[int]]) -> Iterable[Batch]:
        return data.train(plan.batch_schedule, rows=rows, first_step=first, num_steps=steps - first)

    return _Rows("train", plan.batch_schedule, steps, plan.microbatches, read)


def _eval_rows(config: RunConfig, data: Data) -> dict[str, _Rows]:
    plan, limit = config.trainer.step_plan.evaluation, config.trainer.max_eval_batches
    size, sets = plan.batch_size, {}
    for name, evals in data.validation().items():
        assert isinstance(evals, EvalSet), "the data are complete"

        def read(first: int, rows: Callable[[int], Sequence[int]], evals: EvalSet = evals) -> Iterable[Batch]:
            return itertools.islice(evals.batches(size, rows=rows(size), max_batches=limit), first, None)

        count = evals.num_batches(size)
        num_batches = count if limit is None else min(count, limit)
        schedule, plans = BatchSchedule.constant(size), Piecewise((0,), (plan,))
        sets[name] = _Rows(f"validation/{name}", schedule, num_batches, plans, read)
    return sets


class _Predictor:
    """Computes predictions of the frozen model."""

    def __init__(self, config: RunConfig, vocab_size: int, load: LoadFn):
        self._config, self._vocab_size = config, vocab_size
        self.title = "the predictions of the teacher"
        if config.loss.has_reference:
            self.title = "the log probabilities of the reference"
        loss = loss_function(config)
        assert isinstance(loss, DistillationLoss | PreferenceLoss)
        self._reader, self._model = loss, trace_frozen_model(config, vocab_size)
        trainer = config.trainer
        mesh = trainer.step_plan.mesh(trainer.devices())
        # The optimizer has no effect on the shardings of parameters.
        _, sharding = shard_state(trainer.step_plan, AdamConfig(), self._model, mesh)
        self._devices = DeviceGroups(sharding, trainer.microbatches_per_gather)
        self._loss = FrozenValues(loss)
        self._staged = split_loss_into_stages(self._loss, self._model, mesh) if trainer.gathers_layers else None
        self._evaluators: dict[MicrobatchPlan, Evaluator] = {}
        self._params: Params = load(self._model.shapes, sharding.storage)

    @cached_property
    def digest(self) -> str:
        """Digest of the weights, with the names that they have in a model that holds them."""
        params = self._params
        separate = self._config.adapter is None
        return hash_frozen_params({name_in_reference(name) if separate else name: x for name, x in params.items()})

    def local_rows(self, plan: MicrobatchPlan) -> Sequence[int]:
        """Returns the rows of a batch that this process needs."""
        return self._devices.local_rows(plan)

    def predict(self, plan: MicrobatchPlan, batches: Iterable[Batch]) -> Iterator[dict[str, np.ndarray]]:
        """Yields the values of all rows of each batch, given the rows of this process."""
        rows = self.local_rows(plan)
        for values in self._evaluator(plan).compute_row_values(self._params, batches):
            yield _gather_rows(values, rows, plan.batch_size)

    def open_values(self, rows: _Rows, data: Data) -> RowValues:
        """Opens the stored values of a set."""
        section = teacher_config(self._config) or self._config.model
        plans = rows.plans.values
        facts = {
            "model": {"type": section.type, **section.model_dump(mode="json", exclude_unset=True)},
            "weights": hash_frozen_params(self._params),
            "data": data.fingerprint(),
            "set": rows.name,
            "batches": [[start, asdict(plan)] for start, plan in zip(rows.plans.starts, plans, strict=True)],
            "loss": self._reader.frozen_settings(),
            "programs": [self._program_hash(plan) for plan in plans],
        }
        fields = self._reader.frozen_shapes(self._config.model.seq_len, self._vocab_size)
        return RowValues(data.cache_dir, self.title, facts, fields)

    def _program_hash(self, plan: MicrobatchPlan) -> str:
        row = random_batch(1, self._config.model.seq_len, self._vocab_size)
        return self._evaluator(plan).compile(row).graph_hash()

    def _evaluator(self, plan: MicrobatchPlan) -> Evaluator:
        if plan not in self._evaluators:
            self._evaluators[plan] = Evaluator(self._model, self._loss, self._devices, plan, staged=self._staged)
        return self._evaluators[plan]


def _compute_missing(rows: _Rows, values: RowValues, predictor: _Predictor, progress: Progress) -> None:
    """Computes and stores the values of the rows that are missing, in order."""
    if _fewest_rows(values) >= rows.count:
        return
    with ExitStack() as stack:
        lock = None
        if is_lead():
            phase = f"another run computes {predictor.title}"
            lock = stack.enter_context(BuilderLock(values.store, lambda: progress.phase(phase)))
        # The other processes wait here for the lock.
        stored = _fewest_rows(values)
        writer = values.open_writer() if _is_writer(values) else None
        for first, batch in _predict_from(rows, stored, predictor, progress):
            if writer is not None:
                writer.append(first, batch)
            if lock is not None:
                lock.write_heartbeat()
        if writer is not None:
            writer.finish()
    wait_for_all("frozen values")


def _predict_from(
    rows: _Rows, stored: int, predictor: _Predictor, progress: Progress
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yields (number of the first row, values of all rows) of each batch that has rows from number `stored` on."""
    number = rows.batch_of_row(stored) if stored < rows.count else rows.num_batches
    plans = {plan.batch_size: plan for plan in rows.plans.values}
    batches = iter(rows.read(number, lambda size: predictor.local_rows(plans[size])))
    while number < rows.num_batches:
        # Batches of one size share a program.
        stop = min(*(start for start in (*rows.plans.starts, rows.num_batches) if start > number), rows.num_batches)
        for values in predictor.predict(rows.plans.at(number), itertools.islice(batches, stop - number)):
            progress.phase(f"computing {predictor.title}: batch {number + 1:,} of {rows.num_batches:,} ({rows.name})")
            yield rows.schedule.rows_before(number), values
            number += 1
    if isinstance(batches, TrainIterator):
        batches.close()


def _fewest_rows(values: RowValues) -> int:
    """Returns the number of rows that are stored in all processes, which may have directories of their own."""
    return int(gather(np.asarray(values.count_rows(), np.int64)).min())


def _is_writer(values: RowValues) -> bool:
    """Returns True if this process writes: the first one, and every process that does not see the files of the first.

    All processes must call this function.
    """
    if jax.process_count() == 1:
        return True
    # The first process holds the lock, whose claim differs each time.
    claim = (values.store.read(BUILDER) or b"").decode(errors="replace")
    claims = gather_texts(claim)
    return is_lead() or claim != claims[0]


def _gather_rows(values: dict[str, np.ndarray], rows: Sequence[int], count: int) -> dict[str, np.ndarray]:
    """Returns the values of all rows of a global batch, given the values of this process's rows in each process."""
    if jax.process_count() == 1:
        return values
    longest = int(gather(np.asarray(len(rows), np.int32)).max())
    numbers = np.full(longest, -1, np.int32)
    numbers[: len(rows)] = rows
    numbers_of_processes = gather(numbers)

    def join(x: np.ndarray) -> np.ndarray:
        padded = np.zeros((longest, *x.shape[1:]), x.dtype)
        padded[: len(x)] = x
        joined = np.empty((count, *x.shape[1:]), x.dtype)
        for of_process, part in zip(numbers_of_processes, gather(padded), strict=True):
            joined[of_process[of_process >= 0]] = part[of_process >= 0]
        return joined

    return {name: join(x) for name, x in values.items()}


def _report_size(sets: Sequence[_Rows], stored: Sequence[RowValues], title: str, progress: Progress) -> None:
    """Says how large the values are.

    Raises:
        MachineError: if the disk is too small for values that are missing.
    """
    row_bytes = stored[0].layout.row.itemsize
    total = sum(rows.count for rows in sets) * row_bytes
    missing = sum(max(rows.count - values.count_rows(), 0) for rows, values in zip(sets, stored, strict=True))
    local = stored[0].store.local
    size = f"{title}: {sum(rows.count for rows in sets):,} rows, {_format_size(total)}"
    if not missing:
        progress.note(f"{size}, read from {local or stored[0].store.url}")
        return
    progress.note(f"{size}, computed before the first step into {local or stored[0].store.url}")
    if local is None:
        return
    folder = next(path for path in (local, *local.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if missing * row_bytes > free:
        raise MachineError(
            f"loss.precompute: {title} need {_format_size(missing * row_bytes)}, but {folder} has {_format_size(free)} "
            f"left; set data.cache_dir to a larger disk, lower loss.top_k or trainer.num_train_steps, or set "
            f"loss.precompute to false"
        )


def _format_size(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"
