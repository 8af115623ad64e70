"""Terms that a configuration adds to the loss of training, and measures computed beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm_trainer.config.loader import load
from lm_trainer.core.errors import UserError
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.training.metrics import step_metrics
from lm_trainer.step.state.train_state import TrainState
from tests.compiling import quick_jit

VOCAB, ROWS, LENGTH = 32, 4, 16
BASE = f"""
model: {{type: gpt2, seq_len: {LENGTH}, hidden_dim: 8, num_layers: 1, num_heads: 2, cross_entropy_block_size: 8}}
trainer: {{train_batch_size: {ROWS}, num_train_steps: 2, elastic_shards: 2}}
optimizer: {{type: adam, learning_rate: 0.01, warmup: 0}}
"""
HALF = random_batch(ROWS, LENGTH, VOCAB)._replace(
    weights=np.random.default_rng(1).choice([0.0, 0.5, 1.0], (ROWS, LENGTH)).astype(np.float32)
)
"""A batch in which some targets have no part in the loss, or half of it."""


def load_changed_config(directory: Path, *lines: str) -> RunConfig:
    file = directory / "config.yaml"
    file.write_text("\n".join((*lines, BASE)))
    return load(file, [], RunConfig).config


def build_changed_setup(directory: Path, *lines: str) -> TrainingSetup:
    return build_setup(load_changed_config(directory, *lines), VOCAB, jax.devices()[:1])


def mean(x: Any) -> Any:
    return jnp.sum(x * HALF.weights) / HALF.weights.sum()


def logits_of(setup: TrainingSetup, params: Any) -> Any:
    model: Any = setup.model.merge(params)
    return model(HALF.tokens, HALF.positions, HALF.segments)


def first_step(setup: TrainingSetup, state: TrainState) -> dict[str, float]:
    """The metrics of a step as they are logged."""
    setup.step.compile(HALF)
    _, metrics = setup.take_step(state, HALF)
    return step_metrics({name: float(x) for name, x in metrics.items()}, 0.01)


@pytest.mark.slow
def test_z_loss_weight_adds_the_penalty_to_what_is_minimised(tmp_path: Path) -> None:
    setup = build_changed_setup(tmp_path, "z_loss_weight: 0.2")

    def naive(params: Any) -> Any:
        logits = logits_of(setup, params)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        right = jnp.take_along_axis(logits, HALF.targets[..., None], axis=-1)[..., 0]
        loss, penalty = mean(log_z - right), 0.2 * mean(log_z**2)
        return loss + penalty, (loss, penalty)

    state = setup.init()
    # Before the step, which consumes the parameters.
    (_, (loss, penalty)), grads = quick_jit(jax.value_and_grad(naive, has_aux=True))(
        {name: np.asarray(x) for name, x in state.params.items()}
    )
    logged = first_step(setup, state)
    assert logged["train/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert logged["train/z_loss"] == pytest.approx(float(penalty), rel=1e-5)
    assert logged["optim/grad_norm"] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)


def test_evaluation_has_no_z_loss(tmp_path: Path) -> None:
    plain, penalised = build_changed_setup(tmp_path), build_changed_setup(tmp_path, "z_loss_weight: 0.2")
    params = plain.init().params
    sums = penalised.evaluate(params, [HALF])
    assert sums == plain.evaluate(params, [HALF])
    assert sums.keys() == {"loss"}


def test_without_a_z_loss_nothing_else_is_traced(tmp_path: Path) -> None:
    programs = [build_changed_setup(tmp_path, *lines).step.compile(HALF) for lines in ((), ("z_loss_weight: 0",))]
    assert len({program.fingerprint() for program in programs}) == 1
    assert (
        build_changed_setup(tmp_path, "z_loss_weight: 1.0e-4").step.compile(HALF).fingerprint()
        != programs[0].fingerprint()
    )


def test_log_entropy_measures_it_in_evaluation(tmp_path: Path) -> None:
    setup = build_changed_setup(tmp_path, "log_entropy: true")
    params = setup.init().params

    def naive(params: Any) -> Any:
        logits = logits_of(setup, params)
        p = jax.nn.softmax(logits, axis=-1)
        right = jnp.take_along_axis(logits, HALF.targets[..., None], axis=-1)[..., 0]
        return {"loss": mean(jax.nn.logsumexp(logits, axis=-1) - right), "entropy": mean(-jnp.sum(p * jnp.log(p), -1))}

    expected = {name: float(x) for name, x in quick_jit(naive)(params).items()}
    assert setup.evaluate(params, [HALF]) == pytest.approx(expected, rel=1e-5)
    assert 0 < expected["entropy"] < np.log(VOCAB)


def test_log_entropy_leaves_training_as_it_is(tmp_path: Path) -> None:
    programs = [build_changed_setup(tmp_path, *lines).step.compile(HALF) for lines in ((), ("log_entropy: true",))]
    assert len({program.fingerprint() for program in programs}) == 1


def test_sophia_g_and_a_z_loss_are_refused_together(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("z_loss_weight: 1.0e-4\noptimizer: {type: sophia-g}\n")
    with pytest.raises(UserError, match=r"without a penalty; set z_loss_weight to 0, or write .*sophia-h"):
        load(file, [], RunConfig)
