"""Tables of what is beside the weights of a model: every field and file that transformers has is in them."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest

from lm_trainer.data.tokenizer.files import TOKENIZER_FILES
from lm_trainer.export.files import DOWNLOADED, FILES
from lm_trainer.export.generation_fields import GENERATION_FIELDS
from lm_trainer.models import MODEL_CONFIGS
from lm_trainer.models.hf_table import HfFamily, read_config

FAMILIES = {config.hf.model_type: config.hf for config in MODEL_CONFIGS if isinstance(config.hf, HfFamily)}

NOT_CARRIED = {
    # Pickles, and indices of them.
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin"),
    # An early form of the card.
    "modelcard.json",
}


def known(name: str, patterns: Any) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def test_every_field_of_generation_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert theirs - GENERATION_FIELDS.keys() == set()
    # Fields of other versions are carried as well, so more may be known.
    assert len(GENERATION_FIELDS.keys() - theirs) < 5


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
    assert {name for name in named if not known(name, FILES)} == NOT_CARRIED
    assert known(f"{hub.CHAT_TEMPLATE_DIR}/tool_use.jinja", TOKENIZER_FILES)


def _vocabularies(model_types: Iterator[str]) -> set[str]:
    names: set[str] = set()
    for model_type in model_types:
        package = f"transformers.models.{model_type}"
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if module.name.startswith("tokenization_"):
                found = vars(importlib.import_module(f"{package}.{module.name}"))
                classes = [value for value in found.values() if hasattr(value, "vocab_files_names")]
                names |= {file for each in classes for file in each.vocab_files_names.values()}
    return names


def test_every_file_of_the_tokenizers_of_our_families_is_known() -> None:
    pytest.importorskip("transformers")
    names = _vocabularies(iter(sorted(FAMILIES)))
    assert {"tokenizer.json", "vocab.json", "merges.txt"} <= names
    assert {name for name in names if not known(name, TOKENIZER_FILES)} == set()


@pytest.mark.slow
def test_every_file_of_every_tokenizer_is_known() -> None:
    models = pytest.importorskip("transformers.models")
    packages = (module.name for module in pkgutil.iter_modules(models.__path__) if module.ispkg)
    names = _vocabularies(iter(sorted(packages)))
    assert {"spiece.model", "source.spm"} <= names
    assert {name for name in names if not known(name, TOKENIZER_FILES)} == set()


def test_the_hub_is_asked_for_what_is_exported() -> None:
    assert set(FILES) - set(DOWNLOADED) == {"README.md"}
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "tokenizer.model", "vocab.json"):
        assert known(name, DOWNLOADED)
    assert not known("pytorch_model.bin", DOWNLOADED)
    assert not known("modeling_evil.py", DOWNLOADED)


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
    *("output_router_logits", "is_encoder_decoder", "architectures", "model_type", "vocab_size", "auto_map"),
}
"""Fields that change nothing of what a model computes here, or that are read elsewhere."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_field_of_a_family_is_known(model_type: str) -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    config_class, family = auto.CONFIG_MAPPING[model_type], FAMILIES[model_type]
    config = config_class()
    raw = Read(config.to_dict())
    read_config(family, raw)
    fields = {field.name for field in dataclasses.fields(config_class)} | set(raw)
    assert fields - raw.keys_read - family.inert.keys() - WITHOUT_EFFECT == set()
