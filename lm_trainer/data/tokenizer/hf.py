"""Hugging Face tokenizers, which are read from a file, a directory or the hub. Remote code is never run."""

from __future__ import annotations

import contextlib
import difflib
import json
from pathlib import Path
from typing import Literal

from lm_trainer.core.config import LocalPathOrHubName
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import expand_home
from lm_trainer.core.hub import hub_unreachable_reason
from lm_trainer.core.safe_names import path_inside
from lm_trainer.data.tokenizer.base import HfTokenizer, TokenizerConfig
from lm_trainer.data.tokenizer.files import CONFIG_FILE, COPIED_FILES, TOKENIZER_FILE, read_copied_files


class Pretrained(TokenizerConfig):
    """An existing tokenizer: a `tokenizer.json`, the directory that contains it, or a name on the Hugging Face hub."""

    type: Literal["hf"] = "hf"
    name: LocalPathOrHubName
    """A path to `tokenizer.json` or its directory, or a hub name such as `gpt2` or `org/model`."""
    revision: str | None = None
    """Branch, tag or commit on the hub. Pin a commit, since a branch may move."""
    eos_token: str | None = None
    """The end-of-document token, if the tokenizer does not define one or to override its choice."""


def load_pretrained(config: Pretrained) -> HfTokenizer:
    """Reads a tokenizer from disk, or from the hub if `name` is not a path.

    Raises:
        UserError: if the tokenizer is missing, is not a fast tokenizer, or cannot be downloaded.
    """
    path = Path(expand_home(config.name))
    if path.exists():
        return _load_from_path(path, config.eos_token)
    if _is_path(config.name):
        raise UserError(f"data.tokenizer: there is no file or directory {config.name}{_suggest_path(path)}")
    return _load_from_hub(config)


def load_local(config: Pretrained) -> HfTokenizer | None:
    """Reads a tokenizer from its path, or from previously downloaded hub files; None if it was not downloaded.

    Raises:
        UserError: if `name` is a path to a missing file or an invalid hub name, or the files are not a fast tokenizer.
    """
    if _is_path(config.name):
        return load_pretrained(config)
    file = _find_cached_file(config)
    return None if file is None else _load_from_path(file, config.eos_token)


def find_pretrained(config: Pretrained) -> None:
    """Checks that `load_pretrained` can find the tokenizer. Asks the hub only if this machine has no copy.

    Raises:
        UserError: if the tokenizer is missing, or the hub cannot be reached.
    """
    if load_local(config) is None:
        _load_from_hub(config)


def _find_cached_file(config: Pretrained) -> Path | None:
    """Returns the path of the tokenizer's file in the hub cache of this machine; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(config.name, TOKENIZER_FILE, revision=config.revision)
    except HFValidationError as error:
        raise UserError(
            f"data.tokenizer: {config.name!r} is no file or directory here, and no name on the hub: {error}"
        ) from None
    return Path(file) if isinstance(file, str) else None


def _is_path(name: str) -> bool:
    return (
        Path(expand_home(name)).exists()
        or name.startswith((".", "/", "~"))
        or name.endswith(".json")
        or name.count("/") > 1
    )


def _load_from_path(path: Path, eos_token: str | None) -> HfTokenizer:
    directory = path if path.is_dir() else path.parent
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.exists():
        raise UserError(
            f"data.tokenizer: {directory} holds no {TOKENIZER_FILE}. Load it once with transformers' AutoTokenizer and "
            "save_pretrained to get one"
        )
    settings = _read_settings(path_inside(directory, CONFIG_FILE, directory))
    return HfTokenizer(_read_text(file), settings, read_copied_files(directory), eos_token=eos_token, origin=str(path))


def _load_from_hub(config: Pretrained) -> HfTokenizer:
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    if _find_cached_file(config) is None and (reason := hub_unreachable_reason()) is not None:
        raise UserError(
            f"data.tokenizer: {config.name!r} is neither a file or directory here nor in the hub's cache, and "
            f"{reason}. Without network use a local directory or `bytes`"
        )

    def fetch(name: str) -> Path:
        return Path(hf_hub_download(config.name, name, revision=config.revision))

    def fetch_optional(name: str) -> Path | None:
        try:
            return fetch(name)
        except LocalEntryNotFoundError:
            # There is no network. The settings define the EOS token, so the file must be known to be absent.
            if try_to_load_from_cache(config.name, name, revision=config.revision) is not _CACHED_NO_EXIST:
                raise
            return None
        except EntryNotFoundError:
            return None

    try:
        file = fetch(TOKENIZER_FILE)
        settings_file = fetch_optional(CONFIG_FILE)
        # One request covers all further files. Without network, previously downloaded files are used.
        with contextlib.suppress(LocalEntryNotFoundError):
            snapshot_download(config.name, revision=config.revision, allow_patterns=list(COPIED_FILES))
    except Exception as error:  # the hub client raises its own errors, httpx errors and OSErrors
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f"data.tokenizer: {config.name!r} is no file or directory here, and the Hugging Face hub gave no tokenizer "
            f"of that name: {type(error).__name__}: {reason}. Without network use a local directory or `bytes`"
        ) from None
    settings = _read_settings(settings_file) if settings_file else {}
    return HfTokenizer(
        _read_text(file), settings, read_copied_files(file.parent), eos_token=config.eos_token, origin=config.name
    )


def _read_settings(file: Path) -> dict[str, object]:
    if not file.exists():
        return {}
    try:
        settings = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{file}: expected a JSON object")
    return settings


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.tokenizer: cannot read {file}: {error}") from None


def _suggest_path(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
