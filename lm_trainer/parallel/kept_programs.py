"""Compiled programs that a run keeps, so that its later attempts and all of its processes run the same machine code.

Compilers for GPUs choose kernels by timing them, and the order in which XLA fuses operations may differ between
processes (https://github.com/openxla/xla/issues/37902), so a program that is compiled twice may round differently.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path

import jax

from lm_trainer.core.files import write_atomically
from lm_trainer.core.jax_internals import compile_through
from lm_trainer.core.runtime import cpu_instructions, cpu_threads
from lm_trainer.parallel.processes import broadcast_bytes, is_lead

logger = logging.getLogger(__name__)

_SUFFIX = ".program"
_HEADER = b"lm_trainer program 1 "
"""Beginning of each file. The SHA-256 of the program follows, in hexadecimal digits, and a line break."""
_CURRENT: ContextVar[KeptPrograms | None] = ContextVar("kept_programs", default=None)


class KeptPrograms:
    """Programs in one directory for each compilation target, by the keys of JAX's compilation cache.

    JAX's key covers the program, its options, the devices and the versions of the compiler. Only process 0 reads and
    writes files. It sends the programs to the other processes, which need not see the directory.

    Args:
        directory: directory of the programs for all targets, which need not exist.
        target: name of the target; see `compilation_target`.
    """

    def __init__(self, directory: Path, target: str):
        self._directory, self._target = directory / target, target
        self._contents: dict[str, bytes] = {}
        self._unsent: list[str] = []
        # Programs of several devices are compiled in several threads.
        self._lock = threading.Lock()
        self._writes = is_lead()

    def load(self) -> list[str]:
        """Loads the programs in all processes. All processes must call this method.

        Returns:
            Notes for the user about programs that cannot be used; an empty list except in process 0.
        """
        notes = list[str]()
        if is_lead():
            try:
                files = sorted(self._directory.glob(f"*{_SUFFIX}"))
                other_targets = [] if files else _list_targets(self._directory.parent)
            except OSError as error:
                files, other_targets = [], []
                notes.append(f"warning: {self._directory}: cannot be read ({error.strerror}); programs are compiled")
            owner = _find_owner(self._directory) if files else 0
            for file in files:
                try:
                    self._contents[file.name.removesuffix(_SUFFIX)] = _read_program(file, owner)
                except (OSError, ValueError) as error:
                    reason = error.strerror if isinstance(error, OSError) else str(error)
                    notes.append(f"warning: {file}: {reason}; its program is compiled again")
            if other_targets:
                notes.append(
                    f"warning: {self._directory.parent} has programs for {', '.join(other_targets)}, and this is "
                    f"{self._target}: programs are compiled again, and bits may differ from here on"
                )
            self._unsent = [*self._contents]
        self.send()
        return notes

    def send(self) -> None:
        """Sends new programs from process 0 to the others. All processes must call this method at the same point."""
        if jax.process_count() == 1:
            return
        with self._lock:
            unsent, self._unsent = self._unsent, []
            sizes = [(key, len(self._contents[key])) for key in unsent]
            message = json.dumps(sizes).encode() + b"\n" + b"".join(self._contents[key] for key in unsent)
        head, _, received = broadcast_bytes(message).partition(b"\n")
        start = 0
        for key, size in json.loads(head):
            self._contents.setdefault(key, received[start : start + size])
            start += size

    def get(self, key: str) -> bytes | None:
        """Returns the program with this key; None if it is not kept."""
        return self._contents.get(key)

    def put(self, key: str, content: bytes) -> None:
        """Keeps a program. A program with the same key is replaced."""
        with self._lock:
            if self._contents.get(key) == content:
                return
            self._contents[key] = content
            if is_lead():
                self._unsent.append(key)
            if self._writes:
                self._write(key, content)

    def _write(self, key: str, content: bytes) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            header = _HEADER + hashlib.sha256(content).hexdigest().encode() + b"\n"
            write_atomically(self._directory / f"{key}{_SUFFIX}", header + content)
        except OSError as error:
            # Training does not need the files, so it continues.
            self._writes = False
            logger.warning(
                "%s: cannot be written (%s), so the next start compiles the programs again",
                self._directory,
                error.strerror,
            )


@contextmanager
def keep_programs(directory: Path, note: Callable[[str], object]) -> Iterator[None]:
    """Returns a context in which JAX loads programs from a directory, and keeps there what it compiles and caches.

    All processes of a run must enter it at the same point. Programs that JAX's compilation cache does not store are not
    kept either.

    Args:
        directory: directory of the programs for all targets, which need not exist.
        note: receives notes for the user about programs that cannot be used.
    """
    programs = KeptPrograms(directory, compilation_target())
    for line in programs.load():
        note(line)
    token = _CURRENT.set(programs)
    try:
        with compile_through(programs):
            yield
    finally:
        _CURRENT.reset(token)


def send_new_programs() -> None:
    """Sends programs that process 0 has compiled to the others, if programs are kept.

    All processes must call this function at the same point.
    """
    programs = _CURRENT.get()
    if programs is not None:
        programs.send()


def compilation_target() -> str:
    """Returns the name of the devices and of the compiler, for example `gpu-NVIDIA-H100-80GB-HBM3-jaxlib-0.10.2`.

    On a CPU, the name contains the vector instructions and the number of threads, which JAX's cache keys leave out.
    """
    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else f"{cpu_instructions()} {cpu_threads()} threads"
    name = f"{device.platform} {kind} jaxlib {metadata.version('jaxlib')}"
    return re.sub(r"[^A-Za-z0-9._]+", "-", name)


def _list_targets(directory: Path) -> list[str]:
    """Lists the targets that have programs."""
    return sorted({file.parent.name for file in directory.glob(f"*/*{_SUFFIX}")})


def _read_program(file: Path, owner: int) -> bytes:
    """Reads a program. Raises `ValueError` if it is damaged, or if the file belongs to another user than `owner`."""
    # A program is machine code, which this process will run.
    if file.stat().st_uid != owner:
        raise ValueError("belongs to another user")
    head, _, content = file.read_bytes().partition(b"\n")
    if head != _HEADER + hashlib.sha256(content).hexdigest().encode():
        raise ValueError("is damaged (its checksum differs)")
    return content


def _find_owner(directory: Path) -> int:
    """Returns the user ID of files that this process creates in a directory. A file server may map user IDs."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:  # read-only, or full
        return os.geteuid() if hasattr(os, "geteuid") else 0
