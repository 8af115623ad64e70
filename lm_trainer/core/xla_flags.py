"""XLA flags useful for every run on a kind of device, and not on by default."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib import metadata
from pathlib import Path

GPU_FLAGS = {
    # Overlaps collectives with independent computation. It reorders kernels without changing them, so results are
    # bit-identical; NVIDIA's JAX images set it too (docs.nvidia.com/jax-toolbox/environment-variables).
    "xla_gpu_enable_latency_hiding_scheduler": "true",
}
"""Flags for NVIDIA GPUs, by name."""

# XLA ends the process at an unknown flag, and flags come and go; with other versions, none is set.
_SUPPORTED_JAXLIB = ("0.10.",)


def set_gpu_flags(
    environ: MutableMapping[str, str] = os.environ, *, devices: Path = Path("/dev"), jaxlib: str | None = None
) -> list[str]:
    """Adds `GPU_FLAGS` to XLA_FLAGS on a machine with NVIDIA GPUs; call it before importing jax.

    Args:
        environ: environment with XLA_FLAGS; flags already present are kept.
        devices: the directory of device files.
        jaxlib: the version of jaxlib; None means the installed one.

    Returns:
        A description of the change; empty without a change.
    """
    platform = environ.get("JAX_PLATFORMS", "").split(",")[0]
    if platform not in ("", "cuda", "gpu") or not (devices / "nvidiactl").exists():
        return []
    if not (metadata.version("jaxlib") if jaxlib is None else jaxlib).startswith(_SUPPORTED_JAXLIB):
        return []
    present = environ.get("XLA_FLAGS", "").split()
    present_names = {flag.lstrip("-").partition("=")[0] for flag in present}
    added = [f"--{name}={value}" for name, value in GPU_FLAGS.items() if name not in present_names]
    if not added:
        return []
    environ["XLA_FLAGS"] = " ".join([*present, *added])
    return [f"XLA_FLAGS gained {' '.join(added)}; a value of yours in the environment wins"]
