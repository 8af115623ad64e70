"""Formats the result of a layout search for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from lm_trainer.plan.search import MARGIN, Candidate, Search
from lm_trainer.plan.table import align_columns, format_bytes, format_count
from lm_trainer.run.build.model import can_save_inside_layers

_GATHERS = {"model": "gathers the model", "layer": "gathers each layer", "auto": "fast"}
_RECOMPUTED = {"full": "recomputes layers", "dots_no_batch": "recomputes all but products", "none": "keeps everything"}


def search_lines(search: Search) -> Iterator[str]:
    """Yields the lines of a search result: the ranking, and the settings of the fastest layout for `lmt train`."""
    group, compiled = search.devices, any(candidate.compiled is not None for candidate in search.ranked)
    yield f"devices   {group.count} x {group.kind}{_budget_text(search, compiled)}"
    yield f"searched  {search.considered:,} layouts by the cost model" + (
        f", of which {len(search.ranked) + len(search.rejected)} were compiled" if compiled or search.rejected else ""
    )
    if search.ranked:
        rows = [(str(rank), *_candidate_row(search, candidate)) for rank, candidate in enumerate(search.ranked, 1)]
        yield from align_columns([("", "step", "tokens/s", "memory", "numbers", "layout"), *rows])
    for candidate in search.rejected:
        reason = (
            candidate.refused
            or f"takes {format_bytes(candidate.memory.bytes)} by the compiler, in {candidate.memory.name}"
        )
        yield f"left out: {_format_layout(candidate)}: {reason}"
    if search.ranked:
        yield from _settings_lines("fastest", search.ranked[0])
    else:
        yield from _no_fit_lines(search)
    same_numbers = search.same_numbers
    if same_numbers is not None and search.ranked and search.ranked[0].layout.changes:
        yield from _settings_lines(
            f"fastest with the same numbers, {_format_time(same_numbers)} and "
            f"{format_bytes(same_numbers.memory.bytes)}",
            same_numbers,
        )
    yield from _note_lines(search, compiled)


def _budget_text(search: Search, compiled: bool) -> str:
    if search.budget is None:
        return ", whose memory is not known; give --memory"
    left = "" if compiled else f", of which an estimate leaves {MARGIN:.0%} free"
    return f", {format_bytes(search.budget.bytes)} each ({search.budget.origin}){left}"


def _candidate_row(search: Search, candidate: Candidate) -> tuple[str, ...]:
    numbers = "others" if candidate.layout.changes else "the same"
    rate = f"{search.tokens_per_step / candidate.seconds:,.0f}"
    return _format_time(candidate), rate, format_bytes(candidate.memory.bytes), numbers, _format_layout(candidate)


def _format_time(candidate: Candidate) -> str:
    if candidate.interval is None:
        return f"{candidate.seconds:.3g} s"
    lower, upper = candidate.interval
    return f"{lower:.3g} to {upper:.3g} s"


def _format_layout(candidate: Candidate) -> str:
    trainer, model, plan = candidate.layout.config.trainer, candidate.layout.config.model, candidate.layout.plan
    axes = ", ".join(f"{axis} {size}" for axis, size in candidate.mesh.items()) or "one device"
    parts = [
        axes,
        f"{format_count(plan.count, 'microbatch')} of {format_count(plan.rows, 'row')}",
        _GATHERS[trainer.gather],
    ]
    if trainer.gathers_layers:
        group = trainer.microbatches_per_gather
        parts.append("one gather for all" if group is None else f"one gather for {group}")
    if trainer.gathers_layers and not can_save_inside_layers(trainer):
        parts.append(_RECOMPUTED["full"])
    else:
        parts.append(_RECOMPUTED.get(model.remat if isinstance(model.remat, str) else "", "recomputes as configured"))
    return "; ".join([*parts, f"attention {model.attn_backend or 'auto'}"])


def _settings_lines(title: str, candidate: Candidate) -> Iterator[str]:
    if not candidate.layout.overrides:
        yield f"{title}: the configuration as it is"
        return
    changes = ", ".join(candidate.layout.changes)
    yield f"{title}; {f'changes the numbers of the run, by {changes}' if changes else 'the numbers stay the same'}:"
    yield from (f"  {setting}" for setting in candidate.layout.overrides)


def _no_fit_lines(search: Search) -> Iterator[str]:
    nearest = search.nearest
    assert nearest is not None
    if nearest.limit is None or nearest.refused is not None:
        yield "no layout can be compiled"
        return
    parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in nearest.memory.parts.items() if size)
    missing = format_bytes(nearest.memory.bytes - nearest.limit)
    yield (
        f"NO LAYOUT FITS: the nearest takes {format_bytes(nearest.memory.bytes)}, {missing} more than the "
        f"{format_bytes(nearest.limit)} that it may, in {nearest.memory.name} = {parts}; use more devices, or larger "
        f"ones"
    )
    yield from _settings_lines("nearest", nearest)


def _note_lines(search: Search, compiled: bool) -> Iterator[str]:
    if compiled:
        yield (
            "note: A step lies between the two times if products, memory and links reach their datasheet: all of it at "
            "once, or one after another. Layouts are ordered by the geometric mean."
        )
    elif search.ranked:
        yield (
            "note: Nothing was compiled. Times are expected by formula: products, attention, what is computed again, "
            "memory traffic and what devices send, at the efficiencies of microbenchmarks. --compile compiles the best "
            "few."
        )
