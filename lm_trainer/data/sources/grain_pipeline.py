"""Pipelines of Grain that a function of the user's makes: of records to tokenise, or of rows to train on."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expanded
from lm_trainer.data.sources.base import BadRow, Row, Shard, SourceConfig, Split, bad, kind_of, read_record

_SHARD_RECORDS = 1 << 16
"""Records of a random-access dataset that one process reads."""
_PROBED = 8
"""Elements that are read twice, spread over a dataset; of one without random access, its first."""


class GrainPipeline(SourceConfig):
    """A pipeline of Grain: a `MapDataset` or `IterDataset` that a Python function returns.

    The code of the function runs wherever the configuration does. It has to give the same elements every time.
    """

    type: Literal["grain"] = "grain"
    factory: str
    """The function, as `package.module:function` of what is installed, or as `path/to/file.py:function`."""
    args: dict[str, Any] = {}
    """Named arguments of the function."""
    validation_args: dict[str, Any] | None = None
    """Its arguments for records to evaluate on, in place of `args`; there are none, if absent."""
    elements: Literal["records", "rows"] = "records"
    """`records` are texts, or objects with the fields that `data.text_key` or `data.format` names; they are tokenised
    into the cache, and shuffled as any text. `rows` are trained on as they are, in the order of the pipeline: objects
    with `tokens` and `targets`, and if need be `weights`, `positions` and `segments`, of `model.seq_len` each; or with
    `tokens` alone, one more than that."""
    worker_processes: int = Field(default=0, ge=0)
    """Processes of Grain that make batches of the rows of a `MapDataset`, where Python is the bottleneck; 0: threads
    of this one."""

    takes_urls: ClassVar[bool] = False

    @field_validator("factory")
    @classmethod
    def _check_factory(cls, value: str) -> str:
        if not re.fullmatch(r"[^:]+(\.py|\w):[A-Za-z_]\w*", value):
            raise ValueError(f"expected package.module:function or file.py:function, got {value!r}")
        return value

    def shards(
        self, split: Split, urls: Sequence[str] = (), text_key: str = "text", fields: tuple[str, ...] = ()
    ) -> list[Shard]:
        del urls
        if split == "validation" and (self.validation_args is None or self.elements == "rows"):
            return []
        identity = probe(self, split)
        if self.elements == "rows":
            return [GrainShard(self, split, text_key, fields, identity)]
        length = identity["length"]
        if length == sys.maxsize:
            raise UserError(f"data.source.factory: {self.factory} repeats its records without end; leave repeat() out")
        # One shard, if only reading tells where a dataset ends.
        step = _SHARD_RECORDS if length is not None else 1
        ranges = [(first, min(first + step, length)) for first in range(0, length, step)] if length else [(0, None)]
        return [GrainShard(self, split, text_key, fields, identity, *bounds) for bounds in ranges]

    def dataset(self, split: Split = "train") -> Any:
        """Makes the dataset of a split.

        Raises:
            UserError: if the function is not there, fails, or returns something else.
        """
        # With Grain comes JAX, which processes that only tokenise need not load.
        import grain

        args = self.validation_args if split == "validation" else self.args
        try:
            made = _function(self.factory)(**(args or {}))
        except UserError:
            raise
        except Exception as error:  # whatever a function of the user's raises
            raise UserError(f"data.source.factory: {self.factory} failed: {type(error).__name__}: {error}") from error
        if not isinstance(made, grain.MapDataset | grain.IterDataset):
            raise UserError(
                f"data.source.factory: {self.factory} returned {type(made).__name__}; expected a grain.MapDataset or "
                "grain.IterDataset"
            )
        return made


@lru_cache(maxsize=16)
def _function(factory: str) -> Any:
    where, _, name = factory.rpartition(":")
    try:
        module = _load_file(where) if where.endswith(".py") else importlib.import_module(where)
    except ImportError as error:
        raise UserError(
            f"data.source.factory: cannot import {where}: {error}; install it, or name its file: path/to/file.py:{name}"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"data.source.factory: there is no function {name} in {where}")
    return function


def _load_file(path: str) -> Any:
    full = os.path.abspath(expanded(path))
    if not os.path.isfile(full):
        raise UserError(f"data.source.factory: there is no file {full}")
    name = f"lmt_pipeline_{hashlib.sha256(full.encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, full)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Known before it runs, as any module is: its classes are looked up there.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def length_of(dataset: Any) -> int | None:
    """Returns the number of elements; None where only reading tells."""
    import grain

    return len(dataset) if isinstance(dataset, grain.MapDataset) else None


def probe(source: GrainPipeline, split: Split) -> dict[str, Any]:
    """Makes a dataset twice, reads some elements of both, and returns what they are known by.

    Raises:
        UserError: if they differ, or there are none.
    """
    one, other = source.dataset(split), source.dataset(split)
    lengths = length_of(one), length_of(other)
    if lengths[0] != lengths[1]:
        raise UserError(
            f"data.source.factory: {source.factory} is not deterministic: it made a dataset of {lengths[0]} elements, "
            f"and then one of {lengths[1]}"
        )
    found = _sample(one, lengths[0], source.factory)
    if not found:
        raise UserError(f"data.source.factory: {source.factory} made a dataset without elements")
    # The other way around: an element must not depend on those that were read before it.
    again = dict(_sample(other, lengths[0], source.factory, backwards=True))
    for index, element in found:
        if _digest(element) != _digest(again.get(index)):
            raise UserError(
                f"data.source.factory: {source.factory} is not deterministic: its element {index} was another when it "
                f"was made again ({_difference(element, again.get(index))}); seed it with dataset.seed(...)"
            )
    digest = hashlib.sha256("".join(_digest(element) for _, element in found).encode()).hexdigest()
    args = source.validation_args if split == "validation" else source.args
    arguments = json.loads(json.dumps(args, default=str))
    return {"factory": source.factory, "args": arguments, "length": lengths[0], "sample": digest}


def _sample(dataset: Any, length: int | None, factory: str, backwards: bool = False) -> list[tuple[int, Any]]:
    try:
        if length is None:
            return list(enumerate(itertools.islice(iter(dataset), _PROBED)))
        last = min(length, 1 << 40) - 1
        indices = sorted({round(last * i / (_PROBED - 1)) for i in range(_PROBED)}, reverse=backwards) if length else []
        return [(index, dataset[index]) for index in indices]
    except Exception as error:  # whatever a pipeline of the user's raises
        raise UserError(
            f"data.source.factory: an element of {factory} failed: {type(error).__name__}: {error}"
        ) from error


def _digest(element: Any) -> str:
    """Hashes an element to hexadecimal digits; equal bytes give equal hashes."""
    return hashlib.sha256(b"".join(_pieces(element))).hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for key in value:
            yield f"\0{key}\0".encode()
            yield from _pieces(value[key])
    elif isinstance(value, list | tuple):
        yield f"\0{len(value)}\0".encode()
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, str | bytes):
        yield value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    elif hasattr(value, "__array__") and np.asarray(value).dtype != object:
        array = np.asarray(value)
        yield f"{array.dtype.str}{array.shape}".encode()
        yield array.tobytes()
    else:
        yield repr(value).encode()


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = [str(name) for name in one if _digest(one[name]) != _digest(other.get(name))]
        return f"in {', '.join(names)}"
    if isinstance(one, str) and isinstance(other, str):
        # They may be alike for long: shown from a little before the place where they are not.
        pairs = enumerate(zip(one, other, strict=False))
        at = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
        one, other = (text[max(0, at - 20) :] for text in (one, other))
        return f"from character {at} on: {one[:40]!r}, then {other[:40]!r}"
    return f"{str(one)[:40]!r}, then {str(other)[:40]!r}"


@dataclass(frozen=True)
class GrainShard:
    """Some records of a dataset; a row is an element."""

    source: GrainPipeline
    split: Split
    text_key: str
    fields: tuple[str, ...]
    found: Any
    """The identity of the whole dataset: see `probe`."""
    first: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        return 0

    @property
    def text_size(self) -> None:
        return None

    def identity(self) -> dict[str, Any]:
        what = {"fields": list(self.fields)} if self.fields else {"text_key": self.text_key}
        part = {} if self.stop is None else {"first": self.first, "stop": self.stop}
        return {"type": "grain", "elements": self.source.elements, **what, **self.found, **part}

    def rows(self, start: int = 0) -> Iterator[Row | BadRow]:
        dataset = self.source.dataset(self.split)
        if self.stop is not None:
            elements = (dataset[index] for index in range(self.first + start, self.stop))
        else:
            elements = itertools.islice(iter(dataset), start, None)
        number = start
        while True:
            where = f"{self.source.factory}[{self.first + number}]"
            try:
                element = next(elements)
            except StopIteration:
                return
            except Exception as error:  # whatever a pipeline of the user's raises
                raise UserError(f"{where} failed: {type(error).__name__}: {error}") from error
            # None is what a filter leaves out of a random-access dataset.
            if element is not None:
                yield self._row(element)._replace(number=number, where=where)
            number += 1

    def _row(self, element: Any) -> Row | BadRow:
        if isinstance(element, bytes):
            try:
                element = element.decode("utf-8")
            except UnicodeDecodeError as error:
                return bad(f"invalid UTF-8 at byte {error.start}")
        if isinstance(element, str) and not self.fields:
            return Row(0, "", element)
        if isinstance(element, list | tuple | np.ndarray) and len(self.fields) == 1:
            element = {self.fields[0]: element}
        if not isinstance(element, Mapping):
            return bad(f"expected a text or an object, found {kind_of(element)}")
        if not self.fields and self.text_key not in element and {"tokens", "targets"} <= element.keys():
            return bad("its elements are rows of tokens; set data.source.elements: rows")
        return read_record(_plain(element), self.text_key, self.fields)


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it: lists, objects and strings in place of arrays, tuples and bytes."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value] if value and not isinstance(value[0], int) else list(value)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
