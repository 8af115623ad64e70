"""Runtime environment of a run, and its differences between two attempts."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lm_trainer.core.runtime import available_cores, cpu_threads
from lm_trainer.run.config.trainer_config import TrainerConfig

_COMPUTES = re.compile(r"jax|nvidia-|libtpu|flax$|optax$|numpy$|ml.dtypes$|qwix$|tokenizers$|lm.trainer$")
"""Packages whose version may change a run's bits."""
_METADATA = ("METADATA", "PKG-INFO", "")
"""Files of an installed package that may name it; the last one is an old `.egg-info` file itself."""
_HEADER = re.compile(r"^(Name|Version): *(\S+) *$", re.MULTILINE)


def environment() -> dict[str, Any]:
    """Describes all that may matter for a reproduction of the run; no host name, user or environment variables."""
    import jax

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(_packages()),
        "git": _git_commit(),
        "code": _code_hash(),
        "devices": [d.device_kind for d in jax.devices()],
        "processes": jax.process_count(),
        "cores": available_cores(),
        "cpu_threads": cpu_threads(),
    }


def pinned_cpu_threads(trainer: TrainerConfig, attempt: Mapping[str, Any]) -> int | None:
    """With how many threads to compute on a CPU what `attempt`, an entry of env.json, computed: as the configuration
    says, or as many as it had; None where neither says so.
    """
    return trainer.cpu_threads or attempt.get("cpu_threads")


# A process keeps the code that it has imported, so these three are read once.


@functools.cache
def _packages() -> list[tuple[str, str]]:
    """Lists the names, in lower case, and versions of all installed packages."""
    packages = []
    for distribution in metadata.distributions():
        # `distribution.name` and `.version` each parse the whole file with its long description.
        content = next(filter(None, map(distribution.read_text, _METADATA)), "")
        headers = dict(_HEADER.findall(content.split("\n\n", 1)[0]))
        if headers.keys() == {"Name", "Version"}:
            packages.append((headers["Name"].lower(), headers["Version"]))
    return sorted(packages)


@functools.cache
def _git_commit() -> str | None:
    """The commit of the checkout that this code runs from, marked when it has changes; None outside one."""
    here = Path(__file__).resolve().parents[1]
    try:
        commit = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()


@functools.cache
def _code_hash() -> str:
    """A hash of this package's source files, 16 hexadecimal digits."""
    # A checkout with uncommitted changes has the same commit for many states of the code.
    here, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(here.rglob("*.py")):
        digest.update(f"{file.relative_to(here).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def notes_on_start(now: Mapping[str, Any], trainer: TrainerConfig) -> list[str]:
    """Notes on the first attempt of a run."""
    threads = now.get("cpu_threads")
    if not trainer.bitwise or trainer.cpu_threads or not threads or threads <= now["cores"]:
        return []
    return [
        f"XLA computes with {threads} threads on {now['cores']} cores, one for each device; a run on other devices "
        f"gives the same bits with trainer.cpu_threads={threads}"
    ]


def changes_since(before: Mapping[str, Any], now: Mapping[str, Any], file: Path) -> list[str]:
    """Notes on an attempt that goes on where another one stopped."""
    notes = []
    if changed := environment_differences(before, now):
        notes.append(f"the attempt before ran on something else: {', '.join(changed)}")
    other = []
    if before.get("rows") == now["rows"] and before.get("program") != now["program"]:
        other.append(f"ran the program {before.get('program')}")
    threads = now.get("cpu_threads")
    if _other(before, now, "cpu_threads"):
        other.append(f"computed with {before['cpu_threads']} threads, not {threads} (trainer.cpu_threads)")
    elif threads and _other(before, now, "cores"):
        notes.append(f"XLA computes with {threads} threads on {now['cores']} cores, as before, to give the same bits")
    if other:
        notes.append(
            f"warning: the attempt before {' and '.join(other)}; from here on, bits may differ from those of an "
            f"uninterrupted run (see what changed in {file})"
        )
    return notes


def environment_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lists the differences of two entries of env.json that may give other bits, as `NAME: OLD -> NEW`.

    How many devices there are gives none, and of the packages only those that compute count.
    """
    found = [
        f"{key}: {old[key]} -> {new[key]}" for key in ("code", "git", "python", "cpu_threads") if _other(old, new, key)
    ]
    kinds = [sorted({*attempt.get("devices", ())}) for attempt in (old, new)]
    if kinds[0] != kinds[1]:
        found.append(f"devices: {', '.join(kinds[0])} -> {', '.join(kinds[1])}")
    versions = [attempt.get("packages", {}) for attempt in (old, new)]
    for name in sorted({*versions[0], *versions[1]}):
        a, b = (packages.get(name, "(absent)") for packages in versions)
        if a != b and _COMPUTES.match(name):
            found.append(f"{name}: {a} -> {b}")
    return found


def _other(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> bool:
    return key in old and key in new and old[key] != new[key]
