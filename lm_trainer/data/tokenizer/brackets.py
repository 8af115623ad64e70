"""Texts of documents in which the tokens that count in the loss are between brackets.

Shape letters: T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def decode_with_brackets(decode: Callable[[Sequence[int]], str], ids_T: np.ndarray, in_loss_T: np.ndarray) -> str:
    """Decodes tokens, with `⟦` and `⟧` around the runs that count in the loss.

    Args:
        decode: returns the text of ids.
        ids_T: integers, at least one.
        in_loss_T: bool, True for the tokens that count.
    """
    changes = np.flatnonzero(np.diff(in_loss_T)) + 1
    texts = [decode(run.tolist()) for run in np.split(ids_T, changes)]
    counted = [in_loss_T[position] for position in [0, *changes.tolist()]]
    return "".join(f"⟦{text}⟧" if inside else text for text, inside in zip(texts, counted, strict=True))
