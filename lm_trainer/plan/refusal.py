"""Programs that a compiler refuses: its reason in one line, and the program in a file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from lm_trainer.core.errors import UserError


@contextmanager
def explained_refusals(kind: str) -> Iterator[None]:
    """Turns an error of the compiler into one for the user, and keeps the program that it was given.

    Args:
        kind: of the devices that are compiled for.

    Raises:
        UserError: when the compiler refuses a program.
    """
    directory, before = Path(tempfile.mkdtemp(prefix="lmt-plan-")), jax.config.values["jax_dump_ir_to"]
    # JAX writes each program there before it is compiled, so that it is there even if the compiler ends the process.
    jax.config.update("jax_dump_ir_to", str(directory))
    keep = False
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        keep = True
        # JAX numbers the files in the order in which they are compiled.
        programs = sorted(directory.glob("*.mlir"), key=lambda path: path.stat().st_mtime_ns)
        where = f"; the program is in {programs[-1]}" if programs else ""
        raise UserError(f"the compiler for {kind} refuses a program: {_reason(str(error))}{where}") from error
    finally:
        jax.config.update("jax_dump_ir_to", before)
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _reason(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "it gives no reason")
