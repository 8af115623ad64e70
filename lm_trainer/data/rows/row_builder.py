"""Builds training and evaluation rows from caches, which may be finished or still growing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.loss_mask import DOCUMENT_END
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.config import SINGLE_SET, DataConfig
from lm_trainer.data.formats import AudioFormat, TextFormat
from lm_trainer.data.formats.answers import AnswerFormat
from lm_trainer.data.formats.ids import IdsFormat
from lm_trainer.data.rows.audio_rows import AudioRows, FeatureMasks, SpeechSet, open_audio_rows
from lm_trainer.data.rows.chunks import Chunks
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.rows.grain_rows import GrainRows
from lm_trainer.data.rows.growing_order import POLL_SECONDS
from lm_trainer.data.rows.long_examples import LongExamples, count_long_documents
from lm_trainer.data.rows.order import TrainSet
from lm_trainer.data.rows.packed_set import PackedSet
from lm_trainer.data.rows.packing import PackedRows, PackingPlan, open_packing_plan
from lm_trainer.data.rows.pair_packing import PairPlan, open_pair_plan
from lm_trainer.data.rows.uncounted import TokenMask, Uncounted, read_uncounted
from lm_trainer.data.shuffle import NoShuffle, derive_seed
from lm_trainer.data.sources.grain_pipeline import GrainPipeline
from lm_trainer.data.sources.prebuilt import PrebuiltCache
from lm_trainer.data.tokenize.open_cache import MissingTokens, OpenCache
from lm_trainer.data.tokenizer import HfTokenizer


@dataclass(frozen=True)
class RowBuilder:
    """Splits the text of all sets into rows, and determines the order of each set."""

    config: DataConfig
    tokenizer: HfTokenizer
    seq_len: int
    seed: int

    def train_set(self, name: str, cache: OpenCache) -> TrainSet:
        """Returns one set to train on. While its cache grows, the set has only the rows that are final so far.

        Raises:
            UserError: if the full text is shorter than a row.
        """
        if self.config.sets[name].gives_rows:
            return self._grain_train_set(name)
        # Read first, so that a cache that finishes in the meantime counts as growing, and never the other way around.
        config, final = self.config, cache.finished
        chunks = Chunks(cache.stream, self.seq_len, self.tokenizer.eos_id)
        held_out = config.value_for_set(config.num_validation_sequences, name)
        seed, format = self.seed_for_set(name), config.sets[name].format
        if not final:
            # A packing plan depends on all documents, so no packed row is final before the cache is finished. The same
            # holds for audio, and for documents that do not count, which are checked against the finished cache.
            needs_all_documents = config.packing_of(name) == "best_fit" or isinstance(format, AudioFormat)
            needs_all_documents = needs_all_documents or config.without is not None
            num_rows = 0 if needs_all_documents else _num_final_chunks(cache.stream, self.seq_len, held_out)
            return TrainSet(name, chunks, num_rows, config.shuffle_config, seed, final=False)
        if isinstance(format, AudioFormat):
            audio_rows = self._audio_rows(name, cache, format)
            return self._audio_train_set(name, audio_rows, format, held_out or 0)
        if isinstance(format, AnswerFormat):
            pairs = self._packed_pairs(name, cache, format)
            return TrainSet(name, pairs, pairs.num_rows, config.shuffle_config, seed)
        stop = self._first_held_out_token(name, chunks, held_out)
        rows: Chunks | PackedRows = chunks
        num_rows = chunks.num_rows if stop is None else stop // self.seq_len
        if config.packing_of(name) == "best_fit":
            plan = self._document_plan(name, cache, stop=stop)
            rows = PackedRows(cache.stream, plan, self.seq_len, self.tokenizer.eos_id)
            num_rows = rows.num_rows
        return TrainSet(name, rows, num_rows, config.shuffle_config, seed, mask=self._mask(name, cache, rows))

    @cached_property
    def uncounted(self) -> Mapping[str, Uncounted]:
        """The documents that do not count, by name of the set."""
        return read_uncounted(self.config)

    def _mask(self, name: str, cache: OpenCache, rows: Chunks | PackedRows) -> TokenMask | None:
        if name not in self.uncounted:
            return None
        return TokenMask(rows, *self.uncounted[name].find_runs(self._title(name), cache))

    def _audio_rows(self, name: str, cache: OpenCache, format: AudioFormat) -> AudioRows:
        max_bad = self.config.max_bad_rows if self.config.on_bad_row == "skip" else None
        return open_audio_rows(
            self._title(name), cache, format, seq_len=self.seq_len, eos_id=self.tokenizer.eos_id, max_bad=max_bad
        )

    def _audio_train_set(self, name: str, audio_rows: AudioRows, format: AudioFormat, held_out: int) -> TrainSet:
        if held_out >= audio_rows.num_rows:
            raise UserError(
                f"data.num_validation_sequences holds {held_out} rows out, but there are {audio_rows.num_rows}; "
                "lower it"
            )
        rows, seed = audio_rows.slice_rows(0, audio_rows.num_rows - held_out), self.seed_for_set(name)
        augment = None if format.spec_augment is None else FeatureMasks(format.spec_augment, seed)
        return TrainSet(name, rows, rows.num_rows, self.config.shuffle_config, seed, augment=augment)

    def _packed_pairs(self, name: str, cache: OpenCache, format: AnswerFormat) -> PackedRows:
        packed = self.pack_pairs(name, cache, format)
        return PackedRows(cache.stream, packed.plan, self.seq_len, self.tokenizer.eos_id)

    def _document_plan(self, name: str, cache: OpenCache, *, stop: int | None = None, first: int = 0) -> PackingPlan:
        """Packs the documents of a set, which must be complete. Raises `UserError` as `LongExamples.check`."""
        too_long = self.config.too_long_of(name)
        if too_long in ("skip", "raise"):
            self.count_long_examples(name, cache).check(self._title(name), self.seq_len)
        return open_packing_plan(cache, self.seq_len, stop, first, too_long=too_long)

    def count_long_examples(self, name: str, cache: OpenCache) -> LongExamples:
        """Counts the documents or pairs of a set that are longer than a row. The set must be complete."""
        format = self.config.sets[name].format
        if isinstance(format, AnswerFormat):
            return self.pack_pairs(name, cache, format).long_examples(format)
        return count_long_documents(cache.document_lengths(), self.seq_len, self.config.too_long_of(name))

    def pack_pairs(self, name: str, cache: OpenCache, format: AnswerFormat) -> PairPlan:
        """Packs the pairs of a set, which must be complete. Raises `UserError` as `open_pair_plan`."""
        return open_pair_plan(self._title(name), cache, format, self.seq_len)

    def _title(self, name: str) -> str:
        return "the data" if name == SINGLE_SET else f"the set {name}"

    def _grain_train_set(self, name: str) -> TrainSet:
        """Returns a set of the rows that a Grain pipeline makes, in the pipeline's order."""
        config, source = self.config, self.config.sets[name].source
        assert isinstance(source, GrainPipeline)
        if config.value_for_set(config.num_validation_sequences, name) is not None:
            raise UserError("data.num_validation_sequences: nothing can be held out of the rows of a pipeline of Grain")
        if not config.configs and "shuffle" in config.changed_fields and config.shuffle is not False:
            raise UserError("data.shuffle: the rows of a pipeline of Grain are read in its own order; remove the key")
        rows = GrainRows(source, self.seq_len, self.tokenizer.vocab_size, self.tokenizer.eos_id)
        return TrainSet(name, rows, rows.num_rows, NoShuffle(), self.seed_for_set(name))

    def seed_for_set(self, name: str) -> int:
        """Returns the seed of one set's order."""
        return derive_seed(self.seed, name) if self.config.configs else self.seed

    def _first_held_out_token(self, name: str, chunks: Chunks, held_out: int | None) -> int | None:
        """Returns the index in the stream of the first held-out token; None if there are no held-out rows."""
        title = "the training data" if name == SINGLE_SET else f"the set {name}"
        if chunks.num_rows == 0:
            raise UserError(
                f"{title} holds {len(chunks.stream)} tokens, less than one row of {self.seq_len}; add text or lower "
                "model.seq_len"
            )
        if held_out is None:
            return None
        stop = _first_held_out_chunk(chunks.stream, self.seq_len, held_out) * self.seq_len
        if stop <= 0:
            raise UserError(
                f"data.num_validation_sequences holds {held_out} rows out, but {title} has {chunks.num_rows} of "
                f"{self.seq_len} tokens; lower it"
            )
        return stop

    def eval_sets(self, caches: Mapping[str, OpenCache]) -> Iterator[EvalSet | PendingEvalSet]:
        """Yields the held-out part of every set. If its cache is still growing, reads of it wait.

        Raises:
            UserError: if a set has both validation text and held-out training rows.
        """
        config = self.config
        for name in config.sets:
            title = name if config.configs else "validation"
            cache, train = caches.get(f"{name}/validation"), caches.get(f"{name}/train")
            held_out = config.value_for_set(config.num_validation_sequences, name)
            if cache is not None and train is not None and held_out is not None:
                raise UserError(f"{title} has validation text of its own; remove data.num_validation_sequences for it")
            if cache is not None:
                yield from self._open_or_defer(name, title, cache, partial(self._full_eval_set, name, title, cache))
            elif held_out is not None and train is not None:
                yield from self._open_or_defer(
                    name, title, train, partial(self._tail_eval_set, name, title, train, held_out)
                )

    def _open_or_defer(
        self, name: str, title: str, cache: OpenCache, make: Callable[[], EvalSet]
    ) -> Iterator[EvalSet | PendingEvalSet]:
        if not cache.finished:
            yield PendingEvalSet(title, cache, make, tags=tuple(self.config.sets[name].tags))
        elif (eval_set := make()).num_tokens:
            yield eval_set

    def _full_eval_set(self, name: str, title: str, cache: OpenCache) -> EvalSet:
        return self._eval_set(name, title, cache, cache.ledger.num_documents, 0)

    def _tail_eval_set(self, name: str, title: str, train: OpenCache, held_out: int) -> EvalSet:
        """Returns the last `held_out` rows of a training text."""
        format = self.config.sets[name].format
        if isinstance(format, AudioFormat):
            return self._eval_set(name, title, train, held_out, 0, last_rows=held_out)
        first = _first_held_out_chunk(train.stream, self.seq_len, held_out) * self.seq_len
        # The ledger only has counts for full parts, so the documents of these rows are counted from their tokens.
        mask = train.stream.loss_mask
        ends_T = (
            train.stream.read_from(first) == self.tokenizer.eos_id
            if mask is None
            else mask.read_from(first) & DOCUMENT_END
        )
        documents = int(np.count_nonzero(ends_T))
        return self._eval_set(name, title, train, documents, first)

    def _eval_set(
        self, name: str, title: str, cache: OpenCache, documents: int, first: int, last_rows: int | None = None
    ) -> EvalSet:
        config = self.config.sets[name]
        if isinstance(config.format, AudioFormat):
            audio_rows = self._audio_rows(name, cache, config.format)
            audio_rows = audio_rows.slice_rows(0 if last_rows is None else audio_rows.num_rows - last_rows)
            tags = tuple(config.tags)
            return SpeechSet(
                title, cache.stream, self.seq_len, self.tokenizer, audio_rows.num_rows, tags=tags, audio_rows=audio_rows
            )
        plain = isinstance(config.format, TextFormat) and not isinstance(config.source, PrebuiltCache)
        # For tokens that stay in a user's file, the ledger counts the bytes of the ids.
        plain = plain and not cache.ledger.places
        make = EvalSet
        if isinstance(config.format, AnswerFormat):
            make = partial(PackedSet, plan=self.pack_pairs(name, cache, config.format).plan)
        elif self.config.packing_of(name) == "best_fit":
            splits = self.config.too_long_of(name) == "split"
            make = partial(PackedSet, plan=self._document_plan(name, cache, first=first), splits_documents=splits)
        return make(
            title,
            cache.stream,
            self.seq_len,
            self.tokenizer,
            documents,
            # The templates of other formats add text to the documents.
            text_bytes=sum(cache.ledger.text_bytes) if plain and not first else None,
            tags=tuple(config.tags),
            # A loss on pairs is not a loss per byte of text.
            is_text=not isinstance(config.format, IdsFormat | AnswerFormat),
            first_token=first,
        )


@dataclass
class PendingEvalSet:
    """A held-out set that is still being tokenised. Reads wait until it is complete."""

    name: str
    cache: OpenCache
    make: Callable[[], EvalSet]
    _complete_set: EvalSet | None = None

    tags: tuple[str, ...] = ()
    growing = True

    def missing_tokens(self) -> MissingTokens | None:
        """Describes the tokens that are still missing; None if the set is complete.

        Raises:
            UserError: if they will never arrive because their build failed.
        """
        if self.cache.finished:
            return None
        self.cache.raise_if_failed()
        return self.cache.missing_tokens(None)

    @property
    def token_bytes(self) -> np.ndarray | None:
        """See `EvalSet`. Waits until the set is complete."""
        return self.wait_until_complete().token_bytes

    def batches(self, batch_size: int, *, rows: Sequence[int], max_batches: int | None = None) -> Iterator[Batch]:
        """Waits until the set is complete, and returns its batches. See `EvalSet.batches`."""
        return self.wait_until_complete().batches(batch_size, rows=rows, max_batches=max_batches)

    def wait_until_complete(self) -> EvalSet:
        """Waits until the set is complete, and returns it."""
        while self.missing_tokens() is not None:
            time.sleep(POLL_SECONDS)
        self._complete_set = self._complete_set or self.make()
        return self._complete_set


def _num_final_chunks(stream: TokenStream, seq_len: int, held_out: int | None) -> int:
    """Returns the number of chunks that are certain to be trained on, regardless of what text follows."""
    # A chunk is complete once the token after its end, which is its last target, exists. The last `held_out` chunks so
    # far do not count, since they may turn out to be held out.
    return max((len(stream) - 1) // seq_len if held_out is None else len(stream) // seq_len - held_out, 0)


def _first_held_out_chunk(stream: TokenStream, seq_len: int, count: int) -> int:
    """Returns the number of the first of the last `count` chunks of a stream. The last chunk may be short."""
    return -(-len(stream) // seq_len) - count
