"""The explanation of a run that has run out of memory: the table of `lmt plan` for it, and what would fit."""

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
from cli.common import report
from lm_trainer.core.errors import out_of_memory

if TYPE_CHECKING:
    from lm_trainer.run.config.run_config import RunConfig

_LONGEST = 600
"""Seconds that the plan may take."""


@contextmanager
def explained_out_of_memory(run: "RunConfig", config: Path, overrides: list[str]) -> Iterator[None]:
    """Ends the command with the exit code for memory, after a plan of the run on these devices, where that is short.

    Args:
        run: the configuration.
        config: its file.
        overrides: over it.
    """
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        told = out_of_memory(error)
        if told is None:
            raise
        code = report(told)
        _free_what_is_held_by(error)
        _explain(run, config, overrides)
        raise typer.Exit(code) from None


def _free_what_is_held_by(error: BaseException) -> None:
    """Lets go of the state of the run, which the frames of an error hold, and beside which its plan may not fit."""
    from lm_trainer.core.runtime import return_freed_memory

    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
    gc.collect()
    return_freed_memory()


def _explain(run: "RunConfig", config: Path, overrides: list[str]) -> None:
    from lm_trainer.parallel.processes import is_lead
    from lm_trainer.plan.table import DOES_NOT_FIT

    if not is_lead():
        return
    asked = ["plan", str(config), *overrides, *_devices(run.trainer.max_devices)]
    clean.echo("working out what this run needs (lmt plan) ...", err=True)
    # In a process of its own: this one has JAX on its devices, and a plan wants emulated ones.
    command = [sys.executable, "-m", "lm_trainer", *asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        clean.echo(f"the plan takes longer than {_LONGEST} s", err=True)
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
    clean.echo(f"Layouts that fit, the fastest first: {shlex.join(['lmt', *asked])} --search")


def _devices(most: int | None) -> list[str]:
    """Options of `lmt plan` that stand for the devices of this process, and the memory that they have."""
    import jax

    from lm_trainer.profile.memory_use import host_memory

    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu" and (total := host_memory()) is not None:
        # Emulated devices share what there is.
        limit = total // jax.local_device_count()
    count = jax.device_count() if most is None else min(most, jax.device_count())
    return ["--devices", f"{count}x{device.device_kind}", *([] if limit is None else ["--memory", f"{limit}B"])]
