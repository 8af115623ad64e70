"""Tests of the stand-ins by which `lmt config` does without JAX: they change what it costs and nothing that it says."""

import contextlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cli.main import app
from tests.conftest import ROOT, lmt_environment

MISTAKES = [
    *("optimizer.learning_rate=fast", "optimizer.type=adamm", "model.hiden_dim=3", "trainer.seed=-1"),
    *("data.source.type=jsn", "trainer.tracker={type: wandbb}", "data.format={type: chatt}"),
]
SCRIPT = """
import sys
from cli.light_imports import light_imports
from cli.main import app
with light_imports(["lmt", "config", "check"]):
    for arguments in sys.argv[1:]:
        try:
            app(["config", "check", *arguments.split("|")])
        except SystemExit as ended:
            print(ended.code)
    import jax
    print(hasattr(jax, "__file__"))
"""


@pytest.mark.slow
def test_light_imports_change_nothing_of_what_check_says() -> None:
    shipped = [[path.name] for path in sorted((ROOT / "configs").glob("*.yaml")) if not path.stem.startswith("ladder_")]
    calls = [*shipped, *(["gpt2_nano.yaml", mistake] for mistake in MISTAKES), ["no.yaml"]]
    light = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map("|".join, calls)],
        cwd=ROOT / "configs",
        env=lmt_environment(),
        capture_output=True,
        text=True,
    )
    assert light.stdout.splitlines()[-1] == "False", light.stderr
    with contextlib.chdir(ROOT / "configs"):
        full = [CliRunner().invoke(app, ["config", "check", *call], env={"COLUMNS": "120"}) for call in calls]
    assert [each.exit_code for each in full] == [0] * len(shipped) + [2] * (len(MISTAKES) + 1)
    assert light.stdout.splitlines()[:-1] == [
        line for each in full for line in (*each.stdout.splitlines(), str(each.exit_code))
    ]
    assert light.stderr == "".join(each.stderr for each in full)
