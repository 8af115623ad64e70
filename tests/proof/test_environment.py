"""Of all that two attempts may differ in, what may give other bits."""

from __future__ import annotations

from typing import Any

from lm_trainer.environment import environment, environment_differences

OLD: dict[str, Any] = {
    "python": "3.11.1",
    "git": "a1",
    "code": "c1",
    "devices": ["cpu"],
    "packages": {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.0", "pytest": "9.0", "jax-cuda13-plugin": "0.10.2"},
}


def test_packages_that_compute_code_and_devices_count() -> None:
    packages = {"jax": "0.11.0", "jaxlib": "0.10.2", "numpy": "2.0", "pytest": "9.1", "libtpu": "1"}
    new = {**OLD, "code": "c2", "devices": ["TPU v5", "TPU v5"], "packages": packages, "processes": 2}
    assert environment_differences(OLD, new) == [
        "code: c1 -> c2",
        "devices: cpu -> TPU v5",
        "jax: 0.10.2 -> 0.11.0",
        "jax-cuda13-plugin: 0.10.2 -> (absent)",
        "libtpu: (absent) -> 1",
    ]


def test_how_many_devices_there_are_and_what_nobody_wrote_down_do_not() -> None:
    assert environment_differences(OLD, {**OLD, "devices": ["cpu"] * 8, "time": "later"}) == []
    assert environment_differences({k: v for k, v in OLD.items() if k != "code"}, OLD) == []
    now = environment()
    assert environment_differences(now, environment()) == []
    assert len(now["code"]) == 16
