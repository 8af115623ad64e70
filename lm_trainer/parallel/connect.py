"""Connects the processes of a run. Reports what the connection waits for, and can be interrupted."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping

NOTICE_AFTER = 10.0
"""Time in seconds after which the user is told what the process waits for."""
CONNECT_TIMEOUT = 300.0
"""Time in seconds until the connection fails; same as JAX's default."""
# At its own timeout JAX ends the process with SIGABRT and a C++ stack trace, so JAX's timeout is set to be later by
# this.
_TIMEOUT_MARGIN = 60
_PROBE_SECONDS = 3.0


def connect_processes(arguments: Mapping[str, object], waiting: Callable[[str], object]) -> None:
    """Calls `jax.distributed.initialize` in a way that signals can interrupt.

    Args:
        arguments: keyword arguments of `jax.distributed.initialize`.
        waiting: called with a message if connecting takes long.

    Raises:
        TimeoutError: if not all processes have connected within `CONNECT_TIMEOUT` seconds.
        RuntimeError, ValueError, OSError: as raised by JAX.
    """
    import jax

    # JAX's preemption service would replace Python's SIGTERM handler with one in C++. Python would then never receive
    # the signal, and the run would continue until it is killed. The training loop itself polls for signals and lets the
    # processes agree on them.
    jax.config.update("jax_enable_preemption_service", False)
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(**arguments, initialization_timeout=int(CONNECT_TIMEOUT) + _TIMEOUT_MARGIN)  # pyright: ignore[reportArgumentType]
        except BaseException as error:  # re-raised in the waiting thread
            failed.append(error)

    # JAX waits in C++, where the main thread would not receive signals. With a daemon thread, the process can still
    # end.
    thread = threading.Thread(target=connect, name="connecting", daemon=True)
    thread.start()
    thread.join(NOTICE_AFTER)
    if thread.is_alive():
        waiting(
            f"waiting up to {CONNECT_TIMEOUT:.0f} s for the other processes of the run{_unreachable_reason(arguments)}"
        )
        thread.join(CONNECT_TIMEOUT - NOTICE_AFTER)
    if thread.is_alive():
        raise TimeoutError(f"not all of them were there after {CONNECT_TIMEOUT:.0f} s{_unreachable_reason(arguments)}")
    if failed:
        raise failed[0]


def _unreachable_reason(arguments: Mapping[str, object]) -> str:
    """Returns the reason why process 0 is unreachable; "" if it is reachable or its address is unknown here."""
    host, _, port = str(arguments.get("coordinator_address") or "").rpartition(":")
    if not host or not port.isdecimal() or arguments.get("process_id") == 0:
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS).close()
    except OSError as error:
        return f"; nothing answers at {host}:{port} ({error.strerror or error})"
    return ""
