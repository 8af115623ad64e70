"""Compares the devices of this machine: all of them compute the same microbatches, and every bit must be equal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.run.build.example_batch import example_batch
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.dry_run import configure_and_build_setup
from lm_trainer.run.weights.pretrained import resolve_model
from lm_trainer.step.check.cross_check import Mismatch, compare_devices, describe_shards
from lm_trainer.step.elastic import ElasticStep


@dataclass(frozen=True)
class HardwareReport:
    """The result of a comparison of devices."""

    devices: Sequence[str]
    """Descriptions of all devices."""
    groups: int
    """Number of groups of devices that were compared. A group shares the computation of a microbatch."""
    rounds: int
    """Number of microbatches that every group computed."""
    seconds: float
    mismatches: Sequence[Mismatch]
    """Rounds in which devices disagreed. `step` is the number of the round."""

    @property
    def wrong(self) -> list[str]:
        """Devices that were wrong in some round."""
        return list(dict.fromkeys(name for mismatch in self.mismatches for name in mismatch.wrong_names()))

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON values."""
        return {
            "devices": list(self.devices),
            "groups": self.groups,
            "rounds": self.rounds,
            "seconds": self.seconds,
            "equal": not self.mismatches,
            "wrong": self.wrong,
            "mismatches": [mismatch.as_dict() for mismatch in self.mismatches],
        }


def compare_hardware(
    config: RunConfig, seconds: float, *, on_progress: Callable[[int], object] = lambda _: None
) -> HardwareReport:
    """Computes microbatches of random tokens on all devices, with the programs of a run, for some time.

    Args:
        config: configuration of the run.
        seconds: time after which no further round begins. At least two rounds are made.
        on_progress: receives the number of finished rounds.

    Raises:
        UserError: if the configuration does not fit the devices, or promises no bits.
    """
    if not config.trainer.bitwise:
        raise UserError("trainer.determinism: fast runs one program over all devices, which cannot be compared")
    setup, vocab_size = configure_and_build_setup(config := resolve_model(config, "bench"))
    step = setup.step
    assert isinstance(step, ElasticStep)
    rows = len(step.local_rows())
    step.compile(example_batch(config, rows, vocab_size))
    state = setup.init()
    mismatches, rounds, started = list[Mismatch](), 0, time.perf_counter()
    while rounds < 2 or time.perf_counter() - started < seconds:
        batch = example_batch(config, rows, vocab_size, seed=rounds)
        if mismatch := compare_devices(step.recomputation(state, step.put(batch)), rounds + 1, setup.sharding.mesh):
            mismatches.append(mismatch)
        rounds += 1
        on_progress(rounds)
    elapsed = time.perf_counter() - started
    groups = range(batch_shards(setup.sharding.mesh))
    devices = [name for names in describe_shards(setup.sharding.mesh, groups).values() for name in names]
    return HardwareReport(devices, len(groups), rounds, elapsed, mismatches)
