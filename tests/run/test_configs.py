"""There is a configuration for every family, and each trains."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from lm_trainer.config.loader import load
from lm_trainer.core.batch import Batch
from lm_trainer.models import MODEL_CONFIGS
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.run_config import RunConfig
from tests.models.common import WITHOUT_OWN_PARTS

FAMILIES = [config.model_fields["type"].default for config in MODEL_CONFIGS]
CONFIGS = [Path(__file__).parents[2] / "configs" / f"{name}_nano.yaml" for name in FAMILIES]
STEPS, ROWS, VOCAB = 5, 8, 300


def load_config(path: Path, *overrides: str) -> RunConfig:
    return load(path, list(overrides), RunConfig).config


def test_every_family_has_a_valid_config() -> None:
    assert [load_config(path).model.type for path in CONFIGS] == FAMILIES
    assert all(path.read_text(encoding="utf-8").startswith("# ") for path in CONFIGS), "says what it is"


def mark(path: Path) -> pytest.MarkDecorator:
    without_own_parts = path.stem.removesuffix("_nano") in WITHOUT_OWN_PARTS
    return pytest.mark.exhaustive if without_own_parts else pytest.mark.slow


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=mark(path)) for path in CONFIGS])
def test_the_loss_falls(path: Path, in_tmp_path: Path) -> None:
    config = load_config(path, f"trainer.train_batch_size={ROWS}", "trainer.elastic_shards=1")
    setup = build_setup(config, VOCAB, jax.devices()[:1])
    length = config.model.seq_len
    rows = np.random.default_rng(0).integers(0, VOCAB, (ROWS, length + 1)).astype(np.int32)
    positions = np.repeat(np.arange(length, dtype=np.int32)[None], ROWS, axis=0)
    weights, segments = np.ones((ROWS, length), np.float32), np.zeros((ROWS, length), np.int32)
    shape = config.model.features_shape
    features = None if shape is None else np.random.default_rng(1).normal(size=(ROWS, *shape)).astype(np.float32)
    batch = Batch(rows[:, :-1], rows[:, 1:], weights, positions, segments, features)
    setup.step.compile(batch)
    state, losses = setup.init(), []
    for _ in range(STEPS):
        state, metrics = setup.step(state, setup.step.put(batch), config.optimizer.learning_rate)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.2, losses
