"""Arrays of values for numbered rows, such as the predictions of a frozen model, in one directory.

    manifest.json    everything that determines the values; its hash is in the name of the directory
    rows.json        the number of rows so far
    parts/NNNNNN     a fixed number of rows (the last part may have fewer): the values of each row in the order of the
                     names, little-endian, row after row; then the SHA-256 of these bytes

Files are written atomically. All parts except the last are never changed. Rows are written in order, so an interrupted
process continues after the rows of `rows.json`.

Shape letters: N rows.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data.cache.format import MANIFEST, fingerprint
from lm_trainer.data.cache.kvstore import KvStore

Fields = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Name -> shape and dtype of the values of a row."""

_FORMAT = 1
_ROWS = "rows.json"
_PART_BYTES = 8 << 20
"""Approximate size of a part in bytes."""
_DIGEST_BYTES = hashlib.sha256().digest_size
_PARTS_IN_MEMORY = 4
"""Number of parts that a reader keeps, each of which is verified when it is read."""


class RowLayout:
    """Layout of the values of a row in memory and in files.

    Attributes:
        row: structured dtype of a row.
        rows_per_part: number of rows in a part.
    """

    def __init__(self, fields: Fields):
        self.row = np.dtype({"names": sorted(fields), "formats": [_format_of(fields[name]) for name in sorted(fields)]})
        self.rows_per_part = max(_PART_BYTES // self.row.itemsize, 1)

    def join(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns arrays [N, ...] by name as structured rows [N]."""
        joined_N = np.empty(len(next(iter(arrays.values()))), self.row)
        for name, array in arrays.items():
            joined_N[name] = array
        return joined_N

    def split(self, joined_N: np.ndarray) -> dict[str, np.ndarray]:
        """Returns structured rows [N] as arrays [N, ...] by name; the inverse of `join`."""
        return {name: np.ascontiguousarray(joined_N[name]) for name in self.row.fields or ()}


class RowValues:
    """Values of numbered rows in a directory. Picklable, and safe to use from several threads.

    Args:
        parent: directory or URL that contains the directory of the values.
        title: name of the values, for messages.
        facts: everything that determines the values, as a JSON object.
        fields: the values of a row.

    Raises:
        UserError: if the directory was made from other facts, or its manifest is damaged.
    """

    def __init__(self, parent: str, title: str, facts: Mapping[str, Any], fields: Fields):
        self._arguments = (parent, title, facts, fields)
        self.title, self.layout = title, RowLayout(fields)
        described = {name: [list(shape), np.dtype(dtype).name] for name, (shape, dtype) in fields.items()}
        self._manifest = {"format": _FORMAT, "fields": described, "rows_per_part": self.layout.rows_per_part, **facts}
        self.store = KvStore(f"{parent.rstrip('/')}/frozen-{fingerprint(self._manifest)}")
        self._parts: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()
        self._check_manifest()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def count_rows(self) -> int:
        """Returns the number of rows whose values are stored."""
        record = self.store.read_json(_ROWS)
        return 0 if record is None else int(record["rows"])

    def read(self, rows_N: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the values of rows, [N, ...] by name.

        Raises:
            MachineError: if a part is missing or damaged, or does not have the rows.
        """
        joined_N, size = np.empty(len(rows_N), self.layout.row), self.layout.rows_per_part
        for part in np.unique(rows_N // size).tolist():
            indices = np.flatnonzero(rows_N // size == part)
            values, offsets = self._read_part(part), rows_N[indices] - part * size
            if offsets.max() >= len(values):
                raise self._damage_error(part, "has too few rows")
            joined_N[indices] = values[offsets]
        return self.layout.split(joined_N)

    def _read_part(self, part: int) -> np.ndarray:
        with self._lock:
            if part not in self._parts:
                self._parts[part] = self._load_part(part)
                if len(self._parts) > _PARTS_IN_MEMORY:
                    self._parts.popitem(last=False)
            self._parts.move_to_end(part)
            return self._parts[part]

    def _load_part(self, part: int) -> np.ndarray:
        content = self.store.read(part_key(part))
        if content is None:
            raise self._damage_error(part, "is missing")
        values, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if hashlib.sha256(values).digest() != digest or len(values) % self.layout.row.itemsize:
            raise self._damage_error(part, "is damaged")
        return np.frombuffer(values, self.layout.row)

    def _damage_error(self, part: int, problem: str) -> MachineError:
        return MachineError(
            f"{self.store.url}/{part_key(part)} {problem}; remove {self.store.url} to compute {self.title} again"
        )

    def _check_manifest(self) -> None:
        manifest = self.store.read_json(MANIFEST)
        if manifest is None or manifest == self._manifest:
            return
        changed = [key for key in sorted({*manifest, *self._manifest}) if manifest.get(key) != self._manifest.get(key)]
        raise UserError(
            f"{self.store.url} has values that were not made for this run (different: {', '.join(changed)}); remove it "
            f"to compute {self.title} again"
        )

    def open_writer(self) -> RowValuesWriter:
        """Creates the directory if it does not exist, and returns a writer that continues after the stored rows."""
        if self.store.read_json(MANIFEST) is None:
            self.store.write_json(MANIFEST, self._manifest)
        return RowValuesWriter(self)


class RowValuesWriter:
    """Writes the values of consecutive rows.

    Args:
        values: the values that are already stored, with their directory. An incomplete last part is written again with
            its further rows.
    """

    def __init__(self, values: RowValues):
        layout = values.layout
        self._store, self._layout = values.store, layout
        self.rows = values.count_rows()
        """Number of rows so far, including rows that are not written yet."""
        tail = np.arange(self.rows // layout.rows_per_part * layout.rows_per_part, self.rows)
        self._waiting = layout.join(values.read(tail)) if len(tail) else np.empty(0, layout.row)

    def append(self, first: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Appends the rows from number `first` on, [N, ...] by name. Rows that already exist are skipped.

        Parts that are full are written.
        """
        joined_N = self._layout.join(arrays)[max(self.rows - first, 0) :]
        self._waiting, size = np.concatenate([self._waiting, joined_N]), self._layout.rows_per_part
        self.rows += len(joined_N)
        while len(self._waiting) >= size:
            part, self._waiting = self._waiting[:size], self._waiting[size:]
            self._write(part, self.rows - len(self._waiting))

    def finish(self) -> None:
        """Writes the rows of the incomplete last part."""
        if len(self._waiting):
            self._write(self._waiting, self.rows)

    def _write(self, part_N: np.ndarray, end: int) -> None:
        """Writes the part that ends before row `end`."""
        content = part_N.tobytes()
        number = (end - 1) // self._layout.rows_per_part
        self._store.write(part_key(number), content + hashlib.sha256(content).digest())
        # Written last, so that the parts with these rows exist.
        self._store.write_json(_ROWS, {"rows": end})


def part_key(number: int) -> str:
    """Returns the key of a part."""
    return f"parts/{number:06d}"


def _format_of(field: tuple[tuple[int, ...], np.dtype]) -> tuple[np.dtype, tuple[int, ...]]:
    shape, dtype = field
    return np.dtype(dtype).newbyteorder("<"), shape
