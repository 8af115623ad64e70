"""The bytes that programs send, against those that follow from what they compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from lm_trainer.parallel.mesh import MeshShape, build_mesh
from lm_trainer.profile.collectives import bytes_sent

SIZE = 8 * 1024 * 4


def test_compiled_collectives_are_counted() -> None:
    mesh = build_mesh(MeshShape(replica=2), jax.devices())

    def body(x: jax.Array) -> Any:
        return (
            lax.all_gather(x, "data", tiled=True),
            lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
            lax.all_to_all(x, ("replica", "data"), 1, 1, tiled=True),
            lax.ppermute(x, "data", [(0, 1), (1, 2)]),
        )

    spec = PartitionSpec(("replica", "data"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(spec,) * 4, check_vma=False)
    x = jax.ShapeDtypeStruct((64, 1024), np.float32)
    text = jax.jit(mapped).lower(x).compile().as_text() or ""
    expected = {"all-gather": 3 * SIZE, "reduce-scatter": SIZE * 3 / 4, "all-to-all": SIZE * 7 / 8}
    assert bytes_sent(text) == {**expected, "collective-permute": SIZE}
    assert bytes_sent(jax.jit(jnp.sin).lower(x).compile().as_text() or "") == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%a = (bf16[2,8]{1,0}, bf16[16]{0}) all-reduce(%x, %y), replica_groups=[2,4]<=[8], to_apply=%add", 96.0),
        ("%a = (f32[4], f32[16]) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}", 48.0),
        ("%a = f32[64] all-gather(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}", 192.0),
        ("%a = f32[64] all-gather(%x), replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}, dimensions={0}", 128.0),
        ("%a = f32[16] all-gather-done(%b)", None),
        ("%a = pred[16] fusion(%all-gather), kind=kLoop", None),
    ],
)
def test_lines_as_other_backends_write_them(line: str, expected: float | None) -> None:
    assert sum(bytes_sent(line).values()) == (expected or 0.0)


def test_a_collective_of_unknown_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="which devices take part cannot be read"):
        bytes_sent("%a = f32[16] all-gather(%x), dimensions={0}")
