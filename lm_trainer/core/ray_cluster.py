"""Connection to a Ray cluster that runs already."""

from __future__ import annotations

import re
import socket
from typing import Any

from lm_trainer.core.errors import UserError

QUIET: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
"""Options of `ray.init` that keep its own messages from the user."""

_CONNECT_SECONDS = 10.0
"""Longest time to find that nothing listens at an address."""


def join_cluster(ray: Any, address: str, advice: str) -> None:
    """Connects this process to the cluster at `address`, as `auto`, `host:6379` or `ray://host:10001`.

    Raises:
        UserError: if there is none, with the advice.
    """
    try:
        # Looks for itself first: Ray tries for minutes, and then ends the process.
        if match := re.fullmatch(r"(?:ray://)?([^/:]+):(\d+)", address):
            socket.create_connection((match[1], int(match[2])), _CONNECT_SECONDS).close()
        ray.init(address=address, **QUIET)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise UserError(f"there is no Ray cluster at {address!r}: {error}. {advice}") from None
