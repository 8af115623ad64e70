"""Explains an out-of-memory error: prints the `lmt plan` table of the run, and layouts that fit."""

import gc
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cli import clean
from cli.common import print_error
from lm_trainer.core.errors import translate_out_of_memory

if TYPE_CHECKING:
    from lm_trainer.run.config.run_config import RunConfig

_TIMEOUT = 600
"""Time limit of the plan, in seconds."""


@contextmanager
def explain_out_of_memory(run: "RunConfig", config: Path, overrides: list[str]) -> Iterator[None]:
    """Prints a plan of the run on these devices if the block runs out of memory, and exits with that error's exit code.

    Args:
        run: the configuration.
        config: the configuration file.
        overrides: settings that override values in the file.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        memory_error = translate_out_of_memory(error)
        if memory_error is None:
            raise
        code = print_error(memory_error)
        _free_frames(error)
        _print_plan(run, config, overrides)
        raise typer.Exit(code) from None


def _free_frames(error: BaseException) -> None:
    """Frees the run's state, which the error's stack frames reference, to make room for the plan."""
    from lm_trainer.core.runtime import return_freed_memory

    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__
    gc.collect()
    return_freed_memory()


def _print_plan(run: "RunConfig", config: Path, overrides: list[str]) -> None:
    from lm_trainer.parallel.processes import is_lead
    from lm_trainer.plan.table import DOES_NOT_FIT

    if not is_lead():
        return
    arguments = ["plan", str(config), *overrides, *_device_options(run.trainer.max_devices)]
    clean.echo("working out what this run needs (lmt plan) ...", err=True)
    # In a new process, because this process runs JAX on real devices and a plan needs emulated devices.
    command = [sys.executable, "-m", "lm_trainer", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        clean.echo(f"the plan takes longer than {_TIMEOUT} s", err=True)
        return
    if done.returncode:
        clean.echo(done.stderr.strip(), err=True)
        return
    clean.echo(done.stdout.rstrip())
    if DOES_NOT_FIT not in done.stdout:
        clean.echo(
            "By this plan a step fits. Not counted are evaluation (trainer.per_device_eval_parallelism), the start, "
            "other processes on the device, and memory that is in pieces."
        )
    clean.echo(f"Layouts that fit, the fastest first: {shlex.join(['lmt', *arguments])} --search")


def _device_options(max_devices: int | None) -> list[str]:
    """Returns the options of `lmt plan` for the devices of this process and their memory."""
    import jax

    from lm_trainer.profile.memory_use import host_memory

    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu" and (total := host_memory()) is not None:
        # Emulated devices share the memory of the machine.
        limit = total // jax.local_device_count()
    count = jax.device_count() if max_devices is None else min(max_devices, jax.device_count())
    return ["--devices", f"{count}x{device.device_kind}", *([] if limit is None else ["--memory", f"{limit}B"])]
