"""Handling of programs that the compiler rejects: a one-line reason, and the program in a file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from lm_trainer.core.errors import UserError


@contextmanager
def explain_refusals(kind: str) -> Iterator[None]:
    """Turns a compiler error into a UserError, and writes the rejected program to a file.

    Args:
        kind: kind of the target device.

    Raises:
        UserError: if the compiler rejects a program, or JAX cannot make it without the device.
    """
    directory, previous_dump_directory = Path(tempfile.mkdtemp(prefix="lmt-plan-")), jax.config.values["jax_dump_ir_to"]
    # JAX writes each program to this directory before compiling it, so the file exists even if the compiler aborts.
    jax.config.update("jax_dump_ir_to", str(directory))
    keep = False
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        keep = True
        # The last file is the program that failed.
        programs = sorted(directory.glob("*.mlir"), key=lambda path: path.stat().st_mtime_ns)
        location = f"; the program is in {programs[-1]}" if programs else ""
        raise UserError(
            f"the compiler for {kind} refuses a program: {_extract_reason(str(error))}{location}"
        ) from error
    except RuntimeError as error:
        if "No supported GPU devices" not in str(error):
            raise
        raise UserError(
            f"JAX {jax.__version__} compiles the experts' kernel only on a machine with a GPU: leave --compile out, "
            "write model.expert_kernel=dense, or use JAX 0.10"
        ) from error
    finally:
        jax.config.update("jax_dump_ir_to", previous_dump_directory)
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _extract_reason(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "it gives no reason")
