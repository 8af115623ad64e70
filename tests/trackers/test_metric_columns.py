"""Metrics read by columns are the numbers of the lines, read one after the other."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.trackers import json_lines
from lm_trainer.trackers.metric_columns import read_metric_columns
from lm_trainer.trackers.series import Series

LINES: list[dict[str, Any]] = [
    {"step": 1, "time": 0.5, "train/loss": 3.25, "optim/grad_norm": "NaN", "throughput/total_tokens": 512},
    {"step": 1, "time": 0.6, "eval/loss": "Infinity"},
    {"step": 2, "time": 0.7, "train/loss": 3.0, "optim/grad_norm": 2, "throughput/total_tokens": 1024},
    {"step": 2, "time": 0.8, "alert": "loss_spike", "message": "text with a\nline break", "train/loss": 9.0},
    {"step": 3, "time": 0.9, "train/loss": "-Infinity", "optim/grad_norm": 1e-300, "throughput/total_tokens": 1536},
    {"step": 3, "time": 1.0, "fingerprint": "0000000000000017"},
    {"step": 4, "time": 1.1, "train/loss": 2.0, "own/is_good": True, "own/note": "word"},
]


def _write(path: Path, content: str) -> Path:
    file = path / "metrics.jsonl"
    file.write_text(content)
    return file


def _encode(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _curves_by_hand(lines: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    special = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    curves: dict[str, dict[int, float]] = {}
    for line in lines:
        for name, value in line.items():
            number = special.get(value, value) if isinstance(value, str) else value
            if name not in ("step", "time") and not isinstance(number, str):
                curves.setdefault(name, {})[line["step"]] = float(number)
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


@pytest.mark.parametrize("block_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("fast", [True, False])
def test_columns_are_the_numbers_of_the_lines(tmp_path, monkeypatch, block_bytes: int, fast: bool) -> None:
    monkeypatch.setattr(json_lines, "_BLOCK_BYTES", block_bytes)
    if not fast:
        monkeypatch.setattr(json_lines, "_fast_loads", lambda: json.loads)
    # Steps 2 and 3 are logged again, as after a restart from a checkpoint without the files of the run.
    lines = [*LINES, {**LINES[2], "train/loss": 2.5}, {**LINES[4], "train/loss": 2.25}]
    columns = read_metric_columns(_write(tmp_path, _encode(lines)))
    expected = _curves_by_hand(lines)
    assert {name: steps.tolist() for name, (steps, _) in columns.curves.items()} == {
        name: [*curve] for name, curve in expected.items()
    }
    for name, (_, values) in columns.curves.items():
        assert np.array_equal(values, [*expected[name].values()], equal_nan=True), name
    assert [line.get("alert") or line.get("fingerprint") or line["own/note"] for line in columns.other_lines] == [
        "loss_spike",
        "0000000000000017",
        "word",
    ]
    assert columns.last_step == 4
    assert columns.series.to_plain()["train/loss"] == [[1, 4, 1]]


def test_damaged_lines_are_left_out(tmp_path) -> None:
    first, second, *_ = _encode(LINES).splitlines(keepends=True)
    torn = first + first[:20] + "\n[1, 2]\n" + '{"time": 3}\n' + "\0" * 30 + "\n" + second + first[:-5]
    columns = read_metric_columns(_write(tmp_path, torn))
    assert {name: steps.tolist() for name, (steps, _) in columns.curves.items()} == {
        "train/loss": [1],
        "optim/grad_norm": [1],
        "throughput/total_tokens": [1],
        "eval/loss": [1],
    }


def test_a_file_that_is_missing_or_empty_has_no_lines(tmp_path) -> None:
    assert not read_metric_columns(tmp_path / "none.jsonl").last_step
    assert read_metric_columns(_write(tmp_path, "")).curves == {}


def test_lines_of_every_name_are_in_the_series(tmp_path) -> None:
    lines = [{"step": step, "name": name, "text": "a"} for step in range(1, 9) for name in ("one", "two") if step != 5]
    lines += [{"step": step, "train/loss": 1.0} for step in (1, 2, 3, 6, 9, 12, 13)]
    columns = read_metric_columns(_write(tmp_path, _encode(lines)))
    one_by_one = Series()
    for line in lines:
        one_by_one.add(str(line.get("name", "train/loss")), line["step"])
    assert columns.series.to_plain() == one_by_one.to_plain()
