"""The global batch of a size and its split into microbatches: independent of the hardware, or as in OLMo-core."""

from __future__ import annotations

from typing import NamedTuple

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.config import LadderConfig

_NEAR = 0.1
"""Maximum relative difference between the batch size and its target."""


class BatchShape(NamedTuple):
    """The global batch of a run and its split."""

    batch_size: int
    """Global batch size in tokens."""
    microbatch: int
    """Number of tokens per device and forward pass."""
    shards: int
    """Maximum number of devices that can share the batch."""
    devices: int
    """Number of devices in use."""


def elastic_batch(ladder: LadderConfig, num_params: int) -> BatchShape:
    """Computes a batch shape with which any number of devices up to `shards` gives bitwise identical results.

    The batch has as many equal shards as possible, up to `trainer.elastic_shards`, while its size is within 10 % of the
    target.
    """
    target = ladder.run_configurator.configure_target_batch_size(num_params)
    microbatch = ladder.model_configurator.rank_microbatch_size
    # A power of two, because the gradients of the shards are added in a binary tree and devices get equal subtrees.
    shards = 1 << (ladder.trainer.elastic_shards.bit_length() - 1)
    # More shards mean a larger unit, and a batch farther from its target. Halve them until the batch is near enough.
    while True:
        unit = shards * (microbatch or ladder.sequence_length)
        batch = max(1, round(target / unit)) * unit
        if shards == 1 or abs(batch - target) <= _NEAR * target:
            break
        shards //= 2
    devices = min(1 << (ladder.max_devices.bit_length() - 1), shards)
    return BatchShape(batch, microbatch or batch // shards, shards, devices)


def olmo_batch(ladder: LadderConfig, size_spec: str, num_params: int) -> BatchShape:
    """Computes the batch that OLMo-core's `ModelLadder` would choose on this hardware. It depends on the devices.

    Raises:
        UserError: if OLMo-core has no figures for the hardware, or there are too few devices.
    """
    target, configurator = ladder.run_configurator.configure_target_batch_size(num_params), ladder.model_configurator
    rank = configurator.configure_rank_microbatch_size(
        size_spec=size_spec, sequence_length=ladder.sequence_length, device_type=ladder.device_type
    )
    least = configurator.configure_minimal_device_mesh_spec(
        size_spec=size_spec, sequence_length=ladder.sequence_length, device_type=ladder.device_type
    )
    if ladder.max_devices < least.world_size:
        raise UserError(f"OLMo-core needs at least {least.world_size} devices for {size_spec}; raise max_devices")
    rank = min(rank, target)
    # OLMo-core rounds the batch for the fewest devices first, then for the number of replicas that share it.
    first = rank * (least.dp_world_size or least.world_size)
    batch = max(1, round(target / first)) * first
    copies = min(ladder.max_devices // least.world_size, batch // first)
    unit = first * copies
    devices = least.world_size * copies
    return BatchShape(max(1, round(batch / unit)) * unit, rank, devices, devices)
