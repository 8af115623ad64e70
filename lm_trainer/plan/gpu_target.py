"""Descriptions of GPUs, with which JAX's CUDA plug-in can compile for a GPU that is not present.

The compiler takes a description in the text format of XLA's `GpuTargetConfigProto`. The figures equal the values that
CUDA reports for these devices (`cudaGetDeviceProperties`). They are also published in NVIDIA's whitepapers on the
Ampere, Hopper and Blackwell architectures and, for the same purpose, in `xla/backends/gpu/target_config/specs` of the
OpenXLA project (Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

import jax

from lm_trainer.core.errors import UserError
from lm_trainer.profile.devices import NODE

_PLUGINS = {"jax-cuda12-pjrt": "cuda12", "jax-cuda13-pjrt": "cuda13"}
"""Maps compiler packages to the JAX extras that install them with their dependencies."""


@dataclass(frozen=True)
class _Gpu:
    """Figures of a GPU that the compiler needs."""

    capability: int
    """Major version of the compute capability; the minor version is 0."""
    cores: int
    """Number of streaming multiprocessors."""
    fpus: int
    """Number of float32 units per multiprocessor."""
    clock: float
    """Clock rate in GHz."""
    memory: int
    """Memory size in bytes."""
    bandwidth: int
    """Memory bandwidth in bytes per second."""
    cache: int
    """Size of the L2 cache in bytes."""
    shared: int
    """Size of the shared memory per multiprocessor, in KiB."""

    def to_target_config(self, kind: str) -> str:
        """Returns the description for the compiler."""
        # A block can use all shared memory except one KiB, which the system reserves.
        limits = {"threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": 2048}
        limits |= {"block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 2**16 - 1, "block_dim_limit_z": 2**16 - 1}
        limits |= {"thread_dim_limit_x": 1024, "thread_dim_limit_y": 1024, "thread_dim_limit_z": 64}
        limits |= {"registers_per_core_limit": 2**16, "registers_per_block_limit": 2**16}
        sizes = {"core_count": self.cores, "fpus_per_core": self.fpus, "clock_rate_ghz": self.clock}
        sizes |= {"device_memory_size": self.memory, "memory_bandwidth": self.bandwidth, "l2_cache_size": self.cache}
        sizes |= {"shared_memory_per_block": 48 << 10, "shared_memory_per_core": self.shared << 10}
        sizes |= {"shared_memory_per_block_optin": (self.shared - 1) << 10}
        fields = "\n".join(f"  {name}: {value}" for name, value in {**limits, **sizes}.items())
        # From compute capability 9 on, matrix products need architecture-specific instructions.
        feature_extension = "ACCELERATED_FEATURES" if self.capability >= 9 else "NONE"
        versions = {"driver": "13.0.0", "runtime": "12.9.0", "compile_time_toolkit": "12.9.0", "dnn": "9.10.0"}
        version_lines = "\n".join(f'  {name}_version: "{version}"' for name, version in versions.items())
        return (
            f"gpu_device_info {{\n{fields}\n{version_lines}\n"
            f"  cuda_compute_capability {{ major: {self.capability} feature_extension: {feature_extension} }}\n}}\n"
            f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 10 patch: 0 }}\n'
            f'device_description_str: "{kind}"\n'
        )


_MIB = 2**20
_A100 = {"capability": 8, "cores": 108, "fpus": 64, "clock": 1.41, "cache": 40 * _MIB, "shared": 164}
_HOPPER = {"capability": 9, "fpus": 128, "cache": 50 * _MIB, "shared": 228}
_BLACKWELL = {"capability": 10, "fpus": 128, "shared": 228}
_GPUS = {
    "NVIDIA A100-SXM4-40GB": _Gpu(**_A100, memory=42_331_013_120, bandwidth=1_555_200_000_000),
    "NVIDIA A100-SXM4-80GB": _Gpu(**_A100, memory=85_100_068_864, bandwidth=2_039_040_000_000),
    "NVIDIA A100 80GB PCIe": _Gpu(**_A100, memory=85_100_068_864, bandwidth=1_935_000_000_000),
    "NVIDIA H100 PCIe": _Gpu(**_HOPPER, cores=114, clock=1.755, memory=84_942_979_072, bandwidth=2_039_040_000_000),
    "NVIDIA H100 80GB HBM3": _Gpu(**_HOPPER, cores=132, clock=1.98, memory=84_942_979_072, bandwidth=3_352_320_000_000),
    "NVIDIA H200": _Gpu(**_HOPPER, cores=132, clock=1.98, memory=151_397_597_184, bandwidth=4_800_000_000_000),
    "NVIDIA B200": _Gpu(
        **_BLACKWELL, cores=148, clock=1.965, memory=191_514_411_008, bandwidth=7_672_320_000_000, cache=132_644_864
    ),
    "NVIDIA GB200": _Gpu(
        **_BLACKWELL, cores=152, clock=2.062, memory=197_897_748_480, bandwidth=7_928_064_000_000, cache=135_528_448
    ),
}


def supported_gpus() -> tuple[str, ...]:
    """Returns the kinds of GPU for which the compiler can be used, as JAX names them."""
    return tuple(_GPUS)


def compute_capability(kind: str) -> int | None:
    """Returns the major version of the compute capability of a kind of GPU; None if there is no description of it."""
    return _GPUS[kind].capability if kind in _GPUS else None


def gpu_target(kind: str, count: int) -> dict[str, str]:
    """Returns options of `jax.experimental.topologies.get_topology_desc` for GPUs in nodes of 8, which may be absent.

    Args:
        kind: kind of GPU, as in `jax.Device.device_kind`.
        count: number of GPUs. With several nodes, the description may contain more.

    Raises:
        UserError: if there is no description of the GPU, or no compatible plug-in.
    """
    if kind not in _GPUS:
        raise UserError(
            f"--compile has no description of {kind!r} for the compiler; it has {', '.join(_GPUS)}. Leave --compile "
            f"out, or plan for one of these"
        )
    _check_cuda_plugin()
    # Number of slices, nodes per slice, and devices per node.
    topology = f"1x1x{count}" if count <= NODE else f"1x{-(-count // NODE)}x{NODE}"
    return {"target_config": _GPUS[kind].to_target_config(kind), "topology": topology}


def _check_cuda_plugin() -> None:
    installed = {}
    for package, extra in _PLUGINS.items():
        try:
            installed[extra] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if not installed:
        raise UserError(
            "--compile needs the compiler for GPUs, which is JAX's CUDA plug-in: install it with pip install "
            "'lm_trainer[gpu]' (no GPU is needed), or leave --compile out"
        )
    compiler = metadata.version("jaxlib")
    if compiler not in installed.values():
        extra, version = next(iter(installed.items()))
        raise UserError(
            f"--compile: JAX's CUDA plug-in {version} does not fit jaxlib {compiler}: install the one that does, with "
            f"pip install 'jax[{extra}]=={jax.__version__}'"
        )
