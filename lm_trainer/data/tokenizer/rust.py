"""Opens a `tokenizer.json` with the `tokenizers` package. Turns off random sampling, so equal texts get equal ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_SAMPLING = ("alpha", "nbest_size", "enable_sampling")
"""Settings with which Unigram models and SentencePiece sample one of several segmentations of a text."""

# Decoding the JSON of a large vocabulary takes as long as opening the tokenizer, so the text is searched first. Tokens
# with these names do not match, as their ids are integers, and the vocabulary of a Unigram model consists of lists.
_DROPOUT_TEXT = re.compile(r'"dropout"\s*:\s*(?:\d+\.\d|\d+[eE]-)')
_SAMPLING_TEXT = re.compile(rf'"(?:{"|".join(_SAMPLING)})"\s*:')


def without_sampling(content: str) -> tuple[str, list[str]]:
    """Turns off subword regularisation, which segments the same text in different ways.

    Args:
        content: the text of `tokenizer.json`.

    Returns:
        The content, which is unchanged byte for byte if it has no such settings, and the removed settings with their
            values.
    """
    if not _DROPOUT_TEXT.search(content) and not ('"Unigram"' in content and _SAMPLING_TEXT.search(content)):
        return content, []
    try:
        model = (parsed := json.loads(content))["model"]
        dropout = model.get("dropout") or 0
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not a tokenizer; the package reports the reason.
        return content, []
    # A dropout of 1 skips all merges, which is deterministic.
    changed = {"dropout": None} if isinstance(dropout, int | float) and 0 < dropout < 1 else {}
    changed |= {key: None for key in _SAMPLING if model.get(key) is not None}
    if not changed:
        return content, []
    off = [f"model.{key}: {model[key]}" for key in changed]
    parsed["model"] = {**model, **changed}
    return json.dumps(parsed, indent=2, ensure_ascii=False), off


def settings_without_sampling(settings: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """As `without_sampling`, for `tokenizer_config.json`, which the slow tokenizers of transformers read."""
    arguments = settings.get("sp_model_kwargs")
    if not isinstance(arguments, Mapping) or not arguments.get("enable_sampling"):
        return dict(settings), []
    retained = {key: value for key, value in arguments.items() if key not in _SAMPLING}
    return {**settings, "sp_model_kwargs": retained}, ["sp_model_kwargs.enable_sampling: true"]


def open_rust(content: str) -> RustTokenizer:
    """Opens a tokenizer and disables truncation and padding.

    Raises:
        Exception: if the content is not a tokenizer. The package has no narrower error type.
    """
    from tokenizers import Tokenizer as RustTokenizer

    rust = RustTokenizer.from_str(content)
    # Found in the text unless its key is spelt with escapes.
    if 0 < (getattr(rust.model, "dropout", None) or 0) < 1:
        raise ValueError("model.dropout is set, by which one text becomes other tokens each time; set it to null")
    rust.no_truncation()
    rust.no_padding()
    return rust
