"""The training loop: the order of everything that happens at a step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from lm_trainer.core.batch import Batch
from lm_trainer.health.signals import preempted, stopped_after_save
from lm_trainer.run.training.batches import BatchIterator
from lm_trainer.run.training.hooks import StepInfo
from lm_trainer.run.training.loop_parts import LoopParts
from lm_trainer.step.state.train_state import TrainState


def training_steps(run: LoopParts, state: TrainState, batches: Iterable[Batch]) -> Iterator[StepInfo]:
    """Takes steps until `num_train_steps` or the end of the data; hands out each when all that follows it is done.

    Args:
        run: everything that takes part.
        state: to go on from; its arrays are consumed.
        batches: of the steps that come, this process's rows of each.

    Raises:
        Preempted: after a stop signal, with everything saved.
        NonFiniteError: when the loss is not finite and the configuration says to stop.
        UserError: when the data that a step needs will not come.
    """
    iterator = BatchIterator(batches, run.data_wait)
    run.checkpoints.resume_loader(iterator, state.step)
    while state.step < run.num_train_steps:
        started = time.perf_counter()
        run.watchdog.arm(f"the batch of step {state.step + 1}")
        batch = iterator.next(state)
        if batch is None:
            run.watchdog.disarm()
            run.progress.note(f"the data ended after step {state.step} of {run.num_train_steps}")
            return

        # A save that failed ends the run at the next step: whatever is computed after it would be lost.
        run.checkpoints.poll()
        info = take_step(run, state, batch, loading=time.perf_counter() - started)
        state = info.state
        run.watchdog.arm(f"step {state.step}")

        # Agreed upon before anything is saved: a process that stopped alone would leave the others waiting for it.
        asked = run.save_requests.agree(bool(run.stop.requested))
        last = state.step == run.num_train_steps
        if asked.stop:
            run.checkpoints.hurry()
        saved = follow_up(run, info, last=last, stopping=asked.stop, keep=asked.save)
        ends = saved and asked.stop_after_save
        if ends:
            run.save_requests.stopping()
        if (asked.stop or ends) and not last:
            # The exit code of a preempted run promises that everything is saved.
            run.checkpoints.wait()
            if asked.stop:
                raise preempted(run.stop.requested, state.step)
            raise stopped_after_save(state.step)
        run.watchdog.disarm()
        yield info


def take_step(run: LoopParts, state: TrainState, batch: Batch, *, loading: float) -> StepInfo:
    """Enqueues one step and returns before it is computed, where the devices compute while the host goes on.

    Args:
        run: everything that takes part.
        state: before the step, which consumes its arrays.
        batch: this process's rows of the global batch, as NumPy arrays.
        loading: seconds that the step has waited for the batch.
    """
    program, step = run.setup, state.step
    if run.compilation.ensure(state, batch, run.norms):
        # Throughput is that of steps: compilation belongs to none.
        run.metrics.pause()
    run.bad_batches.keep(step + 1, batch)
    # Norms are computed by programs of their own, beside the step: logging them changes no bit of it.
    observer = run.norms if run.norms.due(step + 1) else None
    with run.profiler.annotate(step + 1):
        state, metrics = program.take_step(state, batch, observer)
    rows, seq_len = program.plan.batch_schedule, batch.tokens.shape[1]
    return StepInfo(
        state,
        metrics,
        learning_rate=program.learning_rate(step),
        tokens=rows.at(step) * seq_len,
        total_tokens=rows.rows_before(step + 1) * seq_len,
        loading=loading,
    )


def follow_up(run: LoopParts, info: StepInfo, *, last: bool, stopping: bool, keep: bool = False) -> bool:
    """Does everything that is due after a step, in this order; returns True if that was a checkpoint as well.

    Args:
        run: everything that takes part.
        info: of the step.
        last: whether no step comes after it, so that everything is due.
        stopping: whether the run stops here, so that its state must be saved.
        keep: whether a permanent checkpoint was asked for.
    """
    step = info.step
    if run.records:
        # The metrics of the step before: those of this one are still being computed, and nobody waits for them.
        run.metrics.step_done(info)
    if last or run.evaluations.due(step):
        run.evaluations.run(info.state)
    for export in run.exports:
        if last or export.due(step):
            export.save(info, run.setup, run.metrics)
    if run.build_watch is not None:
        run.build_watch.look(step)
    if run.tasks is not None and (last or run.tasks.due(step)):
        run.tasks.run(info, run.setup, run.metrics, run.progress)
    run.hooks.run(info, force=last)
    # After the hooks: one that fails leaves no checkpoint of a step that it did not see to its end.
    saves = run.records and (last or stopping or keep or run.checkpoints.due(step))
    if saves:
        run.checkpoints.save(info.state, keep=keep)
    if saves and keep:
        run.progress.note(f"saving a permanent checkpoint of step {step}, as asked")
        run.save_requests.saved()
    run.profiler.on_step(step, info.metrics)
    return saves


def train_to_end(run: LoopParts, state: TrainState, batches: Iterable[Batch]) -> TrainState:
    """Takes all steps, and returns the last state when its checkpoint is on disk; raises as `training_steps`."""
    for info in training_steps(run, state, batches):
        state = info.state
    run.watchdog.arm("the last step and its checkpoint")
    if run.records:
        # Metrics are read one step late: those of the last step are still to come.
        run.metrics.flush()
        run.checkpoints.keep(state)
    run.watchdog.disarm()
    return state
