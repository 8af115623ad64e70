"""metrics.jsonl: exact numbers, whole lines, and what stays after a resume."""

from __future__ import annotations

import contextlib
import json
import math
import random
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.core.errors import EXIT_CRASH, MachineError, UserError
from lm_trainer.trackers import Composite, JsonlConfig, open_trackers, read_metrics


def open_record(run_dir: Path, resume_step: int = 0) -> Composite:
    return open_trackers((), run_dir=run_dir, run_id="r", resume_step=resume_step)


def write_steps(run_dir: Path, *steps: int, resume_step: int = 0) -> None:
    with contextlib.closing(open_record(run_dir, resume_step)) as trackers:
        for step in steps:
            trackers.log({"train/loss": 1 / step}, step=step)


def steps_in(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir)]


@contextlib.contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """Writes beyond `limit` bytes of a file fail, as they do on a full disk."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)


def test_floats_read_back_to_the_same_bits(tmp_path):
    draw = random.Random(0)
    bits = [draw.getrandbits(64) for _ in range(300)]
    values = [x for b in bits if math.isfinite(x := struct.unpack("<d", struct.pack("<Q", b))[0])]
    values += [0.1, 1 / 3, 5e-324, -0.0, 1.7976931348623157e308]
    with contextlib.closing(open_record(tmp_path)) as trackers:
        for step, value in enumerate(values, start=1):
            trackers.log({"x": value}, step=step)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [struct.pack("<d", json.loads(line)["x"]) for line in lines] == [struct.pack("<d", v) for v in values]


@pytest.mark.parametrize(
    ("scalar", "expected"),
    [
        (np.float32(0.1), 0.10000000149011612),
        (jnp.float32(0.1), 0.10000000149011612),
        (jnp.bfloat16(0.1), 0.10009765625),
        (np.asarray([2.5]), 2.5),
        (np.int64(2**40), 2**40),
        (True, 1),
    ],
    ids=repr,
)
def test_scalars_of_numpy_and_jax_are_numbers(tmp_path, scalar, expected):
    with contextlib.closing(open_record(tmp_path)) as trackers:
        trackers.log({"x": scalar}, step=1)
    value = json.loads((tmp_path / "metrics.jsonl").read_text())["x"]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("value", [None, "2.5", np.zeros(2), [1.0]], ids=repr)
def test_what_is_not_a_number_is_refused_by_name(tmp_path, value):
    with contextlib.closing(open_record(tmp_path)) as trackers, pytest.raises(TypeError, match="train/loss"):
        trackers.log({"train/loss": value}, step=1)


def test_a_metric_cannot_replace_the_step(tmp_path):
    with contextlib.closing(open_record(tmp_path)) as trackers, pytest.raises(ValueError, match="'step'"):
        trackers.log({"step": 3.0}, step=1)


def test_non_finite_values_are_valid_json_and_read_back(tmp_path):
    with contextlib.closing(open_record(tmp_path)) as trackers:
        trackers.log({"a": math.nan, "b": math.inf, "c": np.float32(-math.inf)}, step=1)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_a_line_is_there_as_soon_as_it_is_logged(tmp_path):
    with contextlib.closing(open_record(tmp_path)) as trackers:
        for step in (1, 2):
            trackers.log({"train/loss": 1.0}, step=step)
            assert steps_in(tmp_path)[-1] == step


def test_a_run_that_begins_again_keeps_what_it_had_under_another_name(tmp_path, caplog):
    write_steps(tmp_path, 1, 2)
    first = (tmp_path / "metrics.jsonl").read_bytes()
    write_steps(tmp_path, 1)
    assert (tmp_path / "metrics-1.jsonl").read_bytes() == first
    assert "metrics.jsonl reached step 2, but no checkpoint was found: kept as metrics-1.jsonl" in caplog.text
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]
    second = (tmp_path / "metrics.jsonl").read_bytes()
    write_steps(tmp_path, 1)
    assert (tmp_path / "metrics-1.jsonl").read_bytes() == first
    assert (tmp_path / "metrics-2.jsonl").read_bytes() == second


def test_a_resumed_run_drops_what_comes_again_and_keeps_the_rest_byte_by_byte(tmp_path):
    write_steps(tmp_path, 1, 2, 3, 4)
    expected = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:2]
    write_steps(tmp_path, 3, 4, 5, resume_step=2)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(b"".join(expected))


def test_a_run_that_starts_afresh_keeps_nothing(tmp_path):
    with contextlib.closing(open_record(tmp_path)) as trackers:
        trackers.log({"eval/loss": 9.0}, step=0)
        trackers.log_text("sample", "old", step=0)
    with contextlib.closing(open_record(tmp_path)):
        pass
    assert steps_in(tmp_path) == []
    assert (tmp_path / "texts.jsonl").read_bytes() == b""


@pytest.mark.parametrize("missing_bytes", [1, 5, 20])
def test_a_torn_last_line_is_dropped(tmp_path, missing_bytes):
    write_steps(tmp_path, 1, 2)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-missing_bytes])
    assert steps_in(tmp_path) == [1]
    write_steps(tmp_path, 3, resume_step=2)
    assert steps_in(tmp_path) == [1, 3]


def test_lines_that_are_not_records_are_dropped_and_said(tmp_path, caplog):
    write_steps(tmp_path, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\0\0\0\n[1]\n")
    write_steps(tmp_path, 2, resume_step=1)
    assert steps_in(tmp_path) == [1, 2]
    assert "dropped 2 lines" in caplog.text


def test_a_full_disk_is_the_machines_error_and_tears_no_line(tmp_path):
    with contextlib.closing(open_record(tmp_path)) as trackers:
        trackers.log({"train/loss": 1.0}, step=1)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        with (
            file_size_limit(size + 10),
            pytest.raises(MachineError, match=r"metrics\.jsonl: cannot be written") as error,
        ):
            trackers.log({"train/loss": 1.0}, step=2)
        assert error.value.exit_code == EXIT_CRASH
        assert (tmp_path / "metrics.jsonl").stat().st_size == size
        trackers.log({"train/loss": 1.0}, step=2)
    assert steps_in(tmp_path) == [1, 2]


def test_a_full_disk_at_resume_leaves_the_record_as_it_was(tmp_path):
    write_steps(tmp_path, 1, 2, 3)
    original = (tmp_path / "metrics.jsonl").read_bytes()
    with file_size_limit(10), pytest.raises(MachineError):
        open_record(tmp_path, resume_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == original


def test_a_missing_run_directory_is_the_machines_error(tmp_path):
    with pytest.raises(MachineError, match="No such file"):
        open_record(tmp_path / "nowhere")


def test_texts_and_summary_have_files_of_their_own(tmp_path):
    with contextlib.closing(open_record(tmp_path)) as trackers:
        trackers.log_text("sample", "def f():\n\treturn 'ä'\ud800", step=7)
        trackers.log_summary({"parameters": np.int64(12), "loss": math.nan})
        trackers.log_summary({"parameters": 13, "path": tmp_path})
    (line,) = (tmp_path / "texts.jsonl").read_text().splitlines()
    assert {k: v for k, v in json.loads(line).items() if k != "time"} == {
        "step": 7,
        "name": "sample",
        "text": "def f():\n\treturn 'ä'\ud800",
    }
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "parameters": 13,
        "loss": "NaN",
        "path": str(tmp_path),
    }
    assert steps_in(tmp_path) == []


def test_a_copy_holds_what_the_run_directory_holds(tmp_path):
    config, run_dir = JsonlConfig(path=str(tmp_path / "copies")), tmp_path / "run"
    run_dir.mkdir()
    with contextlib.closing(open_trackers([config], run_dir=run_dir, run_id="a", resume_step=0)) as trackers:
        for step in (1, 2, 3):
            trackers.log({"train/loss": 1 / step}, step=step)
            trackers.log_histogram("grads", np.array([step, 0]), np.array([-1.0, 0.0, 0.5]), step=step)
    with contextlib.closing(open_trackers([config], run_dir=run_dir, run_id="a", resume_step=2)) as trackers:
        trackers.log({"train/loss": 1 / 3}, step=3)
    assert steps_in(run_dir) == [1, 2, 3]
    files = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    assert sorted(files) == ["histograms.jsonl", "metrics.jsonl"]
    without_time = [json.loads(line) | {"time": 0} for line in files["histograms.jsonl"].splitlines()]
    assert without_time == [
        {"step": step, "time": 0, "name": "grads", "counts": [step, 0], "edges": [-1.0, 0.0, 0.5]} for step in (1, 2)
    ]
    for name in files:
        copy = [json.loads(line) | {"time": 0} for line in (tmp_path / "copies/a" / name).read_bytes().splitlines()]
        assert copy == [json.loads(line) | {"time": 0} for line in files[name].splitlines()]


def test_a_copy_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"trainer\.tracker\.path"):
        open_trackers([JsonlConfig(path=str(tmp_path / "file"))], run_dir=tmp_path, run_id="r")
