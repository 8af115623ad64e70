"""The layouts that a search chooses from: mesh axes, microbatches, what is gathered and what recomputed, attention."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.plan.fit import possible_rows
from lm_trainer.profile.devices import NODE
from lm_trainer.run.build.model import keeps_inside_layers
from lm_trainer.run.config.gather import with_gather
from lm_trainer.run.config.run_config import RunConfig, changed_keys, numeric_identity
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.model_parallel_limits import check_length, check_model

_AXES = ("pipeline", "context", "expert", "model")
"""The mesh axes whose sizes are searched, each under `trainer.<axis>_axis_size`."""
_TENSOR_AXES = ("heads", "mlp")
"""Logical axes that tensor parallelism cuts where the configuration names none."""
_REMAT: dict[Any, Any] = {"full": True, "dots_no_batch": "dots_no_batch", "none": False}
"""Policies and the values of `model.gradient_checkpointing` that mean them, from least memory to least computation."""


@dataclass(frozen=True)
class Layout:
    """A run as it is laid out on devices."""

    config: RunConfig
    """With the settings of the layout."""
    settings: Mapping[str, Any]
    """Dotted key -> value, of the keys whose value is not that of the configuration the search began with."""
    changes: tuple[str, ...]
    """Those among them that decide numbers: with other values the run has other bits."""
    plan: MicrobatchPlan = field(repr=False)
    """The largest batch of the run."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """`key=value` for each of the settings, as `lmt train` takes it."""
        return tuple(f"{key}={_text(value)}" for key, value in self.settings.items())


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{','.join(map(str, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def layouts(config: RunConfig, vocab_size: int, count: int) -> Iterator[Layout]:
    """All layouts of a run on `count` devices that the model and the batch admit.

    The batch, the length of rows, the optimizer and the data stay as they are. Where the configuration gives
    `trainer.elastic_shards`, there are at least so many microbatches. A run with `determinism: fast` keeps it, and the
    others keep the promise of bits that do not depend on the number of devices.
    """
    config = with_gather(config, vocab_size)
    before = numeric_identity(config)
    for trainer in _meshes(config, vocab_size, count):
        for settings in _steps(config, trainer, count):
            yield _layout(config, before, settings)


def _layout(config: RunConfig, before: dict[str, Any], settings: Mapping[str, Any]) -> Layout:
    changed, parts = {}, {"trainer": config.trainer, "model": config.model}
    for key, value in settings.items():
        section, name = key.split(".")
        if getattr(parts[section], name) != value:
            changed[key] = value
            parts[section] = parts[section].model_copy(update={name: value})
    found = config.model_copy(update=parts)
    # The same microbatches, otherwise said.
    own, plan = (_largest(each) for each in (config, found))
    if own == plan and changed.pop("trainer.per_device_parallelism", None):
        same = {"per_device_parallelism": config.trainer.per_device_parallelism}
        found = found.model_copy(update={"trainer": found.trainer.model_copy(update=same)})
    numeric = changed_keys(before, numeric_identity(found)) if changed else {}
    return Layout(found, changed, tuple(key for key in changed if key in numeric), plan)


def _largest(config: RunConfig) -> MicrobatchPlan:
    return max(config.trainer.step_plan.microbatches.values, key=lambda plan: (plan.rows, plan.count))


def _meshes(config: RunConfig, vocab_size: int, count: int) -> Iterator[dict[str, Any]]:
    """Settings of the axes with which the devices can share the model."""
    spec, length = config.model.spec(vocab_size), config.model.seq_len
    for sizes in _sizes(count, len(_AXES)):
        axes: dict[str, int] = dict(zip(_AXES, sizes, strict=True))
        # Tensor parallelism sends most: as in other frameworks, it stays inside of a node.
        if axes["model"] > NODE or spec.blocks[0].attention.num_heads % axes["model"]:
            continue
        try:
            check_length(length, axes)
            check_model(spec, axes)
        except UserError:
            continue
        settings: dict[str, Any] = {f"trainer.{axis}_axis_size": size for axis, size in axes.items()}
        if axes["model"] > 1 and not config.trainer.tensor_parallel_axes:
            settings["trainer.tensor_parallel_axes"] = _TENSOR_AXES
        elif axes["model"] == 1:
            settings["trainer.tensor_parallel_axes"] = None
        yield settings


def _sizes(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Sizes whose product divides `count`."""
    if not axes:
        yield ()
        return
    for size in (size for size in range(1, count + 1) if count % size == 0):
        for others in _sizes(count // size, axes - 1):
            yield (size, *others)


def _steps(config: RunConfig, mesh: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """All settings of a step on a mesh."""
    trainer = config.trainer.model_copy(update={key.split(".")[1]: value for key, value in mesh.items()})
    abstract = trainer.step_plan.abstract_mesh(count)
    least = config.trainer.elastic_shards if "elastic_shards" in config.trainer.model_fields_set else 1
    gathers = ("model", "layer") if trainer.bitwise else ("auto",)
    for rows in possible_rows(trainer, abstract):
        chosen = trainer.model_copy(update={"per_device_parallelism": rows})
        plans = chosen.step_plan.microbatches.values
        if min(plan.count for plan in plans) < least:
            continue
        common = {**mesh, "trainer.per_device_parallelism": rows}
        for gather in gathers:
            # Whole layers wait for one another in a pipeline, and parts of layers where each is gathered.
            if gather == "layer" and trainer.pipeline_axis_size > 1:
                continue
            if not trainer.bitwise and any(plan.count % batch_shards(abstract) for plan in plans):
                continue
            largest = max(plans, key=lambda plan: plan.count)
            for more in _memory_settings(config, chosen.model_copy(update={"gather": gather}), largest, abstract):
                for attention in _backends(config):
                    step = {"trainer.gather": gather, "trainer.microbatches_per_gather": None}
                    yield {**common, **step, **more, **attention}


def _memory_settings(
    config: RunConfig, trainer: TrainerConfig, plan: MicrobatchPlan, mesh: Any
) -> Iterator[dict[str, Any]]:
    """Settings that trade memory for computation or traffic, from least memory on."""
    own, value = config.model.remat, config.model.gradient_checkpointing
    policies = [value]
    if not trainer.gathers_layers or keeps_inside_layers(trainer):
        # Of several words for one policy that of the configuration.
        words = {policy: value if policy == own else named for policy, named in _REMAT.items()} | {own: value}
        policies = [*words.values()]
    for policy in policies:
        for gathers in _gathers(config, trainer, plan, mesh):
            yield {"model.gradient_checkpointing": policy, **gathers}


def _gathers(config: RunConfig, trainer: TrainerConfig, plan: MicrobatchPlan, mesh: Any) -> Iterator[dict[str, Any]]:
    """The numbers of microbatches that may share what is gathered."""
    if not trainer.gathers_layers:
        yield {}
        return
    most = plan.shares(mesh).most
    now = config.trainer.microbatches_per_gather
    for together in sorted({plan.shares(mesh, n).most for n in range(1, most + 1)}):
        same = now is not None and plan.shares(mesh, now).most == together
        yield {"trainer.microbatches_per_gather": now if same else None if together == most else together}


def _backends(config: RunConfig) -> Iterator[dict[str, Any]]:
    yield {"model.attn_backend": config.model.attn_backend}
    if config.model.attn_backend == "xla":
        yield {"model.attn_backend": "auto"}
