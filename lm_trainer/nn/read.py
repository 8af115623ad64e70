"""Parameters as a computation reads them.

A parameter may lie in pieces on the devices that share a computation. The layer that reads it then gathers it, not the
program before the first layer: so no device ever holds more than the layers at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

PARAM_NAME = "param_name"
"""The metadata key of a parameter's dotted name in its model."""

Reader = Callable[[str, jax.Array, DTypeLike], jax.Array]
"""`reader(name, values, dtype)`: the whole of a parameter, or of one layer's slice of it, in `dtype`."""

_GATHER = "linear_call"
"""The primitive by which a `Reader` gathers, and nothing else is computed."""

_reader: ContextVar[Reader | None] = ContextVar("reader", default=None)


@contextmanager
def read_by(reader: Reader) -> Iterator[None]:
    """Says, while a computation is traced, that its parameters are read by `reader`."""
    token = _reader.set(reader)
    try:
        yield
    finally:
        _reader.reset(token)


def gathers() -> bool:
    """Returns true while a computation is traced that gathers its parameters where it reads them."""
    return _reader.get() is not None


def read(param: nnx.Param, dtype: DTypeLike | None = None) -> jax.Array:
    """The values of a parameter, cast to `dtype` unless that is None, as the computation being traced reads them."""
    values, reader = param[...], _reader.get()
    name = param.get_metadata().get(PARAM_NAME)
    if reader is None or name is None:
        return values if dtype is None else values.astype(dtype)
    return reader(name, values, values.dtype if dtype is None else dtype)


def saves_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint`: keeps every result but gathered parameters, which the gradient gathers again."""
    return primitive.name != _GATHER
