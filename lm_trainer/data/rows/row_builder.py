"""What is trained and evaluated on, made of caches, as far as these are built."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.config import SINGLE_SET, DataConfig
from lm_trainer.data.rows.chunks import Windows
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.rows.growing import POLL_SECONDS, Missing, OpenSet
from lm_trainer.data.rows.order import Rows, TrainSet
from lm_trainer.data.rows.packing import PackedRows, open_plan
from lm_trainer.data.shuffle import seed_of
from lm_trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Cutting:
    """How the text of all sets is cut into rows, and in which order they come."""

    config: DataConfig
    tokenizer: Tokenizer
    seq_len: int
    seed: int

    def train_set(self, name: str, cache: OpenSet) -> TrainSet:
        """One set to train on; while its cache grows, with the rows that are certain already.

        Raises:
            UserError: if the whole text does not make a row.
        """
        config, final = self.config, cache.finished
        windows = Windows(cache.stream, self.seq_len, self.tokenizer.eos_id)
        held_out = config.of_set(config.num_validation_sequences, name)
        of_set = self.seed_of(name)
        if not final:
            certain = 0 if config.packing == "best_fit" else _certain(cache.stream, self.seq_len, held_out)
            return TrainSet(name, windows, certain, config.shuffle_config, of_set, final=False)
        stop = self._stop(name, windows, held_out)
        rows: Rows = windows
        num_rows = windows.num_rows if stop is None else stop // self.seq_len
        if config.packing == "best_fit":
            plan = open_plan(cache.store, cache.ledger, self.seq_len, stop)
            rows = PackedRows(cache.stream, plan, self.seq_len, self.tokenizer.eos_id)
            num_rows = rows.num_rows
        return TrainSet(name, rows, num_rows, config.shuffle_config, of_set)

    def seed_of(self, name: str) -> int:
        """Of the order of one set."""
        return seed_of(self.seed, name) if self.config.configs else self.seed

    def _stop(self, name: str, windows: Windows, held_out: int | None) -> int | None:
        """Where in the stream what is held out begins; None if nothing is."""
        what = "the training data" if name == SINGLE_SET else f"the set {name}"
        if windows.num_rows == 0:
            raise UserError(
                f"{what} holds {len(windows.stream)} tokens, less than one row of {self.seq_len}; add text or lower "
                "model.seq_len"
            )
        if held_out is None:
            return None
        stop = _first_held_out(windows.stream, self.seq_len, held_out) * self.seq_len
        if stop <= 0:
            raise UserError(
                f"data.num_validation_sequences holds {held_out} rows out, but {what} has {windows.num_rows} of "
                f"{self.seq_len} tokens; lower it"
            )
        return stop

    def eval_sets(self, caches: dict[str, OpenSet]) -> Iterator[EvalSet | PendingEval]:
        """What is held out of every set; that whose cache still grows waits for it when it is read.

        Raises:
            UserError: if a set has validation text and is to give some of its training text as well.
        """
        config = self.config
        for name in config.sets:
            title = name if config.configs else "validation"
            cache, train = caches.get(f"{name}/validation"), caches.get(f"{name}/train")
            held_out = config.of_set(config.num_validation_sequences, name)
            if cache is not None and train is not None and held_out is not None:
                raise UserError(f"{title} has validation text of its own; remove data.num_validation_sequences for it")
            if cache is not None:
                yield from _when_there(title, cache, lambda title=title, cache=cache: self._whole(title, cache))
            elif held_out is not None and train is not None:
                make = lambda title=title, train=train, held_out=held_out: self._tail(title, train, held_out)  # noqa: E731
                yield from _when_there(title, train, make)

    def _whole(self, title: str, cache: OpenSet) -> EvalSet:
        documents, text_bytes = cache.ledger.num_documents, sum(cache.ledger.text_bytes)
        return EvalSet(title, cache.stream, self.seq_len, self.tokenizer.eos_id, documents, text_bytes)

    def _tail(self, title: str, train: OpenSet, held_out: int) -> EvalSet:
        eos_id = self.tokenizer.eos_id
        first = _first_held_out(train.stream, self.seq_len, held_out)
        tokens = train.stream.tail(first * self.seq_len)
        text_bytes = len(self.tokenizer.decode(tokens[tokens != eos_id].tolist()).encode())
        documents = int((tokens == eos_id).sum())
        return EvalSet(title, train.stream, self.seq_len, eos_id, documents, text_bytes, first)


@dataclass
class PendingEval:
    """A held-out set that is still being tokenised; reading it waits until it is there."""

    name: str
    cache: OpenSet
    make: Callable[[], EvalSet]
    _made: EvalSet | None = None

    growing = True

    def missing(self) -> Missing | None:
        """What there is to wait for; None if it is there.

        Raises:
            UserError: if it will not come, because its build failed.
        """
        if self.cache.finished:
            return None
        self.cache.check()
        return self.cache.missing(len(self.cache.stream), None)

    def batches(self, batch_size: int, *, rows: range, max_batches: int | None = None) -> Iterator[Batch]:
        """As `EvalSet.batches`."""
        while self.missing() is not None:
            time.sleep(POLL_SECONDS)
        self._made = self._made or self.make()
        return self._made.batches(batch_size, rows=rows, max_batches=max_batches)


def _when_there(title: str, cache: OpenSet, make: Callable[[], EvalSet]) -> Iterator[EvalSet | PendingEval]:
    if not cache.finished:
        yield PendingEval(title, cache, make)
    elif (made := make()).num_tokens:
        yield made


def _certain(stream: TokenStream, seq_len: int, held_out: int | None) -> int:
    """The windows that will be trained on, whatever comes: with all their targets, and not the last ones."""
    return max((len(stream) - 1) // seq_len if held_out is None else len(stream) // seq_len - held_out, 0)


def _first_held_out(stream: TokenStream, seq_len: int, count: int) -> int:
    """The window with which the last `count` windows of a stream begin; the last one may be short."""
    return -(-len(stream) // seq_len) - count
