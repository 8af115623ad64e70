"""Paths as callers write them: every function of the ladder that takes one takes text as well as a `Path`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lm_trainer.ladder import ModelLadder
from lm_trainer.ladder.fit import register
from lm_trainer.ladder.fit.fitting import Fit, fit, save
from lm_trainer.ladder.fit.points import points_from_rows, read_table
from lm_trainer.ladder.fit.sources import read_fit, read_or_fit
from lm_trainer.ladder.metrics import write_rows

Spelling = Callable[[Path], str | os.PathLike[str]]
SPELLINGS = pytest.mark.parametrize("spelled", [str, Path], ids=["text", "path"])
PNG = b"\x89PNG"

MODEL = {"type": "llama", "hidden_dim": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "intermediate_dim": 16}


def small(folder: str | os.PathLike[str]) -> ModelLadder:
    return ModelLadder(
        name="small",
        dir=folder,  # pyright: ignore[reportArgumentType]
        sizes=("3k",),
        sequence_length=16,
        tokenizer="bytes",
        model_configurator={"type": "transformer", "models": {"3k": MODEL}},  # pyright: ignore[reportArgumentType]
        run_configurator={"type": "wsds_chinchilla", "chinchilla_multiple": 1},  # pyright: ignore[reportArgumentType]
    )


@pytest.fixture(scope="module")
def rows() -> list[dict[str, float | str]]:
    """Losses of four sizes at two lengths, by a law of two terms."""
    sizes = (1e6, 2e6, 4e6, 8e6)
    return [
        {"size": f"{n:g}", "num_params": n, "tokens": c * n, "eval/loss": 2 + 40 * n**-0.3 + 60 * (c * n) ** -0.3}
        for n in sizes
        for c in (10, 40)
    ]


@pytest.fixture(scope="module")
def law(rows: list[dict[str, float | str]]) -> Fit:
    return fit(points_from_rows(rows, source="rows"))


@SPELLINGS
def test_a_ladder_looks_into_directories(spelled: Spelling, tmp_path: Path) -> None:
    ladder = small(spelled(tmp_path / "here"))
    assert ladder.get_save_folder("3k") == str(tmp_path / "here" / "3k")
    (tmp_path / "there" / "3k").mkdir(parents=True)
    (tmp_path / "there" / "3k" / "metrics.jsonl").touch()
    nowhere = ladder.get_checkpoints("3k", download_metrics=False, discover_all=False, alternative_dirs=None)
    assert [info.metrics_path for info in nowhere] == [None] * 4
    checkpoints = ladder.get_checkpoints("3k", True, True, [spelled(tmp_path / "there")])
    assert [info.metrics_path for info in checkpoints] == [tmp_path / "there" / "3k" / "metrics.jsonl"] * 4
    assert ladder.get_metrics("3k", None, False, None) is None
    assert ladder.get_metrics("3k", prefix="eval/", alternative_dirs=[spelled(tmp_path / "nowhere")]) is None


@SPELLINGS
def test_a_ladder_draws_into_files(spelled: Spelling, tmp_path: Path) -> None:
    ladder, image = small(tmp_path), tmp_path / "plot.png"
    ladder.dry_run("3k", False, spelled(image))
    assert image.read_bytes().startswith(PNG)
    image.unlink()
    drawn = ladder.run_configurator.plot_lr_schedule(10**6, 2**14, show=False, save_path=spelled(image))
    assert drawn == image
    assert image.read_bytes().startswith(PNG)
    assert ladder.run_configurator.plot_lr_schedule(10**6, 2**14, show=False) is None


@SPELLINGS
@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_tables_are_written_and_read(kind: str, spelled: Spelling, rows: list, tmp_path: Path) -> None:
    file = spelled(tmp_path / f"rows.{kind}")
    write_rows(rows, kind, file)
    assert [float(row["eval/loss"]) for row in read_table(file)] == [row["eval/loss"] for row in rows]


@SPELLINGS
def test_fits_and_predictions_are_written_and_read(spelled: Spelling, law: Fit, rows: list, tmp_path: Path) -> None:
    file = spelled(tmp_path / "made" / "fit.json")
    save(law, file)
    reread = read_fit(file)
    assert reread is not None
    assert reread.law == law.law
    write_rows(rows, "csv", tmp_path / "rows.csv")
    assert read_or_fit(spelled(tmp_path / "rows.csv")).law == law.law
    registered = spelled(tmp_path / "kept" / "prediction.json")
    register.write_registration(registered, law, [])
    assert register.read_registration(registered)["predictions"] == []
