"""Copies of the state in memory: which of them a run continues from, and when it takes a checkpoint instead."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path

import jax
import numpy as np
import pytest

from lm_trainer.checkpoint import in_memory
from lm_trainer.checkpoint.digest import compute_checksums
from lm_trainer.checkpoint.in_memory import neighbor_shift
from lm_trainer.checkpoint.policy import CheckpointerConfig, MemoryCopiesConfig
from lm_trainer.checkpoint.store import CheckpointStore, Restored
from lm_trainer.core.errors import UserError
from lm_trainer.launch.supervise import find_free_address
from tests.checkpoint.steps import abstract_arrays, arrays, sharding_over
from tests.conftest import lmt_environment

Arrays = dict[str, jax.Array]


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture
def open_store(tmp_path: Path, memory: Path) -> Callable[[], CheckpointStore]:
    """Opens the checkpoints of a run that keeps copies every fifth step, as a new attempt does."""
    copies = MemoryCopiesConfig(every=5, directory=str(memory))
    config = CheckpointerConfig(save_interval=timedelta(days=1), keep=(), memory=copies)
    return lambda: CheckpointStore(tmp_path / "checkpoints", config)


def wait_for_copy(store: CheckpointStore) -> None:
    assert store._copies is not None
    store._copies.wait()


@contextmanager
def killed(store: CheckpointStore) -> Iterator[CheckpointStore]:
    """A store whose process ends without closing it."""
    yield store
    store.wait()
    wait_for_copy(store)


def state_of(step: int) -> Arrays:
    return arrays(step, sharding_over(8))


def save(store: CheckpointStore, step: int, values: Arrays) -> None:
    store.save(step, values, {"chain": f"saved {step}"})
    store.wait()


def restore(store: CheckpointStore, devices: int = 8) -> Restored:
    restored = store.restore(abstract_arrays(sharding_over(devices)))
    assert restored is not None
    return restored


def check_equal(actual: Arrays, expected: Arrays) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert np.asarray(actual[name]).tobytes() == np.asarray(x).tobytes(), name


OpenStore = Callable[[], CheckpointStore]


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_killed_run_continues_from_its_newest_copy_on_other_devices(open_store: OpenStore, devices: int) -> None:
    with killed(open_store()) as store:
        save(store, 3, state_of(3))
        for step in (5, 10, 15):
            assert store.is_copy_due(step)
            store.save_copy(step, state_of(step), {"chain": f"copied {step}"})
    assert not store.is_copy_due(12)
    with closing(open_store()) as store:
        restored = restore(store, devices)
        assert restored.step == 15
        assert store.read_record(15)["chain"] == "copied 15"
        check_equal(restored.arrays, state_of(15))
        assert restored.arrays["params.w"].sharding == sharding_over(devices)


def test_there_are_two_copies_at_most_and_none_before_a_checkpoint(open_store: OpenStore, memory: Path) -> None:
    with killed(open_store()) as store:
        store.save_copy(5, state_of(0), {})
        assert not list(memory.glob("*/*/*"))
        save(store, 6, state_of(0))
        for step in (10, 15, 20):
            store.save_copy(step, state_of(0), {})
    names = sorted(path.name.split("-")[0] for path in memory.glob("*/*/*"))
    assert names == ["15", "20"]


def test_copies_end_with_the_run(open_store: OpenStore, memory: Path) -> None:
    with closing(open_store()) as store:
        save(store, 3, state_of(0))
        store.save_copy(5, state_of(0), {})
        save(store, 7, state_of(0))
    assert not list(memory.glob("*/*"))


def remove_base(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints / "4")


def flip_a_bit(copy: Path) -> None:
    file = copy / "0.bin"
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "the base is gone": lambda checkpoints, _: remove_base(checkpoints),
    "a flipped bit": lambda _, copy: flip_a_bit(copy),
    "no list of its parts": lambda _, copy: (copy / "0.json").unlink(),
    "no parts": lambda _, copy: (copy / "0.bin").unlink(),
    "a short list": lambda _, copy: (copy / "0.json").write_text('{"manifest": [], "checksum": 3}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_copy_that_cannot_be_used_gives_way_to_a_checkpoint(
    open_store: OpenStore, tmp_path: Path, memory: Path, damage: Callable[[Path, Path], object]
) -> None:
    with killed(open_store()) as store:
        for step in (3, 4):
            save(store, step, state_of(step))
        store.save_copy(5, state_of(5), {})
    (copy,) = memory.glob("*/*/*")
    damage(tmp_path / "checkpoints", copy)
    with closing(open_store()) as store:
        restored = restore(store)
    assert restored.step == (3 if damage is DAMAGE["the base is gone"] else 4)
    check_equal(restored.arrays, state_of(restored.step))
    assert not list(memory.glob("*/*/*")), "it must not come back"


def test_a_copy_that_does_not_fit_leaves_the_one_before(
    open_store: OpenStore, memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(directory: Path, *_: object) -> None:
        (directory / "0.bin").write_text("the first half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with killed(open_store()) as store:
        save(store, 3, state_of(3))
        store.save_copy(5, state_of(5), {})
        for step in (10, 15):
            wait_for_copy(store)
            with monkeypatch.context() as patched:
                patched.setattr(in_memory, "_write_files", fail)
                store.save_copy(step, state_of(step), {})
                wait_for_copy(store)
    assert "no copy of the state could be kept" in caplog.text
    assert {path.parent.name.split("-")[0] for path in memory.glob("*/*/*/*")} == {"5"}
    with closing(open_store()) as store:
        assert restore(store).step == 5


def test_a_newer_checkpoint_counts_before_a_copy(open_store: OpenStore) -> None:
    with killed(open_store()) as store:
        save(store, 3, state_of(3))
        store.save_copy(5, state_of(5), {})
        save(store, 6, state_of(6))
    with closing(open_store()) as store:
        assert restore(store).step == 6


def test_a_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    config = CheckpointerConfig(memory=MemoryCopiesConfig(every=1, directory=str(tmp_path / "missing")))
    with pytest.raises(
        UserError, match=r"trainer\.checkpointer\.memory\.directory: .* cannot be created \(No such file"
    ):
        CheckpointStore(tmp_path / "checkpoints", config)


@pytest.mark.parametrize(
    ("places", "shift"), [("aabb", 2), ("abab", 1), ("aaabbb", 3), ("aabbcc", 2), ("aaab", None), ("aaaa", None)]
)
def test_a_neighbor_is_at_another_place(places: str, shift: int | None) -> None:
    assert neighbor_shift(tuple(places)) == shift


def run_processes(directory: Path, count: int, action: str) -> list[subprocess.CompletedProcess[str]]:
    address = find_free_address()
    command = (sys.executable, "-m", "tests.checkpoint.memory_process", address, str(count))
    running = [
        subprocess.Popen(
            [*command, str(index), str(directory), action],
            env=lmt_environment(devices=2 // count),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    outputs = [process.communicate(timeout=600) for process in running]
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(running, outputs, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "processes"), [("0", 2), ("1", 1)])
def test_the_memory_of_each_machine_is_enough(tmp_path: Path, memory: Path, lost: str, processes: int) -> None:
    for done in run_processes(tmp_path, 2, "save"):
        assert done.returncode == -signal.SIGKILL, done.stderr
    files = {path.name: path for path in memory.glob("*/*/*/*")}
    assert set(files) == {"0.bin", "0.json", "1.bin", "1.json"}
    for name in (f"{lost}.bin", f"{lost}.json"):
        files[name].unlink()
    for done in run_processes(tmp_path, processes, "restore"):
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == [5, compute_checksums(state_of(5))]
