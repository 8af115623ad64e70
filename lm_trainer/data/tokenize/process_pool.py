"""Process pool for building, one shard at a time in each process."""

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
from typing import Any

from lm_trainer.core.errors import MachineError
from lm_trainer.core.runtime import available_cores, keep_freed_memory
from lm_trainer.data.tokenize.shard_reader import ShardJob
from lm_trainer.data.tokenize.shard_writer import write_shard

_TICK_SECONDS, _GRACE_SECONDS = 0.2, 5.0

THREAD_VARIABLES = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")
"""By which `tokenizers` and `fastokens` are told with how many threads to encode, before they do so first."""

_stop: Any = None
"""In a worker: the end of a pipe whose closing ends it between two batches of rows."""


def run_in_processes(jobs: Sequence[ShardJob], num_workers: int, tick: Callable[[], None]) -> None:
    """Runs every job in one of `num_workers` spawned processes; `tick` is called in this one meanwhile.

    The first failure stops the others at their next batch; all that they have committed stays.

    Raises:
        MachineError: if a worker was killed from outside.
    """
    # Spawned, not forked: a fork of a process in which JAX or TensorStore have threads may inherit a lock that is held.
    context = multiprocessing.get_context("spawn")
    # No event: to set one waits for everyone who waits for it, also for a worker that was killed meanwhile.
    stopped, stop = context.Pipe(duplex=False)
    threads = max(1, available_cores() // num_workers)
    arguments = (stopped, threads)
    with stopped, ProcessPoolExecutor(num_workers, context, initializer=_start, initargs=arguments) as pool:
        try:
            waiting = {pool.submit(_run, job) for job in jobs}
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


def _start(stopped: Connection, threads: int) -> None:
    global _stop
    _stop = stopped
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    keep_freed_memory()
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for wait_and_exit in (_exit_with_parent, _exit_when_stopped):
        threading.Thread(target=wait_and_exit, daemon=True).start()


def _exit_when_stopped() -> None:
    """Ends a worker that a batch of rows holds up, such as one whose server does not answer."""
    _stop.poll(None)
    time.sleep(_GRACE_SECONDS)
    # Not sys.exit: that would wait for the very thread that is held up. Parts are written whole, so nothing is torn.
    os._exit(1)


def _exit_with_parent() -> None:
    """Ends a worker whose parent was killed, which a pool does not do by itself."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(job: ShardJob) -> None:
    # The pipe becomes readable when its other end closes, so `poll` tells whether to stop.
    write_shard(job, stopped=_stop.poll)
