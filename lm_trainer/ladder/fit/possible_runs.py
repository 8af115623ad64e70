"""Runs that a ladder could make next, with the compute of its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.checkpoints import find_checkpoints
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.fit.narrowing import Rung, further_runs
from lm_trainer.ladder.plan import Hardware
from lm_trainer.ladder.rungs import count_params, model_config, run_folder, vocab_size_of
from lm_trainer.plan.cost import RunWork, training_time
from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.profile.flops import flops_per_token
from lm_trainer.profile.peaks import known_devices
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.records import RUN


@dataclass(frozen=True)
class Price:
    """Time and cost of some compute."""

    device_hours: float
    cost: float | None

    def as_dict(self) -> dict[str, Any]:
        """Returns the price as plain data."""
        return {"device_hours": self.device_hours, "cost": self.cost}


def price_of(flops: float, hardware: Hardware, trainer: TrainerConfig) -> Price | None:
    """Returns the time and cost of model FLOPs, as `lmt plan` computes them; None for a CPU.

    Raises:
        UserError: if no datasheet has figures for the device.
    """
    if hardware.device.lower() == "cpu":
        return None
    work = RunWork(flops_per_token=1, tokens_per_step=1, steps=1, tokens=round(flops))
    time = training_time(work, DeviceGroup(1, hardware.device), trainer, mfu=hardware.mfu, price=hardware.price)
    if time is None:
        raise UserError(
            f"there is no figure for {trainer.mp.compute} on {hardware.device!r}; known devices: "
            f"{', '.join(known_devices())}"
        )
    return Price(time.device_hours, time.cost)


def plan_rungs(ladder: LadderConfig, sizes: Sequence[str]) -> list[Rung]:
    """Returns a rung for each size, with the model FLOPs of its plan and the checkpoints after its decays."""
    rungs, vocab_size = [], vocab_size_of(ladder)
    for size in sizes:
        checkpoints = find_checkpoints(ladder, size)
        decayed = tuple(float(c.tokens) for c in checkpoints if c.name.endswith("post-decay"))
        per_token = flops_per_token(model_config(ladder, size).spec(vocab_size), ladder.sequence_length).training
        tokens = decayed or (float(checkpoints[-1].tokens),)
        rungs.append(Rung(size, count_params(ladder, size), tokens, per_token * max(tokens)))
    return rungs


def possible_runs(ladder: LadderConfig) -> list[Rung]:
    """Returns every size that has not been started, and another seed and twice the length of every other size."""
    sizes = dict.fromkeys([*ladder.sizes, *(ladder.model_configurator.known_sizes() or ())])
    started = [size for size in sizes if (run_folder(ladder, size) / RUN).exists()]
    new = plan_rungs(ladder, [size for size in sizes if size not in started])
    return [
        *(Rung(f"new size {rung.name}", rung.num_params, rung.tokens, rung.flops) for rung in new),
        *further_runs(plan_rungs(ladder, started)),
    ]
