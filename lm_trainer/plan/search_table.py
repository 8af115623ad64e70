"""Formats the result of a layout search for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from lm_trainer.plan.search import MARGIN, Candidate, Search
from lm_trainer.plan.table import columns, count_of, size_of
from lm_trainer.run.build.model import can_save_inside_layers

_GATHERS = {"model": "gathers the model", "layer": "gathers each layer", "auto": "fast"}
_RECOMPUTED = {"full": "recomputes layers", "dots_no_batch": "recomputes all but products", "none": "keeps everything"}


def search_lines(search: Search) -> Iterator[str]:
    """Lines of a search result: the ranking, and the settings of the fastest layout for `lmt train`."""
    group, compiled = search.devices, any(candidate.compiled is not None for candidate in search.ranked)
    yield f"devices   {group.count} x {group.kind}{_room(search, compiled)}"
    yield f"searched  {search.considered:,} layouts by the cost model" + (
        f", of which {len(search.ranked) + len(search.rejected)} were compiled" if compiled or search.rejected else ""
    )
    if search.ranked:
        rows = [(str(rank), *_row(search, candidate)) for rank, candidate in enumerate(search.ranked, 1)]
        yield from columns([("", "step", "tokens/s", "memory", "numbers", "layout"), *rows])
    for candidate in search.rejected:
        reason = (
            candidate.refused or f"takes {size_of(candidate.memory.bytes)} by the compiler, in {candidate.memory.name}"
        )
        yield f"left out: {_layout(candidate)}: {reason}"
    if search.ranked:
        yield from _settings("fastest", search.ranked[0])
    else:
        yield from _nothing_fits(search)
    same_numbers = search.same_numbers
    if same_numbers is not None and search.ranked and search.ranked[0].layout.changes:
        yield from _settings(
            f"fastest with the same numbers, {_time(same_numbers)} and {size_of(same_numbers.memory.bytes)}",
            same_numbers,
        )
    yield from _notes(search, compiled)


def _room(search: Search, compiled: bool) -> str:
    if search.budget is None:
        return ", whose memory is not known; give --memory"
    left = "" if compiled else f", of which an estimate leaves {MARGIN:.0%} free"
    return f", {size_of(search.budget.bytes)} each ({search.budget.origin}){left}"


def _row(search: Search, candidate: Candidate) -> tuple[str, ...]:
    numbers = "others" if candidate.layout.changes else "the same"
    rate = f"{search.tokens_per_step / candidate.seconds:,.0f}"
    return _time(candidate), rate, size_of(candidate.memory.bytes), numbers, _layout(candidate)


def _time(candidate: Candidate) -> str:
    if candidate.interval is None:
        return f"{candidate.seconds:.3g} s"
    lower, upper = candidate.interval
    return f"{lower:.3g} to {upper:.3g} s"


def _layout(candidate: Candidate) -> str:
    trainer, model, plan = candidate.layout.config.trainer, candidate.layout.config.model, candidate.layout.plan
    axes = ", ".join(f"{axis} {size}" for axis, size in candidate.mesh.items()) or "one device"
    parts = [axes, f"{count_of(plan.count, 'microbatch')} of {count_of(plan.rows, 'row')}", _GATHERS[trainer.gather]]
    if trainer.gathers_layers:
        group = trainer.microbatches_per_gather
        parts.append("one gather for all" if group is None else f"one gather for {group}")
    if trainer.gathers_layers and not can_save_inside_layers(trainer):
        parts.append(_RECOMPUTED["full"])
    else:
        parts.append(_RECOMPUTED.get(model.remat if isinstance(model.remat, str) else "", "recomputes as configured"))
    return "; ".join([*parts, f"attention {model.attn_backend or 'auto'}"])


def _settings(title: str, candidate: Candidate) -> Iterator[str]:
    if not candidate.layout.overrides:
        yield f"{title}: the configuration as it is"
        return
    changes = ", ".join(candidate.layout.changes)
    yield f"{title}; {f'changes the numbers of the run, by {changes}' if changes else 'the numbers stay the same'}:"
    yield from (f"  {setting}" for setting in candidate.layout.overrides)


def _nothing_fits(search: Search) -> Iterator[str]:
    nearest = search.nearest
    assert nearest is not None
    if nearest.limit is None or nearest.refused is not None:
        yield "no layout can be compiled"
        return
    parts = " + ".join(f"{name} {size_of(size)}" for name, size in nearest.memory.parts.items() if size)
    missing = size_of(nearest.memory.bytes - nearest.limit)
    yield (
        f"NO LAYOUT FITS: the nearest takes {size_of(nearest.memory.bytes)}, {missing} more than the "
        f"{size_of(nearest.limit)} that it may, in {nearest.memory.name} = {parts}; use more devices, or larger ones"
    )
    yield from _settings("nearest", nearest)


def _notes(search: Search, compiled: bool) -> Iterator[str]:
    if compiled:
        yield (
            "note: A step lies between the two times if products, memory and links reach their datasheet: all of it at "
            "once, or one after another. Layouts are ordered by the geometric mean."
        )
    elif search.ranked:
        yield (
            "note: Nothing was compiled. Times order layouts: products at the assumed MFU, what is computed again, "
            "memory traffic and what devices send, one after another. --compile compiles the best few."
        )
