"""The bytes that one device holds in each phase of a training step, from shapes and from XLA's memory analysis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from lm_trainer.core.errors import UserError
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.state.train_state import TrainState


@dataclass(frozen=True)
class ProgramBytes:
    """The memory of a compiled program on each of its devices, in bytes."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that lie where donated arguments were."""
    temporary: int
    """Held only while it runs."""

    @classmethod
    def of(cls, program: Executable) -> ProgramBytes:
        """XLA's memory analysis.

        Raises:
            UserError: when the backend has none.
        """
        found = program.memory()
        if found is None:
            raise UserError(f"XLA does not say how much memory a program takes on {jax.default_backend()}")
        return cls(
            arguments=found.argument_size_in_bytes,
            outputs=found.output_size_in_bytes,
            aliased=found.alias_size_in_bytes,
            temporary=found.temp_size_in_bytes,
        )

    @property
    def new(self) -> int:
        """Outputs in memory of their own."""
        return self.outputs - self.aliased


@dataclass(frozen=True)
class PhaseBytes:
    """The memory that a device holds during one phase of a step."""

    name: str
    parts: Mapping[str, int]
    """Name -> bytes."""

    @property
    def bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def bytes_per_device(tree: Any) -> int:
    """Bytes of arrays, or of shapes with shardings, on one of their devices; every device holds as many."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def state_bytes(state: TrainState) -> dict[str, int]:
    """The state of a run on each device between steps: name -> bytes, without what the run does not have.

    Args:
        state: arrays, or shapes with shardings, as `abstract_state` gives them.
    """
    parts = {
        "parameters": state.params,
        "optimizer state": state.opt_state,
        "averaged weights": state.averaged,
        "frozen parameters": state.frozen,
    }
    found = {name: bytes_per_device(tree) for name, tree in parts.items()}
    return {name: size for name, size in found.items() if size}


def taken_memory(plan: MicrobatchPlan) -> tuple[int, int]:
    """Orders the batches of a run by the memory they take: either their rows rise, or the number of microbatches."""
    return plan.rows, plan.count
