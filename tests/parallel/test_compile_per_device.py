"""One compiled program on several sets of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from lm_trainer.parallel import compile_per_device
from lm_trainer.parallel.compile_per_device import compile_on_each, disable_cache_for

pytestmark = pytest.mark.optimised


def compile_on_devices(count: int) -> tuple[list[jax.stages.Compiled], list[int]]:
    """A function for each of the first devices, and the indices of those that it was compiled for."""
    devices, compiled = jax.devices()[:count], []

    def compile_on(index: int) -> jax.stages.Compiled:
        compiled.append(index)
        shape = jax.ShapeDtypeStruct((4,), np.float32, sharding=SingleDeviceSharding(devices[index]))
        return jax.jit(lambda x: {"sum": jnp.sum(x), "twice": 2 * x}).lower(shape).compile()

    return compile_on_each(compile_on, [[device] for device in devices]), compiled


def test_a_program_is_compiled_once_and_runs_on_each_device() -> None:
    programs, compiled = compile_on_devices(3)
    assert compiled == [0]
    for device, program in zip(jax.devices(), programs, strict=False):
        results = program(jax.device_put(np.arange(4, dtype=np.float32), device))
        assert results["twice"].devices() == {device}
        assert (float(results["sum"]), results["twice"].tolist()) == (6.0, [0.0, 2.0, 4.0, 6.0])


def test_the_compilation_cache_is_as_before_afterwards() -> None:
    config: Any = jax.config
    before = config.jax_compilation_cache_dir
    assert before is not None
    compile_on_devices(2)
    assert config.jax_compilation_cache_dir == before


@pytest.fixture
def cache() -> Iterator[str]:
    """The directory of the compilation cache, which is as before afterwards."""
    config: Any = jax.config
    before = config.jax_compilation_cache_dir
    yield before
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def tpu_chips(*coords: tuple[int, int, int]) -> list[Any]:
    return [SimpleNamespace(platform="tpu", coords=chip_coords) for chip_coords in coords]


HOST = [tpu_chips((0, 0, 0)), tpu_chips((1, 0, 0))]
"""Groups of one chip."""


@pytest.mark.parametrize(
    ("device_sets", "is_cached"),
    [
        (HOST[:1], True),
        (HOST, False),
        (HOST[1:], False),  # those of another host, or of a slice that starts there
        ([HOST[0] + HOST[1]], True),
        ([HOST[1] + tpu_chips((1, 1, 0))], False),
    ],
)
def test_programs_of_tpu_chips_other_than_the_first_are_not_kept(
    cache: str, monkeypatch: pytest.MonkeyPatch, device_sets: Sequence[Sequence[Any]], is_cached: bool
) -> None:
    cache_dirs, config = dict[int, str | None](), cast(Any, jax.config)

    def compile_on(index: int) -> Any:
        cache_dirs[index] = config.jax_compilation_cache_dir
        return index

    assert list[Any](compile_on_each(compile_on, device_sets)) == [*range(len(device_sets))]
    assert set(cache_dirs.values()) == {cache if is_cached else None}
    assert config.jax_compilation_cache_dir == cache
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    disable_cache_for(device_sets)
    assert config.jax_compilation_cache_dir == (cache if is_cached else None)


def test_the_cache_stays_open_where_the_devices_that_run_are_no_tpus(cache: str) -> None:
    disable_cache_for(HOST)
    assert cast(Any, jax.config).jax_compilation_cache_dir == cache


WAITS, COMPILES = "waits for the other processes", "compiles"


@pytest.mark.parametrize(
    ("process", "owners", "by_all_processes", "done"),
    [
        (0, (0, 0), True, [COMPILES, WAITS, COMPILES]),
        (2, (2, 2), True, [WAITS, COMPILES, COMPILES]),
        (2, (2, 2), False, [COMPILES, COMPILES]),
        (2, (2, 3), True, [COMPILES, COMPILES]),  # a program of two processes, which compile it together
    ],
)
def test_process_0_compiles_for_gpus_before_the_others(
    monkeypatch: pytest.MonkeyPatch, process: int, owners: tuple[int, int], by_all_processes: bool, done: list[str]
) -> None:
    events: list[str] = []
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(compile_per_device, "wait_for_all", lambda _: events.append(WAITS))
    gpus: Any = [[SimpleNamespace(platform="gpu", process_index=owner)] for owner in owners]
    compile_on_each(lambda _: cast(Any, events.append(COMPILES)), gpus, by_all_processes=by_all_processes)
    assert events == done
