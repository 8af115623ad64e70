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
from pydantic import TypeAdapter

from lm_trainer.config.loader import load
from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.optim import AnyOptimizer
from lm_trainer.plan.estimate import compile_temporary, estimate_temporary
from lm_trainer.plan.memory import StepMemory
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.dispatch.mesh_group import MeshWide, dispatching_for
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


DROPOUT: dict[str, Any] = {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "scan_layers": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "trainer", "counts"),
    [
        ({"gradient_checkpointing": True}, {}, (1, 4)),
        ({"gradient_checkpointing": "dots"}, {"gather": "layer"}, (1, 2, 4)),
    ],
    ids=["whole", "by layer"],
)
def test_bits_do_not_depend_on_devices(
    make_config: MakeConfig, in_tmp_path: Path, model: dict[str, Any], trainer: dict[str, Any], counts: tuple[int, ...]
) -> None:
    config = write_config(make_config, {**DROPOUT, **model}, **trainer)
    (losses, one), *other_results = [
        train(build_setup(config, VOCAB, jax.devices()[:count]), rows(ROWS)) for count in counts
    ]
    for other_losses, weights in other_results:
        assert other_losses == losses
        for name, x in weights.items():
            assert x.tobytes() == one[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.optimised
def test_one_program_for_all_devices_computes_encoder_and_decoder_with_the_bits_of_one_device(
    make_config: MakeConfig, in_tmp_path: Path
) -> None:
    config = write_config(make_config, {**DROPOUT, "encoder_layers": 2}, gather="layer")

    def results(devices: int) -> tuple[dict[str, bytes], dict[str, float], Any]:
        with dispatching_for("gpu"):
            setup = build_setup(config, VOCAB, jax.devices()[:devices])
        _, weights = train(setup, rows(ROWS), steps=2)
        state = setup.init()
        held_out = setup.evaluate({**state.frozen, **state.params}, [rows(ROWS)])
        computing = setup.step._computing  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
        return {name: x.tobytes() for name, x in weights.items()}, held_out, computing

    expected, expected_losses, _ = results(1)
    # Of four microbatches, one of three devices has two.
    for devices in (2, 3):
        weights, losses, computing = results(devices)
        assert isinstance(computing, MeshWide)
        assert weights == expected
        assert losses == expected_losses


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sophia-g", pytest.param("sophia-h", marks=pytest.mark.exhaustive)])
def test_stages_of_encoder_and_decoder_compute_what_the_whole_model_computes(
    make_config: MakeConfig, in_tmp_path: Path, optimizer: str
) -> None:
    """With dropout, held-out losses, and the random draws of curvature estimates."""

    def results(**trainer: Any) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        config = write_config(make_config, {**DROPOUT, "encoder_layers": 2}, **trainer)
        config = config.model_copy(update={"optimizer": TypeAdapter(AnyOptimizer).validate_python({"type": optimizer})})
        setup, batch = build_setup(config, VOCAB, jax.devices()[:1]), rows(ROWS)
        setup.step.compile(batch)
        state = setup.init()
        held_out = setup.evaluate({**state.frozen, **state.params}, [batch])
        state, metrics = setup.take_step(state, batch)
        arrays = jax.tree_util.tree_leaves_with_path(state.opt_state)
        moments = {jax.tree_util.keystr(path): np.asarray(x) for path, x in arrays}
        return moments, {**held_out, "train": float(metrics["loss"])}

    moments, losses = results(gather="layer")
    expected_moments, expected_losses = results(gather="model")
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, x in expected_moments.items():
        np.testing.assert_allclose(moments[name], x, rtol=2e-3, atol=1e-5 * np.abs(x).max(), err_msg=name)


@pytest.mark.slow
def test_a_layer_takes_the_memory_of_its_stream(make_config: MakeConfig, in_tmp_path: Path) -> None:
    """The output of the encoder is held once, and not for each layer of the decoder."""

    def beyond_state(**layers: int) -> int:
        config = write_config(make_config, {**layers, "gradient_checkpointing": True}, gather="layer")
        memory = StepMemory(config, VOCAB, jax.devices()[:1], "gpu")
        at_rest = ("state", "gradients", "new state")
        (phase,) = (phase for phase in memory.plan().phases if phase.name == "leave gradient")
        return sum(size for name, size in phase.parts.items() if name not in at_rest)

    base = beyond_state(num_layers=1, encoder_layers=1)
    width = 4 * ROWS * TINY.hidden_dim
    assert beyond_state(num_layers=2, encoder_layers=1) - base == pytest.approx(width * TINY.seq_len, abs=100)
    assert beyond_state(num_layers=1, encoder_layers=2) - base == pytest.approx(width * TINY.num_frames // 2, abs=100)


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
        ({"context_axis_size": 2}, 2, "context_axis_size cannot cut a model with an encoder"),
        ({"pipeline_axis_size": 2}, 2, "pipeline_axis_size cannot cut a model with an encoder"),
    ],
)
def test_what_makes_no_sense_is_refused(
    make_config: MakeConfig, in_tmp_path: Path, trainer: dict[str, Any], devices: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build_setup(write_config(make_config, **trainer), VOCAB, jax.devices()[:devices])
