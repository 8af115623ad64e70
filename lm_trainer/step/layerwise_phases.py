"""The phases of a gradient that is computed layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from lm_trainer.parallel.dispatch_threads import programs_at_once
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.step.executable import Executable
from lm_trainer.step.layerwise_model import LAYERS_AT_ONCE, Parts
from lm_trainer.step.microbatch_plan import MicrobatchPlan
from lm_trainer.step.part import Part
from lm_trainer.step.phases import Phase, Size, StepProgram

_GATHERED, _STREAMS, _OF_PART = "gathered layers", "activations of layers", "gradients of a layer"


def layerwise_phases(
    parts: Parts,
    compiled: Callable[[str], Executable],
    plan: MicrobatchPlan,
    platform: str,
    sums: str,
    prefix: str = "",
) -> Iterator[Phase]:
    """Describes `LayerwiseSum.__call__`, program by program; a change of one needs a change of the other.

    Args:
        parts: of the loss.
        compiled: the executable of a microbatch, by its name.
        plan: of the batch.
        platform: on which the step is to run.
        sums: name of the gradients at rest.
        prefix: of the names of programs, which tells those of one loss from those of another.
    """
    devices = parts.devices
    mesh, shares = devices.sharding.mesh, devices.shares(plan)
    together, turns, shards = shares.most, plan.count // shares.count, batch_shards(mesh)
    running = min(programs_at_once(platform, shards, mesh.size // shards), together)
    reductions = _reductions(parts, prefix, shares)
    everything = Size(tuple(term for reduction in reductions.values() for term in reduction.outputs.terms))

    def program(name: str) -> StepProgram:
        return StepProgram(f"{prefix}{name}", partial(compiled, name), grows=True)

    def gather(name: str, part: Part, at_once: int = 1) -> Phase:
        step, runs = StepProgram(f"{prefix}gather {name}", part.gathering), turns * parts.counts.get(name, 1)
        gathered = {_GATHERED: at_once * step.outputs}
        return Phase(step.name, step, adds=gathered, leaves=gathered, runs=runs)

    def forward(name: str) -> Phase:
        step, count = program(name), parts.counts.get(name, 1)
        streams = {_STREAMS: count * together * step.outputs}
        runs = count * turns * together
        return Phase(step.name, step, adds=streams, frees=(_GATHERED,), leaves=streams, at_once=running, runs=runs)

    def backward(name: str, part: Part) -> Iterator[Phase]:
        step, reduction, times = program(f"{name} gradient"), reductions[name], turns * parts.counts.get(name, 1)
        # What the reduction is given, beside the gradients at rest of all layers where it returns those.
        summed = reduction.arguments + (-1 if part.layered else 0) * reduction.outputs
        # Results of programs may have narrower values than partial sums.
        held = running * step.new + (shares.most_held - 1) * summed
        yield Phase(
            step.name,
            step,
            adds={_OF_PART: held},
            frees=(_GATHERED,),
            leaves={_OF_PART: summed},
            at_once=running,
            runs=times * together,
        )
        yield Phase(reduction.name, reduction, adds={sums: reduction.new}, frees=(_OF_PART,), runs=times)

    def backwards() -> Iterator[Phase]:
        yield gather("leave", parts.leave)
        yield from backward("leave", parts.leave)
        for name, part in reversed(places):
            yield gather(name, part, LAYERS_AT_ONCE)
            yield from backward(name, part)
        if parts.enter.trained:
            yield gather("enter", parts.enter)
            yield from backward("enter", parts.enter)

    places = [(f"layer {place}", part) for place, part in enumerate(parts.places)]
    first = gather("enter", parts.enter)
    # Sums of earlier turns wait for those of later ones; and the gradients of all layers are there from the start.
    kept = {sums: (Shares(turns, 1).most_held - 1) * everything + everything}
    yield replace(first, adds={**first.adds, **kept}, leaves={**first.leaves, **kept})
    yield forward("enter")
    for name, part in places:
        yield gather(name, part, LAYERS_AT_ONCE)
        yield forward(name)
    *most, last = backwards()
    yield from most
    yield replace(last, frees=(*last.frees, _STREAMS, sums), leaves={**last.leaves, sums: everything})


def _reductions(parts: Parts, prefix: str, shares: Shares) -> dict[str, StepProgram]:
    trained = {name: part for name, part in _named(parts).items() if part.trained}
    return {n: StepProgram(f"{prefix}reduce {n}", partial(part.reducing, shares)) for n, part in trained.items()}


def _named(parts: Parts) -> dict[str, Part]:
    layers = {f"layer {place}": part for place, part in enumerate(parts.places)}
    return {"enter": parts.enter, **layers, "leave": parts.leave}
