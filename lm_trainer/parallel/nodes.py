"""Groups of devices that a fast network connects: a GPU node, an NVLink domain, a TPU slice."""

from __future__ import annotations

from itertools import groupby

from jax.sharding import Mesh

from lm_trainer.core.jax_types import Device
from lm_trainer.parallel.mesh import batch_shards

_COMPILE_ONLY = "compile_only_runtime"
"""JAX's name of the runtime of devices that are described for a compiler and do not exist."""


def node_index(device: Device) -> int:
    """Returns the index of the node that a device belongs to.

    JAX gives the fast domain of a device, which is the slice of a TPU or the NVLink domain of a GPU, as `slice_index`.
    Devices without this attribute, such as CPUs, belong to the node of their process.
    """
    index = getattr(device, "slice_index", None)
    # JAX describes GPUs for which programs are only compiled with one process per node, but with the same slice index
    # in all nodes.
    described = device.platform == "gpu" and getattr(device.client, "runtime_type", None) == _COMPILE_ONLY
    return device.process_index if index is None or described else index


def num_batch_nodes(mesh: Mesh) -> int:
    """Returns the number of nodes that divide the batch shards of a mesh into aligned subtrees of the sum over all
    shards.

    Returns:
        A power of two. 1 if there is only one node, if nodes have different numbers of shards, if a shard spans nodes,
        or if each node has only one shard: an exchange in two levels would then save nothing or change the sum.
    """
    shards = batch_shards(mesh)
    nodes_of_shards = [{node_index(device) for device in devices} for devices in mesh.devices.reshape(shards, -1)]
    if any(len(nodes) > 1 for nodes in nodes_of_shards):
        return 1
    sizes = [len(list(run)) for _, run in groupby(min(nodes) for nodes in nodes_of_shards)]
    count, size = len(sizes), sizes[0]
    distinct = len({min(nodes) for nodes in nodes_of_shards})
    even = count == distinct and all(other == size for other in sizes)
    # The subtrees of the sum over all shards are over a half of them, a quarter of them and so on; see `tree_sum`.
    return count if even and size > 1 and count & (count - 1) == 0 else 1
