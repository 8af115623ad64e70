"""Choice of how the devices compute an update, such that its bits are the same on every mesh."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from lm_trainer.optim import Param
from lm_trainer.step.base import UpdateRule
from lm_trainer.step.state.state_sharding import TrainedShardings
from lm_trainer.step.updates.load import LoadRates, LoadUpdate
from lm_trainer.step.updates.logit_clip import LogitClips, LogitClipUpdate
from lm_trainer.step.updates.owned_update import make_owned_update
from lm_trainer.step.updates.split import split_params
from lm_trainer.step.updates.update import ReplicatedUpdate, ShardedUpdate, UpdateFn, make_update


def choose_update(  # noqa: PLR0913 - the parts of a rule
    rule: UpdateRule,
    params: Mapping[str, Param],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    shardings: TrainedShardings,
    mesh: Mesh,
    loads: LoadRates,
    clips: LogitClips | None = None,
) -> UpdateFn:
    """Builds the update for a rule.

    If the rule is elementwise, each device updates its own shard. Otherwise each layer of each weight is assigned to
    one device, which updates it unsharded. If this is impossible because the updates of several parameters depend on
    one another, every device computes the full update.

    Args:
        rule: update rule.
        params: parameters that the optimizer updates.
        shapes: shapes of the parameters by name.
        shardings: shardings of the state.
        mesh: device mesh.
        loads: parameters that the optimizer does not update; see `LoadUpdate`.
        clips: further parameters that the optimizer does not update; see `LogitClipUpdate`.
    """
    if clips:
        unclipped = TrainedShardings(split_params(shardings.params, clips)[0], shardings.opt_state)
        update = choose_update(rule, params, shapes, unclipped, mesh, loads)
        return LogitClipUpdate(update, clips, shapes, shardings, mesh)
    if loads:
        optimized = TrainedShardings({name: shardings.params[name] for name in params}, shardings.opt_state)
        return LoadUpdate(choose_update(rule, params, shapes, optimized, mesh, {}), loads, shardings, mesh)
    update = make_update(rule.optimizer, rule.tx)
    if rule.optimizer.elementwise:
        return ShardedUpdate(update, shardings, mesh)
    owned = make_owned_update(rule.optimizer, params, rule.tx, shapes, shardings, mesh) if rule.owned else None
    return owned or ReplicatedUpdate(update, shardings, mesh)
