"""Notes for the user at the start of a run, about the mesh and about settings that may be unintended."""

from __future__ import annotations

from collections.abc import Iterator

from jax.sharding import Mesh

from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.parallel.mesh import BATCH_AXES, OTHER_AXES, batch_shards
from lm_trainer.run.build.model import recomputes_layers
from lm_trainer.run.config.default_shards import MIN_MICROBATCHES, follows_from_batch, largest_shards
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig


def describe_mesh(mesh: Mesh) -> str:
    """Describes a mesh, for example as `8 x cpu: data 8` or `1 x NVIDIA H200`."""
    kind = mesh.devices.flat[0].device_kind
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return f"{mesh.devices.size} x {kind}" + (f": {sizes}" if sizes else "")


def configuration_warnings(trainer: TrainerConfig, mesh: Mesh) -> Iterator[str]:
    """Yields one line for each setting that may be unintended."""
    if note := determinism_note(trainer, mesh):
        yield note
    largest = largest_shards(trainer, MIN_MICROBATCHES)
    if follows_from_batch(trainer) and trainer.elastic_shards == largest < MIN_MICROBATCHES:
        yield (
            f"trainer.elastic_shards is {trainer.elastic_shards}, the largest power of two that divides every batch: "
            "the run can use at most so many devices along the data axes"
        )
    yield from _uneven_share_notes(trainer, mesh)
    yield from _unused_rule_notes(trainer)
    yield from _cross_check_notes(trainer, mesh)
    if "float16" in (trainer.mp.param, trainer.mp.compute):
        yield "trainer.mp: float16 overflows at 65,504, and no loss is scaled; bfloat16 has the range of float32"
    elif trainer.mp.param == "bfloat16":
        yield (
            "trainer.mp: weights and the optimizer's state are bfloat16, which loses small updates; p=f32,c=bfloat16 "
            "keeps them in float32 and computes in bfloat16"
        )


def schedule_notes(config: RunConfig) -> Iterator[str]:
    """Yields one line for each learning rate setting that has no effect or an effect that may be unintended."""
    optimizer = config.optimizer
    schedule = config.learning_rate()
    if optimizer.rewarmup and len(schedule.cycles) == 1:
        yield "optimizer.rewarmup has no effect on a single cycle; set optimizer.cycles or cycle_length too"
    warmup, timescale = schedule.cycles[0].warmup, schedule.constants.timescale
    if schedule.shape == "inv_sqrt" and timescale is not None and timescale < warmup:
        yield (
            f"optimizer.lr_schedule: a timescale of {timescale:g} steps is shorter than the warm-up of {warmup}, so "
            f"that the learning rate reaches {schedule(warmup):.3g}, and not {optimizer.learning_rate:g}"
        )


def _uneven_share_notes(trainer: TrainerConfig, mesh: Mesh) -> Iterator[str]:
    """Yields notes on what it costs if the number of devices is not a power of two or does not divide the batch."""
    if not trainer.bitwise:
        return
    shares = max(
        (plan.divide_microbatches(mesh) for plan in trainer.step_plan.microbatches.values), key=lambda s: s.count
    )
    max_count = shares.max_terms
    slots = max_count * shares.shards
    if slots > shares.count:
        yield (
            f"{shares.shards} devices along the data axes share {shares.count} microbatches unevenly: some compute "
            f"{max_count}, others {max_count - 1}, so that {1 - shares.count / slots:.0%} of their time is idle"
        )
    copies = mesh.shape["replica"] // trainer.replica_ici_axis_size
    if copies > 1:
        parts = mesh.shape["data"]
        split = f"cut in {parts} parts, with {copies} copies of each" if parts > 1 else "whole on each of them"
        yield (
            f"the state is {split}: it can be cut over a power of two of devices alone, and sums over devices exchange "
            f"{shares.max_parts} times as much; see docs/how-to/several-devices.md"
        )


def _cross_check_notes(trainer: TrainerConfig, mesh: Mesh) -> Iterator[str]:
    if trainer.cross_check is None:
        return
    shards = batch_shards(mesh)
    if shards == 1:
        yield (
            "trainer.cross_check: nothing but the devices that compute a microbatch can check it, so it is computed "
            "twice: errors that repeat are not found"
        )
    elif shards == 2:
        yield (
            "trainer.cross_check: there is no third device to decide, so of two devices that each repeat their value, "
            "the wrong one is not known"
        )


def _unused_rule_notes(trainer: TrainerConfig) -> Iterator[str]:
    if trainer.tensor_parallel_axes and trainer.model_axis_size == 1:
        yield "trainer.tensor_parallel_axes has no effect while trainer.model_axis_size is 1"
    rules = {**trainer.axis_resources, **trainer.parameter_axis_resources, **trainer.compute_axis_resources}
    if unused := [axis for axis in rules if axis == "batch" or axis in OTHER_AXES]:
        yield (
            f"trainer: rules for the axes {', '.join(unused)} have no effect: the batch is always sharded over "
            f"{', '.join(BATCH_AXES)}, and the others are not axes of a parameter"
        )


def recomputation_note(trainer: TrainerConfig, spec: DecoderSpec) -> str | None:
    """Returns a note if the rematerialisation setting of the model has no effect; None otherwise."""
    if not recomputes_layers(trainer, spec) or (spec.remat == "full" and not spec.remat_groups):
        return None
    return (
        "model.gradient_checkpointing has no effect here: trainer.gather: layer keeps what is inside a layer "
        "on the device that computes it, or computes it again; not in host memory, nor for groups of layers or devices"
    )


def determinism_note(trainer: TrainerConfig, mesh: Mesh) -> str | None:
    """Returns a note if the determinism guarantee is weaker; None if results are bit-identical on every mesh."""
    if not trainer.bitwise:
        return (
            "determinism: fast lets XLA add in an order of its own: bits are equal only for the same devices, in the "
            "same processes and with the same mesh; on others the losses are close, and part over the steps"
        )
    names = {
        "model": "tensor parallelism",
        "context": "shared positions",
        "expert": "shared experts",
        "pipeline": "pipeline stages",
    }
    axes = [axis for axis in names if mesh.shape[axis] > 1]
    if not axes:
        return None
    # Devices along an axis that shards no computation all do the same work, which has the full cost.
    if "model" in axes and not any("model" in mesh_axes for mesh_axes in trainer.step_plan.compute_rules.values()):
        return (
            f"model_axis_size={mesh.shape['model']} cuts no computation, so that the devices along it all compute the "
            f"same: name what they are to share as tensor_parallel_axes, such as [heads, mlp, vocab]"
        )
    dropout = "" if axes == ["model"] else " and draw dropout of their own"
    sizes = ", ".join(f"{axis}_axis_size={mesh.shape[axis]}" for axis in axes)
    return (
        f"with {' and '.join(names[axis] for axis in axes)}, several devices add inside a microbatch{dropout}: bits "
        f"are equal for {sizes} and any sizes of {', '.join(BATCH_AXES)}, and close, not equal, to those of other sizes"
    )
