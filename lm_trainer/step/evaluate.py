"""Held-out loss, the same on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.nn.stages import StagedLoss
from lm_trainer.parallel.processes import gather
from lm_trainer.step.dispatch.device_groups import DeviceGroups, PlacedBatch
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.microbatches import Microbatch, microbatch_groups
from lm_trainer.step.dispatch.per_group import PerGroupExecutable
from lm_trainer.step.loss.gradient import LossFn
from lm_trainer.step.staged.split_loss import SplitLoss
from lm_trainer.step.staged.staged_sum import StagesOf
from lm_trainer.step.staged.stages import Ready, StagedForward, Stages
from lm_trainer.step.staged.whole_model import whole_losses
from lm_trainer.step.state.model_def import ModelDef, Params


class Evaluator:
    """Computes mean losses over batches, with microbatches like those of training but no gradients and no dropout.

    Args:
        model: the model.
        loss: called without a key.
        devices: where.
        plan: the batches of evaluation.
        staged: the loss in stages, to compute it stage by stage instead of as a whole.
    """

    def __init__(
        self,
        model: ModelDef,
        loss: LossFn,
        devices: DeviceGroups,
        plan: MicrobatchPlan,
        *,
        staged: StagedLoss | None = None,
    ):
        self._devices, self._plan = devices, plan
        stages_of = whole_losses(model, loss, devices) if staged is None else SplitLoss(model, staged, None).stages
        self._sums = _Sums(stages_of, model, devices)

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
        ready: Ready | None = None
        parts: dict[str, list[jax.Array | float]] = {}
        shares = self._devices.shares(self._plan)
        most = len(self._devices.groups) * shares.most * (self._plan.count // shares.count)
        for batch in batches:
            self._compile(batch)
            ready = ready or self._sums.ready(params)
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
        ready: Ready | None = None
        waiting: tuple[int, list[tuple[jax.Array, dict[str, jax.Array]]]] | None = None
        for batch in batches:
            self._compile(batch)
            ready = ready or self._sums.ready(params)
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


def _in_order(rows: int, found: list[tuple[jax.Array, dict[str, jax.Array]]]) -> dict[str, np.ndarray]:
    ordered = [sums for _, sums in sorted(found, key=lambda each: int(each[0]))]
    names = [name for name, x in ordered[0].items() if x.ndim]
    return {name: np.concatenate([np.asarray(sums[name]) for sums in ordered])[:rows] for name in names}


class _Sums:
    """The sums of each microbatch."""

    def __init__(self, stages_of: StagesOf, model: ModelDef, devices: DeviceGroups):
        self._stages_of, self._shapes, self._devices = stages_of, model.shapes, devices
        self._programs: tuple[StagedForward, PerGroupExecutable] | None = None

    @property
    def compiled(self) -> bool:
        return self._programs is not None

    def compile(self, batch: Batch) -> None:
        """Compiles for the shapes of a microbatch."""
        stages = Stages(self._stages_of(batch), self._shapes, (), self._devices)
        self._programs = StagedForward.compile(stages, batch), stages.compile_losses(batch)

    def ready(self, params: Params) -> Ready:
        """The parameters as `__call__` takes them, once it is compiled."""
        assert self._programs is not None
        return self._programs[0].stages.ready(params)

    def __call__(self, ready: Ready, batch: PlacedBatch) -> Iterator[tuple[jax.Array, dict[str, jax.Array]]]:
        """The number of each microbatch, and what the loss function reports of it."""
        assert self._programs is not None
        (forward, losses), stages = self._programs, self._programs[0].stages
        for group in microbatch_groups(batch, self._devices, 0):
            streams, at = forward(ready, group), stages.order[-1]
            gathered = stages.gather(ready, at)

            def one(microbatch: Microbatch, stream: Any, params: Any = gathered, at: Any = at) -> Any:
                i, rows, step, index = microbatch
                return index, losses(i, params[i], stream, rows, at.numbers[i], step, index)

            yield from group.microbatches.map(one, streams)
