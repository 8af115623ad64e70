"""The program of a microbatch as text: what ran, without a second tracing or compilation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.parallel.mesh import MeshShape, build_mesh
from lm_trainer.parallel.sharding import LeafLayout
from lm_trainer.step.executable import Lanes, local_groups


@pytest.fixture
def lanes() -> tuple[Lanes, list[int]]:
    """A compiled lane on two devices, and a list that grows each time it is traced."""
    traced: list[int] = []

    def function(params, batch, step, lane):
        traced.append(1)
        return jnp.tanh(params["w"]).sum() * batch.weights.sum() + step + lane

    lanes = Lanes(function, local_groups(build_mesh(MeshShape(), jax.devices()[:2])))
    rows = Batch(*(np.empty((1, 8), x) for x in ("i4", "i4", "f4", "i4", "i4")))
    whole = PartitionSpec(None)
    shapes = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
    lanes.compile(shapes, {"w": LeafLayout(whole, whole, None, 1)}, rows)
    return lanes, traced


def test_the_program_is_shown_as_it_was_compiled(lanes):
    compiled, traced = lanes
    before = len(traced)
    assert ":f32[4] = tanh" in compiled.program.jaxpr()
    hlo = compiled.program.hlo()
    assert hlo.startswith("HloModule")
    assert "ENTRY" in hlo
    assert len(traced) == before


@pytest.mark.parametrize("model", [1, 2])
def test_one_compilation_serves_all_groups_of_devices(model: int):
    traced: list[int] = []

    def function(params, batch, step, lane):
        traced.append(1)
        return (params["w"] @ params["w"].T) * batch.weights.sum() + step + lane

    groups = local_groups(build_mesh(MeshShape(model=model), jax.devices()[:8]))
    lanes = Lanes(function, groups, lambda group: group.sharding("model"))
    layout = LeafLayout(PartitionSpec("model"), PartitionSpec("model"), None, 1)
    rows = Batch(*(np.ones((2, 8), x) for x in ("i4", "i4", "f4", "i4", "i4")))
    lanes.compile({"w": jax.ShapeDtypeStruct((4, 6), jnp.float32)}, {"w": layout}, rows)
    assert len(traced) == 1
    w = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    for index, group in enumerate(groups):
        params = {"w": jax.device_put(w, group.sharding("model"))}
        result = lanes(index, params, jax.device_put(rows, group.sharding()), np.int32(3), np.int32(index))
        assert [shard.device for shard in result.addressable_shards] == list(group.mesh.devices.flat)
        assert {shard.data.shape for shard in result.addressable_shards} == {(4 // model, 4)}
        np.testing.assert_allclose(result, w @ w.T * 16 + 3 + index, rtol=1e-5)
