"""Error rates of a speech model's transcripts of a held-out set.

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
from lm_trainer.data.rows.audio_rows import SpeechSet
from lm_trainer.generate.speech import transcribe_features
from lm_trainer.generate.speech_rules import SpeechRules


@dataclass(frozen=True)
class ErrorRates:
    """Error rates on a set: insertions, deletions and substitutions, divided by the length of the references."""

    name: str
    rows: int
    words: float
    """The word error rate."""
    characters: float
    """The character error rate."""
    normalised_words: float | None
    """The word error rate after Whisper's normaliser; None if transformers, which contains it, is not installed."""
    examples: list[tuple[str, str]]
    """Reference and transcript of each of the first rows."""


def measure_error_rates(
    model: Any, held_out: SpeechSet, generation: dict[str, Any], max_batches: int | None
) -> ErrorRates:
    """Transcribes all rows of a set greedily, each after its own prompt, and counts the errors.

    Args:
        model: the module with its parameters.
        held_out: a data set whose rows have features.
        generation: generation settings, as in the model section.
        max_batches: maximum number of batches of `_ROWS` rows; None means the full set.

    Raises:
        UserError: if jiwer is not installed.
    """
    if importlib.util.find_spec("jiwer") is None:
        raise UserError("error rates need a package; run: pip install 'lm_trainer[audio]'")
    import jiwer

    references, written = list[str](), list[str]()
    for batch in held_out.batches(_ROWS, rows=range(_ROWS), max_batches=max_batches):
        for prompt, rows in _group_by_prompt(batch).items():
            targets_BS, weights_BS = np.asarray(batch.targets), np.asarray(batch.weights)
            references += [_decode_text(held_out, targets_BS[row][weights_BS[row] > 0]) for row in rows]
            rules = SpeechRules.from_config(generation, start_id=prompt[0], eos_id=held_out.eos_id)
            transcripts = transcribe_features(model, np.asarray(batch.features)[rows], rules, prompt=prompt)
            written += [_decode_text(held_out, ids) for ids in transcripts]
    # An empty reference has no words to divide by. All words of its transcript count as insertions.
    normalise = _whisper_normaliser()
    normalised = None
    if normalise is not None:
        normalised = jiwer.wer([normalise(text) for text in references], [normalise(text) for text in written])
    words, characters = jiwer.wer(references, written), jiwer.cer(references, written)
    return ErrorRates(
        held_out.name, len(references), words, characters, normalised, list(zip(references, written, strict=True))[:8]
    )


_ROWS = 16
"""Number of rows per batch."""


def _group_by_prompt(batch: Batch) -> dict[tuple[int, ...], list[int]]:
    """Groups the indices of the rows that are not padding by their prompt: the tokens before the first target."""
    rows_by_prompt: dict[tuple[int, ...], list[int]] = {}
    for row, (tokens_S, weights_S) in enumerate(zip(batch.tokens, batch.weights, strict=True)):
        trained_positions = np.flatnonzero(weights_S > 0)
        if len(trained_positions):
            rows_by_prompt.setdefault(tuple(tokens_S[: trained_positions[0] + 1].tolist()), []).append(row)
    return rows_by_prompt


def _decode_text(held_out: SpeechSet, ids: Sequence[int] | np.ndarray) -> str:
    return held_out.tokenizer.decode([int(token) for token in ids]).strip()


def _whisper_normaliser() -> Callable[[str], str] | None:
    """Returns Whisper's language-independent text normaliser from transformers, or None if it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    normalise = BasicTextNormalizer()
    return lambda text: normalise(text).strip()
