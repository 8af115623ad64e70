"""Flags that the program sets for XLA: where, over which the user's win, and that XLA knows them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm_trainer.core.xla_flags import CPU_FLAGS, GPU_FLAGS, set_cpu_flags, set_gpu_flags

FLAG = "--xla_gpu_enable_latency_hiding_scheduler=true"
CPU_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    (tmp_path / "nvidiactl").touch()
    return tmp_path


@pytest.mark.parametrize("environ", [{}, {"JAX_PLATFORMS": "cuda,cpu"}, {"XLA_FLAGS": ""}])
def test_a_gpu_gets_them_and_the_person_is_told(gpu: Path, environ: dict[str, str]) -> None:
    flags, dispatch, memory = set_gpu_flags(environ, devices=gpu, jaxlib="0.10.2")
    assert environ["XLA_FLAGS"] == FLAG
    assert environ["XLA_CLIENT_MEM_FRACTION"] == "0.9"
    assert environ["PJRT_GPU_ENABLE_ASYNC_DISPATCH"] == "1"
    assert FLAG in flags
    assert "PJRT_GPU_ENABLE_ASYNC_DISPATCH is 1" in dispatch
    assert "XLA_CLIENT_MEM_FRACTION is 0.9" in memory


def test_the_users_own_stay(gpu: Path) -> None:
    environ = {"XLA_FLAGS": "--xla_dump_to=/x"}
    set_gpu_flags(environ, devices=gpu, jaxlib="0.10.2")
    assert environ["XLA_FLAGS"] == f"--xla_dump_to=/x {FLAG}"
    environ = {
        "XLA_FLAGS": FLAG.replace("true", "false"),
        "XLA_CLIENT_MEM_FRACTION": "0.5",
        "PJRT_GPU_ENABLE_ASYNC_DISPATCH": "0",
    }
    before = dict(environ)
    assert set_gpu_flags(environ, devices=gpu, jaxlib="0.10.2") == []
    assert environ == before


@pytest.mark.parametrize(
    "variable", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"]
)
def test_memory_that_somebody_divided_stays(gpu: Path, variable: str) -> None:
    # JAX refuses both names of the fraction together.
    set_gpu_flags(environ := {variable: "x"}, devices=gpu, jaxlib="0.10.2")
    assert "XLA_CLIENT_MEM_FRACTION" not in environ


@pytest.mark.parametrize("platforms", ["cpu", "tpu", "rocm"])
def test_other_devices_get_none(gpu: Path, tmp_path: Path, platforms: str) -> None:
    environ = {"JAX_PLATFORMS": platforms}
    assert set_gpu_flags(environ, devices=gpu, jaxlib="0.10.2") == []
    assert set_gpu_flags(environ, devices=tmp_path / "none", jaxlib="0.10.2") == []
    assert environ == {"JAX_PLATFORMS": platforms}


def test_an_xla_that_was_not_asked_gets_no_flags(gpu: Path) -> None:
    set_gpu_flags(environ := {}, devices=gpu, jaxlib="0.11.0")
    assert "XLA_FLAGS" not in environ


@pytest.mark.parametrize("jaxlib", ["0.10.2", "0.11.2", "0.12.0"])
def test_a_cpu_gets_its_flags_once_and_the_person_is_told(jaxlib: str) -> None:
    environ = {"XLA_FLAGS": "--xla_dump_to=/x"}
    assert len(set_cpu_flags(environ, jaxlib=jaxlib)) == 1
    assert environ["XLA_FLAGS"] == f"--xla_dump_to=/x {CPU_FLAG}"
    assert set_cpu_flags(environ, jaxlib=jaxlib) == []
    assert environ["XLA_FLAGS"] == f"--xla_dump_to=/x {CPU_FLAG}"


def test_a_flag_of_the_user_for_cpus_and_an_xla_that_was_not_asked_stay_as_they_are() -> None:
    environ = {"XLA_FLAGS": CPU_FLAG.replace("false", "true")}
    assert set_cpu_flags(environ, jaxlib="0.10.2") == []
    assert environ["XLA_FLAGS"] == CPU_FLAG.replace("false", "true")
    assert set_cpu_flags(environ := {}, jaxlib="0.13.0") == []
    assert environ == {}


def test_xla_knows_the_flags() -> None:
    # An unknown one ends the process when a backend starts, on a CPU as well. JAX would only take its time to import.
    flags = " ".join(f"--{name}={value}" for name, value in {**GPU_FLAGS, **CPU_FLAGS}.items())
    program = "from jaxlib import xla_client; print(len(xla_client.make_cpu_client().devices()))"

    def end(flags: str) -> tuple[int, str]:
        environ = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {flags}"}
        done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)
        return done.returncode, done.stdout.strip()

    assert end(flags) == (0, "2")
    assert end("--xla_gpu_no_such_flag=true")[0] != 0
