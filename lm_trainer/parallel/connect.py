"""Connection of the processes of a run: tells the person at the terminal what it waits for, and ends cleanly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

PATIENCE = 10.0
"""Seconds after which a person wants to know what is waited for."""
LONGEST = 300.0
"""Seconds until it is given up, which is JAX's own default."""
# JAX ends the process by SIGABRT and a C++ stack trace when its time is over, which therefore never comes.
_LATER = 60
_KNOCK_SECONDS = 3.0


def connect_processes(given: Mapping[str, Any], waiting: Callable[[str], Any]) -> None:
    """Calls `jax.distributed.initialize` and waits for it in a way that signals can end.

    Args:
        given: its arguments.
        waiting: told what is waited for, where that takes long.

    Raises:
        TimeoutError: when not all processes are there after `LONGEST` seconds.
        RuntimeError, ValueError, OSError: as JAX raises them.
    """
    import jax

    # JAX's preemption service would put a handler of SIGTERM in C++ in the place of Python's, which then never hears of
    # the signal: the run would go on until it is killed. The loop polls and agrees on signals itself.
    jax.config.update("jax_enable_preemption_service", False)
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(**given, initialization_timeout=int(LONGEST) + _LATER)
        except BaseException as error:  # raised again in the thread that waits
            failed.append(error)

    # JAX waits in C++, where the main thread would hear no signal; a daemon, so that the process can end meanwhile.
    thread = threading.Thread(target=connect, name="connecting", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        waiting(f"waiting up to {LONGEST:.0f} s for the other processes of the run{_unreachable(given)}")
        thread.join(LONGEST - PATIENCE)
    if thread.is_alive():
        raise TimeoutError(f"not all of them were there after {LONGEST:.0f} s{_unreachable(given)}")
    if failed:
        raise failed[0]


def _unreachable(given: Mapping[str, Any]) -> str:
    """Says why the address of process 0 cannot be reached, "" where it can or is not known here."""
    host, _, port = str(given.get("coordinator_address") or "").rpartition(":")
    if not host or not port.isdecimal() or given.get("process_id") == 0:
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()
    except OSError as error:
        return f"; nothing answers at {host}:{port} ({error.strerror or error})"
    return ""
