"""The update alone, on values of many magnitudes: the same bits however the state is cut."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.core.layout import plan_layout
from lm_trainer.core.mesh import MeshShape, build_mesh
from lm_trainer.optim import AdamConfig, Param
from lm_trainer.train_state import place_state
from lm_trainer.train_step import make_update

SHAPES = {"a": ((24, 136), ("mlp", "embed")), "b": ((3, 16, 10), ("layers", "embed", "mlp")), "c": ((40,), ("embed",))}
CONFIGS = [AdamConfig(), AdamConfig(weight_decay=0.37, beta1=0.83, beta2=0.991, epsilon=1e-3, max_grad_norm=None)]


def updated(config: AdamConfig, devices: int, fsdp: bool) -> str:
    mesh = build_mesh(MeshShape(), jax.devices()[:devices])
    rules = {"embed": ("data",)} if fsdp else {}
    layouts = plan_layout(SHAPES, mesh, param_rules=rules, compute_rules={}, max_shards=8)
    abstract = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, (shape, _) in SHAPES.items()}
    tx = config.build({name: Param(name, shape, axes) for name, (shape, axes) in SHAPES.items()})
    placement = place_state(abstract, tx, layouts, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    update = jax.jit(make_update(tx), out_shardings=(*placement.shardings, replicated))
    rng = np.random.default_rng(0)

    def values() -> dict[str, jax.Array]:
        draw = {n: rng.standard_normal(s) * 10.0 ** rng.integers(-6, 3, s) for n, (s, _) in SHAPES.items()}
        return {n: jax.device_put(x.astype(np.float32), placement.shardings.params[n]) for n, x in draw.items()}

    params = values()
    state = jax.jit(tx.init, out_shardings=placement.shardings.opt_state)(params)
    digest = hashlib.sha256()
    for step in range(12):
        scalars = (np.float32(7.3), np.float32(3.1), np.float32(1e6), np.float32(1e-3 * (step + 1)))
        params, state, _ = update(params, state, values(), *scalars)
        for leaf in jax.tree.leaves((params, state)):
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("config", CONFIGS)
def test_the_update_has_the_same_bits_on_every_mesh(config: AdamConfig) -> None:
    digests = {updated(config, devices, fsdp) for devices in (1, 2, 8) for fsdp in (True, False)}
    assert len(digests) == 1
