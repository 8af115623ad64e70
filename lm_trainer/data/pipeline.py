"""Opens the data of a run: source, tokenizer, caches, order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.builder import Build, OnProgress
from lm_trainer.data.caches import plan_caches
from lm_trainer.data.cluster import RayConfig
from lm_trainer.data.config import SINGLE_SET, DataConfig
from lm_trainer.data.evalset import EvalSet
from lm_trainer.data.layout import token_dtype
from lm_trainer.data.marks import MarkStream
from lm_trainer.data.opened import Data, OpenSet
from lm_trainer.data.order import Rows, TrainSet
from lm_trainer.data.packing import PackedRows, open_plan
from lm_trainer.data.shuffle import seed_of
from lm_trainer.data.stream import TokenStream
from lm_trainer.data.tokenizer import Tokenizer
from lm_trainer.data.windows import Windows


def open_data(
    config: DataConfig, *, seq_len: int, seed: int, on_progress: OnProgress | None = None, ray: RayConfig | None = None
) -> Data:
    """Tokenises what is not yet cached, on a Ray cluster if one is given, and opens it.

    Raises:
        UserError: for missing, damaged or empty data, or a cache directory that holds something else.
        MachineError: if the disk is full.
    """
    plan = plan_caches(config, on_progress, ray)
    caches = {name: _open(build) for name, build in plan.builds.items()}
    tokenizer = plan.tokenizer
    train_sets = [
        _train_set(config, name, caches[f"{name}/train"], tokenizer, seq_len, seed) for name in config.trained
    ]
    evals = [
        found for name in config.sets for found in _evals(config, name, caches, tokenizer, seq_len) if found.num_tokens
    ]
    return Data(config, tokenizer, plan.directory, seq_len, train_sets, evals, caches)


def _open(build: Build) -> OpenSet:
    ledger = build.run()
    stream = TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))
    if ledger.marks:
        stream.marks = MarkStream(build.store, ledger, np.dtype(np.uint8))
    return OpenSet(build.store, stream, ledger, tuple(build.shards))


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
    stop = None if held_out is None else _first_held_out(cache.stream, seq_len, held_out) * seq_len
    if stop is not None and stop <= 0:
        raise UserError(
            f"data.num_validation_sequences holds {held_out} rows out, but {what} has {windows.num_rows} of {seq_len} "
            "tokens; lower it"
        )
    rows: Rows = windows
    num_rows = windows.num_rows if stop is None else stop // seq_len
    if config.packing == "best_fit":
        rows = PackedRows(cache.stream, open_plan(cache.store, cache.ledger, seq_len, stop), seq_len, tokenizer.eos_id)
        num_rows = rows.num_rows
    of_set = seed if not config.configs else seed_of(seed, name)
    return TrainSet(name, rows, num_rows, config.shuffle_config, of_set)


def _first_held_out(stream: TokenStream, seq_len: int, count: int) -> int:
    """The window with which the last `count` windows of a stream begin; the last one may be short."""
    return -(-len(stream) // seq_len) - count


def _evals(
    config: DataConfig, name: str, caches: dict[str, OpenSet], tokenizer: Tokenizer, seq_len: int
) -> Iterator[EvalSet]:
    title = name if config.configs else "validation"
    if (cache := caches.get(f"{name}/validation")) is not None:
        documents, text_bytes = cache.ledger.num_documents, sum(cache.ledger.text_bytes)
        yield EvalSet(title, cache.stream, seq_len, tokenizer.eos_id, documents, text_bytes)
    held_out = config.of_set(config.num_validation_sequences, name)
    if held_out is not None and (train := caches.get(f"{name}/train")) is not None:
        if cache is not None:
            raise UserError(f"{title} has validation text of its own; remove data.num_validation_sequences for it")
        first = _first_held_out(train.stream, seq_len, held_out)
        tokens = train.stream.tail(first * seq_len)
        text_bytes = len(tokenizer.decode(tokens[tokens != tokenizer.eos_id].tolist()).encode())
        documents = int((tokens == tokenizer.eos_id).sum())
        yield EvalSet(title, train.stream, seq_len, tokenizer.eos_id, documents, text_bytes, first)
