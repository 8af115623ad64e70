"""The cache plan of a configuration, with its caches and their builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import read_manifest
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.config import DataConfig
from lm_trainer.data.tokenize.build import Build, BuildOptions
from lm_trainer.data.tokenize.cache_spec import CacheSpec, find_caches
from lm_trainer.data.tokenize.finished_cache import FinishedCache
from lm_trainer.data.tokenize.progress import OnProgress
from lm_trainer.data.tokenize.ray_config import RayConfig
from lm_trainer.data.tokenize.ready_rows import ReadyRows
from lm_trainer.data.tokenize.tokenizer_setup import find_tokenizer, prepare_tokenizer, save_tokenizer
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.data.tokenizer.fast import choose_backend

Builds = dict[str, Build | FinishedCache | ReadyRows]
"""Builds, keyed by `NAME/train` and `NAME/validation`."""


@dataclass(frozen=True)
class CachePlan:
    """The caches of a configuration, built or not."""

    directory: str
    """The directory of the tokenizer, and of all caches that have no separate directory."""
    tokenizer: HfTokenizer
    builds: Builds

    @property
    def directories(self) -> list[str]:
        """The directories of all caches: `directory`, if it holds any cache, and the directories outside it."""
        root = KvStore(self.directory).url
        parents = dict.fromkeys(build.store.url.rpartition("/")[0] for build in self.builds.values())
        outside = [url for url in parents if url != root and not url.startswith(f"{root}/")]
        return [*([self.directory] if len(outside) < len(parents) else []), *outside]


def plan_caches(config: DataConfig, on_progress: OnProgress | None = None, ray: RayConfig | None = None) -> CachePlan:
    """Lists the sources and loads the tokenizer, or trains it if necessary. Does not tokenise.

    Raises:
        UserError: if data are missing, or the tokenizer was trained with a different recipe.
    """
    directory, caches = find_caches(config)
    return plan_builds(config, directory, caches, prepare_tokenizer(config, directory, caches, on_progress), ray)


def plan_builds(
    config: DataConfig,
    directory: str,
    caches: Mapping[str, CacheSpec],
    tokenizer: HfTokenizer,
    ray: RayConfig | None = None,
) -> CachePlan:
    """Plans the given caches of a configuration for a tokenizer, with the backend set in `data.tokenizer_backend`."""
    missing = [cache.shards for cache in caches.values() if not Ledger.read(KvStore(cache.url)).finished]
    tokenizer = choose_backend(tokenizer, config.tokenizer_backend, missing, _find_backend(caches))
    return CachePlan(directory, tokenizer, _make_builds(config, caches, tokenizer, ray))


def open_builds(config: DataConfig, directory: str, caches: Mapping[str, CacheSpec]) -> Builds:
    """Makes the builds of `plan_caches` for reading their ledgers, without training a tokenizer or comparing backends.

    Args:
        config: the `data` section.
        directory: the common directory returned by `find_caches`.
        caches: the caches returned by `find_caches`.

    Raises:
        UserError: if the tokenizer is missing.
    """
    tokenizer = find_tokenizer(config, directory, caches)
    return _make_builds(config, caches, choose_backend(tokenizer, config.tokenizer_backend, [], _find_backend(caches)))


def find_mismatches(config: DataConfig, directory: str, caches: Mapping[str, CacheSpec]) -> dict[str, str]:
    """Finds existing caches that training would reject, and returns the reasons. Changes no file."""
    begun = [name for name, cache in caches.items() if cache.begun]
    if not begun:
        return {}
    misfits: dict[str, str] = {}
    try:
        builds = open_builds(config, directory, caches)
    except UserError as error:
        return dict.fromkeys(begun, str(error))
    for name in begun:
        try:
            builds[name].read_ledger()
        except UserError as error:
            misfits[name] = str(error)
    return misfits


def _make_builds(
    config: DataConfig, caches: Mapping[str, CacheSpec], tokenizer: HfTokenizer, ray: RayConfig | None = None
) -> Builds:
    options = BuildOptions(config.num_workers, config.on_bad_row == "raise", config.max_bad_rows, ray=ray)
    builds: Builds = {}
    for name, cache in caches.items():
        store, format = KvStore(cache.url), cache.config.format
        if cache.prebuilt:
            builds[name] = FinishedCache(cache.title, store, cache.shards, tokenizer, format)
        elif cache.config.gives_rows:
            builds[name] = ReadyRows(cache.title, store, cache.shards, tokenizer, format)
        else:
            # Saved only when the build begins, so that a directory with another cache is left unchanged.
            on_begin = partial(save_tokenizer, tokenizer, KvStore(store.url.rpartition("/")[0]))
            builds[name] = Build(cache.title, store, cache.shards, tokenizer, options, format, on_begin)
    return builds


def _find_backend(caches: Mapping[str, CacheSpec]) -> str | None:
    """Returns the tokenizer backend with which the first existing cache was built; None if no cache exists."""
    for cache in (cache for cache in caches.values() if not cache.prebuilt):
        if (manifest := read_manifest(KvStore(cache.url))) is not None:
            return manifest["tokenizer"].get("backend")
    return None
