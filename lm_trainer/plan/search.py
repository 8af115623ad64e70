"""Search for the fastest layout of a run that fits its devices, with a cost model and the compiler of the devices."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.plan.attention_workspace import AttentionWorkspace
from lm_trainer.plan.cost import training_machine
from lm_trainer.plan.devices import Budget, DeviceGroup, memory_budget
from lm_trainer.plan.estimate import Traces, estimate_step, estimate_temporary
from lm_trainer.plan.layout_work import LayoutWork, PlannedModel, count_device_params, describe_layout
from lm_trainer.plan.layouts import Layout, configured_layout, enumerate_layouts
from lm_trainer.plan.machine import Machine
from lm_trainer.plan.run import Assumptions, attention_backend, target_of_kind
from lm_trainer.plan.speed import StepCost, step_bound, step_cost
from lm_trainer.profile.devices import device_platform
from lm_trainer.profile.flops import flops_per_token
from lm_trainer.run.build.model import teacher_flops, trace_model
from lm_trainer.run.build.setup import shard_state
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.adapters import training_flops
from lm_trainer.run.weights.vocabulary import Vocabulary, find_vocabulary
from lm_trainer.step.dispatch.memory import PhaseBytes

MARGIN = 0.1
"""Fraction of the memory that is kept free, because an estimate may be too low."""
SHOWN = 5
"""Number of layouts in a ranking."""


@dataclass(frozen=True)
class CompiledLayout:
    """Result of compiling a layout with the compiler of the devices."""

    memory: PhaseBytes
    """Phase with the highest memory."""
    seconds: tuple[float, float] | None
    """Bounds of the time of a step; None if no datasheet has the figures."""

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> CompiledLayout:
        """Parses the output of `lmt plan --compile --json`."""
        peak = max(plan["memory"]["phases"], key=lambda phase: phase["bytes"])
        seconds = plan["compiled"].get("step_seconds")
        return cls(
            PhaseBytes(peak["name"], peak["parts"]), None if seconds is None else (seconds["least"], seconds["most"])
        )


Compile = Callable[[tuple[str, ...]], CompiledLayout]
"""Compiles the run with the overrides of a layout, for the devices of the search."""


@dataclass(frozen=True)
class Candidate:
    """A layout with its time and memory."""

    layout: Layout
    mesh: dict[str, int]
    """Mesh axes that have more than one device."""
    cost: StepCost
    """Expected time of a step, by formula."""
    memory: PhaseBytes
    """Phase in which a device needs the most memory: estimated or, with `compiled`, from the compiler."""
    limit: int | None
    """Memory in bytes that the run may use; None if unknown."""
    compiled: CompiledLayout | None = None
    """Result of the devices' own compiler; None if the layout has not been compiled."""
    refused: str | None = None
    """Reason why the compiler rejected the layout."""

    @property
    def fits(self) -> bool:
        return self.refused is None and (self.limit is None or self.memory.bytes <= self.limit)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper bound of the time of a step in seconds, from the compiled programs."""
        return None if self.compiled is None else self.compiled.seconds

    @property
    def seconds(self) -> float:
        """Time of a step in seconds: by the cost model or, if compiled, the geometric mean of the bounds."""
        return self.cost.seconds if self.interval is None else math.sqrt(math.prod(self.interval))


@dataclass(frozen=True)
class Search:
    """Result of a search: layouts of a run on given devices, fastest first."""

    devices: DeviceGroup
    budget: Budget | None
    tokens_per_step: int
    considered: int
    """Number of layouts that the model and the batch allow."""
    ranked: tuple[Candidate, ...]
    """Fastest fitting layout of each mesh and gather setting. With a compiler, the compiled layouts that fit."""
    same_numbers: Candidate | None
    """Fastest fitting layout that changes no bit of the run; may also be in `ranked`."""
    nearest: Candidate | None
    """Layout with the least memory, if none fits."""
    rejected: tuple[Candidate, ...] = ()
    """Layouts that fit according to the cost model but not according to the compiler."""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON, in SI units."""
        return {
            "devices": asdict(self.devices),
            "budget": None if self.budget is None else asdict(self.budget),
            "tokens_per_step": self.tokens_per_step,
            "considered": self.considered,
            "ranked": [self._candidate_as_dict(candidate) for candidate in self.ranked],
            "same_numbers": None if self.same_numbers is None else self._candidate_as_dict(self.same_numbers),
            "nearest": None if self.nearest is None else self._candidate_as_dict(self.nearest),
            "rejected": [self._candidate_as_dict(candidate) for candidate in self.rejected],
        }

    def _candidate_as_dict(self, candidate: Candidate) -> dict[str, Any]:
        return {
            "overrides": list(candidate.layout.overrides),
            "changes_numbers": list(candidate.layout.changes),
            "mesh": candidate.mesh,
            "rows": candidate.layout.plan.rows,
            "microbatches": candidate.layout.plan.count,
            "step_seconds": candidate.seconds,
            "interval": candidate.interval,
            "tokens_per_second": self.tokens_per_step / candidate.seconds,
            "cost": asdict(candidate.cost),
            "memory": {
                "phase": candidate.memory.name,
                "bytes": candidate.memory.bytes,
                "parts": dict(candidate.memory.parts),
            },
            "fits": candidate.fits,
            "refused": candidate.refused,
        }


def search_layouts(
    config: RunConfig, group: DeviceGroup, assumptions: Assumptions, *, compile_best: tuple[int, Compile] | None = None
) -> Search:
    """Finds the fastest layout of a run that fits on given devices.

    `lm_trainer.plan.speed` computes the cost of every layout. In order of cost, `lm_trainer.plan.estimate` estimates
    their memory until enough layouts fit. No device is needed, and nothing is compiled without `compile_best`.

    Args:
        config: configuration of the run, with a complete model section. Data, batch, rows and optimizer stay unchanged.
        group: the devices.
        assumptions: assumptions about the devices.
        compile_best: number of best layouts to compile, and the function that compiles one of them.

    Raises:
        UserError: if a device has no figures in the tables, the model has several kinds of layers, or no layout is
            possible.
    """
    vocab_size, _ = Vocabulary(assumptions.vocab_size) if assumptions.vocab_size else find_vocabulary(config)
    machine = _make_machine(config, group, assumptions)
    limit = memory_budget(group.kind, assumptions.memory)
    usable_bytes = None if limit is None else int((1 - MARGIN) * limit.bytes)
    pricing = _Pricing(config, vocab_size, group, machine)
    priced = _price_layouts(pricing, enumerate_layouts(config, vocab_size, group.count))
    if not priced:
        raise UserError(
            f"--search: {group.count} devices cannot share the batch of trainer.train_batch_size in any layout: use "
            f"fewer devices, or lower trainer.elastic_shards where it is set"
        )
    ranked, same_numbers, tried = _choose_candidates(priced, pricing, usable_bytes)
    search = Search(
        devices=group,
        budget=limit,
        tokens_per_step=config.trainer.batch_schedule.at(0) * config.model.seq_len,
        considered=len(priced),
        ranked=tuple(ranked[:SHOWN]),
        same_numbers=same_numbers,
        nearest=None if ranked else _find_least_memory(tried, pricing),
    )
    return search if compile_best is None else _compile_best(search, *compile_best)


@dataclass(frozen=True)
class Estimate:
    """Time and memory of a configuration as it is, by formula alone."""

    candidate: Candidate
    bound_seconds: float
    """Lower bound of the time of a step: see `step_bound`."""
    tokens_per_second: float
    """Expected rate of one device."""
    mfu: float
    """Expected model FLOPs utilisation."""


def estimate_run(config: RunConfig, group: DeviceGroup, assumptions: Assumptions) -> Estimate:
    """Estimates a run on given devices in seconds, without a compiler. `plan_run` computes memory more exactly.

    Raises:
        UserError: if a device has no figures in the tables, or the devices cannot share the work.
    """
    vocab_size, _ = Vocabulary(assumptions.vocab_size) if assumptions.vocab_size else find_vocabulary(config)
    machine = _make_machine(config, group, assumptions)
    pricing, layout = _Pricing(config, vocab_size, group, machine), configured_layout(config, vocab_size)
    work, limit = pricing.describe_work(layout), memory_budget(group.kind, assumptions.memory)
    cost = step_cost(work, machine)
    rate = work.tokens_per_step / cost.seconds / group.count
    return Estimate(
        pricing.estimate_candidate(layout, cost, None if limit is None else limit.bytes, enough=None),
        step_bound(work, machine),
        rate,
        rate * work.training_flops / machine.peak,
    )


def _make_machine(config: RunConfig, group: DeviceGroup, assumptions: Assumptions) -> Machine:
    machine = training_machine(group.kind, config.trainer, assumptions.mfu)
    if machine is None:
        raise UserError(
            f"--search: no datasheet figure of FLOP/s for {config.trainer.mp.compute} or of bandwidths for "
            f"{group.kind!r}, by which layouts are compared; set trainer.mp=p=f32,c=bfloat16, or take another device"
        )
    return machine


class _Pricing:
    """Computes the time and memory of layouts, sharing intermediate results between them."""

    def __init__(self, config: RunConfig, vocab_size: int, group: DeviceGroup, machine: Machine):
        self._vocab_size, self._group, self._machine = vocab_size, group, machine
        # Traced once, because no layout setting adds a parameter.
        self._model = trace_model(config, vocab_size)
        self._params: dict[tuple[int, ...], int] = {}
        self._traces = Traces(vocab_size)

    def step_cost(self, layout: Layout) -> StepCost:
        """Returns the time of a step according to the cost model. Raises the same error as `describe_work`."""
        return step_cost(self.describe_work(layout), self._machine)

    def describe_work(self, layout: Layout) -> LayoutWork:
        """Returns the work of a step.

        Raises:
            UserError: if the mesh or the attention backend is not possible.
        """
        config = layout.config
        spec, mesh = config.model.spec(self._vocab_size), self._mesh(config)
        flops = training_flops(flops_per_token(spec, config.model.seq_len), self._model, config.loss)
        flops += teacher_flops(config, self._vocab_size)
        model = PlannedModel(spec, self._backend(config), flops)
        return describe_layout(config, model, layout.plan, mesh, self._count_device_params(config, mesh))

    def estimate_candidate(self, layout: Layout, cost: StepCost, limit: int | None, *, enough: int | None) -> Candidate:
        """Returns a layout with its estimated memory. Above `enough` bytes, the estimate may be incomplete."""
        config, mesh = layout.config, self._mesh(layout.config)
        backend, axes = self._backend(config), dict(mesh.shape)
        temporary = estimate_temporary(
            config,
            self._vocab_size,
            config.trainer.mp.compute_dtype.itemsize,
            layout.plan.rows * config.model.seq_len,
            fused=backend not in ("xla", "ring"),
            axes=axes,
            platform=device_platform(self._group.kind),
        )
        workspace = AttentionWorkspace.of(config, self._vocab_size, target_of_kind(self._group.kind), backend, axes)
        temporary = {name: size + workspace.of_program(name, layout.plan.rows) for name, size in temporary.items()}
        memory = estimate_step(config, self._group, temporary, self._traces, limit=enough)
        return Candidate(layout, {axis: n for axis, n in mesh.shape.items() if n > 1}, cost, memory, limit)

    def _mesh(self, config: RunConfig) -> Any:
        return config.trainer.step_plan.abstract_mesh(self._group.count)

    def _backend(self, config: RunConfig) -> str:
        return attention_backend(config, self._vocab_size, target_of_kind(self._group.kind))

    def _count_device_params(self, config: RunConfig, mesh: Any) -> int:
        """Returns the number of parameters that a device computes with, after gathering."""
        sizes = tuple(mesh.shape.values())
        if sizes not in self._params:
            _, sharding = shard_state(config.trainer.step_plan, config.optimizer, self._model, mesh)
            self._params[sizes] = count_device_params(self._model, sharding, mesh)
        return self._params[sizes]


def _price_layouts(pricing: _Pricing, admitted: Iterable[Layout]) -> list[tuple[StepCost, Layout]]:
    """Returns the possible layouts, fastest first. Ties are resolved in favor of fewer changes."""
    priced = []
    for layout in admitted:
        with contextlib.suppress(UserError):
            priced.append((pricing.step_cost(layout), layout))
    return sorted(priced, key=lambda pair: (pair[0].seconds, len(pair[1].changes), len(pair[1].settings)))


def _choose_candidates(
    priced: Sequence[tuple[StepCost, Layout]], pricing: _Pricing, limit: int | None
) -> tuple[list[Candidate], Candidate | None, list[Candidate]]:
    """Chooses the layouts to report.

    Returns:
        The fastest fitting layout of each mesh and gather setting, the fastest that changes no bit, and all layouts
        whose memory has been estimated.
    """
    ranked, tried, same_numbers = dict[tuple[Any, ...], Candidate](), list[Candidate](), None
    for cost, layout in priced:
        may_rank = len(ranked) < SHOWN and _ranking_key(layout) not in ranked
        if not may_rank and (same_numbers is not None or layout.changes):
            continue
        candidate = pricing.estimate_candidate(layout, cost, limit, enough=limit)
        tried.append(candidate)
        if candidate.fits and may_rank:
            ranked[_ranking_key(layout)] = candidate
        if candidate.fits and same_numbers is None and not layout.changes:
            same_numbers = candidate
    return [*ranked.values()], same_numbers, tried


def _find_least_memory(tried: Sequence[Candidate], pricing: _Pricing) -> Candidate:
    """Finds the layout with the least memory, for the case that none fits."""
    order = sorted(tried, key=lambda candidate: candidate.memory.bytes)
    nearest = pricing.estimate_candidate(order[0].layout, order[0].cost, order[0].limit, enough=None)
    for other in order[1:]:
        # The estimates of the other layouts are lower bounds.
        if other.memory.bytes >= nearest.memory.bytes:
            break
        candidate = pricing.estimate_candidate(other.layout, other.cost, other.limit, enough=nearest.memory.bytes)
        nearest = min(nearest, candidate, key=lambda candidate: candidate.memory.bytes)
    return nearest


def _ranking_key(layout: Layout) -> tuple[Any, ...]:
    """Returns the mesh and gather setting: a ranking has only the best layout of each, so that its entries differ."""
    trainer = layout.config.trainer
    axes = (trainer.pipeline_axis_size, trainer.context_axis_size, trainer.expert_axis_size, trainer.model_axis_size)
    return (*axes, trainer.gather)


def _compile_best(search: Search, count: int, compile_one: Compile) -> Search:
    """Compiles layouts in order until `count` of them fit, and the one that changes no bit; ranks these layouts."""
    limit = None if search.budget is None else search.budget.bytes
    fitting, rejected = list[Candidate](), list[Candidate]()
    for candidate in search.ranked:
        if len(fitting) == count:
            break
        compiled = _compile_candidate(candidate, limit, compile_one)
        (fitting if compiled.fits else rejected).append(compiled)
    same_numbers = search.same_numbers
    if same_numbers is not None:
        compiled_by_overrides = {candidate.layout.overrides: candidate for candidate in (*fitting, *rejected)}
        same_numbers = compiled_by_overrides.get(same_numbers.layout.overrides) or _compile_candidate(
            same_numbers, limit, compile_one
        )
    return replace(
        search,
        ranked=tuple(sorted(fitting, key=lambda candidate: candidate.seconds)),
        rejected=tuple(rejected),
        same_numbers=same_numbers if same_numbers is not None and same_numbers.fits else None,
        nearest=None
        if fitting
        else min(rejected, key=lambda candidate: candidate.memory.bytes, default=search.nearest),
    )


def _compile_candidate(candidate: Candidate, limit: int | None, compile_one: Compile) -> Candidate:
    try:
        compiled = compile_one(candidate.layout.overrides)
    except UserError as error:
        return replace(candidate, refused=str(error))
    return replace(candidate, compiled=compiled, memory=compiled.memory, limit=limit)
