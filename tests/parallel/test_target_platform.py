"""The platform that programs are compiled for, in threads and in what JAX keeps of traced functions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.nn.attention_kernel import is_differentiating_twice
from lm_trainer.nn.curvature import jvp_of_gradient
from lm_trainer.parallel.compile_per_device import compile_on_each
from lm_trainer.parallel.target_platform import compiling_for, target_platform

T = TypeVar("T")


def in_another_thread(function: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_another_thread_compiles_for_its_own_platform() -> None:
    with compiling_for("tpu"):
        assert in_another_thread(target_platform) == "cpu"
        with compiling_for("gpu"):
            assert target_platform() == "gpu"
        assert target_platform() == "tpu"
    assert target_platform() == "cpu"


def test_another_thread_traces_no_second_derivative() -> None:
    answers: list[tuple[bool, bool]] = []

    def gradient(x: jax.Array) -> jax.Array:
        answers.append((is_differentiating_twice(), in_another_thread(is_differentiating_twice)))
        return jnp.sin(x)

    jvp_of_gradient(gradient, (1.0,), (1.0,))
    assert answers == [(True, False)]
    assert not is_differentiating_twice()


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_programs_that_are_compiled_side_by_side_are_for_the_platform_of_their_caller(platform: str) -> None:
    devices: list[Any] = [SimpleNamespace(platform=platform, coords=(index, 0, 0), process_index=0) for index in (1, 2)]
    with compiling_for(platform):
        programs: list[Any] = compile_on_each(lambda _: target_platform(), [[device] for device in devices])  # pyright: ignore[reportArgumentType]
    assert programs == [platform, platform]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.vmap], ids=["plain", "checkpoint", "vmap"])
def test_a_function_is_traced_once_for_each_platform(wrap: Callable[[Any], Any]) -> None:
    def negated_on_a_tpu(x: jax.Array) -> jax.Array:
        return -x if target_platform() == "tpu" else x

    function, x = jax.jit(lambda x: wrap(negated_on_a_tpu)(x)), np.ones(2, np.float32)
    assert function(x).tolist() == [1, 1]
    with compiling_for("tpu"):
        assert function(x).tolist() == [-1, -1]
    assert function(x).tolist() == [1, 1]
