"""Branches of a run whose checkpoints are in a bucket: on the same machine, and on another one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import jax.numpy as jnp
import pytest

from lm_trainer.checkpoint.pins import pin_step, pinned_steps, unpin_step
from lm_trainer.checkpoint.policy import CheckpointerConfig, KeepEvery
from lm_trainer.checkpoint.store import PERMANENT_KEY, CheckpointStore, list_steps
from lm_trainer.core.bucket import Bucket
from tests.conftest import Outcome, refused, run_here
from tests.object_storage.servers import use_server
from tests.reproduce.conftest import as_json, metrics, on_one_device, write_config

pytestmark = pytest.mark.slow
RATE = "optimizer.learning_rate=5e-3"


@pytest.fixture
def base(server: str, short_pauses: None, tmp_path: Path) -> Iterator[Bucket]:
    """A bucket with the checkpoints of a run, whose directory is in `tmp_path/a`."""
    base = Bucket(f"s3://a-bucket/{tmp_path.name}")
    with use_server("s3", server), on_one_device():
        result = on_machine(tmp_path / "a", "train", "run.yaml", base=base)
        assert result.returncode == 0, result.stderr
        yield base


def on_machine(directory: Path, *args: str, base: Bucket | None = None) -> Outcome:
    """Runs `lmt` in a directory that has nothing but the text and, with `base`, the configuration."""
    directory.mkdir(exist_ok=True)
    checkpointer = {"base_path": str(base)}
    config = write_config(directory, trainer={"checkpointer": checkpointer})
    if base is None:
        config.unlink()
    with contextlib.chdir(directory):
        return run_here(*args)


def losses(directory: Path, run: str) -> dict[int, float]:
    return {line["step"]: line["train/loss"] for line in metrics(directory, run) if "train/loss" in line}


def test_a_branch_in_a_bucket_is_one_as_on_a_disk(base: Bucket, tmp_path: Path) -> None:
    here = tmp_path / "a"
    result = on_machine(here, "branch", "run", "--at", "4", "--check", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "equal, bit for bit: 2 steps, 1 fingerprints"
    for name, step in (("whole", 4), ("between", 3)):
        result = on_machine(here, "branch", "run", "--at", str(step), name, RATE)
        assert result.returncode == 0, result.stderr
        assert f"branch of run at step {step}, with changes" in result.stdout
        # The branch has a copy of its own, and the parent keeps nothing for it.
        assert list_steps(base / name) == sorted({step, 4, 6})
        assert pinned_steps(base / "run") == set()
        assert losses(here, name)[step + 1] == losses(here, "run")[step + 1]
        assert losses(here, name)[step + 2] != losses(here, "run")[step + 2]
        report = as_json(on_machine(here, "diff", "run", name, "--json"))
        assert (report["shared"], report["parting"]["step"]) == (step, step + 1)
        verified = as_json(on_machine(here, "verify", name, "--segments", "9", "--json"))
        assert verified["equal"]
    runs = as_json(on_machine(here, "runs", "--json"))
    assert {(run["id"], run["parent"], run["branched_at"]) for run in runs} == {
        ("run", None, None),
        ("whole", "run", 4),
        ("between", "run", 3),
    }


def test_a_branch_is_made_and_resumed_on_a_machine_that_has_nothing(base: Bucket, tmp_path: Path) -> None:
    command = ("branch", f"{base}/run", "--at", "4", "child", RATE)
    result = on_machine(tmp_path / "b", *command, "--prepare")
    assert result.returncode == 0, result.stderr
    assert list_steps(base / "child") == [4]
    # A third machine goes on with it, and a fourth one finds it complete.
    result = on_machine(tmp_path / "c", *command)
    assert result.returncode == 0, result.stderr
    assert [*losses(tmp_path / "c", "child")] == [5, 6]
    result = on_machine(tmp_path / "d", *command)
    assert result.returncode == 0, result.stderr
    assert "was complete already" in result.stdout
    refused(
        on_machine(tmp_path / "d", "branch", f"{base}/run", "--at", "2", "child", RATE), "is a branch of run at step 4"
    )
    # The same bits as a branch on the machine of its parent.
    assert on_machine(tmp_path / "a", "branch", "run", "--at", "4", "here", RATE).returncode == 0
    result = on_machine(tmp_path / "a", "diff", "here", f"{base}/child")
    assert result.returncode == 0, result.stdout
    assert as_json(on_machine(tmp_path / "c", "diff", f"{base}/run", "child", "--json"))["shared"] == 4


def test_a_step_that_a_branch_reads_is_not_deleted(base: Bucket) -> None:
    def save(store: CheckpointStore, step: int) -> None:
        store.save(step, {"x": jnp.ones(3)}, {PERMANENT_KEY: False})
        store.wait()

    config = CheckpointerConfig(keep=(KeepEvery(every=100),))
    with closing(CheckpointStore(base / "own", config)) as store:
        save(store, 1)
        pin_step(base / "own", 1, "a-branch")
        save(store, 2)
        save(store, 3)
        assert 1 in store.steps()
        unpin_step(base / "own", 1, "a-branch")
        save(store, 4)
    # Deletions are complete when the store is closed.
    assert 1 not in list_steps(base / "own")
