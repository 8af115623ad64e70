"""Batches with features: rows of audio beside those of tokens."""

from __future__ import annotations

import jax
import numpy as np

from lm_trainer.profile.workload import random_batch
from lm_trainer.step.dispatch.device_groups import pad_rows
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan


def test_padding_fills_up_features_as_it_fills_up_tokens() -> None:
    features = np.random.default_rng(0).normal(size=(3, 8, 2)).astype(np.float32)
    padded = pad_rows(random_batch(3, 4, 10)._replace(features=features), 5)
    assert isinstance(padded.features, np.ndarray)
    np.testing.assert_array_equal(padded.features[:3], features)
    assert not padded.features[3:].any()
    assert (np.asarray(padded.segments)[3:] == -1).all()
    assert not np.asarray(padded.weights)[3:].any()


def test_a_batch_of_text_has_no_features() -> None:
    batch = MicrobatchPlan(8, 4, 2).microbatch_shapes(pad_rows(random_batch(3, 4, 10), 5))
    assert batch.features is None
    assert len(jax.tree.leaves(batch)) == 5
