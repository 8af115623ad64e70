"""`Trainer`, the Python API for custom models, losses or loops. It uses the training loop of `lmt train`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, overload

import jax
from flax import nnx
from jax.sharding import Mesh
from pydantic import SerializeAsAny

from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.core.batch import Batch
from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.config import Config
from lm_trainer.core.html_table import html_table
from lm_trainer.core.precision import Policy
from lm_trainer.optim import Optimizer
from lm_trainer.parallel.flags import HostFlags
from lm_trainer.parallel.mesh import AxisRules
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.gather_memory import plan_for_memory
from lm_trainer.run.build.model import Selection, trace_module
from lm_trainer.run.build.setup import TrainingSetup, plan_training
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.start.attempt import Attempt, open_attempt
from lm_trainer.run.summary import loss_curve
from lm_trainer.run.trainer_arguments import (
    check_batch,
    check_dataset,
    check_eval_set,
    check_hook,
    check_loader,
    check_model,
    check_state,
    check_trainer,
)
from lm_trainer.run.training.batches import BatchLoader, EvalData, GrainLoader, TrainData, batches_from
from lm_trainer.run.training.evaluations import EvalSets
from lm_trainer.run.training.hooks import HookFn, Hooks, StepInfo, When
from lm_trainer.run.training.loop import run_due_actions, take_step, train_to_end, training_steps
from lm_trainer.run.training.loop_parts import LoopOptions, OpenLoop, open_loop
from lm_trainer.run.weights.saved_state import Fingerprint
from lm_trainer.step.loss.gradient import LossFn
from lm_trainer.step.state.model_def import ModelDef
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.trackers import Progress
from lm_trainer.trackers.base import Composite


class _Settings(Config):
    """The settings that are recorded for a run without a configuration file."""

    trainer: TrainerConfig
    optimizer: SerializeAsAny[Optimizer]


class Trainer:
    """Context manager for one attempt at a run, with its directory, checkpoints, trackers and hooks.

    Args:
        config: the `trainer` section. Its `id` names the run, and using the same ID resumes the run.
        optimizer: an optimizer from `lm_trainer.optim`. `from_optax` creates one from an optax transformation.
        loss_fn: function `loss(model, batch, key)` that returns three float32 scalars or dicts of them: the sum of the
            weighted losses, the sum of the weights, and sums of further values to report.
        settings: settings to record as the configuration of the run; None means the trainer section and the optimizer.
        progress: progress display in the terminal.
        add_default_hooks: True to record metrics and save checkpoints.

    Attributes:
        allow_config_change: continue a run that was started with another configuration or other data. Set it before
            entering the trainer.
        flops_per_token: number of FLOPs per token of a training step, for computing MFU; 0 if unknown.
        seq_len: number of positions in a row, for schedules that count tokens.

    Raises:
        UserError: if the optimizer is not from `lm_trainer.optim`, the run directory is in use or belongs to another
            run, or the configuration does not fit the devices.
    """

    def __init__(
        self,
        config: TrainerConfig,
        optimizer: Optimizer,
        loss_fn: LossFn,
        *,
        settings: Config | None = None,
        progress: Progress | None = None,
        add_default_hooks: bool = True,
    ):
        check_trainer(config, optimizer, loss_fn)
        self.config, self.optimizer, self.loss_fn = config, optimizer, loss_fn
        self.progress = progress or Progress(config.num_train_steps)
        self.hooks = Hooks()
        self._eval_sets: EvalSets = []
        self.flops_per_token = 0.0
        self.seq_len: int | None = None
        self.allow_config_change = False
        self._settings = settings or _Settings(trainer=config, optimizer=optimizer)
        self._records = add_default_hooks
        self._stack = ExitStack()
        self._attempt: Attempt | None = None
        self._loop: OpenLoop | None = None
        self._flags = HostFlags()

    def __enter__(self) -> Self:
        attempt = open_attempt(self.config, self._settings, self.progress, allow_config_change=self.allow_config_change)
        self._attempt = self._stack.enter_context(attempt)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def _repr_html_(self) -> str:
        """Returns the settings of the run, and once it has begun its directory and its curve, for a notebook."""
        rows = [
            ("optimizer", type(self.optimizer).__name__.removesuffix("Config")),
            ("steps", f"{self.num_train_steps:,} of {self.config.batch_schedule.at(0):,} rows"),
            ("precision", f"parameters {self.mp.param}, computation {self.mp.compute}"),
        ]
        if self._attempt is None:
            return html_table(rows)
        if self._loop is not None:
            count = sum(x.size for x in self.setup.model.shapes.values())
            rows += [("parameters", f"{count:,}"), ("devices", f"{self.device_mesh.size:,}")]
        return html_table([("run", self.run_dir), *rows]) + loss_curve(self.run_dir)

    @property
    def attempt(self) -> Attempt:
        """Run directory, checkpoints and signal handlers. Available after entering the trainer."""
        if self._attempt is None:
            raise RuntimeError("enter the trainer first: `with Trainer(...) as trainer:`")
        return self._attempt

    @property
    def loop(self) -> OpenLoop:
        """The parts of the training loop. Available after `initial_state`."""
        if self._loop is None:
            raise RuntimeError("call initial_state first: what runs depends on the model")
        return self._loop

    @property
    def run_id(self) -> str:
        return self.attempt.directory.name

    @property
    def run_dir(self) -> Path:
        """Run directory, with configuration, environment, metrics and artifacts."""
        return self.attempt.directory.path

    @property
    def checkpoint_path(self) -> StoragePath:
        return self.attempt.directory.checkpoints

    @property
    def store(self) -> CheckpointStore:
        return self.attempt.store

    @property
    def mp(self) -> Policy:
        """Precision of parameters, computation and output."""
        return self.config.mp

    @property
    def num_train_steps(self) -> int:
        return self.config.num_train_steps

    @property
    def setup(self) -> TrainingSetup:
        """Model, optimizer, shardings and compiled functions of the run. Available after `initial_state`."""
        return self.loop.parts.setup

    @property
    def device_mesh(self) -> Mesh:
        return self.setup.sharding.mesh

    @property
    def parameter_axis_mapping(self) -> AxisRules:
        """Mesh axes that shard each logical axis of the stored state."""
        return self.setup.plan.param_rules

    @property
    def compute_axis_mapping(self) -> AxisRules:
        """Mesh axes that shard each logical axis during computation."""
        return self.setup.plan.compute_rules

    @property
    def tracker(self) -> Composite:
        """All trackers combined. Available after `initial_state`."""
        return self.loop.tracker

    @overload
    def add_hook(self, fn: HookFn, *, every: When = 1) -> HookFn: ...

    @overload
    def add_hook(self, fn: None = None, *, every: When = 1) -> Callable[[HookFn], HookFn]: ...

    def add_hook(self, fn: HookFn | None = None, *, every: When = 1) -> Any:
        """Calls `fn(info)` after every `every`-th step, or after the listed steps, and after the last step.

        Can also be used as a decorator. Hooks run in the order in which they were added, after an evaluation and before
        a checkpoint of the same step.
        """
        if fn is None:
            return lambda function: self.add_hook(function, every=every)
        check_hook(fn)
        self.hooks.add(fn, every)
        return fn

    def run_hooks(self, info: StepInfo, force: bool = False) -> None:
        """Runs all actions that are due after a step, or all actions if `force` is True; see `loop.run_due_actions`."""
        parts = self.loop.parts
        flags = self._flags.combine({"overdue": parts.records and parts.checkpoints.is_overdue()})
        run_due_actions(parts, info, last=force, save=flags["overdue"])

    def add_eval_hook(self, eval_dataset: EvalData, name: str | None = None) -> None:
        """Evaluates on a held-out set every `steps_per_eval` steps, and logs `eval/loss` or `eval/NAME/loss`.

        If the run averages its weights, the average is also evaluated, and logged as `eval/ema/loss`.

        Args:
            eval_dataset: one held-out set, such as a value in `lm_trainer.data.open_data(...).validation()`.
            name: name of the set, if there are several.

        Raises:
            UserError: if the argument is not a held-out set, or the name is already used.
        """
        check_eval_set(eval_dataset, name, (existing for existing, _ in self._eval_sets))
        self._eval_sets.append((name, eval_dataset))

    def initial_state(
        self,
        training_key: jax.Array | None = None,
        model: nnx.Module | None = None,
        model_init: Callable[[], nnx.Module] | ModelDef | None = None,
        *,
        is_trainable: Selection = True,
        data_fingerprint: Fingerprint | Callable[[int], Fingerprint] = "",
    ) -> TrainState:
        """Returns the state in the run's newest checkpoint, in the configured checkpoint, or otherwise a new state.

        Args:
            training_key: key for random numbers in training, such as dropout; None derives it from `trainer.seed`.
            model: a model with the initial weights, as an alternative to `model_init`.
            model_init: a function that builds the model and is called under `jit`, or a `ModelDef`.
            is_trainable: selection of the trained parameters by dotted name. All other parameters have no gradient and
                no optimizer state, and are not saved in checkpoints.
            data_fingerprint: fingerprint that is saved with each checkpoint and compared when the run resumes. If later
                data may still change, a function that takes the number of completed steps and returns the fingerprint.

        Raises:
            UserError: if a checkpoint does not match the model or cannot be used, or a sharding rule does not fit the
                model.
            ValueError: unless exactly one of `model` and `model_init` is given.
        """
        if (model is None) == (model_init is None):
            raise ValueError("give either model or model_init")
        check_model(model, model_init)
        definition = model_init if isinstance(model_init, ModelDef) else None
        if definition is None:
            # The module is cloned, because tracing must not modify the user's module.
            build: Any = model_init if model is None else lambda: nnx.clone(model)
            definition = trace_module(build, self.mp.param_dtype, is_trainable)

        def plan(trainer: TrainerConfig) -> TrainingSetup:
            return plan_training(
                trainer, self.optimizer, definition, self.loss_fn, key=training_key, seq_len=self.seq_len
            )

        row = None if self.seq_len is None else random_batch(1, self.seq_len, 2)
        setup = plan_for_memory(plan, self.attempt.config, row, self.attempt.progress.note)
        # A traced definition contains only shapes, so the weights are taken from the given model.
        init = setup.init
        if model is not None:
            weights = definition.flatten(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
            init = lambda: setup.from_weights(weights)  # noqa: E731
        fingerprint = data_fingerprint if callable(data_fingerprint) else lambda _: data_fingerprint
        state = self.attempt.load_state(setup, init, fingerprint)
        options = LoopOptions(
            fingerprint,
            flops_per_token=self.flops_per_token,
            hooks=self.hooks,
            eval_sets=self._eval_sets,
            records=self._records,
        )
        self._loop = self._stack.enter_context(open_loop(self.attempt, setup, state, options))
        return state

    @overload
    def data_loader(self, dataset: TrainData) -> BatchLoader: ...

    @overload
    def data_loader(self, dataset: Iterable[Any]) -> GrainLoader: ...

    def data_loader(self, dataset: TrainData | Iterable[Any]) -> BatchLoader | GrainLoader:
        """Returns a loader of the batches of this run, from a dataset with random access by step or a Grain pipeline.

        A pipeline starts at its beginning. Its state is saved with every checkpoint, and restored when the run resumes.

        Args:
            dataset: a dataset with a method `train`, such as the result of `lm_trainer.data.open_data`, or a Grain
                pipeline (see `GrainLoader`).
        """
        check_dataset(dataset)
        if not hasattr(dataset, "train"):
            return GrainLoader(dataset)  # pyright: ignore[reportArgumentType]
        train_data: Any = dataset
        return BatchLoader(lambda step: batches_from(self.setup, train_data, step, self.num_train_steps))

    def train_step(self, state: TrainState, batch: Batch) -> StepInfo:
        """Runs one step without hooks.

        Args:
            state: state before the step. Its arrays are donated.
            batch: rows of this process in the global batch, as NumPy arrays.
        """
        check_state(state)
        check_batch(batch)
        return take_step(self.loop.parts, state, batch, loading=0.0)

    def training_steps(self, state: TrainState, train_loader: BatchLoader | Iterable[Batch]) -> Iterator[StepInfo]:
        """Trains until `num_train_steps` or the end of the data, and yields each step after running its hooks.

        Raises:
            Preempted: after a stop signal, once everything is saved.
            NonFiniteError: if the loss is not finite, and the configuration requires the run to stop in this case.
        """
        check_loader(state, train_loader)
        return training_steps(self.loop.parts, state, _batches_from(train_loader, state))

    def train(self, state: TrainState, train_loader: BatchLoader | Iterable[Batch]) -> TrainState:
        """Trains to the end with hooks, and waits for the last checkpoint. Raises the same errors as `training_steps`.

        Returns:
            The state after the last step.
        """
        check_loader(state, train_loader)
        return train_to_end(self.loop.parts, state, _batches_from(train_loader, state))

    def write_artifact(self, name: str, artifact: Any, type: str = "artifact") -> Path:
        """Saves an artifact in the run directory and passes it to the trackers.

        Args:
            name: file name in `RUN_DIR/artifacts`.
            artifact: text, bytes, the path of a file to copy, or any JSON-serialisable value.
            type: artifact type, by which some trackers sort artifacts.
        """
        return self.loop.artifacts.write(name, artifact, type=type)


def _batches_from(loader: BatchLoader | Iterable[Batch], state: TrainState) -> Iterable[Batch]:
    return loader.iter_from(state.step) if isinstance(loader, BatchLoader) else loader
