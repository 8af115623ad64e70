"""Worker processes of Grain: they end with the process that they read for, however it ends."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import grain
from grain.multiprocessing import SharedMemoryArray

_BUFFERED = 2
"""Batches of each process that lie ready."""
_POLL_SECONDS = 1.0


def in_processes(dataset: Any, processes: int) -> Any:
    """Returns an `IterDataset` whose elements so many processes make, in the same order."""
    from absl import flags

    # Grain asks for flags of its own, which only programs of absl parse.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(processes, per_worker_buffer_size=_BUFFERED)
    return dataset.mp_prefetch(options, worker_init_fn=EndWithParent(os.getpid()))


def free_shared_memory() -> None:
    """Frees the memory of all batches that are no longer held, of iterators that are closed among them.

    Grain frees it in a thread, which does not live to do so at the end of a program: Python would then warn of a leak.
    """
    pool = getattr(SharedMemoryArray, "_del_thread_pool", None)
    if pool is not None:
        # Iterators of Grain hold one another, and their last element.
        gc.collect()
        # The pool has one thread, which comes to this last.
        pool.apply(int)


class EndWithParent:
    """Start of a worker, which Grain calls in each: a thread there ends it once its parent is gone.

    A parent that is killed outright ends no daemons of its own, and a worker would wait for it for ever.

    Args:
        parent: the process that reads.
    """

    def __init__(self, parent: int):
        self._parent = parent

    def __call__(self, index: int, count: int) -> None:
        del index, count
        # Not in the parent itself, where Grain calls it for a dataset without workers.
        if os.getpid() != self._parent:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)
