"""Opens the data of a run: source, tokenizer, caches, order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.data.builder import Build, BuildOptions, BuildProgress, OnProgress
from lm_trainer.data.config import DataConfig
from lm_trainer.data.layout import Ledger, fingerprint, make_manifest, token_dtype
from lm_trainer.data.loader import EvalSet, TrainIterator, TrainSet
from lm_trainer.data.sources import Shard
from lm_trainer.data.store import MISSING, Store
from lm_trainer.data.stream import TokenStream
from lm_trainer.data.tokenizer import BytesTokenizer, HfTokenizer, Pretrained, Tokenizer, TrainedBpe, train_bpe
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.data.tokenizer.hf import load_pretrained

DEFAULT_CACHE = "cache"
_RECIPE = "tokenizer/recipe.json"


class Data:
    """Everything that training and evaluation read, in an order that depends on the seed alone.

    Attributes:
        tokenizer: of the text.
        seq_len: length of the rows.
        cache_dir: where the caches are.
    """

    def __init__(self, tokenizer: Tokenizer, cache_dir: str, train: TrainSet, ledgers: dict[str, Ledger], evals: Any):
        self.tokenizer, self.cache_dir, self.seq_len = tokenizer, cache_dir, train.seq_len
        self._train, self._ledgers, self._evals = train, ledgers, evals
        self._open: list[TrainIterator] = []

    @property
    def num_train_tokens(self) -> int:
        return len(self._train.stream)

    @property
    def num_train_windows(self) -> int:
        """Rows in one epoch."""
        return self._train.num_windows

    def fingerprint(self) -> str:
        """Differs whenever some batch may: hashes the tokens, their meaning and the order, not where they come from."""
        return fingerprint(
            {
                "tokens": {name: ledger.sha256 for name, ledger in self._ledgers.items()},
                "eos_id": self.tokenizer.eos_id,
                "vocab_size": self.tokenizer.vocab_size,
                "seq_len": self.seq_len,
                "seed": self._train.seed,
                "shuffle": self._train.shuffle.model_dump(mode="json"),
            }
        )

    def train(self, batch_size: int, *, rows: range, first_step: int = 0, num_steps: int) -> TrainIterator:
        """The batches of the steps [first_step, first_step + num_steps), through as many epochs as they take.

        Args:
            batch_size: rows of the global batch.
            rows: which of them this host holds.
            first_step: where to begin; costs the same for any step.
            num_steps: how many batches to give.
        """
        iterator = TrainIterator(self._train, batch_size, rows, range(first_step, first_step + num_steps))
        self._open.append(iterator)
        return iterator

    def validation(self) -> dict[str, EvalSet]:
        """The held-out sets by name; empty where the configuration names none."""
        return dict(self._evals)

    def close(self) -> None:
        """Ends the threads of every iterator given out."""
        for iterator in self._open:
            iterator.close()
        self._open.clear()


def open_data(config: DataConfig, *, seq_len: int, seed: int, on_progress: OnProgress | None = None) -> Data:
    """Tokenises what is not yet cached, and opens it.

    Raises:
        UserError: for missing, damaged or empty data, or a cache directory that holds something else.
        MachineError: if the disk is full.
    """
    shards = {"train": config.shards("train"), "validation": config.shards("validation")}
    cache_dir = config.cache_dir or _default_directory(config, shards)
    tokenizer = _tokenizer(config, cache_dir, shards["train"], on_progress)
    options = BuildOptions(config.num_workers, config.on_bad_row == "raise", config.max_bad_rows)
    streams, ledgers = {}, {}
    for name in (name for name, found in shards.items() if found or name == "train"):
        store = Store(f"{cache_dir}/{name}")
        ledgers[name] = Build(name, store, shards[name], tokenizer, options, on_progress).run()
        streams[name] = TokenStream(store, ledgers[name], token_dtype(tokenizer.vocab_size))
    train = TrainSet(streams["train"], seq_len, tokenizer.eos_id, config.shuffle_config, seed)
    if train.num_windows == 0:
        raise UserError(
            f"the training data holds {len(train.stream)} tokens, less than one row of {seq_len}; "
            "add text or lower model.seq_len"
        )
    evals = {
        name: EvalSet(
            name, stream, seq_len, tokenizer.eos_id, ledgers[name].num_documents, sum(ledgers[name].text_bytes)
        )
        for name, stream in streams.items()
        if name != "train"
    }
    return Data(tokenizer, cache_dir, train, ledgers, evals)


def _default_directory(config: DataConfig, shards: dict[str, list[Shard]]) -> str:
    """A directory below `cache/` that changes with the source and the tokenizer."""
    kind = getattr(config.source_config, "type", "files")
    wanted = config.tokenizer_config
    recipe = wanted.recipe(shards["train"]) if isinstance(wanted, TrainedBpe) else wanted.model_dump()
    manifests = {name: make_manifest(found, ByteTokenizer()) for name, found in shards.items()}
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
