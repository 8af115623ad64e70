"""Grain pipelines made by a user-defined function, which yield records to tokenise or rows to train on."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from lm_trainer.core.errors import UserError
from lm_trainer.core.user_code import check_reference, import_object
from lm_trainer.data.sources.base import (
    BadRow,
    Row,
    Shard,
    SourceConfig,
    Split,
    json_type_name,
    make_bad_row,
    read_record,
)

_SHARD_RECORDS = 1 << 16
"""Number of records per shard of a random-access dataset."""
_PROBED = 8
"""Number of elements to read twice. They are spread over a dataset, or its first ones if it has no random access."""


class GrainPipeline(SourceConfig):
    """A Grain pipeline: a `MapDataset` or `IterDataset` returned by a Python function.

    The function runs on every machine that uses the configuration. It must produce the same elements every time.
    """

    type: Literal["grain"] = "grain"
    factory: str
    """The function, as `package.module:function` of an installed package or as `path/to/file.py:function`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""
    validation_args: dict[str, Any] | None = None
    """Keyword arguments for validation data, used instead of `args`; null means no validation data."""
    elements: Literal["records", "rows"] = "records"
    """`records` are texts or objects with the fields that `data.text_key` or `data.format` name. They are tokenised
    into the cache and shuffled like any text. `rows` are trained on unchanged, in the order of the pipeline: objects
    with `tokens` and `targets`, and optionally `weights`, `positions` and `segments`, of length `model.seq_len`; or
    with only `tokens`, of length `model.seq_len` + 1."""
    worker_processes: int = Field(default=0, ge=0)
    """Number of Grain processes that make batches from the rows of a `MapDataset`, for pipelines limited by Python; 0
    uses threads of this process."""

    takes_urls: ClassVar[bool] = False

    @field_validator("factory")
    @classmethod
    def _check_factory(cls, value: str) -> str:
        return check_reference(value)

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls
        if split == "validation" and (self.validation_args is None or self.elements == "rows"):
            return []
        identity = probe_dataset(self, split)
        if self.elements == "rows":
            return [GrainShard(self, split, text_key, fields, identity)]
        length = identity["length"]
        if length == sys.maxsize:
            raise UserError(f"data.source.factory: {self.factory} repeats its records without end; leave repeat() out")
        # If the length of the dataset is unknown, there is a single shard.
        step = _SHARD_RECORDS if length is not None else 1
        ranges = [(first, min(first + step, length)) for first in range(0, length, step)] if length else [(0, None)]
        return [GrainShard(self, split, text_key, fields, identity, *bounds) for bounds in ranges]

    def make_dataset(self, split: Split = "train") -> Any:
        """Makes the dataset of a split.

        Raises:
            UserError: if the function is missing, fails, or returns another type.
        """
        # Imported lazily: Grain imports JAX, which processes that only tokenise do not need.
        import grain

        args = self.validation_args if split == "validation" else self.args
        try:
            dataset = _import_factory(self.factory)(**(args or {}))
        except UserError:
            raise
        except Exception as error:  # user code may raise anything
            raise UserError(f"data.source.factory: {self.factory} failed: {type(error).__name__}: {error}") from error
        if not isinstance(dataset, grain.MapDataset | grain.IterDataset):
            raise UserError(
                f"data.source.factory: {self.factory} returned {type(dataset).__name__}; expected a grain.MapDataset "
                "or grain.IterDataset"
            )
        return dataset


@lru_cache(maxsize=16)
def _import_factory(factory: str) -> Callable[..., object]:
    function = import_object("data.source.factory", factory)
    if not callable(function):
        raise UserError(f"data.source.factory: {factory} is not a function")
    return function


def num_elements(dataset: object) -> int | None:
    """Returns the number of elements; None if it is unknown until the dataset is read."""
    import grain

    return len(dataset) if isinstance(dataset, grain.MapDataset) else None


def probe_dataset(source: GrainPipeline, split: Split) -> dict[str, Any]:
    """Makes a dataset twice, compares some elements, and returns the identity of the dataset.

    Raises:
        UserError: if the datasets differ, or are empty.
    """
    first, second = source.make_dataset(split), source.make_dataset(split)
    lengths = num_elements(first), num_elements(second)
    if lengths[0] != lengths[1]:
        raise UserError(
            f"data.source.factory: {source.factory} is not deterministic: it made a dataset of {lengths[0]} elements, "
            f"and then one of {lengths[1]}"
        )
    elements = _sample_elements(first, lengths[0], source.factory)
    if not elements:
        raise UserError(f"data.source.factory: {source.factory} made a dataset without elements")
    # Read in reverse order, because an element must not depend on the elements read before it.
    second_elements = dict(_sample_elements(second, lengths[0], source.factory, backwards=True))
    for index, element in elements:
        if _hash_element(element) != _hash_element(second_elements.get(index)):
            difference = _describe_difference(element, second_elements.get(index))
            raise UserError(
                f"data.source.factory: {source.factory} is not deterministic: its element {index} was another when it "
                f"was made again ({difference}); seed it with dataset.seed(...)"
            )
    digest = hashlib.sha256("".join(_hash_element(element) for _, element in elements).encode()).hexdigest()
    args = source.validation_args if split == "validation" else source.args
    arguments = json.loads(json.dumps(args, default=str))
    return {"factory": source.factory, "args": arguments, "length": lengths[0], "sample": digest}


def _sample_elements(
    dataset: Any, length: int | None, factory: str, backwards: bool = False
) -> list[tuple[int, object]]:
    try:
        if length is None:
            return list(enumerate(itertools.islice(iter(dataset), _PROBED)))
        last = min(length, 1 << 40) - 1
        indices = sorted({round(last * i / (_PROBED - 1)) for i in range(_PROBED)}, reverse=backwards) if length else []
        return [(index, dataset[index]) for index in indices]
    except Exception as error:  # user code may raise anything
        raise UserError(
            f"data.source.factory: an element of {factory} failed: {type(error).__name__}: {error}"
        ) from error


def _hash_element(element: object) -> str:
    """Returns the hexadecimal SHA-256 hash of the bytes of an element."""
    return hashlib.sha256(b"".join(_iter_bytes(element))).hexdigest()


def _iter_bytes(value: object) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for key in value:
            yield f"\0{key}\0".encode()
            yield from _iter_bytes(value[key])
    elif isinstance(value, list | tuple):
        yield f"\0{len(value)}\0".encode()
        for item in value:
            yield from _iter_bytes(item)
    elif isinstance(value, str | bytes):
        yield value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    elif hasattr(value, "__array__") and np.asarray(value).dtype != object:
        array = np.asarray(value)
        yield f"{array.dtype.str}{array.shape}".encode()
        yield array.tobytes()
    else:
        yield repr(value).encode()


def _describe_difference(first: object, second: object) -> str:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        names = [str(name) for name in first if _hash_element(first[name]) != _hash_element(second.get(name))]
        return f"in {', '.join(names)}"
    if isinstance(first, str) and isinstance(second, str):
        # Long texts may start with the same words, so show both from shortly before the first difference.
        pairs = enumerate(zip(first, second, strict=False))
        start = next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
        first, second = (text[max(0, start - 20) :] for text in (first, second))
        return f"from character {start} on: {first[:40]!r}, then {second[:40]!r}"
    return f"{str(first)[:40]!r}, then {str(second)[:40]!r}"


@dataclass(frozen=True)
class GrainShard:
    """A range of a dataset's records. Each row is an element."""

    source: GrainPipeline
    split: Split
    text_key: str
    fields: tuple[str, ...]
    dataset_identity: dict[str, Any]
    """The identity of the full dataset. See `probe_dataset`."""
    first: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        return 0

    @property
    def text_size(self) -> None:
        return None

    def identity(self) -> dict[str, object]:
        keys = {"fields": list(self.fields)} if self.fields else {"text_key": self.text_key}
        part = {} if self.stop is None else {"first": self.first, "stop": self.stop}
        return {"type": "grain", "elements": self.source.elements, **keys, **self.dataset_identity, **part}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        dataset = self.source.make_dataset(self.split)
        if self.stop is not None:
            elements = (dataset[index] for index in range(self.first + start, self.stop))
        else:
            elements = itertools.islice(iter(dataset), start, None)
        number = start
        while True:
            location = f"{self.source.factory}[{self.first + number}]"
            try:
                element = next(elements)
            except StopIteration:
                return
            except Exception as error:  # user code may raise anything
                raise UserError(f"{location} failed: {type(error).__name__}: {error}") from error
            # A random-access dataset returns None for filtered elements.
            if element is not None:
                yield self._to_row(element)._replace(number=number, where=location)
            number += 1

    def _to_row(self, element: object) -> Row | BadRow:
        if isinstance(element, bytes):
            try:
                element = element.decode("utf-8")
            except UnicodeDecodeError as error:
                return make_bad_row(f"invalid UTF-8 at byte {error.start}")
        if isinstance(element, str) and not self.fields:
            return Row(0, "", element)
        if isinstance(element, list | tuple | np.ndarray) and len(self.fields) == 1:
            element = {self.fields[0]: element}
        if not isinstance(element, Mapping):
            return make_bad_row(f"expected a text or an object, found {json_type_name(element)}")
        if not self.fields and self.text_key not in element and {"tokens", "targets"} <= element.keys():
            return make_bad_row("its elements are rows of tokens; set data.source.elements: rows")
        return read_record(_to_json_value(element), self.text_key, self.fields)


def _to_json_value(value: object) -> object:
    """Converts arrays and tuples to lists, mappings to objects, and bytes to strings, as in JSON."""
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _to_json_value(value.tolist())
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value] if value and not isinstance(value[0], int) else list(value)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
