"""Connects to a running Ray cluster."""

from __future__ import annotations

import re
import socket
from typing import Any

from lm_trainer.core.errors import UserError

QUIET: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
"""Options of `ray.init` that suppress its log messages."""

_CONNECT_SECONDS = 10.0
"""Timeout of the connection check in seconds."""


def join_cluster(ray: Any, address: str, advice: str) -> None:
    """Connects this process to the cluster at `address`: `auto`, `host:6379` or `ray://host:10001`.

    Raises:
        UserError: if no cluster answers. The message ends with `advice`.
    """
    try:
        # The address is checked first, because Ray retries for minutes and then ends the process.
        if match := re.fullmatch(r"(?:ray://)?([^/:]+):(\d+)", address):
            socket.create_connection((match[1], int(match[2])), _CONNECT_SECONDS).close()
        ray.init(address=address, **QUIET)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"there is no Ray cluster at {address!r}: {error}. {advice}") from None
