"""Ladders that run: each size an ordinary run, made longer, measured, and kept apart from others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.ladder import ModelLadder
from lm_trainer.ladder.metrics import collect_rows, write_rows
from tests.conftest import run_here
from tests.harness.tasks import write_tasks


def small(root: Path, multiple: float = 1, **changes: Any) -> dict[str, Any]:
    """A ladder of two sizes that train in seconds."""
    model = {"type": "llama", "intermediate_dim": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    plain = {"gradient_checkpointing": False, "scan_layers": False}
    text, held_out = root / "text.txt", root / "held_out.txt"
    if not text.exists():
        lines = [f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(3000)]
        text.write_text("".join(lines))
        held_out.write_text("".join(lines[::100]))
    return {
        "name": "small",
        "dir": str(root / "ladder"),
        "sizes": ["2k", "3k"],
        "sequence_length": 16,
        "tokenizer": "bytes",
        "instance_sources": [
            {"train_urls": str(text), "validation_urls": str(held_out), "cache_dir": str(root / "cache")}
        ],
        "model_configurator": {
            "type": "transformer",
            "models": {
                "2k": {**model, **plain, "hidden_dim": 6, "head_dim": 6},
                "3k": {**model, **plain, "hidden_dim": 8},
            },
        },
        "run_configurator": {"chinchilla_multiple": multiple, "tokens_per_param": 4},
        "trainer": {"elastic_shards": 2, "sample_tokens": 0, "tracker": {"type": "noop"}},
        **changes,
    }


def lines(ladder: ModelLadder, size: str) -> list[dict[str, Any]]:
    text = (Path(ladder.get_save_folder(size)) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(ladder: ModelLadder, size: str) -> dict[int, float]:
    return {line["step"]: line["train/loss"] for line in lines(ladder, size) if "train/loss" in line}


def proofs(ladder: ModelLadder, size: str) -> dict[int, str]:
    return {line["step"]: line["fingerprint"] for line in lines(ladder, size) if "fingerprint" in line}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ladder")


@pytest.fixture(scope="module")
def done(root: Path) -> ModelLadder:
    """A ladder of one size, first out to 0.5 times Chinchilla and then to 1."""
    ModelLadder.model_validate(small(root, 0.5)).run("2k")
    ladder = ModelLadder.model_validate(small(root, 1))
    ladder.run("2k")
    return ladder


@pytest.mark.slow
def test_tasks_are_asked_at_the_checkpoints(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    (tasks := tmp_path / "tasks").mkdir()
    harness = {"task_spec": ["toy_text"], "include_path": str(write_tasks(tasks)), "max_examples": 2}
    ladder = ModelLadder.model_validate(small(tmp_path, 0.5, eval_harness=harness))
    ladder.run("2k")
    rows = collect_rows(ladder, "2k", prefix="lm_eval/")
    assert [row["step"] for row in rows] == [c.step for c in ladder.get_checkpoints("2k")]
    assert all(row["lm_eval/toy_text/bits_per_byte"] > 0 for row in rows)


@pytest.mark.slow
def test_a_run_made_longer_is_the_longer_run(done: ModelLadder, tmp_path: Path) -> None:
    full = ModelLadder.model_validate(small(tmp_path, 1))
    full.run("2k")
    assert losses(done, "2k") == losses(full, "2k")
    assert {step: proofs(done, "2k")[step] for step in proofs(full, "2k")} == proofs(full, "2k")
    assert done.run("2k").step == max(losses(full, "2k"))


@pytest.mark.slow
def test_checkpoints_and_metrics(done: ModelLadder, tmp_path: Path) -> None:
    checkpoints = done.get_checkpoints("2k")
    assert [c.name for c in checkpoints] == [
        *("period 1, 0.5xC pre-decay", "period 1, 0.5xC post-decay", "period 2, 1xC pre-decay"),
        "period 2, 1xC post-decay",
    ]
    assert all(c.exists and (c.path / "state").is_dir() for c in checkpoints)
    assert [c.exists for c in done.get_checkpoints("3k")] == [False] * 4
    rows = collect_rows(done, "2k")
    assert [row["step"] for row in rows] == [c.step for c in checkpoints]
    batch = done.get_batch_size("2k")
    measured = {line["step"]: line["eval/loss"] for line in lines(done, "2k") if "eval/loss" in line}
    for row in rows:
        assert row["tokens"] == row["step"] * batch
        assert row["num_params"] == done.get_num_params("2k")
        assert row["eval/loss"] == measured[row["step"]]
        assert row["train/loss"] == losses(done, "2k")[row["step"]]
    assert sorted(measured) == [c.step for c in checkpoints]
    frame = done.get_metrics("2k", prefix="eval/")
    assert frame is not None
    assert list(frame["eval/loss"]) == [row["eval/loss"] for row in rows]
    assert "train/loss" not in frame
    assert done.get_metrics("3k") is None
    write_rows(rows, "parquet", tmp_path / "rows.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "rows.parquet")["eval/loss"].to_pylist() == list(frame["eval/loss"])
    written = write_rows(rows, "csv", None)
    assert written is not None
    assert written.splitlines()[0].startswith("ladder,size,seed,name,step,tokens,num_params,flops,")
    assert json.loads(write_rows(rows, "json", None) or "") == rows


@pytest.mark.slow
def test_what_is_found_elsewhere(done: ModelLadder, root: Path, tmp_path: Path) -> None:
    moved = ModelLadder.model_validate(small(root, dir=str(tmp_path)))
    assert not any(c.exists for c in moved.get_checkpoints("2k"))
    assert all(c.exists for c in moved.get_checkpoints("2k", alternative_dirs=[done.dir]))
    assert len(collect_rows(moved, "2k", alternative_dirs=[done.dir])) == 4
    pruned = tmp_path / "pruned"
    shutil.copytree(done.get_save_folder("2k"), pruned / "2k", ignore=shutil.ignore_patterns("checkpoints"))
    checkpoints = moved.get_checkpoints("2k", alternative_dirs=[pruned])
    assert [(c.exists, c.metrics_path) for c in checkpoints] == [(False, pruned / "2k" / "metrics.jsonl")] * 4
    assert len(collect_rows(moved, "2k", alternative_dirs=[pruned])) == 4


@pytest.mark.slow
def test_another_ladder_in_the_directory(done: ModelLadder, root: Path) -> None:
    other = ModelLadder.model_validate(small(root, trainer={"elastic_shards": 2, "mp": "bfloat16"}))
    with pytest.raises(UserError, match=r"holds a run of another ladder[\s\S]*trainer\.mp"):
        other.run("2k")
    with pytest.raises(UserError, match=r"holds a run of another ladder than small[\s\S]*trainer\.mp"):
        other.get_metrics("2k")
    metrics = Path(done.get_save_folder("2k")) / "metrics.jsonl"
    original = metrics.read_text()
    try:
        metrics.write_text(original + "{broken\n")
        with pytest.raises(UserError, match=rf"metrics.jsonl:{len(original.splitlines()) + 1}: not a line of metrics"):
            collect_rows(done, "2k")
    finally:
        metrics.write_text(original)


def test_seeds_and_trackers(root: Path) -> None:
    ladder = ModelLadder.model_validate(
        small(root, num_seeds=2, seed=7, project="p", trainer={"tracker": {"type": "wandb", "mode": "offline"}})
    )
    first, second = (ladder.run_config("2k", seed) for seed in ladder.seeds)
    assert (first.trainer.seed, second.trainer.seed) == (7, 8)
    assert (first.trainer.id, second.trainer.id) == ("2k", "2k-seed8")
    tracker = first.trainer.trackers[0]
    assert (tracker.project, tracker.group) == ("p", "small")


def test_several_sources_are_a_mixture(root: Path) -> None:
    text = str(root / "text.txt")
    sources = [{"label": "a", "train_urls": text, "weight": 3}, {"label": "b", "train_urls": text}]
    data = ModelLadder.model_validate(small(root, instance_sources=sources)).run_config("2k").data
    assert data.train_weights == {"a": 3, "b": 1}
    assert list(data.configs) == ["a", "b"]


@pytest.mark.slow
def test_the_commands(tmp_path: Path) -> None:
    file = tmp_path / "ladder.yaml"
    file.write_text(json.dumps(small(tmp_path, 0.5)))
    nothing = run_here("ladder", "metrics", file)
    assert nothing.returncode == 2
    assert "has no metrics of this ladder yet" in nothing.stderr
    planned = json.loads(run_here("ladder", "plan", file, "--json", "--out", tmp_path / "plots").stdout)
    assert [plan["size"] for plan in planned] == ["2k", "3k"]
    assert (tmp_path / "plots" / "3k.png").stat().st_size > 10_000
    ran = run_here("ladder", "run", file)
    assert ran.returncode == 0, ran.stderr
    second = run_here("ladder", "run", file)
    assert second.stdout.count("complete, after step") == 2
    assert run_here("ladder", "status", file).stdout.count("✔") == 4
    rows = json.loads(run_here("ladder", "metrics", file, "--format", "json").stdout)
    assert [(row["size"], row["name"][-10:]) for row in rows[1::2]] == [("2k", "post-decay"), ("3k", "post-decay")]
    wrong = run_here("ladder", "run", file, "--size", "4k")
    assert wrong.stderr.strip().endswith("there is no size '4k'; there are 2k, 3k")
