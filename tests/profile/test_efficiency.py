"""Efficiencies of devices: which devices have them, and from where."""

from __future__ import annotations

from dataclasses import fields

import pytest

from lm_trainer.profile.devices import device_bandwidths
from lm_trainer.profile.efficiency import Efficiency, device_efficiency
from lm_trainer.profile.peaks import known_devices

FIGURES = {field.name for field in fields(Efficiency)} - {"sources", "head_width"}


@pytest.mark.parametrize("kind", [kind for kind in known_devices() if device_bandwidths(kind) is not None])
def test_devices_with_bandwidths_have_efficiencies_with_sources(kind: str):
    efficiency = device_efficiency(kind)
    assert efficiency is not None
    shares = (efficiency.products, efficiency.attention_forward, efficiency.attention_backward, efficiency.memory,
              efficiency.links, efficiency.adapters)  # fmt: skip
    assert all(0.2 < share <= 1 for share in shares)
    # A kernel is slower than a product of the same size.
    assert efficiency.attention_backward <= efficiency.attention_forward <= efficiency.products
    named = {name for name, source in efficiency.sources if source}
    assert named >= FIGURES - ({"adapters"} if kind.startswith("TPU") else set())


def test_other_devices_have_none():
    assert device_efficiency("cpu") is None
    assert device_efficiency("TPU v3") is None
    assert device_efficiency("Tesla V100-SXM2-32GB") is None


def test_devices_without_a_measurement_say_so():
    for kind, like in (("NVIDIA L4", "NVIDIA A100-SXM4-80GB"), ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3")):
        efficiency = device_efficiency(kind)
        assert efficiency == device_efficiency(like)
        assert efficiency is not None
        assert all(f"assumed as for {like}" in source for _, source in efficiency.sources)
