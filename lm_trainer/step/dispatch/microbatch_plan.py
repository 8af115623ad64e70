"""The division of a global batch into microbatches."""

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
        import jax

        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.rows, *x.shape[1:]), x.dtype), batch)

    def per_shard(self, mesh: Mesh | AbstractMesh) -> int:
        """Microbatches of each batch shard of a mesh that shares them equally.

        Raises:
            UserError: when it cannot.
        """
        shares = self.shares(mesh)
        if self.count % shares.shards:
            raise UserError(
                f"{shares.shards} devices along the data axes cannot share {self.count} microbatches of {self.rows} "
                f"rows equally, as trainer.determinism: fast needs; use a divisor of {self.count}, or elastic"
            )
        return shares.most

    def shares(self, mesh: Mesh | AbstractMesh, together: int | None = None) -> Shares:
        """The division among the batch shards of a mesh: of all microbatches, or of those that are computed in a turn.

        The microbatches of a turn are a subtree of the tree over all, so that turns change no bit.

        Args:
            mesh: of the devices.
            together: the most that a shard computes in a turn, where turns can be so short: in each of them every shard
                has one, and the runs of an odd number of microbatches that the tree begins with are not cut.

        Raises:
            UserError: when there are more shards than microbatches.
        """
        shards = batch_shards(mesh)
        if shards > self.count:
            raise UserError(
                f"{shards} devices along the data axes cannot share {self.count} microbatches of {self.rows} rows: "
                f"use at most {self.count} devices, or change trainer.train_batch_size, "
                f"trainer.per_device_parallelism or trainer.elastic_shards (which changes the run's numbers)"
            )
        if together is None:
            return Shares(self.count, shards)
        turn = self.count // (self.count & -self.count)
        while turn < self.count and (turn < shards or 2 * turn <= together * shards):
            turn *= 2
        return Shares(turn, shards)

    def fewer_together(self, mesh: Mesh | AbstractMesh, together: int | None = None) -> list[int]:
        """The numbers of microbatches of a shard that a turn may have, below what `together` comes to; most first."""
        now = self.shares(mesh, together).most
        return sorted({self.shares(mesh, most).most for most in range(1, now)} - {now}, reverse=True)
