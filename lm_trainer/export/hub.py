"""The Hugging Face hub: pushing an exported directory and fetching somebody's model.

The token comes from the environment variable `HF_TOKEN` alone and is never printed, stored or taken from a
configuration. `HF_ENDPOINT` and `HF_HUB_OFFLINE` have their usual meanings.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.hub import why_no_hub
from lm_trainer.export.files import CONFIG, DOWNLOADED
from lm_trainer.export.output import exported_copy

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKEN_VARIABLE = "HF_TOKEN"
# Deleted by a push unless it uploads them again; other files of the repository stay.
_STALE = ["*.safetensors", "*.safetensors.index.json"]


class Pushed(NamedTuple):
    """Address and visibility of a pushed model."""

    url: str
    private: bool


def check_push(name: str) -> None:
    """Finds reasons for `push` to fail without asking the network, so that nothing is exported in vain.

    Raises:
        UserError: for a malformed name, a missing token, or when the hub is switched off.
    """
    _check_name(name)
    if "/" not in name:
        raise UserError(f"{name!r} names no owner; write ORG/NAME, or USER/NAME for your own account")
    if not _token():
        raise UserError(
            f"pushing needs a token with write access: set {TOKEN_VARIABLE} in the environment "
            f"(tokens are made in the settings of your account on the hub)"
        )
    _check_online()


def prepare_push(name: str) -> str:
    """Makes a private repository, or checks that the existing one is private and may be written; uploads nothing.

    Args:
        name: `ORG/NAME`, or the name alone for the account of the token.

    Returns:
        `ORG/NAME`.

    Raises:
        UserError: as `push`.
        MachineError: when the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    if "/" not in name:
        check_push(f"user/{name}")
        with _explained(name):
            name = f"{HfApi(token=_token()).whoami()['name']}/{name}"
    check_push(name)
    with _explained(name):
        _open_repository(HfApi(token=_token()), name, public=False)
    return name


def push(
    directory: StoragePath, name: str, *, public: bool, patterns: Collection[str], message: str = "Upload the model"
) -> Pushed:
    """Uploads the files of an export that match `patterns` to the model repository `name` (`ORG/NAME`).

    Creates the repository if need be, private unless `public`. Weights of an earlier push that are not part of this
    one are deleted, so that no stale shard stays behind.

    Raises:
        UserError: when the hub refuses, or when the repository exists and is public without `public` being said.
        MachineError: when the hub, or the bucket that the export lies in, cannot be reached.
    """
    from huggingface_hub import HfApi

    check_push(name)
    api = HfApi(token=_token())
    with exported_copy(directory) as copy, _explained(name):
        private = _open_repository(api, name, public=public)
        api.upload_folder(
            repo_id=name,
            folder_path=copy,
            allow_patterns=list(patterns),
            delete_patterns=_STALE,
            commit_message=message,
        )
    return Pushed(f"{api.endpoint}/{name}", private)


def _open_repository(api: HfApi, name: str, *, public: bool) -> bool:
    """Makes the repository if need be; returns True if it is private."""
    api.create_repo(name, private=not public, exist_ok=True)
    # An existing repository keeps its visibility whatever create_repo was asked for.
    private = bool(api.repo_info(name).private)
    if not private and not public:
        raise UserError(
            f"{name} exists on the hub and is public; take another name, or push there with lmt export-hf and --public"
        )
    return private


def download(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """The local copy of the model `name` from the hub: the files of `DOWNLOADED`, nothing else.

    Without `weights` it has config.json alone.

    Raises:
        UserError: for a malformed name, or a model or revision that does not exist or may not be read.
        MachineError: when the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    _check_name(name)
    _check_online()
    with _explained(name):
        # Never pickles or code: only files that are read without running them.
        wanted = list(DOWNLOADED) if weights else [CONFIG]
        # False, not None: None would take the token of a login, of which the user has said nothing here.
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, token=_token() or False))


def _token() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    # The HTTP client would print the whole header, token included, when it refuses such a value.
    if not re.fullmatch(r"[!-~]*", token):
        raise UserError(f"{TOKEN_VARIABLE} in the environment holds characters that no token has; set it anew")
    return token


def _check_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{name!r} is not a name on the hub: {error}") from None


def _check_online() -> None:
    # Found by the client at its import, which reads the variable in all its spellings.
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise UserError("the hub is switched off: HF_HUB_OFFLINE is set in the environment; unset it")
    if (why := why_no_hub()) is not None:
        raise MachineError(f"the Hugging Face hub is needed, and {why}")


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns the failures of the hub's client into messages that name the remedy and hide the token."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:
        # Its bases are what the client's HTTP library raises (which one that is depends on its version) and OSError.
        if not isinstance(error, HfHubHTTPError.__bases__):
            raise
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        detail = (str(error).strip() or type(error).__name__).splitlines()[0]
        if token := _token():
            detail = detail.replace(token, "***")
        if remedy := _REMEDIES.get(status):
            raise UserError(f"the hub refused {name}: {remedy.format(variable=TOKEN_VARIABLE)} ({detail})") from None
        kind = "failed" if status else "cannot be reached"
        raise MachineError(f"the hub {kind} for {name}: {detail}") from None


_REMEDIES = {
    400: "it does not accept the request",
    401: "the name is wrong, or {variable} holds no valid token for it",
    403: "the token in {variable} may not do this; it needs the right to read, or to write for a push",
    404: "there is no such model or revision, or {variable} may not see it",
}
