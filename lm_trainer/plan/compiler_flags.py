"""Flags of the TPU compiler that reduce the communication of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.plan.programs import ProgramWork

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
SPARSE_CORES = " ".join(
    f"--{flag}=true"
    for flag in (
        "xla_tpu_prefer_async_allgather_to_allreduce",
        f"{_OFFLOAD}_all_gather",
        f"{_OFFLOAD}_reduce_scatter",
        f"{_OFFLOAD}_nd_reduce_scatter",
    )
)
"""Value for LIBTPU_INIT_ARGS that keeps all-gathers and reduce-scatters, and overlaps them with matrix products."""
_MOSTLY = 10
"""Ratio of all-reduce bytes to all-gather bytes above which some all-reduces must be converted all-gathers. If all
all-reduces are sums, both have about the same number of bytes."""


def all_gather_advice(group: DeviceGroup, mesh: Mapping[str, int], programs: Sequence[ProgramWork]) -> str | None:
    """Returns advice for a step whose all-gathers were compiled to all-reduces of twice the bytes; None for other
    steps.

    The compiler does this for collectives over all chips of a v5p slice that is a full torus (4x4x4 or larger).

    Args:
        group: the target devices of the programs.
        mesh: axis -> size; parameters are sharded over `data`.
        programs: compiled programs of a step.
    """
    if group.kind != "TPU v5" or mesh.get("data", 1) == 1:
        return None
    gathered, reduced = (
        sum(program.runs * program.sent.get(kind, 0.0) for program in programs) for kind in ("all-gather", "all-reduce")
    )
    if reduced <= _MOSTLY * gathered:
        return None
    return (
        f"The compiler gathers by all-reduces of zeros, twice the bytes. With LIBTPU_INIT_ARGS='{SPARSE_CORES}' the "
        f"SparseCores gather and scatter."
    )
