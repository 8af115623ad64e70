"""Functions that select the part of a configuration value that affects the numerical results of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OPERATIONAL_JAX = ("jax_num_cpu_devices", "jax_platforms", "jax_debug", "jax_log", "jax_persistent", "jax_compilation")
"""Prefixes of the JAX settings that do not affect numerical results."""


def select_numeric_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JAX settings that affect numerical results."""
    return {name: value for name, value in settings.items() if not name.startswith(_OPERATIONAL_JAX)}


def select_model_axis_rules(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sharding rules that use the model axis.

    Only these rules change the order of sums inside the model.
    """
    return {axis: over for axis, over in rules.items() if "model" in over}
