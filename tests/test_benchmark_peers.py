"""The comparison with PyTorch, transformers and plain JAX: all train the same, and what trains otherwise is refused."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT, users_environment

pytest.importorskip("benchmarks.peers", reason="benchmarks are no part of an unpacked archive")

from benchmarks.peers.agreement import FLOAT32, STEPS, Trace, find_disagreements
from benchmarks.peers.kinds import KINDS

EXPECTED_TRACE = Trace([5.5, 5.4, 5.3, 5.2], 40.0)


@pytest.mark.parametrize(
    ("losses", "norm", "message"),
    [
        ([5.5, 5.4, 5.3, 5.2003], 40.0, "peer: the loss of step 4 is 5.200300, that of lmt 5.200000"),
        ([5.5, math.nan, math.nan, math.nan], 40.0, "peer: the loss of step 2 is nan, that of lmt 5.400000"),
        ([5.5, 5.4, 5.3, 5.2], 40.001, "the norm of the weights after 4 steps is 40.001000, that of lmt 40.000000"),
        ([5.5, 5.4, 5.3, 5.2], math.nan, "the norm of the weights after 4 steps is nan"),
        ([5.5, 5.4, 5.3], 40.0, "peer did 3 steps, lmt 4"),
    ],
)
def test_a_peer_that_trains_otherwise_is_refused(losses: Sequence[float], norm: float, message: str) -> None:
    (problem,) = find_disagreements({"lmt": EXPECTED_TRACE, "peer": Trace(losses, norm)}, "lmt", FLOAT32)
    assert message in problem


def test_rounding_is_no_disagreement() -> None:
    close = Trace([loss + 1e-5 for loss in EXPECTED_TRACE.losses], EXPECTED_TRACE.norm * (1 + 1e-7))
    assert find_disagreements({"lmt": EXPECTED_TRACE, "peer": close}, "lmt", FLOAT32) == []


def run_peers(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.peers", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=users_environment(), capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "without"), [("tiny", "compile|levanter"), ("llama-tiny", r"compile|levanter|\+alloc")]
)
def test_all_kinds_train_the_same(shape: str, without: str, tmp_path: Path) -> None:
    """All but those that are compiled by torch, which needs a C++ compiler and a minute, and Levanter, which has
    its own requirements.

    The allocator knows nothing of the model: one shape is enough for it.
    """
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    kinds = [kind for kind in KINDS if not re.search(without, kind)]
    report, measured = tmp_path / "peers.md", tmp_path / "peers.json"
    done = run_peers("--shape", shape, "--turns", "1", "--kinds", *kinds, "--results", report, "--json", measured)
    assert done.returncode == 0, done.stderr
    assert done.stdout == report.read_text()
    results = json.loads(measured.read_text())
    assert list(results["turns"]) == list(results["first_steps"]) == kinds
    assert results["missing"] == {}
    expected = results["first_steps"]["lmt"]
    assert len(expected["losses"]) == STEPS
    for kind in kinds:
        # Another epsilon, activation or rule of weight decay moves them by 2e-5 and more.
        assert results["first_steps"][kind]["losses"] == pytest.approx(expected["losses"], abs=3e-6), kind
        assert results["first_steps"][kind]["norm"] == pytest.approx(expected["norm"], rel=2e-7), kind
        assert f"| {kind} |" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--shape", "huge"), "invalid choice: 'huge'"), (("--turns", "0"), "--turns and --steps are at least 1")],
)
def test_a_mistake_on_the_command_line_is_explained(arguments: tuple[str, ...], message: str) -> None:
    done = run_peers(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
