"""`Trainer`: a run as an object, for one's own model, loss or loop. `lmt train` is built of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, Self, overload

import jax
from flax import nnx
from jax.sharding import Mesh
from pydantic import SerializeAsAny

from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.core.batch import Batch
from lm_trainer.core.config import Config
from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.core.precision import Policy
from lm_trainer.core.runtime import configure_jax
from lm_trainer.health.peer_failure import join_processes
from lm_trainer.health.signals import StopRequest, preempted
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.optim import OptimizerConfig
from lm_trainer.parallel.mesh import AxisRules
from lm_trainer.parallel.processes import any_process, is_lead
from lm_trainer.profile.meter import Meter
from lm_trainer.profile.peaks import datasheet_peak
from lm_trainer.profile.trace import Profiler
from lm_trainer.run.bad_batches import Evidence
from lm_trainer.run.batches import EvalData, Feed, Loader, Patience, TrainData
from lm_trainer.run.directory import RunDirectory
from lm_trainer.run.hooks import HookFn, Hooks, StepInfo, When
from lm_trainer.run.metrics import Recorder
from lm_trainer.run.program import Program, Selection, caveats, check_devices, plan_program, trace_module
from lm_trainer.run.restore import Fingerprint, save_state, start_state
from lm_trainer.run.trainer_config import TrainerConfig
from lm_trainer.step.elastic import LossFn
from lm_trainer.step.norms import Watcher
from lm_trainer.step.state import ModelDef, TrainState
from lm_trainer.trackers import Composite, Progress, open_trackers, profile_directory


class _Settings(Config):
    """What decides a run that no configuration file describes."""

    trainer: TrainerConfig
    optimizer: SerializeAsAny[OptimizerConfig]


class Trainer:
    """Owns the run directory, checkpoints, trackers and hooks of one attempt at a run; use it as a context manager.

    Args:
        config: the `trainer` section; its `id` names the run, and the same id again resumes it.
        optimizer: one of `lm_trainer.optim`.
        loss_fn: `loss(model, batch, key)` returns three float32 scalars or a dict of them: the sum of the weighted
            losses, the sum of the weights, and sums of what else to report.
        settings: what is written down as the configuration of the run, by default the two above.
        progress: what the person at the terminal sees.
        add_default_hooks: whether metrics are recorded and checkpoints saved.

    Attributes:
        allow_config_change: go on with a run that was begun with another configuration or other data; set it before the
            trainer is entered.
        flops_per_token: of a training step, for the figure of MFU; 0 where it is not known.
        seq_len: positions in a row, for schedules that count tokens.

    Raises:
        UserError: when the run directory is in use or holds another run, or the devices do not fit.
    """

    def __init__(
        self,
        config: TrainerConfig,
        optimizer: OptimizerConfig,
        loss_fn: LossFn,
        *,
        settings: Config | None = None,
        progress: Progress | None = None,
        add_default_hooks: bool = True,
    ):
        self.config, self.optimizer, self.loss_fn = config, optimizer, loss_fn
        self.progress = progress or Progress(config.num_train_steps)
        self.hooks, self._last_hooks = Hooks(), Hooks()
        self.flops_per_token = 0.0
        self.seq_len: int | None = None
        self.allow_config_change = False
        settings = settings or _Settings(trainer=config, optimizer=optimizer)
        self._directory = RunDirectory(config, settings, config.id or "run")
        self._stack, self._stop = ExitStack(), StopRequest()
        self._watchdog = Watchdog(config.watchdog, self._directory.path)
        self._patience = Patience(self._stop, self.progress, self._watchdog, self._keep)
        self._evidence = Evidence(self._directory.path / "non-finite")
        self._facts: dict[str, Any] = {}
        self._compiled_before = self._stopping = False
        self._program: Program | None = None
        self._tracker: Composite | None = None
        self._recorder: Recorder | None = None
        self._profiler: Profiler | None = None
        if add_default_hooks:
            self.add_hook(lambda info: self.recorder.step_done(info))
            self._last_hooks.add(self._save_when_due, 1)

    def __enter__(self) -> Self:
        config = self.config
        with ExitStack() as stack:
            stack.enter_context(self._stop)
            configure_jax(config.jax_config, config.jax_compilation_cache_dir, self._directory.cpu_threads(config))
            failure_detector = stack.enter_context(join_processes(config.distributed, self.progress))
            check_devices(config)
            self._directory.allow_change = self.allow_config_change
            stack.enter_context(self._directory)
            self.store = stack.enter_context(closing(CheckpointStore(self.checkpoint_path, config.checkpointer)))
            stack.enter_context(self._watchdog)
            stack.push(failure_detector.report)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    @property
    def run_id(self) -> str:
        return self._directory.name

    @property
    def run_dir(self) -> Path:
        """Configuration, environment, metrics and artifacts."""
        return self._directory.path

    @property
    def checkpoint_path(self) -> Path:
        return self._directory.checkpoints

    @property
    def mp(self) -> Policy:
        """The precision of parameters, computation and output."""
        return self.config.mp

    @property
    def num_train_steps(self) -> int:
        return self.config.num_train_steps

    @property
    def program(self) -> Program:
        """What runs; there from `initial_state` on."""
        if self._program is None:
            raise RuntimeError("call initial_state first: what runs depends on the model")
        return self._program

    @property
    def device_mesh(self) -> Mesh:
        return self.program.sharding.mesh

    @property
    def parameter_axis_mapping(self) -> AxisRules:
        """Logical axis to mesh axes for the state at rest."""
        return self.config.param_rules()

    @property
    def compute_axis_mapping(self) -> AxisRules:
        """Logical axis to mesh axes during computation."""
        return self.config.compute_rules()

    @property
    def tracker(self) -> Composite:
        """All trackers as one; there from `initial_state` on."""
        if self._tracker is None:
            raise RuntimeError("call initial_state first: trackers resume at the step of the state")
        return self._tracker

    @property
    def recorder(self) -> Recorder:
        """What the run has come to so far."""
        if self._recorder is None:
            raise RuntimeError("call initial_state first")
        return self._recorder

    @overload
    def add_hook(self, fn: HookFn, *, every: When = 1) -> HookFn: ...

    @overload
    def add_hook(self, fn: None = None, *, every: When = 1) -> Callable[[HookFn], HookFn]: ...

    def add_hook(self, fn: HookFn | None = None, *, every: When = 1) -> Any:
        """Calls `fn(info)` after every `every`-th step (or those listed) and the last one; also as a decorator.

        Hooks run in the order in which they were added; a checkpoint, where one is due, comes after all of them.
        """
        if fn is None:
            return lambda function: self.add_hook(function, every=every)
        self.hooks.add(fn, every)
        return fn

    def run_hooks(self, info: StepInfo, force: bool = False) -> None:
        """Calls the hooks that are due after a step, or with `force` all of them."""
        self.hooks.run(info, force=force)
        self._last_hooks.run(info, force=force)

    def add_eval_hook(self, eval_dataset: EvalData, name: str | None = None) -> None:
        """Evaluates on a held-out set every `steps_per_eval` steps: `eval/loss`, or `eval/NAME/loss`.

        Where the run averages its weights, the average is evaluated as well, as `eval/ema/loss`.
        """
        self.add_hook(lambda info: self._evaluate(info.state, eval_dataset, name), every=self.config.steps_per_eval)

    def initial_state(
        self,
        training_key: jax.Array | None = None,
        model: nnx.Module | None = None,
        model_init: Callable[[], nnx.Module] | ModelDef | None = None,
        *,
        is_trainable: Selection = True,
        data_fingerprint: Fingerprint | Callable[[int], Fingerprint] = "",
    ) -> TrainState:
        """The run's newest checkpoint, or what the configuration says to start from, or a fresh state.

        Args:
            training_key: for the random numbers of training, such as dropout; by default of `trainer.seed`.
            model: the model whose weights to start from, or
            model_init: a function that makes a fresh one, called under `jit`.
            is_trainable: which parameters are trained, by dotted name. The others have no gradient and no optimizer
                state, and are in no checkpoint.
            data_fingerprint: saved with each checkpoint, and compared on resume; a function of the steps that have
                been done, where what comes later may still change.

        Raises:
            UserError: when a checkpoint does not fit or cannot be used, or a sharding rule does not fit the model.
            ValueError: unless exactly one of `model` and `model_init` is given.
        """
        if (model is None) == (model_init is None):
            raise ValueError("give either model or model_init")
        definition = model_init if isinstance(model_init, ModelDef) else None
        if definition is None:
            build: Any = model_init if model is None else lambda: nnx.clone(model)
            definition = trace_module(build, self.mp.param_dtype, is_trainable)
        program = plan_program(self.config, self.optimizer, definition, self.loss_fn, key=training_key)
        self._program = program
        tokens = None if self.seq_len is None else TokenSchedule(self.config.batch_schedule, self.seq_len)
        self.schedule = self.optimizer.schedule(self.num_train_steps, tokens)
        self._fingerprint = data_fingerprint if callable(data_fingerprint) else lambda _: data_fingerprint
        init = program.init
        if model is not None:
            weights = definition.named(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
            init = lambda: program.from_weights(weights)  # noqa: E731
        other_data = self.allow_config_change
        state = start_state(self.config, program, self.store, init, self._fingerprint, allow_other_data=other_data)
        if state.step:
            self.progress.note(f"resumed at step {state.step} of {self.num_train_steps}")
        for note in caveats(self.config, program.sharding.mesh):
            self.progress.note(note)
        self._open_trackers(state)
        return state

    def _open_trackers(self, state: TrainState) -> None:
        opened = open_trackers(
            self.config.trackers,
            run_dir=self.run_dir,
            run_id=self.run_id,
            resume_step=state.step,
            process_index=jax.process_index(),
        )
        self._tracker = self._stack.enter_context(closing(opened))
        self._tracker.log_config(self._directory.config.model_dump(mode="json"))
        devices = self.device_mesh.devices
        peak = datasheet_peak(devices.flat[0].device_kind, self.mp.compute)
        self._meter = Meter(
            flops_per_token=self.flops_per_token,
            peak_flops=None if peak is None or not self.flops_per_token else peak.flops * devices.size,
        )
        axes = self.program.model.axes
        self._watcher = Watcher(self.config.watch, self.program.sharding, axes)
        parts = (self._tracker, self.progress, self._meter, self._watcher)
        self._recorder = self._stack.enter_context(closing(Recorder(self.config, *parts, evidence=self._evidence)))
        self._recorder.chain = self.store.record(state.step).get("chain", "")
        if self.config.profiler and is_lead():
            self._profile(state.step)
        self._stop.arm()

    def _profile(self, step: int) -> None:
        """Traces the steps that the configuration names."""
        profiler = Profiler(
            profile_directory(self.config.trackers, run_dir=self.run_dir, run_id=self.run_id),
            start_step=self.config.profiler_start_step,
            num_steps=self.config.profiler_num_steps,
            perfetto_link=self.config.profiler_perfetto_link,
            on_trace=lambda path: self.tracker.log_artifact("profile", path, type="profile"),
        )
        self._profiler = self._stack.enter_context(profiler)
        profiler.on_step(step)
        self._last_hooks.add(lambda info: profiler.on_step(info.step, info.metrics), 1)

    def data_loader(self, dataset: TrainData) -> Loader:
        """The batches of this run from a dataset that knows them by number."""
        local = self.program.step.devices.local_rows
        plans = {plan.batch_size: plan for plan in self.program.step.plans.values}

        def start(step: int) -> Iterator[Batch]:
            return dataset.train(
                self.config.batch_schedule,
                rows=lambda batch_size: local(plans[batch_size]),
                first_step=step,
                num_steps=self.num_train_steps - step,
            )

        return Loader(start)

    def train_step(self, state: TrainState, batch: Batch) -> StepInfo:
        """One step, without hooks; the arrays of `state` are consumed.

        Args:
            state: before the step.
            batch: this process's rows of the global batch, as NumPy arrays.
        """
        started = time.perf_counter()
        return self._step(state, batch, started)

    def _step(self, state: TrainState, batch: Batch, started: float) -> StepInfo:
        loading = time.perf_counter() - started
        step = self.program.step
        if not step.compiled(state.step):
            self._compile(state.step, batch)
        learning_rate = self.schedule(state.step)
        seq_len = batch.tokens.shape[1]
        tokens = step.plans.at(state.step).batch_size * seq_len
        observer = self._watcher if self._watcher.due(state.step + 1) else None
        self._evidence.keep(state.step + 1, batch)
        marked = nullcontext() if self._profiler is None else self._profiler.annotate(state.step + 1)
        with marked:
            state, metrics = step(state, step.put(batch, state.step), learning_rate, observer)
        total = self.config.batch_schedule.rows_before(state.step) * seq_len
        return StepInfo(state, metrics, learning_rate, tokens, total, loading)

    def training_steps(self, state: TrainState, train_loader: Loader | Iterable[Batch]) -> Iterator[StepInfo]:
        """Steps until `num_train_steps` or the end of the data, with hooks, each handed out after its hooks.

        Raises:
            Preempted: after a stop signal, with everything saved.
            NonFiniteError: when the loss is not finite and the configuration says to stop.
        """
        batches = train_loader.iter_from(state.step) if isinstance(train_loader, Loader) else iter(train_loader)
        feed, total = Feed(batches, self._patience), self.num_train_steps
        while state.step < total:
            started = time.perf_counter()
            self._watchdog.arm(f"the batch of step {state.step + 1}")
            batch = feed.next(state)
            if batch is None:
                self._watchdog.disarm()
                self.progress.note(f"the data ended after step {state.step} of {total}")
                return
            info = self._step(state, batch, started)
            state = info.state
            self._watchdog.arm(f"step {state.step}")
            self._stopping = any_process(bool(self._stop.requested))
            self.run_hooks(info, force=state.step == total)
            if self._stopping and state.step < total:
                self.store.wait()
                raise preempted(self._stop.requested, state.step)
            self._watchdog.disarm()
            yield info

    def train(self, state: TrainState, train_loader: Loader | Iterable[Batch]) -> TrainState:
        """Steps to the end, with hooks, and waits for the last checkpoint. Raises as `training_steps`.

        Returns:
            The last state.
        """
        for info in self.training_steps(state, train_loader):
            state = info.state
        self._watchdog.arm("the last step and its checkpoint")
        if self._recorder is not None:
            self._recorder.flush()
        self._keep(state)
        self._watchdog.disarm()
        return state

    def _keep(self, state: TrainState) -> None:
        """Saves a state unless that has been done."""
        self.store.wait()
        if state.step not in self.store.steps():
            self._save(state)
            self.store.wait()

    def write_artifact(self, name: str, artifact: Any, type: str = "artifact") -> Path:
        """Saves something beside the metrics, and hands it to the trackers.

        Args:
            name: the file's name in `RUN_DIR/artifacts`.
            artifact: text, bytes, the path of a file to copy, or anything that JSON can hold.
            type: what kind of thing it is, for trackers that sort by it.
        """
        file = self._directory.write_artifact(name, artifact)
        if is_lead():
            self.tracker.log_artifact(name, file, type=type)
        return file

    def _compile(self, step: int, batch: Batch) -> None:
        self._watchdog.disarm()
        self.progress.phase("compiling the training step")
        started = time.monotonic()
        executable = self.program.step.compile(batch, step)
        program = executable.fingerprint()
        self.progress.note(f"compiled in {time.monotonic() - started:.1f} s, program {program}")
        if self._compiled_before:
            return
        self._compiled_before = True
        if self.config.log_jaxprs:
            self.write_artifact("train_step.jaxpr.txt", executable.jaxpr(), type="program")
        if self.config.log_xla_hlo:
            self.write_artifact("train_step.hlo.txt", executable.hlo(), type="program")
        rows = self.program.step.plans.at(step).rows
        for note in self._directory.record_attempt(self.config, step=step, rows=rows, program=program):
            self.progress.note(note)
        for name, kind in (("config.yaml", "config"), ("env.json", "environment")):
            self.tracker.log_artifact(name, self.run_dir / name, type=kind)

    def _evaluate(self, state: TrainState, dataset: EvalData, name: str | None) -> None:
        self.recorder.flush()
        self._patience.wait(dataset, state)
        evaluate = self.program.evaluate
        self.progress.phase(f"evaluating{f' on {name}' if name else ''}")
        for weights, params in self.program.weights(state).items():
            batches = dataset.batches(
                evaluate.batch_size, rows=evaluate.local_rows, max_batches=self.config.max_eval_batches
            )
            watched = self._watchdog.each(batches, f"the evaluation after step {state.step}")
            self.recorder.evaluated(state.step, "/".join(filter(None, (weights, name))), evaluate(params, watched))

    def _save_when_due(self, info: StepInfo) -> None:
        last = info.step == self.num_train_steps or self._stopping
        if last or any_process(self.store.due(info.step)):
            self._save(info.state)

    def _save(self, state: TrainState) -> None:
        self.recorder.flush()
        self._watchdog.arm(f"the checkpoint of step {state.step}")
        facts = {
            "data_fingerprint": self._fingerprint(state.step),
            "train_loss": self.recorder.train_loss,
            "eval_losses": self.recorder.eval_losses,
            **self.recorder.prove(state),
        }
        save_state(self.store, state, self.program, {**self._facts, **facts})

    def record(self, **facts: Any) -> None:
        """Saves `facts` with every checkpoint from now on, as JSON."""
        self._facts |= facts
