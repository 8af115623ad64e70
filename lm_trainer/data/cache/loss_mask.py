"""The loss mask of a cache, which is stored with the tokens if the data format has one.

The mask value of a token has two bits: one marks loss targets, the other marks the ends of documents.

Shape letters: D documents, T tokens, F bytes of a mask file.
"""

from __future__ import annotations

import numpy as np

from lm_trainer.data.cache.checksums import Sliceable
from lm_trainer.data.cache.token_stream import TokenStream

IN_LOSS, DOCUMENT_END = 1, 2
"""The two bits of a mask value. With a mask, only DOCUMENT_END ends a document, as EOS may also occur inside one."""

_PER_BYTE = 4


def pack_loss_mask(in_loss_T: np.ndarray, lengths_D: np.ndarray) -> bytes:
    """Encodes the mask file of a part, with two bits per token and the first token in the lowest bits.

    Args:
        in_loss_T: bool [T], True for tokens that count in the loss.
        lengths_D: int [D], number of tokens of each document; no document is empty.
    """
    # Padded to full bytes. The unused bits of the last byte are 0, so that equal masks give equal files.
    values = np.zeros(-(-len(in_loss_T) // _PER_BYTE) * _PER_BYTE, np.uint8)
    values[: len(in_loss_T)] = in_loss_T * np.uint8(IN_LOSS)
    values[np.cumsum(lengths_D) - 1] |= DOCUMENT_END
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    return np.bitwise_or.reduce(values.reshape(-1, _PER_BYTE) << shifts, axis=1).astype(np.uint8).tobytes()


def mask_byte_range(start: int, count: int) -> tuple[int, int]:
    """Returns the range [first, last) of a mask file's bytes with the values of `count` tokens from `start` on."""
    return start // _PER_BYTE, -(-(start + count) // _PER_BYTE)


def unpack_loss_mask(content_F: np.ndarray, start: int, count: int) -> np.ndarray:
    """Decodes the mask values of `count` tokens.

    Args:
        content_F: uint8 [F], the mask file starting at the byte of token `start`.
        start: index of the first token in the part.
        count: T.

    Returns:
        uint8 [T], each the sum of any of IN_LOSS and DOCUMENT_END.
    """
    shifts = np.arange(0, 8, 2, dtype=np.uint8)
    # The first token may start inside a byte, whose lower bits then belong to earlier tokens.
    first_offset = start % _PER_BYTE
    used = np.asarray(content_F[: -(-(first_offset + count) // _PER_BYTE)], np.uint8)
    return ((used[:, None] >> shifts) & np.uint8(IN_LOSS | DOCUMENT_END)).reshape(-1)[
        first_offset : first_offset + count
    ]


class LossMaskStream(TokenStream):
    """The mask values of a stream, at the same positions as its tokens."""

    _kind = "msk"

    def _byte_range(self, start: int, count: int) -> tuple[int, int]:
        return mask_byte_range(start, count)

    def _decode(self, content: bytes, start: int, count: int) -> np.ndarray:
        return unpack_loss_mask(np.frombuffer(content, np.uint8), start, count)

    def _view_items(self, content_F: np.ndarray) -> Sliceable:
        return _PackedMask(content_F)


class _PackedMask:
    """A mask file that can be sliced like an array with one value per token."""

    def __init__(self, content_F: np.ndarray):
        self._content_F = content_F

    def __getitem__(self, tokens: slice) -> np.ndarray:
        first, last = mask_byte_range(tokens.start, tokens.stop - tokens.start)
        return unpack_loss_mask(self._content_F[first:last], tokens.start, tokens.stop - tokens.start)
