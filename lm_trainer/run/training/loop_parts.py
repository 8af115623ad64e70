"""The parts of the training loop, built before its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.health.alerts.sender import Alerts
from lm_trainer.health.signals import SaveRequests, StopRequest
from lm_trainer.health.stragglers import Stragglers
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.parallel.processes import is_lead
from lm_trainer.profile.goodput import Goodput
from lm_trainer.profile.memory_use import memory_meter
from lm_trainer.profile.meter import Meter
from lm_trainer.profile.peaks import datasheet_peak
from lm_trainer.profile.trace import Profiler, ProfilerOff
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.artifacts import Artifacts
from lm_trainer.run.files.branch import BRANCH
from lm_trainer.run.start.attempt import Attempt
from lm_trainer.run.training.bad_batches import BadBatchDump
from lm_trainer.run.training.batches import DataWait
from lm_trainer.run.training.checkpoints import EMPTY_STEPS, SERIES, Checkpoints
from lm_trainer.run.training.compilation import Compilation
from lm_trainer.run.training.data_notes import BuildWatch
from lm_trainer.run.training.evaluations import EvalSets, Evaluations
from lm_trainer.run.training.hardware_checks import HardwareChecks
from lm_trainer.run.training.hf_exports import HfExports
from lm_trainer.run.training.hooks import Hooks
from lm_trainer.run.training.metrics import MetricLogger
from lm_trainer.run.training.task_evaluation import TaskEvaluation
from lm_trainer.run.training.token_probabilities import TokenProbabilities
from lm_trainer.run.weights.saved_state import Fingerprint
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.step.updates.norms import Watcher
from lm_trainer.trackers import Progress, open_trackers, profile_directory
from lm_trainer.trackers.base import Composite
from lm_trainer.trackers.json_lines import METRICS


@dataclass(frozen=True)
class LoopParts:
    """All parts of a training loop."""

    num_train_steps: int
    setup: TrainingSetup
    compilation: Compilation
    metrics: MetricLogger
    norms: Watcher
    profiler: Profiler | ProfilerOff
    evaluations: Evaluations
    exports: tuple[HfExports, ...]
    build_watch: BuildWatch | None
    tasks: TaskEvaluation | None
    hardware: HardwareChecks
    stragglers: Stragglers
    hooks: Hooks
    """Hooks that the user has added."""
    checkpoints: Checkpoints
    bad_batches: BadBatchDump
    data_wait: DataWait
    stop: StopRequest
    save_requests: SaveRequests
    watchdog: Watchdog
    progress: Progress
    records: bool
    """True if metrics are logged and checkpoints saved."""


@dataclass
class LoopOptions:
    """Options of a training loop that are not part of its configuration."""

    data_fingerprint: Callable[[int], Fingerprint]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that are saved with every checkpoint."""
    flops_per_token: float = 0.0
    """Number of FLOPs per token of a training step, for MFU; 0 if unknown."""
    recomputed_flops_per_token: float | None = None
    """Number of additional FLOPs per token due to rematerialisation, for HFU; None if unknown."""
    exports: Sequence[HfExports] = ()
    build_watch: BuildWatch | None = None
    """Reports the progress of tokenisation, for a run that begins before all of its text is tokenised."""
    tasks: TaskEvaluation | None = None
    open_tokens: Callable[[Composite, EvalSet], TokenProbabilities] | None = None
    """Creates the writer of token probabilities of a held-out set. Called at the first evaluation."""
    hooks: Hooks = field(default_factory=Hooks)
    eval_sets: EvalSets = field(default_factory=list)
    records: bool = True
    """True if metrics are logged and checkpoints saved."""
    until: int | None = None
    """Step after which the loop ends; None means `trainer.num_train_steps`."""


@dataclass(frozen=True)
class OpenLoop:
    """A training loop that is ready to run, with its tracker and artifacts."""

    parts: LoopParts
    tracker: Composite
    artifacts: Artifacts


@contextmanager
def open_loop(attempt: Attempt, setup: TrainingSetup, state: TrainState, options: LoopOptions) -> Iterator[OpenLoop]:
    """Context manager that builds the parts of the loop for a state, which may be at any step.

    Raises:
        MachineError: if metrics.jsonl cannot be written.
        UserError: if the user has to do something for a tracker, such as install a package.
    """
    config, directory, progress, watchdog = attempt.config, attempt.directory, attempt.progress, attempt.watchdog
    with ExitStack() as stack:
        # Must be read before the trackers drop the lines of steps that will be repeated.
        goodput = Goodput.resume(directory.path / METRICS, state.step, attempt.started)
        saved = attempt.store.read_record(state.step)
        # The tracker is opened first and closed last, so that it receives the final reports of the other parts.
        # The lines of the steps that a branch shares are in the directory of its parent.
        begins = directory.branch is not None and directory.branch.step == state.step
        tracker = stack.enter_context(
            closing(_open_trackers(attempt, state.step, None if begins else saved.get(SERIES)))
        )
        for note in [*(f"warning: {gap}" for gap in tracker.gaps), *tracker.notes]:
            progress.note(note)
        lineage = {} if directory.branch is None else {BRANCH: directory.branch.to_record()}
        tracker.log_config({**directory.config.model_dump(mode="json"), **lineage})
        artifacts = Artifacts(directory, tracker)
        norms = Watcher(config.watch, setup.sharding, setup.model.axes)
        bad_batches = BadBatchDump(directory.path / "non-finite")
        meter = _build_meter(config, setup, options, goodput)
        alerts = stack.enter_context(closing(Alerts(config.alerts, directory.path, tracker, progress, sends=is_lead())))
        watchdog.on_stall = alerts.handle_stall
        stragglers = stack.enter_context(closing(Stragglers(config.alerts.straggler, alerts, attempt.process_names)))
        setup.step.marker = None if stragglers.timer is None else stragglers.timer.mark
        measure_memory = memory_meter()
        logger = MetricLogger(
            config,
            tracker,
            progress,
            meter,
            norms,
            lambda: {**measure_memory(), **stragglers.metrics()},
            bad_batches=bad_batches,
            alerts=alerts,
            chain=directory.chain,
            empty_steps=saved.get(EMPTY_STEPS, 0),
        )
        metrics = stack.enter_context(closing(logger))
        profiler = stack.enter_context(_build_profiler(attempt, tracker))
        profiler.on_step(state.step)
        checkpoints = Checkpoints(
            attempt.store, setup, metrics, options.data_fingerprint, options.facts, attempt.watchdog
        )
        data_wait = DataWait(attempt.stop, progress, watchdog, checkpoints.ensure_saved)
        tokens = None if options.open_tokens is None else partial(options.open_tokens, tracker)
        evaluations = Evaluations(options.eval_sets, config, setup, metrics, data_wait, watchdog, progress, tokens)
        parts = LoopParts(
            num_train_steps=options.until or config.num_train_steps,
            setup=setup,
            compilation=Compilation(config, setup, directory, artifacts, watchdog, progress),
            metrics=metrics,
            norms=norms,
            profiler=profiler,
            evaluations=evaluations,
            exports=tuple(options.exports),
            build_watch=options.build_watch,
            tasks=options.tasks,
            hardware=HardwareChecks(config, directory, alerts),
            stragglers=stragglers,
            hooks=options.hooks,
            checkpoints=checkpoints,
            bad_batches=bad_batches,
            data_wait=data_wait,
            stop=attempt.stop,
            save_requests=attempt.save_requests,
            watchdog=watchdog,
            progress=progress,
            records=options.records,
        )
        # From here on there is training state to save, and a signal takes effect at the end of a step.
        attempt.stop.arm()
        yield OpenLoop(parts, tracker, artifacts)


def _open_trackers(attempt: Attempt, step: int, series: Any) -> Composite:
    directory = attempt.directory
    return open_trackers(
        attempt.config.trackers,
        run_dir=directory.path,
        run_id=directory.name,
        resume_step=step,
        series=series,
        process_index=jax.process_index(),
    )


def _build_meter(config: TrainerConfig, setup: TrainingSetup, options: LoopOptions, goodput: Goodput) -> Meter:
    devices = setup.sharding.mesh.devices
    peak = datasheet_peak(devices.flat[0].device_kind, config.mp.compute)
    flops = options.flops_per_token
    peak_flops = None if peak is None or not flops else peak.flops * devices.size
    recomputed = options.recomputed_flops_per_token
    return Meter(flops_per_token=flops, peak_flops=peak_flops, recomputed=recomputed, goodput=goodput)


def _build_profiler(attempt: Attempt, tracker: Composite) -> Profiler | ProfilerOff:
    config, directory = attempt.config, attempt.directory
    if not config.profiler or not is_lead():
        return ProfilerOff()
    return Profiler(
        profile_directory(config.trackers, run_dir=directory.path, run_id=directory.name),
        start_step=config.profiler_start_step,
        num_steps=config.profiler_num_steps,
        perfetto_link=config.profiler_perfetto_link,
        on_trace=lambda path: tracker.log_artifact("profile", path, type="profile"),
    )
