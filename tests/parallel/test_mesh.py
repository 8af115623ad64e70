from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from lm_trainer.core.errors import UserError
from lm_trainer.parallel.mesh import MESH_AXES, MeshShape, build_mesh, parse_rules, partition_spec
from lm_trainer.parallel.sharding import plan_shardings


def test_the_data_axis_takes_the_devices_that_remain() -> None:
    mesh = build_mesh(MeshShape(replica_dcn=2, replica=1, model=2), jax.devices())
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == {"replica_dcn": 2, "data": 2, "model": 2}
    assert list(mesh.devices.flat) == jax.devices()


def test_devices_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(UserError, match=r"6 devices cannot be divided.*model_axis_size=4.*multiple of 4"):
        build_mesh(MeshShape(model=4), jax.devices()[:6])


def test_unknown_axes_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="axis_resources: unknown logical axis 'embd'; did you mean 'embed'"):
        parse_rules({"embd": "data"}, key="axis_resources")
    with pytest.raises(ValueError, match="unknown mesh axis 'dat'; did you mean 'data'"):
        parse_rules({"embed": "dat"}, key="axis_resources")


def test_axes_that_cut_by_themselves_are_refused_in_rules() -> None:
    with pytest.raises(ValueError, match="context_axis_size alone says what the mesh axis 'context' cuts; remove it"):
        parse_rules({"mlp": "context"}, key="axis_resources")
    assert parse_rules({"mlp": "context"}, key="parameter_axis_resources", options=MESH_AXES) == {"mlp": ("context",)}


def test_two_logical_axes_on_one_mesh_axis_are_refused() -> None:
    rules = {"embed": ("data",), "mlp": ("data",)}
    with pytest.raises(UserError, match=r"w\.up: its axes 'embed' and 'mlp' are both mapped onto the mesh axis 'data'"):
        partition_spec("w.up", ("embed", "mlp"), rules)


def test_specs_follow_the_rules() -> None:
    rules = {"embed": ("replica", "data"), "mlp": ("model",)}
    assert partition_spec("w", ("layers", "embed", "mlp"), rules) == PartitionSpec(None, ("replica", "data"), "model")


def test_a_dimension_that_the_data_axis_does_not_divide_stays_whole_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mesh = build_mesh(MeshShape(), jax.devices())
    leaves = {"w": ((12, 16), ("embed", "mlp")), "v": ((16,), ("embed",))}
    param_shardings = plan_shardings(leaves, mesh, param_rules={"embed": ("data",)}, compute_rules={}, max_shards=8)
    assert param_shardings["w"].storage == PartitionSpec(None, None)
    assert param_shardings["v"].storage == PartitionSpec("data")
    assert "not sharded" in caplog.text
    assert "w" in caplog.text


def test_what_fixes_the_order_of_sums_does_not_depend_on_the_mesh() -> None:
    leaves = {"w": ((12, 16), ("embed", "mlp")), "v": ((16,), ("embed",)), "odd": ((7,), ("vocab",))}
    plans = set()
    for devices in (1, 2, 4, 8):
        mesh = build_mesh(MeshShape(), jax.devices()[:devices])
        param_shardings = plan_shardings(leaves, mesh, param_rules={"embed": ("data",)}, compute_rules={}, max_shards=8)
        plans.add(tuple((name, x.scatter_dim, x.scatter_chunks) for name, x in param_shardings.items()))
    assert plans == {(("w", 0, 4), ("v", 0, 8), ("odd", None, 1))}


def test_a_model_axis_that_does_not_divide_is_refused() -> None:
    mesh = build_mesh(MeshShape(model=8), jax.devices())
    rules = {"mlp": ("model",)}
    with pytest.raises(UserError, match=r"w: its axis 'mlp' of size 12 cannot be cut into model_axis_size=8 pieces"):
        plan_shardings({"w": ((4, 12), ("embed", "mlp"))}, mesh, param_rules=rules, compute_rules=rules, max_shards=8)
