"""Tables of what is beside the weights of a model: every field and file that transformers has is in them."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import re
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.data.tokenizer.files import TOKENIZER_FILES
from lm_trainer.export.files import DOWNLOADED, FILES
from lm_trainer.models import MODEL_CONFIGS
from lm_trainer.models.generation_fields import GENERATION_FIELDS
from lm_trainer.models.hf_known import check_fields_known
from lm_trainer.models.hf_table import HfFamily, settings_from_hf
from tests.models.hf_checkpoints import GEMMA4_EXPERTS

CONFIGS = {config.hf.model_type: config for config in MODEL_CONFIGS if isinstance(config.hf, HfFamily)}
FAMILIES = {model_type: config.hf_family() for model_type, config in CONFIGS.items()}

NOT_CARRIED = {
    # Pickles, and indices of them.
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin"),
    # An early form of the card.
    "modelcard.json",
}


def matches_any(name: str, patterns: Any) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def test_every_field_of_generation_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    hf_fields = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert hf_fields - GENERATION_FIELDS.keys() == set()
    # Fields of other versions are carried as well, so more may be known.
    assert len(GENERATION_FIELDS.keys() - hf_fields) < 5


def test_every_file_of_a_model_is_known() -> None:
    pytest.importorskip("transformers")
    from transformers import tokenization_utils_base, utils
    from transformers.utils import hub, peft_utils

    named = {
        value
        for module in (utils, hub, peft_utils, tokenization_utils_base)
        for name, value in vars(module).items()
        if re.fullmatch(r"[A-Z_]+_(NAME|FILE)", name) and isinstance(value, str) and "." in value
    }
    assert len(named) > 10
    assert {name for name in named if not matches_any(name, FILES)} == NOT_CARRIED
    assert matches_any(f"{hub.CHAT_TEMPLATE_DIR}/tool_use.jinja", TOKENIZER_FILES)


def test_every_file_of_every_tokenizer_is_known() -> None:
    models = pytest.importorskip("transformers.models")
    # Read, not imported: many need packages of their own.
    texts = [file.read_text() for file in Path(models.__path__[0]).glob("*/tokenization_*.py")]
    tables = [table for text in texts for table in re.findall(r"^VOCAB_FILES_NAMES = (\{.*?\})", text, re.S | re.M)]
    names = {name for table in tables for name in ast.literal_eval(table).values()}
    assert {"tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "spiece.model", "source.spm"} <= names
    assert {name for name in names if not matches_any(name, TOKENIZER_FILES)} == set()


def test_the_hub_is_asked_for_what_is_exported() -> None:
    assert set(FILES) - set(DOWNLOADED) == {"README.md"}
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer.model", "vocab.json"):
        assert matches_any(name, DOWNLOADED)
    assert not matches_any("pytorch_model.bin", DOWNLOADED)
    assert not matches_any("modeling_evil.py", DOWNLOADED)


class Read(dict[str, Any]):
    """A config.json that notes which of its fields are read."""

    def __init__(self, fields: dict[str, Any]):
        super().__init__(fields)
        self.keys_read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)


WITHOUT_EFFECT = {
    # Which token is which, how texts are generated and labelled: of the tokenizer and of generation_config.json.
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("id2label", "label2id", "problem_type", "suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids"),
    # How a forward pass runs, and what it returns.
    *("use_cache", "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "dtype"),
    *("output_router_logits", "is_encoder_decoder", "is_decoder", "architectures", "model_type", "vocab_size"),
    *("transformers_version", "_name_or_path", "init_device"),
    # Of heads for other tasks.
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("classifier_dropout", "classifier_proj_size", "use_weighted_layer_sum", "median_filter_width"),
    # Of SpecAugment, with which Whisper is trained.
    *("mask_feature_length", "mask_feature_min_masks", "mask_feature_prob"),
    *("mask_time_length", "mask_time_min_masks", "mask_time_prob"),
    # Another name of `num_nextn_predict_layers`.
    "num_mtp_layers",
    # transformers reads them, and computes the same whatever they say.
    *("embedding_fraction", "expansion_ratio", "norm_type"),
}
"""Fields that change nothing of what a model computes here, or that are read elsewhere."""

SETTINGS = {"gemma4_text": GEMMA4_EXPERTS}
"""Settings without which the default model of a family has parts that are refused."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_of_a_family_is_known(model_type: str) -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    config_class, family = auto.CONFIG_MAPPING[model_type], FAMILIES[model_type]
    config = config_class(**SETTINGS.get(model_type, {}))
    raw = Read(config.to_dict())
    check_fields_known(CONFIGS[model_type], config.to_dict())
    settings_from_hf(family, raw)
    fields = {field.name for field in dataclasses.fields(config_class)} | set(raw)
    # A window that no layer has: where layers have one, the field is read or refused.
    window = {"qwen3_moe": {"sliding_window"}, "qwen2_moe": {"sliding_window", "max_window_layers"}}
    # Computed from other fields, so a value in the file has no effect; groups are read where `topk_method` uses them.
    computed = {name: {"qk_head_dim", "head_dim"} for name in ("deepseek_v2", "deepseek_v3", "minicpm3")}
    computed["deepseek_v2"] |= {"n_group", "topk_group"}
    without = WITHOUT_EFFECT | window.get(model_type, set()) | computed.get(model_type, set())
    assert fields - raw.keys_read - family.inert.keys() - without == set()
