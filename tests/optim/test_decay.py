"""The parameters that decay: by default, by pattern, and both."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.optim import AdamConfig, Param, decays_by_default
from lm_trainer.optim.decay import matchable_names
from tests.optim.common import PARAMS, differs, run

REFERENCE = r".*attn.*weight|.*mlp.*weight|.*token_embeddings|.*position_embeddings"
MATRICES = {
    "stack.blocks.0.attention.q.weight",
    "stack.blocks.0.attention.out.weight",
    "stack.blocks.0.mlp.up.weight",
}


def decaying(**fields: Any) -> set[str]:
    mask = AdamConfig.model_validate(fields).decay_mask(PARAMS)
    assert mask.keys() == PARAMS.keys()
    return {name for name, decays in mask.items() if decays}


def test_matrices_and_heads_decay_by_default() -> None:
    assert decaying() == decaying(default_weight_decay_mask=True) == MATRICES | {"head.weight"}


def test_without_the_default_and_without_patterns_everything_decays() -> None:
    assert decaying(default_weight_decay_mask=False) == set(PARAMS)


def test_the_regular_expression_of_nano_gpt() -> None:
    assert decaying(weight_decay_modules=REFERENCE) == MATRICES | {"embed.tokens", "embed.positions"}


@pytest.mark.parametrize(
    ("patterns", "named"),
    [
        (r"embed\.", {"embed.tokens", "embed.positions"}),
        (r"norm", None),
        (r".*norm", {"stack.blocks.0.norm.scale", "final_norm.scale"}),
        (r"lm_head", {"head.weight"}),
        (["norm"], {"stack.blocks.0.norm.scale", "final_norm.scale"}),
        (["attn.q", "lm_head"], {n for n in PARAMS if ".q." in n} | {"head.weight"}),
        (["token_embeddings"], {"embed.tokens"}),
    ],
)
def test_patterns(patterns: Any, named: set[str] | None) -> None:
    if named is None:
        # A regular expression matches from the start of a name.
        with pytest.raises(UserError, match="matches no parameter"):
            decaying(weight_decay_modules=patterns)
        return
    assert decaying(weight_decay_modules=patterns) == named
    assert decaying(weight_decay_modules=patterns, default_weight_decay_mask=False) == named
    assert decaying(weight_decay_modules=patterns, default_weight_decay_mask=True) == named | decaying()


def test_a_pattern_that_matches_nothing_names_what_is_near() -> None:
    with pytest.raises(UserError, match=r"'\.\*atention.*' matches no parameter; near it are .*attention\.q") as error:
        decaying(weight_decay_modules=".*atention.*weight")
    assert "optimizer.weight_decay_modules" in str(error.value)
    with pytest.raises(UserError, match=r"'mpl' matches no parameter"):
        decaying(weight_decay_modules=["attn", "mpl"])
    with pytest.raises(UserError, match=r"some are embed\.tokens"):
        AdamConfig(weight_decay_modules="zzz").build(PARAMS)


@pytest.mark.parametrize("empty", ["", [], ["attn", ""]])
def test_empty_patterns_are_refused(empty: Any) -> None:
    with pytest.raises(ValidationError, match="names nothing"):
        AdamConfig(weight_decay_modules=empty)


def test_what_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        AdamConfig(weight_decay_modules="*attn")


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("stack.blocks.0.attention.q.weight", "stack.blocks.0.attn.q.weight"),
        ("embed.tokens", "token_embeddings.weight"),
        ("blocks.0.mlp.up", "blocks.0.mlp.up.weight"),
        ("head", "lm_head.weight"),
        ("blocks.0.norm.scale", None),
        ("head.weight", "lm_head.weight"),
        ("stack.blocks.0.attention_norm.scale", None),
        ("heads.weight", None),
    ],
)
def test_spellings(name: str, alias: str | None) -> None:
    assert matchable_names(name) == ((name,) if alias is None else (name, alias))


def test_the_mask_is_what_decays() -> None:
    plain, all_decay = AdamConfig(weight_decay=1.0), AdamConfig(weight_decay=1.0, default_weight_decay_mask=False)
    a, b = run(plain, steps=3, compiled=False), run(all_decay, steps=3, compiled=False)
    changed = {name for name in PARAMS if differs({name: a[name]}, {name: b[name]})}
    assert changed == set(PARAMS) - decaying()


@pytest.mark.parametrize(
    ("name", "axes", "decays"),
    [
        ("stack.blocks.0.mlp.up.weight", ("layers", "embed", "mlp"), True),
        ("stack.blocks.0.attention.q.bias", ("layers", "heads", "head_size"), False),
        ("final_norm.scale", ("embed",), False),
        ("stack.blocks.0.norm.scale", ("layers", "embed"), False),
        ("embed.tokens", ("vocab", "embed"), False),
        ("embed.positions", ("position", "embed"), False),
        ("head.weight", ("vocab", "embed"), True),
    ],
)
def test_what_decays_by_default(name: str, axes: tuple[str, ...], decays: bool) -> None:
    assert decays_by_default(Param(name, (2,) * len(axes), axes)) is decays
