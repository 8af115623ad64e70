"""Rows that a pipeline of Grain makes, as rows of a run.

Shape letters: B rows, S positions, T = S + 1.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.rows.chunks import make_batch
from lm_trainer.data.sources.grain_pipeline import GrainPipeline, length_of

_SNAPSHOTS = 64
"""States of an iterator that are kept: more than there are batches read ahead."""


class GrainRows:
    """The rows of a pipeline; picklable, made anew where it arrives.

    Args:
        source: with `elements: rows`.
        seq_len: S.
        vocab_size: above all ids.
        eos_id: ends documents in rows that are tokens alone.
    """

    def __init__(self, source: GrainPipeline, seq_len: int, vocab_size: int, eos_id: int):
        self.source, self.seq_len, self._vocab_size, self._eos_id = source, seq_len, vocab_size, eos_id
        self._dataset = source.dataset()
        self._random = isinstance(self._dataset, grain.MapDataset)
        if source.worker_processes and not self._random:
            raise UserError(
                "data.source.worker_processes reads a MapDataset; end your IterDataset in mp_prefetch(...) yourself"
            )
        self._sequence = None if self._random else _Sequence(self._dataset, source.factory)
        self._check(0, self._get([0])[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.seq_len, self._vocab_size, self._eos_id)

    @property
    def num_rows(self) -> int:
        length = length_of(self._dataset)
        return sys.maxsize if length is None else length

    @property
    def note(self) -> str:
        """A line about determinism, seeks and other numbers of processes."""
        if self._random:
            count = "without end" if self.num_rows == sys.maxsize else f"{self.num_rows:,}"
            return (
                f"{self.source.factory}: rows of Grain with random access, {count}, in the order of the pipeline: "
                "any step is read at once, on any number of processes"
            )
        return (
            f"{self.source.factory}: rows of Grain in sequence: every process reads all of them and takes its own, on "
            "any number of processes; a resume goes on from the state in its checkpoint, any other step is reached by "
            "reading from the beginning"
        )

    def read(self, rows_B: np.ndarray) -> Batch:
        """Reads rows.

        Raises:
            UserError: if an element is no row, or the pipeline ends before.
        """
        numbers = [int(row) for row in rows_B]
        rows = [self._check(number, element) for number, element in zip(numbers, self._get(numbers), strict=True)]
        if all(set(row) == {"tokens"} for row in rows):
            tokens_BT = np.stack([row["tokens"] for row in rows])
            return make_batch(tokens_BT, np.full(len(rows), self.seq_len + 1), self._eos_id)
        return Batch(*(np.stack([self._field(row, name) for row in rows]) for name in _TYPES))

    def spans(self, row: int) -> list[tuple[int, int]]:
        del row
        return []

    def rows_with(self, start: int, stop: int) -> np.ndarray:
        del start, stop
        return np.zeros(0, np.int64)

    def state_before(self, row: int) -> dict[str, Any] | None:
        """Returns a state from which this row comes next or soon; None where none is needed."""
        return None if self._sequence is None else self._sequence.state_before(row)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state.

        Raises:
            UserError: where the pipeline does not take it.
        """
        if self._sequence is not None:
            self._sequence.restore(state)

    def _get(self, numbers: Sequence[int]) -> list[Any]:
        if self._sequence is not None:
            return self._sequence.get(numbers)
        found = []
        for number in numbers:
            try:
                found.append(self._dataset[number])
            except Exception as error:  # whatever a pipeline of the user's raises
                where = f"{self.source.factory}[{number}]"
                raise UserError(f"{where} failed: {type(error).__name__}: {error}") from error
        return found

    def _check(self, number: int, element: Any) -> dict[str, np.ndarray]:
        """Returns the fields of an element, as arrays of their types."""
        where = f"{self.source.factory}[{number}]"
        if isinstance(element, Batch):
            element = {name: value for name, value in element._asdict().items() if value is not None}
        if not isinstance(element, Mapping) or "tokens" not in element:
            found = ", ".join(map(str, element)) if isinstance(element, Mapping) else type(element).__name__
            raise UserError(f"{where} is no row: expected an object with tokens and targets, found {found}")
        if unknown := [str(name) for name in element if name not in _TYPES]:
            raise UserError(f"{where} has a field {unknown[0]}; a row has {', '.join(_TYPES)}")
        alone = set(element) == {"tokens"}
        if not alone and "targets" not in element:
            raise UserError(f"{where} has no targets; give them, or tokens alone, {self.seq_len + 1} of them")
        row = {str(name): np.asarray(value) for name, value in element.items()}
        wanted = (self.seq_len + alone,)
        for name, value in row.items():
            if value.shape != wanted or value.dtype.kind not in ("fiub" if name == "weights" else "iu"):
                raise UserError(
                    f"{where}: {name} has shape {value.shape} and type {value.dtype.name}; expected {wanted} of "
                    f"{_TYPES[name].__name__}, by model.seq_len"
                )
        for name in ("tokens", "targets"):
            ids = row.get(name)
            if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size):
                at = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
                raise UserError(f"{where}: {name}[{at}] is {ids[at]}, but data.tokenizer has {self._vocab_size} tokens")
        return {name: value.astype(_TYPES[name]) for name, value in row.items()}

    def _field(self, row: Mapping[str, np.ndarray], name: str) -> np.ndarray:
        if name in row:
            return row[name]
        if "targets" not in row:
            whole = make_batch(row["tokens"][None], np.array([self.seq_len + 1]), self._eos_id)
            return np.asarray(getattr(whole, name))[0]
        return _DEFAULTS[name](self.seq_len)


_TYPES: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "targets": np.int32,
    "weights": np.float32,
    "positions": np.int32,
    "segments": np.int32,
}
_DEFAULTS: dict[str, Callable[[int], np.ndarray]] = {
    "weights": lambda length: np.ones(length, np.float32),
    "positions": lambda length: np.arange(length, dtype=np.int32),
    "segments": lambda length: np.zeros(length, np.int32),
}


class _Sequence:
    """Elements of an `IterDataset` by their numbers, which rise from one request to the next, but for a little.

    Threads that read ahead ask for batches at the same time, so elements that were passed over are kept for a while.
    """

    def __init__(self, dataset: Any, factory: str):
        self._dataset, self._factory, self._lock = dataset, factory, threading.Lock()
        self._iterator, self._next = iter(dataset), 0
        self._kept: dict[int, Any] = {}
        self._snapshots: dict[int, Any] = {}

    def get(self, numbers: Sequence[int]) -> list[Any]:
        with self._lock:
            if any(number < self._next and number not in self._kept for number in numbers):
                self._iterator, self._next, self._kept = iter(self._dataset), 0, {}
            self._remember()
            last = max(numbers)
            while self._next <= last:
                self._kept[self._next] = self._advance()
                self._next += 1
            found = [self._kept[number] for number in numbers]
            # As many as several batches span: no thread is further behind.
            oldest = min(numbers) - 8 * (last - min(numbers) + 1)
            self._kept = {number: kept for number, kept in self._kept.items() if number >= oldest}
            return found

    def _advance(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            raise UserError(
                f"{self._factory} ended after {self._next} rows; let it repeat, or lower trainer.num_train_steps"
            ) from None
        except Exception as error:  # whatever a pipeline of the user's raises
            where = f"{self._factory}[{self._next}]"
            raise UserError(f"{where} failed: {type(error).__name__}: {error}") from error

    def _remember(self) -> None:
        try:
            state = self._iterator.get_state()
            json.dumps(state)
        except (TypeError, ValueError, NotImplementedError):  # no state, or none that a checkpoint can hold
            return
        self._snapshots[self._next] = state
        while len(self._snapshots) > _SNAPSHOTS:
            del self._snapshots[min(self._snapshots)]

    def state_before(self, row: int) -> dict[str, Any] | None:
        with self._lock:
            known = [number for number in self._snapshots if number <= row]
            return {"row": max(known), "state": self._snapshots[max(known)]} if known else None

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            iterator = iter(self._dataset)
            try:
                iterator.set_state(state["state"])
            except Exception as error:  # each iterator has errors of its own
                raise UserError(f"{self._factory} cannot go on from the state in the checkpoint: {error}") from None
            self._iterator, self._next, self._kept, self._snapshots = iterator, int(state["row"]), {}, {}
