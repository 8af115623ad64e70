"""Caches that a configuration needs: their directories, and the shards that go into them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_trainer.data.cache.format import MANIFEST, damaged, fingerprint
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.config import DataConfig, SetConfig
from lm_trainer.data.sources import Shard
from lm_trainer.data.sources.prebuilt import PrebuiltCache
from lm_trainer.data.tokenize.manifest import make_manifest
from lm_trainer.data.tokenizer import TrainedBpe
from lm_trainer.data.tokenizer.bytes import ByteTokenizer

DEFAULT_CACHE = "cache"

Shards = dict[str, dict[str, list[Shard]]]
"""The shards of every split of every set."""


@dataclass(frozen=True)
class CacheSpec:
    """A cache, built or not: its place, and all that goes into it but the tokenizer."""

    title: str
    url: str
    shards: list[Shard]
    config: SetConfig

    @property
    def prebuilt(self) -> bool:
        return isinstance(self.config.source, PrebuiltCache)

    @property
    def begun(self) -> bool:
        """True if anything was built there, even if it has lost its manifest."""
        store = KvStore(self.url)
        return store.read(MANIFEST) is not None or Ledger.read(store).begun


def find_caches(config: DataConfig) -> tuple[str, dict[str, CacheSpec]]:
    """Returns the directory of all caches, and each by `NAME/train` and `NAME/validation`.

    Raises:
        UserError: for missing data.
    """
    shards = {name: _shards(config, name) for name in config.sets}
    cache_dir = config.cache_dir or _default_directory(config, config, shards)
    caches = {}
    for name, one in config.sets.items():
        directory = cache_dir if one is config else one.cache_dir or _set_directory(config, one, name, shards)
        for split in (split for split, found in shards[name].items() if found):
            title = split if one is config else f"{name} {split}"
            if isinstance(one.source, PrebuiltCache):
                directory = one.source.path
                _check_manifests(directory)
            caches[f"{name}/{split}"] = CacheSpec(title, f"{directory}/{split}", shards[name][split], one)
    return cache_dir, caches


def _check_manifests(directory: str) -> None:
    """Refuses splits that have lost their manifest, by which they are told from splits that were never there."""
    for store in (KvStore(f"{directory}/{split}") for split in ("train", "validation")):
        if store.read(MANIFEST) is None and Ledger.read(store).begun:
            raise damaged(store, MANIFEST, "is missing")


def _shards(config: DataConfig, name: str) -> dict[str, list[Shard]]:
    one = config.sets[name]
    return {"train": one.shards("train") if name in config.trained else [], "validation": one.shards("validation")}


def _set_directory(config: DataConfig, one: SetConfig, name: str, shards: Shards) -> str:
    """Returns the directory of a set of a mixture; it depends on the other sets only if the tokenizer does."""
    return f"{config.cache_dir}/{name}" if config.cache_dir else _default_directory(config, one, {name: shards[name]})


def _default_directory(config: DataConfig, one: SetConfig, shards: Shards) -> str:
    """Returns a directory below `cache/` that changes with the source and the tokenizer."""
    kind = "mixture" if one is config and config.configs else getattr(one.source_config, "type", "files")
    wanted = config.tokenizer_config
    recipe: Any = wanted.model_dump()
    if isinstance(wanted, TrainedBpe):
        # A tokenizer that is trained here depends on the train text of all sets.
        recipe = wanted.recipe([shard for name in config.sets for shard in _shards(config, name)["train"]])
    # The tokenizer itself may not exist yet, so its recipe stands for it, and any tokenizer will do in the manifests.
    manifests: dict[str, Any] = {
        split: make_manifest([shard for found in shards.values() for shard in found[split]], ByteTokenizer())
        for split in ("train", "validation")
    }
    if one.format.fields():
        manifests["format"] = one.format.cached_settings()
    return str(Path(DEFAULT_CACHE) / f"{kind}-{fingerprint({'tokenizer': recipe, **manifests})[:12]}")
