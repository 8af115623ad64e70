"""Python in processes that have imported what most of them need: forks of a process with no thread and no backend.

A start of Python with the modules of the data takes a second, most of a test of what such a process does.

    builder = start_fork(main, corpus, directory)
    builder.kill()
    run_fork(PROGRAM, "argument", env=...)
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

IMPORTED = ["tests.core.forks", "tests.data.program", "httpx2", "truststore", "yaml", "tqdm.auto"]
"""Modules that the forks have imported. None reads an environment variable that a test sets, as the client of the hub
does."""


def start_fork(function: Callable[..., object], *args: object) -> BaseProcess:
    """Starts a process that calls a function of a module; what it returns is lost."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=function, args=args)
    process.start()
    return process


def run_fork(program: str, *args: str, env: Mapping[str, str], timeout: float = 120) -> CompletedProcess[str]:
    """Does as `subprocess.run` with `python -c PROGRAM` and captured text; the modules of `IMPORTED` see no `env`."""
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / name for name in ("stdout", "stderr")]
        process = start_fork(_run, program, args, dict(env), outputs)
        process.join(timeout)
        process.kill()
        process.join()
        assert process.exitcode is not None
        return CompletedProcess(["-c", *args], process.exitcode, *(output.read_text() for output in outputs))


def _run(program: str, args: tuple[str, ...], env: dict[str, str], outputs: list[Path]) -> None:
    os.environ.clear()
    os.environ.update(env)
    for number, output in enumerate(outputs, start=1):
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["-c", *args]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
