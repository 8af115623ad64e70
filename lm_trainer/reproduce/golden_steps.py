"""Computes the first steps of a configuration on several numbers of devices, for golden files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import configure_jax
from lm_trainer.reproduce.golden import BATCH, STATE, StepDifference, StepRecord, compare_steps
from lm_trainer.reproduce.rerun import Rerun, open_first_steps
from lm_trainer.run.build.setup import check_devices
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.trackers import Progress

_WEIGHT_DIGITS = 8
"""Number of hexadecimal digits of a parameter's digest, of the 16 of its hash."""
_EMULATED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


@dataclass(frozen=True)
class FirstSteps:
    """The results of the first steps on some number of devices."""

    steps: Sequence[StepRecord]
    program: str | None
    """Hash of the compiled step."""


@dataclass(frozen=True)
class CheckedDevices:
    """The comparison of a golden file with a computation on some number of devices."""

    devices: int
    steps: int
    """Number of steps that were computed."""
    difference: StepDifference | None
    program: str | None
    """Hash of the compiled step."""


def configure_devices(config: RunConfig, devices: Sequence[int], cpu_threads: int | None, steps: int) -> RunConfig:
    """Starts JAX with the devices for every number in `devices`, and returns the configuration to compute with.

    On a CPU the devices are emulated, and XLA uses `cpu_threads` threads for any number of devices. The default is
    `trainer.cpu_threads`, or otherwise the largest number of devices, so the results do not depend on the number of
    cores.

    Raises:
        UserError: if the configuration promises no bits, does not begin at step 0 or has fewer steps, or if it does not
            fit one of the numbers of devices.
    """
    trainer = config.trainer
    if not trainer.bitwise:
        raise UserError(
            "trainer.determinism: fast gives other bits on other devices, so there is nothing to compare with; write "
            "elastic"
        )
    if trainer.load_checkpoint_path is not None:
        raise UserError(
            "trainer.load_checkpoint_path: a golden file begins at step 0; remove the key, or take the weights with "
            "trainer.initialize_from"
        )
    if trainer.num_train_steps < steps:
        raise UserError(
            f"trainer.num_train_steps is {trainer.num_train_steps}, fewer than the {steps} steps to compute"
        )
    largest = max(devices)
    settings = dict(trainer.jax_config)
    # JAX refuses the setting once its devices exist, so it is not made if the environment emulates enough of them.
    emulated = _EMULATED.search(os.environ.get("XLA_FLAGS", ""))
    if emulated is None or int(emulated[1]) < largest:
        settings["jax_num_cpu_devices"] = largest
    # A single thread uses other kernels than all other numbers of threads.
    threads = trainer.cpu_threads or cpu_threads or max(2, largest)
    trainer = trainer.model_copy(update={"jax_config": settings, "cpu_threads": threads})
    configure_jax(settings, trainer.jax_compilation_cache_dir, threads)
    available = jax.devices()
    if len(available) < largest:
        raise UserError(f"--devices {largest}: there are only {len(available)} x {available[0].device_kind} here")
    for count in devices:
        check_devices(trainer.model_copy(update={"max_devices": count}))
    return config.model_copy(update={"trainer": trainer})


def compute_first_steps(config: RunConfig, devices: int, steps: int, progress: Progress) -> FirstSteps:
    """Computes the first steps of a configuration from `configure_devices` on some number of devices."""
    with _open(config, devices, progress) as rerun:
        return FirstSteps([*_compute_steps(rerun, steps, _describe_devices(devices), progress)], rerun.program)


def check_first_steps(
    config: RunConfig, recorded: Sequence[StepRecord], devices: int, progress: Progress
) -> CheckedDevices:
    """Computes recorded steps again on some number of devices, up to the first difference."""
    difference = None
    with _open(config, devices, progress) as rerun:
        for now in _compute_steps(rerun, recorded[-1].step, _describe_devices(devices), progress):
            if difference := compare_steps(recorded[now.step], now):
                break
        return CheckedDevices(devices, rerun.state.step, difference, rerun.program)


def _open(config: RunConfig, devices: int, progress: Progress) -> AbstractContextManager[Rerun]:
    trainer = config.trainer.model_copy(update={"max_devices": devices})
    return open_first_steps(config.model_copy(update={"trainer": trainer}), progress=progress)


def _compute_steps(rerun: Rerun, steps: int, where: str, progress: Progress) -> Iterator[StepRecord]:
    yield StepRecord(0, {}, _weight_digests(rerun))
    for step in range(1, steps + 1):
        progress.phase(f"{where}: step {step} of {steps}")
        values: dict[str, float | str] = {BATCH: digest_batch(rerun.next_batch())}
        values |= rerun.run_step()
        if step == steps:
            values |= {STATE: _digest(rerun.compute_checksums()), "fingerprint": rerun.compute_fingerprint() or ""}
        yield StepRecord(step, values, _weight_digests(rerun))


def _weight_digests(rerun: Rerun) -> dict[str, str]:
    return {name: digest[:_WEIGHT_DIGITS] for name, digest in rerun.compute_hashes().items()}


def digest_batch(batch: Batch) -> str:
    """Returns a hash of every array of a batch, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, array in batch._asdict().items():
        if array is not None:
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _digest(checksums: Mapping[str, int]) -> str:
    lines = "\n".join(f"{name} {checksums[name]}" for name in sorted(checksums))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _describe_devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"
