"""Background builds: threads that build caches while a run reads the parts that are already written."""

from __future__ import annotations

import concurrent.futures.process
import concurrent.futures.thread  # noqa: F401 - imported for their order, see below
import threading
from collections.abc import Sequence

from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenize.open_cache import OpenCache
from lm_trainer.data.tokenize.progress import BuildCallbacks, Stopped

_JOIN_SECONDS = 15.0

interpreter_ending = threading.Event()
"""Set when the interpreter exits. Threads that wait for text still being tokenised must then give up."""

# At exit, Python joins executor threads before it runs `atexit` handlers and finalizers, and only then marks the main
# thread as ended. A Grain thread that waits for text, or a thread that waits for a process pool, would thus keep a
# script that never calls `Data.close` alive forever. No public hook runs earlier, and the executors use this private
# one themselves. Hooks run in reverse order of registration, hence the imports of both executor modules above.
threading._register_atexit(interpreter_ending.set)  # pyright: ignore[reportAttributeAccessIssue]


class BackgroundBuild:
    """Builds a cache in a thread of this process and in worker processes, or waits while another process builds it.

    The build ends with the process, even if it is not closed. Everything built so far is kept.

    Args:
        build: the cache to build.
        cache: the same cache as readers see it; receives every new part, the progress, and any failure.
        num_builds: number of builds that share the cores of this machine.
    """

    def __init__(self, build: Build, cache: OpenCache, *, num_builds: int = 1):
        self._build, self._cache, self._num_builds = build, cache, num_builds
        self._closed = threading.Event()

    def run(self) -> None:
        """Builds until the cache is finished, the build fails, or `close` is called."""
        callbacks = BuildCallbacks(self._cache.set_progress, self._cache.extend, self._is_stopped)
        try:
            self._cache.extend(self._build.run(callbacks, background_builds=self._num_builds))
        except Stopped:
            self._cache.set_error(RuntimeError(f"the build of {self._cache.store.url} has been closed"))
        except BaseException as error:  # re-raised in the reader that needs the missing text
            self._cache.set_error(error)

    def close(self) -> None:
        """Asks the build to stop after the current batch of rows."""
        self._closed.set()

    def _is_stopped(self) -> bool:
        return self._closed.is_set() or interpreter_ending.is_set()


class BackgroundBuilds:
    """The background builds of a run, and their threads.

    Args:
        builds: the builds.
        one_by_one: True to run them one after the other in a single thread.
    """

    def __init__(self, builds: Sequence[BackgroundBuild], *, one_by_one: bool):
        self._builds = builds
        work = [self._run_all] if one_by_one else [build.run for build in builds]
        # Not daemon threads, because Python would kill them inside TensorStore's C++ code, which aborts the process
        # (SIGABRT).
        self._threads = [threading.Thread(target=run, name="tokenise") for run in work]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def _run_all(self) -> None:
        for build in self._builds:
            build.run()

    def close(self) -> None:
        """Stops the builds and their workers after the current batch of rows. Safe to call twice."""
        for build in self._builds:
            build.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
