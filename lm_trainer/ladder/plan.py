"""Plan of a ladder: work, time, cost and memory of each size, computed before any run and without a device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.batch import BatchShape
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.rungs import batch_shape, count_params, model_config, run_config, rung_optimizer, vocab_size_of
from lm_trainer.plan.cost import MFU, RunTime, RunWork, training_time
from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.plan.estimate import Traces, compile_temporary, estimate_step, estimate_temporary
from lm_trainer.profile.devices import device_platform
from lm_trainer.profile.flops import embedding_parameter_count, flops_per_token, parameter_count
from lm_trainer.profile.peaks import known_devices
from lm_trainer.step.dispatch.memory import PhaseBytes


@dataclass(frozen=True)
class Hardware:
    """Assumptions about the machine."""

    device: str
    """Kind of device as JAX names it."""
    mfu: float = MFU
    """Fraction of the datasheet's peak FLOP/s that training reaches (MFU)."""
    price: float | None = None
    """Price per device-hour, in any currency."""


@dataclass(frozen=True)
class RungPlan:
    """Plan of one size of a ladder."""

    size: str
    model_params: int
    """Total number of parameters."""
    embedding_params: int
    """Number of parameters of the token embedding, which `num_params` does not include."""
    body_params: int
    """Number of parameters without the token embedding and the output layer."""
    num_params: int
    """Number of parameters that a token uses, without the token embedding. The recipe is a function of this number."""
    batch_size: int
    """Global batch size in tokens."""
    target_batch_size: int
    microbatch: int
    """Number of tokens per device and forward pass."""
    steps: int
    tokens: int
    learning_rate: float
    """Peak learning rate."""
    warmup: int
    """Steps."""
    devices: int
    accumulation: int
    """Number of microbatches that each device computes one after another in each step."""
    flops: float
    """Model FLOPs of the run."""
    state_bytes: int
    """Bytes of state, batch, gathered parameters and gradients per device during the microbatches."""
    activation_bytes: int
    """Bytes of temporary memory for the microbatches: estimated, or reported by XLA."""
    hours: float | None
    """None for a device without datasheet figures."""
    cost: float | None
    checkpoints: tuple[tuple[int, str], ...]
    """(step, position in the recipe) of each checkpoint."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as plain data for JSON, in SI units."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Formats the plan as lines for the terminal."""
        hours = "" if self.hours is None else f", {self.hours:,.1f} hours on {self.devices} devices"
        return [
            f"{self.size}: {self.num_params:,} parameters without the token embedding, {self.model_params:,} in all",
            f"  batch {self.batch_size:,} tokens (target {self.target_batch_size:,}), {self.accumulation} microbatches "
            f"of {self.microbatch:,} tokens on each of {self.devices} devices",
            f"  {self.steps:,} steps, {self.tokens:,} tokens, learning rate {self.learning_rate:.4g} after "
            f"{self.warmup:,} steps of warm-up",
            f"  {self.flops:.3g} FLOPs{hours}",
            *(f"  step {step:>9,}  {name}" for step, name in self.checkpoints),
        ]


def plan_rung(
    ladder: LadderConfig,
    size_spec: str,
    hardware: Hardware | None = None,
    *,
    vocab_size: int | None = None,
    compat: Literal["olmo"] | None = None,
    compiled: bool = False,
) -> RungPlan:
    """Plans one size.

    Args:
        ladder: the ladder to plan.
        size_spec: the size.
        hardware: assumptions about the machine; by default the device of the ladder.
        vocab_size: number of rows of the token embedding, for use if the tokenizer cannot be loaded.
        compat: `olmo` chooses the batch and the number of devices as OLMo-core would.
        compiled: compiles a microbatch for a device of this machine, and reads the memory from the compiled program.

    Raises:
        UserError: if the size or the device is unknown, or the phases do not fit into the run.
    """
    hardware = hardware or Hardware(ladder.device_type)
    vocab_size = vocab_size or vocab_size_of(ladder)
    spec = model_config(ladder, size_spec).spec(vocab_size)
    num_params, recipe = count_params(ladder, size_spec, vocab_size), ladder.run_configurator
    shape = batch_shape(ladder, size_spec, vocab_size=vocab_size, compat=compat)
    batch, tokens = shape.batch_size, recipe.configure_duration(num_params, shape.batch_size)
    optimizer = rung_optimizer(ladder, size_spec, batch, vocab_size)
    embedding = embedding_parameter_count(spec)
    total = parameter_count(spec)
    # The batch of the ladder and not of its run configuration, because no run would have the batch of `compat`.
    work = RunWork(flops_per_token(spec, ladder.sequence_length).training, batch, tokens // batch, tokens)
    time = _training_time(ladder, hardware, work, shape.devices)
    memory = _peak_memory(ladder, size_spec, vocab_size, shape, hardware, compiled=compiled)
    return RungPlan(
        size=size_spec,
        model_params=total,
        embedding_params=embedding,
        # If embedding and output weights are tied, the total counts them once.
        body_params=total - embedding - (0 if spec.head.tied else vocab_size * spec.hidden_dim),
        num_params=num_params,
        batch_size=batch,
        target_batch_size=recipe.configure_target_batch_size(num_params),
        microbatch=shape.microbatch,
        steps=work.steps,
        tokens=tokens,
        learning_rate=optimizer.learning_rate,
        warmup=recipe.configure_lr_scheduler(num_params, batch).cycles[0].warmup,
        devices=shape.devices,
        accumulation=batch // shape.microbatch // shape.devices,
        flops=work.flops,
        state_bytes=memory.bytes - memory.parts["temporary"],
        activation_bytes=memory.parts["temporary"],
        hours=None if time is None else time.seconds / 3600,
        cost=None if time is None else time.cost,
        checkpoints=tuple(
            (token_count // batch, name)
            for token_count, name in recipe.configure_checkpoint_intervals(num_params, batch)
        ),
    )


def _training_time(ladder: LadderConfig, hardware: Hardware, work: RunWork, devices: int) -> RunTime | None:
    """Estimates the training time of a size; None for a CPU, which has no datasheet figures."""
    if hardware.device.lower() == "cpu":
        return None
    time = training_time(
        work, DeviceGroup(devices, hardware.device), ladder.trainer, mfu=hardware.mfu, price=hardware.price
    )
    if time is None:
        raise UserError(
            f"there is no figure for {ladder.trainer.mp.compute} on {hardware.device!r}; known devices: "
            f"{', '.join(known_devices())}"
        )
    return time


def _peak_memory(
    ladder: LadderConfig, size_spec: str, vocab_size: int, shape: BatchShape, hardware: Hardware, *, compiled: bool
) -> PhaseBytes:
    config, length = run_config(ladder, size_spec, vocab_size=vocab_size), ladder.sequence_length
    kind = "cpu" if hardware.device.lower() == "cpu" else hardware.device
    if compiled:
        temporary = compile_temporary(config, vocab_size)
    else:
        itemsize = ladder.trainer.mp.compute_dtype.itemsize
        platform = device_platform(kind)
        temporary = estimate_temporary(config, vocab_size, itemsize, shape.microbatch, platform=platform)
    rows = {"train_batch_size": shape.batch_size // length, "per_device_parallelism": shape.microbatch // length}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=rows)})
    return estimate_step(config, DeviceGroup(shape.devices, kind), temporary, Traces(vocab_size))
