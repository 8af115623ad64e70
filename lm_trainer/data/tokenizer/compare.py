"""Comparison of two tokenizers by the meaning of their ids."""

from __future__ import annotations

from pathlib import Path

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.base import HfTokenizer
from lm_trainer.data.tokenizer.files import TOKENIZER_FILE
from lm_trainer.data.tokenizer.rust import open_rust, without_chance

_SAMPLE = "Hello, World! It's 2,048 tokens\n\tdef f(x):  return x**2 # naïve café — 東京 Москва 🙂\r\n\n   end"
"""Letters of several scripts, digits, code and white space, which normalization and splitting treat differently."""


def find_difference(tokenizer: HfTokenizer, directory: Path) -> str | None:
    """Says how a tokenizer differs from that of a model, in its vocabulary or in how it cuts text; None if it does not.

    Which token ends a document may differ: that is for the user to say.

    Args:
        tokenizer: the one in use.
        directory: of the model, with its tokenizer.json.

    Raises:
        UserError: when that file is damaged.
    """
    file = directory / TOKENIZER_FILE
    try:
        theirs = open_rust(without_chance(file.read_text("utf-8"))[0])
    except Exception as error:  # the package raises nothing narrower
        raise UserError(f"{file}: cannot be read: {error}") from None
    ours = open_rust(tokenizer.files()[TOKENIZER_FILE].decode())
    ids, expected = (each.get_vocab(with_added_tokens=True) for each in (ours, theirs))
    if ids != expected:
        return _vocabularies(ids, expected)
    if ours.encode(_SAMPLE, add_special_tokens=False).ids != theirs.encode(_SAMPLE, add_special_tokens=False).ids:
        return "it has the same tokens, but cuts text differently"
    return None


def has_rows_for(tokenizer: HfTokenizer, rows: int) -> bool:
    """Returns whether a model with so many rows of its embedding can be that of a tokenizer.

    Some models have no rows for tokens that were added to their vocabulary later and come from no text: a text that has
    one is refused where it is read.
    """
    added = tokenizer.added_tokens()
    surplus = {index for index in tokenizer.ids() if index >= rows}
    return surplus <= added.keys() and not surplus & {tokenizer.eos_id, tokenizer.bos_id}


def _vocabularies(ids: dict[str, int], expected: dict[str, int]) -> str:
    if len(ids) != len(expected):
        return f"it has {len(ids):,} tokens, not {len(expected):,}"
    here, there = ({index: token for token, index in each.items()} for each in (ids, expected))
    first = min(index for index in here.keys() | there.keys() if here.get(index) != there.get(index))
    return f"its token {first} is {here.get(first)!r}, not {there.get(first)!r}"
