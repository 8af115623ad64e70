"""Flags of the TPU's compiler with which a step sends less."""

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
"""For LIBTPU_INIT_ARGS: all-gathers and reduce-scatters stay what they are, and run beside products."""
_MOSTLY = 10
"""Above so many bytes of all-reduces for each of all-gathers, gathers are among the former: where sums alone are left
whole, the two are of about the same size."""


def sends_too_much(group: DeviceGroup, mesh: Mapping[str, int], programs: Sequence[ProgramWork]) -> str | None:
    """The advice for a step whose all-gathers were made all-reduces, of twice the bytes; None where they were not.

    The compiler does so over all chips of a v5p slice that is a whole torus, 4x4x4 and larger.

    Args:
        group: the devices that the programs are for.
        mesh: axis -> size; parameters are cut over `data`.
        programs: of a step.
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
