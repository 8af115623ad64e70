"""The notebook of the tutorial runs, and objects show themselves in notebooks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.generate.notebook import FILE, notebook_page, run_notebook, without_traces
from lm_trainer.core.batch import Batch
from lm_trainer.core.html_table import curve_svg, html_table
from lm_trainer.optim import AdamConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.summary import Summary
from lm_trainer.run.trainer import Trainer
from lm_trainer.trackers.notebook import NotebookProgress
from tests.conftest import users_environment


@pytest.mark.slow
def test_the_notebook_runs_and_its_models_agree(tmp_path: Path) -> None:
    """A cell of the notebook compares the logits of its export with transformers."""
    executed = run_notebook(FILE, tmp_path, users_environment())
    cells = without_traces(executed, tmp_path)["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output["output_type"] == "error"]
    curves = [output for output in outputs if "<svg" in "".join(output.get("data", {}).get("text/html", ""))]
    assert len(curves) >= 4  # while they train, and at the end
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert text.count(" equal\n") >= 3  # lmt replay
    assert "paired by document" in text
    assert str(tmp_path) not in text
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"nano", "squared"}
    assert (tmp_path / "exported/model.safetensors").is_file()


def test_the_page_shows_the_cells_with_their_outputs() -> None:
    page = notebook_page()
    assert page.count("```python\n") > 10
    assert page.count("<svg") >= 4
    assert "largest difference of a logit" in page
    # A blank line would end the HTML of an output.
    outputs = re.findall(r'^<div class="output">.*?</div>$', page, re.MULTILINE | re.DOTALL)
    assert len(outputs) >= 4
    assert all("\n" not in block for block in outputs)


class Cell:
    """Receives what a notebook would show."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, page: Any, **_: Any) -> Cell:
        self.update(page)
        return self

    def update(self, page: Any) -> None:
        self.shown.append(page.data)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    cell = Cell()
    monkeypatch.setattr("IPython.display.display", cell.display)
    return cell


def test_the_curve_grows_while_a_run_goes_on(cell: Cell) -> None:
    times = iter(range(1000))
    with NotebookProgress(4, seconds=0.5, clock=lambda: float(next(times))) as progress:
        progress.note("a run of <b>mine</b>")
        for step, loss in enumerate([4.0, 2.0, float("nan"), 1.0], start=1):
            progress.log(step, {"train/loss": loss})
    points = [re.findall(r'points="([^"]+)"', page) for page in cell.shown]
    counts = [len(found[0].split()) if found else 0 for found in points]
    assert counts == sorted(counts)
    assert counts[-1] >= 3
    assert "step 4/4" in cell.shown[-1]
    assert "a run of &lt;b&gt;mine&lt;/b&gt;" in cell.shown[-1]


def test_pictures_are_not_drawn_at_every_step(cell: Cell) -> None:
    with NotebookProgress(100, seconds=10, clock=lambda: 0.0) as progress:
        for step in range(1, 101):
            progress.log(step, {"train/loss": 1.0 / step})
    assert len(cell.shown) == 2  # the first step, and the end


def test_a_curve_begins_and_ends_where_its_points_do() -> None:
    svg = curve_svg([(step, 10.0 - step / 1000) for step in range(1, 5001)], "train/<loss>")
    points = [tuple(map(float, pair.split(","))) for pair in re.findall(r"[\d.]+,[\d.]+", svg)]
    assert len(points) < 500
    assert (points[0][0], points[-1][0]) == (44.0, 480.0)
    assert points[0][1] < points[-1][1]  # downwards is a larger number
    assert "train/&lt;loss&gt;" in svg
    assert ">5000<" in svg


def test_tables_escape_their_cells() -> None:
    assert html_table([("<script>", 1)], ("a & b",)) == (
        '<table style="text-align: left"><thead><tr><th>a &amp; b</th></tr></thead>'
        "<tbody><tr><td>&lt;script&gt;</td><td>1</td></tr></tbody></table>"
    )


def test_a_batch_a_trainer_and_a_summary_show_themselves(tmp_path: Path) -> None:
    tokens = np.arange(6, dtype=np.int32).reshape(2, 3)
    batch = Batch(tokens, tokens + 1, np.ones((2, 3), np.float32), tokens, tokens)
    assert "<td>targets</td><td>[2, 3]</td><td>int32</td><td>1 to 6</td>" in batch._repr_html_()
    trainer = Trainer(TrainerConfig(num_train_steps=7, train_batch_size=8), AdamConfig(), lambda *_: None)  # pyright: ignore[reportArgumentType]
    assert "<td>Adam</td>" in trainer._repr_html_()
    assert "7 of 8 rows" in trainer._repr_html_()
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "train/loss": {9 - s}}}\n' for s in (1, 2, 3)))
    summary = Summary("mine", tmp_path, tmp_path, 3, train_loss=6.0)
    assert "<svg" in summary._repr_html_()
    assert "done: step 3, train loss 6.0000" in summary._repr_html_()
    assert "<svg" not in Summary("mine", tmp_path / "none", tmp_path, 0)._repr_html_()
