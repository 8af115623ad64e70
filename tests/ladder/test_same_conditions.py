"""Rungs of different code, and ladders of different validation text or tokenizers, are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.ladder import ModelLadder
from lm_trainer.ladder.fit.same_conditions import check_same_measure, code_notes
from lm_trainer.ladder.fit.sources import ladder_points
from tests.ladder.test_fit_commands import ladder_of, run_by_hand


def test_rungs_of_different_code_are_named(tmp_path: Path) -> None:
    ladder = ladder_of(tmp_path)
    for size, code in zip(
        ladder.sizes, ("1234567890abcdef", "1234567890abcdef", "fedcba0987654321", None), strict=True
    ):
        run_by_hand(ladder, size)
        attempts = [{"step": 0, "code": "an earlier attempt"}, {"step": 3, "code": code}]
        (Path(ladder.get_save_folder(size)) / "env.json").write_text(json.dumps(attempts))
    notes = [note for note in ladder_points(ladder).notes if "different code" in note]
    assert len(notes) == 1
    assert "different code (a, b by 1234567890ab; c by fedcba098765)" in notes[0]
    assert "it is enough to train one of them again" in notes[0]
    (Path(ladder.get_save_folder("c")) / "env.json").unlink()
    assert code_notes(ladder) == ()


def test_ladders_that_are_measured_on_other_text_are_not_compared(tmp_path: Path) -> None:
    def ladder(name: str, *validation: str, **changes: object) -> ModelLadder:
        sources = [
            {"label": str(i), "train_urls": [f"{name}-{i}.jsonl"], "validation_urls": [url] if url else []}
            for i, url in enumerate(validation)
        ]
        return ladder_of(tmp_path, name=name, instance_sources=sources, **changes)

    base = ladder("base", "held-out.jsonl")
    # Another mixture, with the same text to measure on.
    check_same_measure(base, ladder("mixture", "held-out.jsonl", ""), "eval/loss")
    check_same_measure(ladder_of(tmp_path), ladder_of(tmp_path, name="muon"), "eval/loss")
    with pytest.raises(UserError, match=r"base and other are measured on different .* same validation_urls"):
        check_same_measure(base, ladder("other", "elsewhere.jsonl"), "eval/loss")
    words = ladder("words", "held-out.jsonl", tokenizer={"type": "trained_bpe", "vocab_size": 512})
    with pytest.raises(UserError, match=r"different tokenizers, so that eval/loss, .* with --metric eval/bpb"):
        check_same_measure(base, words, "eval/loss")
    check_same_measure(base, words, "eval/bpb")
