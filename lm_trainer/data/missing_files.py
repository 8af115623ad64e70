"""Check of the `data` section against what is there: files, globs and the tokenizer. Reads no text."""

from __future__ import annotations

from collections.abc import Iterator

from lm_trainer.core.errors import UserError
from lm_trainer.data.config import DataConfig, SetConfig
from lm_trainer.data.sources import Split
from lm_trainer.data.tokenizer import Pretrained
from lm_trainer.data.tokenizer.hf import find_pretrained


def missing_data(config: DataConfig, *, network: bool) -> Iterator[tuple[str, str]]:
    """Yields what training would not find, as (dotted key below `data`, reason).

    Args:
        config: the section.
        network: also look for what is in object storage, on a web server or on the hub; without, only the tokenizer is
            looked for there.
    """
    tokenizer = config.tokenizer_config
    if isinstance(tokenizer, Pretrained):
        try:
            find_pretrained(tokenizer)
        except UserError as error:
            yield "tokenizer", str(error).removeprefix("data.tokenizer: ")
    for name, one in config.sets.items():
        prefix = f"configs.{name}." if config.configs else ""
        told = ""
        for split, key in _SPLITS:
            if network or _is_local(one, split):
                try:
                    one.shards(split)
                except UserError as error:
                    reason = str(error)
                    for known in ("data.train_urls: ", "data.validation_urls: ", "data.id: "):
                        reason = reason.removeprefix(known)
                    # Both splits of a data set of the hub miss the same.
                    if not one.id or reason != told:
                        yield f"{prefix}{'id' if one.id else key}", reason
                    told = reason


_SPLITS: tuple[tuple[Split, str], ...] = (("train", "train_urls"), ("validation", "validation_urls"))


def _is_local(one: SetConfig, split: Split) -> bool:
    urls = (one.train_urls or []) if split == "train" else one.validation_urls
    return one.id is None and bool(urls) and not any("://" in url and not url.startswith("file://") for url in urls)
