"""Tests of plots of schedules: their points, their text, and an image file that can be read."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.checkpoint.policy import KeepEvery, is_permanent
from lm_trainer.core.errors import UserError
from lm_trainer.plot import Marks, SchedulePlot, plot_schedules, save_image, to_text
from lm_trainer.run.config.run_config import RunConfig

RUN: dict[str, Any] = {
    "trainer": {
        "num_train_steps": 20,
        "train_batch_size": 64,
        "checkpointer": {"keep": [{"every": 3, "until": 9}, {"every": 5}]},
    },
    "optimizer": {
        "learning_rate": 1.0,
        "min_lr_ratio": 0.0,
        "lr_schedule": "linear",
        "cycles": [8, 20],
        "warmup": 2,
        "rewarmup": 4,
        "decay": 4,
    },
}


def with_sections(**sections: dict[str, Any]) -> SchedulePlot:
    merged = {**RUN, **sections}
    return plot_schedules(RunConfig.model_validate({**merged, "optimizer": {"type": "adam", **merged["optimizer"]}}))


def test_the_points_of_a_cyclic_schedule() -> None:
    plot = with_sections()
    assert plot.num_steps == 20
    assert [panel.title for panel in plot.panels] == ["learning rate", "batch size"]
    first = [0, 0.5, 1, 1, 1, 0.75, 0.5, 0.25]
    second = [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert plot.panels[0].curves[0].points == tuple(enumerate(first + second))
    assert plot.panels[1].curves[0].points == ((0, 64), (20, 64))
    assert plot.marks == Marks(warmups=((0, 2), (8, 12)), minima=(8, 20), checkpoints=(3, 6, 9, 10, 15, 20))


def test_a_long_run_is_sampled_but_keeps_its_corners() -> None:
    optimizer = {"lr_schedule": "linear", "learning_rate": 1.0, "cycles": [400_001, 10**6], "decay": 7}
    points = with_sections(trainer={"num_train_steps": 10**6}, optimizer={**optimizer, "warmup": 3})
    curve = dict(points.panels[0].curves[0].points)
    assert len(curve) < 1100
    assert (curve[0], curve[3], curve[399_994], curve[400_001], curve[999_993]) == (0, 1, 1, 1, 1)
    assert curve[400_000] == pytest.approx(1 - 0.9 * 6 / 7)
    assert curve[999_999] == pytest.approx(1 - 0.9 * 6 / 7)


@pytest.mark.parametrize("shape", [{"lr_schedule": "constant"}, {"decay": 0}])
def test_without_a_decay_there_is_no_minimum(shape: dict[str, Any]) -> None:
    assert with_sections(optimizer={"cycles": 2, **shape}).marks.minima == ()


def test_batch_sizes_and_weights_are_stairs() -> None:
    plot = with_sections(
        trainer={
            "num_train_steps": 20,
            "train_batch_size": [{"start": 0, "value": 64}, {"start": 7, "value": 128}, {"start": 90, "value": 256}],
        },
        data={
            "configs": {name: {"train_urls": [f"{name}.txt"]} for name in ("wiki", "code")},
            "train_weights": [[0, {"wiki": 3, "code": 1}], [12, {"wiki": 1, "code": 1}]],
        },
    )
    assert [panel.title for panel in plot.panels] == ["learning rate", "batch size", "mixture weights"]
    assert plot.panels[1].curves[0].points == ((0, 64), (7, 64), (7, 128), (20, 128))
    assert {curve.name: curve.points for curve in plot.panels[2].curves} == {
        "wiki": ((0, 0.75), (12, 0.75), (12, 0.5), (20, 0.5)),
        "code": ((0, 0.25), (12, 0.25), (12, 0.5), (20, 0.5)),
    }


def test_checkpoints_are_those_of_the_policy() -> None:
    keep = [{"every": 7, "until": 20}, {"every": 4, "until": 41}, {"every": 10}]
    entries = [KeepEvery(**entry) for entry in keep]
    marks = with_sections(trainer={"num_train_steps": 75, "checkpointer": {"keep": keep}}, optimizer={}).marks
    assert marks.checkpoints == (*(step for step in range(75) if is_permanent(step, entries)), 75)


def test_text_shows_the_curve_with_its_marks_below() -> None:
    lines = to_text(with_sections(), width=33, height=4).splitlines()
    assert all(len(line) <= 33 for line in lines[:6])
    assert lines[0].split() == ["learning", "rate"]
    assert [line[:12].split() for line in lines[1:5]] == [["1", "│"], ["│"], ["│"], ["0", "│"]]
    picture = [line[12:] for line in lines[1:5]]
    assert {len(row) for row in picture} == {20}
    # Columns with a dot at the very top: the peaks, from steps 2 to 4 and 12 to 16; at the very bottom: the minima.
    assert [x for x in range(20) if ord(picture[0][x]) & 0b1001] == [2, 3, 4, 11, 12, 13, 14, 15]
    assert [x for x in range(20) if ord(picture[3][x]) & 0b11000000] == [0, 8]
    assert lines[6].split() == ["0", "step", "20"]
    assert lines[7:13] == [
        "   warm-up  ~~~     ~~~~",
        "   minimum          v          v",
        "checkpoint     C  C  CC   C    C",
        "",
        "~ warm-up: steps 0 to 2, 8 to 12",
        "v lowest learning rate at the end of a cycle: step 8, 20",
    ]
    assert lines[13:] == ["C permanent checkpoint: step 3, 6, 9, 10, 15, 20", "", "batch size: 64"]


def test_text_shortens_long_lists_and_names_the_sets() -> None:
    text = to_text(
        with_sections(
            trainer={"num_train_steps": 100, "checkpointer": {"keep": [{"every": 10}]}},
            optimizer={"lr_schedule": "constant", "warmup": 0},
            data={
                "configs": {name: {"train_urls": [f"{name}.txt"]} for name in ("wiki", "code")},
                "train_weights": [[0, {"wiki": 3, "code": 1}], [50, {"wiki": 1, "code": 1}]],
            },
        )
    )
    assert "learning rate: 0.0006\n" in text
    assert "step 10, 20, 30, 40, 50, ... 100 (10 in all)\n" in text
    assert "warm-up" not in text
    assert "minimum" not in text
    assert "a  wiki: 0.75 -> 0.5\n" in text
    assert "b  code: 0.25 -> 0.5\n" in text


@pytest.mark.parametrize("optimizer", [RUN["optimizer"], {"lr_schedule": "constant", "warmup": 0}])
def test_a_png_of_the_right_size_that_is_not_blank(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "x.png"
    save_image(with_sections(optimizer=optimizer), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", content[16:24]) == (1000, 520)
    pixels = image.imread(path)[..., :3]
    upper, lower = np.split(pixels, 2)
    for half in (upper, lower):
        assert len(np.unique(half.reshape(-1, 3), axis=0)) > 10
    assert not np.array_equal(upper, lower)


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match=r"x\.gif: expected a file whose name ends in \.png, \.svg or \.pdf"):
        save_image(with_sections(), tmp_path / "x.gif")
    with pytest.raises(UserError, match="cannot be written: No such file"):
        save_image(with_sections(), tmp_path / "nowhere" / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'lm_trainer\[plot\]'; without --out"):
        save_image(with_sections(), tmp_path / "x.png")
