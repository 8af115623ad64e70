"""The ids format, for ready-made token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from lm_trainer.data.formats.base import EncodedDocument, FormatConfig, PreparedRow, UnusableRow
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import json_type_name
from lm_trainer.data.tokenizer import Tokenizer


class IdsFormat(FormatConfig):
    """Every row is a list of token ids of `data.tokenizer`, which are used unchanged.

    The end-of-document token also ends documents inside a row, and is appended to rows that do not end with it.
    """

    type: Literal["ids"] = "ids"
    field: str = "input_ids"
    """The field with the ids."""

    adds_bos: ClassVar[bool] = False

    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def identity(self, tokenizer: Tokenizer) -> dict[str, object] | None:
        del tokenizer
        return self.model_dump()

    def prepare(self, row: Row) -> PreparedRow:
        value = (row.record or {})[self.field]
        if not isinstance(value, list):
            raise UnusableRow(f"the field {self.field!r} is {json_type_name(value)}, not a list of token ids")
        try:
            ids = np.asarray(value) if value else np.zeros(0, np.int64)
        except ValueError:  # lists of several lengths
            ids = np.zeros(0)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or _holds_booleans(value, ids):
            raise UnusableRow(f"the field {self.field!r} holds something else than token ids")
        return PreparedRow(ids, 2 * len(ids))

    def encode(self, values: Sequence[np.ndarray], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        return [self._check_ids(ids, tokenizer.vocab_size) for ids in values]

    def _check_ids(self, ids: np.ndarray, vocab_size: int) -> EncodedDocument | UnusableRow:
        # An id outside the vocabulary would silently read the wrong row of the embedding.
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if len(wrong):
            return UnusableRow(
                f"there is no token {wrong[0]} in the vocabulary of {vocab_size}, which data.tokenizer names"
            )
        return EncodedDocument(ids)


def _holds_booleans(value: list[object], ids: np.ndarray) -> bool:
    """Returns True if the list contains true or false.

    NumPy converts them to 1 and 0, so only such items are checked.
    """
    return any(isinstance(value[index], bool) for index in np.flatnonzero(ids <= 1))
