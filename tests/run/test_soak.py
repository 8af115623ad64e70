"""A run that is interrupted at any moment and started again writes what an undisturbed run writes."""

from __future__ import annotations

import os
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
