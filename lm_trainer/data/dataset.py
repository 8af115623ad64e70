"""Opened data of a run: everything that training and evaluation read."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence

import grain
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.config import DataConfig
from lm_trainer.data.fingerprints import DataIdentity
from lm_trainer.data.loader import HostRows, TrainIterator, row_dataset
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.rows.grain_rows import GrainRows
from lm_trainer.data.rows.growing_order import GrowingOrder
from lm_trainer.data.rows.order import TrainOrder, TrainSet
from lm_trainer.data.rows.row_builder import PendingEvalSet, RowBuilder
from lm_trainer.data.rows.train_sets import TrainSets, whole_steps
from lm_trainer.data.tokenize.background import BackgroundBuilds
from lm_trainer.data.tokenize.open_cache import OpenCache
from lm_trainer.data.tokenizer import HfTokenizer

_ROWS_LOOKED_AT, _ROWS_AT_ONCE = 2048, 64
"""Rows that are read to learn how many have no token with a loss, and how many of them at once."""


class Data:
    """Train batches and held-out sets, in an order that depends on the seed alone.

    Args:
        config: the `data` section.
        row_builder: cuts caches into rows.
        cache_dir: the directory with the tokenizer and the caches, but for those with a directory of their own.
        caches: every cache, by `NAME/train` and `NAME/validation`.
        builds: the builds of those that are not finished.

    Raises:
        UserError: if a set cannot be trained or evaluated on, as far as that is known.
    """

    def __init__(
        self,
        config: DataConfig,
        row_builder: RowBuilder,
        cache_dir: str,
        caches: Mapping[str, OpenCache],
        builds: BackgroundBuilds | None = None,
    ):
        self.config, self.cache_dir, self.caches, self.builds = config, cache_dir, caches, builds
        self._row_builder = row_builder
        self._train_sets = TrainSets(config, row_builder, caches)
        self._identity = DataIdentity(config, row_builder, caches, self._train_sets)
        self._iterators: list[TrainIterator] = []
        # Asked for now, so that data that cannot be used are refused before anything else is built.
        _ = self.train_sets, self.validation()

    @property
    def tokenizer(self) -> HfTokenizer:
        return self._row_builder.tokenizer

    @property
    def train_sets(self) -> Sequence[TrainSet]:
        """The sets that are trained on, in the order of the configuration, as far as they are certain."""
        return self._train_sets.current()

    @property
    def notes(self) -> list[str]:
        """Lines about sets whose order is not a function of the step alone, or not of this program's."""
        return [train.rows.note for train in self.train_sets if isinstance(train.rows, GrainRows)]

    @property
    def complete(self) -> bool:
        """True once all text has been tokenised."""
        return all(cache.finished for cache in self.caches.values())

    @property
    def num_train_tokens(self) -> int:
        """Tokens in the text of all sets that are trained on, held-out rows included; until `complete`, so far."""
        return sum(len(cache.stream) for cache in self._train_sets.caches.values())

    @property
    def waits_for_all(self) -> str | None:
        """The setting for which the first batch needs all text that is trained on; None if the first text will do."""
        return self._train_sets.waits_for_all

    def limit_ids(self, count: int) -> None:
        """Refuses rows with ids from `count` on, which the model has no rows for though the tokenizer has them."""
        for cache in self.caches.values():
            cache.limit_ids(count)

    def check_builds(self) -> None:
        """Raises the error that ended a build before it was done, if one did, even if its text is not needed now."""
        for cache in self.caches.values():
            cache.check()

    def fingerprint(self, step: int | None = None) -> str:
        """Hashes the tokens, their meaning and the order: differs whenever some batch may, wherever the text is from.

        Args:
            step: if given, only batches before this step count, so that weights from there on may change.

        Raises:
            RuntimeError: until the data are `complete`.
        """
        if not self.complete:
            raise RuntimeError("the text is still being tokenised; use fingerprints")
        return self._identity.tokens(step)

    def fingerprints(self, step: int | None = None) -> dict[str, str]:
        """Returns the hashes by which a run can be known later.

        `tokens`, once the data are complete, is `fingerprint`. `sources` is known at once: it hashes the files with
        their sizes and times, the tokenizer and the rules. Two runs have the same data if they agree in `tokens`, or,
        where one of them does not know it, in `sources`.
        """
        known = {"tokens": self.fingerprint(step)} if self.complete else {}
        return {**known, "sources": self._identity.sources(step)}

    def order(self, schedule: int | BatchSchedule) -> TrainOrder:
        """Returns the rows of a run of these batch sizes by their positions, as far as they are certain."""
        return self._train_sets.order(_schedule(schedule))

    def share_without_loss(self, schedule: int | BatchSchedule, num_steps: int) -> float:
        """Returns the share of rows in which no token has a loss, of rows drawn from those of a run.

        As many are drawn as are read within a second, at most 2,048. It is 0, without reading any, where every token
        counts, and while it is not known yet which rows there are.

        Args:
            schedule: rows of the global batch, at each step where they change.
            num_steps: steps of the run.
        """
        sets = self.train_sets
        unread = self.config.features_shape is not None or any(isinstance(each.rows, GrainRows) for each in sets)
        if unread or not self.complete or not any(self._has_mask(each.name) for each in sets):
            return 0.0
        order, sizes = self.order(schedule), _schedule(schedule)
        last = min(sizes.rows_before(num_steps), sys.maxsize if order.length is None else order.length)
        positions_N = np.unique(np.linspace(0, last - 1, min(last, _ROWS_LOOKED_AT)).astype(np.int64))
        # In no order, so that those that are read in time stand for all.
        positions_N = np.random.default_rng(0).permutation(positions_N)
        until, empty, read = time.monotonic() + 1, 0, 0
        while read < len(positions_N) and time.monotonic() < until:
            batch = order.read(positions_N[read : read + _ROWS_AT_ONCE])
            empty += int(np.count_nonzero(~np.any(batch.weights > 0, axis=1)))
            read += len(batch.weights)
        return empty / max(read, 1)

    def _has_mask(self, name: str) -> bool:
        return self.caches[f"{name}/train"].stream.loss_mask is not None

    def max_steps(self, schedule: int | BatchSchedule) -> int | None:
        """Returns the number of whole batches until `data.stop_strategy` ends training; None = it never does."""
        return whole_steps(self.order(schedule), _schedule(schedule))

    def train_rows(self, schedule: int | BatchSchedule) -> grain.MapDataset[Batch]:
        """The rows of a run in their order, as a dataset of Grain: element i is row i, a `Batch` of fields [S].

        They are the rows that `train` batches: those of the step that begins at row `schedule.rows_before(step)` are
        its next `schedule.at(step)` elements. Any element is read alone; slices, `batch`, `map` and the other methods
        of Grain apply. Its length is that of the data by `data.stop_strategy`, `sys.maxsize` where they do not end.

        Args:
            schedule: rows of the global batch, at each step where they change.

        Raises:
            RuntimeError: until the data are `complete`.
        """
        if not self.complete:
            raise RuntimeError("the text is still being tokenised; open the data without background=True")
        return row_dataset(self.order(schedule))

    def train(
        self, schedule: int | BatchSchedule, *, rows: HostRows, first_step: int = 0, num_steps: int
    ) -> TrainIterator:
        """Opens the batches of the steps [first_step, first_step + num_steps), through as many epochs as they take.

        Args:
            schedule: rows of the global batch, at each step where they change.
            rows: those of them that this host holds; a function of the size of the batch, where it changes.
            first_step: where to begin; costs the same for any step.
            num_steps: how many batches to give.

        Raises:
            UserError: if the data end before, by `data.stop_strategy`; while they grow, the iterator raises it.
        """
        sizes, sets = _schedule(schedule), self._train_sets
        steps, closed = range(first_step, first_step + num_steps), threading.Event()
        order: TrainOrder | GrowingOrder = sets.checked_order(sizes, steps)
        if not all(train.final for train in order.sets):
            order = GrowingOrder(
                lambda: sets.checked_order(sizes, steps), sets.caches, whole=sets.needed_whole, closed=closed
            )
        iterator = TrainIterator(order, sizes, rows, steps, closed)
        self._iterators.append(iterator)
        return iterator

    def validation(self) -> dict[str, EvalSet | PendingEvalSet]:
        """Returns the held-out sets by name; empty where the configuration names none."""
        return {evals.name: evals for evals in self._row_builder.eval_sets(self.caches)}

    def close(self) -> None:
        """Ends the threads of every iterator given out, and the tokenising of text that is not there yet."""
        for iterator in self._iterators:
            iterator.close()
        self._iterators.clear()
        if self.builds is not None:
            self.builds.close()


def _schedule(value: int | BatchSchedule) -> BatchSchedule:
    return BatchSchedule.constant(value) if isinstance(value, int) else value
