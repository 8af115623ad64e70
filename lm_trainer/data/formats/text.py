"""The text format, for plain text."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

from lm_trainer.data.formats.base import EncodedDocument, FormatConfig, PreparedRow, UnusableRow
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import replace_surrogates
from lm_trainer.data.tokenizer import Tokenizer


class TextFormat(FormatConfig):
    """Every row is a text. All of its tokens count in the loss."""

    type: Literal["text"] = "text"
    text_key: str | None = None
    """The field of a record that holds the text. The default is `data.text_key`."""

    def fields(self) -> tuple[str, ...]:
        return ()

    def identity(self, tokenizer: Tokenizer) -> dict[str, object] | None:
        del tokenizer

    def prepare(self, row: Row) -> PreparedRow:
        try:
            return PreparedRow(row.text, _utf8_size(row.text))
        except UnicodeEncodeError:
            text = replace_surrogates(row.text)
            return PreparedRow(text, _utf8_size(text), replaced=True)

    def encode(self, values: Sequence[str], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        return [EncodedDocument(ids) for ids in tokenizer.encode_batch(values)]


def _utf8_size(text: str) -> int:
    """Returns the number of UTF-8 bytes of a text. Python caches the encoded bytes in the string object.

    Raises:
        UnicodeEncodeError: if the text has a lone surrogate.
    """
    # Python stores a flag for ASCII strings. They have one byte per character.
    if text.isascii():
        return len(text)
    # The tokenizer needs these bytes. Encoding here, in the reading thread, makes them ready for the encoding thread.
    # `str.encode` would return a copy instead of filling the cache.
    size = ctypes.c_ssize_t()
    _as_utf8(text, ctypes.byref(size))
    return size.value


_as_utf8 = ctypes.pythonapi.PyUnicode_AsUTF8AndSize
_as_utf8.restype, _as_utf8.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.POINTER(ctypes.c_ssize_t))
