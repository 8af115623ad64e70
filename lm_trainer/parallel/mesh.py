"""Device mesh, and the rules that map logical axes of arrays to mesh axes.

A parameter lists the logical axis of each of its dimensions (`embed`, `mlp`, ...) in its `logical_axes` metadata.
Two sets of rules name the mesh axes over which each logical axis is sharded, in storage and during computation.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import Device

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh, PartitionSpec

BATCH_AXES = ("replica_dcn", "replica", "data")
"""Mesh axes over which the microbatches of a batch are distributed, outermost (slowest network) first."""
MODEL_PARALLEL_AXES = ("pipeline", "context", "expert")
"""Mesh axes whose devices share one microbatch: its layers, its positions, its experts. The axis `model` is not among
them: for tensor parallelism, XLA partitions the computation based on the shardings of the parameters only."""
MESH_AXES = (*BATCH_AXES, *MODEL_PARALLEL_AXES, "model")
"""All mesh axes. Neighbouring devices in the list are neighbours along the last axes, which communicate most."""
RULE_AXES = (*BATCH_AXES, "model")
"""Mesh axes over which rules may shard logical axes."""
LOGICAL_AXES = (
    "batch",
    "position",
    "vocab",
    "embed",
    "heads",
    "kv_heads",
    "head_size",
    "latent",
    "mlp",
    "experts",
    "layers",
)
OTHER_AXES = ("token", "token_repeat", "key_position", "hyena_filter_order")
"""Levanter's names for axes of activations. Nothing is sharded along them here, so rules for them have no effect."""

AxisRules = Mapping[str, tuple[str, ...]]
"""Maps a logical axis to the mesh axes over which it is sharded; logical axes that are missing are replicated."""


class MeshShape(NamedTuple):
    """Sizes of the mesh axes that the user sets; the data axis has the remaining devices."""

    replica_dcn: int = 1
    replica: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    model: int = 1


def build_mesh(shape: MeshShape, devices: Sequence[Device]) -> Mesh:
    """Builds a mesh with the axes `MESH_AXES` over all `devices`, in the given order.

    Raises:
        UserError: if the number of devices is not divisible by the product of the sizes.
    """
    from jax.sharding import AxisType, Mesh

    sizes = _axis_sizes(shape, len(devices))
    grid = np.asarray(devices, dtype=object).reshape(sizes)
    # Auto axes, so that XLA partitions code outside `shard_map`. With explicit axes, JAX requires shardings of
    # intermediate arrays that it cannot infer.
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def build_abstract_mesh(shape: MeshShape, count: int) -> AbstractMesh:
    """Builds the abstract mesh for `count` devices; otherwise the same as `build_mesh`."""
    from jax.sharding import AbstractMesh, AxisType

    return AbstractMesh(_axis_sizes(shape, count), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _axis_sizes(shape: MeshShape, count: int) -> tuple[int, ...]:
    fixed = math.prod(shape)
    if count % fixed:
        keys = {"replica": "replica_ici_axis_size"}
        sizes = {keys.get(axis, f"{axis}_axis_size"): size for axis, size in shape._asdict().items() if size > 1}
        raise UserError(
            f"{count} devices cannot be divided into "
            f"{' x '.join(f'{key}={size}' for key, size in sizes.items())}; "
            f"the number of devices must be a multiple of {fixed}"
        )
    free = {"data": count // fixed, **shape._asdict()}
    return tuple(free[axis] for axis in MESH_AXES)


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of shards of the rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def parse_rules(
    resources: Mapping[str, str | Sequence[str]], *, key: str, options: Sequence[str] = RULE_AXES
) -> dict[str, tuple[str, ...]]:
    """Checks a user's mapping from logical axes to mesh axes, and returns it with tuples of mesh axes as values.

    Args:
        resources: mapping from logical axes to mesh axes.
        key: configuration key of the mapping, for error messages.
        options: mesh axes that are allowed.

    Raises:
        ValueError: if a logical or mesh axis does not exist or is not allowed. The message suggests a similar name.
    """
    rules = {}
    for logical, physical in resources.items():
        check_logical_axis(logical, key=key)
        axes = (physical,) if isinstance(physical, str) else tuple(physical)
        for axis in axes:
            if axis in MESH_AXES and axis not in options:
                raise ValueError(f"{key}: {axis}_axis_size alone says what the mesh axis {axis!r} cuts; remove it")
            if axis not in options:
                raise ValueError(f"{key}: unknown mesh axis {axis!r}{_suggest_similar(axis, options)}")
        rules[logical] = axes
    return rules


def check_logical_axis(name: str, *, key: str) -> None:
    """Raises ValueError if `name`, which was given under `key`, is not a logical axis of any model."""
    if name not in LOGICAL_AXES and name not in OTHER_AXES:
        raise ValueError(f"{key}: unknown logical axis {name!r}{_suggest_similar(name, LOGICAL_AXES)}")


def _suggest_similar(word: str, options: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, options, 1)
    return f"; did you mean {near[0]!r}?" if near else f" (one of: {', '.join(options)})"


def partition_spec(path: str, axes: Sequence[str | None], rules: AxisRules) -> PartitionSpec:
    """Returns the partition spec of an array whose dimensions have the logical axes `axes` (None: never sharded).

    Raises:
        UserError: if two dimensions would be sharded over the same mesh axis; `path` names the array in the message.
    """
    from jax.sharding import PartitionSpec

    owner: dict[str, str] = {}
    entries = []
    for name in axes:
        mesh_axes = tuple(rules.get(name, ())) if name else ()
        for mesh_axis in mesh_axes:
            if mesh_axis in owner:
                raise UserError(
                    f"{path}: its axes {owner[mesh_axis]!r} and {name!r} are both mapped onto the mesh axis "
                    f"{mesh_axis!r}; map one of them elsewhere (axis_resources, parameter_axis_resources, "
                    f"fsdp_axis, tensor_parallel_axes)"
                )
            owner[mesh_axis] = str(name)
        entries.append(mesh_axes if len(mesh_axes) > 1 else (mesh_axes[0] if mesh_axes else None))
    return PartitionSpec(*entries)


def spec_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns one entry of a PartitionSpec as a tuple of mesh axes."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
