"""Adapter from the rows that a Grain pipeline produces to the rows of a run.

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
from lm_trainer.data.sources.grain_pipeline import GrainPipeline, num_elements

_SNAPSHOTS = 64
"""Number of iterator states to retain, which is more than the number of batches read ahead."""


class GrainRows:
    """The rows of a pipeline. Picklable: unpickling recreates the pipeline.

    Args:
        source: the pipeline, with `elements: rows`.
        seq_len: S.
        vocab_size: exclusive upper bound of the ids.
        eos_id: token id that ends documents in rows that only have tokens.
    """

    def __init__(self, source: GrainPipeline, seq_len: int, vocab_size: int, eos_id: int):
        self.source, self.seq_len, self._vocab_size, self._eos_id = source, seq_len, vocab_size, eos_id
        self._dataset = source.make_dataset()
        self._random = isinstance(self._dataset, grain.MapDataset)
        if source.worker_processes and not self._random:
            raise UserError(
                "data.source.worker_processes reads a MapDataset; end your IterDataset in mp_prefetch(...) yourself"
            )
        self._sequence = None if self._random else _SequentialReader(self._dataset, source.factory)
        self._check_element(0, self._read_elements([0])[0])

    def __reduce__(self) -> tuple[type[GrainRows], tuple[GrainPipeline, int, int, int]]:
        return type(self), (self.source, self.seq_len, self._vocab_size, self._eos_id)

    @property
    def num_rows(self) -> int:
        length = num_elements(self._dataset)
        return sys.maxsize if length is None else length

    @property
    def note(self) -> str:
        """A note on determinism, seeking, and resuming with another number of processes."""
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
            UserError: if an element is not a valid row, or the pipeline ends too early.
        """
        numbers = [int(row) for row in rows_B]
        rows = [
            self._check_element(number, element)
            for number, element in zip(numbers, self._read_elements(numbers), strict=True)
        ]
        if all(set(row) == {"tokens"} for row in rows):
            tokens_BT = np.stack([row["tokens"] for row in rows])
            return make_batch(tokens_BT, np.full(len(rows), self.seq_len + 1), self._eos_id)
        tokens, targets, weights, positions, segments = (
            np.stack([self._check_field(row, name) for row in rows]) for name in _TYPES
        )
        return Batch(tokens, targets, weights, positions, segments)

    def token_runs(self, row: int) -> list[tuple[int, int]]:
        del row
        return []

    def rows_containing(self, start: int, stop: int) -> np.ndarray:
        del start, stop
        return np.zeros(0, np.int64)

    def state_before(self, row: int) -> dict[str, Any] | None:
        """Returns the pipeline's state shortly before this row; None if no state is needed."""
        return None if self._sequence is None else self._sequence.state_before(row)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state of the pipeline.

        Raises:
            UserError: if the pipeline rejects the state.
        """
        if self._sequence is not None:
            self._sequence.restore(state)

    def _read_elements(self, numbers: Sequence[int]) -> list[object]:
        if self._sequence is not None:
            return self._sequence.read_elements(numbers)
        elements = []
        for number in numbers:
            try:
                elements.append(self._dataset[number])
            except Exception as error:  # user code may raise anything
                label = f"{self.source.factory}[{number}]"
                raise UserError(f"{label} failed: {type(error).__name__}: {error}") from error
        return elements

    def _check_element(self, number: int, element: object) -> dict[str, np.ndarray]:
        """Returns the fields of an element, converted to their dtypes."""
        label = f"{self.source.factory}[{number}]"
        if isinstance(element, Batch):
            element = {name: value for name, value in element._asdict().items() if value is not None}
        if not isinstance(element, Mapping) or "tokens" not in element:
            actual = ", ".join(map(str, element)) if isinstance(element, Mapping) else type(element).__name__
            raise UserError(f"{label} is no row: expected an object with tokens and targets, found {actual}")
        if unknown := [str(name) for name in element if name not in _TYPES]:
            raise UserError(f"{label} has a field {unknown[0]}; a row has {', '.join(_TYPES)}")
        tokens_only = set(element) == {"tokens"}
        if not tokens_only and "targets" not in element:
            raise UserError(f"{label} has no targets; give them, or tokens alone, {self.seq_len + 1} of them")
        row = {str(name): np.asarray(value) for name, value in element.items()}
        expected = (self.seq_len + tokens_only,)
        for name, value in row.items():
            if value.shape != expected or value.dtype.kind not in ("fiub" if name == "weights" else "iu"):
                raise UserError(
                    f"{label}: {name} has shape {value.shape} and type {value.dtype.name}; expected {expected} of "
                    f"{_TYPES[name].__name__}, by model.seq_len"
                )
        for name in ("tokens", "targets"):
            ids = row.get(name)
            if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size):
                index = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
                raise UserError(
                    f"{label}: {name}[{index}] is {ids[index]}, but data.tokenizer has {self._vocab_size} tokens"
                )
        return {name: value.astype(_TYPES[name]) for name, value in row.items()}

    def _check_field(self, row: Mapping[str, np.ndarray], name: str) -> np.ndarray:
        if name in row:
            return row[name]
        if "targets" not in row:
            batch = make_batch(row["tokens"][None], np.array([self.seq_len + 1]), self._eos_id)
            return np.asarray(getattr(batch, name))[0]
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


class _SequentialReader:
    """Gives access to the elements of an `IterDataset` by number.

    From one request to the next, the numbers mostly increase.

    Threads that read ahead request batches concurrently and out of order, so skipped elements are buffered for a while.
    """

    def __init__(self, dataset: grain.IterDataset, factory: str):
        self._dataset, self._factory, self._lock = dataset, factory, threading.Lock()
        self._iterator, self._next = iter(dataset), 0
        self._buffer: dict[int, object] = {}
        self._snapshots: dict[int, Any] = {}

    def read_elements(self, numbers: Sequence[int]) -> list[object]:
        with self._lock:
            if any(number < self._next and number not in self._buffer for number in numbers):
                self._iterator, self._next, self._buffer = iter(self._dataset), 0, {}
            self._save_state()
            last = max(numbers)
            while self._next <= last:
                self._buffer[self._next] = self._next_element()
                self._next += 1
            elements = [self._buffer[number] for number in numbers]
            # Keeps elements of several batches, since no thread is further behind.
            oldest = min(numbers) - 8 * (last - min(numbers) + 1)
            self._buffer = {number: element for number, element in self._buffer.items() if number >= oldest}
            return elements

    def _next_element(self) -> object:
        try:
            return next(self._iterator)
        except StopIteration:
            raise UserError(
                f"{self._factory} ended after {self._next} rows; let it repeat, or lower trainer.num_train_steps"
            ) from None
        except Exception as error:  # user code may raise anything
            element_name = f"{self._factory}[{self._next}]"
            raise UserError(f"{element_name} failed: {type(error).__name__}: {error}") from error

    def _save_state(self) -> None:
        try:
            state = self._iterator.get_state()
            json.dumps(state)
        except (TypeError, ValueError, NotImplementedError):  # no state, or not one that a checkpoint can hold
            return
        self._snapshots[self._next] = state
        while len(self._snapshots) > _SNAPSHOTS:
            del self._snapshots[min(self._snapshots)]

    def state_before(self, row: int) -> dict[str, Any] | None:
        with self._lock:
            numbers = [number for number in self._snapshots if number <= row]
            return {"row": max(numbers), "state": self._snapshots[max(numbers)]} if numbers else None

    def restore(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            iterator = iter(self._dataset)
            try:
                iterator.set_state(state["state"])
            except Exception as error:  # every iterator raises different errors
                raise UserError(f"{self._factory} cannot go on from the state in the checkpoint: {error}") from None
            self._iterator, self._next, self._buffer, self._snapshots = iterator, int(state["row"]), {}, {}
