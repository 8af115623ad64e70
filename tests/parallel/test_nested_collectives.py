"""Programs with collectives in loops, which XLA's CPU runtime does not keep in order after they were serialized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lm_trainer.core import jax_internals
from lm_trainer.core.jax_types import Device
from lm_trainer.core.nested_collectives import has_nested_collectives
from lm_trainer.parallel.compile_per_device import compile_on_each

pytestmark = pytest.mark.optimised


def sums_on(devices: Sequence[Device], times: int) -> jax.stages.Compiled:
    """Adds up the rows of the devices, one each, and then their sums: once, or repeatedly in a loop."""
    mesh = jax.make_mesh((len(devices),), ("devices",), (AxisType.Auto,), devices=devices)
    rows = PartitionSpec("devices", None)

    def add(_: int, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "devices")

    def repeatedly(x: jax.Array) -> jax.Array:
        return add(0, x) if times == 1 else jax.lax.fori_loop(0, times, add, x)

    function = jax.shard_map(repeatedly, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    shape = jax.ShapeDtypeStruct((len(devices), 3), np.float32, sharding=NamedSharding(mesh, rows))
    return jax.jit(function).lower(shape).compile()


@pytest.mark.parametrize("times", [1, 4])
def test_only_collectives_in_loops_are_nested(times: int) -> None:
    assert has_nested_collectives(sums_on(jax.devices()[:2], times).as_text() or "") == (times > 1)


def test_each_kind_of_collective_is_known() -> None:
    """`-start` and tuples are written where several arrays are sent at once."""
    for kind in ("all-gather", "all-reduce-start", "all-to-all", "collective-permute", "reduce-scatter"):
        line = f"  %x = (f32[2]{{0}}, f32[4]{{0}}) {kind}(%a, %b), replica_groups={{{{0,1}}}}\n"
        assert has_nested_collectives(f"%body (a: f32[2]) -> f32[2] {{\n{line}}}\n\nENTRY %main () -> f32[2] {{\n}}\n")
        assert not has_nested_collectives(f"%sum (a: f32[]) -> f32[] {{\n}}\n\nENTRY %main () -> f32[2] {{\n{line}}}\n")


class Store:
    """Programs, and the keys of those that were compiled."""

    def __init__(self) -> None:
        self.programs: dict[str, bytes] = {}
        self.compiled: list[str] = []

    def get(self, key: str) -> bytes | None:
        return self.programs.get(key)

    def put(self, key: str, content: bytes) -> None:
        self.compiled.append(key)
        self.programs[key] = content


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    """Receives what is compiled; JAX's own cache is empty."""
    cache, config = cast(Any, jax_internals.compilation_cache), cast(Any, jax.config)
    monkeypatch.setattr(cache, "get_executable_and_time", cache.get_executable_and_time)
    jax_internals.compile_nested_collectives_again()
    before = config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        store = Store()
        with jax_internals.compile_through(store):
            yield store
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        cache.reset_cache()


@pytest.mark.parametrize(("times", "compilations"), [(1, 1), (4, 3)])
def test_programs_with_nested_collectives_are_compiled_at_every_start(
    store: Store, times: int, compilations: int
) -> None:
    for _ in range(3):
        jax.clear_caches()
        sums_on(jax.devices()[1:3], times)
    assert len(store.compiled) == compilations
    assert len(store.programs) == 1


@pytest.mark.parametrize(("times", "expected"), [(1, [0]), (4, [0, 1, 2])])
def test_they_are_compiled_for_each_set_of_devices(times: int, expected: list[int]) -> None:
    device_sets = [jax.devices()[start : start + 2] for start in (0, 2, 4)]
    compiled = []

    def compile_on(index: int) -> jax.stages.Compiled:
        compiled.append(index)
        return sums_on(device_sets[index], times)

    programs = compile_on_each(compile_on, device_sets)
    assert compiled == expected
    for devices, program in zip(device_sets, programs, strict=True):
        x = np.array([[1, 2, 3], [10, 20, 30]], np.float32)
        result = program(jax.device_put(x, program.input_shardings[0][0]))
        assert result.devices() == {*devices}
        np.testing.assert_array_equal(result, np.tile(x.sum(0) * 2 ** (times - 1), (2, 1)))
