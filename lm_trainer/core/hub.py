"""Checks quickly that the Hugging Face hub is reachable.

Its client would retry for half a minute and log each attempt.
"""

from __future__ import annotations

import math
import os
import socket
import time
from urllib.parse import urlsplit

_TIMEOUT_SECONDS = 4.0
_FAILURE_CACHED_SECONDS = 30.0
"""Time in seconds for which a failure is cached. Checks during one start share it, and a long run checks later."""

_answers: dict[tuple[str, int], tuple[str | None, float]] = {}
"""Maps (host, port) to the reason why it is unreachable or None, and the time of the check."""


def hub_unreachable_reason() -> str | None:
    """Returns within 4 seconds the reason why the hub is unreachable; None if it is, or may be, reachable.

    Nothing is checked behind a proxy, because only the proxy could know. A success is cached for the whole process.
    """
    # Imports ssl, http and email, which nobody needs to read a configuration.
    from urllib.request import getproxies

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set in the environment"
    address = urlsplit(constants.ENDPOINT)
    if getproxies() or os.environ.get("ALL_PROXY") or not address.hostname:
        return None
    server = (address.hostname, address.port or 443)
    reason, checked = _answers.get(server, ("not asked yet", -math.inf))
    if reason is not None and time.monotonic() - checked >= _FAILURE_CACHED_SECONDS:
        reason = _connection_problem(server)
        _answers[server] = (reason, time.monotonic())
    return reason


def _connection_problem(server: tuple[str, int]) -> str | None:
    try:
        with socket.create_connection(server, timeout=_TIMEOUT_SECONDS):
            return None
    except OSError as error:
        return f"{server[0]} cannot be reached ({error.strerror or error})"
