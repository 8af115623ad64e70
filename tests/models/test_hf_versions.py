"""config.json files as transformers 4 wrote them are read as what transformers 5 makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.models import MODEL_CONFIGS, hf
from lm_trainer.models.hf_table import HfFamily

WRITTEN_BY_4: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("golden").joinpath("transformers4.json").read_text()
)


@pytest.mark.parametrize("case", WRITTEN_BY_4)
def test_both_spellings_mean_the_same(case: str) -> None:
    transformers = pytest.importorskip("transformers")
    old = WRITTEN_BY_4[case]
    new = transformers.AutoConfig.for_model(**json.loads(json.dumps(old))).to_dict()
    assert "rope_parameters" not in old
    if "rope_theta" in old:
        assert new["rope_parameters"]
    assert old["torch_dtype"] == "bfloat16"
    # Version 5 writes its default number of modules that predict later tokens, although it saves none.
    for name in {"num_nextn_predict_layers", "num_mtp_layers"} - old.keys():
        new.pop(name, None)
    assert hf.config_from_hf(old) == hf.config_from_hf(json.loads(json.dumps(new, default=str)))


def test_every_family_is_among_them() -> None:
    model_types = {config.hf.model_type for config in MODEL_CONFIGS if isinstance(config.hf, HfFamily)}
    # Both versions write its settings under the same names.
    model_types.remove("whisper")
    # transformers 4 does not have these.
    model_types -= {"nanochat", "minicpm3", "gemma4_text", "qwen3_5_text", "qwen3_5_moe_text"}
    written = {config["model_type"] for config in WRITTEN_BY_4.values()}
    assert written == model_types, (
        f"{written ^ model_types}: add a case to make_transformers4.py, and run the commands at its top"
    )
