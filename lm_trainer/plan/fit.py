"""Search for the largest microbatch that fits into the memory of a device."""

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
"""Maximum ratio of an interpolated estimate to the true value."""


@dataclass(frozen=True)
class MicrobatchFit:
    """Microbatches that fit into the memory of a device. All figures are from compiled programs."""

    rows: int | None
    """Number of rows of the largest microbatch that fits; None if not even the smallest fits."""
    bytes: int
    """Peak memory with `rows`, or with `least_rows` if no microbatch fits."""
    least_rows: int
    """Number of rows with which a step takes the least memory."""
    microbatches: int | None
    """Number of microbatches in the largest step, which is also the maximum number of devices along the data axes."""
    next_rows: int | None
    """Number of rows of the next larger microbatch into which the batch can be split; None if there is none."""
    next_bytes: int | None
    """Peak memory with `next_rows`, which exceeds the limit."""
    together: int | None = None
    """Value of `microbatches_per_gather` that these figures apply to; None: the configured value."""


def possible_rows(trainer: TrainerConfig, mesh: Mesh | AbstractMesh) -> list[int]:
    """Returns the values of `per_device_parallelism` with which these devices can share every batch of the run."""
    plans = trainer.step_plan.microbatches.values
    sizes, configured = [plan.batch_size for plan in plans], {plan.rows for plan in plans}
    common = math.gcd(*sizes)
    divisors = {r for k in range(1, math.isqrt(common) + 1) if common % k == 0 for r in (k, common // k)}
    # A batch that may be padded can be split at any size; considering only powers of two is sufficient.
    powers = {1 << k for k in range(max(sizes).bit_length())} if trainer.allow_nondivisible_batch_size else set()
    return sorted(rows for rows in divisors | powers | configured if _can_share_batches(trainer, rows, mesh))


def _can_share_batches(trainer: TrainerConfig, rows: int, mesh: Mesh | AbstractMesh) -> bool:
    try:
        plan = trainer.model_copy(update={"per_device_parallelism": rows}).step_plan
        plan.check_microbatch_shares(mesh)
        for plan_group in plan.microbatches.values:
            check_rows(plan_group.rows, mesh.shape)
    except (ValueError, UserError):
        return False
    return True


def find_fitting_microbatch(memory: StepMemory, limit: int, rows: int) -> MicrobatchFit:
    """Finds a step that takes at most `limit` bytes per device and is as close to the configured one as possible.

    For layer-by-layer gradients, the number of microbatches that share a gather does not affect the bits. Smaller
    groups are therefore tried first, and then other microbatch sizes with groups of one microbatch.

    Args:
        memory: memory of the step of the run.
        limit: maximum memory in bytes.
        rows: configured number of rows of a microbatch.
    """
    if memory.plan().peak.bytes <= limit:
        return find_largest_microbatch(memory, limit)
    trainer, mesh = memory.config.trainer, memory.setup.sharding.mesh
    layerwise = memory.setup.gathers_layers
    for together in (
        memory.largest_step().smaller_group_sizes(mesh, trainer.microbatches_per_gather) if layerwise else ()
    ):
        peak = memory.with_gather(together).plan().peak.bytes
        if peak <= limit:
            return MicrobatchFit(rows, peak, rows, memory.largest_step().count, None, None, together)
    largest = find_largest_microbatch(memory, limit)
    if largest.rows is not None or not layerwise:
        return largest
    one = find_largest_microbatch(memory.with_gather(1), limit)
    return largest if one.rows is None and one.bytes >= largest.bytes else dataclasses.replace(one, together=1)


def find_largest_microbatch(memory: StepMemory, limit: int) -> MicrobatchFit:
    """Finds the largest microbatch with which a step takes at most `limit` bytes on a device.

    Temporary memory grows almost linearly with the number of rows, so a few compiled sizes guide the search. The result
    has been compiled, and so has the next larger size, which does not fit.

    Args:
        memory: memory of the step of the run.
        limit: maximum memory in bytes.
    """
    sizes = possible_rows(memory.config.trainer, memory.setup.sharding.mesh)
    # The largest size, and the smallest or the configured one; other sizes can be interpolated between them.
    planned = [rows for rows in sizes if memory.is_planned(rows)] or sizes[:1]
    unplanned = [*planned, sizes[-1]]
    while unplanned:
        for rows in unplanned:
            memory.step_record(rows)
        peaks = {rows: memory.estimate(rows).peak.bytes for rows in sizes}
        best = max((rows for rows in sizes if peaks[rows] <= limit), default=None)
        larger = [rows for rows in sizes if best is None or rows > best]
        above = larger[0] if larger else None
        # Fewer rows do not always take less memory, because they lead to more microbatches and more sums of gradients.
        near = [rows for rows in larger if peaks[rows] <= _TOO_HIGH * limit]
        least = min(sizes, key=lambda rows: peaks[rows])
        candidates = (least, above, *near) if best is None else (best, above, *near)
        unplanned = [rows for rows in dict.fromkeys(candidates) if rows is not None and not memory.is_planned(rows)]
    return MicrobatchFit(
        rows=best,
        bytes=peaks[least if best is None else best],
        least_rows=least,
        microbatches=None if best is None else memory.largest_step(best).count,
        next_rows=None if best is None else above,
        next_bytes=None if best is None or above is None else peaks[above],
    )
