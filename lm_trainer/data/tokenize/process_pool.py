"""A process pool for building caches. Every process writes one shard at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection

from lm_trainer.core.errors import MachineError
from lm_trainer.core.runtime import available_cores, keep_freed_memory
from lm_trainer.data.tokenize.shard_reader import ShardJob
from lm_trainer.data.tokenize.shard_writer import write_shard

_TICK_SECONDS, _GRACE_SECONDS = 0.2, 5.0

THREAD_VARIABLES = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")
"""Environment variables that set the number of encoding threads of `tokenizers` and `fastokens`, which read them at
their first use."""

_stop: Connection | None = None
"""A worker's end of a pipe. When the parent closes the other end, the worker stops after the current batch."""


def run_in_processes(jobs: Sequence[ShardJob], num_workers: int, tick: Callable[[], None]) -> None:
    """Runs the jobs in `num_workers` spawned processes, and calls `tick` in this process meanwhile.

    The first failure stops the other jobs at their next batch. Committed parts are kept.

    Raises:
        MachineError: if a worker was killed from outside.
    """
    # Spawned, not forked, because a fork of a process with JAX or TensorStore threads may inherit a locked mutex.
    context = multiprocessing.get_context("spawn")
    # A pipe, not an event, because setting an event blocks until every waiting process wakes up, even a killed one.
    stopped, stop = context.Pipe(duplex=False)
    threads = max(1, available_cores() // num_workers)
    arguments = (stopped, threads)
    with stopped, ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=arguments) as pool:
        try:
            waiting = {pool.submit(_run_job, job) for job in jobs}
            while waiting:
                done, waiting = wait(waiting, timeout=_TICK_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                tick()
        except BrokenProcessPool:
            raise MachineError(
                "a process that tokenises data was killed; the usual cause is too little memory: "
                "set data.num_workers lower. What was built is kept; start again to go on"
            ) from None
        finally:
            stop.close()
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(stopped: Connection, threads: int) -> None:
    global _stop
    _stop = stopped
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    keep_freed_memory()
    # Ctrl-C reaches the whole process group, but only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for wait_and_exit in (_exit_with_parent, _exit_when_stopped):
        threading.Thread(target=wait_and_exit, daemon=True).start()


def _exit_when_stopped() -> None:
    """Ends a worker that is stuck in a batch of rows, for example because a server does not answer."""
    assert _stop is not None
    _stop.poll(None)
    time.sleep(_GRACE_SECONDS)
    # Not sys.exit, which would wait for the stuck thread. Parts are written atomically, so none is left incomplete.
    os._exit(1)


def _exit_with_parent() -> None:
    """Ends a worker whose parent was killed, because the process pool does not do this."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_job(job: ShardJob) -> None:
    # The pipe becomes readable when its other end closes, so `poll` returns True when the worker must stop.
    assert _stop is not None
    write_shard(job, stopped=_stop.poll)
