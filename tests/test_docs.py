"""The documentation is true: its lists are whole, and the files, modules and programs that it names exist."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import jax
import pytest
import typer

from cli.main import app
from lm_trainer.data.sources import AnySource
from lm_trainer.models import AnyModel, Gpt2Config
from lm_trainer.optim import OPTIMIZERS, AnyOptimizer, OptimizerConfig, Param
from lm_trainer.run.build.setup import trace_model
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.trackers import AnyTracker
from tests.conftest import ROOT, users_environment

CHOOSE = ROOT / "docs/how-to/choose-an-optimizer.md"
AGENTS = ROOT / "AGENTS.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", AGENTS, *sorted((ROOT / "docs").rglob("*.md"))]


def types(union: Any) -> list[str]:
    """The `type` of each member of a union, its first spelling."""
    members = typing.get_args(typing.get_args(union)[0])
    return [typing.get_args(member.model_fields["type"].annotation)[0] for member in members]


def row(page: Path, title: str) -> str:
    """The second cell of the table row that begins with `title`."""
    match = re.search(rf"^\| {re.escape(title)} \| (.+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert match, f"{page.name} has no row {title!r}"
    return match[1]


def squeezed(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def missing(names: list[str], cell: str) -> list[str]:
    """The names that stand in no entry of a list such as `GPT-2, Llama (1 to 3); ...`."""
    entries = [squeezed(entry) for entry in re.split(r"[,;:()]", cell)]
    return [name for name in names if not any(squeezed(name) in entry for entry in entries)]


def test_a_name_that_is_missing_is_noticed() -> None:
    assert missing(["gpt2", "gpt_neox", "new"], "GPT-2, GPT-NeoX (20B); Newton") == []
    assert missing(["gpt2", "gpt_neox", "new"], "GPT-2, Newton") == ["gpt_neox"]


@pytest.mark.parametrize(
    ("title", "union"),
    [("models", AnyModel), ("optimizers", AnyOptimizer), ("data from", AnySource), ("trackers", AnyTracker)],
)
def test_the_readme_lists_every_member(title: str, union: Any) -> None:
    lacking = missing(types(union), row(ROOT / "README.md", title))
    assert not lacking, f"README.md: the row {title!r} must name {', '.join(lacking)}"


def test_the_table_of_trackers_is_whole() -> None:
    page = ROOT / "docs/how-to/track-a-run.md"
    rows = re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    lacking = sorted(set(types(AnyTracker)) - set(rows))
    assert not lacking, f"docs/how-to/track-a-run.md: the table must have a row for {', '.join(lacking)}"


def optimizer_rows() -> dict[str, list[str]]:
    """`type` -> the other cells of its row in the table of optimizers."""
    rows = re.findall(r"^\| (`.+?`) \| (.+) \|$", CHOOSE.read_text(encoding="utf-8"), re.MULTILINE)
    cells = [(re.findall(r"`([^`]+)`", first), other_cells.split(" | ")) for first, other_cells in rows]
    return {name: other_cells for names, other_cells in cells for name in names if len(other_cells) == 4}


@pytest.mark.parametrize(("name", "optimizer"), list(zip(types(AnyOptimizer), OPTIMIZERS, strict=True)))
def test_the_table_of_optimizers_is_true(name: str, optimizer: type[OptimizerConfig]) -> None:
    config = optimizer()
    assert name in optimizer_rows(), f"docs/how-to/choose-an-optimizer.md: the table must have a row for `{name}`"
    _, state, update, _ = optimizer_rows()[name]
    assert update.startswith("sharded" if config.elementwise else "whole"), name
    assert state == f"{state_per_parameter(config):.1f}".removesuffix(".0"), name


def state_per_parameter(config: OptimizerConfig) -> float:
    """The numbers that an optimizer keeps for each number of GPT-2 small."""
    model = gpt2_small()
    tx = config.build({name: Param(name, x.shape, model.axes[name]) for name, x in model.shapes.items()})
    state = jax.eval_shape(tx.init, dict(model.shapes))
    return sum(x.size for x in jax.tree.leaves(state)) / sum(x.size for x in model.shapes.values())


@functools.cache
def gpt2_small() -> Any:
    gpt2 = Gpt2Config(hidden_dim=768, num_heads=12, num_layers=12, seq_len=1024)
    return trace_model(RunConfig(model=gpt2), 50257)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    scripts = [f"benchmarks/{name}*" for name in re.findall(r"-m benchmarks\.(\w+)", text)]
    paths = [name for name in [*re.findall(PATH, text), *scripts] if not exists(name)]
    names = [name for name in re.findall(r"\blm_trainer(?:\.\w+)+", text) if not resolves(name)]
    imports = re.findall(r"^from (lm_trainer[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    names += [
        f"{module}.{name}" for module, some in imports for name in some.split(", ") if not resolves(f"{module}.{name}")
    ]
    assert not paths + names, f"{page.relative_to(ROOT)} names what is not there: {', '.join(paths + names)}"


FOREIGN_FILES = {
    "convert_hf_to_gguf.py",
    "convert_lora_to_gguf.py",
    "file.py",
    "gated.py",
    "hybrid.py",
    "my_model.py",
    "pipelines.py",
    "train_gpt2.py",
    "train_shakespeare_char.py",
}
"""Files of the reader's own, and of other projects."""
PATH = r"(?<![\w./<{-])(?:[\w-]+/)*[\w-]+\.py\b|\b(?:lm_trainer|cli|tests|benchmarks|configs)/[\w./*-]*\w"


def exists(name: str) -> bool:
    """True for a path or glob below the root or `lm_trainer/`, and for the name of a file anywhere in `lm_trainer/`."""
    if any(ROOT.glob(name)) or any((ROOT / "lm_trainer").glob(name)) or "NAME" in name or name in FOREIGN_FILES:
        return True
    return "/" not in name and any((ROOT / "lm_trainer").rglob(name))


def resolves(name: str) -> bool:
    """True for a module, and for an attribute of one: the longest part that is a module is imported."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            resolved: Any = importlib.import_module(".".join(parts[:end]))
            for part in parts[end:]:
                if not hasattr(resolved, part):
                    return part in getattr(resolved, "model_fields", {})
                resolved = getattr(resolved, part)
            return True
    return False


def test_the_page_for_agents_lists_the_commands_without_json() -> None:
    def without_json(command: Any, path: str) -> set[str]:
        commands: dict[str, Any] = getattr(command, "commands", {})
        if commands:
            return set[str]().union(*(without_json(c, f"{path} {name}") for name, c in commands.items()))
        return set() if any("--json" in parameter.opts for parameter in command.params) else {path}

    rows = AGENTS.read_text(encoding="utf-8").partition("| command | read instead |")[2].splitlines()
    listed = {name for row in rows if row for name in re.findall(r"`(lmt [\w -]+)`", row.split(" | ")[0])}
    assert listed == without_json(typer.main.get_command(app), "lmt")


def test_the_architecture_names_every_wing() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    wings = [folder.name for folder in sorted((ROOT / "lm_trainer").iterdir()) if (folder / "__init__.py").exists()]
    lacking = sorted(set(wings) ^ set(re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE)))
    assert not lacking, f"docs/explanation/architecture.md: the table of wings differs in {', '.join(lacking)}"


@pytest.mark.slow
def test_the_program_of_ones_own_loop_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs/how-to/own-loop.md").read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), encoding="utf-8")
    env = users_environment()
    result = subprocess.run([sys.executable, program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} >= {
        "walks",
        "walks-2",
        "walks-3",
        "walks-4",
        "tables",
        "tables-2",
    }


def test_a_name_that_is_gone_is_noticed() -> None:
    assert resolves("lm_trainer.optim.AdamConfig.learning_rate")
    assert resolves("lm_trainer.run.trainer.Trainer")
    assert not resolves("lm_trainer.run.nowhere")
    assert not resolves("lm_trainer.optim.AdamConfig.nothing")
    assert exists("nn/spec.py")
    assert exists("lm_trainer/optim/")
    assert not exists("lm_trainer/nowhere.py")
    assert re.findall(PATH, "in `lm_trainer/run/` and `nn/spec.py`, a/b.pyc") == ["lm_trainer/run", "nn/spec.py"]
