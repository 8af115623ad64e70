"""Checkpoints of a run while it trains: their times, their content, and the state that one is read back to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lm_trainer.checkpoint.digest import not_finite
from lm_trainer.checkpoint.store import KEPT, CheckpointStore, Restored
from lm_trainer.core.errors import NonFiniteError, UserError
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.parallel.processes import any_process, gather_texts
from lm_trainer.run.adapters import FROZEN, check_frozen, frozen_digest
from lm_trainer.run.batches import BatchIterator
from lm_trainer.run.metrics import MetricLogger
from lm_trainer.run.program import Program
from lm_trainer.run.saved_model import AVERAGED, PARAMS
from lm_trainer.step.model_def import Params
from lm_trainer.step.state import TrainState, copied

Fingerprint = str | Mapping[str, str]
"""Fingerprint of data: a text, or the `tokens` and `sources` of `lm_trainer.data`; `tokens` may still be unknown."""

SERIES = "series"
"""Key of the lines that the files of metrics have, as `Composite.sync` tells them."""
EMPTY_STEPS = "empty_steps"
"""Key of the number of steps in whose batch no token had a loss."""
LOADER = "loader"
"""Key of the states of the loaders of batches, one for each process."""
OPT_STATE = "opt_state."
"""Prefix of the names of the optimizer's arrays in a checkpoint."""


class Checkpoints:
    """Saves the state of a run with everything that a resume and `lmt verify` need.

    Args:
        store: where they go.
        program: the run's.
        metrics: the losses so far.
        data_fingerprint: of the data of the first steps, as many as are given.
        facts: saved with every checkpoint, as JSON.
        watchdog: told that the run waits for a checkpoint.
    """

    def __init__(
        self,
        store: CheckpointStore,
        program: Program,
        metrics: MetricLogger,
        data_fingerprint: Callable[[int], Fingerprint],
        facts: Mapping[str, Any],
        watchdog: Watchdog,
    ):
        self._store, self._program, self._metrics = store, program, metrics
        self._data_fingerprint, self._facts, self._watchdog = data_fingerprint, facts, watchdog
        self._compiled = False
        self._loader_state: Callable[[], Any] = lambda: None

    def resume_loader(self, loader: BatchIterator, step: int) -> None:
        """Has a loader go on after `step` steps, and saves its state with every checkpoint from now on.

        Raises:
            UserError: when the loader cannot go on there, as when other processes had parts of it.
        """
        loader.restore_state(self._saved_loader_state(step))
        self._loader_state = loader.saved_state

    def _saved_loader_state(self, step: int) -> Any:
        """The state of this process's loader in the checkpoint of a step; None where it has none."""
        saved = self._store.record(step).get(LOADER) if step else None
        if saved is None:
            return None
        here = jax.process_count()
        # A state that is alike in all processes belongs to the step, and not to a process.
        if len(saved) != here and any(state != saved[0] for state in saved):
            raise UserError(
                f"the loader of batches was saved by {len(saved)} processes, each with a part of the data, and cannot "
                f"go on in {here}: start as many"
            )
        return saved[jax.process_index()] if len(saved) == here else saved[0]

    def due(self, step: int) -> bool:
        """True if a checkpoint is due after `step` steps, by the clock of any process: all save the same steps."""
        return any_process(self._store.due(step))

    def save(self, state: TrainState, *, keep: bool = False) -> None:
        """Starts an asynchronous save, of a permanent checkpoint with `keep`; raises as `save_state`, and for metrics
        that are not finite.
        """
        # A state whose loss was not finite must not be saved, so its metrics are read first.
        self._metrics.flush()
        self._watchdog.arm(f"the checkpoint of step {state.step}")
        record = {
            "data_fingerprint": self._data_fingerprint(state.step),
            "train_loss": self._metrics.train_loss,
            "eval_losses": self._metrics.eval_losses,
            EMPTY_STEPS: self._metrics.empty_steps,
            **self._metrics.prove(state),
            # After the fingerprint, which is a line too; the checkpoint must not be there before the lines are.
            SERIES: self._metrics.sync(),
            **({KEPT: True} if keep else {}),
            **self._loaders(),
        }
        save_state(self._store, state, self._program, {**self._facts, **record})
        if not self._compiled:
            self._compiled = True
            # The programs of the checks and hashes were compiled in that time, which is no step's.
            self._metrics.pause()

    def _loaders(self) -> dict[str, Any]:
        states = [json.loads(text) for text in gather_texts(json.dumps(self._loader_state()))]
        return {} if all(state is None for state in states) else {LOADER: states}

    def poll(self) -> None:
        """Raises `MachineError` if the save under way has failed, or another process has taken the run over."""
        self._store.poll()

    def hurry(self) -> None:
        """Has what is still to be saved done within the grace period of a stop signal, where that is limited."""
        self._store.hurry()

    def keep(self, state: TrainState) -> None:
        """Saves a state unless that has been done, and waits until it is on disk."""
        # The save under way may be that of this very state.
        self.wait()
        if state.step not in self._store.steps():
            self.save(state)
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is on disk; raises `MachineError` when it failed."""
        self._store.wait()


def save_state(store: CheckpointStore, state: TrainState, program: Program, record: Mapping[str, Any]) -> None:
    """Starts an asynchronous checkpoint of everything that a resume needs, and of the weights to export.

    Raises:
        NonFiniteError: when a parameter holds a number that is not finite, from which no step could go on.
        MachineError: when this or the previous save failed.
    """
    if bad := not_finite(state.params):
        raise NonFiniteError(
            f"after step {state.step} {', '.join(bad[:3])}{' and others' if len(bad) > 3 else ''} "
            f"{'are' if len(bad) > 1 else 'is'} not finite, so no checkpoint was written of it (there are: "
            f"{', '.join(map(str, store.steps())) or 'none'}). Lower optimizer.learning_rate"
        )
    arrays = saved_arrays(state, program)
    # Other frozen parameters are not saved: by their digest a resume knows that it has the same ones.
    if program.freezes:
        record = {**record, FROZEN: frozen_digest(state.frozen)}
    store.save(state.step, arrays, record)


def saved_arrays(state: TrainState, program: Program) -> dict[str, Any]:
    """The arrays that a checkpoint holds of a state, under the names that they have there."""
    *_, export = program.weights(state).values()
    params = {**state.params, **{name: state.frozen[name] for name in program.model.constants}}
    averaged = {name: export[name] for name in params} if _exports_others(program) else None
    return _named(params, state.opt_state, averaged)


def expected_arrays(program: Program) -> dict[str, Any]:
    """Shape, dtype and sharding of every array that a checkpoint of this run holds, by the name that it has there."""
    params, opt_state = _abstract(program)
    storage, shapes = program.sharding.storage, program.model.shapes
    params |= {
        name: jax.ShapeDtypeStruct(shapes[name].shape, shapes[name].dtype, sharding=storage[name])
        for name in program.model.constants
    }
    return _named(params, opt_state, params if _exports_others(program) else None)


def resumed_state(restored: Restored, program: Program, init: Callable[[], TrainState]) -> TrainState:
    """The state of a checkpoint; what it lacks, and what is frozen, is taken from a fresh one.

    Raises:
        UserError: when the frozen parameters are others than those that it was trained beside.
    """
    arrays = restored.arrays
    model = program.model
    frozen: Any = {name: arrays[PARAMS + name] for name in model.constants if PARAMS + name in arrays}
    elsewhere = bool(model.shapes.keys() - model.trainable - model.constants)
    # A fresh state takes as much memory as this one, so it is made only where something of it is needed.
    if elsewhere or set(expected_arrays(program)) - set(arrays):
        fresh = init()
        frozen = {**fresh.frozen, **frozen}
        if elsewhere:
            check_frozen(restored, frozen)
        arrays = {**_named(fresh.params, fresh.opt_state, None), **arrays}
    params, opt_state = _abstract(program)
    named = {name: arrays[OPT_STATE + name] for name in named_leaves(opt_state)}
    trained = {name: arrays[PARAMS + name] for name in params}
    averaged = _averages(arrays, trained) if program.averages else None
    return TrainState(restored.step, trained, from_named_leaves(opt_state, named), averaged, frozen)


def _exports_others(program: Program) -> bool:
    """True if the weights to export are others than those that are trained."""
    return program.averages or program.averages_by_itself


def _named(params: Any, opt_state: Any, averaged: Any) -> dict[str, Any]:
    return {
        **{PARAMS + name: x for name, x in params.items()},
        **{AVERAGED + name: x for name, x in (averaged or {}).items()},
        **{OPT_STATE + name: x for name, x in named_leaves(opt_state).items()},
    }


def _abstract(program: Program) -> tuple[dict[str, Any], Any]:
    """The trained parameters and the optimizer's state as shapes, dtypes and shardings."""

    def place(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shardings = program.sharding.trained
    params = {name: place(program.model.shapes[name], sharding) for name, sharding in shardings.params.items()}
    opt_state = jax.tree.map(place, jax.eval_shape(program.tx.init, params), shardings.opt_state)
    return params, opt_state


def _averages(arrays: dict[str, Any], trained: Params) -> Params:
    """The averages of a checkpoint; those that it lacks begin at the weights."""
    lacking = {name: x for name, x in trained.items() if AVERAGED + name not in arrays}
    # Copies: the step consumes parameters and averages, and one array cannot be given away twice.
    begun = copied(lacking) if lacking else {}
    return {name: begun[name] if name in begun else arrays[AVERAGED + name] for name in trained}
