"""Modules that predict later tokens in Hugging Face's files."""

from __future__ import annotations

import re

import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import named_leaves
from lm_trainer.models import hf
from lm_trainer.run.config.run_config import RunConfig
from tests.models.common import TINY, VOCAB, change, params

FAMILIES = pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])


@FAMILIES
def test_modules_are_written_and_read_under_published_names(name):
    config = change(TINY[name], mtp_depth=2)
    weights = params(config)
    tensors = hf.params_to_hf(config, weights)
    layers = (config.num_layers, config.num_layers + 1)
    for layer in layers:
        own_names = {"enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"}
        assert {f"model.layers.{layer}.{own}.weight" for own in own_names} <= tensors.keys()
        assert any(key.startswith(f"model.layers.{layer}.mlp.experts.5.") for key in tensors)
        np.testing.assert_array_equal(
            tensors[f"model.layers.{layer}.embed_tokens.weight"], tensors["model.embed_tokens.weight"]
        )
    # Inputs first are the embedding, as in published files, with outputs before inputs.
    module = named_leaves(weights)["multi_token.blocks.0.join.weight"]
    np.testing.assert_array_equal(tensors[f"model.layers.{layers[1]}.eh_proj.weight"], np.asarray(module[1]).T)
    assert hf.config_to_hf(config, vocab_size=VOCAB, eos_id=2, bos_id=1)["num_nextn_predict_layers"] == 2
    read = named_leaves(hf.params_from_hf(config, VOCAB, tensors))
    assert all(np.array_equal(read[key], x) for key, x in named_leaves(weights).items() if not key.endswith(".load"))


@FAMILIES
def test_files_decide_which_modules_exist(name):
    """transformers counts modules in config.json that it does not save."""
    config = TINY[name]
    with_modules = hf.params_to_hf(config, params(config))
    layer = re.compile(rf"model\.layers\.{config.num_layers}\.")
    without_modules = {key: x for key, x in with_modules.items() if not layer.match(key)}
    assert config.fit_to_files(with_modules.keys()) == config
    fitted = config.fit_to_files(without_modules.keys())
    assert fitted == change(config, mtp_depth=0)
    hf.params_from_hf(fitted, VOCAB, without_modules)
    # A model without modules ignores them, and one with modules needs them.
    hf.params_from_hf(fitted, VOCAB, with_modules)
    with pytest.raises(UserError, match=rf"model\.layers\.{config.num_layers}\.eh_proj\.weight is missing"):
        hf.params_from_hf(config, VOCAB, without_modules)
    different = {
        **with_modules,
        f"model.layers.{config.num_layers}.embed_tokens.weight": np.ones((VOCAB, 32), np.float32),
    }
    with pytest.raises(UserError, match=r"embed_tokens\.weight differs from model\.embed_tokens\.weight"):
        hf.params_from_hf(config, VOCAB, different)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"optimizer": {"type": "sophia-g"}}, "model.mtp_depth: optimizer.type: sophia-g estimates the curvature"),
        ({"trainer": {"pipeline_axis_size": 2}}, "pipeline_axis_size cannot cut a model"),
    ],
)
def test_what_does_not_train_modules_is_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"model": {"type": "deepseek_v3", "mtp_depth": 1}, **section})
