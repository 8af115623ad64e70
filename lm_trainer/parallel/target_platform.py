"""Platform that programs are compiled for, which may differ from the platform of the process that compiles them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax

# Local to a thread. JAX includes it in the keys of its caches of traced functions, so functions are retraced for each
# platform.
_platform = jax.make_user_context(None)


def target_platform() -> str:
    """Returns the platform that the traced program will run on: `cpu`, `gpu` or `tpu`."""
    return _platform.value or jax.default_backend()


def compiling_for(platform: str) -> AbstractContextManager[object]:
    """Makes models choose kernels for `platform` while this thread compiles for devices of another machine.

    Threads that are started in this context must enter it themselves, as `compile_on_each` does.
    """
    return _platform(platform)
