"""Differences between the environments of two attempts that may change the bits of a run."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.files.environment import (
    continued_attempt_notes,
    describe_environment,
    environment_differences,
    first_attempt_notes,
)

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
    environment = describe_environment()
    assert environment_differences(environment, describe_environment()) == []
    assert len(environment["code"]) == 16


def test_the_packages_are_those_of_importlib() -> None:
    installed = sorted((package.name.lower(), package.version) for package in metadata.distributions() if package.name)
    assert describe_environment()["packages"] == dict(installed)


def test_a_resume_says_what_became_of_its_threads() -> None:
    previous = {**OLD, "rows": 4, "program": "p", "cpu_threads": 8, "cores": 8}
    assert continued_attempt_notes(previous, previous, Path("env.json")) == []
    assert (
        continued_attempt_notes({k: v for k, v in previous.items() if k != "cpu_threads"}, previous, Path("env.json"))
        == []
    )
    (note,) = continued_attempt_notes(previous, {**previous, "cores": 2}, Path("env.json"))
    assert note == "XLA computes with 8 threads on 2 cores, as before, to give the same bits"
    differs, warning = continued_attempt_notes(previous, {**previous, "cpu_threads": 16}, Path("env.json"))
    assert differs == "the attempt before ran on something else: cpu_threads: 8 -> 16"
    assert "computed with 8 threads, not 16 (trainer.cpu_threads); from here on, bits may differ" in warning


def test_a_start_on_emulated_devices_says_what_gives_its_bits_on_others() -> None:
    attempt = {**OLD, "cpu_threads": 8, "cores": 2}
    (note,) = first_attempt_notes(attempt, TrainerConfig())
    assert note.endswith("a run on other devices gives the same bits with trainer.cpu_threads=8")
    assert first_attempt_notes({**attempt, "cores": 8}, TrainerConfig()) == []
    assert first_attempt_notes({**attempt, "cpu_threads": None}, TrainerConfig()) == []
    assert first_attempt_notes(attempt, TrainerConfig(cpu_threads=8)) == []
    assert first_attempt_notes(attempt, TrainerConfig(determinism="fast")) == []
