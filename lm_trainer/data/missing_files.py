"""Checks the `data` section for missing files, globs without matches, and missing tokenizers. Reads no text."""

from __future__ import annotations

from collections.abc import Iterator

from lm_trainer.core.errors import UserError
from lm_trainer.data.config import DataConfig, SetConfig
from lm_trainer.data.sources import Split
from lm_trainer.data.tokenizer import Pretrained
from lm_trainer.data.tokenizer.hf import find_pretrained


def find_missing_data(config: DataConfig, *, network: bool) -> Iterator[tuple[str, str]]:
    """Yields the missing inputs of training, as (dotted key below `data`, reason).

    Args:
        config: the `data` section.
        network: True to also check object storage, web servers and the hub. Otherwise, only the tokenizer is looked up
            remotely.
    """
    tokenizer = config.tokenizer_config
    if isinstance(tokenizer, Pretrained):
        try:
            find_pretrained(tokenizer)
        except UserError as error:
            yield "tokenizer", str(error).removeprefix("data.tokenizer: ")
    yield from find_missing_text(config, network=network)


def find_missing_text(config: DataConfig, *, network: bool) -> Iterator[tuple[str, str]]:
    """Yields the missing text of training; arguments and results as for `find_missing_data`."""
    for name, set_config in config.sets.items():
        prefix = f"configs.{name}." if config.configs else ""
        previous_reason = ""
        for split, key in _SPLITS:
            if network or _is_local(set_config, split):
                try:
                    set_config.shards(split)
                except UserError as error:
                    reason = str(error)
                    for error_prefix in ("data.train_urls: ", "data.validation_urls: ", "data.id: "):
                        reason = reason.removeprefix(error_prefix)
                    # Both splits of a hub data set report the same error.
                    if not set_config.id or reason != previous_reason:
                        yield f"{prefix}{'id' if set_config.id else key}", reason
                    previous_reason = reason


_SPLITS: tuple[tuple[Split, str], ...] = (("train", "train_urls"), ("validation", "validation_urls"))


def _is_local(set_config: SetConfig, split: Split) -> bool:
    urls = (set_config.train_urls or []) if split == "train" else set_config.validation_urls
    return (
        set_config.id is None and bool(urls) and not any("://" in url and not url.startswith("file://") for url in urls)
    )
