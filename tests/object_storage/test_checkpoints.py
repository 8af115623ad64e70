"""Checkpoints in object storage: whole or not there, whatever is left of saves and deletions that were cut off."""

from __future__ import annotations

import json
import threading

import pytest

from lm_trainer.checkpoint.in_bucket import record_key
from lm_trainer.checkpoint.policy import CheckpointerConfig, KeepEvery
from lm_trainer.checkpoint.store import CheckpointStore, list_steps
from lm_trainer.core.bucket import Bucket
from lm_trainer.core.errors import MachineError
from lm_trainer.core.key_values import MISSING
from lm_trainer.data.cache.kvstore import KvStore
from tests.checkpoint.steps import (
    NEVER,
    abstract_arrays,
    arrays,
    check_that_a_save_is_a_snapshot,
    check_that_a_step_comes_back,
    save_steps,
    sharding_over,
)


def steps_with_arrays(bucket: Bucket) -> set[str]:
    """The steps of which any arrays are there."""
    return {name.split("-")[0] for name in bucket.list("arrays")}


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_what_was_saved_comes_back_on_any_mesh(bucket: Bucket, devices: int) -> None:
    check_that_a_step_comes_back(bucket, devices)


def test_policies_keep_the_same_steps_as_on_disk(bucket: Bucket) -> None:
    config = CheckpointerConfig(keep=(KeepEvery(every=10),))
    save_steps(bucket, 10, 15, 20, 23, config=config).close()
    assert list_steps(bucket) == [10, 20, 23]
    assert steps_with_arrays(bucket) == {"10", "20", "23"}


@pytest.mark.parametrize("host_memory_gb", [None, 1e-6])
def test_a_save_is_a_snapshot_of_arrays_that_are_given_away_at_once(
    bucket: Bucket, host_memory_gb: float | None
) -> None:
    check_that_a_save_is_a_snapshot(bucket, host_memory_gb)


def test_without_its_record_a_step_does_not_exist_and_its_arrays_go(bucket: Bucket) -> None:
    save_steps(bucket, 4, 6).close()
    # What a save that was killed before its end leaves, and a deletion that was killed after its beginning.
    bucket.write("arrays/9-00000000/params.w/c/0/0", b"half")
    save_steps(bucket, 7).close()
    content = bucket.read(record_key(7))
    assert content is not None
    bucket.delete(record_key(7))
    assert list_steps(bucket) == []
    CheckpointStore(bucket, NEVER).close()
    assert bucket.list("arrays") == []


@pytest.mark.parametrize("damage", ["flip", "truncate", "lose"])
def test_damaged_arrays_are_named_and_the_step_before_is_used(
    bucket: Bucket, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(bucket, 4, 6, config=CheckpointerConfig(keep=(KeepEvery(every=2),))).close()
    prefix = json.loads(bucket.read(record_key(6)) or b"")["layout"]["prefix"]
    key = f"{prefix}/params.w/c/0/0"
    content = bytearray(bucket.read(key) or b"")
    content[5] ^= 1
    if damage == "lose":
        bucket.delete(key)
    else:
        bucket.write(key, bytes(content if damage == "flip" else content[:-4]))
    store = CheckpointStore(bucket, NEVER)
    restored = store.restore(abstract_arrays(sharding_over(2)))
    store.close()
    assert restored is not None
    assert restored.step == 4
    assert "checkpoint 6 cannot be used" in caplog.text
    assert list_steps(bucket) == [4]
    # Kept for whoever wants to look, also by later attempts.
    CheckpointStore(bucket, NEVER).close()
    assert steps_with_arrays(bucket) == {"4", "6"}


def test_a_damaged_record_is_named_and_the_step_before_is_used(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(bucket, 4, 6, config=CheckpointerConfig(keep=(KeepEvery(every=2),))).close()
    content = bucket.read(record_key(6)) or b""
    bucket.write(record_key(6), content.replace(b'"note"', b'"nite"'))
    store = CheckpointStore(bucket, NEVER)
    restored = store.restore(abstract_arrays(sharding_over(2)))
    store.close()
    assert restored is not None
    assert restored.step == 4
    assert "the checksum of its metadata differs" in caplog.text
    CheckpointStore(bucket, NEVER).close()
    assert steps_with_arrays(bucket) == {"4", "6"}


def test_a_save_that_failed_is_known_when_it_is_asked_for(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    store = save_steps(bucket, 1)
    monkeypatch.setattr(Bucket, "write", fail)
    store.save(2, arrays(2, sharding_over(1)), {})
    assert store._saving is not None
    store._saving.exception()
    with pytest.raises(MachineError, match=r"a checkpoint could not be written: .*no more room.*\[1\] are untouched"):
        store.check_for_errors()
    monkeypatch.undo()
    assert list_steps(bucket) == [1]


def fail(*args: object, **kwargs: object) -> None:
    raise MachineError("no more room")


def test_a_record_is_that_of_the_moment_of_the_save(bucket: Bucket) -> None:
    losses = {"validation": 2.0}
    wait = threading.Event()
    store = CheckpointStore(bucket, NEVER, Waiting(wait))
    store.save(1, arrays(1, sharding_over(8)), {"eval_losses": losses})
    # As an evaluation does between the call and the end of a save.
    losses["validation"] = 1.0
    wait.set()
    store.wait()
    restored = store.restore(abstract_arrays(sharding_over(8)))
    store.close()
    assert restored is not None
    assert restored.record["eval_losses"] == {"validation": 2.0}


class Waiting:
    def __init__(self, event: threading.Event):
        self._event = event

    def check_lock_held(self) -> None: ...

    def before_commit(self, seconds: float) -> None:
        assert self._event.wait(seconds)


def test_a_cache_of_tokens_is_kept_there_too(bucket: Bucket) -> None:
    store = KvStore(f"{bucket}/cache")
    # Its neighbour is listed by a server that lists more than it is asked for, as the emulator of GCS does.
    bucket.write("cache2/part", b"others")
    assert store.write("parts/1", b"tokens", if_generation=MISSING)
    content, generation = store.read_versioned("parts/1")
    assert content == b"tokens"
    assert store.write("parts/1", b"others", if_generation=generation)
    assert store.list() == ["parts/1"]
    assert store.list("parts") == ["1"]
    assert list(store.read_ranges([("parts/1", 1, 4), ("none", 0, 2)])) == [b"the", b""]
    assert bucket.read("cache/parts/1") == b"others"
    store.delete("parts/1")
    assert store.list() == []
