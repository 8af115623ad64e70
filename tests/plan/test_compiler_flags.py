"""The advice on flags of the TPU's compiler, for programs that send what is given here."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_trainer.plan import parse_devices
from lm_trainer.plan.compiler_flags import SPARSE_CORES, all_gather_advice
from lm_trainer.plan.programs import ProgramWork

DOCS = Path(__file__).resolve().parents[2] / "docs"
GATHERED = {"all-gather": 8.0, "reduce-scatter": 4.0, "all-reduce": 1.0}
ADDED = {"all-reduce": 24.0, "all-to-all": 1.0}


@pytest.mark.parametrize(
    ("devices", "data", "sent", "advised"),
    [
        ("v5p:4x4x4", 64, ADDED, True),
        ("v5p:4x4x4", 64, GATHERED, False),
        ("v5p:4x4x4", 64, {}, False),
        ("v5e:8x8", 64, ADDED, False),  # there all-gathers are never replaced
        ("v5p:4x4x4", 1, ADDED, False),  # nothing is cut, and sums of gradients have to be whole
    ],
)
def test_flags_are_named_where_gathers_became_sums(devices: str, data: int, sent: dict[str, float], advised: bool):
    mesh = {"replica": 64 // data, "data": data}
    programs = [ProgramWork("a", 1, (), sent, {}), ProgramWork("b", 2, (), {"all-to-all": 3.0}, {})]
    advice = all_gather_advice(parse_devices(devices), mesh, programs)
    assert (advice is not None) == advised
    assert advice is None or SPARSE_CORES in advice


def test_the_documentation_names_the_same_flags():
    assert f'"{SPARSE_CORES}"' in (DOCS / "how-to/start-on-tpu.md").read_text()
