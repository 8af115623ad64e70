"""Parameters that decay, as `lmt config` lists and checks them."""

from pathlib import Path

import pytest

from tests.conftest import Lmt

FILE = """\
model: {num_layers: 2, hidden_dim: 64, num_heads: 4}
optimizer:
  weight_decay: 0.1
"""


@pytest.fixture
def config(in_tmp_path: Path) -> str:
    Path("run.yaml").write_text(FILE, encoding="utf-8")
    return "run.yaml"


def listed(text: str) -> dict[str, bool]:
    return {name: word == "decays" for word, name in (line.split() for line in text.splitlines())}


def test_show_lists_what_decays(config: str, lmt: Lmt) -> None:
    decays = listed(lmt("config", "show", config, "--decays").stdout)
    assert decays["blocks.0.mlp.up.weight"]
    assert not decays["blocks.0.mlp.up.bias"]
    assert not decays["embed.tokens"]
    changed = listed(
        lmt("config", "show", config, "--decays", "optimizer.weight_decay_modules=.*mlp.*weight|.*embed").stdout
    )
    assert {name for name, is_so in changed.items() if is_so} == {
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "embed.tokens",
        "embed.positions",
    }


def test_check_says_at_the_line_what_matches_nothing(config: str, lmt: Lmt) -> None:
    assert lmt("config", "check", config, "optimizer.weight_decay_modules=[mlp]").returncode == 0
    Path("bad.yaml").write_text(FILE + "  weight_decay_modules: [mlp, atention]\n", encoding="utf-8")
    done = lmt("config", "check", "bad.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: bad.yaml:4:25: optimizer.weight_decay_modules: 'atention' matches no parameter; near it are "
        "blocks.0.attention"
    )


def test_show_lists_the_multipliers_of_a_parametrization(config: str, lmt: Lmt) -> None:
    listed_lines = lmt("config", "show", config, "--multipliers").stdout.splitlines()
    assert {tuple(line.split()[:4]) for line in listed_lines[1:]} == {("1", "1", "1", "1")}
    base = "parametrization={type: mup, base: {hidden_dim: 16}}"
    shown = lmt("config", "show", config, "--multipliers", base).stdout
    lines = {name: list(map(float, values)) for *values, name in (line.split() for line in shown.splitlines()[1:])}
    # Variance and rate of matrices are 1 / 4, and heads are 4 times as large: scores have half their factor.
    assert lines["blocks.0.mlp.up.weight"] == [0.5, 0.25, 0.25, 4]
    assert lines["blocks.0.attention.q.weight"] == [0.25, 0.125, 0.5, 8]
    assert lines["final_norm.scale"] == [0.25, 0.25, 1, 4]


def test_check_names_a_part_without_a_rule(config: str, lmt: Lmt) -> None:
    changes = "parametrization={type: mup, base: {hidden_dim: 16}}", "optimizer.type=soap"
    done = lmt("config", "check", config, *changes)
    assert done.returncode == 2
    assert "parametrization: mup and optimizer.type: soap: there is no rule for this optimizer" in done.stderr
    assert "Traceback" not in done.stderr
