"""The program of a microbatch as text: what ran, without a second tracing or compilation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from lm_trainer.core.batch import Batch
from lm_trainer.core.layout import LeafLayout
from lm_trainer.core.mesh import MeshShape, build_mesh
from lm_trainer.lanes import Lanes, local_groups, write_program


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


def test_the_program_is_written_as_it_was_compiled(lanes, tmp_path):
    compiled, traced = lanes
    before = len(traced)
    files = write_program(compiled, tmp_path, "microbatch_of_1", jaxpr=True, hlo=True)
    assert files == {kind: tmp_path / kind / "microbatch_of_1.txt" for kind in ("jaxprs", "hlo")}
    assert len(traced) == before
    assert ":f32[4] = tanh" in files["jaxprs"].read_text()
    hlo = files["hlo"].read_text()
    assert hlo.startswith("HloModule")
    assert "ENTRY" in hlo


@pytest.mark.parametrize("kind", ["jaxprs", "hlo"])
def test_only_what_is_wanted_is_written(lanes, tmp_path, kind):
    files = write_program(lanes[0], tmp_path, "step", jaxpr=kind == "jaxprs", hlo=kind == "hlo")
    assert [path.name for path in tmp_path.iterdir()] == [*files] == [kind]
