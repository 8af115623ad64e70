"""Quick check that the Hugging Face hub is reachable; its client retries for half a minute and logs each attempt."""

from __future__ import annotations

import math
import os
import socket
import time
from urllib.parse import urlsplit
from urllib.request import getproxies

_TIMEOUT_SECONDS = 4.0
_FAILURE_CACHED_SECONDS = 30.0
"""Seconds for which a failure is cached: several checks during one start share it, and a long run checks later."""

_answers: dict[tuple[str, int], tuple[str | None, float]] = {}
"""(host, port) -> (the reason it is unreachable or None, time of the check)."""


def hub_unreachable_reason() -> str | None:
    """Returns the reason why the hub is unreachable, within 4 seconds; None if it is, or may be, reachable.

    Behind a proxy nothing is checked, because only the proxy could know. A success is cached for the whole process.
    """
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
