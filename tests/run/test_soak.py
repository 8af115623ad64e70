"""A run that is interrupted or disturbed at any moment and started again writes what an undisturbed run writes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_five_interruptions_leave_no_trace(tmp_path: Path) -> None:
    """Killed while compiling, in a save and in a deletion, a flipped bit, a signal; on one and two devices."""
    command = [sys.executable, ROOT / "benchmarks" / "soak.py", "--tier", "ci", "--out", tmp_path / "soak"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "5 interruptions in 1 laps" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="preloads a library")
def test_a_few_faults_of_the_world_leave_no_trace(tmp_path: Path) -> None:
    """A call of the file system that kills, calls that fail, a clock that jumps, damaged files."""
    command = [sys.executable, "-m", "benchmarks.soak_world", "--few", "--workers", "1", "--out", tmp_path / "soak"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "0 of them not as promised" in done.stdout
