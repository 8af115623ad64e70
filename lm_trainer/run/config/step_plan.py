"""The trainer section resolved once: batches, microbatches, the shape of the mesh and its rules, precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_trainer.core.piecewise import BatchSchedule, Piecewise
from lm_trainer.core.precision import Policy
from lm_trainer.parallel.mesh import AxisRules, MeshShape, build_abstract_mesh, build_mesh
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh


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
    state_parts: int | None
    """The most parts along the data axis in which the bits of norms do not depend on their number, a power of two; None
    where no bits are promised."""
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
        return build_mesh(self._shape(len(devices)), devices)

    def abstract_mesh(self, count: int) -> AbstractMesh:
        """The sizes of the mesh of `count` devices; otherwise as `mesh`."""
        return build_abstract_mesh(self._shape(count), count)

    def check_shares(self, mesh: Mesh | AbstractMesh) -> None:
        """Raises `UserError` when the devices of a mesh cannot share the microbatches of every batch."""
        for plan in self.microbatches.values:
            if self.state_parts is None:
                plan.per_shard(mesh)
            else:
                plan.shares(mesh)

    def check_device_count(self, count: int) -> None:
        """Raises `UserError` when `count` devices, wherever they are, cannot share the microbatches of every batch."""
        self.check_shares(self.abstract_mesh(count))

    def _shape(self, count: int) -> MeshShape:
        """`mesh_shape`, with more replicas where the state cannot be cut over all devices of the data axis."""
        data, rest = divmod(count, math.prod(self.mesh_shape))
        if self.state_parts is None or rest:
            return self.mesh_shape
        copies = data // math.gcd(data, self.state_parts)
        return self.mesh_shape._replace(replica=self.mesh_shape.replica * copies)
