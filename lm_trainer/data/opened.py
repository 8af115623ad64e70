"""The opened data of a run: what training and evaluation read."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.steps import BatchSchedule
from lm_trainer.data.config import DataConfig
from lm_trainer.data.evalset import EvalSet
from lm_trainer.data.layout import Ledger, fingerprint
from lm_trainer.data.loader import HostRows, TrainIterator
from lm_trainer.data.mixture import Mixture
from lm_trainer.data.order import TrainOrder, TrainSet
from lm_trainer.data.sources import Shard
from lm_trainer.data.store import Store
from lm_trainer.data.stream import TokenStream
from lm_trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenSet:
    """One split of one set, as it stands in its cache."""

    store: Store
    stream: TokenStream
    ledger: Ledger
    shards: tuple[Shard, ...]


@dataclass(eq=False)
class Data:
    """Everything that training and evaluation read, in an order that depends on the seed alone."""

    config: DataConfig
    tokenizer: Tokenizer
    cache_dir: str
    """Where the tokenizer is, and the caches, but for those with a directory of their own."""
    seq_len: int
    """Of the rows."""
    train_sets: Sequence[TrainSet]
    """The sets that are trained on, in the order of the configuration."""
    evals: Sequence[EvalSet]
    caches: dict[str, OpenSet]
    """Every cache, by `NAME/train` and `NAME/validation`."""
    _open: list[TrainIterator] = field(default_factory=list)

    @property
    def num_train_tokens(self) -> int:
        """In the text of all sets that are trained on, held-out rows included."""
        return sum(len(self.caches[f"{train.name}/train"].stream) for train in self.train_sets)

    @property
    def num_train_windows(self) -> int:
        """Rows in one epoch of every set."""
        return sum(train.num_rows for train in self.train_sets)

    def fingerprint(self, step: int | None = None) -> str:
        """Differs whenever some batch may: hashes the tokens, their meaning and the order, not where they come from.

        Args:
            step: if given, only batches before this step count, so that weights from there on may change.
        """
        config = self.config
        orders = [
            [train.name, train.num_rows, train.seed, train.shuffle.model_dump(mode="json")] for train in self.train_sets
        ]
        stages = [stage for stage in config.stages if step is None or stage[0] < max(step, 1)]
        parts: dict[str, Any] = {
            "tokens": {name: cache.ledger.sha256 for name, cache in self.caches.items()},
            "eos_id": self.tokenizer.eos_id,
            "vocab_size": self.tokenizer.vocab_size,
            "seq_len": self.seq_len,
            "orders": orders,
            "stages": stages,
            "packing": config.packing,
            "limits": [config.of_set(config.max_train_batches, train.name) for train in self.train_sets],
        }
        return fingerprint(parts)

    def order(self, schedule: int | BatchSchedule) -> TrainOrder:
        """Which row stands where in a run of these batch sizes."""
        schedule = _schedule(schedule)
        sets = []
        for train in self.train_sets:
            batches = self.config.of_set(self.config.max_train_batches, train.name)
            most = train.num_rows if batches is None else batches * schedule.at(0)
            sets.append(replace(train, num_rows=min(train.num_rows, most)))
        mixture = Mixture([(schedule.rows_before(step), shares) for step, shares in self.config.stages])
        return TrainOrder(sets, mixture, self._length(sets, mixture))

    def max_steps(self, schedule: int | BatchSchedule) -> int | None:
        """Whole batches until `data.stop_strategy` ends training; None = it never does."""
        schedule = _schedule(schedule)
        length = self.order(schedule).length
        if length is None:
            return None
        # Each step has a row at least, so there are no more steps than rows.
        return bisect.bisect_right(range(length + 1), length, key=schedule.rows_before) - 1

    def train(
        self, schedule: int | BatchSchedule, *, rows: HostRows, first_step: int = 0, num_steps: int
    ) -> TrainIterator:
        """The batches of the steps [first_step, first_step + num_steps), through as many epochs as they take.

        Args:
            schedule: rows of the global batch, at each step where they change.
            rows: which of them this host holds; a function of the size of the batch, where it changes.
            first_step: where to begin; costs the same for any step.
            num_steps: how many batches to give.

        Raises:
            UserError: if the data end before, by `data.stop_strategy`.
        """
        most, steps = self.max_steps(schedule), range(first_step, first_step + num_steps)
        if most is not None and steps.stop > most:
            raise UserError(
                f"the data end after {most} steps, by data.stop_strategy: {self.config.stop_strategy}, but "
                f"{steps.stop} are asked for; set trainer.num_train_steps to {most} or data.stop_strategy to restart"
            )
        iterator = TrainIterator(self.order(schedule), _schedule(schedule), rows, steps)
        self._open.append(iterator)
        return iterator

    def validation(self) -> dict[str, EvalSet]:
        """The held-out sets by name; empty where the configuration names none."""
        return {evals.name: evals for evals in self.evals}

    def close(self) -> None:
        """Ends the threads of every iterator given out."""
        for iterator in self._open:
            iterator.close()
        self._open.clear()

    def _length(self, sets: Sequence[TrainSet], mixture: Mixture) -> int | None:
        config = self.config
        if config.stop_strategy == "restart":
            return None
        draws = [train.num_rows * (config.of_set(config.epochs, train.name) or 1) for train in sets]
        if config.stop_strategy == "first_exhausted":
            ends = [mixture.position(index, count) for index, count in enumerate(draws)]
            return min((end for end in ends if end is not None), default=sys.maxsize)
        lasts = [mixture.position(index, count - 1) for index, count in enumerate(draws)]
        return None if None in lasts else max(last + 1 for last in lasts if last is not None)


def _schedule(value: int | BatchSchedule) -> BatchSchedule:
    return BatchSchedule.constant(value) if isinstance(value, int) else value
