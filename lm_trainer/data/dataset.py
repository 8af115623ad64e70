"""The opened data of a run: what training and evaluation read."""

from __future__ import annotations

import bisect
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.cache.format import fingerprint
from lm_trainer.data.config import DataConfig
from lm_trainer.data.loader import HostRows, TrainIterator
from lm_trainer.data.mixture import Mixture
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.rows.growing import Builders, GrowingOrder, OpenSet
from lm_trainer.data.rows.order import TrainOrder, TrainSet
from lm_trainer.data.rows.row_builder import Cutting, PendingEval
from lm_trainer.data.tokenizer import Tokenizer


@dataclass(eq=False)
class Data:
    """Everything that training and evaluation read, in an order that depends on the seed alone."""

    config: DataConfig
    cutting: Cutting
    cache_dir: str
    """Where the tokenizer is, and the caches, but for those with a directory of their own."""
    caches: dict[str, OpenSet]
    """Every cache, by `NAME/train` and `NAME/validation`."""
    builders: Builders | None = None
    """Who builds those that are not finished."""
    _open: list[TrainIterator] = field(default_factory=list)
    _final: dict[str, TrainSet] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.cutting.tokenizer

    @property
    def seq_len(self) -> int:
        """Of the rows."""
        return self.cutting.seq_len

    @property
    def train_sets(self) -> Sequence[TrainSet]:
        """The sets that are trained on, in the order of the configuration, as far as they are certain."""
        return [self._train_set(name) for name in self.config.trained]

    @property
    def evals(self) -> Sequence[EvalSet | PendingEval]:
        return list(self.cutting.eval_sets(self.caches))

    @property
    def complete(self) -> bool:
        """Whether all text has been tokenised."""
        return all(cache.finished for cache in self.caches.values())

    @property
    def num_train_tokens(self) -> int:
        """In the text of all sets that are trained on, held-out rows included; until `complete`, so far."""
        return sum(len(self.caches[f"{name}/train"].stream) for name in self.config.trained)

    @property
    def num_train_windows(self) -> int:
        """Rows in one epoch of every set; until `complete`, so far."""
        return sum(train.num_rows for train in self.train_sets)

    @property
    def waits_for_all(self) -> str | None:
        """The setting for which the first batch needs all text that is trained on; None if the first text will do."""
        config = self.config
        if config.stop_strategy != "restart":
            return f"data.stop_strategy: {config.stop_strategy}"
        if config.packing == "best_fit":
            return "data.packing: best_fit"
        unlimited = any(config.of_set(config.max_train_batches, name) is None for name in config.trained)
        return "data.shuffle: true" if unlimited and config.shuffle_config.rows_needed(0) is None else None

    def check(self) -> None:
        """Refuses what cannot be trained or evaluated on, as far as that is known.

        Raises:
            UserError: as `Cutting` does.
        """
        _ = self.train_sets, self.evals

    def check_builds(self) -> None:
        """Raises what has ended a build before it was done, if anything has, whether or not its text is needed now."""
        for cache in self.caches.values():
            cache.check()

    def _train_set(self, name: str) -> TrainSet:
        if name not in self._final:
            found = self.cutting.train_set(name, self.caches[f"{name}/train"])
            if not found.final:
                return found
            self._final[name] = found
        return self._final[name]

    def fingerprint(self, step: int | None = None) -> str:
        """Differs whenever some batch may: hashes the tokens, their meaning and the order, not where they come from.

        Args:
            step: if given, only batches before this step count, so that weights from there on may change.

        Raises:
            RuntimeError: until the data are `complete`.
        """
        if not self.complete:
            raise RuntimeError("the text is still being tokenised; use fingerprints")
        orders = [
            [train.name, train.num_rows, train.seed, train.shuffle.model_dump(mode="json")] for train in self.train_sets
        ]
        tokens = {name: cache.ledger.sha256 for name, cache in self.caches.items()}
        return fingerprint({"tokens": tokens, "orders": orders, **self._meaning(step)})

    def fingerprints(self, step: int | None = None) -> dict[str, str]:
        """What a run may be known by later: `tokens`, once the data are complete, is `fingerprint`; `sources` is known
        at once, and hashes what the tokens are made of: the files with their sizes and times, tokenizer and rules.

        Two runs have the same data if they agree in `tokens`, or, where one of them does not know it, in `sources`.
        """
        config = self.config
        seeds = {name: self.cutting.seed_of(name) for name in config.trained}
        sources = {
            "made_of": {name: cache.identity for name, cache in self.caches.items()},
            "shuffle": config.shuffle_config.model_dump(mode="json"),
            "seeds": seeds,
            "held_out": [config.of_set(config.num_validation_sequences, name) for name in config.sets],
            **self._meaning(step),
        }
        known = {"tokens": self.fingerprint(step)} if self.complete else {}
        return {**known, "sources": fingerprint(sources)}

    def _meaning(self, step: int | None) -> dict[str, Any]:
        config = self.config
        return {
            "eos_id": self.tokenizer.eos_id,
            "vocab_size": self.tokenizer.vocab_size,
            "seq_len": self.seq_len,
            "stages": [stage for stage in config.stages if step is None or stage[0] < max(step, 1)],
            "packing": config.packing,
            "limits": [config.of_set(config.max_train_batches, name) for name in config.trained],
        }

    def order(self, schedule: int | BatchSchedule) -> TrainOrder:
        """Which row stands where in a run of these batch sizes, as far as that is certain."""
        schedule = _schedule(schedule)
        sets = []
        for train in self.train_sets:
            batches = self.config.of_set(self.config.max_train_batches, train.name)
            most = train.num_rows + 1 if batches is None else batches * schedule.at(0)
            reached = train.num_rows >= most
            sets.append(replace(train, num_rows=min(train.num_rows, most), final=train.final or reached))
        mixture = Mixture([(schedule.rows_before(step), shares) for step, shares in self.config.stages])
        final = all(train.final for train in sets)
        return TrainOrder(sets, mixture, self._length(sets, mixture) if final else None)

    def max_steps(self, schedule: int | BatchSchedule) -> int | None:
        """Whole batches until `data.stop_strategy` ends training; None = it never does."""
        return _whole_steps(self.order(schedule), schedule)

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
            UserError: if the data end before, by `data.stop_strategy`; while they grow, the iterator raises it.
        """
        steps, closed = range(first_step, first_step + num_steps), threading.Event()

        def look() -> TrainOrder:
            order = self.order(schedule)
            if all(train.final for train in order.sets):
                self._check_end(order, schedule, steps)
            return order

        order: TrainOrder | GrowingOrder = look()
        if not all(train.final for train in order.sets):
            whole = self.config.stop_strategy != "restart" or self.config.packing == "best_fit"
            caches = {name: self.caches[f"{name}/train"] for name in self.config.trained}
            order = GrowingOrder(look, caches, whole=whole, closed=closed)
        iterator = TrainIterator(order, _schedule(schedule), rows, steps, closed)
        self._open.append(iterator)
        return iterator

    def validation(self) -> dict[str, EvalSet | PendingEval]:
        """The held-out sets by name; empty where the configuration names none."""
        return {evals.name: evals for evals in self.evals}

    def close(self) -> None:
        """Ends the threads of every iterator given out, and the tokenising of what is not there yet."""
        for iterator in self._open:
            iterator.close()
        self._open.clear()
        if self.builders is not None:
            self.builders.close()

    def _check_end(self, order: TrainOrder, schedule: int | BatchSchedule, steps: range) -> None:
        most = _whole_steps(order, schedule)
        if most is not None and steps.stop > most:
            raise UserError(
                f"the data end after {most} steps, by data.stop_strategy: {self.config.stop_strategy}, but "
                f"{steps.stop} are asked for; set trainer.num_train_steps to {most} or data.stop_strategy to restart"
            )

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


def _whole_steps(order: TrainOrder, schedule: int | BatchSchedule) -> int | None:
    if order.length is None:
        return None
    # Each step has a row at least, so there are no more steps than rows.
    return bisect.bisect_right(range(order.length + 1), order.length, key=_schedule(schedule).rows_before) - 1


def _schedule(value: int | BatchSchedule) -> BatchSchedule:
    return BatchSchedule.constant(value) if isinstance(value, int) else value
