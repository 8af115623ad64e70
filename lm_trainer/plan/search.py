"""The fastest layout of a run that fits on some devices: by a cost model, and by the devices' own compiler."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jax.sharding import NamedSharding

from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.plan.cost import training_peak
from lm_trainer.plan.devices import Budget, DeviceGroup, budget
from lm_trainer.plan.estimate import Traces, estimate_step, estimate_temporary
from lm_trainer.plan.layouts import Layout, layouts
from lm_trainer.plan.run import Assumptions, attention_backend
from lm_trainer.plan.speed import Machine, StepCost, Work, step_cost
from lm_trainer.profile.devices import device_bandwidths, device_platform
from lm_trainer.profile.flops import flops_per_token
from lm_trainer.run.build.model import trace_model
from lm_trainer.run.build.setup import shard_state
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.adapters import training_flops
from lm_trainer.run.weights.vocabulary import Vocabulary, find_vocabulary
from lm_trainer.step.dispatch.memory import PhaseBytes

MARGIN = 0.1
"""The part of the memory that an estimate leaves free, since it may be too low."""
SHOWN = 5
"""Layouts in a ranking."""


@dataclass(frozen=True)
class CompiledLayout:
    """The word of the devices' own compiler about a layout."""

    memory: PhaseBytes
    """The phase that takes most."""
    seconds: tuple[float, float] | None
    """The least and the most of a step; None where no datasheet has the figures."""

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> CompiledLayout:
        """Reads what `lmt plan --compile --json` prints."""
        peak = max(plan["memory"]["phases"], key=lambda phase: phase["bytes"])
        seconds = plan["compiled"].get("step_seconds")
        return cls(
            PhaseBytes(peak["name"], peak["parts"]), None if seconds is None else (seconds["least"], seconds["most"])
        )


Compile = Callable[[tuple[str, ...]], CompiledLayout]
"""Compiles the run with the overrides of a layout, for the devices of the search."""


@dataclass(frozen=True)
class Candidate:
    """A layout, and what it takes."""

    layout: Layout
    mesh: dict[str, int]
    """The axes that have more than one device."""
    cost: StepCost
    """By the cost model."""
    memory: PhaseBytes
    """The phase of a device that takes most: estimated, or with `compiled` the compiler's word."""
    limit: int | None
    """Bytes that it may take; None where nobody knows."""
    compiled: CompiledLayout | None = None
    """None where the devices' own compiler was not asked."""
    refused: str | None = None
    """The compiler's reason not to compile it."""

    @property
    def fits(self) -> bool:
        return self.refused is None and (self.limit is None or self.memory.bytes <= self.limit)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The least and the most seconds of a step by the compiled programs."""
        return None if self.compiled is None else self.compiled.seconds

    @property
    def seconds(self) -> float:
        """Seconds of a step: by the cost model, or the geometric mean of the bounds by the compiled programs."""
        return self.cost.seconds if self.interval is None else math.sqrt(math.prod(self.interval))


@dataclass(frozen=True)
class Search:
    """The layouts of a run on some devices, the fastest first."""

    devices: DeviceGroup
    budget: Budget | None
    tokens_per_step: int
    considered: int
    """Layouts that the model and the batch admit."""
    ranked: tuple[Candidate, ...]
    """The fastest that fits of each mesh and of what is gathered; with a compiler, those it compiled that fit."""
    same_numbers: Candidate | None
    """The fastest that fits and changes no bit of the run; it may stand in `ranked` as well."""
    nearest: Candidate | None
    """The one that takes least memory, where none fits."""
    rejected: tuple[Candidate, ...] = ()
    """Those that the cost model took to fit, and the compiler does not."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, in SI units."""
        return {
            "devices": asdict(self.devices),
            "budget": None if self.budget is None else asdict(self.budget),
            "tokens_per_step": self.tokens_per_step,
            "considered": self.considered,
            "ranked": [self._plain(each) for each in self.ranked],
            "same_numbers": None if self.same_numbers is None else self._plain(self.same_numbers),
            "nearest": None if self.nearest is None else self._plain(self.nearest),
            "rejected": [self._plain(each) for each in self.rejected],
        }

    def _plain(self, found: Candidate) -> dict[str, Any]:
        return {
            "overrides": list(found.layout.overrides),
            "changes_numbers": list(found.layout.changes),
            "mesh": found.mesh,
            "rows": found.layout.plan.rows,
            "microbatches": found.layout.plan.count,
            "step_seconds": found.seconds,
            "interval": found.interval,
            "tokens_per_second": self.tokens_per_step / found.seconds,
            "cost": asdict(found.cost),
            "memory": {"phase": found.memory.name, "bytes": found.memory.bytes, "parts": dict(found.memory.parts)},
            "fits": found.fits,
            "refused": found.refused,
        }


def search_layouts(
    config: RunConfig, group: DeviceGroup, assumptions: Assumptions, *, compile_best: tuple[int, Compile] | None = None
) -> Search:
    """Looks for the fastest layout of a run that fits on some devices.

    Every layout is priced by `lm_trainer.plan.speed`. In the order of that price their memory is estimated by
    `lm_trainer.plan.estimate`, until enough of them fit. No device need be there, and nothing is compiled unless
    `compile_best` says so.

    Args:
        config: of the run, with a whole model section; its data, batch, rows and optimizer stay as they are.
        group: the devices.
        assumptions: about them.
        compile_best: how many of the best layouts to compile, and how.

    Raises:
        UserError: for devices without figures in the tables, a model of several kinds of layers, or where no layout is
            admitted.
    """
    vocab_size, _ = Vocabulary(assumptions.vocab_size) if assumptions.vocab_size else find_vocabulary(config)
    machine = _machine(config, group, assumptions)
    limit = budget(group.kind, assumptions.memory)
    room = None if limit is None else int((1 - MARGIN) * limit.bytes)
    pricing = _Pricing(config, vocab_size, group, machine)
    priced = _price(pricing, layouts(config, vocab_size, group.count))
    if not priced:
        raise UserError(
            f"--search: {group.count} devices cannot share the batch of trainer.train_batch_size in any layout: use "
            f"fewer devices, or lower trainer.elastic_shards where it is set"
        )
    ranked, same, tried = _choose(priced, pricing, room)
    found = Search(
        devices=group,
        budget=limit,
        tokens_per_step=config.trainer.batch_schedule.at(0) * config.model.seq_len,
        considered=len(priced),
        ranked=tuple(ranked[:SHOWN]),
        same_numbers=same,
        nearest=None if ranked else _nearest(tried, pricing),
    )
    return found if compile_best is None else _compiled(found, *compile_best)


def _machine(config: RunConfig, group: DeviceGroup, assumptions: Assumptions) -> Machine:
    peak, bandwidths = training_peak(group.kind, config.trainer), device_bandwidths(group.kind)
    if peak is None or bandwidths is None:
        raise UserError(
            f"--search: no datasheet figure of FLOP/s for {config.trainer.mp.compute} or of bandwidths for "
            f"{group.kind!r}, by which layouts are compared; set trainer.mp=p=f32,c=bfloat16, or take another device"
        )
    return Machine(group.kind, peak.flops * assumptions.mfu, bandwidths)


class _Pricing:
    """Time and memory of layouts; what several of them share is computed once."""

    def __init__(self, config: RunConfig, vocab_size: int, group: DeviceGroup, machine: Machine):
        self._vocab_size, self._group, self._machine = vocab_size, group, machine
        # No setting of a layout adds a parameter.
        self._model = trace_model(config, vocab_size)
        self._params: dict[tuple[int, ...], int] = {}
        self._traces = Traces(vocab_size)

    def cost(self, layout: Layout) -> StepCost:
        """The time of a step by the cost model.

        Raises:
            UserError: when the mesh or the backend of attention cannot be had.
        """
        config = layout.config
        trainer, spec, length = config.trainer, config.model.spec(self._vocab_size), config.model.seq_len
        mesh = self._mesh(config)
        most = layout.plan.shares(mesh).most
        work = Work(
            spec=spec,
            trainer=trainer,
            seq_len=length,
            plan=layout.plan,
            sizes=dict(mesh.shape),
            shards=batch_shards(mesh),
            turns=-(-most // layout.plan.shares(mesh, trainer.microbatches_per_gather).most),
            params=self._numbers(config, mesh),
            backend=self._backend(config),
            training_flops=training_flops(flops_per_token(spec, length), self._model),
        )
        return step_cost(work, self._machine)

    def candidate(self, layout: Layout, cost: StepCost, limit: int | None, *, enough: int | None) -> Candidate:
        """A layout with the estimate of its memory; of one that takes more than `enough` bytes, a part of it."""
        config, mesh = layout.config, self._mesh(layout.config)
        temporary = estimate_temporary(
            config,
            self._vocab_size,
            config.trainer.mp.compute_dtype.itemsize,
            layout.plan.rows * config.model.seq_len,
            fused=self._backend(config) not in ("xla", "ring"),
            axes=dict(mesh.shape),
        )
        memory = estimate_step(config, self._group, temporary, self._traces, limit=enough)
        return Candidate(layout, {axis: n for axis, n in mesh.shape.items() if n > 1}, cost, memory, limit)

    def _mesh(self, config: RunConfig) -> Any:
        return config.trainer.step_plan.abstract_mesh(self._group.count)

    def _backend(self, config: RunConfig) -> str:
        return attention_backend(config, self._vocab_size, device_platform(self._group.kind))

    def _numbers(self, config: RunConfig, mesh: Any) -> int:
        """Numbers in the parameters as a device computes with them."""
        sizes = tuple(mesh.shape.values())
        if sizes not in self._params:
            _, sharding = shard_state(config.trainer.step_plan, config.optimizer, self._model, mesh)
            places = {name: NamedSharding(mesh, each.compute) for name, each in sharding.params.items()}
            parts = (places[name].shard_shape(x.shape) for name, x in self._model.shapes.items())
            self._params[sizes] = sum(map(math.prod, parts))
        return self._params[sizes]


def _price(pricing: _Pricing, admitted: Iterable[Layout]) -> list[tuple[StepCost, Layout]]:
    """The layouts that can be had, the fastest first; of equals, that which changes least."""
    found = []
    for layout in admitted:
        with contextlib.suppress(UserError):
            found.append((pricing.cost(layout), layout))
    return sorted(found, key=lambda each: (each[0].seconds, len(each[1].changes), len(each[1].settings)))


def _choose(
    priced: Sequence[tuple[StepCost, Layout]], pricing: _Pricing, limit: int | None
) -> tuple[list[Candidate], Candidate | None, list[Candidate]]:
    """The fastest layout that fits of each mesh and of what is gathered, the fastest that changes no bit, and all whose
    memory was estimated.
    """
    ranked, tried, same = dict[tuple[Any, ...], Candidate](), list[Candidate](), None
    for cost, layout in priced:
        wanted = len(ranked) < SHOWN and _kind(layout) not in ranked
        if not wanted and (same is not None or layout.changes):
            continue
        found = pricing.candidate(layout, cost, limit, enough=limit)
        tried.append(found)
        if found.fits and wanted:
            ranked[_kind(layout)] = found
        if found.fits and same is None and not layout.changes:
            same = found
    return [*ranked.values()], same, tried


def _nearest(tried: Sequence[Candidate], pricing: _Pricing) -> Candidate:
    """The layout that takes least of those that do not fit."""
    order = sorted(tried, key=lambda candidate: candidate.memory.bytes)
    nearest = pricing.candidate(order[0].layout, order[0].cost, order[0].limit, enough=None)
    for other in order[1:]:
        # What is known of the others is the least that they take.
        if other.memory.bytes >= nearest.memory.bytes:
            break
        candidate = pricing.candidate(other.layout, other.cost, other.limit, enough=nearest.memory.bytes)
        nearest = min(nearest, candidate, key=lambda candidate: candidate.memory.bytes)
    return nearest


def _kind(layout: Layout) -> tuple[Any, ...]:
    """Mesh and what is gathered, of which a ranking has the best layout each, so that its entries differ."""
    trainer = layout.config.trainer
    axes = (trainer.pipeline_axis_size, trainer.context_axis_size, trainer.expert_axis_size, trainer.model_axis_size)
    return (*axes, trainer.gather)


def _compiled(found: Search, count: int, compile_one: Compile) -> Search:
    """The ranking by the devices' own compiler: of the first `count` of those that fit by its word, and beside them of
    the one that changes no bit.
    """
    limit = None if found.budget is None else found.budget.bytes
    fitting, rejected = list[Candidate](), list[Candidate]()
    for candidate in found.ranked:
        if len(fitting) == count:
            break
        judged = _judged(candidate, limit, compile_one)
        (fitting if judged.fits else rejected).append(judged)
    same = found.same_numbers
    if same is not None:
        settled = {each.layout.overrides: each for each in (*fitting, *rejected)}
        same = settled.get(same.layout.overrides) or _judged(same, limit, compile_one)
    return replace(
        found,
        ranked=tuple(sorted(fitting, key=lambda each: each.seconds)),
        rejected=tuple(rejected),
        same_numbers=same if same is not None and same.fits else None,
        nearest=None if fitting else min(rejected, key=lambda each: each.memory.bytes, default=found.nearest),
    )


def _judged(candidate: Candidate, limit: int | None, compile_one: Compile) -> Candidate:
    try:
        word = compile_one(candidate.layout.overrides)
    except UserError as error:
        return replace(candidate, refused=str(error))
    return replace(candidate, compiled=word, memory=word.memory, limit=limit)
