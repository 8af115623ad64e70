"""Error rates of what a model writes when it hears a held-out set.

Shape letters: B rows of a batch, S positions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.rows.audio_rows import HeardSet
from lm_trainer.generate.speech import write_heard
from lm_trainer.generate.speech_rules import SpeechRules


@dataclass(frozen=True)
class ErrorRates:
    """Errors of the texts of a set: insertions, deletions and substitutions over what was said."""

    name: str
    rows: int
    words: float
    """The word error rate."""
    characters: float
    """The character error rate."""
    normalised_words: float | None
    """The word error rate after Whisper's normaliser; None where transformers, which has it, is not installed."""
    examples: list[tuple[str, str]]
    """The words said and those written, of the first rows."""


def error_rates(model: Any, held_out: HeardSet, generation: dict[str, Any], max_batches: int | None) -> ErrorRates:
    """Writes all rows of a set with the likeliest tokens, each after its own prompt, and counts errors.

    Args:
        model: the module with its parameters.
        held_out: its rows have features.
        generation: settings of generation as in the model's section.
        max_batches: of `_ROWS` rows; None: the whole set.

    Raises:
        UserError: if jiwer is not installed.
    """
    if importlib.util.find_spec("jiwer") is None:
        raise UserError("error rates need a package; run: pip install 'lm_trainer[audio]'")
    import jiwer

    said, written = list[str](), list[str]()
    for batch in held_out.batches(_ROWS, rows=range(_ROWS), max_batches=max_batches):
        for prompt, rows in _by_prompt(batch).items():
            targets_BS, weights_BS = np.asarray(batch.targets), np.asarray(batch.weights)
            said += [_decoded(held_out, targets_BS[row][weights_BS[row] > 0]) for row in rows]
            rules = SpeechRules.from_config(generation, start_id=prompt[0], eos_id=held_out.eos_id)
            found = write_heard(model, np.asarray(batch.features)[rows], rules, prompt=prompt)
            written += [_decoded(held_out, ids) for ids in found]
    # An empty text has no words to count errors by; what is written in its place is an insertion all the same.
    normalise = _normaliser()
    normalised = None
    if normalise is not None:
        normalised = jiwer.wer([normalise(text) for text in said], [normalise(text) for text in written])
    words, characters = jiwer.wer(said, written), jiwer.cer(said, written)
    return ErrorRates(
        held_out.name, len(said), words, characters, normalised, list(zip(said, written, strict=True))[:8]
    )


_ROWS = 16
"""Rows that are written together."""


def _by_prompt(batch: Batch) -> dict[tuple[int, ...], list[int]]:
    """The rows that are no padding, by the tokens before the first that is learnt."""
    found: dict[tuple[int, ...], list[int]] = {}
    for row, (tokens_S, weights_S) in enumerate(zip(batch.tokens, batch.weights, strict=True)):
        learnt = np.flatnonzero(weights_S > 0)
        if len(learnt):
            found.setdefault(tuple(tokens_S[: learnt[0] + 1].tolist()), []).append(row)
    return found


def _decoded(held_out: HeardSet, ids: Sequence[int] | np.ndarray) -> str:
    return held_out.tokenizer.decode([int(token) for token in ids]).strip()


def _normaliser() -> Callable[[str], str] | None:
    """Whisper's normaliser for any language, as transformers has it."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    normalise = BasicTextNormalizer()
    return lambda text: normalise(text).strip()
