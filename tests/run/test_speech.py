"""Training of a model that hears: the same bits on every number of devices, and positions that stay."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from lm_trainer.config.loader import load
from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.plan.estimate import compile_temporary, estimate_temporary
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.train_state import to_host
from tests.models.common import change
from tests.models.speech import TINY, VOCAB, rows
from tests.run.conftest import MakeConfig

ROWS, STEPS = 8, 3


def write_config(make_config: MakeConfig, model: Mapping[str, Any] | None = None, **trainer: Any) -> RunConfig:
    path = make_config(
        trainer={"train_batch_size": ROWS, "num_train_steps": STEPS, "steps_per_eval": STEPS, "elastic_shards": 4}
        | trainer
    )
    written = change(TINY, **(model or {})).model_dump(mode="json")
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "model": written}))
    return load(path, [], RunConfig).config


def train(setup: TrainingSetup, batch: Batch, steps: int = STEPS) -> tuple[list[float], dict[str, np.ndarray]]:
    setup.step.compile(batch)
    state, losses = setup.init(), []
    frozen = to_host(state.frozen)
    for _ in range(steps):
        state, metrics = setup.step(state, setup.step.put(batch), 1e-2)
        losses.append(float(metrics["loss"]))
    assert state.frozen.keys() == frozen.keys() == {"encoder.positions"}
    np.testing.assert_array_equal(np.asarray(state.frozen["encoder.positions"]), frozen["encoder.positions"])
    return losses, to_host({**state.params, **state.frozen})


@pytest.mark.optimised
@pytest.mark.slow
def test_bits_do_not_depend_on_devices(make_config: MakeConfig, in_tmp_path: Path) -> None:
    config = write_config(
        make_config, {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "gradient_checkpointing": True, "scan_layers": True}
    )
    (losses, one), *other_results = [
        train(build_setup(config, VOCAB, jax.devices()[:count]), rows(ROWS)) for count in (1, 4)
    ]
    for other_losses, weights in other_results:
        assert other_losses == losses
        for name, x in weights.items():
            assert x.tobytes() == one[name].tobytes(), name


@pytest.mark.slow
def test_a_model_learns_to_write_what_it_hears(make_config: MakeConfig, in_tmp_path: Path) -> None:
    """Only the features tell texts apart: without them the loss stays above the logarithm of the number of texts."""
    config = write_config(make_config)
    plain = rows(ROWS)
    texts = np.repeat(np.arange(4), 2) + 5
    tokens = np.repeat(texts[:, None], plain.tokens.shape[1], axis=1).astype(np.int32)
    first = np.zeros_like(tokens)
    features = np.repeat(np.asarray(rows(4).features), 2, axis=0)
    # Every text begins alike, and only its first token is learnt.
    weights = np.zeros(tokens.shape, np.float32)
    weights[:, 0] = 1
    batch = plain._replace(tokens=first, targets=tokens, weights=weights, features=features)
    setup = build_setup(config, VOCAB, jax.devices()[:1])
    deaf, _ = train(setup, batch._replace(features=np.zeros_like(features)), 30)
    hearing, _ = train(setup, batch, 30)
    assert deaf[-1] > np.log(4) - 0.02
    assert hearing[-1] < 0.5 * np.log(4)


@functools.cache
def _train_on_one_device(config: str) -> tuple[list[float], dict[str, np.ndarray]]:
    return train(build_setup(RunConfig.model_validate_json(config), VOCAB, jax.devices()[:1]), rows(ROWS))


def train_on_one_device(make_config: MakeConfig) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and weights of the tiny run on one device."""
    return _train_on_one_device(write_config(make_config).model_dump_json())


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [{"determinism": "fast"}, {"model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads"]}],
    ids=["fast", "tensor parallel"],
)
def test_other_ways_to_share_the_work_agree_up_to_rounding(
    make_config: MakeConfig, in_tmp_path: Path, trainer: dict[str, Any]
) -> None:
    expected_losses, weights = train_on_one_device(make_config)
    losses, other_weights = train(
        build_setup(write_config(make_config, **trainer), VOCAB, jax.devices()[:4]), rows(ROWS)
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for name, x in other_weights.items():
        np.testing.assert_allclose(x, weights[name], atol=1e-2, err_msg=name)


@pytest.mark.slow
def test_memory_is_measured_where_it_is_not_estimated(make_config: MakeConfig, in_tmp_path: Path) -> None:
    config = write_config(make_config)
    assert compile_temporary(config, VOCAB)["microbatch"] > 0
    with pytest.raises(UserError, match="whisper model is not estimated, because of its encoder"):
        estimate_temporary(config, VOCAB, 4, 32)


@pytest.mark.parametrize(
    ("trainer", "devices", "message"),
    [
        ({"determinism": "layerwise"}, 1, "this model has an encoder beside its decoder; use model"),
        ({"context_axis_size": 2}, 2, "context_axis_size cannot cut a model with an encoder"),
        ({"pipeline_axis_size": 2}, 2, "pipeline_axis_size cannot cut a model with an encoder"),
    ],
)
def test_what_makes_no_sense_is_refused(
    make_config: MakeConfig, in_tmp_path: Path, trainer: dict[str, Any], devices: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build_setup(write_config(make_config, **trainer), VOCAB, jax.devices()[:devices])
