"""The microbatches that share what is gathered, where the configuration leaves them to the memory of the devices."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from lm_trainer.parallel.processes import gather
from lm_trainer.parallel.rehearsal import on_one_shard
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.executable import Executables
from lm_trainer.step.dispatch.measured_programs import MeasuredPrograms
from lm_trainer.step.dispatch.memory import taken_memory

_USED = 0.95
"""The part of a device's memory that a step may take; the rest is for pieces between arrays."""


def device_memory() -> int | None:
    """Bytes that a run may use on each device, the least of all processes; None where a backend does not say."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    return int(gather(np.asarray(min(limits), np.int64)).min()) or None


def plan_for_memory(
    make: Callable[[TrainerConfig], TrainingSetup],
    trainer: TrainerConfig,
    seq_len: int | None,
    note: Callable[[str], object],
    *,
    memory: Callable[[], int | None] = device_memory,
) -> TrainingSetup:
    """The program of a run, with as many `microbatches_per_gather` as the memory holds where none are configured.

    They decide no bits. All processes must call it.

    Args:
        make: plans the program of a trainer section.
        trainer: of the run.
        seq_len: positions in a row; None where they are not known, and nothing is chosen.
        note: is told what was chosen, where it is not all of them.
        memory: bytes of each device, None where they are not known; asked for only where it matters.
    """
    setup = make(trainer)
    if not setup.gathers_layers or trainer.microbatches_per_gather is not None or seq_len is None:
        return setup
    mesh, plan = setup.sharding.mesh, max(setup.step.plans.values, key=taken_memory)
    fewer = plan.fewer_together(mesh)
    if not fewer or (limit := memory()) is None:
        return setup
    row = random_batch(1, seq_len, 2)
    # What is compiled here is what the run needs as well.
    compiled = setup.step.compile(row, setup.step.plans.start_of(plan))
    programs = MeasuredPrograms(compiled.by_name if isinstance(compiled, Executables) else {})

    def peak(trainer: TrainerConfig) -> int:
        """The most bytes that a device holds in a step, the most of all processes."""
        with on_one_shard():
            rehearsed = make(trainer)
        with programs.of_rows(plan.rows) as measure:
            record = rehearsed.rehearse(row, mesh.devices.flat[0].platform, measure)
        return int(gather(np.asarray(max(phase.bytes for phase in record.phases), np.int64)).max())

    tried = [(plan.shares(mesh).most, trainer, peak(trainer))]
    while tried[-1][2] > _USED * limit and fewer:
        together = fewer.pop(0)
        turns = trainer.model_copy(update={"microbatches_per_gather": together})
        tried.append((together, turns, peak(turns)))
    (together, chosen, needed), (most, _, whole) = tried[-1], tried[0]
    if needed > limit:
        note(
            f"a step needs {_gib(needed)} on each device, which have {_gib(limit)}, even with "
            f"microbatches_per_gather={together}; `lmt plan --search` looks for a layout that fits"
        )
    elif together < most:
        note(
            f"microbatches_per_gather={together}: a step needs {_gib(needed)} of the {_gib(limit)} of each device, and "
            f"{_gib(whole)} with all {most} microbatches of a device together. The numbers are the same"
        )
    return setup if chosen is trainer else make(chosen)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
