"""The phases of a gradient that is computed stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from jax.sharding import AbstractMesh, Mesh

from lm_trainer.parallel.dispatch_threads import programs_at_once
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.phases import Phase, Size, StepProgram
from lm_trainer.step.staged.stage import Stage
from lm_trainer.step.staged.stages import LAYERS_AT_ONCE, Stages

_GATHERED, _STREAMS, _OF_STAGE = "gathered layers", "activations of layers", "gradients of a layer"
WHOLE = "gathered parameters"
"""The parameters of all of a model, which one stage is given."""


def programs_and_results(shares: Shares, mesh: Mesh | AbstractMesh, platform: str) -> tuple[int, int]:
    """The programs that a device runs at once, and the results of theirs that it holds at once, sums included.

    Args:
        shares: of the devices in what they compute before they add it up.
        mesh: of the devices.
        platform: of the devices.
    """
    shards = batch_shards(mesh)
    running = min(programs_at_once(platform, shards, mesh.size // shards), shares.most)
    # Each program under way beside the first holds a result that no partial sum has yet.
    return running, shares.most_held + running - 1


def staged_phases(
    stages: Stages,
    compiled: Callable[[str], Executable],
    plan: MicrobatchPlan,
    platform: str,
    sums: str,
    prefix: str = "",
) -> Iterator[Phase]:
    """Describes `StagedSum.__call__`, program by program; a change of one needs a change of the other.

    Args:
        stages: of the loss.
        compiled: the executable of a microbatch, by its name.
        plan: of the batch.
        platform: on which the step is to run.
        sums: name of the gradients at rest.
        prefix: of the names of programs, which tells those of one loss from those of another.
    """
    describe = _one_stage if len(stages.kinds) == 1 else _several_stages
    return describe(stages, compiled, plan, platform, sums, prefix)


def _one_stage(
    stages: Stages,
    compiled: Callable[[str], Executable],
    plan: MicrobatchPlan,
    platform: str,
    sums: str,
    prefix: str,
) -> Iterator[Phase]:
    """The parameters are gathered before: see `gathering`."""
    del prefix
    mesh, shares, name = stages.devices.sharding.mesh, stages.devices.shares(plan), stages.last.functions.name
    running, held = programs_and_results(shares, mesh, platform)
    program = StepProgram(name, partial(compiled, name), grows=True)
    reduction = StepProgram("reduction", partial(stages.last.reducing, shares))
    groups = plan.count // shares.count
    # Sums of earlier groups of microbatches wait for those of later ones.
    waiting = (Shares(groups, 1).most_held - 1) * reduction.outputs if groups > 1 else Size(())
    yield Phase(
        name,
        program,
        adds={sums: held * program.outputs + waiting},
        leaves={sums: reduction.arguments + waiting},
        at_once=running,
        runs=groups * shares.most,
    )
    yield Phase(
        "reduction",
        reduction,
        adds={sums: reduction.new},
        frees=(sums,),
        leaves={sums: reduction.outputs},
        runs=groups,
    )


def gathering(stages: Stages) -> Iterator[Phase]:
    """The phase in which the parameters of one stage alone are gathered, where they are; `WHOLE` is what it leaves."""
    if len(stages.kinds) == 1 and stages.last.gathers:
        gather = StepProgram("gather", stages.last.gathering)
        yield Phase("gather", gather, adds={WHOLE: gather.outputs}, leaves={WHOLE: gather.outputs})


def _several_stages(
    stages: Stages,
    compiled: Callable[[str], Executable],
    plan: MicrobatchPlan,
    platform: str,
    sums: str,
    prefix: str,
) -> Iterator[Phase]:
    devices, counts = stages.devices, {k.functions.name: len(k.functions.layers or (0,)) for k in stages.kinds}
    mesh, shares = devices.sharding.mesh, devices.shares(plan)
    together, groups, shards = shares.most, plan.count // shares.count, batch_shards(mesh)
    running = min(programs_at_once(platform, shards, mesh.size // shards), together)
    reductions = _reductions(stages, prefix, shares)
    everything = Size(tuple(term for reduction in reductions.values() for term in reduction.outputs.terms))

    def program(name: str) -> StepProgram:
        return StepProgram(f"{prefix}{name}", partial(compiled, name), grows=True)

    def gather(kind: Stage) -> Iterator[Phase]:
        name = kind.functions.name
        if kind.gathers:
            step = StepProgram(f"{prefix}gather {name}", kind.gathering)
            gathered = {_GATHERED: (LAYERS_AT_ONCE if kind.layered else 1) * step.outputs}
            yield Phase(step.name, step, adds=gathered, leaves=gathered, runs=groups * counts[name])

    def forward(kind: Stage) -> Iterator[Phase]:
        yield from gather(kind)
        step, count = program(kind.functions.name), counts[kind.functions.name]
        streams = {_STREAMS: count * together * step.outputs}
        runs = count * groups * together
        yield Phase(step.name, step, adds=streams, frees=(_GATHERED,), leaves=streams, at_once=running, runs=runs)

    def backward(kind: Stage) -> Iterator[Phase]:
        name = kind.functions.name
        yield from gather(kind)
        step, reduction, times = program(f"{name} gradient"), reductions[name], groups * counts[name]
        # What the reduction is given, beside the gradients at rest of all layers where it returns those.
        summed = reduction.arguments + (-1 if kind.layered else 0) * reduction.outputs
        # Results of programs may have narrower values than partial sums.
        held = running * step.new + (shares.most_held - 1) * summed
        yield Phase(
            step.name,
            step,
            adds={_OF_STAGE: held},
            frees=(_GATHERED,),
            leaves={_OF_STAGE: summed},
            at_once=running,
            runs=times * together,
        )
        yield Phase(reduction.name, reduction, adds={sums: reduction.new}, frees=(_OF_STAGE,), runs=times)

    *most, last = stages.kinds
    steps = [phase for kind in most for phase in forward(kind)]
    steps += [phase for kind in (last, *reversed(most)) if _needs(kind, stages) for phase in backward(kind)]
    # Sums of earlier groups wait for those of later ones; and the gradients of all layers are there from the start.
    kept = {sums: (Shares(groups, 1).most_held - 1) * everything + everything}
    steps[0] = replace(steps[0], adds={**steps[0].adds, **kept}, leaves={**steps[0].leaves, **kept})
    steps[-1] = replace(
        steps[-1], frees=(*steps[-1].frees, _STREAMS, sums), leaves={**steps[-1].leaves, sums: everything}
    )
    yield from steps


def _reductions(stages: Stages, prefix: str, shares: Shares) -> dict[str, StepProgram]:
    needed = {kind.functions.name: kind for kind in stages.kinds if _needs(kind, stages)}
    return {n: StepProgram(f"{prefix}reduce {n}", partial(kind.reducing, shares)) for n, kind in needed.items()}


def _needs(kind: Stage, stages: Stages) -> bool:
    """Tells whether a stage has a derivative: for its parameters, or for what enters it."""
    return bool(kind.trained) or kind is not stages.kinds[0]
