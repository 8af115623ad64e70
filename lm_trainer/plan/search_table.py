"""A search for layouts for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from lm_trainer.plan.search import MARGIN, Candidate, Search
from lm_trainer.plan.table import columns, count_of, size_of
from lm_trainer.run.build.model import keeps_inside_layers

_GATHERS = {"model": "gathers the model", "layer": "gathers each layer", "auto": "fast"}
_RECOMPUTED = {"full": "recomputes layers", "dots_no_batch": "recomputes all but products", "none": "keeps everything"}


def search_lines(found: Search) -> Iterator[str]:
    """Lines of a search: the ranking, and the settings of the fastest layout as `lmt train` takes them."""
    group, compiled = found.devices, any(each.compiled is not None for each in found.ranked)
    yield f"devices   {group.count} x {group.kind}{_room(found, compiled)}"
    yield f"searched  {found.considered:,} layouts by the cost model" + (
        f", of which {len(found.ranked) + len(found.rejected)} were compiled" if compiled or found.rejected else ""
    )
    if found.ranked:
        rows = [(str(place), *_row(found, each)) for place, each in enumerate(found.ranked, 1)]
        yield from columns([("", "step", "tokens/s", "memory", "numbers", "layout"), *rows])
    for each in found.rejected:
        why = each.refused or f"takes {size_of(each.memory.bytes)} by the compiler, in {each.memory.name}"
        yield f"left out: {_layout(each)}: {why}"
    if found.ranked:
        yield from _settings("fastest", found.ranked[0])
    else:
        yield from _nothing_fits(found)
    same = found.same_numbers
    if same is not None and found.ranked and found.ranked[0].layout.changes:
        yield from _settings(f"fastest with the same numbers, {_time(same)} and {size_of(same.memory.bytes)}", same)
    yield from _notes(found, compiled)


def _room(found: Search, compiled: bool) -> str:
    if found.budget is None:
        return ", whose memory is not known; give --memory"
    left = "" if compiled else f", of which an estimate leaves {MARGIN:.0%} free"
    return f", {size_of(found.budget.bytes)} each ({found.budget.origin}){left}"


def _row(found: Search, each: Candidate) -> tuple[str, ...]:
    numbers = "others" if each.layout.changes else "the same"
    rate = f"{found.tokens_per_step / each.seconds:,.0f}"
    return _time(each), rate, size_of(each.memory.bytes), numbers, _layout(each)


def _time(each: Candidate) -> str:
    if each.interval is None:
        return f"{each.seconds:.3g} s"
    least, most = each.interval
    return f"{least:.3g} to {most:.3g} s"


def _layout(each: Candidate) -> str:
    trainer, model, plan = each.layout.config.trainer, each.layout.config.model, each.layout.plan
    axes = ", ".join(f"{axis} {size}" for axis, size in each.mesh.items()) or "one device"
    parts = [axes, f"{count_of(plan.count, 'microbatch')} of {count_of(plan.rows, 'row')}", _GATHERS[trainer.gather]]
    if trainer.gathers_layers:
        together = trainer.microbatches_per_gather
        parts.append("one gather for all" if together is None else f"one gather for {together}")
    if trainer.gathers_layers and not keeps_inside_layers(trainer):
        parts.append(_RECOMPUTED["full"])
    else:
        parts.append(_RECOMPUTED.get(model.remat if isinstance(model.remat, str) else "", "recomputes as configured"))
    return "; ".join([*parts, f"attention {model.attn_backend or 'auto'}"])


def _settings(what: str, each: Candidate) -> Iterator[str]:
    if not each.layout.overrides:
        yield f"{what}: the configuration as it is"
        return
    changes = ", ".join(each.layout.changes)
    yield f"{what}; {f'changes the numbers of the run, by {changes}' if changes else 'the numbers stay the same'}:"
    yield from (f"  {setting}" for setting in each.layout.overrides)


def _nothing_fits(found: Search) -> Iterator[str]:
    each = found.nearest
    assert each is not None
    if each.limit is None or each.refused is not None:
        yield "no layout can be compiled"
        return
    parts = " + ".join(f"{name} {size_of(size)}" for name, size in each.memory.parts.items() if size)
    missing = size_of(each.memory.bytes - each.limit)
    yield (
        f"NO LAYOUT FITS: the nearest takes {size_of(each.memory.bytes)}, {missing} more than the "
        f"{size_of(each.limit)} that it may, in {each.memory.name} = {parts}; use more devices, or larger ones"
    )
    yield from _settings("nearest", each)


def _notes(found: Search, compiled: bool) -> Iterator[str]:
    if compiled:
        yield (
            "note: A step lies between the two times if products, memory and links reach their datasheet: all of it at "
            "once, or one after another. Layouts are ordered by the geometric mean."
        )
    elif found.ranked:
        yield (
            "note: Nothing was compiled. Times order layouts: products at the assumed MFU, what is computed again, "
            "memory traffic and what devices send, one after another. --compile compiles the best few."
        )
