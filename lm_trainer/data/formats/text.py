"""Text format: plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lm_trainer.data.formats.base import EncodedDocument, FormatConfig, PreparedRow, UnusableRow
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import replace_surrogates
from lm_trainer.data.tokenizer import Tokenizer


class TextFormat(FormatConfig):
    """Every row is a text, and the loss counts every token of it."""

    type: Literal["text"] = "text"
    text_key: str | None = None
    """The field of a record that holds the text; that of `data.text_key`, if absent."""

    def fields(self) -> tuple[str, ...]:
        return ()

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        del tokenizer

    def prepare(self, row: Row) -> PreparedRow:
        # Python knows without a look at the text that it is ASCII, whose bytes are its characters.
        size = len(row.text) if row.text.isascii() else row.text_bytes
        if size is not None:
            return PreparedRow(row.text, size)
        try:
            return PreparedRow(row.text, len(row.text.encode("utf-8")))
        except UnicodeEncodeError:
            text = replace_surrogates(row.text)
            return PreparedRow(text, len(text.encode("utf-8")), replaced=True)

    def encode(self, values: Sequence[Any], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        return [EncodedDocument(ids) for ids in tokenizer.encode_batch(values)]
