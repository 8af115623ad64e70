"""The model card says what is known, and shows any text as text."""

from __future__ import annotations

import yaml

from lm_trainer.export.card import TrainingFacts, escape_markdown, model_card

CONFIG = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_positions": 1024, "dtype": "bfloat16"}


def card(title: str = "nano", facts: TrainingFacts | None = None, hub_name: str | None = None) -> str:
    return model_card(
        title, hf_config=CONFIG, parameters=124_439_808, facts=facts or TrainingFacts(), hub_name=hub_name
    )


def test_the_header_is_what_the_hub_reads() -> None:
    _, header, _ = card().split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["lm_trainer", "jax"],
    }


def test_facts_are_stated_and_unknown_ones_left_out() -> None:
    text = card(facts=TrainingFacts(step=1500, tokens=6_144_000, validation_losses={"wiki|x": 2.34567}))
    for row in ("| Parameters | 124,439,808 |", "| Training steps | 1,500 |", "| Training tokens | 6,144,000 |"):
        assert row in text
    assert r"| Validation loss on wiki\|x (nats per token) | 2.3457 |" in text
    assert "Training loss" not in text
    assert "None" not in text


def test_the_snippet_names_the_hub_repository_or_a_placeholder() -> None:
    assert 'from_pretrained("org/nano")' in card(hub_name="org/nano")
    assert 'from_pretrained("path/to/this/directory")' in card()


def test_titles_are_shown_literally() -> None:
    text = card("<script>alert(1)</script>\n---\nlicense: mit\n# [x](javascript:y) | `z` {0} {header}")
    assert "<script>" not in text
    assert "\nlicense:" not in text
    assert "\\[x\\]" in text
    assert text.count("\n---\n") == 1


def test_escape_keeps_ordinary_words() -> None:
    assert escape_markdown("GPT2 nano run 7") == "GPT2 nano run 7"
    assert escape_markdown("a|b*c_d") == "a\\|b\\*c\\_d"
