"""Levanter token caches, which have a ledger, and TensorStore arrays with the tokens and the document ends."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from lm_trainer.core.config import LocalPath
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path
from lm_trainer.core.safe_names import path_inside
from lm_trainer.data.cache.format import fingerprint
from lm_trainer.data.cache.token_location import open_array
from lm_trainer.data.sources.base import Shard, SourceConfig, Split
from lm_trainer.data.sources.tokens import DocumentEnds, TokenArray, TokenShard

_LEDGER, _FIELD = "shard_ledger.json", "input_ids"


class LevanterCache(SourceConfig):
    """A cache of tokenised text that was built by Levanter. Its arrays are read in place."""

    type: Literal["levanter"] = "levanter"
    path: LocalPath
    """The directory with `train/` and, optionally, `validation/`. This is the `cache_dir` of Levanter."""
    document_ends: DocumentEnds = "eos"
    """`eos`: the end-of-document token ends documents, and must match the document ends in the cache. `index`: only the
    cache defines the document ends, for data tokenised without an end-of-document token."""

    takes_urls: ClassVar[bool] = False
    has_fields: ClassVar[bool] = False

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls, text_key, fields
        root = local_path(self.path).absolute() / split
        if not (root / _LEDGER).is_file():
            if split == "validation":
                return []
            raise UserError(f"data.source.path: {root} holds no cache of Levanter: there is no {_LEDGER} in it")
        return [LevanterShard(str(root), fingerprint(_read_ledger(root)), self.document_ends)]


def _read_ledger(root: Path) -> dict[str, Any]:
    try:
        ledger = json.loads((root / _LEDGER).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{root / _LEDGER} cannot be read: {error}") from None
    if not ledger.get("is_finished"):
        raise UserError(f"{root} is not finished; let Levanter build it to its end")
    return ledger


@dataclass(frozen=True)
class LevanterShard(TokenShard):
    """The cache of a split. See `TokenShard`."""

    root: str
    ledger: str
    """Hash of the ledger."""
    document_ends: DocumentEnds

    @property
    def by_index(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.document_ends == "index"

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for path in self._id_directories() for file in (path / "data").rglob("*"))

    def identity(self) -> dict[str, object]:
        return {"type": "levanter", "url": self.root, "ledger": self.ledger, "document_ends": self.document_ends}

    def check_unchanged(self) -> None:
        if fingerprint(_read_ledger(Path(self.root))) != self.ledger:
            raise UserError(f"{self.root} changed while it was indexed; start again when nothing writes to it any more")

    def token_arrays(self, dtype: np.dtype) -> list[TokenArray]:
        del dtype
        arrays = []
        for path in self._id_directories():
            ends = _read_document_ends(path)
            data = str(path / "data")
            ids = open_array(data, _zarr_driver(data)).dtype.numpy_dtype
            if ids.kind not in "iu":
                raise UserError(f"{data} holds {ids.name}, no token ids")
            arrays.append(
                TokenArray(str(path), data, _zarr_driver(data), ids.str, 0, int(ends[-1]) if len(ends) else 0)
            )
        return arrays

    def read_document_ends(self, number: int, array: TokenArray) -> np.ndarray:
        del array
        return _read_document_ends(self._id_directories()[number])

    def _id_directories(self) -> list[Path]:
        """Lists the directories with the ids. There is a single one, or one per shard if the shards are not merged."""
        root = Path(self.root)
        ledger = _read_ledger(root)
        parts = (
            [path_inside(root, name, root) for name in ledger.get("finished_shards", [])]
            if ledger.get("layout") == "sharded"
            else []
        )
        for part in parts or [root]:
            fields = sorted(
                entry.name for entry in os.scandir(part) if entry.is_dir() and (part / entry.name / "data").is_dir()
            )
            if _FIELD not in fields:
                raise UserError(f"{part} has no field {_FIELD} (fields: {', '.join(fields) or 'none'})")
            if other_fields := [name for name in fields if name not in (_FIELD, "attention_mask")]:
                raise UserError(
                    f"{part} has {', '.join(other_fields)} beside {_FIELD}, which would not be heeded; it is not read"
                )
        return [part / _FIELD for part in parts or [root]]


def _zarr_driver(path: str) -> str:
    return "zarr3" if os.path.exists(f"{path}/zarr.json") else "zarr"


def _read_document_ends(path: Path) -> np.ndarray:
    """Reads the document ends. The first item of the array is their number, and the ends follow."""
    array = open_array(str(path / "offsets"), _zarr_driver(str(path / "offsets")))
    rows = int(array[0].read().result())
    ends = np.asarray(array[1 : rows + 1].read().result(), np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    if wrong := np.flatnonzero(ends < starts).tolist():
        raise UserError(
            f"{path}/offsets: document {wrong[0]} ends at {ends[wrong[0]]}, before it begins; it is damaged"
        )
    return ends
