"""The caches that a configuration needs: their directories and input shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lm_trainer.data.cache.format import MANIFEST, damage_error, fingerprint
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
"""The shards of every set and split."""


@dataclass(frozen=True)
class CacheSpec:
    """A cache, built or not: its location and its inputs, except the tokenizer."""

    title: str
    url: str
    shards: list[Shard]
    config: SetConfig

    @property
    def prebuilt(self) -> bool:
        return isinstance(self.config.source, PrebuiltCache)

    @property
    def begun(self) -> bool:
        """True if the directory holds any part of a cache, even without its manifest."""
        store = KvStore(self.url)
        return store.read(MANIFEST) is not None or Ledger.read(store).begun


def find_caches(config: DataConfig) -> tuple[str, dict[str, CacheSpec]]:
    """Returns the common cache directory, and every cache keyed by `NAME/train` and `NAME/validation`.

    Raises:
        UserError: if data are missing.
    """
    shards = {name: _list_set_shards(config, name) for name in config.sets}
    cache_dir = config.cache_dir or _default_directory(config, config, shards)
    caches = {}
    for name, set_config in config.sets.items():
        directory = (
            cache_dir
            if set_config is config
            else set_config.cache_dir or _choose_set_directory(config, set_config, name, shards)
        )
        for split in (split for split, split_shards in shards[name].items() if split_shards):
            title = split if set_config is config else f"{name} {split}"
            if isinstance(set_config.source, PrebuiltCache):
                directory = set_config.source.path
                _check_manifests(directory)
            caches[f"{name}/{split}"] = CacheSpec(title, f"{directory}/{split}", shards[name][split], set_config)
    return cache_dir, caches


def _check_manifests(directory: str) -> None:
    """Rejects splits that have lost their manifest. Without one, they would look as if they had never existed."""
    for store in (KvStore(f"{directory}/{split}") for split in ("train", "validation")):
        if store.read(MANIFEST) is None and Ledger.read(store).begun:
            raise damage_error(store, MANIFEST, "is missing")


def _list_set_shards(config: DataConfig, name: str) -> dict[str, list[Shard]]:
    set_config = config.sets[name]
    return {
        "train": set_config.shards("train") if name in config.trained else [],
        "validation": set_config.shards("validation"),
    }


def _choose_set_directory(config: DataConfig, set_config: SetConfig, name: str, shards: Shards) -> str:
    """Returns the directory of one set of a mixture. It depends on the other sets only if the tokenizer does."""
    return (
        f"{config.cache_dir}/{name}"
        if config.cache_dir
        else _default_directory(config, set_config, {name: shards[name]})
    )


def _default_directory(config: DataConfig, set_config: SetConfig, shards: Shards) -> str:
    """Returns a directory below `cache/` whose name is a hash of the source and the tokenizer."""
    kind = "mixture" if set_config is config and config.configs else getattr(set_config.source_config, "type", "files")
    tokenizer = config.tokenizer_config
    recipe: dict[str, object] = tokenizer.model_dump()
    if isinstance(tokenizer, TrainedBpe):
        # A trained tokenizer depends on the training text of all sets.
        recipe = tokenizer.recipe([shard for name in config.sets for shard in _list_set_shards(config, name)["train"]])
    # The tokenizer may not exist yet, so the hash covers its recipe, and any tokenizer will do for the manifests.
    manifests: dict[str, object] = {
        split: make_manifest(
            [shard for split_shards in shards.values() for shard in split_shards[split]], ByteTokenizer()
        )
        for split in ("train", "validation")
    }
    if set_config.format.fields():
        manifests["format"] = set_config.format.settings_for_cache()
    return str(Path(DEFAULT_CACHE) / f"{kind}-{fingerprint({'tokenizer': recipe, **manifests})[:12]}")
