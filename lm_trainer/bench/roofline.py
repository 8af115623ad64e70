"""Computes the roofline of a training step: which parts of the gradient are compute-bound or memory-bound."""

from __future__ import annotations

from typing import Any

import jax

from lm_trainer.bench.session import BenchSession
from lm_trainer.profile.bandwidth import CopyProbe
from lm_trainer.profile.mfu import MfuReport
from lm_trainer.profile.roofline import Bound, compute_bounds, list_operations
from lm_trainer.profile.timing import BenchResult, Spread, format_si

PARTS = ("embedding", "attention", "mlp", "loss")
"""Named scopes in `lm_trainer.nn` that are reported separately."""
_COPIES, _LARGEST = 20, 8


def measure_roofline(session: BenchSession, report: MfuReport) -> BenchResult:
    """Computes the minimum time of the operations in the gradient.

    The limits are the speed of the matrix product in `report` and the bandwidth of a memory copy that is measured here.
    """
    probe = CopyProbe(jax.devices()[0])
    copies = Spread.from_values([probe.num_bytes / probe.run() for _ in range(_COPIES)])
    bandwidth = copies.median
    # The FLOP/s in `report` are for all devices, but the operations are for one device.
    flops = report.matmul_flops.median / session.device_count
    device_operations = [
        op
        for program, times in session.gradient.run_counts()
        for op in list_operations(program.hlo(), PARTS, times=times)
    ]

    def group_bounds(key: str) -> list[Bound]:
        return compute_bounds(device_operations, flops_per_second=flops, bytes_per_second=bandwidth, by=key)

    parts, largest = group_bounds("part"), group_bounds("name")[:_LARGEST]
    step_bound = session.gradients_per_step * sum(part.seconds for part in parts)
    heading = f"{'FLOPs':>9} {'bytes':>9} {'least ms':>9}  bound by"
    table = [
        (
            "least time of the step",
            f"{1e3 * step_bound:.1f} ms, {step_bound / report.step_seconds.median:.0%} of what it takes",
        ),
        (
            "limits",
            f"{format_si(flops)}FLOP/s (matrix product) and {format_si(bandwidth)}B/s (copy, quartiles "
            f"{format_si(copies.lower_quartile)}B/s-{format_si(copies.upper_quartile)}B/s) on one device",
        ),
        (f"part ({session.gradients_per_step} x a step)", heading),
        *((part.name, _format_row(part)) for part in parts),
        ("largest operations", heading),
        *((op.name, _format_row(op)) for op in largest),
    ]
    values = {
        "least_step_seconds": step_bound,
        "flops_per_second": flops,
        "bytes_per_second": bandwidth,
        "copies": copies.as_dict(),
        "gradients_per_step": session.gradients_per_step,
        "parts": [_bound_values(part) for part in parts],
        "largest_operations": [_bound_values(op) for op in largest],
    }
    return BenchResult(table, values)


def _format_row(bound: Bound) -> str:
    return f"{format_si(bound.flops):>9} {format_si(bound.num_bytes):>8}B {1e3 * bound.seconds:>9.2f}  {bound.bound_by}"


def _bound_values(bound: Bound) -> dict[str, Any]:
    return {**vars(bound), "seconds": bound.seconds, "bound_by": bound.bound_by}
