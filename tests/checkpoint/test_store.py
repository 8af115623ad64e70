"""Checkpoints on disk: policies, verification, damage, other models, full disks."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from pydantic import ValidationError

from lm_trainer.checkpoint import store as store_module
from lm_trainer.checkpoint.policy import CheckpointerConfig, KeepEvery, is_permanent
from lm_trainer.checkpoint.store import PERMANENT_KEY, CheckpointStore, list_steps, root_cause
from lm_trainer.core.checksummed import with_checksum
from lm_trainer.core.errors import MachineError, UserError
from tests.checkpoint.steps import (
    NEVER,
    abstract_arrays,
    arrays,
    check_that_a_save_is_a_snapshot,
    check_that_a_step_comes_back,
    save_steps,
    sharding_over,
)

SPOILT = '{"custom_metadata": {"a": 1}, "init_timesuamp_nsecs": 2}'
"""Metadata of a step with one flipped bit, which Orbax refuses to read."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


KEEP_THREE = tuple(
    KeepEvery(**entry) for entry in ({"every": 1000, "until": 10000}, {"every": 5000, "until": 40000}, {"every": 10000})
)


def test_the_documented_three_entry_policy() -> None:
    permanent_steps = [step for step in range(0, 70001, 500) if is_permanent(step, KEEP_THREE)]
    assert permanent_steps == [*range(1000, 10001, 1000), *range(15000, 40001, 5000), 50000, 60000, 70000]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([{"every": 10}, {"every": 20}], "only the last entry may lack `until`"),
        ([{"every": 10, "until": 50}, {"every": 20, "until": 40}], "must grow"),
        ([{"every": 0}], "greater than 0"),
    ],
)
def test_impossible_policies_are_refused(keep: list[dict[str, int]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CheckpointerConfig.model_validate({"keep": keep})


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_what_was_saved_comes_back_on_any_mesh(directory: Path, devices: int) -> None:
    check_that_a_step_comes_back(directory, devices)


@pytest.mark.parametrize("host_memory_gb", [None, 1e-6])
def test_a_save_is_a_snapshot_of_arrays_that_are_given_away_at_once(
    directory: Path, host_memory_gb: float | None
) -> None:
    check_that_a_save_is_a_snapshot(directory, host_memory_gb)


def test_training_waits_for_a_save_in_parts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed, rename = threading.Event(), os.rename
    monkeypatch.setattr(os, "rename", lambda *args: (committed.wait(), rename(*args)))
    store = CheckpointStore(directory, NEVER.model_copy(update={"host_memory_gb": 1.0}))
    store.save(1, arrays(1, sharding_over(8)), {})
    assert store.steps() == []
    committed.set()
    store.wait()
    store.close()
    store = CheckpointStore(directory, NEVER.model_copy(update={"host_memory_gb": 1e-6}))
    store.save(2, arrays(2, sharding_over(8)), {})
    assert store.steps() == [1, 2]
    store.close()


def test_temporary_checkpoints_are_replaced_and_permanent_ones_stay(directory: Path) -> None:
    config = CheckpointerConfig(save_interval=timedelta(days=1), keep=(KeepEvery(every=10),))
    save_steps(directory, 3, 7, 10, 12, 20, 23, 25, config=config).close()
    assert list_steps(directory) == [10, 20, 25]
    assert not [p.name for p in directory.iterdir() if p.name.startswith(".trash")]


def test_two_temporary_checkpoints_remain_between_saves_and_after_a_kill(directory: Path) -> None:
    killed = save_steps(directory, 3, 5, 7)
    killed.wait()
    assert list_steps(directory) == [5, 7]
    # Not closed, as after a kill.
    resumed = save_steps(directory, 9)
    resumed.wait()
    assert list_steps(directory) == [7, 9]
    resumed.close()
    assert list_steps(directory) == [9]
    killed.close()


def test_saves_leave_no_thread_and_no_open_file_behind(directory: Path) -> None:
    store = save_steps(directory, 1, 2)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    saves = range(3, 15)
    for step in saves:
        store.save(step, arrays(step, sharding_over(8)), {})
    store.wait()
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    # Less than one of every second save; pools of this process may grow by a few meanwhile.
    assert after[0] < before[0] + len(saves) // 2
    assert after[1] < before[1] + len(saves) // 2


def test_temporary_checkpoints_of_earlier_attempts_can_be_kept(directory: Path) -> None:
    save_steps(directory, 3).close()
    config = NEVER.model_copy(update={"delete_old_temp_checkpoints": False})
    save_steps(directory, 5, 7, config=config).close()
    assert list_steps(directory) == [3, 7]


def test_permanent_checkpoints_stay_under_every_later_policy(directory: Path) -> None:
    every_ten, rare = (NEVER.model_copy(update={"keep": (KeepEvery(every=n),)}) for n in (10, 1000))
    store = CheckpointStore(directory, every_ten)
    for step, record in ((10, {}), (13, {PERMANENT_KEY: True}), (20, {}), (25, {})):
        store.save(step, arrays(step, sharding_over(1)), record)
    store.close()
    assert store.extra_permanent_note() is None
    for config in (rare, rare.model_copy(update={"delete_old_temp_checkpoints": False}), NEVER):
        reopened = CheckpointStore(directory, config)
        assert "steps 10, 13, 20, which were permanent" in (reopened.extra_permanent_note() or "")
        assert f"rm -r {directory / '10'}" in (reopened.extra_permanent_note() or "")
        reopened.close()
    save_steps(directory, 30, 33, config=rare).close()
    assert list_steps(directory) == [10, 13, 20, 33]
    # Nor does a policy that asks for less make permanent what was saved as temporary.
    save_steps(directory, 34, config=every_ten).close()
    assert list_steps(directory) == [10, 13, 20, 34]


def test_checkpoints_that_do_not_say_whether_they_are_permanent_stay(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As versions wrote them that judged by the policy of the day alone.
    with monkeypatch.context() as older:
        older.setattr(
            store_module,
            "with_checksum",
            lambda record: with_checksum({k: v for k, v in record.items() if k != PERMANENT_KEY}),
        )
        save_steps(directory, 10, 20, 21, config=NEVER.model_copy(update={"keep": (KeepEvery(every=10),)})).close()
    save_steps(directory, 22, 23).close()
    assert list_steps(directory) == [10, 20, 21, 23]


def test_an_old_step_whose_metadata_break_hinders_nothing(directory: Path) -> None:
    config = NEVER.model_copy(update={"keep": (KeepEvery(every=10),)})
    store = save_steps(directory, 10, 20, 21, config=config)
    (directory / "10" / "_CHECKPOINT_METADATA").write_text(SPOILT)
    for step in (22, 23):
        store.save(step, arrays(step, sharding_over(1)), {})
    store.close()
    assert list_steps(directory) == [20, 23]
    (directory / "20" / "_CHECKPOINT_METADATA").write_text(SPOILT)
    save_steps(directory, 24, config=config).close()
    assert list_steps(directory) == [24]
    assert (directory / "10.corrupt").is_dir()
    assert (directory / "20.corrupt").is_dir()


@pytest.mark.parametrize("kind", ["bit", "spoilt metadata"])
def test_without_any_good_step_nothing_starts_over(directory: Path, kind: str) -> None:
    save_steps(directory, 1, 2, config=NEVER.model_copy(update={"keep": (KeepEvery(every=1),)})).close()
    for step in ("1", "2"):
        if kind == "bit":
            damage(directory / step, kind)
        else:
            (directory / step / "_CHECKPOINT_METADATA").write_text(SPOILT)
    for _ in range(2):
        with pytest.raises(MachineError, match=r"no checkpoint can be used, and nothing was changed:\n  step"):
            CheckpointStore(directory, NEVER).restore(abstract_arrays(sharding_over(8)))
        assert list_steps(directory) == [1, 2]


def test_a_clock_that_jumps_makes_no_checkpoint_due(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(directory, NEVER.model_copy(update={"save_interval": timedelta(minutes=15)}))
    start_time = time.time()
    for jump in (-86400, 86400):
        monkeypatch.setattr(time, "time", lambda jump=jump: start_time + jump)
        assert not store.is_due(5)


def test_a_clock_that_jumps_ends_no_save(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    days = itertools.count()
    start_time = time.time()
    monkeypatch.setattr(time, "time", lambda: start_time + 86400 * next(days))
    save_steps(directory, 3, 6).close()
    assert list_steps(directory) == [6]


def test_when_a_checkpoint_is_due(directory: Path) -> None:
    store = CheckpointStore(directory, CheckpointerConfig(keep=(KeepEvery(every=10),)))
    assert [step for step in range(25) if store.is_due(step)] == [10, 20]
    assert CheckpointStore(directory, NEVER.model_copy(update={"save_interval": timedelta(0)})).is_due(1)


def damage(step: Path, kind: str) -> None:
    data = max((p for p in (step / "state").rglob("*") if p.is_file() and p.parent.name == "d"), key=os.path.getsize)
    if kind == "bit":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif kind == "truncated":
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    elif kind == "half deleted":
        data.unlink()
    else:
        (step / "_CHECKPOINT_METADATA").unlink()


@pytest.mark.parametrize("kind", ["bit", "truncated", "half deleted", "no metadata"])
def test_a_damaged_step_is_moved_aside_and_the_one_before_is_used(
    directory: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = NEVER.model_copy(update={"keep": (KeepEvery(every=1),)})
    save_steps(directory, 1, 2, config=config).close()
    damage(directory / "2", kind)
    store = CheckpointStore(directory, config)
    restored = store.restore(abstract_arrays(sharding_over(8)))
    assert restored is not None
    assert restored.step == 1
    assert "checkpoint 2 cannot be used" in caplog.text
    assert (directory / "2.corrupt").is_dir()
    store.save(2, arrays(2, sharding_over(8)), {})
    store.close()
    assert list_steps(directory) == [1, 2]


@pytest.mark.parametrize("kind", ["index", "bit", "half deleted"])
def test_a_damaged_array_is_one_line_though_others_are_still_read(
    directory: Path, kind: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    many = {f"params.{number}": jax.numpy.full((256, 64), number) for number in range(60)}
    store = CheckpointStore(directory, NEVER)
    store.save(1, many, {})
    store.wait()
    if kind == "index":
        # The tree by which every array is found: all reads fail, one after another.
        for file in (directory / "1" / "state" / "d").iterdir():
            content = file.read_bytes()
            file.write_bytes(content[:20] + bytes(8) + content[28:])
    else:
        damage(directory / "1", kind)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in many.items()}
    with pytest.raises(MachineError, match="no checkpoint can be used"):
        store.restore(shapes)
    gc.collect()
    assert capfd.readouterr().err == ""
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


# Reads that Orbax leaves behind when one of them fails end whenever they are collected.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
def test_a_flipped_bit_in_any_file_is_noticed_or_harmless(directory: Path) -> None:
    """Whatever file of the newest step it is in, what comes back is a whole step with the bits that were saved."""
    save_steps(directory, 1, 2, config=NEVER.model_copy(update={"keep": (KeepEvery(every=1),)})).close()
    expected = {
        step: {name: np.asarray(x).tobytes() for name, x in arrays(step, sharding_over(1)).items()} for step in (1, 2)
    }
    pristine = directory.with_name("pristine")
    shutil.copytree(directory, pristine)
    files = sorted(p.relative_to(directory) for p in (directory / "2").rglob("*") if p.is_file() and p.stat().st_size)
    assert len(files) >= 6
    rng, used = np.random.default_rng(0), []
    for file in [f for f in files for _ in range(10 if f.name == "_CHECKPOINT_METADATA" else 3)]:
        content = bytearray((directory / file).read_bytes())
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        (directory / file).write_bytes(content)
        store = CheckpointStore(directory, NEVER)
        restored = store.restore(abstract_arrays(sharding_over(1)))
        assert restored is not None, file
        assert {name: np.asarray(x).tobytes() for name, x in restored.arrays.items()} == expected[restored.step], file
        assert restored.record["note"] == f"step {restored.step}", file
        store.save(3, arrays(3, sharding_over(1)), {})
        store.close()
        assert 3 in list_steps(directory)
        used.append(restored.step)
        shutil.rmtree(directory)
        shutil.copytree(pristine, directory)
    assert set(used) == {1, 2}


def test_a_step_that_one_process_cannot_read_is_used_by_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores an older step, since the other of two processes cannot read the arrays of the newest one."""
    save_steps(directory, 1, 2, config=NEVER.model_copy(update={"keep": (KeepEvery(every=1),)})).close()
    store = CheckpointStore(directory, NEVER)
    answers = iter([False, True, False, False])
    monkeypatch.setattr("lm_trainer.checkpoint.store.any_process", lambda own_value: own_value or next(answers))
    restored = store.restore(abstract_arrays(sharding_over(1)))
    assert restored is not None
    assert restored.step == 1
    assert (directory / "2.corrupt").is_dir()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_a_machine_that_cannot_read_now_is_no_damage(
    directory: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = save_steps(directory, 3, 6)
    store.wait()

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(ocp, "load_checkpointables", refuse)
    with pytest.raises(MachineError, match=rf"checkpoints/6: its arrays cannot be read now \(.*{os.strerror(code)}"):
        store.restore(abstract_arrays(sharding_over(8)))
    monkeypatch.undo()
    assert list_steps(directory) == [3, 6]
    restored = store.restore(abstract_arrays(sharding_over(8)))
    assert restored is not None
    assert restored.step == 6


def test_nothing_to_restore(directory: Path) -> None:
    assert CheckpointStore(directory, NEVER).restore(abstract_arrays(sharding_over(1))) is None


def test_another_model_is_refused_by_name_and_nothing_is_moved(directory: Path) -> None:
    save_steps(directory, 4).close()
    other = abstract_arrays(sharding_over(8))
    other["params.w"] = jax.ShapeDtypeStruct((64, 48), np.float32, sharding=sharding_over(8))
    other["params.new"] = jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding_over(8))
    with pytest.raises(UserError) as caught:
        CheckpointStore(directory, NEVER).restore(other)
    assert "params.w: the checkpoint has float32[64,32], the configuration asks for float32[64,48]" in str(caught.value)
    assert "params.new: the checkpoint has nothing" in str(caught.value)
    assert list_steps(directory) == [4]


def test_a_step_that_does_not_exist(directory: Path) -> None:
    save_steps(directory, 4).close()
    with pytest.raises(UserError, match=r"no checkpoint of step 5 \(there are: \[4\]\)"):
        CheckpointStore(directory, NEVER).restore(abstract_arrays(sharding_over(8)), step=5)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        CheckpointStore(tmp_path / "file" / "checkpoints", NEVER)


def test_a_directory_that_vanishes_is_not_made_again(directory: Path) -> None:
    store = save_steps(directory, 3)
    store.wait()
    gone = directory.rename(directory.with_name("gone"))
    with pytest.raises(MachineError, match=rf"{directory}: .* the directory was removed or replaced"):
        store.save(6, arrays(6, sharding_over(8)), {})
    assert not directory.exists()
    directory.mkdir()
    with pytest.raises(MachineError, match="removed or replaced"):
        store.save(6, arrays(6, sharding_over(8)), {})
    assert list_steps(gone) == [3]
    assert list_steps(directory) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_harms_nothing_that_was_saved(small_disk: Path) -> None:
    directory = small_disk / "checkpoints"
    store = save_steps(directory, 1)
    (small_disk / "filler").write_bytes(b"x" * 300_000)

    def save_until_full() -> None:
        for step in range(2, 12):
            store.save(step, {**arrays(step, sharding_over(8)), "params.big": jax.numpy.ones(60_000)}, {})
        store.wait()

    with pytest.raises(MachineError, match=r"could not be written.*steps \[1\] are untouched"):
        save_until_full()
    restored = CheckpointStore(directory, NEVER).restore(abstract_arrays(sharding_over(8)))
    assert restored is not None
    assert restored.step == 1


def test_the_cause_is_found_in_a_ring_of_errors() -> None:
    cause, wrapper = ValueError("no room"), RuntimeError("the save failed")
    wrapper.__cause__, cause.__context__ = cause, wrapper
    assert root_cause(wrapper) == "ValueError: no room"


def test_a_save_that_failed_is_reported_once_however_often_it_is_waited_for() -> None:
    cause = ValueError("OUT_OF_RANGE: " + "a/very/long/path" * 40 + ": File too large")
    first = MachineError("a checkpoint could not be written")
    first.__cause__, cause.__context__ = cause, first
    cause_text = root_cause(cause)
    assert cause_text.startswith("ValueError: OUT_OF_RANGE")
    assert cause_text.endswith(": File too large")
