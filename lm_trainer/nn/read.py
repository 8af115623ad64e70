"""Access to parameters during a computation.

A parameter may be sharded over the devices that share a computation. It is then gathered by the layer that reads it,
not by the program before the first layer, so a device holds the full parameters of only the layers that are being
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
from flax import nnx
from jax.extend.core import Primitive
from jax.typing import DTypeLike

PARAM_NAME = "param_name"
"""Metadata key under which a parameter stores its dotted name in the model."""

Reader = Callable[[str, jax.Array, DTypeLike], jax.Array]
"""`reader(name, values, dtype)` returns the unsharded parameter, or one layer's slice of it, in `dtype`."""

_GATHER = "linear_call"
"""The primitive with which a `Reader` gathers; nothing else uses it."""

_reader: ContextVar[Reader | None] = ContextVar("reader", default=None)


@contextmanager
def parameter_reader(reader: Reader) -> Iterator[None]:
    """Sets the function that reads parameters while a computation is traced."""
    token = _reader.set(reader)
    try:
        yield
    finally:
        _reader.reset(token)


def is_gathering() -> bool:
    """Returns true while tracing a computation whose parameters are gathered where they are read."""
    return _reader.get() is not None


def read(param: nnx.Param, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns the values of a parameter through the reader of the current trace, cast to `dtype` unless it is None."""
    values, reader = param[...], _reader.get()
    name = param.get_metadata().get(PARAM_NAME)
    if reader is None or name is None:
        return values if dtype is None else values.astype(dtype)
    return reader(name, values, values.dtype if dtype is None else dtype)


def saves_all_but_gathered(primitive: Primitive, *_: object, **__: object) -> bool:
    """Policy for `jax.checkpoint` that saves every result except gathered parameters; the backward pass gathers them a
    second time.
    """
    return primitive.name != _GATHER
