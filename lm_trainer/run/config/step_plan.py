"""The resolved trainer section: batches, microbatches, mesh shape, sharding rules and precision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    """Settings of a training step, resolved from the trainer section. They do not depend on the devices."""

    batch_schedule: BatchSchedule
    """Number of rows in the global batch of each step."""
    microbatches: Piecewise[MicrobatchPlan]
    """Division of the global batch of each step into microbatches."""
    evaluation: MicrobatchPlan
    """Division of an evaluation batch into microbatches, as many as in the largest training batch."""
    mesh_shape: MeshShape
    """Sizes of the mesh axes that are configured. The data axis takes the remaining devices."""
    state_parts: int | None
    """Maximum number of shards along the data axis for which the bits of norms do not depend on the number of shards. A
    power of two; None if there is no determinism guarantee."""
    param_rules: AxisRules
    """Mesh axes that shard each logical axis of the stored state."""
    compute_rules: AxisRules
    """Mesh axes that shard each logical axis during computation."""
    policy: Policy
    """Precision of parameters, computation and output."""

    @property
    def microbatch_rows(self) -> tuple[int, ...]:
        """Number of rows per microbatch for every batch, including the evaluation batch."""
        return tuple(plan.rows for plan in (*self.microbatches.values, self.evaluation))

    @property
    def max_devices(self) -> int:
        """Maximum number of devices that can share every batch."""
        counts = [plan.count for plan in self.microbatches.values]
        shape = self.mesh_shape
        return min(counts) * shape.pipeline * shape.context * shape.expert * shape.model

    def compute_shards(self, logical_axis: str, sizes: Mapping[str, int]) -> int:
        """Returns the number of shards of a logical axis during computation; `sizes` maps mesh axes to devices."""
        return math.prod(sizes.get(axis, 1) for axis in self.compute_rules.get(logical_axis, ()))

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """Arranges the devices in a mesh. Raises `UserError` like `build_mesh`."""
        return build_mesh(self._fit_mesh_shape(len(devices)), devices)

    def abstract_mesh(self, count: int) -> AbstractMesh:
        """Like `mesh`, but returns an abstract mesh of `count` devices."""
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
        """Returns `mesh_shape`, with additional replicas if the state cannot be sharded over the full data axis."""
        data, remainder = divmod(count, math.prod(self.mesh_shape))
        if self.state_parts is None or remainder:
            return self.mesh_shape
        copies = data // math.gcd(data, self.state_parts)
        return self.mesh_shape._replace(replica=self.mesh_shape.replica * copies)
