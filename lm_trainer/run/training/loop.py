"""The training loop, and the order of actions at each step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import HardwareError
from lm_trainer.health.signals import preempted_error, stopped_after_save_error
from lm_trainer.run.training.batches import BatchIterator
from lm_trainer.run.training.hooks import StepInfo
from lm_trainer.run.training.loop_parts import LoopParts
from lm_trainer.step.state.train_state import TrainState


def training_steps(run: LoopParts, state: TrainState, batches: Iterable[Batch]) -> Iterator[StepInfo]:
    """Trains until `num_train_steps` or the end of the data. Yields each step after its evaluations, hooks and saves.

    Args:
        run: parts of the loop.
        state: state to continue from. Its arrays are donated.
        batches: the following batches, with the rows of this process.

    Raises:
        Preempted: after a stop signal, once everything is saved.
        NonFiniteError: if the loss is not finite, and the configuration requires the run to stop in this case.
        HardwareError: if devices disagree about the results of a step, once the state before it is saved.
        UserError: if the data of a step will never be available.
    """
    iterator = BatchIterator(batches, run.data_wait)
    run.checkpoints.resume_loader(iterator, state.step)
    while state.step < run.num_train_steps:
        started = time.perf_counter()
        run.watchdog.arm(f"the batch of step {state.step + 1}")
        # If the step fails, the batch is read again by the next attempt.
        loader_state = iterator.get_state() if run.hardware.check_for(state.step + 1) else None
        batch = iterator.next(state)
        if batch is None:
            run.watchdog.disarm()
            run.progress.note(f"the data ended after step {state.step} of {run.num_train_steps}")
            return

        # A failed save ends the run at the next step, because later steps would be lost.
        run.checkpoints.check_for_errors()
        try:
            info = take_step(run, state, batch, loading=time.perf_counter() - started)
        except HardwareError:
            # The weights were not updated. All processes raise the error, so all of them save.
            if run.records and state.step:
                run.checkpoints.save_before_batch(state, loader_state)
            raise
        state = info.state
        run.watchdog.arm(f"step {state.step}")

        # The processes agree before saving, because if only one process stopped, the others would wait for it.
        overdue = run.records and run.checkpoints.is_overdue()
        own_time = run.stragglers.to_send()
        requests = run.save_requests.agree_on_requests(bool(run.stop.requested), overdue=overdue, seconds=own_time)
        run.stragglers.receive(state.step, run.save_requests.seconds)
        last = state.step == run.num_train_steps
        if requests.stop:
            run.checkpoints.start_grace_period()
        saves = requests.stop or requests.overdue
        saved = run_due_actions(run, info, last=last, save=saves, keep=requests.save)
        ends = saved and requests.stop_after_save
        if ends:
            run.save_requests.mark_stopping()
        if (requests.stop or ends) and not last:
            # The exit code of a preempted run guarantees that everything is saved.
            run.checkpoints.wait()
            if requests.stop:
                raise preempted_error(run.stop.requested, state.step)
            raise stopped_after_save_error(state.step)
        run.watchdog.disarm()
        yield info


def take_step(run: LoopParts, state: TrainState, batch: Batch, *, loading: float) -> StepInfo:
    """Dispatches one step. On asynchronous devices this returns before the step is computed.

    Args:
        run: parts of the loop.
        state: state before the step. Its arrays are donated.
        batch: rows of this process in the global batch, as NumPy arrays.
        loading: time in seconds spent waiting for the batch.
    """
    program, step = run.setup, state.step
    compiled = run.compilation.ensure_compiled(state, batch, run.norms)
    if compiled:
        # Excludes the compilation time from the throughput.
        run.metrics.pause()
    run.bad_batches.keep(step + 1, batch)
    # Norms are computed by separate programs, so logging them does not change the bits of the step.
    observer = run.norms if run.norms.due(step + 1) else None
    timer = run.stragglers.timer
    if timer is not None:
        timer.begin()
    with run.profiler.annotate(step + 1):
        state, metrics = program.take_step(state, batch, observer, run.hardware.check_for(step + 1))
    if timer is not None:
        timer.end(metrics["loss"])
    if compiled and run.records:
        run.checkpoints.start_compiling()
    rows, seq_len = program.plan.batch_schedule, batch.tokens.shape[1]
    return StepInfo(
        state,
        metrics,
        learning_rate=program.learning_rate(step),
        tokens=rows.at(step) * seq_len,
        total_tokens=rows.rows_before(step + 1) * seq_len,
        loading=loading,
    )


def run_due_actions(run: LoopParts, info: StepInfo, *, last: bool, save: bool, keep: bool = False) -> bool:
    """Runs all actions that are due after a step, in order. Returns True if a checkpoint was saved.

    Args:
        run: parts of the loop.
        info: the step.
        last: True for the last step, after which all actions are due.
        save: True if a checkpoint is due for a reason other than the number of the step.
        keep: True if a permanent checkpoint was requested.
    """
    step = info.step
    if run.records:
        # Reads the metrics of the previous step, without waiting for this one.
        run.metrics.record_step(info)
    if last or run.evaluations.is_due(step):
        run.evaluations.run(info.state)
    for export in run.exports:
        if last or export.is_due(step):
            export.export(info, run.setup, run.metrics)
    if run.build_watch is not None:
        run.build_watch.check(step)
    if run.tasks is not None and (last or run.tasks.is_due(step)):
        run.tasks.run(info, run.setup, run.metrics, run.progress)
    run.hooks.run(info, force=last)
    # The checkpoint comes after the hooks, so that there is no checkpoint of a step whose hooks failed.
    saves = run.records and (last or save or keep or run.checkpoints.is_due(step))
    if saves:
        run.checkpoints.save(info.state, keep=keep)
        run.save_requests.mark_saved(permanently=keep)
    elif run.records and run.checkpoints.is_copy_due(step):
        run.checkpoints.save_copy(info.state)
    if saves and keep:
        run.progress.note(f"saving a permanent checkpoint of step {step}, as asked")
    run.profiler.on_step(step, info.metrics)
    return saves


def train_to_end(run: LoopParts, state: TrainState, batches: Iterable[Batch]) -> TrainState:
    """Runs all steps, and returns the last state once its checkpoint is complete. Raises like `training_steps`."""
    for info in training_steps(run, state, batches):
        state = info.state
    run.watchdog.arm("the last step and its checkpoint")
    if run.records:
        # Metrics are read one step late, so the metrics of the last step are read now.
        run.metrics.flush()
        run.checkpoints.ensure_saved(state)
    run.watchdog.disarm()
    return state
