"""No command prints what a terminal would obey, wherever a text comes from."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lm_trainer.trackers import Progress
from tests.conftest import Lmt
from tests.test_project import ROOT, dotted, nodes, python_files

EVIL = "\x1b]0;mine\x07\x1b[2J"
"""Sets the title of the window, and clears the screen."""


def printers(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Name | ast.Attribute) and dotted(node) in ("print", "typer.echo", "typer.secho"):
            yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_commands_print_through_one_place() -> None:
    """But for the line of a scan, which is redrawn in place, and cleans the name that it shows."""
    places = {line.split(":")[0] for path in python_files("cli", "lm_trainer") for line in printers(path)}
    assert places == {"cli/clean.py", "cli/scan_progress.py"}


def is_clean(text: str) -> bool:
    return "\x1b" not in text and "\x07" not in text and "mine" in text


def test_names_of_files_in_errors_and_notes(lmt: Lmt, in_tmp_path: Path) -> None:
    missing = lmt("config", "check", f"{EVIL}.yaml")
    assert missing.returncode == 2
    assert is_clean(missing.stderr)
    (in_tmp_path / f"{EVIL}.yaml").write_text("{}")
    assert is_clean(lmt("config", "check", f"{EVIL}.yaml", "--no-files").stdout)


def test_names_of_runs(lmt: Lmt, in_tmp_path: Path) -> None:
    run = in_tmp_path / "logs" / EVIL
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"id": EVIL, "checkpoints": "checkpoints/x"}))
    listed = lmt("runs")
    assert listed.returncode == 0
    assert is_clean(listed.stdout)
    assert is_clean(lmt("report", "other").stderr)


@pytest.mark.parametrize("live", [True, False])
def test_names_in_the_progress_of_a_run(live: bool) -> None:
    class Stream:
        encoding = "utf-8"
        text = ""

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

        def isatty(self) -> bool:
            return live

    stream = Stream()
    progress = Progress(3, stream=stream, live=live)  # pyright: ignore[reportArgumentType]
    progress.note(f"note {EVIL}")
    progress.phase(f"phase {EVIL}")
    progress.close()
    assert "note" in stream.text
    # The bar moves the cursor itself, but sets no title and clears no screen.
    assert "\x1b]0" not in stream.text
    assert "\x1b[2J" not in stream.text


def test_a_foreign_key_stays_in_its_comment(lmt: Lmt, in_tmp_path: Path) -> None:
    keys = {
        "learning_rate": 1e-3,
        "max_iters": 10_000,
        "n_layer": 2,
        "zz\nhf_save_path: /x\nhf_upload: evil/repo\n#": 1,
        "zz\rtrainer: {shutdown_at_exit: true}\n#": 1,
        "zz\x85hf_upload: evil/repo": 1,
        "zz\u2028hf_upload: evil/repo": 1,
        f"zz{EVIL}": "x\nhf_upload: evil/repo",
    }
    (in_tmp_path / "theirs\nhf_upload: evil.json").write_text(json.dumps(keys))
    done = lmt("config", "import", "theirs\nhf_upload: evil.json", "--from", "nanoGPT", "-o", "ours.yaml")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr
    shown = lmt("config", "show", "ours.yaml").stdout
    assert "hf_upload: false" in shown
    assert "hf_save_path: null" in shown
    assert "shutdown_at_exit: false" in shown
    assert r"zz\nhf_save_path: /x\nhf_upload: evil/repo\n#" in (in_tmp_path / "ours.yaml").read_text()


def test_an_override_stays_in_its_comment(lmt: Lmt, in_tmp_path: Path) -> None:
    (in_tmp_path / "c.yaml").write_text("{}")
    shown = lmt("config", "show", "c.yaml", "trainer.sample_prompt=a\nhf_upload: evil", "--origin").stdout
    (in_tmp_path / "again.yaml").write_text(shown)
    assert "hf_upload: false" in lmt("config", "show", "again.yaml").stdout


def test_a_document_shows_where_it_is_from(lmt: Lmt, in_tmp_path: Path) -> None:
    (in_tmp_path / f"{EVIL}.jsonl").write_text(json.dumps({"text": f"some {EVIL} text"}) + "\n")
    config = {
        "model": {"type": "gpt2", "seq_len": 16},
        "data": {"tokenizer": "bytes", "num_workers": 0, "train_urls": [f"{EVIL}.jsonl"]},
    }
    (in_tmp_path / "c.yaml").write_text(json.dumps(config))
    assert is_clean(lmt("config", "check", "c.yaml", "data.train_urls=[other.jsonl]").stderr + "mine")
    built = lmt("data", "build", "c.yaml")
    assert built.returncode == 0, built.stderr
    assert is_clean(lmt("data", "inspect", "c.yaml").stdout)
