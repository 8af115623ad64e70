"""Memory that a device holds in each phase of a training step, from shapes and XLA's memory analysis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import PyTree
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.state.train_state import TrainState


@dataclass(frozen=True)
class ProgramBytes:
    """Memory of a compiled program in bytes, on each of its devices."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that reuse the memory of donated arguments."""
    temporary: int
    """Memory that is held only while the program runs."""

    @classmethod
    def from_executable(cls, program: Executable) -> ProgramBytes:
        """Reads XLA's memory analysis.

        Raises:
            UserError: if the backend has no memory analysis.
        """
        analysis = program.memory()
        if analysis is None:
            raise UserError(f"XLA does not say how much memory a program takes on {jax.default_backend()}")
        return cls(
            arguments=analysis.argument_size_in_bytes,
            outputs=analysis.output_size_in_bytes,
            aliased=analysis.alias_size_in_bytes,
            temporary=analysis.temp_size_in_bytes,
        )

    @property
    def new_outputs(self) -> int:
        """Outputs in newly allocated memory."""
        return self.outputs - self.aliased


@dataclass(frozen=True)
class PhaseBytes:
    """Memory that a device holds during one phase of a step."""

    name: str
    parts: Mapping[str, int]
    """Name of a part -> size in bytes."""

    @property
    def bytes(self) -> int:
        """Sum of all parts in bytes."""
        return sum(self.parts.values())


def bytes_per_device(tree: PyTree) -> int:
    """Returns the size in bytes of arrays, or of shapes with shardings, on each of their devices."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def state_bytes(state: TrainState) -> dict[str, int]:
    """Returns the memory of the state on each device between steps: name -> size in bytes, without empty parts.

    Args:
        state: arrays, or shapes with shardings as returned by `abstract_state`.
    """
    parts = {
        "parameters": state.params,
        "optimizer state": state.opt_state,
        "averaged weights": state.averaged,
        "frozen parameters": state.frozen,
    }
    sizes = {name: bytes_per_device(tree) for name, tree in parts.items()}
    return {name: size for name, size in sizes.items() if size}


def memory_sort_key(plan: MicrobatchPlan) -> tuple[int, int]:
    """Returns a key that orders the batches of a run by memory. Either their rows or their microbatches increase."""
    return plan.rows, plan.count
