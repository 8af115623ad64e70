"""Patterns that name the modules of Levanter's models, over the parameters of whole models here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.optim import AdamConfig, Param
from lm_trainer.run.build.model import trace_model
from lm_trainer.run.config.run_config import RunConfig

SIZES = {"hidden_dim": 16, "num_heads": 2, "num_layers": 2, "seq_len": 16}
MODELS = {
    "gpt2": {"type": "gpt2", **SIZES},
    "llama": {"type": "llama", "num_kv_heads": 2, "intermediate_dim": 32, "tie_word_embeddings": False, **SIZES},
    "mpt": {"type": "mpt", **SIZES},
    "mixtral": {"type": "mixtral", "num_kv_heads": 2, "intermediate_dim": 32, **SIZES},
}
BLOCK = "blocks.0."
QKV = {f"{BLOCK}attention.{name}" for name in "qkv"}
MLP = {f"{BLOCK}mlp.up", f"{BLOCK}mlp.down"}
PRE_NORMS = {f"{BLOCK}attention_pre_norm", f"{BLOCK}mlp_pre_norm"}


def matching_names(model: str, patterns: str | list[str]) -> set[str]:
    """The parameters that decay."""
    mask = AdamConfig.model_validate({"weight_decay_modules": patterns}).decay_mask(params_of(model))
    return {name for name, decays in mask.items() if decays}


@functools.cache
def params_of(model: str) -> Mapping[str, Param]:
    return trace_model(RunConfig.model_validate({"model": MODELS[model]}), 64).optimizer_params()


def with_kinds(modules: set[str], *kinds: str) -> set[str]:
    return {f"{module}.{kind}" for module in modules for kind in kinds}


LINEAR = QKV | MLP | {f"{BLOCK}attention.out"}
NORMS = PRE_NORMS | {"final_norm"}


@pytest.mark.parametrize(
    ("model", "patterns", "expected"),
    [
        ("gpt2", ["Embedding"], {"embed.tokens", "embed.positions"}),
        ("gpt2", ["Linear"], with_kinds(LINEAR, "weight", "bias")),
        ("gpt2", ["Linear.weight"], with_kinds(LINEAR, "weight")),
        ("gpt2", r"Linear\.weight|Embedding", with_kinds(LINEAR, "weight") | {"embed.tokens", "embed.positions"}),
        ("gpt2", ["LayerNorm"], with_kinds(NORMS, "scale", "bias")),
        ("gpt2", r"LayerNorm\.weight", with_kinds(NORMS, "scale")),
        ("gpt2", ["c_attn"], with_kinds(QKV, "weight", "bias")),
        (
            "gpt2",
            ["c_attn.weight", "c_fc"],
            with_kinds(QKV, "weight") | with_kinds({f"{BLOCK}mlp.up"}, "weight", "bias"),
        ),
        ("gpt2", ["mlp.c_proj"], with_kinds({f"{BLOCK}mlp.down"}, "weight", "bias")),
        ("gpt2", r".*c_proj\.weight", with_kinds({f"{BLOCK}mlp.down", f"{BLOCK}attention.out"}, "weight")),
        ("gpt2", ["ln_1"], with_kinds({f"{BLOCK}attention_pre_norm"}, "scale", "bias")),
        ("gpt2", ["ln_2.weight", "ln_f.bias"], {f"{BLOCK}mlp_pre_norm.scale", "final_norm.bias"}),
        ("llama", ["RMSNorm"], with_kinds(NORMS, "scale")),
        ("llama", "RmsNorm", with_kinds(NORMS, "scale")),
        ("llama", ["q_proj", "gate_proj"], with_kinds({f"{BLOCK}attention.q", f"{BLOCK}mlp.gate"}, "weight")),
        ("llama", ["Linear"], with_kinds(LINEAR | {f"{BLOCK}mlp.gate"}, "weight") | {"head"}),
        ("mpt", ["LayerNorm"], with_kinds(NORMS, "scale")),
        ("mixtral", ["MoELinear"], {f"{BLOCK}mlp.{name}" for name in ("up", "down", "gate")}),
        ("mixtral", r"Linear\.weight", with_kinds(LINEAR - MLP, "weight") | {"head", f"{BLOCK}mlp.router"}),
    ],
)
def test_modules(model: str, patterns: Any, expected: set[str]) -> None:
    assert matching_names(model, patterns) == expected


@pytest.mark.parametrize(
    ("model", "pattern"),
    [("gpt2", "RMSNorm"), ("llama", "LayerNorm"), ("mpt", "RmsNorm"), ("gpt2", "gate_proj"), ("llama", "MoELinear")],
)
def test_a_module_that_the_model_lacks_is_an_error(model: str, pattern: str) -> None:
    with pytest.raises(UserError, match=f"'{pattern}' matches no parameter"):
        matching_names(model, [pattern])


def test_a_pattern_without_modules_means_what_it_did() -> None:
    assert matching_names("gpt2", ".*weight") == with_kinds(LINEAR, "weight") | {"embed.tokens", "embed.positions"}
    assert matching_names("llama", ["weight"]) == with_kinds(LINEAR | {f"{BLOCK}mlp.gate"}, "weight") | {
        "head",
        "embed.tokens",
    }
