"""The numbers of the first steps stay those on file.

When this fails, the arithmetic of training has changed: initial weights, data order, model, loss, optimizer or the
sums between devices. If nobody meant that, find the commit that did it: runs that are resumed across it would get other
bits. If it was meant, say in the changelog why and what became better, show that losses are as good, and write the
numbers anew with `python -m tests.run.first_steps`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.run.first_steps import FILE, MODELS, first_steps

RTOL = 2e-5
"""Processors and versions of XLA order sums in other ways, which a few steps in float32 carry to some 1e-6; a change of
a formula shows from 1e-4 on."""


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "gpt2")])
def test_the_first_steps_are_those_on_file(name: str, tmp_path: Path) -> None:
    golden = json.loads(FILE.read_text())[name]
    metrics = first_steps(MODELS[name], tmp_path)
    assert metrics == {metric: pytest.approx(values, rel=RTOL) for metric, values in golden.items()}, (
        "the arithmetic of training has changed; the first lines of this file say what to do"
    )
