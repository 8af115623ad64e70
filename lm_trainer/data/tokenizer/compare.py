"""Compares two tokenizers by the meaning of their ids."""

from __future__ import annotations

from pathlib import Path

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.base import HfTokenizer
from lm_trainer.data.tokenizer.files import TOKENIZER_FILE
from lm_trainer.data.tokenizer.rust import open_rust, without_sampling

_SAMPLE = "Hello, World! It's 2,048 tokens\n\tdef f(x):  return x**2 # naïve café — 東京 Москва 🙂\r\n\n   end"
"""Letters of several scripts, digits, code and white space, which reveal differences in normalisation and splitting."""


def find_difference(tokenizer: HfTokenizer, directory: Path) -> str | None:
    """Compares a tokenizer with a model's tokenizer, and describes the first difference in vocabulary or splitting.

    Returns None if the tokenizers agree. The end-of-document token may differ, since the user chooses it.

    Args:
        tokenizer: the tokenizer in use.
        directory: the directory of the model, with its tokenizer.json.

    Raises:
        UserError: if tokenizer.json is damaged.
    """
    file = directory / TOKENIZER_FILE
    try:
        reference = open_rust(without_sampling(file.read_text("utf-8"))[0])
    except Exception as error:  # the package has no narrower error type
        raise UserError(f"{file}: cannot be read: {error}") from None
    local = open_rust(tokenizer.files()[TOKENIZER_FILE].decode())
    ids, expected = (rust.get_vocab(with_added_tokens=True) for rust in (local, reference))
    if ids != expected:
        return _describe_vocabulary_difference(ids, expected)
    if local.encode(_SAMPLE, add_special_tokens=False).ids != reference.encode(_SAMPLE, add_special_tokens=False).ids:
        return "it has the same tokens, but cuts text differently"
    return None


def has_rows_for(tokenizer: HfTokenizer, rows: int) -> bool:
    """Returns True if a model with this number of embedding rows can be used with the tokenizer.

    Some models lack embedding rows for tokens that were added later, which plain text never contains. Input with such a
    token is rejected when it is read.
    """
    added = tokenizer.added_tokens()
    surplus = {index for index in tokenizer.used_ids() if index >= rows}
    return surplus <= added.keys() and not surplus & {tokenizer.eos_id, tokenizer.bos_id}


def _describe_vocabulary_difference(ids: dict[str, int], expected: dict[str, int]) -> str:
    if len(ids) != len(expected):
        return f"it has {len(ids):,} tokens, not {len(expected):,}"
    local_tokens, expected_tokens = (
        {index: token for token, index in vocabulary.items()} for vocabulary in (ids, expected)
    )
    first = min(
        index
        for index in local_tokens.keys() | expected_tokens.keys()
        if local_tokens.get(index) != expected_tokens.get(index)
    )
    return f"its token {first} is {local_tokens.get(first)!r}, not {expected_tokens.get(first)!r}"
