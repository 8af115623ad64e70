"""Describes the runtime environment of a run, and how it differs between attempts."""

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

from lm_trainer.core.runtime import available_cores, cpu_instructions, cpu_threads
from lm_trainer.run.config.trainer_config import TrainerConfig

_RELEVANT_PACKAGES = re.compile(r"jax|nvidia-|libtpu|flax$|optax$|numpy$|ml.dtypes$|qwix$|tokenizers$|lm.trainer$")
"""Packages whose version may affect the exact bits of a run's results."""
_METADATA = ("METADATA", "PKG-INFO", "")
"""Names of the metadata file of an installed package. The empty name means an old-style `.egg-info` file itself.
"""
_HEADER = re.compile(r"^(Name|Version): *(\S+) *$", re.MULTILINE)


PROGRAM, GRAPH = "program", "graph"
"""Keys of the hashes of a compiled program in env.json: of its text, and of the graph of its operations. Runs that were
recorded by older versions only have the first."""


def describe_environment() -> dict[str, Any]:
    """Describes the environment, to reproduce the run. Omits the host name, the user and the environment variables."""
    import jax

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(_list_packages()),
        **describe_code(),
        "devices": [d.device_kind for d in jax.devices()],
        "processes": jax.process_count(),
        "cores": available_cores(),
        "cpu_threads": cpu_threads(),
        "instructions": cpu_instructions(),
    }


def describe_numeric_environment() -> dict[str, Any]:
    """Returns the part of `describe_environment` that may affect exact results, without the code and its commit.

    The kinds of devices are listed once, so the result does not depend on the number of devices.
    """
    environment = describe_environment()
    packages = {name: version for name, version in environment["packages"].items() if _RELEVANT_PACKAGES.match(name)}
    return {
        "python": environment["python"],
        "devices": sorted({*environment["devices"]}),
        "cpu_threads": environment["cpu_threads"],
        "instructions": environment["instructions"],
        "packages": packages,
    }


def describe_code() -> dict[str, str | None]:
    """Returns the commit of this code (`git`, None outside of a checkout) and a hash of its source files (`code`)."""
    return {"git": _git_commit(), "code": _code_hash()}


def num_cpu_threads_for_rerun(trainer: TrainerConfig, attempt: Mapping[str, Any]) -> int | None:
    """Returns the number of CPU threads to repeat `attempt`, an entry of env.json.

    The number comes from the configuration or, if that does not set it, from the attempt. None if neither gives one.
    """
    return trainer.cpu_threads or attempt.get("cpu_threads")


# The code that a process has imported does not change, so these three functions are computed only once.


@functools.cache
def _list_packages() -> list[tuple[str, str]]:
    """Lists the names (in lower case) and versions of all installed packages."""
    packages = []
    for distribution in metadata.distributions():
        # `distribution.name` and `.version` each parse the full metadata file, including the long description.
        content = next(filter(None, map(distribution.read_text, _METADATA)), "")
        headers = dict(_HEADER.findall(content.split("\n\n", 1)[0]))
        if headers.keys() == {"Name", "Version"}:
            packages.append((headers["Name"].lower(), headers["Version"]))
    return sorted(packages)


@functools.cache
def _git_commit() -> str | None:
    """Returns the commit of the checkout that contains this code, marked if there are changes; None outside of one."""
    package = Path(__file__).resolve().parents[1]
    try:
        commit = subprocess.run(
            ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
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
    """Returns a hash of the source files of this package, as 16 hexadecimal digits."""
    # The git commit does not distinguish between different uncommitted changes.
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def first_attempt_notes(attempt: Mapping[str, Any], trainer: TrainerConfig) -> list[str]:
    """Returns notes on the first attempt at a run."""
    threads = attempt.get("cpu_threads")
    if not trainer.bitwise or trainer.cpu_threads or not threads or threads <= attempt["cores"]:
        return []
    return [
        f"XLA computes with {threads} threads on {attempt['cores']} cores, one for each device; a run on other devices "
        f"gives the same bits with trainer.cpu_threads={threads}"
    ]


def continued_attempt_notes(previous: Mapping[str, Any], new: Mapping[str, Any], file: Path) -> list[str]:
    """Returns notes on an attempt that continues a previous one."""
    notes = []
    if changed := environment_differences(previous, new):
        notes.append(f"the attempt before ran on something else: {', '.join(changed)}")
    warnings = []
    if previous.get("rows") == new["rows"] and not is_same_program(previous, new):
        warnings.append(f"ran the program {previous.get('program')}")
    threads = new.get("cpu_threads")
    if _differs(previous, new, "cpu_threads"):
        warnings.append(f"computed with {previous['cpu_threads']} threads, not {threads} (trainer.cpu_threads)")
    elif threads and _differs(previous, new, "cores"):
        notes.append(f"XLA computes with {threads} threads on {new['cores']} cores, as before, to give the same bits")
    if warnings:
        notes.append(
            f"warning: the attempt before {' and '.join(warnings)}; from here on, bits may differ from those of an "
            f"uninterrupted run (see what changed in {file})"
        )
    return notes


def is_same_program(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Returns true if two entries of env.json have the same compiled program, possibly printed in different ways."""
    return a.get(PROGRAM) == b.get(PROGRAM) or (GRAPH in a and a[GRAPH] == b.get(GRAPH))


def environment_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lists the differences between two entries of env.json that may affect the exact results, as `NAME: OLD -> NEW`.

    Ignores the number of devices, and packages that have no effect on the computation.
    """
    changes = [
        f"{key}: {old[key]} -> {new[key]}"
        for key in ("code", "git", "python", "cpu_threads", "instructions")
        if _differs(old, new, key)
    ]
    kinds = [sorted({*attempt.get("devices", ())}) for attempt in (old, new)]
    if kinds[0] != kinds[1]:
        changes.append(f"devices: {', '.join(kinds[0])} -> {', '.join(kinds[1])}")
    versions = [attempt.get("packages", {}) for attempt in (old, new)]
    for name in sorted({*versions[0], *versions[1]}):
        a, b = (packages.get(name, "(absent)") for packages in versions)
        if a != b and _RELEVANT_PACKAGES.match(name):
            changes.append(f"{name}: {a} -> {b}")
    return changes


def _differs(old: Mapping[str, Any], new: Mapping[str, Any], key: str) -> bool:
    return key in old and key in new and old[key] != new[key]
