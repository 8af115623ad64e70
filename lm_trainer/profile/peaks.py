"""Peak FLOP/s from vendors' datasheets, for dense matrix products without structured sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax

Format = Literal["bfloat16", "float16", "tf32", "float32"]
"""Input formats of matrix units. By default, JAX uses `tf32` for float32 arrays on NVIDIA GPUs."""


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one JAX device."""

    flops: float
    format: Format
    source: str


@dataclass(frozen=True)
class _Device:
    kinds: tuple[str, ...]
    """Kind exactly as in `jax.Device.device_kind`. Laptop GPUs and GPU slices have other names, and no entry."""
    tera: Mapping[Format, float]
    """TFLOP/s of one JAX device by format. On TPU v2 and v3, a JAX device is one of the two cores of a chip."""
    source: str


def _teraflops(
    *, bf16: float | None = None, f16: float | None = None, tf32: float | None = None, f32: float | None = None
) -> dict[Format, float]:
    # In search order: TF32 is before float32.
    formats: dict[Format, float | None] = {"bfloat16": bf16, "float16": f16, "tf32": tf32, "float32": f32}
    return {name: value for name, value in formats.items() if value is not None}


_H100 = "NVIDIA H100 Tensor Core GPU datasheet; figures with sparsity halved"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet; figures with sparsity halved"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"
_BLACKWELL = "NVIDIA Blackwell datasheet, figures for one GPU; those with sparsity halved"
_TPU = "Google Cloud TPU documentation, system architecture"

_DEVICES = (
    _Device(("NVIDIA GB200",), _teraflops(bf16=2500, f16=2500, tf32=1250, f32=80), _BLACKWELL),
    _Device(("NVIDIA B200",), _teraflops(bf16=2250, f16=2250, tf32=1100, f32=75), _BLACKWELL),
    _Device(("NVIDIA H200",), _teraflops(bf16=989.5, f16=989.5, tf32=494.5, f32=67), _H200),
    _Device(("NVIDIA H200 NVL",), _teraflops(bf16=835.5, f16=835.5, tf32=417.5, f32=60), _H200),
    _Device(("NVIDIA H100 80GB HBM3",), _teraflops(bf16=989.5, f16=989.5, tf32=494.5, f32=67), _H100),
    _Device(("NVIDIA H100 NVL",), _teraflops(bf16=835.5, f16=835.5, tf32=417.5, f32=60), _H100),
    _Device(("NVIDIA H100 PCIe",), _teraflops(bf16=756.5, f16=756.5, tf32=378, f32=51), _H100),
    _Device(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"),
        _teraflops(bf16=312, f16=312, tf32=156, f32=19.5),
        _A100,
    ),
    _Device(("NVIDIA A10",), _teraflops(bf16=125, f16=125, tf32=62.5, f32=31.2), "NVIDIA A10 datasheet"),
    _Device(("NVIDIA A40",), _teraflops(bf16=149.7, f16=149.7, tf32=74.8, f32=37.4), "NVIDIA A40 datasheet"),
    _Device(
        ("NVIDIA L4",),
        _teraflops(bf16=121, f16=121, tf32=60, f32=30.3),
        "NVIDIA L4 datasheet; figures with sparsity halved",
    ),
    _Device(("NVIDIA L40S",), _teraflops(bf16=362.05, f16=362.05, tf32=183, f32=91.6), "NVIDIA L40S datasheet"),
    _Device(("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), _teraflops(f16=125, f32=15.7), _V100),
    _Device(("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"), _teraflops(f16=112, f32=14), _V100),
    _Device(
        ("NVIDIA GeForce RTX 4090",),
        _teraflops(bf16=165.2, f16=165.2, tf32=82.6, f32=82.6),
        "NVIDIA Ada GPU architecture whitepaper; FP16 and BF16 with FP32 accumulate",
    ),
    _Device(("TPU v2",), _teraflops(bf16=23), f"{_TPU}: 46 for a chip of two cores"),
    _Device(("TPU v3",), _teraflops(bf16=61.5), f"{_TPU}: 123 for a chip of two cores"),
    _Device(("TPU v4",), _teraflops(bf16=275), _TPU),
    _Device(("TPU v5e", "TPU v5 lite"), _teraflops(bf16=197), _TPU),
    _Device(("TPU v5p", "TPU v5"), _teraflops(bf16=459), _TPU),
    _Device(("TPU v6e", "TPU v6 lite"), _teraflops(bf16=918), _TPU),
)


def datasheet_peak(device_kind: str, dtype: str, *, allow_tf32: bool | None = None) -> Peak | None:
    """Returns the peak FLOP/s of matrix products in `dtype` on one device, by its datasheet; None if unknown.

    Args:
        device_kind: `jax.Device.device_kind`. Devices that are not in the table, such as CPUs, have no figure.
        dtype: `bfloat16`, `float16` or `float32`.
        allow_tf32: True if float32 arrays may be multiplied in TF32 on devices that support it; None: as JAX is
            configured by `jax_default_matmul_precision`.
    """
    device = next((d for d in _DEVICES if device_kind in d.kinds), None)
    if device is None:
        return None
    if allow_tf32 is None:
        allow_tf32 = is_tf32_allowed(jax.config.values["jax_default_matmul_precision"])
    formats = ("tf32", "float32") if dtype == "float32" and allow_tf32 else (dtype,)
    peaks = (Peak(tera * 1e12, name, device.source) for name, tera in device.tera.items() if name in formats)
    return next(peaks, None)


def known_devices() -> tuple[str, ...]:
    """Returns the kinds of device in the table, as JAX names them."""
    return tuple(kind for device in _DEVICES for kind in device.kinds)


def is_tf32_allowed(default_matmul_precision: str | None) -> bool:
    """Returns true if float32 products may use TF32 under this value of `jax_default_matmul_precision`."""
    return default_matmul_precision in (None, "default", "high", "bfloat16", "tensorfloat32", "TF32_TF32_F32")
