"""Opens the data of a run: source, tokenizer, caches, order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.builder import Build, BuildOptions, BuildProgress, OnProgress
from lm_trainer.data.config import SINGLE_SET, DataConfig, SetConfig
from lm_trainer.data.evalset import EvalSet
from lm_trainer.data.layout import fingerprint, make_manifest, token_dtype
from lm_trainer.data.marks import MarkStream
from lm_trainer.data.opened import Data, OpenSet
from lm_trainer.data.order import TrainSet
from lm_trainer.data.shuffle import seed_of
from lm_trainer.data.sources import Shard
from lm_trainer.data.store import MISSING, Store
from lm_trainer.data.stream import TokenStream
from lm_trainer.data.tokenizer import BytesTokenizer, HfTokenizer, Pretrained, Tokenizer, TrainedBpe, train_bpe
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.data.tokenizer.hf import load_pretrained
from lm_trainer.data.windows import Windows

DEFAULT_CACHE = "cache"
_RECIPE = "tokenizer/recipe.json"


def open_data(config: DataConfig, *, seq_len: int, seed: int, on_progress: OnProgress | None = None) -> Data:
    """Tokenises what is not yet cached, and opens it.

    Raises:
        UserError: for missing, damaged or empty data, or a cache directory that holds something else.
        MachineError: if the disk is full.
    """
    shards = {name: _shards(config, name) for name in config.sets}
    everything = [shard for found in shards.values() for shard in found["train"]]
    cache_dir = config.cache_dir or _default_directory(config, config, shards)
    tokenizer = _tokenizer(config, cache_dir, everything, on_progress)
    options = BuildOptions(config.num_workers, config.on_bad_row == "raise", config.max_bad_rows)
    caches: dict[str, OpenSet] = {}
    for name, one in config.sets.items():
        directory = cache_dir if one is config else one.cache_dir or _set_directory(config, one, name, shards)
        for split in (split for split, found in shards[name].items() if found):
            title = split if one is config else f"{name} {split}"
            store = Store(f"{directory}/{split}")
            build = Build(title, store, shards[name][split], tokenizer, options, on_progress, one.format)
            caches[f"{name}/{split}"] = _open(build)
    train_sets = [
        _train_set(config, name, caches[f"{name}/train"], tokenizer, seq_len, seed) for name in config.trained
    ]
    evals = [
        found for name in config.sets for found in _evals(config, name, caches, tokenizer, seq_len) if found.num_tokens
    ]
    return Data(config, tokenizer, cache_dir, seq_len, train_sets, evals, caches)


def _shards(config: DataConfig, name: str) -> dict[str, list[Shard]]:
    one = config.sets[name]
    return {"train": one.shards("train") if name in config.trained else [], "validation": one.shards("validation")}


def _open(build: Build) -> OpenSet:
    ledger = build.run()
    stream = TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))
    if ledger.marks:
        stream.marks = MarkStream(build.store, ledger, np.dtype(np.uint8))
    return OpenSet(stream, ledger)


def _train_set(
    config: DataConfig, name: str, cache: OpenSet, tokenizer: Tokenizer, seq_len: int, seed: int
) -> TrainSet:
    windows = Windows(cache.stream, seq_len, tokenizer.eos_id)
    what = "the training data" if name == SINGLE_SET else f"the set {name}"
    held_out = config.of_set(config.num_validation_sequences, name)
    if windows.num_rows == 0:
        raise UserError(
            f"{what} holds {len(cache.stream)} tokens, less than one row of {seq_len}; add text or lower model.seq_len"
        )
    num_rows = windows.num_rows if held_out is None else _first_held_out(cache.stream, seq_len, held_out)
    if num_rows <= 0:
        raise UserError(
            f"data.num_validation_sequences holds {held_out} rows out, but {what} has {windows.num_rows} of {seq_len} "
            "tokens; lower it"
        )
    of_set = seed if not config.configs else seed_of(seed, name)
    return TrainSet(name, windows, num_rows, config.shuffle_config, of_set)


def _first_held_out(stream: TokenStream, seq_len: int, count: int) -> int:
    """The window with which the last `count` windows of a stream begin; the last one may be short."""
    return -(-len(stream) // seq_len) - count


def _evals(
    config: DataConfig, name: str, caches: dict[str, OpenSet], tokenizer: Tokenizer, seq_len: int
) -> Iterator[EvalSet]:
    title = name if config.configs else "validation"
    tags = tuple(config.sets[name].tags)
    if (cache := caches.get(f"{name}/validation")) is not None:
        documents, text_bytes = cache.ledger.num_documents, sum(cache.ledger.text_bytes)
        yield EvalSet(title, cache.stream, seq_len, tokenizer.eos_id, documents, text_bytes, tags)
    held_out = config.of_set(config.num_validation_sequences, name)
    if held_out is not None and (train := caches.get(f"{name}/train")) is not None:
        if cache is not None:
            raise UserError(f"{title} has validation text of its own; remove data.num_validation_sequences for it")
        first = _first_held_out(train.stream, seq_len, held_out)
        tokens = train.stream.tail(first * seq_len)
        text_bytes = len(tokenizer.decode(tokens[tokens != tokenizer.eos_id].tolist()).encode())
        documents = int((tokens == tokenizer.eos_id).sum())
        yield EvalSet(title, train.stream, seq_len, tokenizer.eos_id, documents, text_bytes, tags, first)


def _set_directory(config: DataConfig, one: SetConfig, name: str, shards: dict[str, dict[str, list[Shard]]]) -> str:
    """Where a set of a mixture has its cache: it does not depend on the other sets, unless the tokenizer does."""
    return f"{config.cache_dir}/{name}" if config.cache_dir else _default_directory(config, one, {name: shards[name]})


def _default_directory(config: DataConfig, one: SetConfig, shards: dict[str, dict[str, list[Shard]]]) -> str:
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
    config: DataConfig, cache_dir: str, shards: Sequence[Shard], on_progress: OnProgress | None
) -> Tokenizer:
    wanted = config.tokenizer_config
    if isinstance(wanted, BytesTokenizer):
        return ByteTokenizer()
    if isinstance(wanted, Pretrained):
        return load_pretrained(wanted)
    assert isinstance(wanted, TrainedBpe)
    return _trained(wanted, Store(cache_dir), shards, on_progress)


def _trained(config: TrainedBpe, store: Store, shards: Sequence[Shard], on_progress: OnProgress | None) -> HfTokenizer:
    """Trains the tokenizer, or reads what an earlier run trained by the same recipe."""
    recipe = config.recipe(shards)
    found = store.read_json(_RECIPE)
    if found is None:
        if on_progress:
            on_progress(BuildProgress("tokenizer", 0, config.sample_bytes, 0))
        tokenizer = train_bpe(config, shards)
        for name, content in tokenizer.files().items():
            store.write(f"tokenizer/{name}", content)
        # The recipe is the commit: without it the files beside it do not count.
        store.write_json(_RECIPE, recipe, if_generation=MISSING)
        return tokenizer
    if found != recipe:
        changed = [key for key in recipe if found.get(key) != recipe[key]]
        raise UserError(
            f"{store.url}/tokenizer was trained by another recipe ({fingerprint(found)}, now {fingerprint(recipe)}); "
            f"what differs: {', '.join(changed)}. Set data.cache_dir to another directory, or remove {store.url}"
        )
    contents = {key.removeprefix("tokenizer/"): store.read(key) for key in store.list("tokenizer/")}
    content = contents["tokenizer.json"]
    if content is None:
        raise UserError(f"{store.url}/tokenizer has lost tokenizer.json; remove {store.url} to build it again")
    return HfTokenizer(content.decode(), origin=f"{store.url}/tokenizer")
