"""Held-out loss, the same on every mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.processes import gather
from lm_trainer.step.gradient import LossFn, Sums
from lm_trainer.step.groups import DeviceGroups
from lm_trainer.step.microbatch_plan import MicrobatchPlan
from lm_trainer.step.model_def import ModelDef, Params
from lm_trainer.step.per_group import PerGroupExecutable


class Evaluator:
    """Computes mean losses over batches, with microbatches like those of training but no gradients and no dropout.

    Args:
        model: the model.
        loss: called without a key.
        devices: where.
        plan: the batches of evaluation.
    """

    def __init__(self, model: ModelDef, loss: LossFn, devices: DeviceGroups, plan: MicrobatchPlan):
        def sums(params: Params, batch: Batch, key: jax.Array) -> Sums:
            del key
            total, weight, metrics = loss(model.merge(params), batch, None)
            return Sums({"loss": total, "weight": weight, **metrics}, {})

        cut = devices.cut(sums, ())

        def of_microbatch(params: Params, batch: Batch, step: jax.Array, index: jax.Array) -> dict[str, jax.Array]:
            del step, index
            # The key is not used: nothing is dropped in evaluation.
            return cut(params, batch, jax.random.key(0))[0]

        self._executable = PerGroupExecutable(of_microbatch, devices.groups)
        self._devices, self._plan, self._shapes = devices, plan, model.shapes

    @property
    def batch_size(self) -> int:
        """Rows in a global batch of evaluation; it does not depend on the devices."""
        return self._plan.batch_size

    @property
    def local_rows(self) -> range:
        """The rows of a global batch that this process needs."""
        return self._devices.local_rows(self._plan)

    def __call__(self, params: Params, batches: Iterable[Batch]) -> dict[str, float]:
        """The weighted means over all tokens of all batches; NaN when nothing has a weight.

        Args:
            params: all parameters.
            batches: this process's rows of each global batch.

        Returns:
            `loss` in nats, and what else the loss function reports.
        """
        on_groups = self._devices.params_on_groups(params)
        parts: dict[str, list[jax.Array]] = {}
        for batch in batches:
            self._compile(batch)
            placed = self._devices.put(batch, self._plan)
            for i, microbatches in enumerate(placed.microbatches):
                for rows, index in zip(microbatches, placed.indices[i], strict=True):
                    # The program has a place for a step, and asks nothing of it.
                    for name, x in self._executable(i, on_groups[i], rows, index, index).items():
                        parts.setdefault(name, []).append(x)
        # math.fsum is exact, so the order, which depends on the mesh, does not matter.
        sums = {name: math.fsum(gather(np.asarray(values)).ravel().tolist()) for name, values in sorted(parts.items())}
        weight = sums.pop("weight", 0.0)
        return {name: total / weight if weight else math.nan for name, total in sums.items()} or {"loss": math.nan}

    def _compile(self, batch: Batch) -> None:
        if not self._executable.compiled:
            rows = Batch(*(np.empty((self._plan.rows, *x.shape[1:]), x.dtype) for x in batch))
            self._executable.compile(self._shapes, self._devices.sharding.params, rows)
