"""XLA flags that are useful for every run on a kind of device but are off by default."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from importlib import metadata
from pathlib import Path

GPU_FLAGS = {
    # Overlaps collectives with independent computation. It reorders kernels without changing them, so results are
    # bit-identical. NVIDIA's JAX images also set it (docs.nvidia.com/jax-toolbox/environment-variables).
    "xla_gpu_enable_latency_hiding_scheduler": "true",
}
"""Flags for NVIDIA GPUs, keyed by name."""
CPU_FLAGS = {
    # By default XLA starts the operations of a program as early as it can, so an update of the parameters holds the
    # temporary arrays of all of them at once. Without it, operations run in the order that needs the least memory.
    # Results had the same bits wherever they were compared. As an option of one compilation the flag has no effect.
    "xla_cpu_enable_concurrency_optimized_scheduler": "false",
}
"""Flags for CPUs, keyed by name."""

# XLA ends the process at an unknown flag, and flags come and go, so none is set with other versions.
_GPU_JAXLIB = ("0.10.",)
_CPU_JAXLIB = ("0.10.", "0.11.", "0.12.")


MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variable with the fraction of a GPU's memory that JAX allocates, and its former name. JAX refuses both
together."""
MEMORY_FRACTION = "0.9"
"""JAX's own default of 0.75 leaves a quarter unused, but NCCL, cuDNN and CUDA only need 1 to 3 GB outside of it."""
ASYNC_DISPATCH = "PJRT_GPU_ENABLE_ASYNC_DISPATCH"
"""Environment variable that gives each GPU a thread of its own, which starts its kernels. By default the thread of
Python starts the kernels of all GPUs of a process, one after another. XLA ignores a variable that it does not know."""
_OTHER_ALLOCATION = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR")


def set_gpu_flags(
    environ: MutableMapping[str, str] = os.environ, *, devices: Path = Path("/dev"), jaxlib: str | None = None
) -> list[str]:
    """Sets `GPU_FLAGS`, `MEMORY_FRACTION` and `ASYNC_DISPATCH` if there are NVIDIA GPUs. Call it before importing jax.

    Args:
        environ: environment with XLA_FLAGS. Flags and variables that are already present are kept.
        devices: the directory of device files.
        jaxlib: the version of jaxlib; None means the installed version.

    Returns:
        A description of each change.
    """
    platform = environ.get("JAX_PLATFORMS", "").split(",")[0]
    if platform not in ("", "cuda", "gpu") or not (devices / "nvidiactl").exists():
        return []
    changes = []
    added = _add_flags(GPU_FLAGS, environ, jaxlib, _GPU_JAXLIB)
    if added:
        changes.append(f"XLA_FLAGS gained {' '.join(added)}")
    variables = {ASYNC_DISPATCH: "1"} if ASYNC_DISPATCH not in environ else {}
    if not any(name in environ for name in (*MEMORY_VARIABLES, *_OTHER_ALLOCATION)):
        variables[MEMORY_VARIABLES[0]] = MEMORY_FRACTION
    environ.update(variables)
    changes += [f"{name} is {value}" for name, value in variables.items()]
    return [f"{change}; a value of yours in the environment wins" for change in changes]


def set_cpu_flags(environ: MutableMapping[str, str] = os.environ, *, jaxlib: str | None = None) -> list[str]:
    """Sets `CPU_FLAGS`. Call it before JAX starts its backends.

    Args:
        environ: environment with XLA_FLAGS. Flags that are already present are kept.
        jaxlib: the version of jaxlib; None means the installed version.

    Returns:
        A description of each change.
    """
    added = _add_flags(CPU_FLAGS, environ, jaxlib, _CPU_JAXLIB)
    return ["XLA orders the operations of a program by the memory they need"] if added else []


def _add_flags(
    flags: Mapping[str, str], environ: MutableMapping[str, str], jaxlib: str | None, supported: tuple[str, ...]
) -> list[str]:
    if not (metadata.version("jaxlib") if jaxlib is None else jaxlib).startswith(supported):
        return []
    present = environ.get("XLA_FLAGS", "").split()
    present_names = {flag.lstrip("-").partition("=")[0] for flag in present}
    added = [f"--{name}={value}" for name, value in flags.items() if name not in present_names]
    if added:
        environ["XLA_FLAGS"] = " ".join([*present, *added])
    return added
