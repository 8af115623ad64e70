"""Every family trains to the same bits on one device and on several, with dropout where it has any.

Four are compared on eight devices as a run compiles them, with dropout, with experts, with latent attention and with a
recurrence; those with other ways of mixing positions on two, compiled quickly and without recomputing activations. All
families are compared among the exhaustive tests, with all parameters gathered at a time, compiled as in a run, and with
those of one layer. There, the families that bring most parts use eight devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml

from lm_trainer.config.loader import load
from lm_trainer.core.batch import Batch
from lm_trainer.models import AnyModel
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.train_state import to_host
from tests.compiling import quick_jit
from tests.models.common import SEQ, TINY, VOCAB, change
from tests.run.conftest import MakeConfig

STEPS, ROWS = 3, 8
EIGHT = ("gpt2", "mixtral", "deepseek_v3", "mamba2")
TWO = ("gemma3", "mpt", "backpack", "qwen3_next", "gpt_oss", "granite4", "glm4_moe", "llama4", "gemma4", "qwen3_5")
MOST_PARTS = (
    *("llama", "gemma3", "mpt", "backpack", "cohere2"),
    *("apertus", "deepseek_v3", "mamba2", "gpt_oss", "granite4", "llama4", "gemma4"),
)


def train(setup: TrainingSetup, weights: dict[str, np.ndarray]) -> tuple[list[bytes], dict[str, bytes]]:
    """The bits of every loss and gradient norm, and of all weights at the end."""
    state, rng, series = setup.from_weights(weights), np.random.default_rng(0), []
    for step in range(STEPS):
        rows = rng.integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
        segments = np.repeat([[0] * 9 + [1] * (SEQ - 9)], ROWS, axis=0).astype(np.int32)
        positions = np.repeat([[*range(9), *range(SEQ - 9)]], ROWS, axis=0).astype(np.int32)
        batch = Batch(rows[:, :-1], rows[:, 1:], np.ones((ROWS, SEQ), np.float32), positions, segments)
        if step == 0:
            setup.step.compile(batch)
        state, metrics = setup.step(state, setup.step.put(batch), 1e-2)
        assert np.isfinite(metrics["loss"])
        series += [np.float32(metrics[name]).tobytes() for name in sorted(metrics)]
    return series, {name: leaf.tobytes() for name, leaf in to_host(state.params).items()}


def cases() -> list[Any]:
    """Each family with a number of devices."""
    slow, optimised = pytest.mark.slow, (pytest.mark.exhaustive, pytest.mark.optimised)
    cases = []
    for name, model in TINY.items():
        recomputing = change(model, gradient_checkpointing=True)
        if name in EIGHT:
            cases.append(pytest.param(recomputing, 8, id=f"{name}-8", marks=(slow, pytest.mark.optimised)))
            continue
        if name in TWO:
            cases.append(pytest.param(model, 2, id=f"{name}-2", marks=slow))
        devices = 8 if name in MOST_PARTS else 2
        cases.append(pytest.param(recomputing, devices, id=f"{name}-{devices}-optimised", marks=optimised))
    return cases


@pytest.mark.parametrize(("model", "devices"), cases())
def test_one_device_and_several(make_config: MakeConfig, in_tmp_path: Path, model: AnyModel, devices: int) -> None:
    assert_alike(make_config, model, devices)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.optimised if name in MOST_PARTS else ()) for name in TINY]
)
def test_layer_by_layer(make_config: MakeConfig, in_tmp_path: Path, name: str) -> None:
    devices = 8 if name in MOST_PARTS else 2
    assert_alike(make_config, change(TINY[name], gradient_checkpointing=True), devices, gather="layer")


def assert_alike(make_config: MakeConfig, model: AnyModel, devices: int, **trainer: Any) -> None:
    """Trains on one device and on several, and compares the bits."""
    dropout = {name: 0.1 for name in type(model).model_fields if name.endswith("_pdrop")}
    small = change(model, **dropout)
    sizes = {"train_batch_size": ROWS, "num_train_steps": STEPS, "steps_per_eval": STEPS}
    path = make_config(trainer={**sizes, **trainer})
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**content, "model": small.model_dump(mode="json")}))
    config = load(path, [], RunConfig).config
    setups = [build_setup(config, VOCAB, jax.devices()[:count]) for count in (1, devices)]
    # `tests/step/test_elastic.py` compares the initial weights, whose program is a large part of what is compiled.
    weights = jax.tree.map(np.asarray, quick_jit(setups[0].model.init)())
    first, last = (train(setup, weights) for setup in setups)
    assert first[0] == last[0]
    assert first[1].keys() == last[1].keys()
    assert not [name for name, bits in first[1].items() if bits != last[1][name]]
