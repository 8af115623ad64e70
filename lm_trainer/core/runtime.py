"""Applies process settings that must be made before JAX starts its backends."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expand_home, path_problem
from lm_trainer.core.xla_flags import set_cpu_flags, set_gpu_flags

# Constants of glibc's malloc.h that Python does not have.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_VECTOR_INSTRUCTIONS = ("avx512f", "avx2", "avx", "sve", "asimd")
"""Names of vector instructions in /proc/cpuinfo, the widest of an architecture first."""
COMPILATION_CACHES = ("gs", "s3")
"""URL schemes that are accepted for the compilation cache directory."""
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
_TPU_FILES = ("/dev/accel0", "/dev/vfio")
_MIN_COMPILE_TIME_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
"""JAX's environment variable for the shortest compilation time of a program to cache."""


def available_cores() -> int:
    """Returns the number of processor cores available to this process."""
    # The affinity mask reflects a scheduler's or container's share of the machine. Not every system has one.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_process(*, cpu_flags: bool = True) -> list[str]:
    """Tunes the allocator, XLA's flags and its thread count on a CPU, or XLA's flags on GPUs. Call it before importing
    jax.

    On a CPU, every step allocates one big buffer. By default, glibc maps it each time and every page faults, which
    costs up to a third of a step. This function makes glibc keep the heap instead.

    Args:
        cpu_flags: False to leave XLA's flags for CPUs to the caller.

    Returns:
        A description of each change.
    """
    if not _is_cpu_only():
        return set_gpu_flags()
    changes = []
    if keep_freed_memory(one_arena=True):
        changes.append("the allocator keeps freed memory for the next step")
    changes += set_cpu_flags() if cpu_flags else []
    if available_cores() == 1 and _threads_from_environment() is None:
        # With a single thread, XLA picks other matrix kernels, which round differently from all other thread counts.
        set_cpu_threads(2)
        changes.append("XLA runs two threads on the only core, to compute the same bits as on two")
    return changes


def keep_freed_memory(*, one_arena: bool = False) -> bool:
    """Makes glibc keep freed memory, to avoid page faults at the next allocation.

    Args:
        one_arena: True to let all threads share one arena, so that memory freed by one thread can be used by another.

    Returns:
        True if the settings were applied. Other C libraries do not have them.
    """
    if sys.platform == "linux":
        # musl has no `mallopt`.
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            # -1 means to never use mmap for a large block, and to never return the top of the heap to the system.
            applied = mallopt(_M_MMAP_THRESHOLD, -1) and mallopt(_M_TRIM_THRESHOLD, -1)
            return bool(applied and (not one_arena or mallopt(_M_ARENA_MAX, 1)))
    return False


def return_freed_memory() -> None:
    """Returns the freed memory that `keep_freed_memory` retains to the system."""
    # Only glibc has `malloc_trim`.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int | None:
    """Returns the resident memory of this process in bytes; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


@contextlib.contextmanager
def short_switch_interval() -> Iterator[None]:
    """Context manager that reduces the switch interval of the interpreter lock (GIL) from 5 ms to 0.2 ms.

    Meant for pipeline stages that release the lock most of the time, and would wait for it after each call.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def set_cpu_threads(count: int | None) -> None:
    """Sets the number of XLA's CPU threads; None leaves it unchanged. Call it before jax starts its backends."""
    if count is not None:
        os.environ["NPROC"] = str(count)


def use_one_blas_thread() -> None:
    """Limits SciPy's BLAS, with which JAX factors matrices on a CPU, to one thread.

    By default it has one thread for each core, and their number changes the bits, such as eigenvectors of matrices from
    about 256 rows. `trainer.cpu_threads` does not set it, so a run would depend on the cores of its machine.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when SciPy loads the library
    if "scipy.linalg" in sys.modules:
        import scipy

        # SciPy's wheels for Linux have the library in this directory; opening it again returns the loaded one.
        for file in (Path(scipy.__file__).parents[1] / "scipy.libs").glob("libscipy_openblas-*"):
            ctypes.CDLL(str(file)).scipy_openblas_set_num_threads(1)


def cpu_threads() -> int | None:
    """Returns the number of XLA's threads on a CPU; None on other devices. Starts the backends of jax.

    It is at least the number of (emulated) devices in the process. XLA divides matrix products and sums among the
    threads, so their number affects rounding.
    """
    import jax

    if jax.default_backend() != "cpu":
        return None
    return max(_threads_from_environment() or available_cores(), jax.local_device_count())


def cpu_instructions() -> str | None:
    """Returns the architecture of the CPU with its widest vector instructions, such as `x86_64 avx512f`.

    Kernels for other vector instructions may round differently. None on other devices. Starts the backends of jax.
    """
    import jax

    if jax.default_backend() != "cpu":
        return None
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    except OSError:  # not Linux
        words = set[str]()
    return " ".join([platform.machine(), *[name for name in _VECTOR_INSTRUCTIONS if name in words][:1]])


def _threads_from_environment() -> int | None:
    """Returns the number of threads given in XLA's environment variables (`DefaultThreadPoolSize` in tsl)."""
    settings = (os.environ.get(name, "") for name in ("PJRT_NPROC", "NPROC"))
    return next((int(text) for text in settings if text.isdecimal() and int(text)), None)


def _is_cpu_only() -> bool:
    return not _any_exists((*_GPU_FILES, *_TPU_FILES))


def _any_exists(files: Sequence[str]) -> bool:
    # Checks device files, because querying JAX would start its backends.
    return os.environ.get("JAX_PLATFORMS", "") != "cpu" and any(Path(file).exists() for file in files)


def configure_jax(settings: Mapping[str, Any], cache_dir: str | None, cpu_threads: int | None = None) -> None:
    """Applies JAX settings by name, enables the persistent compilation cache, and sets the number of CPU threads.

    Raises:
        UserError: if JAX refuses a value, or JAX_COMPILATION_CACHE_DIR is not a valid cache directory.
    """
    import jax

    from lm_trainer.core.jax_internals import (
        add_checksums_to_cached_programs,
        compile_nested_collectives_again,
        use_keys_without_paths,
    )

    set_cpu_threads(cpu_threads)
    use_one_blas_thread()
    add_checksums_to_cached_programs()
    compile_nested_collectives_again()
    use_keys_without_paths()
    directory = expand_home(cache_dir or _compilation_cache_from_environment() or default_compilation_cache())
    if _is_cpu_only():
        # XLA splits a program into tasks for the threads of the compiling process, but the cache key does not include
        # their number. A process with another number would run, and record the hash of, a foreign program.
        directory = f"{directory}/{_threads_from_environment() or available_cores()}-threads"
    values: dict[str, Any] = {"jax_compilation_cache_dir": directory}
    # The GPU compiler selects kernels by timing them, so all programs are cached. Otherwise, the order of a sum might
    # change at each start. Elsewhere, compiling a program below this time costs about as much as reading it.
    if _any_exists(_GPU_FILES):
        values["jax_persistent_cache_min_compile_time_secs"] = 0.0
    elif _MIN_COMPILE_TIME_VARIABLE not in os.environ:
        values["jax_persistent_cache_min_compile_time_secs"] = 0.1
    if "://" in directory:
        # JAX makes XLA store its kernel choices in the same directory, but XLA only writes to local directories, so it
        # would create a directory named `gs:...`, or fail. The cached programs contain the choices.
        values["jax_persistent_cache_enable_xla_caches"] = "none"
    for name, value in {**values, **settings}.items():
        # Once the backends run, some settings cannot be set, not even to their current value.
        if jax.config.values[name] == value:
            continue
        try:
            jax.config.update(name, value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"trainer.jax_config: {name}: {error}") from error


def _compilation_cache_from_environment() -> str | None:
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if directory and (problem := path_problem(directory, COMPILATION_CACHES)):
        raise UserError(f"JAX_COMPILATION_CACHE_DIR in the environment: {problem}")
    return directory


def check_jax_settings(settings: Iterable[str]) -> None:
    """Raises ValueError for a setting that this version of JAX does not have."""
    names = list(settings)
    if not names:  # avoids importing JAX just to read a configuration
        return
    import jax

    for name in names:
        if name not in jax.config.values:
            hint = "".join(f"; did you mean {n!r}?" for n in difflib.get_close_matches(name, jax.config.values, 1))
            raise ValueError(f"this version of JAX ({jax.__version__}) has no setting {name!r}{hint}")


def default_compilation_cache() -> Path:
    """Returns the default compilation cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lm_trainer" / "compiled"
