"""Adapters in PEFT's format: the product of every family's layers, as the format defines it."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
from flax import nnx

from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import named_leaves
from lm_trainer.models import hf
from lm_trainer.models.hf_table import HfFamily
from lm_trainer.models.peft import adapter_to_peft, module_names
from lm_trainer.nn.lora import attach_lora, is_adapter_param, merge_lora
from lm_trainer.nn.lora_config import LoraConfig
from tests.models.common import TINY, VOCAB

FAMILIES = [name for name, config in TINY.items() if isinstance(config.hf, HfFamily)]


def random_base(family: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    leaves = hf.param_infos(TINY[family], VOCAB)
    return {name: rng.standard_normal(leaf.shape, np.float32) for name, leaf in leaves.items()}


def nested(named: dict[str, np.ndarray]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, x in named.items():
        *path, last = name.split(".")
        functools.reduce(lambda subtree, key: subtree.setdefault(key, {}), path, result)[last] = x
    return result


def random_adapters(family: str, lora: LoraConfig) -> dict[str, np.ndarray]:
    config, rng = TINY[family], np.random.default_rng(3)

    def build() -> Any:
        model = config.build(VOCAB, rngs=nnx.Rngs(0))
        attach_lora(model, lora, module_names(config, VOCAB), rngs=nnx.Rngs(1))
        return model

    shapes = named_leaves(nnx.to_pure_dict(nnx.state(nnx.eval_shape(build), nnx.Param)))
    drawn = {name: rng.standard_normal(x.shape, np.float32) for name, x in shapes.items() if is_adapter_param(name)}
    assert drawn
    return drawn


def merged_by_the_format(
    tensors: dict[str, np.ndarray], config: dict[str, Any], adapter: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """W + alpha / r B A for every module, as the format defines it."""
    result = dict(tensors)
    for name, a_RI in adapter.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert any(module == target or module.endswith(f".{target}") for target in config["target_modules"])
        rank, alpha = (
            next((v for k, v in config[pattern].items() if re.match(rf"(.*\.)?({k})$", module)), config[default])
            for pattern, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        assert len(a_RI) == rank
        delta_OI = adapter[f"base_model.model.{module}.lora_B.weight"] @ a_RI
        delta_OI *= alpha / (rank**0.5 if config["use_rslora"] else rank)
        result[f"{module}.weight"] = tensors[f"{module}.weight"] + (
            delta_OI.T if config["fan_in_fan_out"] else delta_OI
        )
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_product_in_the_format(family: str) -> None:
    lora = LoraConfig(rank=3, alpha=2.0, use_rslora=len(family) % 2 == 0)
    config, base = TINY[family], random_base(family)
    adapters = random_adapters(family, lora)
    written, tensors = adapter_to_peft(config, lora, adapters, vocab_size=VOCAB, base="there")
    assert all(t.flags.c_contiguous for t in tensors.values())
    expected = merge_lora({**base, **adapters}, lora)
    by_format = merged_by_the_format(hf.params_to_hf(config, nested(base)), written, tensors)
    actual = named_leaves(hf.params_from_hf(config, VOCAB, by_format))
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3", "mpt"])
def test_one_of_several_joined_layers_can_be_adapted_alone(family: str) -> None:
    lora = LoraConfig(rank=2, target_modules=("attention.v",))
    adapters = random_adapters(family, lora)
    written, tensors = adapter_to_peft(TINY[family], lora, adapters, vocab_size=VOCAB, base="there")
    assert written["rank_pattern"] == {}
    base = random_base(family)
    by_format = merged_by_the_format(hf.params_to_hf(TINY[family], nested(base)), written, tensors)
    actual = named_leaves(hf.params_from_hf(TINY[family], VOCAB, by_format))
    changed = {name for name, x in base.items() if not np.array_equal(actual[name], x)}
    assert changed == {"blocks.0.attention.v.weight"}


def test_layers_of_some_places_alone_are_listed_one_by_one() -> None:
    lora = LoraConfig(target_modules=r"blocks\.1\.attention\.q")
    written, _ = adapter_to_peft(TINY["gemma3"], lora, random_adapters("gemma3", lora), vocab_size=VOCAB, base="there")
    assert written["target_modules"] == ["model.layers.1.self_attn.q_proj"]


def test_a_family_that_transformers_lacks_is_refused() -> None:
    lora = LoraConfig()
    with pytest.raises(UserError, match="a backpack model has no layers in `transformers`"):
        adapter_to_peft(TINY["backpack"], lora, random_adapters("backpack", lora), vocab_size=VOCAB, base="there")
