"""Times of transfers over the links of nodes and slices, against counts of every message."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from lm_trainer.profile.collectives import Transfer, list_transfers
from lm_trainer.profile.network import Network

H100, V5P, V5E, V6E = "NVIDIA H100 80GB HBM3", "TPU v5", "TPU v5 lite", "TPU v6 lite"


def chips(*shape: int) -> list[Any]:
    return [SimpleNamespace(coords=coords) for coords in itertools.product(*map(range, shape))]


def gpus(count: int) -> list[Any]:
    return [SimpleNamespace()] * count


def everyone(count: int) -> list[list[int]]:
    return [[*range(count)]]


@pytest.mark.parametrize(
    ("kind", "between", "inside"),
    [
        # 64 devices in 8 nodes hold 64 bytes. Each node receives 56 from others through 8 adapters; a device then sends
        # the 7 other parts of 8 to its neighbours.
        ("all-gather", 56 / 8, 64 * 7 / 8),
        ("all-reduce", 2 * 56 / 8, 2 * 64 * 7 / 8),
        # Each device sends 1 byte to each of 56 devices elsewhere, and to 7 in its node.
        ("all-to-all", 56, 7),
    ],
)
def test_what_leaves_a_node(kind: str, between: float, inside: float) -> None:
    transfer = Transfer(kind, 64.0, everyone(64))
    assert transfer.bytes_between(8) == pytest.approx(between)
    assert transfer.bytes_sent_inside(8) == pytest.approx(inside)
    network = Network.of(H100, gpus(64))
    assert network.bytes_between_nodes(transfer) == pytest.approx(between)
    assert network.seconds(transfer) == pytest.approx(max(between / 50e9, inside / 450e9))


def test_a_reduce_scatter_returns_a_shard() -> None:
    gather, scatter = Transfer("all-gather", 64.0, everyone(64)), Transfer("reduce-scatter", 1.0, everyone(64))
    assert scatter.bytes_between(8) == pytest.approx(gather.bytes_between(8))
    assert scatter.bytes_sent == gather.bytes_sent == 63


def test_groups_inside_of_nodes_use_no_adapter() -> None:
    network = Network.of(H100, gpus(16))
    inside = Transfer("all-to-all", 8e9, [[*range(8)], [*range(8, 16)]])
    assert network.bytes_between_nodes(inside) == 0
    assert network.seconds(inside) == pytest.approx(7e9 / 450e9)
    # The second step of a sum over two nodes: each device exchanges with its counterpart.
    across = Transfer("all-to-all", 1e9, [[device, device + 8] for device in range(8)])
    assert network.bytes_between_nodes(across) == pytest.approx(0.5e9)
    assert network.seconds(across) == pytest.approx(0.5e9 / 50e9)


def test_the_exchange_of_llama_70b_over_eight_nodes() -> None:
    # 70.6 billion gradients in float32: each device sends 63 / 64 of its 282 GB to others, 7 / 8 to other nodes.
    network, size = Network.of(H100, gpus(64)), 4 * 70.6e9
    assert network.seconds(Transfer("all-to-all", size, everyone(64))) == pytest.approx(size * 7 / 8 / 50e9)
    node_first = [Transfer("all-to-all", size, [[*range(node, node + 8)] for node in range(0, 64, 8)]),
                  Transfer("all-to-all", size / 8, [[*range(local, 64, 8)] for local in range(8)])]  # fmt: skip
    seconds = sum(map(network.seconds, node_first))
    assert seconds == pytest.approx(size * 7 / 8 / 450e9 + size / 8 * 7 / 8 / 50e9)


def link_seconds(shape: tuple[int, ...], rings: tuple[bool, ...], rate: float) -> float:
    """Seconds until every chip has sent a byte to every other one, each axis in turn, by the busiest link."""
    loads: dict[tuple[Any, ...], int] = {}
    for source, target in itertools.product(itertools.product(*map(range, shape)), repeat=2):
        position = list(source)
        for axis, (size, ring) in enumerate(zip(shape, rings, strict=True)):
            steps = target[axis] - position[axis]
            if ring:
                steps = (steps + size // 2) % size - size // 2
                # Opposite chips are as far in both directions; sources alternate.
                if 2 * abs(steps) == size and sum(source) % 2:
                    steps = -steps
            for _ in range(abs(steps)):
                direction = 1 if steps > 0 else -1
                loads[axis, tuple(position), direction] = loads.get((axis, tuple(position), direction), 0) + 1
                position[axis] = (position[axis] + direction) % size
    return max(loads.values()) / rate


@pytest.mark.parametrize(
    ("kind", "shape", "rings", "gigabytes"),
    [
        (V5P, (4, 4, 4), (True, True, True), 200),
        (V5P, (4, 4, 8), (True, True, True), 100),
        (V5P, (2, 2, 2), (False, False, False), 200),
        (V5E, (4, 4), (False, False), 50),
        (V5E, (2, 4), (False, False), 50),
        (V6E, (8, 8), (False, False), 56),
    ],
)
def test_an_exchange_through_a_slice_takes_what_its_busiest_link_takes(
    kind: str, shape: tuple[int, ...], rings: tuple[bool, ...], gigabytes: float
) -> None:
    devices = chips(*shape) if len(shape) == 3 else chips(*shape, 1)
    network, count = Network.of(kind, devices), math.prod(shape)
    assert (network.slice_axes, network.rings) == (shape, rings)
    assert network.links is not None
    # One byte for every chip: the collective's result has as many bytes as chips, one of which stays.
    transfer = Transfer("all-to-all", float(count), everyone(count))
    expected = link_seconds(shape, rings, network.links / (2 * len(shape)))
    assert network.seconds(transfer) == pytest.approx(expected * (count - 1) / count, rel=1e-9)
    assert transfer.bytes_sent / network.seconds(transfer) == pytest.approx(gigabytes * 1e9)
    # A gather passes through all links at once, and a part of a slice is taken for neighbours.
    gather = Transfer("all-gather", 1e9, everyone(count))
    assert network.seconds(gather) == pytest.approx(gather.bytes_sent / network.links)
    assert network.bytes_between_nodes(transfer) == 0


def test_devices_without_links_take_no_time() -> None:
    transfer = Transfer("all-gather", 1e9, everyone(16))
    assert Network.of("cpu", gpus(16)).seconds(transfer) == 0
    assert Network(None).seconds(transfer) == 0


def test_a_permutation_names_its_pairs() -> None:
    text = "HloModule m\n\nENTRY %e (x: f32[16]) -> f32[16] {\n  %x = f32[16]{0} parameter(0)\n  ROOT %p = f32[16]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{7,8},{15,0}}\n}\n"  # noqa: E501
    (transfer,) = list_transfers(text)
    assert transfer == Transfer("collective-permute", 64.0, [[0, 1], [7, 8], [15, 0]])
    assert transfer.bytes_between(8) == 64
    assert transfer.bytes_between(16) == 0
