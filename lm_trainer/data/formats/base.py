"""What a format is: how a row of a source becomes tokens, and which of them are to be learnt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lm_trainer.core.config import Config
from lm_trainer.data.sources import Row
from lm_trainer.data.tokenizer import Tokenizer


class Prepared(NamedTuple):
    """A row that is ready to be encoded."""

    value: Any
    """What `encode` takes."""
    size: int
    """UTF-8 bytes of the text; 0 = nothing to encode, the row is empty."""
    replaced: bool = False
    """Whether characters that no UTF-8 can hold were replaced."""


class Document(NamedTuple):
    """Token ids, without those that start and end a document."""

    ids: Any
    """Integers [T]."""
    learn: np.ndarray | None = None
    """bool [T]: the tokens that the model shall learn to say; None = all of them."""


class Unusable(Exception):
    """The row does not fit the format; the message says why."""


class FormatConfig(Config):
    """The base of every member of the union of formats."""

    marks: ClassVar[bool] = False
    """Whether documents say which tokens to learn, and may hold the end-of-document token inside."""
    adds_bos: ClassVar[bool] = True
    """Whether a start-of-document token is put in front where the tokenizer has one."""

    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """The fields of a record that are read; () = its text alone."""

    @abstractmethod
    def identity(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        """JSON that changes whenever the tokens may; None for plain text.

        Raises:
            UserError: if the tokenizer does not fit.
        """

    @abstractmethod
    def prepare(self, row: Row) -> Prepared:
        """Checks a row and makes what `encode` takes.

        Raises:
            Unusable: if the row does not fit.
        """

    @abstractmethod
    def encode(self, values: Sequence[Any], tokenizer: Tokenizer) -> list[Document | Unusable]:
        """One result for each value; Unusable where only encoding shows that a row does not fit."""
