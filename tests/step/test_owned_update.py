"""The update in which each weight belongs to one device: the rule's numbers, and the same bits on every mesh."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
import optax
import pytest

from lm_trainer.optim import (
    OPTIMIZERS,
    AdamConfig,
    KronConfig,
    MuonConfig,
    Optimizer,
    OptimizerConfig,
    Param,
    from_optax,
)
from lm_trainer.parallel.mesh import MeshShape, build_mesh
from lm_trainer.parallel.sharded_array import replicate
from lm_trainer.parallel.sharding import plan_shardings
from lm_trainer.step.state.state_sharding import plan_state_sharding
from lm_trainer.step.updates.owned_update import OwnedUpdate, make_owned_update
from lm_trainer.step.updates.update import ReplicatedUpdate, make_update
from tests.step.random_runs import NOT_ELEMENTWISE

pytestmark = pytest.mark.optimised

PARAMS = {
    name: Param(name, shape, axes)
    for name, shape, axes in (
        ("blocks.0.up.weight", (3, 16, 24), ("layers", "embed", "mlp")),
        ("blocks.0.experts", (3, 2, 16, 8), ("layers", "experts", "embed", "mlp")),
        ("blocks.0.scale", (3, 16), ("layers", "embed")),
        ("embed.tokens", (32, 16), ("vocab", "embed")),
        ("final.scale", (16,), ("embed",)),
    )
}
LARGE = {
    name: Param(name, shape, axes)
    for name, shape, axes in (
        ("blocks.0.up.weight", (3, 64, 72), ("layers", "embed", "mlp")),
        ("blocks.0.out.weight", (3, 3, 32, 48), ("layers", "heads", "head_size", "embed")),
        ("embed.tokens", (97, 48), ("vocab", "embed")),
        ("final.scale", (16,), ("embed",)),
    )
}
"""Weights whose state is kept in 8 bits where it may be."""
BY_TYPE = {member.model_fields["type"].default: member() for member in OPTIMIZERS}
TOGETHER = ("mars",)
"""Optimizers that compute something over all parameters."""
CONFIGS: list[OptimizerConfig] = [
    *(BY_TYPE[name] for name in NOT_ELEMENTWISE if name not in TOGETHER),
    MuonConfig(state_dtype="bfloat16", skip_bad_steps=4, weight_decay=0.1, weight_decay_modules=("up",)),
]
UPDATES = 4


def run(
    config: Optimizer, devices: int, *, owned: bool = True, params: dict[str, Param] = PARAMS
) -> tuple[str, dict[str, np.ndarray], Any]:
    """A hash of all bits after some updates, the parameters, and what the last update reports."""
    mesh = build_mesh(MeshShape(), jax.devices()[:devices])
    leaves = {name: (param.shape, param.axes) for name, param in params.items()}
    layouts = plan_shardings(leaves, mesh, param_rules={"embed": ("data",)}, compute_rules={}, max_shards=8)
    shapes = {name: jax.ShapeDtypeStruct(param.shape, np.float32) for name, param in params.items()}
    tx = config.build(params)
    sharding = plan_state_sharding(shapes, tx, layouts, mesh)
    update: Any = ReplicatedUpdate(make_update(config, tx), sharding.trained, mesh)
    if owned:
        update = make_owned_update(config, params, tx, shapes, sharding.trained, mesh)
        assert isinstance(update, OwnedUpdate)
    rng = np.random.default_rng(0)

    def values() -> dict[str, jax.Array]:
        drawn = {name: rng.standard_normal(x.shape).astype(np.float32) for name, x in shapes.items()}
        return {name: jax.device_put(x, sharding.trained.params[name]) for name, x in drawn.items()}

    weights, metrics, digest = values(), None, hashlib.sha256()
    state = jax.jit(tx.init, out_shardings=sharding.trained.opt_state)(weights)
    for step in range(UPDATES):
        step_scalars = {"loss": 7.3, "weight": 3.1, "squares": 1e4, "learning_rate": 1e-3 * (step + 1)}
        scalars = {name: replicate(np.float32(x), mesh) for name, x in step_scalars.items()}
        weights, state, metrics = update(weights, state, values(), None, scalars)
        for leaf in jax.tree.leaves((weights, state, metrics)):
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest(), {name: np.asarray(x) for name, x in weights.items()}, jax.tree.map(float, metrics)


def kind(config: Optimizer) -> str:
    return config.model_dump()["type"]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=kind)
def test_each_weight_is_updated_as_among_all(config: OptimizerConfig) -> None:
    digest, params, metrics = run(config, 1)
    # Four devices have nothing to do for one of them, and two leave one of three layers over: whatever the rule is.
    assert run(config, 4)[0] == digest
    if isinstance(config, MuonConfig):
        assert run(config, 2)[0] == digest
    _, replicated, expected = run(config, 1, owned=False)
    assert metrics == pytest.approx(expected, rel=1e-5)
    # What is drawn by chance is drawn for each weight by itself: for the probes of Kron and for what is rounded.
    loose = isinstance(config, KronConfig) or config.state_dtype == "bfloat16"
    for name, x in replicated.items():
        np.testing.assert_allclose(params[name], x, rtol=1e-5, atol=1e-2 if loose else 1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["muon", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("scion", "muonh"))]
)
def test_state_in_8_bits_is_updated_weight_by_weight(name: str) -> None:
    config = BY_TYPE[name].model_validate({"type": name, "state_dtype": "float8", "skip_bad_steps": 4})
    digest, params, _ = run(config, 1, params=LARGE)
    assert run(config, 4, params=LARGE)[0] == digest
    _, replicated, _ = run(config, 1, owned=False, params=LARGE)
    for weight, x in replicated.items():
        np.testing.assert_allclose(params[weight], x, rtol=1e-5, atol=1e-2, err_msg=weight)


def test_a_rule_over_several_weights_is_left_as_it_is() -> None:
    mesh = build_mesh(MeshShape(), jax.devices()[:2])
    shapes = {name: jax.ShapeDtypeStruct(param.shape, np.float32) for name, param in PARAMS.items()}
    leaves = {name: (param.shape, param.axes) for name, param in PARAMS.items()}
    layouts = plan_shardings(leaves, mesh, param_rules={}, compute_rules={}, max_shards=8)
    clipped = MuonConfig.model_validate({"clip_update_norm": {"rolling_interval_length": 4}})
    together = [BY_TYPE[name] for name in TOGETHER]
    for config in (
        *together,
        clipped,
        from_optax("clipped", optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))),
    ):
        tx = config.build(PARAMS)
        sharding = plan_state_sharding(shapes, tx, layouts, mesh)
        assert make_owned_update(config, PARAMS, tx, shapes, sharding.trained, mesh) is None


def test_a_weight_decays_alone_as_patterns_over_all_names_say() -> None:
    config = AdamConfig(weight_decay=0.5, weight_decay_modules=("up",))
    for name, param in PARAMS.items():
        one: Any = config.build_one(name, PARAMS)
        like = {name: np.ones(param.shape[1:] if "blocks" in name else param.shape, np.float32)}
        zeros = {name: np.zeros_like(like[name])}
        extra_args = {"learning_rate": np.float32(1), "grad_norm": np.float32(0), "loss": np.float32(0)}
        updates: Any = one.update(zeros, one.init(like), like, **extra_args)[0]
        assert np.asarray(updates[name]).any() == ("up" in name)
