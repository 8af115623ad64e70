"""The microbatches that share what is gathered, where the configuration leaves them to the memory of the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.processes import gather
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.program import Program
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.memory import ProgramBytes, compile_programs, phase_bytes, state_bytes, taken_memory
from lm_trainer.step.state.train_state import abstract_state

_USED = 0.95
"""The part of a device's memory that a step may take; the rest is for pieces between arrays."""


def device_memory() -> int | None:
    """Bytes that a run may use on each device, the least of all processes; None where a backend does not say."""
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices()]
    return int(gather(np.asarray(min(limits), np.int64)).min()) or None


def plan_for_memory(
    make: Callable[[TrainerConfig], Program],
    trainer: TrainerConfig,
    seq_len: int | None,
    note: Callable[[str], object],
    *,
    memory: Callable[[], int | None] = device_memory,
) -> Program:
    """The program of a run, with as many `microbatches_per_gather` as the memory holds where none are configured.

    They decide no bits. What is compiled to find them is what the run needs as well. All processes must call it.

    Args:
        make: plans the program of a trainer section.
        trainer: of the run.
        seq_len: positions in a row; None where they are not known, and nothing is chosen.
        note: is told what was chosen, where it is not all of them.
        memory: bytes of each device, None where they are not known; asked for only where it matters.
    """
    program = make(trainer)
    if not program.gathers_layers or trainer.microbatches_per_gather is not None or seq_len is None:
        return program
    mesh, plan = program.sharding.mesh, max(program.step.plans.values, key=taken_memory)
    fewer = plan.fewer_together(mesh)
    if not fewer or (limit := memory()) is None:
        return program
    batch, known = random_batch(1, seq_len, 2), dict[str, ProgramBytes]()
    tried = [(plan.shares(mesh).most, program, _peak(program, batch, known))]
    while tried[-1][2] > _USED * limit and fewer:
        together = fewer.pop(0)
        other = make(trainer.model_copy(update={"microbatches_per_gather": together}))
        # By itself a gradient is exchanged in the dtype in which it was computed, by programs of its own.
        tried.append((together, other, _peak(other, batch, known if together > 1 else {})))
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
    return chosen


def _peak(program: Program, batch: Batch, known: dict[str, ProgramBytes]) -> int:
    """The most bytes that a device holds in a step, the most of all processes.

    Args:
        program: of the run.
        batch: rows like its own.
        known: the programs that grow with the rows of a microbatch, which are compiled and added where it is empty.
    """
    plan, devices = max(program.step.plans.values, key=taken_memory), program.sharding.mesh.devices
    phases = [*program.step.phases(batch, plan, devices.flat[0].platform)]
    if not known:
        known |= compile_programs(phases, grows=True)
    programs: Mapping[str, ProgramBytes] = {**known, **compile_programs(phases, grows=False)}
    state: Any = abstract_state(program.model.shapes, program.tx, program.sharding, averaged=program.averages)
    row = sum(x.nbytes for x in jax.tree.leaves(batch))
    rows = max(map(len, program.step.devices.numbers(plan))) * plan.rows
    held = {"state": sum(state_bytes(state).values()), "batch": rows * row}
    most = max(phase.bytes for phase in phase_bytes(phases, programs, held))
    return int(gather(np.asarray(most, np.int64)).max())


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
