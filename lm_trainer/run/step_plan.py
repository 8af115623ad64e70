"""The trainer section resolved once: batches, microbatches, the shape of the mesh and its rules, precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from lm_trainer.core.piecewise import BatchSchedule, Piecewise
from lm_trainer.core.precision import Policy
from lm_trainer.parallel.mesh import AxisRules, MeshShape, build_mesh
from lm_trainer.step.microbatch_plan import MicrobatchPlan


@dataclass(frozen=True)
class StepPlan:
    """Everything that the trainer section says of a step, for any devices."""

    batch_schedule: BatchSchedule
    """Rows in the global batch of each step."""
    microbatches: Piecewise[MicrobatchPlan]
    """The split of the global batch of each step into microbatches."""
    evaluation: MicrobatchPlan
    """The split of a batch of evaluation: as many microbatches as the largest batch of training has."""
    mesh_shape: MeshShape
    """The mesh axes whose sizes are set; the data axis takes the devices that remain."""
    param_rules: AxisRules
    """Logical axis to mesh axes for the state in storage."""
    compute_rules: AxisRules
    """Logical axis to mesh axes during computation."""
    policy: Policy
    """The precision of parameters, computation and output."""

    @property
    def microbatch_rows(self) -> tuple[int, ...]:
        """Rows of the microbatches of every batch, those of evaluation as well."""
        return tuple(plan.rows for plan in (*self.microbatches.values, self.evaluation))

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """Lays the devices out; raises `UserError` as `build_mesh` where they cannot be."""
        return build_mesh(self.mesh_shape, devices)
