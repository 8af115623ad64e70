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
