"""What has to be set in the process before JAX starts its backends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import UserError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ACCELERATOR_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio")


def prepare_process() -> list[str]:
    """Tunes the allocator and the thread count for XLA on a CPU; call it before jax is imported.

    Every step allocates one big buffer. By default glibc maps it afresh each time and every page faults again, which
    costs up to a third of a step; here the heap is kept instead. On a machine with an accelerator nothing is changed.

    Returns:
        What was changed, in words.
    """
    if not _cpu_only():
        return []
    done = []
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            if mallopt(_M_MMAP_THRESHOLD, -1) and mallopt(_M_TRIM_THRESHOLD, -1) and mallopt(_M_ARENA_MAX, 1):
                done.append("the allocator keeps freed memory for the next step")
    if len(os.sched_getaffinity(0)) == 1 if hasattr(os, "sched_getaffinity") else os.cpu_count() == 1:
        # With a single thread XLA picks other matrix kernels, whose bits differ from those of every other count.
        os.environ.setdefault("NPROC", "2")
        done.append("XLA runs two threads on the only core, to compute the same bits as on more cores")
    return done


def _cpu_only() -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return platforms == "cpu" or not any(Path(p).exists() for p in _ACCELERATOR_FILES)


def configure_jax(settings: Mapping[str, Any], cache_dir: str | None) -> None:
    """Applies JAX settings by name and turns the persistent compilation cache on.

    Raises:
        UserError: for a setting that this version of JAX does not have, or a value that it refuses.
    """
    import jax

    directory = cache_dir or os.environ.get("JAX_COMPILATION_CACHE_DIR") or default_compilation_cache()
    values = {"jax_compilation_cache_dir": str(directory), "jax_persistent_cache_min_compile_time_secs": 0.5}
    for name, value in {**values, **settings}.items():
        if name not in jax.config.values:
            raise UserError(f"trainer.jax_config: this version of JAX ({jax.__version__}) has no setting {name!r}")
        if jax.config.values[name] == value:
            continue
        try:
            jax.config.update(name, value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"trainer.jax_config: {name}: {error}") from error


def default_compilation_cache() -> Path:
    """Where compiled programs are kept unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lm_trainer" / "compiled"
