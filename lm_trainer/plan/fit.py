"""The largest microbatch that a memory holds."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from lm_trainer.core.errors import UserError
from lm_trainer.plan.memory import StepMemory
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.model_parallel_limits import check_rows

_TOO_HIGH = 1.1
"""An estimate from other sizes is at most this many times the truth."""


@dataclass(frozen=True)
class Fit:
    """The microbatches that fit into the memory of a device; all figures are of compiled programs."""

    rows: int | None
    """The rows of the largest microbatch that fits; None if not even the smallest does."""
    bytes: int
    """The peak with `rows`, or with `least_rows` where none fits."""
    least_rows: int
    """The rows with which a step takes the least memory."""
    microbatches: int | None
    """In the largest step, which are also the most devices along the data axes."""
    next_rows: int | None
    """The next larger microbatch that the batch can be cut into; None if there is none."""
    next_bytes: int | None
    """The peak with it, which is more than there is."""
    together: int | None = None
    """The `microbatches_per_gather` with which all of this holds; None: as the configuration says."""


def possible_rows(trainer: TrainerConfig, mesh: Mesh | AbstractMesh) -> list[int]:
    """The values of `per_device_parallelism` with which these devices can share every batch of the run."""
    plans = trainer.step_plan.microbatches.values
    sizes, own = [plan.batch_size for plan in plans], {plan.rows for plan in plans}
    common = math.gcd(*sizes)
    divisors = {r for k in range(1, math.isqrt(common) + 1) if common % k == 0 for r in (k, common // k)}
    # A batch that may be filled up can be cut at any size: powers of two are enough to choose from.
    powers = {1 << k for k in range(max(sizes).bit_length())} if trainer.allow_nondivisible_batch_size else set()
    return sorted(rows for rows in divisors | powers | own if _can_share(trainer, rows, mesh))


def _can_share(trainer: TrainerConfig, rows: int, mesh: Mesh | AbstractMesh) -> bool:
    try:
        plan = trainer.model_copy(update={"per_device_parallelism": rows}).step_plan
        plan.check_shares(mesh)
        for each in plan.microbatches.values:
            check_rows(each.rows, mesh.shape)
    except (ValueError, UserError):
        return False
    return True


def find_fit(memory: StepMemory, limit: int, rows: int) -> Fit:
    """Looks for a step that takes at most `limit` bytes on a device, as near to the configured one as there is.

    Layer by layer the microbatches that share what is gathered decide no bits. So fewer of them are tried before other
    microbatches are, which then are computed one by one.

    Args:
        memory: of the run.
        limit: in bytes.
        rows: of the microbatches that are configured.
    """
    if memory.plan().peak.bytes <= limit:
        return find_largest(memory, limit)
    trainer, mesh = memory.config.trainer, memory.setup.sharding.mesh
    layerwise = memory.setup.gathers_layers
    for together in memory.largest_step().fewer_together(mesh, trainer.microbatches_per_gather) if layerwise else ():
        peak = memory.in_turns(together).plan().peak.bytes
        if peak <= limit:
            return Fit(rows, peak, rows, memory.largest_step().count, None, None, together)
    largest = find_largest(memory, limit)
    if largest.rows is not None or not layerwise:
        return largest
    one = find_largest(memory.in_turns(1), limit)
    return largest if one.rows is None and one.bytes >= largest.bytes else dataclasses.replace(one, together=1)


def find_largest(memory: StepMemory, limit: int) -> Fit:
    """The largest microbatch whose step takes at most `limit` bytes on a device.

    Temporary memory grows almost linearly with the rows, so that a few compiled sizes say where to look. What is
    returned has been compiled, and so has the next larger size, which does not fit.

    Args:
        memory: of the run.
        limit: in bytes.
    """
    sizes = possible_rows(memory.config.trainer, memory.setup.sharding.mesh)
    # The largest, and the smallest or what is configured: between two sizes all others can be interpolated.
    planned = [rows for rows in sizes if memory.known(rows)] or sizes[:1]
    ask = [*planned, sizes[-1]]
    while ask:
        for rows in ask:
            memory.record(rows)
        peaks = {rows: memory.estimate(rows).peak.bytes for rows in sizes}
        best = max((rows for rows in sizes if peaks[rows] <= limit), default=None)
        larger = [rows for rows in sizes if best is None or rows > best]
        above = larger[0] if larger else None
        # Fewer rows are not always less: they are more microbatches, and more sums of gradients.
        near = [rows for rows in larger if peaks[rows] <= _TOO_HIGH * limit]
        least = min(sizes, key=lambda rows: peaks[rows])
        wanted = (least, above, *near) if best is None else (best, above, *near)
        ask = [rows for rows in dict.fromkeys(wanted) if rows is not None and not memory.known(rows)]
    return Fit(
        rows=best,
        bytes=peaks[least if best is None else best],
        least_rows=least,
        microbatches=None if best is None else memory.largest_step(best).count,
        next_rows=None if best is None else above,
        next_bytes=None if best is None or above is None else peaks[above],
    )
