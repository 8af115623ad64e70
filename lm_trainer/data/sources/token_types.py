"""Types of token ids: evidence in the ids of a file that they were written in another type than they are read in.

Shape letters: T tokens, F bytes.
"""

from __future__ import annotations

import numpy as np

_TYPES = ("<u2", "<u4", "<i8", ">u2", ">u4", ">i8")
"""Those that ids are written in, the likelier ones first."""

_EVIDENCE = 16
"""Ids that are certain evidence together, though each of them may be chance."""


def written_type(ids_T: np.ndarray, vocab_size: int) -> np.dtype | None:
    """Returns the type that ids were written in, where it is certain that it is not the one that they are read in.

    That is where some are no ids of the vocabulary, or where every second one is what the upper half of a wider integer
    is, and where neither is so for the same bytes in the type that is returned.

    Args:
        ids_T: integers [T], as they are read.
        vocab_size: ids of the tokenizer.

    Returns:
        The type; None where the ids may be what they are, or no other type explains them.
    """
    if _may_be_ids(ids_T, vocab_size):
        return None
    content_F = np.ascontiguousarray(ids_T).view(np.uint8)
    for name in _TYPES:
        dtype = np.dtype(name)
        count = len(content_F) // dtype.itemsize
        if dtype == ids_T.dtype or count < _EVIDENCE:
            continue
        if _may_be_ids(content_F[: count * dtype.itemsize].view(dtype), vocab_size):
            return dtype
    return None


def _may_be_ids(ids_T: np.ndarray, vocab_size: int) -> bool:
    if not len(ids_T) or int(ids_T.min()) < 0 or int(ids_T.max()) >= vocab_size:
        return not len(ids_T)
    # The largest upper half of an id of twice the width.
    upper = (vocab_size - 1) >> (8 * ids_T.dtype.itemsize)
    little_T, big_T = ids_T.view(ids_T.dtype.newbyteorder("<")), ids_T.view(ids_T.dtype.newbyteorder(">"))
    return not (_are_halves(little_T[1::2], little_T[0::2], upper) or _are_halves(big_T[0::2], big_T[1::2], upper))


def _are_halves(upper_T: np.ndarray, lower_T: np.ndarray, most: int) -> bool:
    """Returns whether ids are the halves of wider ones, whose upper halves are at most `most`."""
    if not len(upper_T) or int(upper_T.max()) > most or int(upper_T.min()) < 0:
        return False
    return bool(np.count_nonzero(lower_T > most) >= _EVIDENCE)
