"""Faults of the network and the server while checkpoints are saved, deleted and read."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lm_trainer.checkpoint.policy import CheckpointerConfig, KeepEvery
from lm_trainer.checkpoint.store import CheckpointStore, list_steps
from lm_trainer.core import bucket
from lm_trainer.core.bucket import Bucket
from lm_trainer.core.errors import EXIT_CONFIG, MachineError, Preempted, UserError
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.health.signals import StopRequest
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.directory import RunDirectory
from tests.checkpoint.steps import NEVER, abstract_arrays, arrays, sharding_over
from tests.object_storage.proxy import (
    PASSING,
    Fault,
    Proxy,
    cut_connection,
    delay,
    drop,
    inject_randomly,
    limit_to,
    lose_answer,
    refuse,
)
from tests.object_storage.servers import use_server

SHORT = CheckpointerConfig(keep=(KeepEvery(every=1),), retry_for=timedelta(seconds=4))


def equals_saved_step(store: CheckpointStore, step: int) -> bool:
    restored = store.restore(abstract_arrays(sharding_over(2)), step)
    assert restored is not None
    return all(
        np.asarray(restored.arrays[name]).tobytes() == np.asarray(x).tobytes()
        for name, x in arrays(step, sharding_over(1)).items()
    )


@pytest.mark.parametrize("seed", range(3))
def test_saves_reads_and_deletions_get_through_faults_that_pass(behind: Bucket, proxy: Proxy, seed: int) -> None:
    proxy.fault = inject_randomly(PASSING, share=0.2, seed=seed)
    store = CheckpointStore(behind, NEVER)
    for step in (1, 2, 3):
        store.save(step, arrays(step, sharding_over(8)), {})
    store.wait()
    assert equals_saved_step(store, 3)
    store.close()
    proxy.fault = None
    assert list_steps(behind) == [3]
    assert {name.split("-")[0] for name in behind.list("arrays")} == {"3"}


@pytest.mark.parametrize(("limit", "waiting"), [(1.0, "params.w"), (1e-6, "params.half")])
def test_training_waits_for_all_but_the_last_part_of_a_save(
    behind: Bucket, proxy: Proxy, limit: float, waiting: str
) -> None:
    arrived = threading.Event()
    proxy.fault = limit_to(lambda _: not arrived.wait(), "PUT", path=waiting)
    store = CheckpointStore(behind, NEVER.model_copy(update={"host_memory_gb": limit}))
    store.save(1, arrays(1, sharding_over(8)), {})
    written = {name.split("/")[1] for name in behind.list("arrays")}
    arrived.set()
    assert ("params.w" in written) == (waiting != "params.w")
    store.wait()
    assert equals_saved_step(store, 1)
    store.close()


@pytest.mark.parametrize(
    "fault",
    [
        limit_to(refuse(403), "PUT"),
        *(pytest.param(f, marks=pytest.mark.slow) for f in (drop, refuse(503), limit_to(drop, "PUT", path="steps/"))),
    ],
)
def test_a_save_that_does_not_get_through_is_told_and_leaves_the_one_before(
    behind: Bucket, proxy: Proxy, fault: Fault
) -> None:
    store = CheckpointStore(behind, SHORT)
    store.save(1, arrays(1, sharding_over(8)), {})
    store.wait()
    proxy.fault = fault
    store.save(2, arrays(2, sharding_over(8)), {})
    saving = store._saving
    assert saving is not None
    while not saving.done():
        store.check_for_errors()
        time.sleep(0.05)
    with pytest.raises(MachineError, match="could not be written") as raised:
        store.check_for_errors()
    assert len(str(raised.value).splitlines()) == 1
    proxy.fault = None
    assert list_steps(behind) == [1]
    assert equals_saved_step(store, 1)
    # The same process may try again, since nothing is left in the way.
    store.save(2, arrays(2, sharding_over(8)), {})
    store.wait()
    assert equals_saved_step(store, 2)
    store.close()


@pytest.mark.slow
def test_after_a_stop_signal_a_save_ends_within_the_grace_period(behind: Bucket, proxy: Proxy) -> None:
    store = CheckpointStore(behind, CheckpointerConfig(grace_period=timedelta(seconds=1)))
    store.save(1, arrays(1, sharding_over(8)), {})
    store.wait()
    proxy.fault = refuse(503)
    started = time.monotonic()
    store.start_grace_period()
    store.save(2, arrays(2, sharding_over(8)), {})
    with pytest.raises(MachineError, match="SlowDown"):
        store.wait()
    assert time.monotonic() - started < 60
    proxy.fault = None
    assert list_steps(behind) == [1]


@pytest.mark.parametrize("fault", [refuse(403), limit_to(refuse(403), "GET", path="arrays/")])
def test_a_server_that_refuses_to_read_moves_nothing_aside(behind: Bucket, proxy: Proxy, fault: Fault) -> None:
    store = CheckpointStore(behind, SHORT)
    store.save(1, arrays(1, sharding_over(8)), {})
    store.wait()
    proxy.fault = fault
    with pytest.raises(MachineError, match="credentials"):
        store.restore(abstract_arrays(sharding_over(8)))
    proxy.fault = None
    assert equals_saved_step(store, 1)
    store.close()


@pytest.mark.parametrize("fault", [lose_answer, cut_connection])
def test_a_lost_answer_to_the_last_object_of_a_save_changes_nothing(behind: Bucket, proxy: Proxy, fault: Fault) -> None:
    store = CheckpointStore(behind, NEVER)
    first_time = iter([True])
    proxy.fault = limit_to(lambda handler: next(first_time, False) and fault(handler), "PUT", path="steps/")
    store.save(1, arrays(1, sharding_over(8)), {})
    store.wait()
    assert equals_saved_step(store, 1)
    store.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (limit_to(refuse(403), "PUT"), "cannot write .*permit"),
        (limit_to(refuse(403), "GET", path="list-type"), "cannot list .*permit"),
        (limit_to(refuse(403), "DELETE"), "cannot delete .*permit"),
        (refuse(403, "RequestTimeTooSkewed"), "the clock of this machine is wrong; set it"),
        (refuse(301), "another region; set AWS_REGION"),
        pytest.param(delay(30), "has not answered within 2 s", marks=pytest.mark.slow),
        (refuse(503), "SlowDown"),
    ],
)
def test_what_is_wrong_with_a_bucket_is_said_at_the_start(
    behind: Bucket, proxy: Proxy, fault: Fault, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_PROBE_SECONDS", 2.0)
    proxy.fault = fault
    with pytest.raises(UserError, match=f"{reason}.*base_path") as raised:
        CheckpointStore(behind, NEVER)
    assert len(str(raised.value).splitlines()) == 1
    assert "a-secret-key" not in str(raised.value)


def test_a_bucket_that_is_not_there_and_a_server_that_is_down_are_said_at_the_start(proxy: Proxy) -> None:
    with pytest.raises(UserError, match="there is no bucket another-bucket; create it"):
        CheckpointStore(Bucket("s3://another-bucket/run"), NEVER)
    with use_server("s3", "http://127.0.0.1:9"), pytest.raises(UserError, match=r"cannot be reached.*127\.0\.0\.1:9"):
        CheckpointStore(Bucket("s3://a-bucket/run"), NEVER)


def test_a_stop_signal_while_a_server_is_waited_for_keeps_its_exit_code(behind: Bucket, proxy: Proxy) -> None:
    proxy.fault = delay(1)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with StopRequest(), pytest.raises(Preempted, match="stopped by SIGTERM before the first step"):
        behind.read("x")


def test_a_cache_gets_through_faults_that_pass_and_tells_those_that_do_not(
    behind: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KvStore(str(behind))
    proxy.fault = inject_randomly(PASSING, share=0.2)
    for number in range(5):
        cache.write(f"parts/{number}", b"0123456789")
    assert cache.list("parts") == [str(number) for number in range(5)]
    assert list(cache.read_ranges([(f"parts/{number}", number, 9) for number in range(5)]))[4] == b"45678"
    proxy.fault = refuse(403)
    refused = (
        r"cannot write s3://.*/run/parts/0: the server refuses; .*\)\. Set data\.cache_dir to a directory that can be"
    )
    with pytest.raises(UserError, match=refused):
        cache.write("parts/0", b"")
    with pytest.raises(
        MachineError, match=r"cannot read s3://.*/run/parts/0: the server refuses; check the credentials"
    ):
        list(cache.read_ranges([("parts/0", 0, 1)]))
    proxy.fault = delay(2)
    monkeypatch.setattr(KvStore, "deadline", 0.5)
    with pytest.raises(
        MachineError, match=r"cannot read s3://.*/parts/0: the server has not answered within 0 s; check"
    ):
        cache.read("parts/0")


def test_a_request_with_no_time_left_is_not_waited_for(behind: Bucket, proxy: Proxy) -> None:
    proxy.fault, started = delay(1), time.monotonic()
    for request in (behind.read, behind.delete, behind.list, partial(behind.write, value=b"x")):
        with pytest.raises(MachineError, match="the server has not answered within 0 s"):
            request("x", seconds=0.0)
    assert time.monotonic() - started < 1


def test_a_run_asks_first_whether_its_bucket_can_be_used(proxy: Proxy, tmp_path: Path) -> None:
    proxy.fault = refuse(403, "RequestTimeTooSkewed")
    checkpointer = CheckpointerConfig(base_path="s3://a-bucket/runs")
    trainer = TrainerConfig(log_dir=str(tmp_path), checkpointer=checkpointer)
    directory, started = RunDirectory(trainer, RunConfig(trainer=trainer), "run"), time.monotonic()
    # The threads of the attempt before are the first that is read, and reading is repeated for minutes.
    with pytest.raises(UserError, match=r"the clock of this machine is wrong; set it.*base_path") as raised:
        directory.num_cpu_threads(trainer)
    assert raised.value.exit_code == EXIT_CONFIG
    assert time.monotonic() - started < 60
