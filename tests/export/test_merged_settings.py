"""Settings of published models of every family, with and without a change: what is written means what was changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.settings import HfSettings
from lm_trainer.models import hf
from lm_trainer.models.generation_fields import generation_from_config
from tests.models.common import change
from tests.models.test_hf_versions import WRITTEN_BY_4

WITHOUT_LENGTH = ("mamba2",)
"""Families whose files have no length of rows."""
CHANGES: dict[str, Any] = {
    "seq_len": 1 << 20,
    "rope": {"type": "default", "theta": 77.0},
    "layer_norm_epsilon": 3e-4,
    "sliding_window": 17,
    "rope_local_base_freq": 55.0,
    "sliding_window_pattern": 3,
    "partial_rotary_factor": 0.25,
    "rotary_pct": 0.75,
    "clip_qkv": 4.0,
    "resid_pdrop": 0.25,
}


def settings_of(case: str) -> HfSettings:
    raw = json.loads(json.dumps(WRITTEN_BY_4[case]))
    return HfSettings(raw, {"top_k": 7, **generation_from_config(raw)})


@pytest.mark.parametrize("case", WRITTEN_BY_4)
def test_what_is_not_changed_is_written_as_it_was(case: str) -> None:
    source = settings_of(case)
    model, rows = hf.config_from_hf(source.config)
    assert source.adapt_to_model(model, rows, ByteTokenizer()) == source
    # So it is where rows to train on are shorter, unless positions have parameters.
    if not model.spec(rows).embedding.learned_positions:
        shorter = change(model, seq_len=8)
        assert source.adapt_to_model(shorter, rows, ByteTokenizer()) == source
        if case in WITHOUT_LENGTH:
            return
        with_context = source.adapt_to_model(shorter, rows, ByteTokenizer(), context=16)
        assert hf.config_from_hf(with_context.config)[0].seq_len == 16


@pytest.mark.parametrize("case", WRITTEN_BY_4)
def test_a_change_is_read_back(case: str) -> None:
    source = settings_of(case)
    model, rows = hf.config_from_hf(source.config)
    tried = 0
    for name, value in CHANGES.items():
        if name not in type(model).model_fields or (name == "seq_len" and model.spec(rows).embedding.learned_positions):
            continue
        if name == "seq_len" and case in WITHOUT_LENGTH:
            continue
        try:
            changed = change(model, **{name: value})
        except ValidationError:  # no change of this model
            continue
        written = source.adapt_to_model(changed, rows, ByteTokenizer())
        read, _ = hf.config_from_hf(written.config)
        assert read.spec(rows) == changed.spec(rows), name
        assert written.generation == source.generation
        # Fields that have nothing to do with it stay.
        unchanged = {key for key in source.config if written.config.get(key) == source.config[key]}
        assert len(unchanged) >= len(source.config) - 4, name
        tried += 1
    assert tried
