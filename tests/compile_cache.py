"""A directory of compiled programs that outlives a session of tests: a fault in it costs time and changes no result.

JAX reads an entry without checking it. So entries are sealed at the end of a session, with a digest of each, and the
next session removes all that have none or another one: what a kill cut off, what a disk has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import IO

import zstandard

from lm_trainer.core.runtime import available_cores

MAX_BYTES = 2 * 2**30
"""The size beyond which the entries that were written first are removed."""
_SEALS = "digests.json"
_LOCK = "lock"
_locks: dict[Path, IO[bytes]] = {}
"""Locks of the directories that this process uses, until it ends."""


def open_cache(base: Path) -> Path | None:
    """Returns the directory for this machine and these packages below `base`, with intact entries only.

    None where it cannot be written to.
    """
    directory = base / _key()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if directory not in _locks:
            _locks[directory] = (directory / _LOCK).open("ab")
        lock = _locks[directory]
        # What another session has written is sealed at its end, and spared until then.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_unsealed(directory)
        fcntl.flock(lock, fcntl.LOCK_SH)
        _probe(directory)
    except OSError:
        return None
    return directory


def seal_cache(directory: Path) -> None:
    """Records the digests of all complete entries, for the next session; nothing on a disk that is full or read-only.

    An entry may be incomplete because a test has killed the process that wrote it.
    """
    try:
        digests = _sealed(directory)
        for name, path in _entries(directory).items():
            if name not in digests and read_program(path) is not None:
                digests[name] = _digest(path)
        written = directory / f"{_SEALS}.{os.getpid()}"
        written.write_text(json.dumps(digests))
        written.replace(directory / _SEALS)
    except OSError:
        return


def _key() -> str:
    """Names all that decides what a compiled program is, or whether it runs here, and that JAX's own key leaves out."""
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib")]
    cpu = hashlib.sha256("\n".join([platform.machine(), *_cpu_features()]).encode()).hexdigest()[:12]
    return "-".join([*versions, cpu, f"{available_cores()}cores"])


def _cpu_features() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})


def _probe(directory: Path) -> None:
    """Raises OSError for a directory that takes no new file, or a disk that is full."""
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(bytes(2**20))
        file.flush()
        os.fsync(file.fileno())


def _entries(directory: Path) -> dict[str, Path]:
    """Returns the file of each entry by its path within the directory."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.name.startswith((_SEALS, _LOCK)))
    return {str(path.relative_to(directory)): path for path in files}


def _sealed(directory: Path) -> dict[str, str]:
    """Returns the digest of each sealed entry by its path within the directory."""
    try:
        digests = json.loads((directory / _SEALS).read_text())
    except (OSError, ValueError):
        return {}
    return digests if isinstance(digests, dict) else {}


def _remove_unsealed(directory: Path) -> None:
    digests, total = _sealed(directory), 0
    for name, path in sorted(_entries(directory).items(), key=lambda entry: entry[1].stat().st_mtime, reverse=True):
        total += path.stat().st_size
        if digests.get(name) != _digest(path) or total > MAX_BYTES:
            path.unlink()


def read_program(path: Path) -> bytes | None:
    """Returns what an entry holds, None where it cannot be read or decompressed to its end."""
    try:
        return zstandard.ZstdDecompressor().decompress(path.read_bytes())
    except (OSError, zstandard.ZstdError):
        return None


def write_program(path: Path, content: bytes) -> None:
    """Writes an entry, or nothing where the disk is full."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f"{path.name}.{os.getpid()}")
        written.write_bytes(zstandard.ZstdCompressor().compress(content))
        written.replace(path)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
