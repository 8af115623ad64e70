"""Tokenizers. To add a kind, write one file, and add one line to the union and one case to `make_tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from lm_trainer.data.tokenizer.base import HfTokenizer, Tokenizer, TokenizerConfig
from lm_trainer.data.tokenizer.bytes import CONTENT, BytesTokenizer, ByteTokenizer
from lm_trainer.data.tokenizer.hf import Pretrained, load_pretrained
from lm_trainer.data.tokenizer.trained import TrainedBpe, train_bpe

AnyTokenizer = Annotated[
    TrainedBpe | BytesTokenizer | Pretrained,
    Field(discriminator="type"),
]


def tokenizer_config(value: str | TokenizerConfig | None) -> TokenizerConfig:
    """Expands short forms. None trains a tokenizer, `bytes` means byte tokens, and other text is a path or hub name."""
    if value is None:
        return TrainedBpe()
    if isinstance(value, str):
        return BytesTokenizer() if value == "bytes" else Pretrained(name=value)
    return value


def load_tokenizer(directory: str | Path) -> HfTokenizer:
    """Reads the files written by `Tokenizer.save`.

    Raises:
        UserError: if the tokenizer is missing or damaged.
    """
    # The trailing slash marks a path, so that a missing directory is not looked up on the hub.
    tokenizer = load_pretrained(Pretrained(name=f"{Path(directory).absolute()}/"))
    if tokenizer.files()["tokenizer.json"] == CONTENT.encode():
        return tokenizer.with_backend(ByteTokenizer)
    return tokenizer


__all__ = [
    "AnyTokenizer",
    "BytesTokenizer",
    "HfTokenizer",
    "Pretrained",
    "Tokenizer",
    "TokenizerConfig",
    "TrainedBpe",
    "load_tokenizer",
    "tokenizer_config",
    "train_bpe",
]
