"""The program of a microbatch as text: what ran, without a second tracing or compilation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.mesh import MeshShape, build_mesh
from lm_trainer.step.dispatch.device_groups import ModelParallelGroup, local_groups
from lm_trainer.step.dispatch.executable import program_hash
from lm_trainer.step.dispatch.per_group import PerGroupExecutable


def arguments_on(
    group: ModelParallelGroup, shape: tuple[int, ...], sharding: NamedSharding, rows: Batch
) -> tuple[Any, ...]:
    """The shapes of parameters, rows, step and index on a group."""
    scalar = jax.ShapeDtypeStruct((), np.int32, sharding=group.sharding())
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=group.sharding()), rows)
    return {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)}, batch, scalar, scalar


def batch_of(rows: int) -> Batch:
    ids = np.ones((rows, 8), np.int32)
    return Batch(ids, ids, np.ones((rows, 8), np.float32), ids, ids)


@pytest.fixture
def executable() -> tuple[PerGroupExecutable, list[int]]:
    """A compiled function on two devices, and a list that grows each time it is traced."""
    traced: list[int] = []

    def function(params, batch, step, index):
        traced.append(1)
        return jnp.tanh(params["w"]).sum() * batch.weights.sum() + step + index

    executable = PerGroupExecutable(function, local_groups(build_mesh(MeshShape(), jax.devices()[:2])))
    rows = batch_of(1)
    executable.compile_for(lambda group: arguments_on(group, (4,), group.sharding(), rows))
    return executable, traced


def test_the_program_is_shown_as_it_was_compiled(executable):
    compiled, traced = executable
    before = len(traced)
    assert ":f32[4] = tanh" in compiled.program.jaxpr()
    hlo = compiled.program.hlo()
    assert hlo.startswith("HloModule")
    assert "ENTRY" in hlo
    assert len(traced) == before


@pytest.mark.parametrize("model", [1, 2])
def test_one_compilation_serves_all_groups_of_devices(model: int):
    traced: list[int] = []

    def function(params, batch, step, index):
        traced.append(1)
        return (params["w"] @ params["w"].T) * batch.weights.sum() + step + index

    groups = local_groups(build_mesh(MeshShape(model=model), jax.devices()[:8]))
    executable = PerGroupExecutable(function, groups, lambda group: group.sharding("model"))
    rows = batch_of(2)
    executable.compile_for(lambda group: arguments_on(group, (4, 6), group.sharding("model"), rows))
    assert len(traced) == 1
    w = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    for index, group in enumerate(groups):
        params = {"w": jax.device_put(w, group.sharding("model"))}
        result = executable(index, params, jax.device_put(rows, group.sharding()), np.int32(3), np.int32(index))
        assert [shard.device for shard in result.addressable_shards] == list(group.mesh.devices.flat)
        assert {shard.data.shape for shard in result.addressable_shards} == {(4 // model, 4)}
        np.testing.assert_allclose(result, w @ w.T * 16 + 3 + index, rtol=1e-5)


class Printed:
    """A compiled program of which nothing but the text is asked for."""

    def __init__(self, text: str):
        self._text = text

    def as_text(self) -> str:
        return self._text


def test_the_hash_of_a_program_is_that_of_its_instructions() -> None:
    def hashed(scratch: str, metadata: str, operation: str = "add") -> str:
        config = f'backend_config={{"used_scoped_memory_configs":[{scratch}],"window":"1"}}'
        line = f"ENTRY %main {{ %x = f32[8] {operation}(%a, %b), metadata={{{metadata}}}, {config} }}"
        return program_hash(Printed(f"HloModule jit_lane\n\n{line}"))  # pyright: ignore[reportArgumentType]

    one = hashed('{"memory_space":"1","offset":"0","size":"524288"}', 'op_name="a" source_line=1')
    # As chips 0 and 3 of a TPU v5p slice print the same program.
    assert one == hashed('{"memory_space":"1","offset":"0","size":"262144"}', 'op_name="a" source_line=9')
    assert one != hashed("", "", "multiply")
