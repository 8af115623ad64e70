"""Text format: plain text."""

from __future__ import annotations

import ctypes
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
        try:
            return PreparedRow(row.text, _utf8_size(row.text))
        except UnicodeEncodeError:
            text = replace_surrogates(row.text)
            return PreparedRow(text, _utf8_size(text), replaced=True)

    def encode(self, values: Sequence[Any], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        return [EncodedDocument(ids) for ids in tokenizer.encode_batch(values)]


def _utf8_size(text: str) -> int:
    """Counts the bytes of a text in UTF-8, which Python then keeps beside it.

    Raises:
        UnicodeEncodeError: if it has a lone surrogate.
    """
    # Python knows without a look at the text that it is ASCII, whose bytes are its characters.
    if text.isascii():
        return len(text)
    # A tokenizer asks Python for these bytes. Asked for here, in the thread that reads, they are ready when the thread
    # that encodes wants them; `str.encode` would make a copy that is thrown away.
    size = ctypes.c_ssize_t()
    _as_utf8(text, ctypes.byref(size))
    return size.value


_as_utf8 = ctypes.pythonapi.PyUnicode_AsUTF8AndSize
_as_utf8.restype, _as_utf8.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.POINTER(ctypes.c_ssize_t))
