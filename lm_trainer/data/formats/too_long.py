"""Treatment of prompts with answers that are longer than a training row."""

from __future__ import annotations

from typing import ClassVar, Literal

from lm_trainer.data.formats.base import FormatConfig

TooLong = Literal["skip", "left", "right", "split", "raise"]
"""Treatment of a document that is longer than a row."""


class ConversationFormat(FormatConfig):
    """Base of formats whose documents are conversations, or prompts with an answer."""

    on_too_long: TooLong = "skip"
    """Treatment of a row that is longer than `model.seq_len`: `skip` leaves it out; `right` cuts off its end, and
    `left` its beginning, as far as necessary; `split` continues it in further training rows, where answers have lost
    their prompts; `raise` stops with an error. The number of such rows is reported. With `data.packing: concat`, rows
    are always split."""

    has_loss_mask: ClassVar[bool] = True
    has_prompts: ClassVar[bool] = True
    row_keys: ClassVar[frozenset[str]] = frozenset({"on_too_long"})
