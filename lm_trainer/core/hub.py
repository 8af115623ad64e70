"""Reach of the Hugging Face hub, asked before its client is, which tries for half a minute and says so each time."""

from __future__ import annotations

import math
import os
import socket
import time
from urllib.parse import urlsplit
from urllib.request import getproxies

_SECONDS = 4.0
_PAUSE = 30.0
"""Seconds for which a failure is an answer: several parts of one start ask, a run of days asks again."""

_answers: dict[tuple[str, int], tuple[str | None, float]] = {}
"""By host and port: why it cannot be reached, and when that was found."""


def why_no_hub() -> str | None:
    """The reason why the hub cannot be reached from here, in at most 4 seconds; None where it can be, or may be.

    Behind a proxy only the proxy could tell, so nothing is asked. A hub that was reached once is not asked again.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set in the environment"
    address = urlsplit(constants.ENDPOINT)
    if getproxies() or os.environ.get("ALL_PROXY") or not address.hostname:
        return None
    server = (address.hostname, address.port or 443)
    reason, found = _answers.get(server, ("not asked yet", -math.inf))
    if reason is not None and time.monotonic() - found >= _PAUSE:
        reason = _why_not(server)
        _answers[server] = (reason, time.monotonic())
    return reason


def _why_not(server: tuple[str, int]) -> str | None:
    try:
        with socket.create_connection(server, timeout=_SECONDS):
            return None
    except OSError as error:
        return f"{server[0]} cannot be reached ({error.strerror or error})"
