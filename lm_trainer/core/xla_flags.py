"""Flags of XLA that are right for every run on a kind of device, and that XLA does not set by itself."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path

GPU_FLAGS = {
    # Moves collectives ahead of the computation that does not wait for them. It orders kernels and changes none, so no
    # bit; NVIDIA's images of JAX set it as well (docs.nvidia.com/jax-toolbox/environment-variables).
    "xla_gpu_enable_latency_hiding_scheduler": "true",
}
"""Flags for NVIDIA GPUs, by name."""

# XLA ends the process at a flag that it does not know, and flags come and go: with other versions none is set.
_JAXLIB_THAT_KNOWS = ("0.10.",)


def set_gpu_flags(
    environ: MutableMapping[str, str] = os.environ, *, devices: Path = Path("/dev"), jaxlib: str | None = None
) -> list[str]:
    """Adds `GPU_FLAGS` to XLA_FLAGS on a machine with NVIDIA GPUs; call it before jax is imported.

    Args:
        environ: has XLA_FLAGS; a flag that is in there already stays as it is.
        devices: the directory of device files.
        jaxlib: the version of jaxlib; None: that which is installed.

    Returns:
        The change in words; empty where nothing was changed.
    """
    chosen = environ.get("JAX_PLATFORMS", "").split(",")[0]
    if chosen not in ("", "cuda", "gpu") or not (devices / "nvidiactl").exists():
        return []
    if not (metadata.version("jaxlib") if jaxlib is None else jaxlib).startswith(_JAXLIB_THAT_KNOWS):
        return []
    present = environ.get("XLA_FLAGS", "").split()
    named = {flag.lstrip("-").partition("=")[0] for flag in present}
    added = [f"--{name}={value}" for name, value in GPU_FLAGS.items() if name not in named]
    if not added:
        return []
    environ["XLA_FLAGS"] = " ".join([*present, *added])
    return [f"XLA_FLAGS gained {' '.join(added)}; a value of yours in the environment wins"]
