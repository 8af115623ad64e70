"""Formatting of a plan for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lm_trainer.plan.compiler_flags import all_gather_advice
from lm_trainer.plan.cost import RunTime
from lm_trainer.plan.programs import CompiledStep
from lm_trainer.plan.run import RunPlan
from lm_trainer.plan.speed import StepCost
from lm_trainer.profile.efficiency import device_efficiency
from lm_trainer.profile.timing import align_rows
from lm_trainer.trackers.console import format_long_duration

DOES_NOT_FIT = "DOES NOT FIT"
_CAVEAT = "Temporary memory is that of XLA's plan for a CPU; on an accelerator fusion, kernels and libraries differ."
_NOT_COUNTED = "Evaluation, the start of a run and what the driver takes are not counted."


def plan_lines(plan: RunPlan) -> Iterator[str]:
    """Yields the lines of a plan: the devices, the memory of one device by phase, and the cost of the run."""
    yield from align_rows(list(_plan_rows(plan)))
    yield f"note: {_NOT_COUNTED if plan.compiled else _CAVEAT + ' ' + _NOT_COUNTED}"
    if plan.assumed is not None:
        yield f"note: {plan.assumed}; --vocab-size says otherwise."
    if plan.compiled is not None:
        yield from _program_notes(plan, plan.compiled)
    elif plan.dtype != "float32":
        yield f"note: XLA's plan for a CPU holds float32 copies of what is multiplied in {plan.dtype}: it is too high."
    if plan.time is not None and plan.time.expected is not None:
        yield from _expectation_note(plan)
    if plan.kernel is not None:
        yield (
            f"note: on {plan.devices.kind} attention is computed by {plan.kernel}, which keeps no scores; the plan "
            f"holds those of a few queries in its place."
        )
    if plan.attention_workspace:
        yield (
            f"note: {format_bytes(plan.attention_workspace)} of workspace are counted for the deterministic backward "
            f"pass of cuDNN's attention, which grows with the square of the row length; determinism: fast needs none."
        )


def _plan_rows(plan: RunPlan) -> Iterator[tuple[str, str]]:
    memory, work, time = plan.memory, plan.work, plan.time
    axes = ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    yield "devices", f"{plan.devices.count} x {plan.devices.kind}" + (f": {axes}" if axes else "")
    yield "model", f"{plan.num_params:,} parameters with a vocabulary of {plan.vocab_size:,}, in {plan.dtype}"
    if plan.parametrization != "standard":
        yield "parametrization", plan.parametrization
    yield "microbatch", f"{format_count(plan.rows, 'row')}, {format_count(plan.microbatches, 'microbatch')} in a step"
    if (together := plan.microbatches_per_gather) is not None:
        chosen = f"{format_count(together, 'microbatch')} of a device at a time"
        yield "gather of a layer", f"for {chosen}, which a run on these devices chooses by itself: all do not fit"
    yield "state, per device", ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.state.items())
    for phase in memory.phases:
        # Counters of steps and layers are too small to be listed.
        parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in phase.parts.items() if size >= _LEAST_BYTES)
        yield f"  {phase.name}", f"{format_bytes(phase.bytes)} = {parts}"
    yield "peak, per device", f"{format_bytes(memory.peak.bytes)} in {memory.peak.name}{_budget_verdict(plan)}"
    yield "largest microbatch", _describe_largest_microbatch(plan)
    yield "FLOPs", f"{work.flops_per_token:.3g} per token, {work.flops_per_step:.3g} per step, {work.flops:.3g} in all"
    if (ring := plan.ring) is not None:
        yield (
            "attention",
            f"ring of {ring.devices}: {ring.share:.1%} of all pairs computed, which leaves "
            f"{ring.computed_flops_per_token:.3g} FLOPs per token; {format_bytes(ring.buffers)} of keys and values",
        )
    yield "tokens", f"{work.tokens_per_step:,} per step, {work.tokens:,} in {format_count(work.steps, 'step')}"
    if time is None:
        yield "time", f"n/a: no datasheet figure for {plan.dtype} on {plan.devices.kind!r}"
    else:
        if time.expected is None:
            yield "step time", f"{time.step_seconds:.3g} s at an assumed MFU of {time.mfu:.0%}"
        else:
            yield "expected", _describe_expectation(time, time.expected)
        if (checks := time.checks) is not None:
            once = f"{format_duration(checks.seconds)} once in {format_count(checks.every, 'step')}"
            yield "hardware checks", f"{once}, {checks.share:.2%} of the time"
        if time.bound_seconds is not None:
            at_bound = time.mfu * time.step_seconds / time.bound_seconds
            yield "bound", f"{time.bound_seconds:.3g} s a step by the datasheet, {at_bound:.0%} MFU"
        if (least := _unreachable_time_warning(plan)) is not None:
            yield "  not to be had", least
        yield "time", f"{format_duration(time.seconds)}, {time.device_hours:,.4g} device hours"
    if time is not None and time.cost is not None:
        yield "cost", f"{time.cost:,.2f}" if time.cost >= 0.01 else f"{time.cost:.2g}"
    if plan.compiled is not None:
        yield from _program_rows(plan.compiled)


def _describe_expectation(time: RunTime, cost: StepCost) -> str:
    """Returns the expected time of a step, and the share of its parts."""
    network = cost.network - cost.hidden
    names = {"products": cost.compute, "attention": cost.attention, "recomputation": cost.recompute,
             "memory": cost.memory, "network": network, "idle": cost.idle}  # fmt: skip
    parts = ", ".join(f"{name} {share:.0%}" for name, part in names.items() if (share := part / cost.seconds) >= 0.005)
    return (
        f"{time.step_seconds:.3g} s a step, {time.mfu:.0%} MFU, {time.tokens_per_second_per_device:,.0f} tokens/s a "
        f"device, with {parts}"
    )


_LEAST_BYTES = 1024
"""Minimum size in bytes at which a part of a phase is listed."""
_LEAST_SECONDS = 1e-3
"""Lower bound of the time of a microbatch: it launches several hundred kernels, at about 5 microseconds each."""


def _unreachable_time_warning(plan: RunPlan) -> str | None:
    """Returns a warning if no device can reach the expected time with so little work."""
    assert plan.time is not None
    rounds = -(-plan.microbatches // plan.devices.count)
    if plan.compiled is not None or plan.time.step_seconds >= rounds * _LEAST_SECONDS:
        return None
    return (
        f"{plan.devices.count} x {plan.devices.kind} cannot keep busy with so small a model: launching its kernels "
        f"takes at least {rounds * _LEAST_SECONDS:.3g} s a step; take fewer devices, or a lower --mfu"
    )


def _program_rows(compiled: CompiledStep) -> Iterator[tuple[str, str]]:
    """Yields rows with the programs of a step on one device, and their times."""
    for work in compiled.programs:
        parts = [
            f"{work.flops:.3g} FLOPs" if work.flops else "",
            f"{format_bytes(round(work.num_bytes))} read and written",
        ]
        parts += [f"{name} of {format_bytes(round(size))}" for name, size in work.sent.items() if size]
        if work.sent_to_nodes:
            parts.append(f"{format_bytes(round(work.sent_to_nodes))} of it to other nodes")
        parts += [f"{count} x {name}" for name, count in work.kernels.items()]
        yield f"  {work.name}", f"{work.runs} x " + ", ".join(filter(None, parts))
    if (time := compiled.time) is not None:
        yield (
            "by the programs",
            f"{time.lower_bound:.3g} to {time.upper_bound:.3g} s a step, bound by {time.bound_by}: "
            f"MFU of {time.mfu(time.upper_bound):.0%} to {time.mfu(time.lower_bound):.0%}",
        )


def _program_notes(plan: RunPlan, compiled: CompiledStep) -> Iterator[str]:
    if compiled.time is not None:
        yield (
            "note: The time by the programs is that of their products, their memory traffic and what they send, by the "
            "datasheet: from all of it at once to one after another, and either at its limit. Attention kernels count "
            "with the blocks that they compute; transfers with the links that they take inside a node, between nodes "
            "or through a slice. Real kernels and links reach less than their datasheet."
        )
    if (advice := all_gather_advice(plan.devices, plan.mesh, compiled.programs)) is not None:
        yield f"note: {advice}"


def _expectation_note(plan: RunPlan) -> Iterator[str]:
    efficiency = device_efficiency(plan.devices.kind)
    if efficiency is not None:
        yield (
            f"note: The expected time counts products at {efficiency.products:.0%} of the datasheet, memory at "
            f"{efficiency.memory:.0%} and links at {efficiency.links:.0%}, as microbenchmarks reach; the host's work "
            f"is not counted. docs/how-to/plan-a-run.md compares it with published runs."
        )


def _budget_verdict(plan: RunPlan) -> str:
    if plan.budget is None:
        return ""
    budget = f"{format_bytes(plan.budget.bytes)} ({plan.budget.origin})"
    if _is_within_budget(plan):
        return f": fits in {budget}"
    return f": {DOES_NOT_FIT} in {budget}, by {format_bytes(plan.memory.peak.bytes - plan.budget.bytes)}"


def _describe_largest_microbatch(plan: RunPlan) -> str:
    if plan.compiled is not None:
        return "not looked for with --compile: each size would take minutes"
    if plan.fit is None:
        return f"n/a: how much memory {plan.devices.kind!r} has is not known; give --memory"
    fit = plan.fit
    next_rows = fit.next_rows if fit.next_rows is not None and fit.next_rows > plan.rows else None
    above = (
        ""
        if next_rows is None
        else f"; {format_count(next_rows, 'row')} would take {format_bytes(fit.next_bytes or 0)}"
    )
    # With a batch schedule, the number of rows may differ between steps, which the key cannot express.
    if _is_within_budget(plan) and (fit.rows is None or fit.rows <= plan.rows):
        return f"{format_count(plan.rows, 'row')}, as it is{above}"
    if fit.rows is None:
        rows = format_count(fit.least_rows, "row") + (
            "" if fit.together is None else f" and {format_count(fit.together, 'microbatch')} at a time"
        )
        return f"none: the least that a step takes is {format_bytes(fit.bytes)}, with {rows}; {_memory_advice(plan)}"
    gather_setting = "" if fit.together is None else f" trainer.microbatches_per_gather={fit.together}"
    if gather_setting and fit.rows == plan.rows:
        rows = f"{format_count(plan.rows, 'row')}, as it is"
        return f"{rows}, {format_bytes(fit.bytes)} with{gather_setting} (the same numbers)"
    above = (
        ""
        if fit.next_rows is None
        else f"; {format_count(fit.next_rows, 'row')} would take {format_bytes(fit.next_bytes or 0)}"
    )
    changes = " (changes the numbers of the run)" if plan.gather != "auto" else ""
    settings = f"trainer.per_device_parallelism={fit.rows}{gather_setting}"
    return f"{format_count(fit.rows, 'row')}, {format_bytes(fit.bytes)}{above}: {settings}{changes}"


def _is_within_budget(plan: RunPlan) -> bool:
    return plan.budget is not None and plan.memory.peak.bytes <= plan.budget.bytes


def _memory_advice(plan: RunPlan) -> str:
    """Returns advice that addresses the largest part of the peak."""
    tensor = "trainer.model_axis_size with trainer.tensor_parallel_axes"
    if plan.gather == "model":
        return (
            f"parameters and gradients are whole on every device while a microbatch is computed: compute layer by "
            f"layer with trainer.gather=layer, or cut the model by {tensor}"
        )
    if plan.gather == "layer":
        count = plan.devices.count
        half = 1 << (count.bit_length() - 1)
        fewer = "" if count == half else f"use {half} of them, since the state is cut over a power of two alone, "
        return f"{fewer}use more devices, or cut the model by {tensor}"
    return f"use more devices, cut the model by {tensor}, or recompute more (model.gradient_checkpointing)"


def align_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligns rows that have the same number of cells into columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def format_count(number: int, noun: str) -> str:
    """Formats a number and a noun: `1 row`, `2 rows`, `2 microbatches`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def format_duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else format_long_duration(seconds)


def format_bytes(count: int) -> str:
    """Formats a number of bytes in binary units: `1.50 GiB`."""
    for unit in ("GiB", "MiB", "KiB"):
        scale = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}[unit]
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count} B"
