"""Arrays without values, with which a step is rehearsed: it calls its programs, and none of them runs.

While a rehearsal goes on, `lm_trainer.step.dispatch.program.Program` gives abstract arrays in return for abstract
arrays. An abstract array counts the bytes that it would take on one device, from when it is made until Python drops it
or a program consumes it. So what a device holds at a time is what the code of a step keeps, and needs no description.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from lm_trainer.parallel.mesh import batch_shards


class Memory:
    """The bytes that one device holds, by what they are for.

    Args:
        device: the device.
    """

    def __init__(self, device: Any):
        self.device = device
        self.held: dict[str, int] = {}
        self.calls = 0
        """Programs called so far."""
        self._queued: list[Buffer] = []

    @property
    def total(self) -> int:
        """All bytes together."""
        return sum(self.held.values())

    def change(self, purpose: str, size: int) -> None:
        """Adds so many bytes, or takes them away."""
        self.held[purpose] = self.held.get(purpose, 0) + size

    def drop(self, buffer: Buffer) -> None:
        """Frees a buffer that Python has dropped; one that is `queued` once its last program is known to be done."""
        if buffer.queued:
            kept = Buffer(self, buffer.purpose, buffer.size)
            kept.last_call = buffer.last_call
            self._queued.append(kept)
        buffer.free()

    def wait(self, call: int) -> None:
        """The host has waited for this call of a program, so that all before it are done."""
        self._queued = [buffer for buffer in self._queued if buffer.last_call > call]


class Buffer:
    """The part of an array that the device of a `Memory` holds; gone with the last reference to it.

    Args:
        memory: of the device.
        purpose: what the array is for.
        size: in bytes.
        queued: the memory stays taken until the host has waited for the last program that reads it.
    """

    __slots__ = ("last_call", "memory", "purpose", "queued", "size")

    def __init__(self, memory: Memory, purpose: str, size: int, *, queued: bool = False):
        self.memory, self.purpose, self.size, self.queued = memory, purpose, size, queued
        self.last_call = memory.calls
        memory.change(purpose, size)

    def free(self) -> None:
        """Gives the memory back, as where a program consumes the array."""
        self.memory.change(self.purpose, -self.size)
        self.size = 0

    def __del__(self) -> None:
        if self.size:
            self.memory.drop(self)


class Description(NamedTuple):
    """Everything about an array but its values."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The same for JAX."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    def bytes_on(self, device: Any) -> int:
        """Bytes of the part on a device."""
        if device not in self.sharding.device_set:
            return 0
        return math.prod(self.sharding.shard_shape(self.shape)) * np.dtype(self.dtype).itemsize


class Shard(NamedTuple):
    """The part of an abstract array on one device, as `jax.Shard` has it."""

    device: Any
    data: AbstractArray


class AbstractArray:
    """An array on devices, without values.

    Args:
        about: shape, dtype and sharding.
        buffer: its part on the device whose memory is counted; None where it has none there.
        made: the number of the program's call that returned it.
    """

    __slots__ = ("about", "buffer", "made")

    def __init__(self, about: Description, buffer: Buffer | None, made: int = 0):
        self.about, self.buffer, self.made = about, buffer, made

    @property
    def shape(self) -> tuple[int, ...]:
        return self.about.shape

    @property
    def dtype(self) -> Any:
        return self.about.dtype

    @property
    def sharding(self) -> Any:
        return self.about.sharding

    @property
    def ndim(self) -> int:
        return len(self.about.shape)

    @property
    def addressable_shards(self) -> list[Shard]:
        """The parts on the devices of the rehearsal."""
        rehearsal = current_rehearsal()
        assert rehearsal is not None, "an abstract array outlived its rehearsal"
        part = self.sharding.shard_shape(self.shape)
        return [
            Shard(
                device,
                AbstractArray(
                    Description(part, self.dtype, SingleDeviceSharding(device)),
                    self.buffer if device == rehearsal.memory.device else None,
                    self.made,
                ),
            )
            for device in rehearsal.devices
            if device in self.sharding.device_set
        ]

    def block_until_ready(self) -> AbstractArray:
        """The host waits for the program that returned this array."""
        rehearsal = current_rehearsal()
        assert rehearsal is not None, "an abstract array outlived its rehearsal"
        rehearsal.memory.wait(self.made)
        return self


class Rehearsal(Protocol):
    """Takes the place of programs and transfers."""

    memory: Memory
    devices: Sequence[Any]
    """The devices of this process that take part."""

    def run(self, program: Any, args: tuple[Any, ...]) -> Any:
        """The results of a program, as abstract arrays."""
        ...


_CURRENT = ContextVar[Rehearsal | None]("rehearsal", default=None)
_ONE_SHARD = ContextVar[bool]("one_shard", default=False)


def current_rehearsal() -> Rehearsal | None:
    """The rehearsal that this thread is in."""
    return _CURRENT.get()


@contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """Has programs and transfers go to `rehearsal`."""
    token = _CURRENT.set(rehearsal)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextmanager
def on_one_shard() -> Iterator[None]:
    """Has what is built meanwhile take the devices of one shard of the batch for all that this process has.

    The devices of other shards do as much or less, and need not be rehearsed.
    """
    token = _ONE_SHARD.set(True)
    try:
        yield
    finally:
        _ONE_SHARD.reset(token)


def local_devices(mesh: Mesh) -> list[Any]:
    """The devices of a mesh that this process computes with: its own, or of those one shard of the batch."""
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    # The devices of a shard are neighbours in a mesh.
    return devices[: mesh.size // batch_shards(mesh)] if _ONE_SHARD.get() else devices


def put_on(values: Any, sharding: Sharding, purpose: str) -> Any:
    """Abstract arrays like these values of the host, whole on each device; None outside of a rehearsal."""
    rehearsal = current_rehearsal()
    if rehearsal is None:
        return None

    def one(x: Any) -> AbstractArray:
        about = Description(np.shape(x), x.dtype, sharding)
        return abstract(about, rehearsal.memory, purpose)

    return jax.tree.map(one, values)


def abstract(
    about: Description, memory: Memory, purpose: str, *, queued: bool = False, size: int | None = None
) -> AbstractArray:
    """A new array; `size` is the number of its bytes on the device, computed if not given."""
    size = about.bytes_on(memory.device) if size is None else size
    return AbstractArray(about, Buffer(memory, purpose, size, queued=queued) if size else None, memory.calls)


def join_parts(shape: tuple[int, ...], sharding: Sharding, parts: Sequence[Any]) -> Any:
    """As `jax.make_array_from_single_device_arrays`, of abstract arrays too; no data are copied."""
    if isinstance(parts[0], AbstractArray):
        buffer = next((part.buffer for part in parts if part.buffer is not None), None)
        return AbstractArray(Description(shape, parts[0].dtype, sharding), buffer, parts[0].made)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)
