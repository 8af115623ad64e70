"""Held-out loss, the same on every mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.lanes import Lanes
from lm_trainer.train_state import ModelDef, Params
from lm_trainer.train_step import LossFn, TrainStep


class Evaluator:
    """Computes mean losses over batches, with the microbatches of `step` but no gradients and no dropout.

    Args:
        model: the model.
        loss: the training loss; called without a key.
        step: the training step, whose devices and layouts are used.
        rows: rows that a device evaluates at once.
    """

    def __init__(self, model: ModelDef, loss: LossFn, step: TrainStep, rows: int):
        def lane(params: Params, batch: Batch, step: jax.Array, lane: jax.Array) -> tuple[jax.Array, jax.Array]:
            del step, lane
            return loss(model.merge(params), batch, None)

        self._lanes = Lanes(lane, step.lanes.groups)
        self._step = step
        self._rows = rows
        self._shapes = model.shapes

    @property
    def batch_size(self) -> int:
        """Rows in a global batch of evaluation; it does not depend on the devices."""
        return self._rows * self._step.plan.count

    @property
    def local_rows(self) -> range:
        """The rows of a global batch that this process needs."""
        local = self._step.local_rows
        scale = self._step.plan.rows
        return range(local.start // scale * self._rows, local.stop // scale * self._rows)

    def __call__(self, params: Params, batches: Iterable[Batch]) -> float:
        """The weighted mean loss in nats over all tokens of all batches; NaN when nothing has a weight."""
        on_groups = self._step.params_on_groups(params)
        sums: list[tuple[Any, Any]] = []
        for batch in batches:
            self._compile(batch)
            per_group = len(batch.tokens) // self._rows // len(on_groups)
            for i, group in enumerate(self._lanes.groups):
                for j in range(per_group):
                    start = (i * per_group + j) * self._rows
                    rows = Batch(*(x[start : start + self._rows] for x in batch))
                    placed = jax.device_put(rows, group.sharding())
                    sums.append(self._lanes(i, on_groups[i], placed, np.int32(0), np.int32(j)))
        # math.fsum is exact, so the order, which depends on the mesh, does not matter.
        loss = math.fsum(float(total) for total, _ in sums)
        weight = math.fsum(float(w) for _, w in sums)
        return loss / weight if weight else math.nan

    def _compile(self, batch: Batch) -> None:
        if not self._lanes.compiled:
            rows = Batch(*(np.empty((self._rows, *x.shape[1:]), x.dtype) for x in batch))
            self._lanes.compile(self._shapes, self._step.layouts, rows)
