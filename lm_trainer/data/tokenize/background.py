"""Background builds: caches that are built in threads while a run reads the parts that are there already."""

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
"""Set when the interpreter ends; whoever waits for text that is still being tokenised has to give up then."""

# Python joins the threads of executors before it runs anything that `atexit` or a finalizer knows, and only then marks
# the main thread as ended. A thread of Grain's that waits for text, or one that waits for a pool of processes, would
# therefore keep a script without `Data.close` from ever ending. Nothing public is called earlier; this private hook is
# how the executors themselves are told. The last to register is called first, hence the imports of both above.
threading._register_atexit(interpreter_ending.set)  # pyright: ignore[reportAttributeAccessIssue]


class BackgroundBuild:
    """Builds a cache in a thread of this process and its workers, or waits while another process does.

    It ends with the process, even if it is not closed; all that was built is kept.

    Args:
        build: the cache to build.
        cache: the same cache as readers see it; told of every part, of the progress, and of a failure.
        num_builds: number of builds that share the cores of this machine.
    """

    def __init__(self, build: Build, cache: OpenCache, *, num_builds: int = 1):
        self._build, self._cache, self._num_builds = build, cache, num_builds
        self._closed = threading.Event()

    def run(self) -> None:
        """Builds to the end, to the first failure, or until it is closed."""
        callbacks = BuildCallbacks(self._cache.show, self._cache.extend, self._is_stopped)
        try:
            self._cache.extend(self._build.run(callbacks, background_builds=self._num_builds))
        except Stopped:
            self._cache.fail(RuntimeError(f"the build of {self._cache.store.url} has been closed"))
        except BaseException as error:  # raised again where the missing text is needed
            self._cache.fail(error)

    def close(self) -> None:
        """Asks the build to end after the batch of rows at hand."""
        self._closed.set()

    def _is_stopped(self) -> bool:
        return self._closed.is_set() or interpreter_ending.is_set()


class BackgroundBuilds:
    """The background builds of a run, and their threads.

    Args:
        builds: the builds.
        one_by_one: True to run them in one thread, one after the other.
    """

    def __init__(self, builds: Sequence[BackgroundBuild], *, one_by_one: bool):
        self._builds = builds
        work = [self._run_all] if one_by_one else [build.run for build in builds]
        # No daemons: Python would end those amid the C++ of TensorStore, which ends the process by SIGABRT.
        self._threads = [threading.Thread(target=run, name="tokenise") for run in work]

    def start(self) -> None:
        """Starts the threads."""
        for thread in self._threads:
            thread.start()

    def _run_all(self) -> None:
        for build in self._builds:
            build.run()

    def close(self) -> None:
        """Ends the builds and their workers after the batch of rows at hand; safe to call twice."""
        for build in self._builds:
            build.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
