"""Which caches a configuration needs, where they are, and what builds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.format import MANIFEST, Ledger, damaged, fingerprint, make_manifest
from lm_trainer.data.cache.kvstore import MISSING, Store
from lm_trainer.data.config import DataConfig, SetConfig
from lm_trainer.data.sources import Shard
from lm_trainer.data.sources.prebuilt import PrebuiltCache
from lm_trainer.data.tokenize.build import Build, BuildOptions, BuildProgress, OnProgress
from lm_trainer.data.tokenize.ray_backend import RayConfig
from lm_trainer.data.tokenizer import BytesTokenizer, HfTokenizer, Pretrained, TrainedBpe, train_bpe
from lm_trainer.data.tokenizer.base import TOKENIZER_FILE
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.data.tokenizer.fast import choose_backend
from lm_trainer.data.tokenizer.hf import load_pretrained

DEFAULT_CACHE = "cache"
_CONTENT, _RECIPE = f"tokenizer/{TOKENIZER_FILE}", "tokenizer/recipe.json"

Shards = dict[str, dict[str, list[Shard]]]
"""The shards of every split of every set."""


@dataclass(frozen=True)
class CachePlan:
    """The caches of a configuration, built or not."""

    directory: str
    """Where the tokenizer is, and the caches, but for those with a directory of their own."""
    tokenizer: HfTokenizer
    builds: dict[str, Build]
    """By `NAME/train` and `NAME/validation`."""

    @property
    def directories(self) -> list[str]:
        """Where the caches are: `directory`, if any is there, and those outside of it."""
        root = Store(self.directory).url
        found = dict.fromkeys(build.store.url.rpartition("/")[0] for build in self.builds.values())
        outside = [url for url in found if url != root and not url.startswith(f"{root}/")]
        return [*([self.directory] if len(outside) < len(found) else []), *outside]


@dataclass(frozen=True)
class Place:
    """A cache and what is to be in it."""

    title: str
    url: str
    shards: list[Shard]
    config: SetConfig

    @property
    def prebuilt(self) -> bool:
        return isinstance(self.config.source, PrebuiltCache)

    @property
    def begun(self) -> bool:
        """Whether anything was built there, even if it has lost its manifest."""
        store = Store(self.url)
        return store.read(MANIFEST) is not None or Ledger.read(store).begun


class OpenPrebuilt(Build):
    """Opens a cache that was built elsewhere, and builds nothing."""

    def run(self) -> Ledger:
        return self.look()

    def look(self) -> Ledger:
        ledger, manifest = Ledger.read(self.store), self.manifest()
        if not ledger.finished:
            raise UserError(f"{self.store.url} is not finished; build it where it was begun, with: lmt data build")
        found, wanted = manifest["tokenizer"], self.tokenizer.identity()
        wrong = [key for key in wanted if found.get(key) != wanted[key]]
        if wrong:
            lines = "\n".join(f"  {key}: the cache has {found.get(key)}, now {wanted[key]}" for key in wrong)
            raise UserError(f"{self.store.url} was built with another tokenizer than data.tokenizer:\n{lines}")
        return ledger

    def manifest(self) -> dict[str, Any]:
        return self.store.read_json(MANIFEST) or {}


def plan_caches(config: DataConfig, on_progress: OnProgress | None = None, ray: RayConfig | None = None) -> CachePlan:
    """Lists the sources and loads the tokenizer, or trains it where none was trained yet; tokenises nothing.

    Raises:
        UserError: for missing data, or a tokenizer that was trained by another recipe.
    """
    directory, places = find_caches(config)
    tokenizer = _tokenizer(config, directory, places, on_progress)
    missing = [place.shards for place in places.values() if not Ledger.read(Store(place.url)).finished]
    tokenizer = choose_backend(tokenizer, config.tokenizer_backend, missing, _built_with(places))
    return CachePlan(directory, tokenizer, _builds(config, places, tokenizer, on_progress, ray))


def open_builds(config: DataConfig, directory: str, places: dict[str, Place]) -> dict[str, Build]:
    """The builds of `plan_caches`, to `look` at what is there: trains no tokenizer, and reads no text to compare any.

    Args:
        config: what is or was built.
        directory: as `find_caches` gives it, with the places.
        places: where it is.

    Raises:
        UserError: for a tokenizer that is not there.
    """
    tokenizer = _tokenizer(config, directory, places, train=False)
    return _builds(config, places, choose_backend(tokenizer, config.tokenizer_backend, [], _built_with(places)))


def find_misfits(config: DataConfig, directory: str, places: dict[str, Place]) -> dict[str, str]:
    """Why training would refuse caches that were begun, by `NAME/train` and `NAME/validation`; changes nothing."""
    begun = [name for name, place in places.items() if place.begun]
    if not begun:
        return {}
    found: dict[str, str] = {}
    try:
        builds = open_builds(config, directory, places)
    except UserError as error:
        return dict.fromkeys(begun, str(error))
    for name in begun:
        try:
            builds[name].look()
        except UserError as error:
            found[name] = str(error)
    return found


def _builds(
    config: DataConfig,
    places: dict[str, Place],
    tokenizer: HfTokenizer,
    on_progress: OnProgress | None = None,
    ray: RayConfig | None = None,
) -> dict[str, Build]:
    options = BuildOptions(config.num_workers, config.on_bad_row == "raise", config.max_bad_rows, ray=ray)
    builds: dict[str, Build] = {}
    for name, place in places.items():
        kind = OpenPrebuilt if place.prebuilt else Build
        store, format = Store(place.url), place.config.format
        build = kind(place.title, store, place.shards, tokenizer, options, on_progress, format)
        build.on_begin = partial(_keep_beside, tokenizer, Store(store.url.rpartition("/")[0]))
        builds[name] = build
    return builds


def _built_with(places: dict[str, Place]) -> str | None:
    """The backend of the tokenizer that the first cache was built with; None where there is none yet."""
    for place in (place for place in places.values() if not place.prebuilt):
        if (manifest := Store(place.url).read_json(MANIFEST)) is not None:
            return manifest.get("tokenizer", {}).get("backend")
    return None


def find_caches(config: DataConfig) -> tuple[str, dict[str, Place]]:
    """The directory of all, and every cache by `NAME/train` and `NAME/validation`.

    Raises:
        UserError: for missing data.
    """
    shards = {name: _shards(config, name) for name in config.sets}
    cache_dir = config.cache_dir or _default_directory(config, config, shards)
    places = {}
    for name, one in config.sets.items():
        directory = cache_dir if one is config else one.cache_dir or _set_directory(config, one, name, shards)
        for split in (split for split, found in shards[name].items() if found):
            title = split if one is config else f"{name} {split}"
            if isinstance(one.source, PrebuiltCache):
                directory = one.source.path
                _check_manifests(directory)
            places[f"{name}/{split}"] = Place(title, f"{directory}/{split}", shards[name][split], one)
    return cache_dir, places


def _check_manifests(directory: str) -> None:
    """Refuses splits that have lost what tells them from splits that were never there."""
    for store in (Store(f"{directory}/{split}") for split in ("train", "validation")):
        if store.read(MANIFEST) is None and Ledger.read(store).begun:
            raise damaged(store, MANIFEST, "is missing")


def _shards(config: DataConfig, name: str) -> dict[str, list[Shard]]:
    one = config.sets[name]
    return {"train": one.shards("train") if name in config.trained else [], "validation": one.shards("validation")}


def _set_directory(config: DataConfig, one: SetConfig, name: str, shards: Shards) -> str:
    """Where a set of a mixture has its cache: it does not depend on the other sets, unless the tokenizer does."""
    return f"{config.cache_dir}/{name}" if config.cache_dir else _default_directory(config, one, {name: shards[name]})


def _default_directory(config: DataConfig, one: SetConfig, shards: Shards) -> str:
    """A directory below `cache/` that changes with the source and the tokenizer."""
    kind = "mixture" if one is config and config.configs else getattr(one.source_config, "type", "files")
    wanted = config.tokenizer_config
    recipe: Any = wanted.model_dump()
    if isinstance(wanted, TrainedBpe):
        recipe = wanted.recipe([shard for name in config.sets for shard in _shards(config, name)["train"]])
    manifests: dict[str, Any] = {
        split: make_manifest([shard for found in shards.values() for shard in found[split]], ByteTokenizer())
        for split in ("train", "validation")
    }
    if one.format.fields():
        manifests["format"] = one.format.model_dump()
    return str(Path(DEFAULT_CACHE) / f"{kind}-{fingerprint({'tokenizer': recipe, **manifests})[:12]}")


def _tokenizer(
    config: DataConfig,
    cache_dir: str,
    places: dict[str, Place],
    on_progress: OnProgress | None = None,
    *,
    train: bool = True,
) -> HfTokenizer:
    wanted = config.tokenizer_config
    if config.tokenizer is None and isinstance(config.source, PrebuiltCache):
        beside = Store(config.source.path)
        if beside.local is None:
            raise UserError(f"data.tokenizer: name the tokenizer that {beside.url} was built with")
        if not (beside.local / _CONTENT).is_file():
            raise UserError(
                f"data.tokenizer: none lies beside the cache, in {beside.local}/tokenizer; name the one that it was "
                "built with"
            )
        wanted = Pretrained(name=f"{beside.local}/tokenizer")
    if isinstance(wanted, BytesTokenizer):
        return ByteTokenizer()
    if isinstance(wanted, Pretrained):
        return load_pretrained(wanted)
    assert isinstance(wanted, TrainedBpe)
    shards = [shard for name, place in places.items() if name.endswith("/train") for shard in place.shards]
    store = Store(cache_dir)
    if not train and store.read(_RECIPE) is None:
        raise UserError(
            f"no tokenizer was trained in {store.url}/tokenizer, so the caches were built with another one, or it was "
            "lost; lmt data build trains it and compares"
        )
    tokenizer = _trained(wanted, store, shards, on_progress)
    if store.read(_RECIPE) is None and _fits(places, tokenizer):
        _write(tokenizer, store)
        # The recipe is the commit: without it the files beside it do not count.
        store.write_json(_RECIPE, wanted.recipe(shards), if_generation=MISSING)
    return tokenizer


def _fits(places: dict[str, Place], tokenizer: HfTokenizer) -> bool:
    """Whether what is there already was built with this tokenizer; the one beside another cache stays there."""
    manifests = [Store(place.url).read_json(MANIFEST) for place in places.values()]
    wanted = tokenizer.identity()["sha256"]
    return all(found is None or found.get("tokenizer", {}).get("sha256") == wanted for found in manifests)


def _keep_beside(tokenizer: HfTokenizer, store: Store) -> None:
    """Saves the tokenizer for those who open the cache without the configuration that built it."""
    if store.read(_CONTENT) is None:
        _write(tokenizer, store)


def _write(tokenizer: HfTokenizer, store: Store) -> None:
    """The file that tells that there is a tokenizer comes last."""
    for name, content in sorted(tokenizer.files().items(), key=lambda file: file[0] == TOKENIZER_FILE):
        store.write(f"tokenizer/{name}", content)


def _trained(config: TrainedBpe, store: Store, shards: Sequence[Shard], on_progress: OnProgress | None) -> HfTokenizer:
    """Trains the tokenizer, or reads what an earlier run trained by the same recipe."""
    recipe = config.recipe(shards)
    found = store.read_json(_RECIPE)
    if found is None:
        if on_progress:
            on_progress(BuildProgress("tokenizer", 0, config.sample_bytes, 0))
        return train_bpe(config, shards)
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
