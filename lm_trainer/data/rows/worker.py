"""Worker processes of Grain, which end with their parent process no matter how it ends."""

from __future__ import annotations

import gc
import os
import threading
import time

import grain
from grain.multiprocessing import SharedMemoryArray

_BUFFER_SIZE = 2
"""Number of batches buffered per process."""
_POLL_SECONDS = 1.0


def read_in_processes(dataset: grain.IterDataset, processes: int) -> grain.IterDataset:
    """Returns an `IterDataset` with the same elements in the same order, made by worker processes."""
    from absl import flags

    # Grain reads its own flags, which only absl programs parse.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    options = grain.MultiprocessingOptions(processes, per_worker_buffer_size=_BUFFER_SIZE)
    return dataset.mp_prefetch(options, worker_init_fn=EndWithParent(os.getpid()))


def free_shared_memory() -> None:
    """Frees the memory of all unreferenced batches, including batches of closed iterators.

    Grain frees the memory in a thread, which is killed at the end of a program before it is done. Python would then
    warn of a leak.
    """
    pool = getattr(SharedMemoryArray, "_del_thread_pool", None)
    if pool is not None:
        # Grain iterators are part of reference cycles, and hold their last element.
        gc.collect()
        # The pool has a single thread, so this call runs last.
        pool.apply(int)


class EndWithParent:
    """Initialises a Grain worker: starts a thread that ends the worker once its parent is gone.

    A parent that is killed by SIGKILL does not end its daemons, and its workers would wait for it forever.

    Args:
        parent: process id of the reading process.
    """

    def __init__(self, parent: int):
        self._parent = parent

    def __call__(self, index: int, count: int) -> None:
        del index, count
        # Skipped in the parent itself, where Grain calls this function for a dataset without workers.
        if os.getpid() != self._parent:
            threading.Thread(target=self._exit_with_parent, daemon=True).start()

    def _exit_with_parent(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)
