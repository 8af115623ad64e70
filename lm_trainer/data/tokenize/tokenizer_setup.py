"""Tokenizer of a configuration: named, lying beside a cache, or trained here and kept beside the caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.key_values import MISSING
from lm_trainer.data.cache.format import fingerprint, read_manifest
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.config import DataConfig
from lm_trainer.data.sources import Shard
from lm_trainer.data.sources.prebuilt import PrebuiltCache
from lm_trainer.data.sources.tokens import TokenShard
from lm_trainer.data.tokenize.cache_spec import CacheSpec
from lm_trainer.data.tokenize.progress import BuildProgress, OnProgress
from lm_trainer.data.tokenizer import BytesTokenizer, HfTokenizer, Pretrained, TokenizerConfig, TrainedBpe, train_bpe
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.data.tokenizer.files import TOKENIZER_FILE
from lm_trainer.data.tokenizer.hf import load_pretrained

_CONTENT, _RECIPE = f"tokenizer/{TOKENIZER_FILE}", "tokenizer/recipe.json"


def prepare_tokenizer(
    config: DataConfig, cache_dir: str, caches: Mapping[str, CacheSpec], on_progress: OnProgress | None = None
) -> HfTokenizer:
    """Loads the tokenizer, or trains it where none was trained yet, and keeps it in `cache_dir`.

    Raises:
        UserError: for a tokenizer that is not there, or was trained by another recipe.
    """
    wanted = _wanted(config)
    if not isinstance(wanted, TrainedBpe):
        return _load_named(wanted)
    store, shards = KvStore(cache_dir), _train_shards(caches)
    recipe = wanted.recipe(shards)
    tokenizer = _read_trained(store, recipe)
    if tokenizer is not None:
        return tokenizer
    if on_progress:
        on_progress(BuildProgress("tokenizer", 0, wanted.sample_bytes, 0))
    tokenizer = train_bpe(wanted, shards)
    # Another process may have trained the same one meanwhile.
    if store.read(_RECIPE) is None and _fits(caches, tokenizer):
        _write(tokenizer, store)
        # The recipe is the commit: without it the files beside it do not count.
        store.write_json(_RECIPE, recipe, if_generation=MISSING)
    return tokenizer


def find_tokenizer(config: DataConfig, cache_dir: str, caches: Mapping[str, CacheSpec]) -> HfTokenizer:
    """Loads the tokenizer; trains none.

    Raises:
        UserError: for a tokenizer that is not there, or was trained by another recipe.
    """
    wanted = _wanted(config)
    if not isinstance(wanted, TrainedBpe):
        return _load_named(wanted)
    store = KvStore(cache_dir)
    tokenizer = _read_trained(store, wanted.recipe(_train_shards(caches)))
    if tokenizer is None:
        raise UserError(
            f"no tokenizer was trained in {store.url}/tokenizer, so the caches were built with another one, or it was "
            "lost; lmt data build trains it and compares"
        )
    return tokenizer


def keep_beside(tokenizer: HfTokenizer, store: KvStore) -> None:
    """Saves the tokenizer for those who open the cache without the configuration that built it."""
    if store.read(_CONTENT) is None:
        _write(tokenizer, store)


def _wanted(config: DataConfig) -> TokenizerConfig:
    """Returns the tokenizer that is asked for; with a cache built elsewhere, by default the one beside it."""
    if config.tokenizer is not None or not isinstance(config.source, PrebuiltCache):
        return config.tokenizer_config
    beside = KvStore(config.source.path)
    if beside.local is None:
        raise UserError(f"data.tokenizer: name the tokenizer that {beside.url} was built with")
    if not (beside.local / _CONTENT).is_file():
        raise UserError(
            f"data.tokenizer: none lies beside the cache, in {beside.local}/tokenizer; name the one that it was "
            "built with"
        )
    return Pretrained(name=f"{beside.local}/tokenizer")


def _load_named(wanted: TokenizerConfig) -> HfTokenizer:
    if isinstance(wanted, BytesTokenizer):
        return ByteTokenizer()
    assert isinstance(wanted, Pretrained)
    return load_pretrained(wanted)


def _train_shards(caches: Mapping[str, CacheSpec]) -> list[Shard]:
    shards = [shard for name, cache in caches.items() if name.endswith("/train") for shard in cache.shards]
    if any(isinstance(shard, TokenShard) for shard in shards):
        raise UserError(
            "data.tokenizer: name the tokenizer that the tokens were made with; none can be trained on them"
        )
    return shards


def _read_trained(store: KvStore, recipe: dict[str, Any]) -> HfTokenizer | None:
    """Reads the tokenizer that an earlier run trained by the same recipe; None if there is none."""
    found = store.read_json(_RECIPE)
    if found is None:
        return None
    if found != recipe:
        changed = [key for key in recipe if found.get(key) != recipe[key]]
        raise UserError(
            f"{store.url}/tokenizer was trained by another recipe ({fingerprint(found)}, now {fingerprint(recipe)}); "
            f"what differs: {', '.join(changed)}. Set data.cache_dir to another directory, or remove {store.url}"
        )
    content = store.read(_CONTENT)
    if content is None:
        raise UserError(f"{store.url}/tokenizer has lost tokenizer.json; remove {store.url} to build it again")
    return HfTokenizer(content.decode(), origin=f"{store.url}/tokenizer")


def _fits(caches: Mapping[str, CacheSpec], tokenizer: HfTokenizer) -> bool:
    """Returns true if every cache that exists was built with this tokenizer."""
    manifests = [read_manifest(KvStore(cache.url)) for cache in caches.values()]
    wanted = tokenizer.identity()["sha256"]
    return all(found is None or found["tokenizer"].get("sha256") == wanted for found in manifests)


def _write(tokenizer: HfTokenizer, store: KvStore) -> None:
    # The file by which others tell that there is a tokenizer comes last.
    for name, content in sorted(tokenizer.files().items(), key=lambda file: file[0] == TOKENIZER_FILE):
        store.write(f"tokenizer/{name}", content)
