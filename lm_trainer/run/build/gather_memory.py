"""Chooses `microbatches_per_gather` and the queue of layers such that a step fits into the memory of the devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.processes import gather
from lm_trainer.parallel.rehearsal import on_one_shard
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.device_groups import LAYERS_AT_ONCE, MAX_LAYERS_AT_ONCE
from lm_trainer.step.dispatch.executable import Executables
from lm_trainer.step.dispatch.measured_programs import MeasuredPrograms
from lm_trainer.step.dispatch.memory import memory_sort_key

_USABLE_FRACTION = 0.95
"""Fraction of a device's memory that a step may use. The remainder is reserved for fragmentation."""


def min_device_memory() -> int | None:
    """Returns the number of bytes available per device, as the minimum over all processes; None if it is unknown."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    return int(gather(np.asarray(min(limits), np.int64)).min()) or None


def plan_for_memory(
    make: Callable[[TrainerConfig], TrainingSetup],
    trainer: TrainerConfig,
    row: Batch | None,
    note: Callable[[str], object],
    *,
    memory: Callable[[], int | None] = min_device_memory,
) -> TrainingSetup:
    """Plans the training of a run. If `microbatches_per_gather` is not set, chooses as many as fit into memory, and the
    number of layers in the queue of a device.

    The choices do not affect the results. All processes must call this function.

    Args:
        make: plans the training for a trainer section.
        trainer: trainer section of the run.
        row: a row like the rows of the data. With None, nothing is chosen.
        note: called with a message about the choice, unless all microbatches fit.
        memory: returns the number of bytes of each device, or None if it is unknown. Called only if needed.
    """
    setup = make(trainer)
    if not setup.gathers_layers or trainer.microbatches_per_gather is not None or row is None:
        return setup
    mesh, plan = setup.sharding.mesh, max(setup.step.plans.values, key=memory_sort_key)
    smaller_counts = plan.smaller_group_sizes(mesh)
    if (limit := memory()) is None:
        return setup
    # These compiled programs are also needed by the run.
    compiled = setup.step.compile(row, setup.step.plans.start_of(plan))
    programs = MeasuredPrograms(compiled.by_name if isinstance(compiled, Executables) else {})

    def make_rehearsal(trainer: TrainerConfig) -> TrainingSetup:
        with on_one_shard():
            return make(trainer)

    def measure_peak(rehearsal: TrainingSetup, layers_at_once: int = LAYERS_AT_ONCE) -> int:
        """Returns the peak memory of a device in a step in bytes, as the maximum over all processes."""
        rehearsal.step.devices.layers_at_once = layers_at_once
        with programs.measure_for_rows(plan.rows) as measure:
            record = rehearsal.rehearse(row, mesh.devices.flat[0].platform, measure)
        return int(gather(np.asarray(max(phase.bytes for phase in record.phases), np.int64)).max())

    chosen, rehearsal = trainer, make_rehearsal(trainer)
    count = max_count = plan.divide_microbatches(mesh).max_terms
    needed = full_bytes = measure_peak(rehearsal)
    while needed > _USABLE_FRACTION * limit and smaller_counts:
        count = smaller_counts.pop(0)
        chosen = trainer.model_copy(update={"microbatches_per_gather": count})
        rehearsal = make_rehearsal(chosen)
        needed = measure_peak(rehearsal)
    if needed > limit:
        note(
            f"a step needs {_format_gib(needed)} on each device, which have {_format_gib(limit)}, even with "
            f"microbatches_per_gather={count}; `lmt plan --search` looks for a layout that fits"
        )
    elif count < max_count:
        note(
            f"microbatches_per_gather={count}: a step needs {_format_gib(needed)} of the {_format_gib(limit)} of each "
            f"device, and {_format_gib(full_bytes)} with all {max_count} microbatches of a device together. The "
            f"numbers are the same"
        )
    layers_at_once = choose_layers_at_once(lambda layers: measure_peak(rehearsal, layers))
    setup = setup if chosen is trainer else make(chosen)
    setup.step.devices.layers_at_once = layers_at_once
    return setup


def choose_layers_at_once(measure_peak: Callable[[int], int]) -> int:
    """Returns the largest number of layers in the queue of a device that does not raise the peak memory of a step.

    The peak is often in another phase, such as the head or the update, so that the queue can be deeper at no cost.

    Args:
        measure_peak: returns the peak memory of a step with a number of layers in the queue.
    """
    least = measure_peak(LAYERS_AT_ONCE)
    deeper = range(MAX_LAYERS_AT_ONCE, LAYERS_AT_ONCE, -1)
    return next((layers for layers in deeper if measure_peak(layers) <= least), LAYERS_AT_ONCE)


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
