"""A `tokenizer.json` as the `tokenizers` package runs it: the ids of a text depend on the text alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

_SAMPLING = ("alpha", "nbest_size", "enable_sampling")
"""Settings by which Unigram models and SentencePiece draw one of several ways to cut a text."""

# Decoding the JSON of a large vocabulary takes as long as opening the tokenizer, so text is looked at first. Ids of
# tokens of these names are whole numbers; the vocabulary of a Unigram model is lists.
_DROPOUT_TEXT = re.compile(r'"dropout"\s*:\s*(?:\d+\.\d|\d+[eE]-)')
_SAMPLING_TEXT = re.compile(rf'"(?:{"|".join(_SAMPLING)})"\s*:')


def without_chance(content: str) -> tuple[str, list[str]]:
    """Turns off what makes a tokenizer cut one text in several ways: regularisation for the training of others.

    Args:
        content: the text of `tokenizer.json`.

    Returns:
        The content, to the byte as it was where nothing has to be turned off; and the settings that were, with their
        values.
    """
    if not _DROPOUT_TEXT.search(content) and not ('"Unigram"' in content and _SAMPLING_TEXT.search(content)):
        return content, []
    try:
        model = (parsed := json.loads(content))["model"]
        dropout = model.get("dropout") or 0
    except (ValueError, KeyError, TypeError, AttributeError):
        # No tokenizer, which the package says with its reason.
        return content, []
    # With 1 no merge is ever made, which is no chance.
    changed = {"dropout": None} if isinstance(dropout, int | float) and 0 < dropout < 1 else {}
    changed |= {key: None for key in _SAMPLING if model.get(key) is not None}
    if not changed:
        return content, []
    off = [f"model.{key}: {model[key]}" for key in changed]
    parsed["model"] = {**model, **changed}
    return json.dumps(parsed, indent=2, ensure_ascii=False), off


def settings_without_chance(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Does for `tokenizer_config.json` what `without_chance` does: slow tokenizers of transformers read it there."""
    given = settings.get("sp_model_kwargs")
    if not isinstance(given, Mapping) or not given.get("enable_sampling"):
        return dict(settings), []
    kept = {key: value for key, value in given.items() if key not in _SAMPLING}
    return {**settings, "sp_model_kwargs": kept}, ["sp_model_kwargs.enable_sampling: true"]


def open_rust(content: str) -> RustTokenizer:
    """Opens a tokenizer that neither cuts texts short nor fills them up, whatever its file says.

    Raises:
        Exception: of the package, which has no narrower type, if the content is no tokenizer.
    """
    rust = RustTokenizer.from_str(content)
    rust.no_truncation()
    rust.no_padding()
    return rust
