"""Memory, FLOPs, time and cost of a run on devices that need not be present."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from lm_trainer.core.errors import UserError
from lm_trainer.nn.attention_dispatch import choose_backend
from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.mixer_spec import softmax_specs
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.target_platform import Target, compiling_for
from lm_trainer.plan.attention_workspace import AttentionWorkspace
from lm_trainer.plan.cost import RunTime, RunWork, training_peak, training_time
from lm_trainer.plan.devices import Budget, DeviceGroup, memory_budget
from lm_trainer.plan.fit import MicrobatchFit, find_fitting_microbatch
from lm_trainer.plan.gpu_target import compute_capability
from lm_trainer.plan.layout_work import PlannedModel, count_device_params, describe_layout
from lm_trainer.plan.memory import Correction, MemoryPlan, StepMemory
from lm_trainer.plan.programs import CompiledStep, ProgramWork, TargetFigures, overlapped_share, step_time
from lm_trainer.plan.refusal import explain_refusals
from lm_trainer.profile.devices import device_bandwidths, device_platform, is_older_than_ampere
from lm_trainer.profile.flops import flops_per_token, parameter_count, ring_score_fraction
from lm_trainer.profile.network import Network
from lm_trainer.run.build.attention import describe_attention
from lm_trainer.run.build.gather_memory import choose_layers_at_once
from lm_trainer.run.build.model import teacher_flops
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.weights.adapters import training_flops
from lm_trainer.run.weights.vocabulary import Vocabulary, find_vocabulary
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan

_QUERIES = 128
"""Number of queries per block of scores, used as a substitute for a kernel that stores no scores."""
_GROWING, _GROWING_FAST = 0.7, 0.85
"""Ratio of temporary memory on accelerators to temporary memory on a CPU, for programs that grow with the microbatch; a
CPU holds float32 copies of bfloat16 operands and fuses less. It is the maximum ratio, at the peak, over the steps in
benchmarks/results/compiled, according to the compilers of the accelerators. The program of `fast` also contains
gathered and reduced arrays, whose size is the same on both."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a plan that are not part of the configuration."""

    mfu: float | None = None
    """Fraction of the datasheet's peak that training reaches; None: as the cost model expects."""
    price: float | None = None
    """Price per device-hour, in any currency."""
    memory: int | None = None
    """Memory in bytes that a run may use on each device; None: according to the datasheet."""
    vocab_size: int | None = None
    """Number of rows of the token embedding; None: determined with `find_vocabulary`."""


@dataclass(frozen=True)
class RingPlan:
    """Plan for ring attention over devices that share the positions of rows."""

    devices: int
    share: float
    """Fraction of query-key pairs whose scores are computed; the FLOPs in the plan count all pairs."""
    computed_flops_per_token: int
    """Number of FLOPs per token of a training step, counting only these pairs."""
    buffers: int
    """Size in bytes of the keys and values of one layer on a device: the current block, the arriving block and, in the
    backward pass, three times their gradients in float32. Part of the temporary memory."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of the memory, time and cost of a run."""

    devices: DeviceGroup
    mesh: Mapping[str, int]
    """Mesh axes that have more than one device."""
    determinism: str
    gather: str
    """Way in which parameters are gathered: `model` or `layer`; `auto` with `determinism: fast`."""
    num_params: int
    parametrization: str
    """`standard`, or the rules by which hyperparameters are transferred, and the sizes of their base."""
    vocab_size: int
    dtype: str
    """Dtype of matrix products."""
    rows: int
    """Number of rows of a microbatch. With `determinism: fast` and per_device_parallelism -1, all rows of a device."""
    microbatches: int
    """Number of microbatches in the largest step, over all devices."""
    microbatches_per_gather: int | None
    """Number of microbatches of a device that share a gather, if the run chooses fewer than all by itself."""
    memory: MemoryPlan
    """Memory of one device."""
    budget: Budget | None
    """Memory that the run may use; None if neither the user nor a datasheet gives it."""
    fit: MicrobatchFit | None
    """Microbatches that fit; None without a budget."""
    work: RunWork
    time: RunTime | None
    """Time of the run; None if no datasheet has a peak."""
    assumed: str | None
    """Reason why the vocabulary size is a guess; None if it is known."""
    kernel: str | None
    """Fused attention kernel on these devices, which stores no scores; None: XLA's attention."""
    attention_workspace: int
    """Memory in bytes that the backward pass of attention takes for one microbatch in addition to what compilers
    count."""
    ring: RingPlan | None
    """Plan for ring attention; None if the run does not use it."""
    compiled: CompiledStep | None
    """Programs compiled by the devices' own compiler; None if planned with the CPU compiler."""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON, in SI units."""
        plain = asdict(replace(self, compiled=None))
        plain["compiled"] = None if self.compiled is None else self.compiled.as_dict()
        plain["memory"]["phases"] = [{**asdict(phase), "bytes": phase.bytes} for phase in self.memory.phases]
        plain["memory"]["peak_bytes"] = self.memory.peak.bytes
        plain["work"] |= {"flops_per_step": self.work.flops_per_step, "flops": self.work.flops}
        return plain


def plan_run(
    config: RunConfig,
    group: DeviceGroup,
    devices: Sequence[Any],
    assumptions: Assumptions,
    *,
    own_compiler: bool = False,
) -> RunPlan:
    """Plans the memory, FLOPs, time and cost of training with a configuration.

    Args:
        config: configuration of the run, with a complete model section.
        group: target devices of the run.
        devices: JAX devices for XLA, in the same number: emulated ones from `emulate_devices`, or the devices of
            `group` themselves.
        assumptions: assumptions about devices and data that the configuration does not contain.
        own_compiler: True if `devices` are the devices of `group`, either present or described. The plan then reports
            the figures of their compiler.

    Raises:
        UserError: if the devices cannot share the work, or a sharding rule does not fit the model.
    """
    trainer = config.trainer
    if trainer.max_devices is not None and trainer.max_devices < group.count:
        raise UserError(
            f"trainer.max_devices: {trainer.max_devices} of {group.count} devices would leave the others idle; plan "
            f"for {trainer.max_devices}, or set trainer.max_devices=null"
        )
    limit = memory_budget(group.kind, assumptions.memory)
    vocab_override = assumptions.vocab_size
    vocab_size, assumed = find_vocabulary(config) if vocab_override is None else Vocabulary(vocab_override)
    platform = device_platform(group.kind)
    config = _resolve_expert_kernel(config, group.kind)
    target = target_of_kind(group.kind)
    backend, planned_config = attention_backend(config, vocab_size, target), config
    if not own_compiler:
        config = _adapt_to_local_compiler(config, vocab_size, platform, backend)
    refusals = explain_refusals(group.kind) if own_compiler else nullcontext()
    with refusals, compiling_for(target if own_compiler else jax.default_backend()):
        growing = 1.0 if own_compiler else _growing_memory_ratio(trainer, backend)
        axes = dict(trainer.step_plan.abstract_mesh(len(devices)).shape)
        # A compiler that has access to the GPU asks cuDNN, and counts the workspace itself.
        counted = own_compiler and jax.default_backend() == "gpu"
        workspace = AttentionWorkspace.of(config, vocab_size, target, "" if counted else backend, axes)
        memory = StepMemory(config, vocab_size, devices, platform, Correction(growing, workspace))
        memory.plan()  # compiles the programs, for the platform of this context
    # With the compiler of the devices, each size would take minutes.
    fit = None if limit is None or own_compiler else find_fitting_microbatch(memory, limit.bytes, memory.rows)
    together = None if fit is None else _chosen_group_size(fit, memory, platform)
    if together is not None:
        memory = memory.with_gather(together)
    if fit is not None and _chooses_by_memory(memory.setup, trainer, platform):
        memory = memory.with_layers_at_once(
            choose_layers_at_once(lambda layers: memory.with_layers_at_once(layers).plan().peak.bytes)
        )
    plan, mesh, spec = memory.largest_step(), memory.setup.sharding.mesh, config.model.spec(vocab_size)
    flops = training_flops(flops_per_token(spec, config.model.seq_len), memory.setup.model, config.loss)
    flops += teacher_flops(config, vocab_size)
    schedule, steps = trainer.batch_schedule, trainer.num_train_steps
    work = RunWork(
        flops_per_token=flops,
        tokens_per_step=schedule.at(0) * config.model.seq_len,
        steps=steps,
        tokens=schedule.rows_before(steps) * config.model.seq_len,
    )
    rows, microbatches = memory.rows, plan.count
    if not trainer.bitwise and trainer.per_device_parallelism == -1:
        microbatches = batch_shards(mesh)
    params = count_device_params(memory.setup.model, memory.setup.sharding, mesh)
    layout = describe_layout(
        # Without the changes of the model for the local compiler, which concern memory.
        planned_config.model_copy(update={"trainer": memory.config.trainer}),
        PlannedModel(planned_config.model.spec(vocab_size), backend, flops),
        MicrobatchPlan(plan.batch_size, microbatches, rows),
        mesh,
        params,
    )
    compiled = _compile_step(memory, work, group, devices) if own_compiler else None
    if compiled is not None:
        layout = replace(layout, overlap=overlapped_share(compiled.programs))
    return RunPlan(
        devices=group,
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        determinism=trainer.determinism,
        gather=memory.config.trainer.gather,
        num_params=parameter_count(spec),
        parametrization=config.parametrization.describe(),
        vocab_size=vocab_size,
        dtype=trainer.mp.compute,
        rows=rows,
        microbatches=microbatches,
        microbatches_per_gather=together,
        memory=memory.plan(),
        budget=limit,
        fit=fit,
        work=work,
        time=training_time(work, group, trainer, layout=layout, mfu=assumptions.mfu, price=assumptions.price),
        assumed=assumed,
        kernel=None if backend in ("xla", "ring") or own_compiler else backend,
        attention_workspace=workspace.bytes(rows),
        ring=_plan_ring(config, vocab_size, rows, flops) if backend == "ring" else None,
        compiled=compiled,
    )


def _chosen_group_size(fit: MicrobatchFit, memory: StepMemory, platform: str) -> int | None:
    """Returns the number of microbatches for a gather that a run chooses by itself: see `run/build/gather_memory.py`.

    None if all of a device fit, if the number is configured, or if another size of a microbatch is needed.
    """
    chooses = _chooses_by_memory(memory.setup, memory.config.trainer, platform)
    return fit.together if chooses and fit.rows == memory.rows else None


def _chooses_by_memory(setup: TrainingSetup, trainer: TrainerConfig, platform: str) -> bool:
    """Returns True if a run chooses what depends on the memory of its devices; see `run/build/gather_memory.py`."""
    return setup.gathers_layers and trainer.microbatches_per_gather is None and platform != "cpu"


def _compile_step(memory: StepMemory, work: RunWork, group: DeviceGroup, devices: Sequence[Any]) -> CompiledStep:
    runs, trainer = memory.run_counts(), memory.config.trainer
    target = TargetFigures(Network.of(group.kind, devices), memory.attention_product_flops(group.kind))
    programs = tuple(ProgramWork.from_hlo(name, runs[name], text, target) for name, text in memory.hlo_texts().items())
    peak, bandwidths = training_peak(group.kind, trainer), device_bandwidths(group.kind)
    if peak is None or bandwidths is None:
        return CompiledStep(programs, None)
    return CompiledStep(programs, step_time(programs, work.flops_per_step / group.count, peak.flops, bandwidths))


def _resolve_expert_kernel(config: RunConfig, kind: str) -> RunConfig:
    """Returns the configuration with the kernel of experts that a run chooses on devices without grouped products.

    Raises:
        UserError: if the configuration asks for grouped products there.
    """
    model = config.model
    if not is_older_than_ampere(kind) or "expert_kernel" not in type(model).model_fields:
        return config
    kernel = model.model_dump(include={"expert_kernel"})["expert_kernel"]
    if kernel == "grouped":
        raise UserError(
            f"model.expert_kernel: grouped has no kernel for a {kind}, which is older than Ampere; write dense or auto"
        )
    changes = {"expert_kernel": "dense"} if kernel == "auto" else {}
    return config.model_copy(update={"model": model.model_copy(update=changes)})


def _adapt_to_local_compiler(config: RunConfig, vocab_size: int, platform: str, backend: str) -> RunConfig:
    """Returns the configuration to compile on this machine such that its memory resembles that on `platform`."""
    # The devices of this machine may not have the kernel, or may choose another backend.
    model, changes = config.model, dict[str, Any](attn_backend="ring" if backend == "ring" else "xla")
    if backend not in ("ring", "xla"):
        # A kernel stores no scores; XLA, which replaces it here, stores the scores of only a few queries.
        changes["flash_attention_block_size"] = model.flash_attention_block_size or _QUERIES
    if platform != "cpu" and model.remat != "none" and not model.scan:
        # On a CPU, XLA merges the recomputation of unrolled layers with the original computation, which saves no
        # memory.
        changes["scan_layers"] = True
    kernels = {b.mlp.kernel_on(platform) for b in model.spec(vocab_size).blocks if isinstance(b.mlp, MoeSpec)}
    if kernels and "expert_kernel" in type(model).model_fields:
        # The kernel that this machine would choose may compute other experts, and need other memory.
        changes["expert_kernel"] = "dense" if "dense" in kernels else "grouped"
    return config.model_copy(update={"model": model.model_copy(update=changes)})


def _growing_memory_ratio(trainer: TrainerConfig, backend: str) -> float:
    # Known only for bfloat16 and for kernels.
    if trainer.mp.compute_dtype.itemsize != 2 or backend in ("xla", "ring"):
        return 1.0
    return _GROWING if trainer.bitwise else _GROWING_FAST


def target_of_kind(kind: str) -> Target:
    """Returns a description of devices of a kind."""
    return Target(device_platform(kind), kind, compute_capability(kind))


def attention_backend(config: RunConfig, vocab_size: int, target: Target) -> str:
    """Returns the attention backend on some devices of the first layer with attention; xla if there is none. Layers
    differ only in windows, which all backends support.

    Raises:
        UserError: if the configured backend does not support the model.
    """
    specs = softmax_specs(config.model.spec(vocab_size).blocks)
    return choose_backend(specs[0], describe_attention(config, target)).backend if specs else "xla"


def _plan_ring(config: RunConfig, vocab_size: int, rows: int, flops: int) -> RingPlan:
    length, devices, dtype = config.model.seq_len, config.trainer.context_axis_size, config.trainer.mp.compute_dtype
    spec = config.model.spec(vocab_size)
    share, count = ring_score_fraction(spec, length, devices), flops_per_token(spec, length)
    hidden = round((1 - share) * (count.attention_product + count.attention_softmax))
    width = max(s.kv_heads * (s.head_dim + s.value_size) for s in softmax_specs(spec.blocks))
    # Three times: the forward pass, and the gradients of queries and keys, or of probabilities and values.
    size_of_value = 2 * jnp.dtype(dtype).itemsize + 3 * 4
    return RingPlan(devices, share, flops - 3 * hidden, rows * length // devices * width * size_of_value)
