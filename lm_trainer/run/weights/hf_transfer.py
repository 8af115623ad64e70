"""Exports models to the Hugging Face format (`lmt export-hf`), and imports them from it (`lmt import-hf`)."""

from __future__ import annotations

import re
from pathlib import Path

from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import HUB_NAME, expand_home, local_path, path_problem
from lm_trainer.export.adapter import AdapterModel, write_adapter
from lm_trainer.export.files import FILES
from lm_trainer.export.hub import PushedModel, check_push, download, push
from lm_trainer.export.huggingface import ExportOptions, TextModel, read_hf, write_hf
from lm_trainer.export.output import check_output
from lm_trainer.run.weights.saved_model import write_model

_HUB_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?", re.ASCII)


def check_export(out: StoragePath, options: ExportOptions) -> None:
    """Checks that `export_model` can succeed, before any large file is read.

    Raises:
        UserError: if `out` must not be replaced, or the push cannot succeed.
    """
    check_output(out, overwrite=options.overwrite, replaceable=FILES)
    if options.hub_name:
        check_push(options.hub_name)


def export_model(
    model: TextModel | AdapterModel, out: StoragePath, options: ExportOptions, *, public: bool = False
) -> PushedModel | None:
    """Writes `model` to `out`, and pushes it to the hub if `options.hub_name` is set.

    Raises:
        UserError: as for `write_hf` and `push`. If the push fails, the export in `out` is complete.
        MachineError: for errors of the file system or the network.
    """
    if isinstance(model, AdapterModel):
        write_adapter(out, model, options)
    else:
        write_hf(out, model, options)
    if not options.hub_name:
        return None
    try:
        return push(out, options.hub_name, public=public, patterns=FILES)
    except UserError as error:
        raise type(error)(
            f"{error}. The export in {out} is complete; push it with the same command and --overwrite"
        ) from None


def import_model(source: str, out: Path, *, tokenizer: Path | None = None, revision: str | None = None) -> TextModel:
    """Converts a model in Hugging Face format, local or from the hub, to a checkpoint of step 0 in `out`.

    Raises:
        UserError: if `out` exists and is not empty, or the model cannot be read.
        MachineError: for errors of the hub or the file system.
    """
    if (out := local_path(out)).exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another directory")
    model = fetch_model(source, tokenizer=tokenizer, revision=revision)
    write_model(
        out,
        model_config=model.config,
        params=model.params,
        tokenizer=model.tokenizer,
        vocab_size=model.vocab_size,
        settings=model.settings,
    )
    return model


def fetch_model(source: str, *, tokenizer: Path | None = None, revision: str | None = None) -> TextModel:
    """Reads a model in Hugging Face format from a local directory, or from the hub if there is no such directory.

    Raises:
        UserError: as for `read_hf` and `download`.
        MachineError: if the hub is unreachable.
    """
    if revision is not None and _is_path(source):
        raise UserError(f"--revision {revision} is for models on the hub, but {source} is a path")
    local = fetch_directory(source, revision=revision)
    return read_hf(local, tokenizer=tokenizer, name=None if _is_path(source) else source)


def fetch_directory(source: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """Returns the directory of a model in Hugging Face format: the path itself, or the local copy of a hub model.

    If `weights` is False, only config.json is guaranteed to exist.

    Raises:
        UserError: as for `download`.
        MachineError: if the hub is unreachable.
    """
    if problem := path_problem(source, name=HUB_NAME):
        raise UserError(problem)
    source = expand_home(source)
    if _is_path(source):
        return Path(source)
    try:
        return download(source, revision=revision, weights=weights)
    except UserError as error:
        raise type(error)(f"there is no directory {source} here, and {error}") from None


def _is_path(source: str) -> bool:
    return Path(source).exists() or not _HUB_NAME.fullmatch(source)
