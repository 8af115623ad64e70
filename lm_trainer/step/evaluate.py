"""Held-out loss, the same on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.nn.loss_parts import LossParts
from lm_trainer.parallel.processes import gather
from lm_trainer.step.gradient import LossFn, Sums, loss_of_params
from lm_trainer.step.groups import DeviceGroups, PlacedBatch
from lm_trainer.step.layerwise_model import LayerwiseForward, Parts, turns
from lm_trainer.step.microbatch_plan import MicrobatchPlan
from lm_trainer.step.model_def import ModelDef, Params
from lm_trainer.step.part_functions import SCALAR, PartFunctions
from lm_trainer.step.per_group import PerGroupExecutable


class Evaluator:
    """Computes mean losses over batches, with microbatches like those of training but no gradients and no dropout.

    Args:
        model: the model.
        loss: called without a key.
        devices: where.
        plan: the batches of evaluation.
        parts: the loss in parts, to compute it layer by layer instead of as a whole.
    """

    def __init__(
        self,
        model: ModelDef,
        loss: LossFn,
        devices: DeviceGroups,
        plan: MicrobatchPlan,
        *,
        parts: LossParts | None = None,
    ):
        self._devices, self._plan = devices, plan
        self._sums: _Sums = _WholeModel(model, loss, devices) if parts is None else _Layerwise(model, parts, devices)

    @property
    def batch_size(self) -> int:
        """Rows in a global batch of evaluation; it does not depend on the devices."""
        return self._plan.batch_size

    @property
    def local_rows(self) -> Sequence[int]:
        """The rows of a global batch that this process needs."""
        return self._devices.local_rows(self._plan)

    def __call__(self, params: Params, batches: Iterable[Batch]) -> dict[str, float]:
        """The weighted means over all tokens of all batches; arguments as for `sums`, results as of `means`."""
        return means(self.sums(params, batches))

    def sums(
        self, params: Params, batches: Iterable[Batch], counts: Callable[[Batch], dict[str, float]] = lambda _: {}
    ) -> dict[str, float]:
        """The weighted sums over all tokens of all batches; empty without any batch.

        Args:
            params: all parameters.
            batches: this process's rows of each global batch.
            counts: what the host counts in its rows of a batch, to be among the sums.

        Returns:
            `loss` in nats, `weight`, and what else the loss function reports.
        """
        ready = self._sums.ready(params)
        parts: dict[str, list[jax.Array | float]] = {}
        shares = self._devices.shares(self._plan)
        most = len(self._devices.groups) * shares.most * (self._plan.count // shares.count)
        for batch in batches:
            self._compile(batch)
            for name, count in counts(batch).items():
                parts.setdefault(name, []).append(count)
            found = [sums for _, sums in self._sums(ready, self._devices.put(batch, self._plan))]
            for name in found[0]:
                # Processes may have unequal numbers of microbatches, but exchange arrays of one length.
                parts.setdefault(name, []).extend([sums[name] for sums in found] + [0.0] * (most - len(found)))
        # A group of several processes counts in one of them; it is the only group of each.
        counted = np.float32(self._devices.groups[0].is_lead)
        found = {name: counted * np.asarray(values, np.float64) for name, values in sorted(parts.items())}
        # math.fsum is exact, so the order, which depends on the mesh, does not matter.
        return {name: math.fsum(gather(values).ravel().tolist()) for name, values in found.items()}

    def rows(self, params: Params, batches: Iterable[Batch]) -> Iterator[dict[str, np.ndarray]]:
        """Arrays that the loss function reports instead of sums, put together for the rows of each batch.

        Args:
            params: all parameters.
            batches: this process's rows of each global batch.

        Yields:
            Name -> [rows, ...], the rows of the batch of this process.
        """
        ready = self._sums.ready(params)
        waiting: tuple[int, list[tuple[jax.Array, dict[str, jax.Array]]]] | None = None
        for batch in batches:
            self._compile(batch)
            placed = self._devices.put(batch, self._plan)
            # The devices compute the next batch while the host takes this one.
            waiting, done = (len(batch.tokens), list(self._sums(ready, placed))), waiting
            if done is not None:
                yield _in_order(*done)
        if waiting is not None:
            yield _in_order(*waiting)

    def _compile(self, batch: Batch) -> None:
        if not self._sums.compiled:
            self._sums.compile(self._plan.rows_like(batch))


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """The means from the sums of `Evaluator.sums`: `loss` in nats, and what else there is; NaN without any weight."""
    weight = sums.get("weight", 0.0)
    found = {name: total / weight if weight else math.nan for name, total in sums.items() if name != "weight"}
    return found or {"loss": math.nan}


class _Sums(Protocol):
    """The way to the sums of each microbatch."""

    @property
    def compiled(self) -> bool: ...

    def compile(self, batch: Batch) -> None:
        """Compiles for the shapes of a microbatch."""

    def ready(self, params: Params) -> Any:
        """The parameters as `__call__` takes them."""

    def __call__(self, ready: Any, batch: PlacedBatch) -> Iterator[tuple[jax.Array, dict[str, jax.Array]]]:
        """The number of each microbatch, and what the loss function reports of it."""
        ...


def _in_order(rows: int, found: list[tuple[jax.Array, dict[str, jax.Array]]]) -> dict[str, np.ndarray]:
    ordered = [sums for _, sums in sorted(found, key=lambda each: int(each[0]))]
    names = [name for name, x in ordered[0].items() if x.ndim]
    return {name: np.concatenate([np.asarray(sums[name]) for sums in ordered])[:rows] for name in names}


class _WholeModel:
    """The sums of each microbatch by one program."""

    def __init__(self, model: ModelDef, loss: LossFn, devices: DeviceGroups):
        losses = loss_of_params(model, loss)

        def sums(params: Params, batch: Batch, key: jax.Array) -> Sums:
            del key
            total, weight, metrics = losses(params, batch, None)
            return Sums({"loss": total, "weight": weight, **metrics}, {})

        cut = devices.cut(sums, ())

        def of_microbatch(params: Params, batch: Batch, step: jax.Array, index: jax.Array) -> dict[str, jax.Array]:
            del step, index
            # The key is not used: nothing is dropped in evaluation.
            return cut(params, batch, jax.random.key(0))[0]

        self._executable = PerGroupExecutable(of_microbatch, devices.groups)
        self._devices, self._shapes = devices, model.shapes

    @property
    def compiled(self) -> bool:
        return self._executable.compiled

    def compile(self, batch: Batch) -> None:
        self._executable.compile(self._shapes, self._devices.sharding.params, batch)

    def ready(self, params: Params) -> list[Params]:
        return self._devices.params_on_groups(params)

    def __call__(self, ready: list[Params], batch: PlacedBatch) -> Iterator[tuple[jax.Array, dict[str, jax.Array]]]:
        for i, microbatches in enumerate(batch.microbatches):
            for rows, index in zip(microbatches, batch.indices[i], strict=True):
                # The program has a place for a step, and asks nothing of it.
                yield index, self._executable(i, ready[i], rows, index, index)


class _Layerwise:
    """The sums of each microbatch by one program for each part of the model."""

    def __init__(self, model: ModelDef, loss: LossParts, devices: DeviceGroups):
        self._functions, self._devices = PartFunctions(model, loss, None), devices
        self._programs: tuple[LayerwiseForward, PerGroupExecutable] | None = None

    @property
    def compiled(self) -> bool:
        return self._programs is not None

    def compile(self, batch: Batch) -> None:
        parts = Parts(self._functions, self._functions.model.shapes, self._devices, batch)
        others = (parts.stream(batch), batch, SCALAR, SCALAR)
        # With what is logged, which the shapes of a microbatch say.
        functions = parts.functions
        assert isinstance(functions, PartFunctions)
        leave = parts.compile(functions.leave, parts.leave, others, "scalars")
        self._programs = LayerwiseForward(parts, batch), leave

    def ready(self, params: Params) -> Params:
        return params

    def __call__(self, ready: Params, batch: PlacedBatch) -> Iterator[tuple[jax.Array, dict[str, jax.Array]]]:
        assert self._programs is not None, "compiled before"
        forward, leave = self._programs
        for turn in turns(batch, self._devices, 0):
            streams = forward(ready, turn)
            gathered = forward.parts.leave.gather(ready, forward.parts.row(0))
            sums = turn.each(
                lambda i, j, rows, step, index, p=gathered, x=streams: (
                    index,
                    leave(i, p[i], x[i][j], rows, step, index),
                )
            )
            yield from (each for group in sums for each in group)
