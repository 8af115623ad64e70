"""Evaluation of a model on the text of its run, of a configuration, or of files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lm_trainer.config.loader import load
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path, path_problem
from lm_trainer.data.config import DataConfig
from lm_trainer.data.held_out import open_held_out
from lm_trainer.data.rows.audio_rows import SpeechSet
from lm_trainer.data.tokenize.progress import OnProgress
from lm_trainer.evaluate.compare import SetComparison, compare
from lm_trainer.evaluate.losses import GroupAverages, SetLosses, evaluate_set, group_means
from lm_trainer.evaluate.model import EvalModel
from lm_trainer.evaluate.speech import ErrorRates, measure_error_rates
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.find_run import find_run, run_start_directory

_YAML = (".yaml", ".yml")


class EvaluationText(NamedTuple):
    """The text to evaluate on."""

    config: DataConfig
    root: Path
    """Directory that relative paths refer to."""


class TextOptions(NamedTuple):
    """Options of an evaluation on texts."""

    stride: int | None = None
    """Number of tokens between the starts of consecutive rows. None means that rows do not overlap, as in training."""
    max_batches: int | None = None
    """Maximum number of batches per set; None means all."""


class TextLosses(NamedTuple):
    """A model's losses on texts."""

    sets: list[SetLosses]
    groups: list[GroupAverages]
    notes: list[str]
    rates: list[ErrorRates]
    """Error rates of speech sets."""


def choose_text(source: str, model: EvalModel, data: Sequence[str]) -> EvaluationText:
    """Finds the text to evaluate on.

    Args:
        source: name of the model as the user gave it.
        model: the model. If `data` is empty, the held-out text of its run is used.
        data: path of a configuration, or paths of text files as in `data.validation_urls`.

    Raises:
        UserError: if no text is available.
    """
    if len(data) == 1 and data[0].endswith(_YAML):
        if problem := path_problem(data[0]):
            raise UserError(f"--data: {problem}")
        return EvaluationText(load(local_path(data[0]), ["trainer.tracker=[]"], RunConfig).config.data, Path.cwd())
    if data:
        return EvaluationText(_data_config_of_files(data), Path.cwd())
    if model.step is None:
        raise UserError(
            f"{source} is no run and has no text of its own to be evaluated on; name some: --data FILE, a "
            f"configuration with a data section or files of text"
        )
    root = Path.cwd()
    # For a checkpoint directory without a run directory, the directory where the run was started is unknown.
    with contextlib.suppress(UserError):
        root = run_start_directory(find_run(source), model.config.trainer.log_dir)
    return EvaluationText(model.config.data, root)


def _data_config_of_files(files: Sequence[str]) -> DataConfig:
    """Makes a configuration with each file as a separate set, and a placeholder for the required training text."""
    names = [re.sub(r"[^\w.-]+", "-", Path(file).stem).lstrip(".-") or "text" for file in files]
    if len({*names}) < len(names):
        names = [re.sub(r"[^\w.-]+", "-", file).lstrip(".-") for file in files]
    sets = {name: {"train_urls": [f], "validation_urls": [f]} for name, f in zip(names, files, strict=True)}
    return DataConfig.model_validate({"configs": sets, "train_weights": dict.fromkeys(sets, 1), "tokenizer": "bytes"})


def evaluate_text(
    model: EvalModel, text: EvaluationText, options: TextOptions, on_progress: OnProgress | None = None
) -> TextLosses:
    """Computes a model's losses on all held-out sets of a text.

    Raises:
        UserError: if no text is held out, or a stride is longer than a row.
    """
    stride = options.stride
    if stride is not None and not 1 <= stride <= model.row:
        raise UserError(f"--stride {stride}: a row has {model.row} tokens; write 1 to {model.row}")
    with contextlib.chdir(text.root):
        opened = open_held_out(text.config, model.tokenizer, seq_len=model.row, stride=stride, on_progress=on_progress)
        if model.vocab_size < model.tokenizer.vocab_size:
            for held_out in opened.sets:
                held_out.cache.limit_ids(model.vocab_size)
        sets = [evaluate_set(model, opened_set, max_batches=options.max_batches) for opened_set in opened.sets]
        speech_sets = [opened_set.rows for opened_set in opened.sets if isinstance(opened_set.rows, SpeechSet)]
        decoder = model.decoder() if speech_sets else None
        generation = getattr(model.config.model, "generation_config", {})
        rates = [measure_error_rates(decoder, rows, generation, options.max_batches) for rows in speech_sets]
    return TextLosses(sets, group_means(sets), [*opened.notes, *_collect_notes(model, sets, options)], rates)


def compare_text(first: EvalModel, second: EvalModel, a: TextLosses, b: TextLosses) -> list[SetComparison]:
    """Computes the paired differences between two models on the same text; raises the errors of `compare`."""
    return compare(a.sets, b.sets, same_tokens=first.tokenizer.identity() == second.tokenizer.identity())


def _collect_notes(model: EvalModel, sets: Sequence[SetLosses], options: TextOptions) -> list[str]:
    notes = []
    stride = options.stride or model.row
    for losses in sets:
        if losses.num_split and stride == model.row:
            share = f"{losses.num_split:,} of {len(losses.held_out.ends_D):,} documents"
            notes.append(
                f"{losses.name}: {share} do not stand in one row of {model.row} tokens, and go on in the next without "
                f"what was before; --stride {max(model.row // 2, 1)} lets rows overlap"
            )
        if not losses.documents.tokens:
            notes.append(f"{losses.name}: no token of what was read has a loss, so that there is no mean")
        if losses.documents.bytes_D is None:
            notes.append(f"{losses.name}: no bits per byte, for token ids of unknown text and for answers")
    if options.max_batches is not None:
        notes.append(f"at most {options.max_batches} batches of each set (--max-batches)")
    return notes
