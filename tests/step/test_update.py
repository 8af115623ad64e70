"""The update alone, of every optimizer, on values of many magnitudes: the same bits however the state is cut."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from lm_trainer.optim import (
    OPTIMIZERS,
    AdamConfig,
    AdanConfig,
    AdoptConfig,
    CautiousConfig,
    LionConfig,
    MuonConfig,
    Optimizer,
    OptimizerConfig,
    Param,
    RmsPropConfig,
    ScheduleFreeConfig,
    from_optax,
)
from lm_trainer.parallel.mesh import MeshShape, build_mesh
from lm_trainer.parallel.sharded_array import replicate
from lm_trainer.parallel.sharding import plan_shardings
from lm_trainer.step.base import UpdateRule
from lm_trainer.step.choose_update import choose_update
from lm_trainer.step.state.state_sharding import plan_state_sharding

pytestmark = pytest.mark.optimised

Shapes = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]

SHAPES: Shapes = {
    "a.weight": ((24, 136), ("mlp", "embed")),
    "b.weight": ((3, 16, 10), ("layers", "embed", "mlp")),
    "c.scale": ((40,), ("embed",)),
    "embed.tokens": ((32, 16), ("vocab", "embed")),
}
SMALL: Shapes = {
    "a.weight": ((56, 7), ("embed", "mlp")),
    "b.weight": ((12, 1), ("embed", "mlp")),
    "c.weight": ((33, 20), ("embed", "mlp")),
}
"""Shapes whose halves are compiled to other instructions than the whole."""
CUT_INSIDE: Shapes = {"uneven.weight": ((200, 40), ("embed", "mlp")), "scale": ((64,), ("embed",))}
LARGE: Shapes = {
    "even.weight": ((2, 256, 72), ("layers", "embed", "mlp")),
    "across.weight": ((2, 72, 256), ("layers", "mlp", "embed")),
    "short.tokens": ((161, 64), ("vocab", "embed")),
    **CUT_INSIDE,
}
"""Weights whose state is kept in blocks of 8 bits: cut between blocks, across, inside of them, and with a short one."""
CONFIGS: list[Optimizer] = [
    *(member() for member in OPTIMIZERS),
    AdamConfig(weight_decay=0.37, beta1=0.83, beta2=0.991, epsilon=1e-3, max_grad_norm=None),
    AdamConfig(nesterov=True, adamc_weight_decay=True, skip_bad_steps=4),
    AdamConfig(state_dtype="bfloat16"),
    MuonConfig(state_dtype="bfloat16"),
    AdamConfig.model_validate({"update_rms_clipping": 1.0, "clip_update_norm": {"rolling_interval_length": 4}}),
    from_optax(
        "clipped", optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.cosine_decay_schedule(0.1, 6)))
    ),
    from_optax("elementwise", optax.adamw(optax.cosine_decay_schedule(0.1, 6)), elementwise=True),
]


def updated(config: Optimizer, devices: int, fsdp: bool, shapes: Shapes = SHAPES, axis: str = "embed") -> str:
    mesh = build_mesh(MeshShape(), jax.devices()[:devices])
    rules = {axis: ("data",)} if fsdp else {}
    param_shardings = plan_shardings(shapes, mesh, param_rules=rules, compute_rules={}, max_shards=8)
    abstract = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, (shape, _) in shapes.items()}
    named = {name: Param(name, shape, axes) for name, (shape, axes) in shapes.items()}
    tx = config.build(named)
    sharding = plan_state_sharding(abstract, tx, param_shardings, mesh)
    update = choose_update(UpdateRule(config, tx), named, abstract, sharding.trained, mesh, {})
    rng = np.random.default_rng(0)

    def values() -> dict[str, jax.Array]:
        draw = {n: rng.standard_normal(s) * 10.0 ** rng.integers(-6, 3, s) for n, (s, _) in shapes.items()}
        return {n: jax.device_put(x.astype(np.float32), sharding.trained.params[n]) for n, x in draw.items()}

    params = values()
    state = jax.jit(tx.init, out_shardings=sharding.trained.opt_state)(params)
    digest = hashlib.sha256()
    for step in range(6):
        scalars = {"loss": 7.3, "weight": 3.1, "squares": 1e6, "learning_rate": 1e-3 * (step + 1)}
        curvature = values() if config.curvature is not None and step % 2 == 0 else None
        replicated = {name: replicate(np.float32(x), mesh) for name, x in scalars.items()}
        params, state, metrics = update(params, state, values(), curvature, replicated)
        for leaf in jax.tree.leaves((params, state, metrics)):
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def kind(config: Optimizer) -> str:
    return config.model_dump()["type"]


QUICK = (AdamConfig(), MuonConfig())
"""One whose update is elementwise, and one whose weights belong to one device each."""


@pytest.mark.parametrize(
    "config",
    [pytest.param(c, id=kind(c), marks=() if c in QUICK else pytest.mark.slow) for c in CONFIGS],
)
def test_the_update_has_the_same_bits_on_every_mesh(config: Optimizer) -> None:
    reference = updated(config, 1, fsdp=True)
    # How an elementwise update is cut does not depend on the optimizer: Adam shows the other ways.
    meshes = [(8, True), (2, True), (2, False)] if config == AdamConfig() else [(8 if config.elementwise else 2, True)]
    for devices, fsdp in meshes:
        assert updated(config, devices, fsdp) == reference, (devices, fsdp)


def test_products_are_rounded_alike_in_halves_and_in_the_whole() -> None:
    config = ScheduleFreeConfig()
    assert updated(config, 2, True, SMALL) == updated(config, 1, True, SMALL)


def in_8_bits(kind: type[OptimizerConfig]) -> OptimizerConfig:
    return kind.model_validate({"state_dtype": "float8", "skip_bad_steps": 4})


@pytest.mark.slow
def test_blocks_of_8_bits_are_the_same_on_every_mesh() -> None:
    config = in_8_bits(AdamConfig)
    reference = updated(config, 1, True, LARGE)
    for devices, axis in ((2, "mlp"), (3, "embed"), (4, "embed"), (8, "mlp")):
        assert updated(config, devices, True, LARGE, axis) == reference, (devices, axis)
    assert updated(config.model_copy(update={"state_dtype": "float32"}), 1, True, LARGE) != reference


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [LionConfig, CautiousConfig, AdoptConfig, AdanConfig, RmsPropConfig], ids=lambda kind: kind().type
)
def test_blocks_of_8_bits_of_other_optimizers(kind: type[OptimizerConfig]) -> None:
    """One mesh: how blocks are cut does not depend on the optimizer."""
    config = in_8_bits(kind)
    assert updated(config, 8, True, CUT_INSIDE, "mlp") == updated(config, 1, True, CUT_INSIDE)


def test_exponents_of_blocks_lie_as_the_weights_where_there_are_enough() -> None:
    mesh = build_mesh(MeshShape(), jax.devices()[:4])
    layouts = plan_shardings(LARGE, mesh, param_rules={"embed": ("data",)}, compute_rules={}, max_shards=8)
    tx = AdamConfig(state_dtype="float8").build({name: Param(name, *shape) for name, shape in LARGE.items()})
    like = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, (shape, _) in LARGE.items()}
    state = plan_state_sharding(like, tx, layouts, mesh).trained.opt_state
    exponent_specs = {name: x.block_exponents.spec for name, x in state.inner[1][0].nu.items() if name != "scale"}
    assert exponent_specs == {
        "even.weight": PartitionSpec(None, "data", None),
        "across.weight": PartitionSpec(None, None, "data"),
        "uneven.weight": PartitionSpec(None, None),  # 7 blocks
        "short.tokens": PartitionSpec(None, "data"),
    }
