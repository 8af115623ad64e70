"""Values of rows in files: written in parts, continued, and checked when they are read."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data.cache import row_values
from lm_trainer.data.cache.row_values import RowValues

FIELDS = {"ids": ((3, 2), np.dtype(np.int32)), "logps": ((3,), np.dtype(np.float32))}
ROWS = 11


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows of 36 bytes in a part."""
    monkeypatch.setattr(row_values, "_PART_BYTES", 4 * 36)


def open_values(path: Path, **facts: str) -> RowValues:
    return RowValues(str(path), "the values", {"weights": "a", **facts}, FIELDS)


def make_arrays(count: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "ids": rng.integers(0, 99, (count, 3, 2), np.int32),
        "logps": rng.standard_normal((count, 3), np.float32),
    }


def write(values: RowValues, first: int, stop: int, *, finish: bool = True) -> None:
    writer = values.open_writer()
    for start in range(first, stop, 2):
        writer.append(start, {name: x[start : min(start + 2, stop)] for name, x in make_arrays().items()})
    if finish:
        writer.finish()


def check(values: RowValues, rows: list[int]) -> None:
    actual = values.read(np.array(rows))
    assert actual.keys() == FIELDS.keys()
    for name, x in make_arrays().items():
        np.testing.assert_array_equal(actual[name], x[rows])
        assert actual[name].dtype == x.dtype


def test_rows_are_read_in_any_order_also_in_another_process(tmp_path: Path) -> None:
    write(open_values(tmp_path), 0, ROWS)
    values = open_values(tmp_path)
    assert values.count_rows() == ROWS
    assert len(list(tmp_path.glob("frozen-*/parts/*"))) == 3
    check(values, [*range(ROWS)])
    check(pickle.loads(pickle.dumps(values)), [10, 0, 7, 7, 3])


@pytest.mark.parametrize("stored", [0, 3, 4, 9])
def test_writing_continues_after_the_stored_rows(tmp_path: Path, stored: int) -> None:
    values = open_values(tmp_path)
    write(values, 0, stored)
    assert values.count_rows() == stored
    # From the beginning of a batch with rows that are stored.
    write(open_values(tmp_path), max(stored - 1, 0), ROWS)
    check(open_values(tmp_path), [*range(ROWS)])


def test_an_interrupted_writer_leaves_full_parts(tmp_path: Path) -> None:
    values = open_values(tmp_path)
    write(values, 0, 10, finish=False)
    assert values.count_rows() == 8
    check(values, [7, 0])
    with pytest.raises(MachineError, match=r"parts/000002 is missing; remove .* to compute the values again"):
        values.read(np.array([8]))


def test_damage_is_found_at_the_first_read(tmp_path: Path) -> None:
    write(open_values(tmp_path), 0, ROWS)
    part = sorted(tmp_path.glob("frozen-*/parts/*"))[1]
    content = part.read_bytes()
    for damaged in (content[:-1], content[36:], b"", bytes([content[0] ^ 1]) + content[1:]):
        part.write_bytes(damaged)
        check(open_values(tmp_path), [0, 9])
        with pytest.raises(MachineError, match="parts/000001 is damaged; remove"):
            open_values(tmp_path).read(np.array([5]))
    part.write_bytes(content)
    with pytest.raises(MachineError, match="parts/000002 has too few rows"):
        open_values(tmp_path).read(np.array([ROWS]))


def test_other_facts_have_another_directory(tmp_path: Path) -> None:
    write(open_values(tmp_path), 0, ROWS)
    other = open_values(tmp_path, weights="b")
    assert other.count_rows() == 0
    other.open_writer()
    # A directory that was renamed by hand.
    own, renamed = open_values(tmp_path).store.local, other.store.local
    assert own is not None
    assert renamed is not None
    (renamed / "manifest.json").write_bytes((own / "manifest.json").read_bytes())
    with pytest.raises(UserError, match=r"were not made for this run \(different: weights\); remove it"):
        open_values(tmp_path, weights="b")
