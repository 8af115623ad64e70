"""Row formats, which turn rows into tokens. To add a format, write one file and add one line to the union."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lm_trainer.data.formats.audio import AudioFormat
from lm_trainer.data.formats.base import EncodedDocument, FormatConfig, PreparedRow, UnusableRow
from lm_trainer.data.formats.chat import ChatFormat
from lm_trainer.data.formats.ids import IdsFormat
from lm_trainer.data.formats.preference import PreferenceFormat, UnpairedPreferenceFormat
from lm_trainer.data.formats.supervised import SupervisedFormat
from lm_trainer.data.formats.text import TextFormat

AnyFormat = Annotated[
    TextFormat | ChatFormat | SupervisedFormat | PreferenceFormat | UnpairedPreferenceFormat | IdsFormat | AudioFormat,
    Field(discriminator="type"),
]

__all__ = [
    "AnyFormat",
    "AudioFormat",
    "ChatFormat",
    "EncodedDocument",
    "FormatConfig",
    "IdsFormat",
    "PreferenceFormat",
    "PreparedRow",
    "SupervisedFormat",
    "TextFormat",
    "UnpairedPreferenceFormat",
    "UnusableRow",
]
