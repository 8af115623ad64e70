"""Files with predictions that are made before a run: dated, with a hash over their content, and never overwritten."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath, local_path


def write_registered(path: AnyPath, kind: str, content: Mapping[str, Any]) -> str:
    """Writes JSON values with their kind, the time in UTC, and a SHA-256 over all of these. Returns the hash.

    Raises:
        UserError: if the file exists.
    """
    dated = {"format": kind, "written": datetime.now(UTC).isoformat(timespec="seconds"), **content}
    digest, path = _compute_digest(dated), local_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Exclusive creation, so that only one of two simultaneous commands registers, and no prediction is overwritten.
        with path.open("x") as file:
            file.write(json.dumps({**dated, "sha256": digest}, indent=1) + "\n")
    except FileExistsError:
        raise UserError(f"{path} holds a registered prediction, which is kept; choose another --out") from None
    return digest


def read_registered(path: AnyPath, kind: str) -> dict[str, Any]:
    """Reads the content of a registered prediction of a kind, with the keys `written` and `sha256`.

    Raises:
        UserError: if the file is not a registered prediction of this kind, or was changed after registration.
    """
    try:
        content = json.loads(local_path(path).read_text())
        digest = content.pop("sha256")
        known_format = content["format"] == kind
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: no registered prediction: {error}") from None
    if digest != _compute_digest(content):
        raise UserError(f"{path} was changed after it was registered; its hash does not fit its content")
    if not known_format:
        raise UserError(f"{path}: a registered prediction of another kind ({content['format']}), not {kind}")
    return {**content, "sha256": digest}


def _compute_digest(content: Mapping[str, Any]) -> str:
    # Sorted keys, so that the hash depends only on the content, and not on the layout of the file.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
