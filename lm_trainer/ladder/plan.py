"""What a ladder would cost, before anything of it is run; no device is needed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.ladder import ModelLadder
from lm_trainer.ladder.memory import activation_bytes, compiled_bytes, state_bytes
from lm_trainer.profile.flops import flops_per_token, parameter_count
from lm_trainer.profile.peaks import datasheet_peak, known_devices


@dataclass(frozen=True)
class Hardware:
    """What a plan assumes of the machine."""

    device: str
    """As JAX names it."""
    mfu: float = 0.4
    """Of the datasheet's peak, how much training reaches."""
    price: float | None = None
    """Of a device for an hour, in any currency."""

    def peak(self, dtype: str) -> float | None:
        """FLOP/s of one device; None for a CPU, of which no datasheet says any.

        Raises:
            UserError: for a device that is not in the table.
        """
        if self.device.lower() == "cpu":
            return None
        found = datasheet_peak(self.device, dtype, allow_tf32=True)
        if found is None:
            raise UserError(
                f"there is no figure for {dtype} on {self.device!r}; known devices: {', '.join(known_devices())}"
            )
        return found.flops


@dataclass(frozen=True)
class RungPlan:
    """One size of a ladder."""

    size: str
    model_params: int
    """All of them."""
    embedding_params: int
    """Of the token embedding, which `num_params` leaves out."""
    body_params: int
    """Without the token embedding and the output layer."""
    num_params: int
    """That the recipe is a function of: all but the token embedding."""
    batch_size: int
    """Tokens."""
    target_batch_size: int
    microbatch: int
    """Tokens that a device computes at once."""
    steps: int
    tokens: int
    learning_rate: float
    """Its peak."""
    warmup: int
    """Piecewise."""
    devices: int
    accumulation: int
    """Microbatches that a device computes one after the other in each step."""
    flops: float
    """Of the run, by the definition of model FLOPs."""
    state_bytes: int
    """Parameters, gradients and optimizer state on a device, exactly."""
    activation_bytes: int
    """What one microbatch needs beside it: an estimate, or what XLA says of the compiled program."""
    hours: float | None
    """None where the device has no datasheet."""
    cost: float | None
    checkpoints: tuple[tuple[int, str], ...]
    """(step, what it is)."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, in SI units."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For the terminal."""
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
    ladder: ModelLadder,
    size_spec: str,
    hardware: Hardware | None = None,
    *,
    vocab_size: int | None = None,
    compat: Literal["olmo"] | None = None,
    compiled: bool = False,
) -> RungPlan:
    """What a run of a size would be.

    Args:
        ladder: whose.
        size_spec: the size.
        hardware: what to assume of the machine; by default that of the ladder.
        vocab_size: rows of the token embedding, where the tokenizer cannot be reached.
        compat: `olmo`: batch and devices as OLMo-core would choose them.
        compiled: compile a microbatch for a device of this machine, and take its memory from there.

    Raises:
        UserError: for a size or a device that does not exist, or phases that do not fit.
    """
    hardware = hardware or Hardware(ladder.device_type)
    vocab_size = vocab_size or ladder.vocab_size()
    spec = ladder.get_model_config(size_spec).spec(vocab_size)
    num_params, recipe = ladder.get_num_params(size_spec, vocab_size), ladder.run_configurator
    batch, microbatch, _, devices = ladder.layout(size_spec, vocab_size=vocab_size, compat=compat)
    tokens = recipe.configure_duration(num_params, batch)
    optimizer = recipe.configure_optimizer(num_params, batch)
    embedding = vocab_size * spec.hidden_dim
    total = parameter_count(spec)
    flops = flops_per_token(spec, ladder.sequence_length).training * tokens
    peak = hardware.peak(ladder.trainer.mp.compute)
    hours = None if peak is None else flops / (peak * hardware.mfu * devices) / 3600
    return RungPlan(
        size=size_spec,
        model_params=total,
        embedding_params=embedding,
        body_params=total - embedding * (1 if spec.head.tied else 2),
        num_params=num_params,
        batch_size=batch,
        target_batch_size=recipe.configure_target_batch_size(num_params),
        microbatch=microbatch,
        steps=tokens // batch,
        tokens=tokens,
        learning_rate=optimizer.learning_rate,
        warmup=recipe.configure_lr_scheduler(num_params, batch).cycles[0].warmup,
        devices=devices,
        accumulation=batch // microbatch // devices,
        flops=flops,
        state_bytes=state_bytes(ladder, size_spec, vocab_size, devices),
        activation_bytes=(compiled_bytes if compiled else activation_bytes)(ladder, size_spec, vocab_size, microbatch),
        hours=hours,
        cost=None if hours is None or hardware.price is None else hours * devices * hardware.price,
        checkpoints=tuple((at // batch, name) for at, name in recipe.configure_checkpoint_intervals(num_params, batch)),
    )
