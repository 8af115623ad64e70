"""Pipeline parallelism (GPipe): each device has several consecutive layers, and the rows of a microbatch flow through
the devices.

Shape letters: B rows of this device, R rows of all stages, S positions, D hidden dimension, L steps of the schedule.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.attention import make_context
from lm_trainer.nn.log import refusing_logs
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.nn.stack import run_blocks
from lm_trainer.parallel.collectives import all_gather, axis_index, axis_size, reduce_scatter


def run_stages(  # noqa: PLR0913 - what a pass through the layers shares
    spec: DecoderSpec,
    blocks: nnx.Dict,
    x_BSD: jax.Array,
    positions_BS: jax.Array,
    segments_BS: jax.Array,
    *,
    key: jax.Array | None = None,
    ring: bool = False,
) -> jax.Array:
    """Computes the stream after all layers, inside a `shard_map` over `pipeline`. Inputs and results are sharded by
    rows.

    One row is computed at a time: at step t, stage s computes row t - s and passes it on (Huang et al. 2019). With R
    rows and P stages, each device is idle for P - 1 of the R + P - 1 steps, and saves the values of R rows for the
    gradient.

    Args:
        spec: spec of the full model. Its layers are a multiple of P repeats of the layer period, and have no routers.
        blocks: the layers of this device.
        x_BSD: input of the first layer.
        positions_BS: as for `Decoder`.
        segments_BS: as for `Decoder`.
        key: for dropout; None disables it.
        ring: as for `make_context`.
    """
    stages, stage = axis_size("pipeline"), axis_index("pipeline")
    stage_spec = dataclasses.replace(spec, blocks=spec.blocks[: len(spec.blocks) // stages])
    first = stage * len(stage_spec.blocks)
    x_RSD, positions_RS, segments_RS = (all_gather(x, "pipeline", 0) for x in (x_BSD, positions_BS, segments_BS))
    rows = x_RSD.shape[0]

    def pipeline_step(arrived_1SD: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A stage that has no row, at the start and at the end of the schedule, computes one whose result is ignored.
        row = jnp.clip(t - stage, 0, rows - 1)
        current_row = lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1)  # noqa: E731
        entering_1SD = jnp.where(stage == 0, current_row(x_RSD), arrived_1SD)
        context = make_context(spec.blocks, current_row(positions_RS), current_row(segments_RS), ring=ring)
        step_key = None if key is None else jax.random.fold_in(key, t)
        y_1SD, _, _ = run_blocks(stage_spec, blocks, entering_1SD, context, key=step_key, first=first)
        return jax.lax.ppermute(y_1SD, "pipeline", [(s, s + 1) for s in range(stages - 1)]), y_1SD

    # Idle steps compute values that are ignored but would be logged.
    with refusing_logs("pipeline_axis_size is not 1, and this is inside a layer"):
        _, y_L1SD = jax.lax.scan(pipeline_step, jnp.zeros_like(x_RSD[:1]), jnp.arange(rows + stages - 1))
    # Row r leaves the last stage at step r + stages - 1. The other stages contribute zeros to a sum, of which each
    # device receives its own rows.
    y_RSD = jnp.where(stage == stages - 1, y_L1SD[stages - 1 :, 0], 0)
    return reduce_scatter(y_RSD, "pipeline", 0)
