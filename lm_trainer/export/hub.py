"""The Hugging Face hub: pushes exported directories and downloads models.

The token is read only from the environment variable `HF_TOKEN`, and is never printed, stored or taken from a
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
from lm_trainer.core.hub import hub_unreachable_reason
from lm_trainer.export.files import CONFIG, DOWNLOADED
from lm_trainer.export.output import local_copy_of_export

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKEN_VARIABLE = "HF_TOKEN"
# A push deletes these files unless it uploads them. It keeps all other files of the repository.
_STALE = ["*.safetensors", "*.safetensors.index.json"]


class PushedModel(NamedTuple):
    """Address and visibility of a pushed model."""

    url: str
    private: bool


def check_push(name: str) -> None:
    """Checks, without network access, for reasons why `push` would fail, before time is spent on the export.

    Raises:
        UserError: for a malformed name, a missing token, or if the hub is switched off.
    """
    _check_name(name)
    if "/" not in name:
        raise UserError(f"{name!r} names no owner; write ORG/NAME, or USER/NAME for your own account")
    if not _find_token():
        raise UserError(
            f"pushing needs a token with write access: set {TOKEN_VARIABLE} in the environment "
            f"(tokens are made in the settings of your account on the hub)"
        )
    _check_online()


def prepare_push(name: str) -> str:
    """Creates a private repository, or checks that an existing repository is private and writable. Uploads no files.

    Args:
        name: `ORG/NAME`, or only `NAME` for the account that the token belongs to.

    Returns:
        `ORG/NAME`.

    Raises:
        UserError: for the same reasons as in `push`.
        MachineError: if the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    if "/" not in name:
        check_push(f"user/{name}")
        with _explain_hub_errors(name):
            name = f"{HfApi(token=_find_token()).whoami()['name']}/{name}"
    check_push(name)
    with _explain_hub_errors(name):
        _open_repository(HfApi(token=_find_token()), name, public=False)
    return name


def push(
    directory: StoragePath, name: str, *, public: bool, patterns: Collection[str], message: str = "Upload the model"
) -> PushedModel:
    """Uploads the files of an export that match `patterns` to the model repository `name` (`ORG/NAME`).

    Creates the repository if necessary, private unless `public`. Deletes weights of an earlier push that are not part
    of this one, so that no stale shard remains.

    Raises:
        UserError: if the hub refuses, or if the repository exists and is public and `public` is not set.
        MachineError: if the hub, or the bucket with the export, cannot be reached.
    """
    from huggingface_hub import HfApi

    check_push(name)
    api = HfApi(token=_find_token())
    with local_copy_of_export(directory) as copy, _explain_hub_errors(name):
        private = _open_repository(api, name, public=public)
        api.upload_folder(
            repo_id=name,
            folder_path=copy,
            allow_patterns=list(patterns),
            delete_patterns=_STALE,
            commit_message=message,
        )
    return PushedModel(f"{api.endpoint}/{name}", private)


def _open_repository(api: HfApi, name: str, *, public: bool) -> bool:
    """Creates the repository if necessary; returns True if it is private."""
    api.create_repo(name, private=not public, exist_ok=True)
    # An existing repository keeps its visibility, regardless of the arguments of create_repo.
    private = bool(api.repo_info(name).private)
    if not private and not public:
        raise UserError(
            f"{name} exists on the hub and is public; take another name, or push there with lmt export-hf and --public"
        )
    return private


def download(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """Downloads the files of the model `name` that match `DOWNLOADED` from the hub, and returns the local directory.

    Without `weights`, downloads only config.json.

    Raises:
        UserError: for a malformed name, or a model or revision that does not exist or may not be read.
        MachineError: if the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    _check_name(name)
    _check_online()
    with _explain_hub_errors(name):
        # Only files that can be read without executing anything: no pickles and no code.
        patterns = list(DOWNLOADED) if weights else [CONFIG]
        # False, not None: None would use the token of a login, without the user's request.
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, token=_find_token() or False))


def _find_token() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    # The HTTP client would print the full header, including the token, when it rejects such a value.
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
    # The hub's client reads the variable when it is imported, and accepts all its spellings.
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise UserError("the hub is switched off: HF_HUB_OFFLINE is set in the environment; unset it")
    if (reason := hub_unreachable_reason()) is not None:
        raise MachineError(f"the Hugging Face hub is needed, and {reason}")


@contextlib.contextmanager
def _explain_hub_errors(name: str) -> Iterator[None]:
    """Turns errors of the hub's client into messages that name a remedy and do not contain the token."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:
        # Its bases are the exceptions of the client's HTTP library (which one depends on the client's version) and
        # OSError.
        if not isinstance(error, HfHubHTTPError.__bases__):
            raise
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        detail = (str(error).strip() or type(error).__name__).splitlines()[0]
        if token := _find_token():
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
