"""Arrays that are built on their devices, part by part."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm_trainer.parallel.sharded_array import Slices, gather_to_host, index_on_host, make_sharded_array

SHAPE = (3, 8, 4)
FULL_ARRAY = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.mark.parametrize("host_bytes", [0, 10**6], ids=["on the devices", "on the host"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_device_has_its_block_and_asks_for_no_other(host_bytes: int, dtype: type) -> None:
    blocks_read: list[Slices] = []

    def parts(block: Slices) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        blocks_read.append(block)
        for layer in range(block[0].start, block[0].stop):
            yield (layer - block[0].start, 0, 0), FULL_ARRAY[layer : layer + 1, *block[1:]]

    sharding = NamedSharding(mesh(), PartitionSpec(None, "data"))
    array = make_sharded_array(SHAPE, dtype, sharding, parts, host_bytes=host_bytes)
    assert array.dtype == dtype
    assert array.sharding == sharding
    np.testing.assert_array_equal(np.asarray(array), FULL_ARRAY.astype(dtype))
    # Two devices of the model axis hold the same block, which is read once.
    assert sorted(block[1].start for block in blocks_read) == [0, 2, 4, 6]


def test_a_scalar_and_a_replicated_array() -> None:
    sharding = NamedSharding(mesh(), PartitionSpec())
    scalar = make_sharded_array((), np.float32, sharding, lambda _: [((), np.full((), 2.5, np.float32))])
    assert float(scalar) == 2.5
    array = make_sharded_array(SHAPE, np.float32, sharding, lambda _: [((0, 0, 0), FULL_ARRAY)], host_bytes=0)
    np.testing.assert_array_equal(np.asarray(array), FULL_ARRAY)


@pytest.mark.parametrize("spec", [(), (None, "data"), (None, "data", "model"), (None, ("data", "model"))])
@pytest.mark.parametrize("index", [(), (1,), (2, 5), (0, 7, 3)])
def test_a_part_is_put_together_from_the_shards(spec: tuple[str | None, ...], index: tuple[int, ...]) -> None:
    array = jax.device_put(FULL_ARRAY, NamedSharding(mesh(), PartitionSpec(*spec)))
    np.testing.assert_array_equal(index_on_host(array, index), FULL_ARRAY[index], strict=True)
    np.testing.assert_array_equal(index_on_host(FULL_ARRAY, index), FULL_ARRAY[index], strict=True)


@pytest.mark.parametrize("spec", [(), (None, "data"), (None, None, "data"), ("data",)])
@pytest.mark.parametrize("device_bytes", [1, 70, 10**6])
def test_an_array_is_gathered_in_pieces(spec: tuple[str | None, ...], device_bytes: int) -> None:
    values = np.arange(8 * 3 * 4, dtype=np.float32).reshape(8, 4, 3).transpose(0, 2, 1)[:, :2]
    values = np.concatenate([values, values], axis=1)
    array = jax.device_put(values, NamedSharding(mesh(), PartitionSpec(*spec)))
    np.testing.assert_array_equal(gather_to_host(array, device_bytes=device_bytes), values, strict=True)
