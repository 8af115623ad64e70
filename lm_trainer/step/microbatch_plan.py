"""The division of a global batch into microbatches."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import batch_shards


@dataclass(frozen=True)
class MicrobatchPlan:
    """The division of a global batch into microbatches; it never depends on the devices."""

    batch_size: int
    """Rows of the global batch."""
    count: int
    """Microbatches in a step, V."""
    rows: int
    """Rows in a microbatch; those past the end of the batch are padding that counts for nothing."""

    @classmethod
    def make(cls, batch_size: int, rows: int, elastic_shards: int, *, pad: bool = False) -> MicrobatchPlan:
        """Cuts `batch_size` rows into microbatches of `rows`, or, with -1, into `elastic_shards` microbatches.

        Args:
            batch_size: rows of the global batch.
            rows: of a microbatch, or -1.
            elastic_shards: the most devices along the batch axes.
            pad: fill up a batch that cannot be cut so, to a multiple of `elastic_shards` microbatches.

        Raises:
            ValueError: when the batch cannot be cut so, and `pad` is false.
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

    def rows_like(self, batch: Batch) -> Batch:
        """The shapes of a microbatch with rows like those of `batch`, which may have any number of them."""
        shapes = (jax.ShapeDtypeStruct((self.rows, *x.shape[1:]), x.dtype) for x in batch)
        return Batch(*shapes)  # pyright: ignore[reportArgumentType]

    def per_shard(self, mesh: Mesh) -> int:
        """Microbatches that each batch shard of the mesh computes in turn.

        Raises:
            UserError: when this mesh cannot share the microbatches equally.
        """
        # A power of two: each shard must add whole subtrees of the binary tree over all microbatches.
        shards = batch_shards(mesh)
        if self.count % shards == 0 and shards & (shards - 1) == 0:
            return self.count // shards
        largest = self.count & -self.count
        raise UserError(
            f"{shards} devices along the data axes cannot share {self.count} microbatches of {self.rows} rows: the "
            f"number of devices must be a power of two up to {largest}. Use fewer devices, or change "
            f"trainer.train_batch_size, trainer.per_device_parallelism or trainer.elastic_shards "
            f"(which changes the run's numbers)"
        )
