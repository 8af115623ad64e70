"""Reach of the Hugging Face hub, asked before its client is, which tries for half a minute and says so each time."""

from __future__ import annotations

import functools
import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

_SECONDS = 4.0


@functools.cache
def why_no_hub() -> str | None:
    """The reason why the hub cannot be reached from here, in at most 4 seconds; None where it can be, or may be.

    Behind a proxy only the proxy could tell, so nothing is asked.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set in the environment"
    address = urlsplit(constants.ENDPOINT)
    if getproxies() or os.environ.get("ALL_PROXY") or not address.hostname:
        return None
    try:
        with socket.create_connection((address.hostname, address.port or 443), timeout=_SECONDS):
            return None
    except OSError as error:
        return f"{address.hostname} cannot be reached ({error.strerror or error})"
