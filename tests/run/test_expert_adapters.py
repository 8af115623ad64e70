"""Adapters of routed experts, embedding and head: equal bits on any number of devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import loss_function, trace_model
from lm_trainer.run.build.setup import plan_training
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.train_state import to_host

VOCAB, ROWS, LENGTH, STEPS = 67, 8, 16, 3
MODEL: dict[str, Any] = {
    **{"type": "mixtral", "seq_len": LENGTH, "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2},
    **{"num_heads": 4, "num_kv_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
}
TARGETS = ["attention.*", "experts.*", "embed_tokens", "lm_head"]


def make_config(**trainer: Any) -> RunConfig:
    settings = {"train_batch_size": ROWS, "elastic_shards": 8, "num_train_steps": STEPS, "initialize_from": "base"}
    return RunConfig.model_validate(
        {
            "model": MODEL,
            "adapter": {"rank": 2, "alpha": 6.0, "target_modules": TARGETS},
            "trainer": {**settings, "tracker": [], **trainer},
            "optimizer": {"type": "adam", "learning_rate": 1e-2, "warmup": 0},
        }
    )


def train(config: RunConfig, devices: int) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """The metrics of all steps, and the adapter after them, beside a base of random weights."""
    setup = plan_training(
        config.trainer,
        config.optimizer,
        trace_model(config, VOCAB),
        loss_function(config),
        devices=jax.devices()[:devices],
        seq_len=LENGTH,
    )
    state, metrics = setup.init_from_seed(), []
    for step in range(STEPS):
        batch = random_batch(ROWS, LENGTH, VOCAB, seed=step)
        if not step:
            setup.step.compile(batch)
        state, of_step = setup.step(state, setup.step.put(batch), 1e-2)
        metrics.append({name: float(x) for name, x in of_step.items()})
    return metrics, to_host(state.params)


@pytest.mark.parametrize(
    ("gather", "numbers"),
    [
        pytest.param("model", (2, 3), marks=pytest.mark.slow),
        pytest.param("layer", (2, 3), marks=pytest.mark.slow),
        pytest.param("model", (4, 8), marks=pytest.mark.exhaustive),
        pytest.param("layer", (4, 8), marks=pytest.mark.exhaustive),
    ],
)
def test_bits_are_the_same_on_any_number_of_devices(gather: str, numbers: tuple[int, ...]) -> None:
    config = make_config(gather=gather)
    expected_metrics, expected = train(config, 1)
    for kind in ("blocks.0.mlp.gate_lora", "blocks.0.mlp.down_lora", "blocks.0.attention.q", "embed.tokens", "head"):
        moved = [name for name, x in expected.items() if name.startswith(kind) and name.endswith("b") and np.any(x)]
        assert moved, f"no adapter of {kind} among {sorted(expected)}"
    for devices in numbers:
        metrics, params = train(config, devices)
        assert metrics == expected_metrics
        for name, x in expected.items():
            np.testing.assert_array_equal(params[name], x, err_msg=name)
