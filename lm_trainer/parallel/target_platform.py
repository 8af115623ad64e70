"""The platform that programs are compiled for, which need not be the one that compiles them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

# One for all threads: programs for several devices are compiled side by side.
_target: list[str] = []


def target_platform() -> str:
    """`cpu`, `gpu` or `tpu`: where the program that is being traced is to run."""
    return _target[-1] if _target else jax.default_backend()


@contextmanager
def compiling_for(platform: str) -> Iterator[None]:
    """Has models choose kernels as on `platform`, while programs are compiled for devices that are elsewhere."""
    _target.append(platform)
    try:
        yield
    finally:
        _target.pop()
