"""The resolved trainer section: batches, microbatches, mesh shape, sharding rules, precision."""

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
    """The settings of a step, resolved from the trainer section and independent of the devices."""

    batch_schedule: BatchSchedule
    """Rows in the global batch of each step."""
    microbatches: Piecewise[MicrobatchPlan]
    """The split of the global batch of each step into microbatches."""
    evaluation: MicrobatchPlan
    """The split of an evaluation batch: as many microbatches as the largest training batch."""
    mesh_shape: MeshShape
    """Mesh axes with configured sizes; the data axis takes the remaining devices."""
    state_parts: int | None
    """Maximum number of shards along the data axis, a power of two, up to which the bits of norms do not depend on the
    number; None without a determinism guarantee."""
    param_rules: AxisRules
    """Logical axis -> mesh axes, for the stored state."""
    compute_rules: AxisRules
    """Logical axis -> mesh axes, during computation."""
    policy: Policy
    """The precision of parameters, computation and output."""

    @property
    def microbatch_rows(self) -> tuple[int, ...]:
        """Rows per microbatch of every batch, including evaluation."""
        return tuple(plan.rows for plan in (*self.microbatches.values, self.evaluation))

    @property
    def max_devices(self) -> int:
        """Maximum number of devices that can share every batch."""
        counts = [plan.count for plan in self.microbatches.values]
        shape = self.mesh_shape
        return min(counts) * shape.pipeline * shape.context * shape.expert * shape.model

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """Arranges the devices in a mesh; raises `UserError` as `build_mesh` does."""
        return build_mesh(self._fit_mesh_shape(len(devices)), devices)

    def abstract_mesh(self, count: int) -> AbstractMesh:
        """Returns the abstract mesh of `count` devices; otherwise like `mesh`."""
        return build_abstract_mesh(self._fit_mesh_shape(count), count)

    def check_microbatch_shares(self, mesh: Mesh | AbstractMesh) -> None:
        """Raises `UserError` if the microbatches of some batch cannot be distributed over the devices of a mesh."""
        for plan in self.microbatches.values:
            if self.state_parts is None:
                plan.microbatches_per_shard(mesh)
            else:
                plan.divide_microbatches(mesh)

    def check_device_count(self, count: int) -> None:
        """Raises `UserError` if the microbatches of some batch cannot be distributed over `count` devices."""
        self.check_microbatch_shares(self.abstract_mesh(count))

    def _fit_mesh_shape(self, count: int) -> MeshShape:
        """Returns `mesh_shape`, with more replicas if the state cannot be sharded over the full data axis."""
        data, remainder = divmod(count, math.prod(self.mesh_shape))
        if self.state_parts is None or remainder:
            return self.mesh_shape
        copies = data // math.gcd(data, self.state_parts)
        return self.mesh_shape._replace(replica=self.mesh_shape.replica * copies)
