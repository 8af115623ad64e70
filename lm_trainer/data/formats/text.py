"""Plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lm_trainer.data.formats.base import Document, FormatConfig, Prepared, Unusable
from lm_trainer.data.sources import Row
from lm_trainer.data.text import clean
from lm_trainer.data.tokenizer import Tokenizer


class TextFormat(FormatConfig):
    """Every row is a text, and every token of it is learnt."""

    type: Literal["text"] = "text"
    text_key: str | None = None
    """The field of a record that holds the text; that of `data.text_key`, if absent."""

    def fields(self) -> tuple[str, ...]:
        return ()

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        del tokenizer

    def prepare(self, row: Row) -> Prepared:
        size = len(row.text) if row.text.isascii() else row.text_bytes
        if size is not None:
            return Prepared(row.text, size)
        try:
            return Prepared(row.text, len(row.text.encode("utf-8")))
        except UnicodeEncodeError:
            text = clean(row.text)
            return Prepared(text, len(text.encode("utf-8")), replaced=True)

    def encode(self, values: Sequence[Any], tokenizer: Tokenizer) -> list[Document | Unusable]:
        return [Document(ids) for ids in tokenizer.encode_batch(values)]
