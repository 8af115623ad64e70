"""Dtypes of token ids: detects ids that were written with a different dtype than the one used to read them.

Shape letters: T tokens, F bytes.
"""

from __future__ import annotations

import numpy as np

_TYPES = ("<u2", "<u4", "<i8", ">u2", ">u4", ">i8")
"""Possible dtypes of ids, in order of likelihood."""

_EVIDENCE = 16
"""Number of suspicious ids that together are certain evidence, although each may occur by chance."""


def find_written_dtype(ids_T: np.ndarray, vocab_size: int) -> np.dtype | None:
    """Returns the dtype with which the ids were written, if it certainly differs from the one used to read them.

    This is certain if some ids are outside the vocabulary or every second id looks like the upper half of a wider
    integer, and the same bytes show neither of these signs when read with the returned dtype.

    Args:
        ids_T: integers [T], the ids as read.
        vocab_size: vocabulary size of the tokenizer.

    Returns:
        The dtype; None if the ids may be correct, or no other dtype explains them.
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
    # The largest possible upper half of an id with twice the width.
    upper = (vocab_size - 1) >> (8 * ids_T.dtype.itemsize)
    little_T, big_T = ids_T.view(ids_T.dtype.newbyteorder("<")), ids_T.view(ids_T.dtype.newbyteorder(">"))
    return not (_are_halves(little_T[1::2], little_T[0::2], upper) or _are_halves(big_T[0::2], big_T[1::2], upper))


def _are_halves(upper_T: np.ndarray, lower_T: np.ndarray, limit: int) -> bool:
    """Returns True if the ids are the halves of wider ids whose upper halves are at most `limit`."""
    if not len(upper_T) or int(upper_T.max()) > limit or int(upper_T.min()) < 0:
        return False
    return bool(np.count_nonzero(lower_T > limit) >= _EVIDENCE)
