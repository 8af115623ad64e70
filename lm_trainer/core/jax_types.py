"""Types of JAX objects for use in annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

PyTree = Any
"""A nested container of arrays (or of shapes, shardings or dtypes) with any structure that `jax.tree` handles."""


class Device(Protocol):
    """The interface of `jax.Device`, whose own class type checkers do not know."""

    @property
    def id(self) -> int:
        """Number of the device, which is unique among the devices of a platform in all processes."""
        ...

    @property
    def platform(self) -> str:
        """Name of the platform: `cpu`, `gpu` or `tpu`."""
        ...

    @property
    def device_kind(self) -> str:
        """Model name, such as `TPU v5e`."""
        ...

    @property
    def process_index(self) -> int:
        """Index of the process to which the device belongs."""
        ...

    @property
    def client(self) -> object:
        """The runtime of the device's platform."""
        ...

    @property
    def coords(self) -> Sequence[int]:
        """Position of a TPU chip in its slice. Other devices do not have a position."""
        ...

    def __hash__(self) -> int: ...
