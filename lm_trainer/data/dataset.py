"""The opened data of a run: train batches and held-out sets."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import grain
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.html_table import html_table
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data.cache.row_values import RowValues
from lm_trainer.data.config import DataConfig
from lm_trainer.data.fingerprints import DataIdentity
from lm_trainer.data.formats.chat import compile_format_template
from lm_trainer.data.loader import HostRows, TrainIterator, row_dataset
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.rows.grain_rows import GrainRows
from lm_trainer.data.rows.growing_order import GrowingOrder
from lm_trainer.data.rows.long_examples import LongExamples
from lm_trainer.data.rows.order import TrainOrder, TrainSet
from lm_trainer.data.rows.row_builder import PendingEvalSet, RowBuilder
from lm_trainer.data.rows.train_sets import TrainSets, num_full_steps
from lm_trainer.data.tokenize.background import BackgroundBuilds
from lm_trainer.data.tokenize.open_cache import OpenCache
from lm_trainer.data.tokenizer import HfTokenizer

_SAMPLED_ROWS, _ROWS_PER_READ = 2048, 64
"""Number of rows to sample for estimating the fraction without any loss token, and number of rows to read at once."""


class Data:
    """Train batches and held-out sets, in an order that only the seed determines.

    Args:
        config: the `data` section.
        row_builder: the builder that splits caches into rows.
        cache_dir: directory of the tokenizer and of all caches that have no separate directory.
        caches: every cache, keyed by `NAME/train` and `NAME/validation`.
        builds: builds of the unfinished caches.
        build_notes: notes on caches that this call built or began to build.

    Raises:
        UserError: if it is already known that a set cannot be trained or evaluated on.
    """

    def __init__(
        self,
        config: DataConfig,
        row_builder: RowBuilder,
        cache_dir: str,
        caches: Mapping[str, OpenCache],
        builds: BackgroundBuilds | None = None,
        build_notes: Sequence[str] = (),
    ):
        self.config, self.cache_dir, self.caches, self.builds = config, cache_dir, caches, builds
        self._row_builder, self._build_notes = row_builder, build_notes
        self._train_sets = TrainSets(config, row_builder, caches)
        self._identity = DataIdentity(config, row_builder, caches, self._train_sets)
        self._iterators: list[TrainIterator] = []
        self._frozen_evals: Mapping[str, RowValues] = {}
        # Requested now, so that unusable data are refused before anything else is built.
        _ = self.train_sets, self.validation()

    def _repr_html_(self) -> str:
        """Returns the size of each cache, for a notebook."""
        rows = [
            (name, f"{len(cache.stream):,}", f"{len(cache.stream) // self._row_builder.seq_len:,}", cache.finished)
            for name, cache in self.caches.items()
        ]
        tokenizer = (
            f"{self.tokenizer.vocab_size:,} tokens in the vocabulary, rows of {self._row_builder.seq_len} inputs"
        )
        return f"<p>{tokenizer}</p>{html_table(rows, ('cache', 'tokens', 'tokens / inputs of a row', 'complete'))}"

    @property
    def tokenizer(self) -> HfTokenizer:
        return self._row_builder.tokenizer

    @property
    def published_tokenizer(self) -> HfTokenizer:
        """The tokenizer to save with the model, with the chat template that made the training rows.

        Prompts are then built by the same template when the model is used. If several sets have different templates of
        their own, the tokenizer is unchanged.
        """
        named = [getattr(set_config.format, "chat_template", None) for set_config in self.config.sets.values()]
        sources = {compile_format_template(name, self.tokenizer).source for name in named if name is not None}
        if len(sources) != 1 or sources == {self.tokenizer.chat_template}:
            return self.tokenizer
        return self.tokenizer.with_chat_template(*sources)

    @property
    def train_sets(self) -> Sequence[TrainSet]:
        """The sets to train on in configuration order, as far as they are final."""
        return self._train_sets.current_sets()

    @property
    def notes(self) -> list[str]:
        """Notes on caches that are newly built, and on sets whose order is not controlled by this program alone."""
        return [*self._build_notes, *self._grain_notes()]

    def _grain_notes(self) -> list[str]:
        return [train.rows.note for train in self.train_sets if isinstance(train.rows, GrainRows)]

    def long_examples(self) -> dict[str, LongExamples]:
        """Returns the numbers of examples longer than a row of every complete set that has such examples, by cache.

        Examples are the documents of sets with prompts and answers, or the pairs of sets of pairs.
        """
        counts = {}
        for name, cache in self.caches.items():
            set_name = name.rpartition("/")[0]
            packed = self.config.packing_of(set_name) == "best_fit"
            if packed and self.config.sets[set_name].format.has_prompts and cache.finished:
                counts[name] = self._row_builder.count_long_examples(set_name, cache)
        return {name: count for name, count in counts.items() if count.too_long}

    @property
    def complete(self) -> bool:
        """True once all text has been tokenised."""
        return all(cache.finished for cache in self.caches.values())

    @property
    def num_train_tokens(self) -> int:
        """Number of tokens in the text of all sets to train on, including held-out rows. It grows until `complete`."""
        return sum(len(cache.stream) for cache in self._train_sets.caches.values())

    @property
    def waits_for_all(self) -> str | None:
        """The setting that makes the first batch wait for all training text; None if no setting does."""
        return self._train_sets.waits_for_all

    def limit_ids(self, count: int) -> None:
        """Makes reads fail for ids >= `count`, which the tokenizer has but the model has no embedding for."""
        for cache in self.caches.values():
            cache.limit_ids(count)

    def check_builds(self) -> None:
        """Raises the error of any failed background build, even if its text is not needed yet."""
        for cache in self.caches.values():
            cache.raise_if_failed()

    def fingerprint(self, step: int | None = None) -> str:
        """Hashes the tokens, their meaning and the order, but not the text's location. Differs if any batch may differ.

        Args:
            step: if not None, only batches before this step count, so that later weights may change.

        Raises:
            RuntimeError: until the data are `complete`.
        """
        if not self.complete:
            raise RuntimeError("the text is still being tokenised; use fingerprints")
        return self._identity.hash_tokens(step)

    def fingerprints(self, step: int | None = None) -> dict[str, str]:
        """Returns hashes that identify the data of a run.

        Once the data are complete, `tokens` is the result of `fingerprint`. `sources` is available immediately. It is a
        hash of the files with their sizes and times, of the tokenizer and of the rules. Two runs have the same data if
        they agree in `tokens` or, if one of them does not have it, in `sources`.
        """
        hashes = {"tokens": self.fingerprint(step)} if self.complete else {}
        return {**hashes, "sources": self._identity.hash_sources(step)}

    def train_order(self, schedule: int | BatchSchedule) -> TrainOrder:
        """Returns the rows of a run with these batch sizes in order, as far as they are final."""
        return self._train_sets.train_order(_as_batch_schedule(schedule))

    def share_without_loss(self, schedule: int | BatchSchedule, num_steps: int) -> float:
        """Estimates the fraction of a run's rows that do not have any loss token.

        Samples as many rows as can be read within a second, at most 2,048. Returns 0 without reading any if every token
        counts, or if the rows are not final yet.

        Args:
            schedule: number of rows of the global batch, at each step where it changes.
            num_steps: number of steps of the run.
        """
        sets = self.train_sets
        skipped = self.config.features_shape is not None or any(isinstance(train.rows, GrainRows) for train in sets)
        if skipped or not self.complete or not any(self._has_mask(train.name) for train in sets):
            return 0.0
        order, sizes = self.train_order(schedule), _as_batch_schedule(schedule)
        last = min(sizes.rows_before(num_steps), sys.maxsize if order.length is None else order.length)
        positions_N = np.unique(np.linspace(0, last - 1, min(last, _SAMPLED_ROWS)).astype(np.int64))
        # Read in random order, so that the rows that are read in time are a fair sample.
        positions_N = np.random.default_rng(0).permutation(positions_N)
        until, empty, read = time.monotonic() + 1, 0, 0
        while read < len(positions_N) and time.monotonic() < until:
            batch = order.read(positions_N[read : read + _ROWS_PER_READ])
            empty += int(np.count_nonzero(~np.any(batch.weights > 0, axis=1)))
            read += len(batch.weights)
        return empty / max(read, 1)

    def _has_mask(self, name: str) -> bool:
        return self.caches[f"{name}/train"].stream.loss_mask is not None

    def max_steps(self, schedule: int | BatchSchedule) -> int | None:
        """Returns the number of full batches until `data.stop_strategy` ends training; None if it never does."""
        return num_full_steps(self.train_order(schedule), _as_batch_schedule(schedule))

    def counts(self, cache: str, document: int) -> bool:
        """Returns False if `data.without` makes a document of a training cache (`NAME/train`) not count."""
        name, _, split = cache.rpartition("/")
        uncounted = self._row_builder.uncounted.get(name) if split == "train" else None
        return uncounted is None or not uncounted.includes(document)

    def train_rows(self, schedule: int | BatchSchedule) -> grain.MapDataset[Batch]:
        """Returns the rows of a run in order, as a Grain dataset. Element i is row i, a `Batch` of fields [S].

        `train` batches the same rows: the batch of a step consists of `schedule.at(step)` elements, starting with
        element `schedule.rows_before(step)`. Elements are read individually, and slices, `batch`, `map` and the other
        Grain methods work. The length follows from `data.stop_strategy`, and is `sys.maxsize` if the data never end.

        Args:
            schedule: number of rows of the global batch, at each step where it changes.

        Raises:
            RuntimeError: until the data are `complete`.
        """
        if not self.complete:
            raise RuntimeError("the text is still being tokenised; open the data without background=True")
        return row_dataset(self.train_order(schedule))

    def train(
        self, schedule: int | BatchSchedule, *, rows: HostRows, first_step: int = 0, num_steps: int
    ) -> TrainIterator:
        """Opens the batches of the steps [first_step, first_step + num_steps), for as many epochs as they take.

        Args:
            schedule: number of rows of the global batch, at each step where it changes.
            rows: numbers of this host's rows in the global batch; a function of the batch size if it changes.
            first_step: first step to read. The cost is the same for any step.
            num_steps: number of batches.

        Raises:
            UserError: if the data end earlier according to `data.stop_strategy`. While they grow, the iterator raises
                it.
        """
        sizes, sets = _as_batch_schedule(schedule), self._train_sets
        steps, closed = range(first_step, first_step + num_steps), threading.Event()
        order: TrainOrder | GrowingOrder = sets.order_for_steps(sizes, steps)
        if not all(train.final for train in order.sets):
            order = GrowingOrder(
                lambda: sets.order_for_steps(sizes, steps), sets.caches, need_all=sets.needs_all, closed=closed
            )
        iterator = TrainIterator(order, sizes, rows, steps, closed)
        self._iterators.append(iterator)
        return iterator

    def validation(self) -> dict[str, EvalSet | PendingEvalSet]:
        """Returns the held-out sets by name; empty if the configuration has none."""
        return {evals.name: self._with_frozen(evals) for evals in self._row_builder.eval_sets(self.caches)}

    def _with_frozen(self, evals: EvalSet | PendingEvalSet) -> EvalSet | PendingEvalSet:
        values = self._frozen_evals.get(evals.name)
        return evals if values is None or isinstance(evals, PendingEvalSet) else replace(evals, frozen=values)

    def attach_frozen(self, train: RowValues, evals: Mapping[str, RowValues]) -> None:
        """Makes batches contain the values of a frozen model.

        Args:
            train: values of the row at each position of the run.
            evals: values of the rows of held-out sets, by the names of the sets. All text must be tokenised.
        """
        self._train_sets.frozen, self._frozen_evals = train, evals

    def close(self) -> None:
        """Ends the threads of every open iterator, and ends background tokenising."""
        for iterator in self._iterators:
            iterator.close()
        self._iterators.clear()
        if self.builds is not None:
            self.builds.close()


def _as_batch_schedule(value: int | BatchSchedule) -> BatchSchedule:
    return BatchSchedule.constant(value) if isinstance(value, int) else value
