"""Settings of the process that have to be made before JAX starts its backends."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expanded, path_problem
from lm_trainer.core.xla_flags import set_gpu_flags

# Of glibc's malloc.h, which Python does not know.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
COMPILATION_CACHES = ("gs", "s3")
"""Schemes of the URLs that may name the directory of compiled programs."""
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_TPU_FILES = ("/dev/accel0", "/dev/vfio")
_LEAST_TIME = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
"""JAX's own variable, by which a user says from which time of compilation a program is kept."""


def available_cores() -> int:
    """The number of processor cores that this process may use."""
    # The affinity mask knows of a scheduler's or a container's share of the machine; not every system has one.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_process() -> list[str]:
    """Tunes the allocator and the thread count for XLA on a CPU, its flags for GPUs; call it before jax is imported.

    On a CPU every step allocates one big buffer. By default glibc maps it afresh each time and every page faults again,
    which costs up to a third of a step; here the heap is kept instead. On GPUs it does as `set_gpu_flags`.

    Returns:
        Each change in words.
    """
    if not _cpu_only():
        return set_gpu_flags()
    done = []
    if keep_freed_memory(one_arena=True):
        done.append("the allocator keeps freed memory for the next step")
    if available_cores() == 1 and _asked_threads() is None:
        # With a single thread XLA picks other matrix kernels, whose bits differ from those of every other count.
        set_cpu_threads(2)
        done.append("XLA runs two threads on the only core, to compute the same bits as on two")
    return done


def keep_freed_memory(*, one_arena: bool = False) -> bool:
    """Lets glibc keep the memory that this process frees, whose pages would fault again when it is asked for anew.

    Args:
        one_arena: let all threads share one arena, so that memory that one thread frees can go to another.

    Returns:
        True if it was done; other C libraries have no such settings.
    """
    if sys.platform == "linux":
        # musl has no `mallopt`.
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            # -1: never map a large block afresh, and never give the top of the heap back.
            kept = mallopt(_M_MMAP_THRESHOLD, -1) and mallopt(_M_TRIM_THRESHOLD, -1)
            return bool(kept and (not one_arena or mallopt(_M_ARENA_MAX, 1)))
    return False


def return_freed_memory() -> None:
    """Gives the system back the freed memory that `keep_freed_memory` has kept."""
    # Only glibc has `malloc_trim`.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def quick_handover() -> Iterator[None]:
    """Lets a thread that waits for the interpreter's lock have it after 0.2 ms, not after 5.

    For stages of a pipeline that release the lock for most of their time, and would wait for it after each call.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def set_cpu_threads(count: int | None) -> None:
    """Sets the number of XLA's threads on a CPU, None for no change; call it before jax starts its backends."""
    if count is not None:
        os.environ["NPROC"] = str(count)


def cpu_threads() -> int | None:
    """The number of threads with which XLA computes on a CPU, None on other devices. Starts the backends of jax.

    There are never fewer than (emulated) devices in the process. XLA divides matrix products and sums among them, so
    their number decides bits.
    """
    import jax

    if jax.default_backend() != "cpu":
        return None
    return max(_asked_threads() or available_cores(), jax.local_device_count())


def _asked_threads() -> int | None:
    """The number in XLA's own environment variables (`DefaultThreadPoolSize` in tsl)."""
    found = (os.environ.get(name, "") for name in ("PJRT_NPROC", "NPROC"))
    return next((int(text) for text in found if text.isdecimal() and int(text)), None)


def _cpu_only() -> bool:
    return not _has((*_GPU_FILES, *_TPU_FILES))


def _has(files: Sequence[str]) -> bool:
    # By the device files: asking JAX would start its backends.
    return os.environ.get("JAX_PLATFORMS", "") != "cpu" and any(Path(file).exists() for file in files)


def configure_jax(settings: Mapping[str, Any], cache_dir: str | None, cpu_threads: int | None = None) -> None:
    """Applies JAX settings by name, turns the persistent compilation cache on, and does as `set_cpu_threads`.

    Raises:
        UserError: for a value that JAX refuses, and for a JAX_COMPILATION_CACHE_DIR that the key could not be.
    """
    import jax

    set_cpu_threads(cpu_threads)
    directory = expanded(cache_dir or _cache_of_environment() or default_compilation_cache())
    if _cpu_only():
        # XLA cuts a program into tasks for the threads of the process that compiles it, and its key knows nothing of
        # them: with another number of threads one would run, and record the hash of, a program that was not made here.
        directory = f"{directory}/{_asked_threads() or available_cores()}-threads"
    values: dict[str, Any] = {"jax_compilation_cache_dir": directory}
    # GPUs' compiler chooses kernels by timing them: all programs are kept, or a sum might be in another order at each
    # start. Elsewhere a program that compiles faster than this is compiled again sooner than it is read.
    if _has(_GPU_FILES):
        values["jax_persistent_cache_min_compile_time_secs"] = 0.0
    elif _LEAST_TIME not in os.environ:
        values["jax_persistent_cache_min_compile_time_secs"] = 0.5
    if "://" in directory:
        # JAX has XLA keep its choice of kernels in the same directory, and XLA writes to local ones alone: it would
        # make one here whose name begins with `gs:`, or fail. The programs themselves hold the choice.
        values["jax_persistent_cache_enable_xla_caches"] = "none"
    for name, value in {**values, **settings}.items():
        # Some settings may not be touched once the backends run, not even to the value that they have.
        if jax.config.values[name] == value:
            continue
        try:
            jax.config.update(name, value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"trainer.jax_config: {name}: {error}") from error


def _cache_of_environment() -> str | None:
    named = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if named and (problem := path_problem(named, COMPILATION_CACHES)):
        raise UserError(f"JAX_COMPILATION_CACHE_DIR in the environment: {problem}")
    return named


def check_settings(settings: Iterable[str]) -> None:
    """Raises ValueError for the name of a setting that this version of JAX does not have."""
    names = list(settings)
    if not names:  # whoever only reads a configuration then does without JAX
        return
    import jax

    for name in names:
        if name not in jax.config.values:
            near = "".join(f"; did you mean {n!r}?" for n in difflib.get_close_matches(name, jax.config.values, 1))
            raise ValueError(f"this version of JAX ({jax.__version__}) has no setting {name!r}{near}")


def default_compilation_cache() -> Path:
    """The default directory of compiled programs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lm_trainer" / "compiled"
