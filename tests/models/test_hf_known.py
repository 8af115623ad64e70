"""Fields of config.json that no table knows are refused by name, if they could change results."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.models import MODEL_CONFIGS, DecoderConfig, hf
from lm_trainer.models.hf_table import HfFamily

FAMILIES = [config for config in MODEL_CONFIGS if isinstance(config.hf, HfFamily)]
EVERY = pytest.mark.parametrize("config_class", FAMILIES, ids=lambda config: config.model_fields["type"].default)


def config_class_of(model_type: str) -> type[DecoderConfig]:
    return next(config for config in FAMILIES if config.hf_family().model_type == model_type)


def written(config_class: type[DecoderConfig]) -> dict[str, Any]:
    return hf.config_to_hf(config_class(), vocab_size=67, eos_id=2, bos_id=1)


@EVERY
def test_fields_of_a_later_version_are_refused(config_class: type[DecoderConfig]) -> None:
    later = {"scale_of_tomorrow": 2.0, "has_gates": True, "layers_of_tomorrow": [1]}
    named = r"the meaning of scale_of_tomorrow=2\.0, has_gates=True, layers_of_tomorrow=\[1\] in config\.json"
    with pytest.raises(UserError, match=f"this {config_class.hf_family().model_type} model cannot be read: .*{named}"):
        hf.config_from_hf({**written(config_class), **later})


@EVERY
def test_fields_without_an_effect_are_not(config_class: type[DecoderConfig]) -> None:
    absent = {"scale_of_tomorrow": None, "has_gates": False, "layers_of_tomorrow": [], "part": {}, "name": ""}
    dropout = {"hidden_dropout_prob": 0.1, "attention_dropout": 0.2, "classifier_dropout": 0.3, "embd_pdrop": 0.4}
    program = {"pretraining_tp": 4, "use_cache": True, "torch_dtype": "bfloat16", "auto_map": {"AutoModel": "x.Model"}}
    generation = {"temperature": 0.6, "max_length": 20, "_attn_implementation_autoset": True, "unsloth_fixed": True}
    plain = written(config_class)
    # Some families have dropouts.
    dropout = {name: rate for name, rate in dropout.items() if name not in plain}
    assert hf.config_from_hf({**plain, **absent, **dropout, **program, **generation}) == hf.config_from_hf(plain)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh"}),
        ("gpt2", {"n_special": 0, "predict_special_tokens": True}),
        ("llama", {"max_sequence_length": 2048}),
        ("llama", {"layer_types": ["full_attention", "full_attention"]}),
        ("mamba2", {"norm_before_gate": True}),
        ("whisper", {"num_hidden_layers": 2}),
    ],
)
def test_fields_of_published_files_that_transformers_does_not_read_are_not(
    model_type: str, fields: dict[str, Any]
) -> None:
    plain = written(config_class_of(model_type))
    assert hf.config_from_hf({**plain, **fields}) == hf.config_from_hf(plain)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("llama", {"attn_logit_softcapping": 30.0}),
        ("llama", {"sliding_window": 512}),
        ("mistral", {"embedding_multiplier": 12.0}),
        ("qwen3", {"num_experts": 8}),
        ("gemma2", {"attention_multiplier": 0.5}),
        ("mixtral", {"n_shared_experts": 1}),
        ("deepseek_v3", {"attention_chunk_size": 64}),
    ],
)
def test_fields_of_other_families_are_refused(model_type: str, fields: dict[str, Any]) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(UserError, match=re.escape(f"{name}={value} in config.json")):
        hf.config_from_hf({**written(config_class_of(model_type)), **fields})
