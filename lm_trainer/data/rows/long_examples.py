"""Examples, which are prompts with answers, that are longer than a training row.

Shape letters: D documents.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lm_trainer.core.data_content import DataContent
from lm_trainer.core.errors import UserError
from lm_trainer.data.formats.too_long import TooLong


class LongExamples(NamedTuple):
    """Number of examples of a set that are longer than a row, and their treatment."""

    total: int
    """Number of all examples of the set."""
    too_long: int
    longest: int
    """Number of positions of the longest example."""
    treatment: TooLong
    content: DataContent = "documents"

    def describe(self, title: str) -> str:
        """Describes them, such as `train: 3 of 200 documents`."""
        return f"{title}: {self.too_long:,} of {self.total:,} {self.content}"

    def check(self, title: str, seq_len: int) -> None:
        """Refuses a set without any example that fits a row, or with one that does not fit, as `on_too_long` demands.

        Args:
            title: name of the set.
            seq_len: number of positions of a row.

        Raises:
            UserError: if the set is refused.
        """
        all_too_long = self.too_long == self.total
        refused = self.treatment == "raise" or (self.treatment == "skip" and all_too_long)
        if not self.too_long or not refused:
            return
        remedy = ""
        if not all_too_long:
            remedy = ", or set data.format.on_too_long: skip to leave them out"
        elif self.content == "documents":
            remedy = ", or set data.format.on_too_long: right to cut off their ends"
        raise UserError(
            f"{self.describe(title)} are longer than a row of model.seq_len={seq_len}; raise it to "
            f"{self.longest:,}{remedy}"
        )


def count_long_documents(lengths_D: np.ndarray, seq_len: int, treatment: TooLong) -> LongExamples:
    """Counts the documents that are longer than a row.

    Args:
        lengths_D: int64, number of tokens of each document, including its end-of-document token.
        seq_len: number of positions of a row.
        treatment: treatment of long documents.
    """
    # The last token of a document is only a target.
    inputs_D = lengths_D - 1
    too_long = int(np.count_nonzero(inputs_D > seq_len))
    return LongExamples(len(lengths_D), too_long, int(inputs_D.max(initial=0)), treatment)
