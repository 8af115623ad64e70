"""Header of a table of results: kind of machine and versions, but never the name of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lm_trainer.core.runtime import available_cores

LMT = [sys.executable, "-c", "from cli.main import main; main()"]
"""The `lmt` command of the checkout on the Python path."""


def describe_setting(*packages: str) -> str:
    versions = ", ".join(f"{package} {_package_version(package)}" for package in packages)
    machine = f"{_processor_name()}, {available_cores()} cores"
    return f"{machine}; Python {platform.python_version()}, {versions}; commit {_current_commit()}."


def describe_load(when: str = "at the end") -> str:
    return f"Other work on the machine: a load of {os.getloadavg()[0]:.1f} {when}."


def busy_seconds() -> float | None:
    """Returns the CPU seconds of all processes since the system started; None if the system does not report them."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal
    user, nice, system, _, _, irq, softirq, steal = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def markdown_table(heads: list[str], rows: list[list[str]]) -> str:
    """Formats a Markdown table in which all columns except the first are right-aligned."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _current_commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
