"""The phases of a gradient that is computed layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from lm_trainer.parallel.dispatch_threads import programs_at_once
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.ordered_sum import most_held
from lm_trainer.step.executable import Executable
from lm_trainer.step.layerwise_model import LAYERS_AT_ONCE, Parts
from lm_trainer.step.microbatch_plan import MicrobatchPlan
from lm_trainer.step.part import Part
from lm_trainer.step.phases import Phase, Size, StepProgram

_GATHERED, _STREAMS, _OF_PART = "gathered layers", "activations between layers", "gradients of a layer"


def layerwise_phases(
    parts: Parts, compiled: Callable[[str], Executable], plan: MicrobatchPlan, platform: str, sums: str
) -> Iterator[Phase]:
    """Describes `LayerwiseSum.__call__`, program by program; a change of one needs a change of the other.

    Args:
        parts: of the loss.
        compiled: the executable of a microbatch, by its name.
        plan: of the batch.
        platform: on which the step is to run.
        sums: name of the gradients at rest.
    """
    devices = parts.devices
    mesh, together = devices.sharding.mesh, devices.together(plan)
    turns, shards = plan.per_shard(mesh) // together, batch_shards(mesh)
    running = min(programs_at_once(platform, shards, mesh.size // shards), together)
    # Each program under way beside the first holds a result that no partial sum has yet.
    held = most_held(together) + running - 1
    reductions = {name: _reduction(name, part) for name, part in _named(parts).items() if part.trained}
    everything = Size(tuple(term for reduction in reductions.values() for term in reduction.outputs.terms))

    def program(name: str) -> StepProgram:
        return StepProgram(name, partial(compiled, name), grows=True)

    def gather(name: str, part: Part, count: int = 1) -> Phase:
        step = StepProgram(f"gather {name}", part.gathering)
        return Phase(
            f"gather {name}", step, adds={_GATHERED: count * step.outputs}, leaves={_GATHERED: count * step.outputs}
        )

    def forward(name: str, count: int) -> Phase:
        step = program(name)
        streams = {_STREAMS: count * together * step.outputs}
        return Phase(name, step, adds=streams, frees=(_GATHERED,), leaves=streams, at_once=running)

    def backward(name: str, frees: tuple[str, ...] = ()) -> Iterator[Phase]:
        step, reduction = program(f"{name} gradient"), reductions[name]
        yield Phase(
            step.name,
            step,
            adds={_OF_PART: held * step.new},
            frees=(_GATHERED,),
            leaves={_OF_PART: step.new},
            at_once=running,
        )
        yield Phase(reduction.name, reduction, adds={sums: reduction.new}, frees=(_OF_PART, *frees))

    places = [(f"layer {place}", part) for place, part in enumerate(parts.places)]
    counts = [len(range(place, parts.num_layers, parts.period)) for place in range(parts.period)]
    first = gather("enter", parts.enter)
    # Sums of earlier turns wait for those of later ones; and the gradients of all layers are there from the start.
    kept = {sums: (most_held(turns) - 1) * everything + everything}
    yield Phase(first.name, first.program, adds={**first.adds, **kept}, leaves={**first.leaves, **kept})
    yield forward("enter", 1)
    for (name, part), count in zip(places, counts, strict=True):
        yield gather(name, part, LAYERS_AT_ONCE)
        yield forward(name, count)
    yield gather("leave", parts.leave)
    yield from backward("leave")
    for name, part in reversed(places):
        yield gather(name, part, LAYERS_AT_ONCE)
        yield from backward(name, (_STREAMS,) if name == places[0][0] and not parts.enter.trained else ())
    if parts.enter.trained:
        yield gather("enter", parts.enter)
        yield from backward("enter", (_STREAMS,))


def _named(parts: Parts) -> dict[str, Part]:
    layers = {f"layer {place}": part for place, part in enumerate(parts.places)}
    return {"enter": parts.enter, **layers, "leave": parts.leave}


def _reduction(name: str, part: Part) -> StepProgram:
    return StepProgram(f"reduce {name}", part.reducing)
