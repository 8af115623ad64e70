"""Sums are compared bit for bit with a brute-force tree in NumPy, on every mesh."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.parallel import nodes as nodes_module
from lm_trainer.parallel.mesh import BATCH_AXES, MeshShape, batch_shards, build_mesh
from lm_trainer.parallel.nodes import num_batch_nodes
from lm_trainer.parallel.ordered_sum import squares_by_layer, sum_of_squares, sum_over_shards, sum_parts_over_shards
from lm_trainer.parallel.sharding import ParamSharding, plan_shardings
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.profile.collectives import bytes_sent
from lm_trainer.profile.hlo import ARRAY, array_bytes
from lm_trainer.profile.replica_groups import replica_groups
from tests.parallel.test_tree_sum import brute_force_tree, random

pytestmark = pytest.mark.optimised

SHAPES = {
    "matrix": ((24, 16), ("mlp", "embed")),
    "stacked": ((3, 16, 10), ("layers", "embed", "mlp")),
    "odd": ((7, 5), ("mlp", "vocab")),
    "vector": ((16,), ("embed",)),
    "few": ((12,), ("embed",)),
    "both": ((56, 32), ("mlp", "embed")),
}
"""Parameters that can be cut in 8, in 4, and not at all."""

MESHES = [
    (1, MeshShape()),
    (2, MeshShape()),
    (4, MeshShape()),
    (8, MeshShape()),
    (4, MeshShape(replica=2)),
    (8, MeshShape(replica_dcn=2, replica=2)),
    (8, MeshShape(model=2)),
]


def layouts_on(devices: int, shape: MeshShape, fsdp: bool):
    mesh = build_mesh(shape, jax.devices()[:devices])
    tensor = {"vocab": ("model",)} if shape.model == 1 else {"mlp": ("model",)}
    compute = tensor if shape.model > 1 else {}
    leaves = {k: v for k, v in SHAPES.items() if shape.model == 1 or k != "odd"}
    storage = {**compute, **({"embed": ("data",)} if fsdp else {})}
    return mesh, plan_shardings(leaves, mesh, param_rules=storage, compute_rules=compute, max_shards=8)


@pytest.mark.parametrize("fsdp", [True, False])
@pytest.mark.parametrize(("devices", "shape"), MESHES)
def test_sum_over_shards_equals_the_tree_and_lands_at_rest(devices: int, shape: MeshShape, fsdp: bool) -> None:
    mesh, param_shardings = layouts_on(devices, shape, fsdp)
    shards = batch_shards(mesh)
    stacked = {n: random((shards, *SHAPES[n][0]), seed=i) for i, n in enumerate(param_shardings)}
    placed = {
        n: jax.device_put(x, NamedSharding(mesh, PartitionSpec(BATCH_AXES, *param_shardings[n].compute)))
        for n, x in stacked.items()
    }
    storage = {n: NamedSharding(mesh, param_shardings[n].storage) for n in param_shardings}
    summed = jax.jit(lambda x: sum_over_shards(x, param_shardings, mesh), out_shardings=storage)(placed)
    for name, x in summed.items():
        assert x.sharding.is_equivalent_to(storage[name], x.ndim)
        np.testing.assert_array_equal(np.asarray(x), brute_force_tree(list(stacked[name])), err_msg=name)


@pytest.mark.parametrize(("devices", "replicas", "count"), [(3, 3, 8), (6, 3, 24), (7, 7, 8), (6, 3, 6), (4, 2, 6)])
def test_partial_sums_of_any_number_of_devices_add_up_to_the_tree(devices: int, replicas: int, count: int) -> None:
    """With a large array, which travels as slices, and terms of few digits, which are added in more."""
    mesh = build_mesh(MeshShape(replica=replicas), jax.devices()[:devices])
    shapes = {"small": (3, 5), "large": (1 << 14, 3), "narrow": (7,)}
    layouts = plan_shardings(
        {name: (shape, (None,) * len(shape)) for name, shape in shapes.items()},
        mesh,
        param_rules={},
        compute_rules={},
        max_shards=count,
    )
    terms = {name: random((count, *shape), seed=i) for i, (name, shape) in enumerate(shapes.items())}
    terms["narrow"] = terms["narrow"].astype(jnp.bfloat16)
    shares = Shares(count, devices)
    dtypes = dict.fromkeys(shapes, np.dtype(np.float32))

    def slot(number: int) -> dict[str, jax.Array]:
        """One partial sum of each device; of a device that has no more, its first."""
        sums = {name: [] for name in shapes}
        for parts in shares.parts:
            part = parts[number if number < len(parts) else 0]
            for name, of_name in terms.items():
                sums[name].append(brute_force_tree(list(of_name[part.start : part.stop])))
        rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        return {name: jax.device_put(np.stack(x), rows) for name, x in sums.items()}

    stacked = [slot(number) for number in range(shares.max_parts)]
    summed = jax.jit(lambda x: sum_parts_over_shards(x, shares, layouts, mesh, dtypes))(stacked)
    for name, x in summed.items():
        assert x.dtype == np.float32
        if name != "narrow" or shares.max_terms == 1:
            expected = brute_force_tree([x.astype(np.float32) for x in terms[name]])
            np.testing.assert_array_equal(np.asarray(x), expected, err_msg=name)


@pytest.mark.parametrize(("devices", "shape"), MESHES[:6])
def test_a_large_array_that_no_dimension_can_be_sliced_along_travels_as_slices_too(
    devices: int, shape: MeshShape
) -> None:
    mesh = build_mesh(shape, jax.devices()[:devices])
    param_shardings = plan_shardings(
        {"large": ((129, 257), ("mlp", "vocab"))}, mesh, param_rules={}, compute_rules={}, max_shards=8
    )
    shards, replicated = batch_shards(mesh), NamedSharding(mesh, PartitionSpec())
    values = random((shards, 129, 257))
    placed = {"large": jax.device_put(values, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))}
    program = (
        jax.jit(lambda x: sum_over_shards(x, param_shardings, mesh), out_shardings=replicated).lower(placed).compile()
    )
    np.testing.assert_array_equal(np.asarray(program(placed)["large"]), brute_force_tree(list(values)))
    if shards > 1:
        sent = sum(bytes_sent(program.as_text() or "").values())
        # There and back each device sends all shares but its own; the numbers are padded to equal shares.
        assert sent == pytest.approx(2 * (shards - 1) / shards * 4 * 129 * 257, rel=0.01)


def test_gradients_travel_as_slices_not_whole() -> None:
    mesh, param_shardings = layouts_on(8, MeshShape(), True)
    param_shardings = {n: param_shardings[n] for n in ("matrix", "stacked", "vector")}
    stacked = {
        n: jax.ShapeDtypeStruct(
            (8, *SHAPES[n][0]),
            np.float32,
            sharding=NamedSharding(mesh, PartitionSpec(BATCH_AXES, *param_shardings[n].compute)),
        )
        for n in param_shardings
    }
    storage = {n: NamedSharding(mesh, param_shardings[n].storage) for n in param_shardings}
    program = (
        jax.jit(lambda x: sum_over_shards(x, param_shardings, mesh), out_shardings=storage).lower(stacked).compile()
    )
    text = program.as_text() or ""
    assert "all-to-all" in text
    assert "all-gather(" not in text
    assert "all-reduce(" not in text


@pytest.mark.parametrize(("devices_per_node", "narrow"), [(4, False), (4, True), (2, False)])
def test_sums_over_nodes_have_the_bits_of_the_tree_and_send_less_between_nodes(
    monkeypatch: pytest.MonkeyPatch, devices_per_node: int, narrow: bool
) -> None:
    mesh, param_shardings = layouts_on(8, MeshShape(), True)
    param_shardings |= plan_shardings(
        {"large": ((129, 257), ("mlp", "vocab"))}, mesh, param_rules={}, compute_rules={}, max_shards=8
    )
    dtype = jnp.bfloat16 if narrow else np.float32
    shapes = {name: (129, 257) if name == "large" else SHAPES[name][0] for name in param_shardings}
    stacked = {name: random((8, *shape), seed=i).astype(dtype) for i, (name, shape) in enumerate(shapes.items())}
    specs = {name: PartitionSpec(BATCH_AXES, *sharding.compute) for name, sharding in param_shardings.items()}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in stacked.items()}
    storage = {name: NamedSharding(mesh, sharding.storage) for name, sharding in param_shardings.items()}
    dtypes = dict.fromkeys(stacked, np.float32)
    sent = {}
    for nodes in (1, 8 // devices_per_node):
        monkeypatch.setattr(nodes_module, "node_index", lambda device, nodes=nodes: device.id * nodes // 8)
        program = jax.jit(
            lambda x, _nodes=nodes: sum_over_shards(x, param_shardings, mesh, dtypes), out_shardings=storage
        )
        compiled = program.lower(placed).compile()
        for name, x in compiled(placed).items():
            expected = brute_force_tree([x.astype(np.float32) for x in stacked[name]])
            np.testing.assert_array_equal(np.asarray(x), expected, err_msg=name)
        sent[nodes] = bytes_between_nodes(compiled.as_text() or "", devices_per_node)
    # A CPU exchanges narrow terms in float32 too.
    one, several = sent[1]["all-to-all"], sent[8 // devices_per_node]["all-to-all"]
    assert several == pytest.approx(one / devices_per_node, rel=0.02)


def bytes_between_nodes(hlo: str, devices_per_node: int) -> dict[str, float]:
    """Collective -> bytes that device 0 sends to other nodes, counted group by group from the text."""
    sent: dict[str, float] = {}
    for line in hlo.splitlines():
        if match := re.search(r"= (.*?) (all-to-all|all-gather)\(", line):
            (group,) = (group for group in replica_groups(line) if 0 in group)
            remote = sum(device >= devices_per_node for device in group)
            size = sum(array_bytes(*array) for array in ARRAY.findall(match[1]))
            sent[match[2]] = sent.get(match[2], 0.0) + size * remote / len(group)
    return sent


@pytest.mark.parametrize(
    ("devices", "nodes", "count"),
    [([0, 0, 1, 1], {0: 0}, 1), (None, {i: i // 4 for i in range(8)}, 2), (None, {i: i // 2 for i in range(8)}, 4),
     (None, {i: i for i in range(8)}, 1), (None, {i: i % 2 for i in range(8)}, 1),
     (None, {0: 0, 1: 0, 2: 0, **dict.fromkeys(range(3, 8), 1)}, 1)],
)  # fmt: skip
def test_nodes_that_are_no_subtrees_of_the_sum_are_not_counted(
    monkeypatch: pytest.MonkeyPatch, devices: Any, nodes: dict[int, int], count: int
) -> None:
    monkeypatch.setattr(nodes_module, "node_index", lambda device: nodes.get(device.id, 0))
    assert num_batch_nodes(build_mesh(MeshShape(), jax.devices()[: len(devices or nodes)])) == count


@pytest.mark.parametrize(
    ("platform", "runtime", "node"),
    [("gpu", "pjrt_ifrt", 1), ("gpu", "compile_only_runtime", 3), ("tpu", "compile_only_runtime", 1)],
)
def test_gpus_that_are_only_described_have_one_process_per_node(platform: str, runtime: str, node: int) -> None:
    client = SimpleNamespace(runtime_type=runtime)
    device: Any = SimpleNamespace(platform=platform, process_index=3, slice_index=1, client=client)
    assert nodes_module.node_index(device) == node


@pytest.mark.parametrize(("devices", "model", "count"), [(6, 1, 1), (8, 2, 2), (8, 4, 1), (8, 8, 1)])
def test_a_node_holds_several_shards_that_do_not_span_nodes(
    monkeypatch: pytest.MonkeyPatch, devices: int, model: int, count: int
) -> None:
    monkeypatch.setattr(nodes_module, "node_index", lambda device: device.id // 4 if model > 1 else device.id // 2)
    assert num_batch_nodes(build_mesh(MeshShape(model=model), jax.devices()[:devices])) == count


@pytest.mark.slow
def test_sum_of_squares_has_the_same_bits_on_every_mesh_however_the_state_is_cut() -> None:
    values = {n: random(shape, seed=i) for i, (n, (shape, _)) in enumerate(SHAPES.items())}
    totals, layered = set(), set()
    for devices, shape in MESHES[:6]:
        mesh = build_mesh(shape, jax.devices()[:devices])
        for axis in ("embed", "mlp", None):
            rules = {axis: ("data",)} if axis else {}
            param_shardings = plan_shardings(SHAPES, mesh, param_rules=rules, compute_rules={}, max_shards=8)
            placed = {n: jax.device_put(x, NamedSharding(mesh, param_shardings[n].storage)) for n, x in values.items()}

            def sums(x: dict[str, jax.Array], m: Mesh = mesh, y: dict[str, ParamSharding] = param_shardings) -> Any:
                return sum_of_squares(x, y, m), squares_by_layer(x, y, m, ["stacked"])["stacked"]

            total, layers = jax.jit(sums)(placed)
            totals.add(float(total))
            layered.add(np.asarray(layers).tobytes())
    assert len(totals) == len(layered) == 1
    exact = sum(float(np.sum(np.square(x, dtype=np.float64))) for x in values.values())
    assert totals.pop() == pytest.approx(exact, rel=1e-6)
    layers = np.sum(np.square(values["stacked"], dtype=np.float64), axis=(1, 2))
    np.testing.assert_allclose(np.frombuffer(layered.pop(), np.float32), layers, rtol=1e-6)


def test_sum_of_squares_over_the_model_axis_is_complete() -> None:
    mesh, param_shardings = layouts_on(8, MeshShape(model=2), True)
    values = {n: random(SHAPES[n][0], seed=3) for n in param_shardings}
    placed = {n: jax.device_put(x, NamedSharding(mesh, param_shardings[n].storage)) for n, x in values.items()}
    exact = sum(float(np.sum(np.square(x, dtype=np.float64))) for x in values.values())
    assert float(jax.jit(lambda x: sum_of_squares(x, param_shardings, mesh))(placed)) == pytest.approx(exact, rel=1e-6)
