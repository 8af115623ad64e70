"""The part of a key's value that decides the numbers of a run, where others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPERATIONAL_JAX = ("jax_num_cpu_devices", "jax_platforms", "jax_debug", "jax_log", "jax_persistent", "jax_compilation")
"""Prefixes of JAX settings that change no number."""


def result_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of JAX that decide numbers."""
    return {name: value for name, value in settings.items() if not name.startswith(_OPERATIONAL_JAX)}


def over_model_axis(rules: Mapping[str, Any]) -> dict[str, Any]:
    """The sharding rules over the model axis, which change the additions inside the model; the others change none."""
    return {axis: over for axis, over in rules.items() if "model" in over}
