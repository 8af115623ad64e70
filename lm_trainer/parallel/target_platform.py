"""The platform that programs are compiled for, which need not be the one that compiles them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax

# Of each thread by itself. JAX counts it into the keys of its caches of traced functions: what was traced for one
# platform is traced again for another.
_platform = jax.make_user_context(None)


def target_platform() -> str:
    """`cpu`, `gpu` or `tpu`: where the program that is being traced is to run."""
    return _platform.value or jax.default_backend()


def compiling_for(platform: str) -> AbstractContextManager[Any]:
    """Has models choose kernels as on `platform`, while this thread compiles for devices that are elsewhere.

    A thread that is started meanwhile has to enter it again, as those of `compile_on_each` do.
    """
    return _platform(platform)
