"""Abstract arrays for the rehearsal of a step, in which the step calls its programs but none of them runs.

During a rehearsal, `lm_trainer.step.dispatch.program.Program` takes and returns abstract arrays. An abstract array
counts the bytes that it would take on one device, from its creation until Python drops it or a program consumes it. The
memory that a device holds at any time thus follows from the code of the step, without a separate description.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from lm_trainer.core.jax_types import Device, PyTree
from lm_trainer.parallel.mesh import batch_shards


class Memory:
    """Number of bytes that one device holds, by purpose.

    Args:
        device: the device.
    """

    def __init__(self, device: Device):
        self.device = device
        self.held: dict[str, int] = {}
        self.calls = 0
        """Number of programs called so far."""
        self._queued: list[Buffer] = []

    @property
    def total(self) -> int:
        """Sum of the bytes over all purposes."""
        return sum(self.held.values())

    def add_bytes(self, purpose: str, size: int) -> None:
        """Adds `size` bytes to a purpose; may be negative."""
        self.held[purpose] = self.held.get(purpose, 0) + size

    def drop(self, buffer: Buffer) -> None:
        """Frees a buffer that Python has dropped; a `queued` buffer once its last program is known to be done."""
        if buffer.queued:
            pending = Buffer(self, buffer.purpose, buffer.size)
            pending.last_call = buffer.last_call
            self._queued.append(pending)
        buffer.free()

    def free_finished(self, call: int) -> None:
        """Frees queued buffers; called when the host has waited for program call `call`, so earlier ones are done."""
        self._queued = [buffer for buffer in self._queued if buffer.last_call > call]


class Buffer:
    """Part of an array on the device of a `Memory`. It is freed with the last reference to it.

    Args:
        memory: memory of the device.
        purpose: purpose of the array.
        size: size in bytes.
        queued: True if the memory stays allocated until the host has waited for the last program that reads it.
    """

    __slots__ = ("last_call", "memory", "purpose", "queued", "size")

    def __init__(self, memory: Memory, purpose: str, size: int, *, queued: bool = False):
        self.memory, self.purpose, self.size, self.queued = memory, purpose, size, queued
        self.last_call = memory.calls
        memory.add_bytes(purpose, size)

    def free(self) -> None:
        """Frees the memory, as when a program consumes the array."""
        self.memory.add_bytes(self.purpose, -self.size)
        self.size = 0

    def __del__(self) -> None:
        if self.size:
            self.memory.drop(self)


class Description(NamedTuple):
    """Shape, dtype and sharding of an array."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    sharding: Sharding

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The equivalent `jax.ShapeDtypeStruct`."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def bytes_on(self, device: Device) -> int:
        """Returns the size in bytes of the part on a device."""
        if device not in self.sharding.device_set:
            return 0
        return math.prod(self.sharding.shard_shape(self.shape)) * np.dtype(self.dtype).itemsize


class Shard(NamedTuple):
    """Part of an abstract array on one device, like `jax.Shard`."""

    device: Device
    data: AbstractArray


class AbstractArray:
    """An array on devices that has no values.

    Args:
        description: shape, dtype and sharding.
        buffer: part of the array on the device whose memory is counted; None if there is no part on that device.
        call: number of the program call that returned it.
    """

    __slots__ = ("buffer", "call", "description")

    def __init__(self, description: Description, buffer: Buffer | None, call: int = 0):
        self.description, self.buffer, self.call = description, buffer, call

    @property
    def shape(self) -> tuple[int, ...]:
        return self.description.shape

    @property
    def dtype(self) -> DTypeLike:
        return self.description.dtype

    @property
    def sharding(self) -> Sharding:
        return self.description.sharding

    @property
    def ndim(self) -> int:
        return len(self.description.shape)

    @property
    def addressable_shards(self) -> list[Shard]:
        """Parts of the array on the devices of the rehearsal."""
        rehearsal = current_rehearsal()
        assert rehearsal is not None, "an abstract array outlived its rehearsal"
        part = self.sharding.shard_shape(self.shape)
        return [
            Shard(
                device,
                AbstractArray(
                    Description(part, self.dtype, SingleDeviceSharding(device)),
                    self.buffer if device == rehearsal.memory.device else None,
                    self.call,
                ),
            )
            for device in rehearsal.devices
            if device in self.sharding.device_set
        ]

    def block_until_ready(self) -> AbstractArray:
        """Waits, as the host would, for the program that returned this array."""
        rehearsal = current_rehearsal()
        assert rehearsal is not None, "an abstract array outlived its rehearsal"
        rehearsal.memory.free_finished(self.call)
        return self


class Rehearsal(Protocol):
    """Replacement for programs and transfers during a rehearsal."""

    memory: Memory
    devices: Sequence[Device]
    """Devices of this process that take part."""

    def run(self, program: PyTree, args: tuple[PyTree, ...]) -> PyTree:
        """Returns the results of a program as abstract arrays."""
        ...


_CURRENT = ContextVar[Rehearsal | None]("rehearsal", default=None)
_ONE_SHARD = ContextVar[bool]("one_shard", default=False)
_COMPARING = ContextVar[bool]("comparing", default=False)


def current_rehearsal() -> Rehearsal | None:
    """Returns the rehearsal of this thread; None outside of a rehearsal."""
    return _CURRENT.get()


@contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """Redirects programs and transfers to `rehearsal`."""
    token = _CURRENT.set(rehearsal)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def comparing_programs() -> Iterator[None]:
    """Makes rehearsals in this context compile the programs of microbatches and compare them, as a run does."""
    token = _COMPARING.set(True)
    try:
        yield
    finally:
        _COMPARING.reset(token)


def compares_programs() -> bool:
    """Returns true in a run, and in a rehearsal in the context of `comparing_programs`."""
    return current_rehearsal() is None or _COMPARING.get()


@contextmanager
def on_one_shard() -> Iterator[None]:
    """Makes objects built in this context treat the devices of one batch shard as all devices of this process.

    The devices of other shards do the same work or less, so they need not be rehearsed.
    """
    token = _ONE_SHARD.set(True)
    try:
        yield
    finally:
        _ONE_SHARD.reset(token)


def local_devices(mesh: Mesh) -> list[Device]:
    """Returns the devices of a mesh that this process computes with; `on_one_shard` limits them to one batch shard."""
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    # The devices of a batch shard are contiguous in a mesh.
    return devices[: mesh.size // batch_shards(mesh)] if _ONE_SHARD.get() else devices


def put_abstract(values: PyTree, sharding: Sharding, purpose: str) -> PyTree:
    """Returns abstract arrays for these host arrays; None outside of a rehearsal."""
    rehearsal = current_rehearsal()
    if rehearsal is None:
        return None

    def create_array(x: np.ndarray) -> AbstractArray:
        description = Description(np.shape(x), x.dtype, sharding)
        return create_abstract_array(description, rehearsal.memory, purpose)

    return jax.tree.map(create_array, values)


def create_abstract_array(
    description: Description, memory: Memory, purpose: str, *, queued: bool = False, size: int | None = None
) -> AbstractArray:
    """Creates an abstract array. `size` is its number of bytes on the device; None computes it."""
    size = description.bytes_on(memory.device) if size is None else size
    return AbstractArray(description, Buffer(memory, purpose, size, queued=queued) if size else None, memory.calls)


def join_parts(shape: tuple[int, ...], sharding: Sharding, parts: Sequence[PyTree]) -> PyTree:
    """Same as `jax.make_array_from_single_device_arrays`, but also for abstract arrays. Does not copy data."""
    if isinstance(parts[0], AbstractArray):
        buffer = next((part.buffer for part in parts if part.buffer is not None), None)
        return AbstractArray(Description(shape, parts[0].dtype, sharding), buffer, parts[0].call)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)
