"""Search space of layouts: mesh axes, microbatches, gathering, rematerialisation and attention."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.plan.fit import possible_rows
from lm_trainer.profile.devices import NODE
from lm_trainer.run.build.model import can_save_inside_layers
from lm_trainer.run.config.gather import with_resolved_gather
from lm_trainer.run.config.run_config import RunConfig, changed_keys, numeric_identity
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.model_parallel_limits import check_length, check_model

_AXES = ("pipeline", "context", "expert", "model")
"""Mesh axes whose sizes are searched, each set by `trainer.<axis>_axis_size`."""
_TENSOR_AXES = ("heads", "mlp")
"""Logical axes that tensor parallelism shards if the configuration names none."""
_REMAT: dict[Any, Any] = {"full": True, "dots_no_batch": "dots_no_batch", "none": False}
"""Maps rematerialisation policies to values of `model.gradient_checkpointing`, from least memory to least
computation."""


@dataclass(frozen=True)
class Layout:
    """One layout of a run on devices."""

    config: RunConfig
    """Configuration with the settings of the layout."""
    settings: Mapping[str, Any]
    """Dotted key -> value, for the keys whose values differ from the initial configuration."""
    changes: tuple[str, ...]
    """Keys in `settings` that affect the numerical results: changing them changes the bits of the run."""
    plan: MicrobatchPlan = field(repr=False)
    """Division of the largest batch of the run."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Returns `key=value` for each of the settings, as arguments for `lmt train`."""
        return tuple(f"{key}={_format_value(value)}" for key, value in self.settings.items())


def _format_value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{','.join(map(str, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def enumerate_layouts(config: RunConfig, vocab_size: int, count: int) -> Iterator[Layout]:
    """Yields all possible layouts of a run on `count` devices.

    The batch, the row length, the optimizer and the data stay unchanged. With `trainer.elastic_shards`, a layout has at
    least that many microbatches. A run with `determinism: fast` keeps this setting; all other runs stay bit-identical
    on any number of devices.
    """
    config = with_resolved_gather(config, vocab_size)
    initial_identity = numeric_identity(config)
    for trainer in _mesh_settings(config, vocab_size, count):
        for settings in _step_settings(config, trainer, count):
            yield _make_layout(config, initial_identity, settings)


def configured_layout(config: RunConfig, vocab_size: int) -> Layout:
    """Returns the layout of a configuration as it is."""
    config = with_resolved_gather(config, vocab_size)
    return Layout(config, {}, (), _largest_microbatches(config))


def _make_layout(config: RunConfig, initial_identity: dict[str, Any], settings: Mapping[str, Any]) -> Layout:
    changed, parts = {}, {"trainer": config.trainer, "model": config.model}
    for key, value in settings.items():
        section, name = key.split(".")
        if getattr(parts[section], name) != value:
            changed[key] = value
            parts[section] = parts[section].model_copy(update={name: value})
    laid_out = config.model_copy(update=parts)
    # If the microbatches are the same, keeps the configured setting.
    configured_plan, plan = (_largest_microbatches(candidate) for candidate in (config, laid_out))
    if configured_plan == plan and changed.pop("trainer.per_device_parallelism", None):
        unchanged = {"per_device_parallelism": config.trainer.per_device_parallelism}
        laid_out = laid_out.model_copy(update={"trainer": laid_out.trainer.model_copy(update=unchanged)})
    numeric = changed_keys(initial_identity, numeric_identity(laid_out)) if changed else {}
    return Layout(laid_out, changed, tuple(key for key in changed if key in numeric), plan)


def _largest_microbatches(config: RunConfig) -> MicrobatchPlan:
    return max(config.trainer.step_plan.microbatches.values, key=lambda plan: (plan.rows, plan.count))


def _mesh_settings(config: RunConfig, vocab_size: int, count: int) -> Iterator[dict[str, Any]]:
    """Yields settings of the mesh axes with which the devices can share the model."""
    spec, length = config.model.spec(vocab_size), config.model.seq_len
    for sizes in _axis_sizes(count, len(_AXES)):
        axes: dict[str, int] = dict(zip(_AXES, sizes, strict=True))
        # Tensor parallelism communicates the most, so it stays within a node, as in other frameworks.
        if axes["model"] > NODE or spec.blocks[0].mixer.num_heads % axes["model"]:
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


def _axis_sizes(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Yields all combinations of axis sizes whose product divides `count`."""
    if not axes:
        yield ()
        return
    for size in (size for size in range(1, count + 1) if count % size == 0):
        for remaining in _axis_sizes(count // size, axes - 1):
            yield (size, *remaining)


def _step_settings(config: RunConfig, mesh: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yields all settings of a step on a mesh."""
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
            # A pipeline assigns full layers to stages, whereas gathering layer by layer shards each layer.
            if gather == "layer" and trainer.pipeline_axis_size > 1:
                continue
            if not trainer.bitwise and any(plan.count % batch_shards(abstract) for plan in plans):
                continue
            largest = max(plans, key=lambda plan: plan.count)
            for more in _memory_settings(config, chosen.model_copy(update={"gather": gather}), largest, abstract):
                for attention in _backend_settings(config):
                    step = {"trainer.gather": gather, "trainer.microbatches_per_gather": None}
                    yield {**common, **step, **more, **attention}


def _memory_settings(
    config: RunConfig, trainer: TrainerConfig, plan: MicrobatchPlan, mesh: Any
) -> Iterator[dict[str, Any]]:
    """Yields settings that trade memory for computation or traffic, from least to most memory."""
    configured_policy, value = config.model.remat, config.model.gradient_checkpointing
    policies = [value]
    if not trainer.gathers_layers or can_save_inside_layers(trainer):
        # If several values mean the same policy, keeps the configured value.
        words = {policy: value if policy == configured_policy else named for policy, named in _REMAT.items()} | {
            configured_policy: value
        }
        policies = [*words.values()]
    for policy in policies:
        for gathers in _gather_settings(config, trainer, plan, mesh):
            yield {"model.gradient_checkpointing": policy, **gathers}


def _gather_settings(
    config: RunConfig, trainer: TrainerConfig, plan: MicrobatchPlan, mesh: Any
) -> Iterator[dict[str, Any]]:
    """Yields the possible numbers of microbatches that share a gather."""
    if not trainer.gathers_layers:
        yield {}
        return
    max_group = plan.divide_microbatches(mesh).max_terms
    configured = config.trainer.microbatches_per_gather
    for group in sorted({plan.divide_microbatches(mesh, n).max_terms for n in range(1, max_group + 1)}):
        is_configured = configured is not None and plan.divide_microbatches(mesh, configured).max_terms == group
        yield {
            "trainer.microbatches_per_gather": configured if is_configured else None if group == max_group else group
        }


def _backend_settings(config: RunConfig) -> Iterator[dict[str, Any]]:
    yield {"model.attn_backend": config.model.attn_backend}
    if config.model.attn_backend == "xla":
        yield {"model.attn_backend": "auto"}
