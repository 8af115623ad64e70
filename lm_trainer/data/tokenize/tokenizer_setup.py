"""The tokenizer of a configuration: loaded by name or from a cache, or trained and stored with the caches."""

from __future__ import annotations

from collections.abc import Mapping

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
    """Loads the tokenizer, or trains it if necessary and saves it in `cache_dir`.

    Raises:
        UserError: if the tokenizer is missing, or was trained with a different recipe.
    """
    tokenizer_config = _choose_tokenizer_config(config)
    if not isinstance(tokenizer_config, TrainedBpe):
        return _load_named(tokenizer_config)
    store, shards = KvStore(cache_dir), _train_shards(caches)
    recipe = tokenizer_config.recipe(shards)
    tokenizer = _read_trained(store, recipe)
    if tokenizer is not None:
        return tokenizer
    if on_progress:
        on_progress(BuildProgress("tokenizer", 0, tokenizer_config.sample_bytes, 0))
    tokenizer = train_bpe(tokenizer_config, shards)
    # Another process may have trained the same tokenizer meanwhile.
    if store.read(_RECIPE) is None and _matches_tokenizer(caches, tokenizer):
        _write_tokenizer(tokenizer, store)
        # Writing the recipe commits the tokenizer, because the other files are ignored without it.
        store.write_json(_RECIPE, recipe, if_generation=MISSING)
    return tokenizer


def find_tokenizer(config: DataConfig, cache_dir: str, caches: Mapping[str, CacheSpec]) -> HfTokenizer:
    """Loads the tokenizer, but never trains one.

    Raises:
        UserError: if the tokenizer is missing, or was trained with a different recipe.
    """
    tokenizer_config = _choose_tokenizer_config(config)
    if not isinstance(tokenizer_config, TrainedBpe):
        return _load_named(tokenizer_config)
    store = KvStore(cache_dir)
    tokenizer = _read_trained(store, tokenizer_config.recipe(_train_shards(caches)))
    if tokenizer is None:
        raise UserError(
            f"no tokenizer was trained in {store.url}/tokenizer, so the caches were built with another one, or it was "
            "lost; lmt data build trains it and compares"
        )
    return tokenizer


def save_tokenizer(tokenizer: HfTokenizer, store: KvStore) -> None:
    """Saves the tokenizer with the caches, so that they can be opened without the configuration that built them."""
    if store.read(_CONTENT) is None:
        _write_tokenizer(tokenizer, store)


def _choose_tokenizer_config(config: DataConfig) -> TokenizerConfig:
    """Returns the `tokenizer` section.

    For a cache built elsewhere, it defaults to the tokenizer stored with the cache.
    """
    if config.tokenizer is not None or not isinstance(config.source, PrebuiltCache):
        return config.tokenizer_config
    store = KvStore(config.source.path)
    if store.local is None:
        raise UserError(f"data.tokenizer: name the tokenizer that {store.url} was built with")
    if not (store.local / _CONTENT).is_file():
        raise UserError(
            f"data.tokenizer: none lies beside the cache, in {store.local}/tokenizer; name the one that it was "
            "built with"
        )
    return Pretrained(name=f"{store.local}/tokenizer")


def _load_named(config: TokenizerConfig) -> HfTokenizer:
    if isinstance(config, BytesTokenizer):
        return ByteTokenizer()
    assert isinstance(config, Pretrained)
    return load_pretrained(config)


def _train_shards(caches: Mapping[str, CacheSpec]) -> list[Shard]:
    shards = [shard for name, cache in caches.items() if name.endswith("/train") for shard in cache.shards]
    if any(isinstance(shard, TokenShard) for shard in shards):
        raise UserError(
            "data.tokenizer: name the tokenizer that the tokens were made with; none can be trained on them"
        )
    return shards


def _read_trained(store: KvStore, recipe: Mapping[str, object]) -> HfTokenizer | None:
    """Reads the tokenizer that an earlier run trained with the same recipe; None if there is none."""
    recorded = store.read_json(_RECIPE)
    if recorded is None:
        return None
    if recorded != recipe:
        changed = [key for key in recipe if recorded.get(key) != recipe[key]]
        raise UserError(
            f"{store.url}/tokenizer was trained by another recipe ({fingerprint(recorded)}, now {fingerprint(recipe)})"
            f"; what differs: {', '.join(changed)}. Set data.cache_dir to another directory, or remove {store.url}"
        )
    content = store.read(_CONTENT)
    if content is None:
        raise UserError(f"{store.url}/tokenizer has lost tokenizer.json; remove {store.url} to build it again")
    return HfTokenizer(content.decode(), origin=f"{store.url}/tokenizer")


def _matches_tokenizer(caches: Mapping[str, CacheSpec], tokenizer: HfTokenizer) -> bool:
    """Returns True if every existing cache was built with this tokenizer."""
    manifests = [read_manifest(KvStore(cache.url)) for cache in caches.values()]
    sha256 = tokenizer.identity()["sha256"]
    return all(manifest is None or manifest["tokenizer"].get("sha256") == sha256 for manifest in manifests)


def _write_tokenizer(tokenizer: HfTokenizer, store: KvStore) -> None:
    # tokenizer.json is written last, because readers take its existence as a sign that the tokenizer is complete.
    for name, content in sorted(tokenizer.files().items(), key=lambda file: file[0] == TOKENIZER_FILE):
        store.write(f"tokenizer/{name}", content)
