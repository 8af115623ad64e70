"""The table of datasheet peaks, against figures that stand elsewhere."""

from __future__ import annotations

import jax
import pytest

from lm_trainer.profile.peaks import datasheet_peak, is_tf32_allowed, known_devices


@pytest.mark.parametrize(
    ("kind", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 1979 / 2),
        ("NVIDIA H200", "bfloat16", 1979 / 2),
        ("NVIDIA H200", "float32", 989 / 2),
        ("NVIDIA H100 PCIe", "float16", 1513 / 2),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 624 / 2),
        ("NVIDIA A100-SXM4-80GB", "float32", 312 / 2),
        ("NVIDIA L4", "bfloat16", 242 / 2),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
        ("TPU v3", "bfloat16", 123 / 2),
    ],
)
def test_published_figures_without_sparsity(kind, dtype, tera):
    peak = datasheet_peak(kind, dtype)
    assert peak is not None
    assert peak.flops == pytest.approx(tera * 1e12, rel=0.001)
    assert peak.source


@pytest.mark.parametrize(
    ("kind", "sms", "clock_ghz", "fused_multiply_adds"),
    [
        ("NVIDIA A100-SXM4-40GB", 108, 1.410, 1024),
        ("NVIDIA H100 80GB HBM3", 132, 1.830, 2048),
        ("NVIDIA H100 PCIe", 114, 1.620, 2048),
        ("Tesla V100-SXM2-32GB", 80, 1.530, 512),
        ("NVIDIA GeForce RTX 4090", 128, 2.520, 256),
        ("NVIDIA A40", 84, 1.740, 512),
    ],
)
def test_16_bit_figures_follow_from_the_hardware(kind, sms, clock_ghz, fused_multiply_adds):
    """Multiprocessors, boost clock, dense multiply-adds that the tensor cores of one start in a cycle."""
    peak = datasheet_peak(kind, "float16")
    assert peak is not None
    assert peak.flops == pytest.approx(sms * clock_ghz * 1e9 * fused_multiply_adds * 2, rel=0.01)


@pytest.mark.parametrize(
    "kind", ["cpu", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100", "NVIDIA L40", "TPU v9"]
)
def test_an_unknown_device_is_never_guessed(kind):
    assert datasheet_peak(kind, "bfloat16") is None


def test_a_format_that_a_device_lacks_has_no_figure():
    assert datasheet_peak("Tesla V100-SXM2-16GB", "bfloat16") is None
    assert datasheet_peak("TPU v4", "float32") is None
    assert datasheet_peak("NVIDIA H200", "int8") is None


def test_float32_is_tf32_unless_it_is_not_allowed():
    fast, exact = (datasheet_peak("NVIDIA A100-SXM4-40GB", "float32", allow_tf32=allowed) for allowed in (True, False))
    assert fast is not None
    assert exact is not None
    assert (fast.format, exact.format) == ("tf32", "float32")
    assert fast.flops == 8 * exact.flops


def test_jax_s_own_setting_decides_where_nothing_else_does():
    before = jax.config.values["jax_default_matmul_precision"]
    peaks = []
    for precision in (None, "highest"):
        jax.config.update("jax_default_matmul_precision", precision)
        peaks.append(datasheet_peak("NVIDIA A100-SXM4-40GB", "float32"))
    jax.config.update("jax_default_matmul_precision", before)
    assert [peak and peak.format for peak in peaks] == ["tf32", "float32"]


def test_device_names_are_unique():
    assert len(set(known_devices())) == len(known_devices())


@pytest.mark.parametrize(
    ("precision", "allowed"),
    [(None, True), ("tensorfloat32", True), ("default", True), ("highest", False), ("float32", False)],
)
def test_the_precision_setting_of_jax_decides_about_tf32(precision, allowed):
    assert is_tf32_allowed(precision) is allowed
