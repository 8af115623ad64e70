"""A plan for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from lm_trainer.plan.run import RunPlan
from lm_trainer.profile.timing import aligned

_CAVEAT = (
    "Temporary memory is that of XLA's plan for a CPU; on an accelerator fusion, kernels and libraries differ. "
    "Evaluation, the start of a run and what the driver takes are not counted."
)


def lines(plan: RunPlan) -> Iterator[str]:
    """What is asked for, the memory of a device phase by phase, and what the run costs."""
    yield from aligned(list(_rows(plan)))
    yield f"note: {_CAVEAT}"
    if plan.dtype != "float32":
        yield f"note: XLA's plan for a CPU holds float32 copies of what is multiplied in {plan.dtype}: it is too high."
    if plan.kernel is not None:
        yield (
            f"note: on {plan.devices.kind} attention is computed by {plan.kernel}, which keeps no scores. The plan "
            f"holds them, so that it is too high; model.flash_attention_block_size=128 plans with few of them."
        )


def _rows(plan: RunPlan) -> Iterator[tuple[str, str]]:
    memory, work, time = plan.memory, plan.work, plan.time
    axes = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    yield "devices", f"{plan.devices.count} x {plan.devices.kind}" + (f": {axes}" if axes else "")
    yield "model", f"{plan.num_params:,} parameters with a vocabulary of {plan.vocab_size:,}, in {plan.dtype}"
    yield "microbatch", f"{plan.rows} rows, {plan.microbatches} microbatches in a step"
    yield "state, per device", ", ".join(f"{name} {_size(size)}" for name, size in memory.state.items())
    for phase in memory.phases:
        parts = " + ".join(f"{name} {_size(size)}" for name, size in phase.parts.items() if size)
        yield f"  {phase.name}", f"{_size(phase.bytes)} = {parts}"
    yield "peak, per device", f"{_size(memory.peak.bytes)} in {memory.peak.name}{_share(plan)}"
    yield "largest microbatch", _largest(plan)
    yield "FLOPs", f"{work.flops_per_token:.3g} per token, {work.flops_per_step:.3g} per step, {work.flops:.3g} in all"
    yield "tokens", f"{work.tokens_per_step:,} per step, {work.tokens:,} in {work.steps:,} steps"
    if time is None:
        yield "time", f"n/a: no datasheet figure for {plan.dtype} on {plan.devices.kind!r}"
        return
    yield "step time", f"{time.step_seconds:.3g} s"
    yield "time", f"{time.seconds / 3600:,.4g} hours, {time.device_hours:,.4g} device hours"
    if time.cost is not None:
        yield "cost", f"{time.cost:,.2f}"


def _share(plan: RunPlan) -> str:
    if plan.budget is None:
        return ""
    verdict = "fits in" if plan.memory.peak.bytes <= plan.budget.bytes else "DOES NOT FIT in"
    return f": {verdict} {_size(plan.budget.bytes)} ({plan.budget.origin})"


def _largest(plan: RunPlan) -> str:
    if plan.fit is None:
        return f"n/a: how much memory {plan.devices.kind!r} has is not known; give --memory"
    fit = plan.fit
    if fit.rows is None:
        return f"none: the smallest takes {_size(fit.bytes)}; use more devices, or cut the model"
    above = "" if fit.next_rows is None else f"; {fit.next_rows} rows would take {_size(fit.next_bytes or 0)}"
    if fit.rows == plan.rows:
        return f"{fit.rows} rows, as it is{above}"
    changes = " (changes the numbers of the run)" if plan.determinism == "elastic" else ""
    return f"{fit.rows} rows, {_size(fit.bytes)}{above}: trainer.per_device_parallelism={fit.rows}{changes}"


def _size(count: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        scale = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}[unit]
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count} B"
