"""Every optimizer: its state can be laid out, named and restored; a bad step leaves no trace."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import TypeAdapter, ValidationError

from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.optim import OPTIMIZERS, AdamConfig, AnyOptimizer, OptimizerConfig
from tests.optim.common import FEW, PARAMS, Arrays, Run, gradients

ADAPTER: TypeAdapter[OptimizerConfig] = TypeAdapter(AnyOptimizer)
every = pytest.mark.parametrize(
    "config", [c() for c in OPTIMIZERS], ids=[c.model_fields["type"].default for c in OPTIMIZERS]
)


def with_fields(config: OptimizerConfig, **fields: Any) -> OptimizerConfig:
    return config.model_validate({**config.model_dump(), **fields})


def are_equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_block_without_a_type_is_adam() -> None:
    assert OPTIMIZERS[0] is AdamConfig
    with pytest.raises(ValidationError, match="adam"):
        TypeAdapter(AnyOptimizer).validate_python({"type": "adamm"})


@every
def test_the_state_is_laid_out_like_the_parameters(config: OptimizerConfig) -> None:
    # Sizes that no two dimensions share, so that an array of a parameter's shape is one by intent.
    shapes = {name: jax.ShapeDtypeStruct(param.shape, jnp.float32) for name, param in PARAMS.items()}
    tx = config.build(PARAMS)
    state = jax.eval_shape(tx.init, shapes)
    layout = optax.tree_utils.tree_map_params(
        tx,
        lambda leaf, name: leaf if isinstance(leaf, optax.MaskedNode) else name,
        state,
        {name: name for name in PARAMS},
        transform_non_params=lambda _: None,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    named, laid = named_leaves(state), named_leaves(jax.tree.map(str, layout, is_leaf=lambda x: x is None))
    assert named.keys() == laid.keys()
    large = {param.shape for param in PARAMS.values() if math.prod(param.shape) > 60}
    for leaf, param_name in laid.items():
        if param_name == "None":
            assert named[leaf].shape not in large, leaf
        elif named[leaf].shape == PARAMS[param_name].shape:
            assert leaf.endswith(param_name)
        else:
            assert named[leaf].size < math.prod(PARAMS[param_name].shape), leaf
    assert from_named_leaves(state, named) == state


@every
def test_a_step_that_is_not_finite_leaves_no_trace_and_others_reduce_the_loss(config: OptimizerConfig) -> None:
    training = Run(with_fields(config, skip_bad_steps=8, clip_update_norm={"rolling_interval_length": 50}), FEW)
    target = {name: np.roll(x, 1) for name, x in training.weights().items()}
    start = distance(training, target)
    good = gradients(0, FEW)
    training.step(good)
    params, inner, losses = training.params, training.state.inner, training.state.losses
    training.step({name: np.full_like(g, np.nan) for name, g in good.items()})
    training.step(good, loss=math.inf)
    assert training.metrics()["optim/skipped_steps"] == 2
    assert are_equal(training.params, params)
    assert are_equal((training.state.inner, training.state.losses), (inner, losses))
    for _ in range(30):
        grads = {name: 2 * (x - target[name]) for name, x in training.weights().items()}
        training.step(grads, lr=0.05, loss=distance(training, target))
    assert distance(training, target) < 0.7 * start
    assert training.metrics()["optim/skipped_steps"] == 2
    assert training.metrics()["optim/update_norm"] > 0
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((training.params, training.state)))
    assert {x.dtype for x in training.params.values()} == {jnp.dtype("float32")}


def distance(training: Run, target: Arrays) -> float:
    """The square of the distance to `target`. Its weights have the norms of the first ones, which some rules keep."""
    return sum(float(np.sum(np.square(x - target[name]))) for name, x in training.weights().items())


def test_adamw_is_another_word_for_adam() -> None:
    other = ADAPTER.validate_python({"type": "adamw", "learning_rate": 0.5})
    assert other == AdamConfig(learning_rate=0.5)
    # A run has the same identity, and so the same directory, under either.
    assert other.model_dump() == AdamConfig(learning_rate=0.5).model_dump()


@pytest.mark.parametrize("name", ["wsd", "WSD-S", "cosine_with_warmup"])
def test_a_schedule_by_the_name_of_others_is_told_how_it_is_written(name: str) -> None:
    with pytest.raises(ValidationError, match=f"'{name}' is written here as lr_schedule: (linear|cosine) with"):
        ADAPTER.validate_python({"type": "lion", "lr_schedule": name})
