"""Division of a global batch into microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.tree_sum import Shares

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from lm_trainer.core.batch import Batch


@dataclass(frozen=True)
class MicrobatchPlan:
    """Division of a global batch into microbatches, which does not depend on the devices."""

    batch_size: int
    """Number of rows of the global batch."""
    count: int
    """Number of microbatches in a step, V."""
    rows: int
    """Number of rows in a microbatch. Rows past the end of the batch are padding and have no weight."""

    @classmethod
    def make(cls, batch_size: int, rows: int, elastic_shards: int, *, pad: bool = False) -> MicrobatchPlan:
        """Divides `batch_size` rows into microbatches of `rows` rows or, if `rows` is -1, into `elastic_shards`
        microbatches.

        Args:
            batch_size: number of rows of the global batch.
            rows: number of rows of a microbatch, or -1.
            elastic_shards: maximum number of devices along the batch axes.
            pad: pad a batch that is not divisible to a multiple of `elastic_shards` microbatches.

        Raises:
            ValueError: if the batch is not divisible and `pad` is false.
        """
        if pad:
            rows = -(-batch_size // elastic_shards) if rows == -1 else rows
            filled = -(-batch_size // (rows * elastic_shards)) * elastic_shards
            return cls(batch_size, batch_size // rows if batch_size % rows == 0 else filled, rows)
        if rows == -1:
            if batch_size % elastic_shards:
                raise ValueError(
                    f"train_batch_size {batch_size} cannot be cut into elastic_shards={elastic_shards} equal "
                    f"microbatches; make it a multiple, set per_device_parallelism or elastic_shards, or set "
                    f"allow_nondivisible_batch_size"
                )
            rows = batch_size // elastic_shards
        if rows < 1 or batch_size % rows:
            raise ValueError(
                f"train_batch_size {batch_size} is not a multiple of per_device_parallelism={rows}; make it one, or "
                f"set allow_nondivisible_batch_size"
            )
        return cls(batch_size, batch_size // rows, rows)

    def microbatch_shapes(self, batch: Batch) -> Batch:
        """Returns the shapes of a microbatch with rows of the same shape as in `batch`, in any number."""
        import jax

        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.rows, *x.shape[1:]), x.dtype), batch)

    def microbatches_per_shard(self, mesh: Mesh | AbstractMesh) -> int:
        """Returns the number of microbatches per batch shard of a mesh whose shards have equally many.

        Raises:
            UserError: if the microbatches cannot be divided equally.
        """
        shares = self.divide_microbatches(mesh)
        if self.count % shares.shards:
            raise UserError(
                f"{shares.shards} devices along the data axes cannot share {self.count} microbatches of {self.rows} "
                f"rows equally, as trainer.determinism: fast needs; use a divisor of {self.count}, or elastic"
            )
        return shares.max_terms

    def divide_microbatches(self, mesh: Mesh | AbstractMesh, microbatches_per_gather: int | None = None) -> Shares:
        """Divides all microbatches, or one microbatch group, among the batch shards of a mesh.

        The microbatches of a group form a subtree of the tree over all microbatches, so grouping changes no bit.

        Args:
            mesh: device mesh.
            microbatches_per_gather: maximum number of microbatches of a shard in a microbatch group. Groups may be
                larger, because every shard has at least one microbatch in each group, and the leaves of the tree, which
                are runs of an odd number of microbatches, are not split.

        Raises:
            UserError: if there are more shards than microbatches.
        """
        shards = batch_shards(mesh)
        if shards > self.count:
            ending = "es" if self.count > 1 else ""
            raise UserError(
                f"{shards} devices along the data axes cannot share {self.count} microbatch{ending} of {self.rows} "
                f"rows: use at most {self.count} device{ending[1:]}, or change trainer.train_batch_size, "
                f"trainer.per_device_parallelism or trainer.elastic_shards (which changes the run's numbers)"
            )
        if microbatches_per_gather is None:
            return Shares(self.count, shards)
        group = self.count // (self.count & -self.count)
        while group < self.count and (group < shards or 2 * group <= microbatches_per_gather * shards):
            group *= 2
        return Shares(group, shards)

    def smaller_group_sizes(self, mesh: Mesh | AbstractMesh, microbatches_per_gather: int | None = None) -> list[int]:
        """Returns the possible sizes of a shard's part of a microbatch group, largest first.

        All of them are below the size with `microbatches_per_gather`.
        """
        current = self.divide_microbatches(mesh, microbatches_per_gather).max_terms
        sizes = {self.divide_microbatches(mesh, limit).max_terms for limit in range(1, current)}
        return sorted(sizes - {current}, reverse=True)
