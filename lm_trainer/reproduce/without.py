"""Runs in which documents never counted: they begin before the first use of the documents, and leave them out."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data import Data
from lm_trainer.data.config import SINGLE_SET, DataConfig
from lm_trainer.data.corpus import Origins, iter_documents, train_caches
from lm_trainer.data.rows.order import TrainOrder
from lm_trainer.data.rows.uncounted import Uncounted, read_uncounted
from lm_trainer.data.tokenizer.token_bytes import token_texts
from lm_trainer.data.tokenizer.trained import TrainedBpe
from lm_trainer.data.without import WithoutConfig, split_number
from lm_trainer.reproduce.branch import BranchPlan, load_branch_configs, plan_branch
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.reproduce.rerun import configure_as_recorded
from lm_trainer.reproduce.same_data import check_same_data, open_complete_data
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.listing import list_runs
from lm_trainer.trackers import Progress

_NUMBER, _HASH = re.compile(r"\d+"), re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Selection:
    """The documents to leave out, as the user names them."""

    names: Sequence[str]
    """Numbers, `SET:NUMBER`, or names of sets of a mixture."""
    files: Sequence[Path] = ()
    """Lists of documents, as `data.exclude` takes them."""
    hashes: Path | None = None
    """File with the SHA-256 hash of the text of a document on each line."""


@dataclass(frozen=True)
class WithoutPlan:
    """A run without some documents, which has not begun yet.

    Attributes:
        record: the run that counted the documents.
        name: run ID of the new run.
        config: configuration of the new run.
        without: the documents, including the ones that the old run left out.
        documents: number of documents that the old run counted and the new run leaves out, by set.
        first_step: first step, counted from 1, that counts one of them in the old run.
        branch: the branch that the new run is; None if it begins at step 0.
        holds: places of this machine that still hold the documents or what was learnt from them.
    """

    record: RunRecord
    name: str
    config: RunConfig
    without: WithoutConfig
    documents: Mapping[str, int]
    first_step: int
    branch: BranchPlan | None
    holds: list[str]

    @property
    def start(self) -> int:
        """Number of completed steps that the new run shares with the old one."""
        return 0 if self.branch is None else self.branch.point.step

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON values."""
        return {
            "run": self.name,
            "parent": self.record.id,
            "without": self.without.model_dump(mode="json"),
            "documents": dict(self.documents),
            "first_step": self.first_step,
            "start": self.start,
            "steps": self.config.trainer.num_train_steps - self.start,
            "holds": self.holds,
        }


def plan_without(record: RunRecord, selection: Selection, name: str | None, progress: Progress) -> WithoutPlan:
    """Finds the documents and the first step that counts one of them, and plans the run without them.

    Reads the data of the run, and tokenises text whose cache is gone.

    Raises:
        UserError: if a document does not exist or is never trained on, the data have changed, or the run has no
            checkpoint from which the rest can be computed.
    """
    config = record.load_config(record.last + 1)
    config.data.require_documents()
    # Before a checkpoint is read, which starts the backends.
    configure_as_recorded(record, config.trainer, record.last)
    with contextlib.chdir(record.root), closing(open_complete_data(record.id, config, progress)) as data:
        # Document numbers have no meaning in other data.
        saved = max(record.checkpoint_steps(), default=0)
        check_same_data(record.id, data, saved, record.read_checkpoint(saved).get("data_fingerprint"))
        added = _select(config.data, data, selection)
        uncounted = _check_documents(config.data, data, added)
        without = _join(config.data.without, added)
        first_step = _find_first_step(config, data, uncounted)
        documents = {set_name: _count(data, set_name, of_set) for set_name, of_set in uncounted.items()}
        where = _locate(data, uncounted)
    name = name or f"{record.id}-without-{_describe(without)}"
    start = _find_start(record, first_step)
    settings = [f"data.without={json.dumps(without.model_dump(mode='json'))}"]
    branch = plan_branch(record, start, name, settings) if start else None
    new_config = branch.config if branch is not None else load_branch_configs(record, 0, name, settings)[1]
    holds = [*where, *_find_holders(record, config, first_step)]
    return WithoutPlan(record, name, new_config, without, documents, first_step, branch, holds)


def _select(config: DataConfig, data: Data, selection: Selection) -> WithoutConfig:
    documents: list[int | str] = []
    sets: list[str] = []
    for text in selection.names:
        if _NUMBER.fullmatch(text):
            documents.append(int(text))
        elif _NUMBER.fullmatch(text.rpartition(":")[2]) and text.rpartition(":")[0]:
            documents.append(text if config.configs else split_number(text)[1])
        elif text in config.configs:
            sets.append(text)
        else:
            names = f", or one of {', '.join(config.configs)}" if config.configs else ""
            raise UserError(
                f"DOCUMENT {text}: give a number, as `lmt data find` prints it, SET:NUMBER{names}; lists of documents "
                "are given by --file or --hashes"
            )
    if selection.hashes is not None:
        documents += _find_hashed(config, data, selection.hashes)
    files = [str(file.absolute()) for file in selection.files]
    if not (documents or files or sets):
        raise UserError("name documents: numbers, as `lmt data find` prints them, --file or --hashes")
    return WithoutConfig(documents=documents, files=files, sets=sets)


def _find_hashed(config: DataConfig, data: Data, file: Path) -> list[int | str]:
    try:
        lines = [line.split()[0].lower() for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hashes {file}: cannot be read ({error})") from None
    if invalid := [line for line in lines if not _HASH.fullmatch(line)]:
        raise UserError(f"--hashes {file}: {invalid[0][:80]} is no SHA-256 hash of 64 hexadecimal digits")
    hashes, texts_V = set(lines), token_texts(data.tokenizer)
    documents: list[int | str] = []
    for name, cache in train_caches(data).items():
        for batch in iter_documents(name, cache):
            for number, tokens in zip(batch.numbers_D.tolist(), batch.tokens_D, strict=True):
                text = b"".join(texts_V[token] or b"" for token in tokens.tolist())
                if hashlib.sha256(text).hexdigest() in hashes:
                    documents.append(f"{name}:{number}" if config.configs else number)
    if not documents:
        raise UserError(f"--hashes {file}: no document of the training text has one of these hashes")
    return documents


def _join(old: WithoutConfig | None, new: WithoutConfig) -> WithoutConfig:
    """Returns the documents of both, without repetitions and in the order of the old ones first."""
    if old is None:
        return new
    fields = ("documents", "files", "sets")
    return WithoutConfig(**{key: [*dict.fromkeys([*getattr(old, key), *getattr(new, key)])] for key in fields})


def _check_documents(config: DataConfig, data: Data, without: WithoutConfig) -> dict[str, Uncounted]:
    """Returns the documents that the run counted, by set."""
    sets = {name: x.has_documents_of_text for name, x in config.sets.items()}
    try:
        without.check(sets, mixture=bool(config.configs))
    except ValueError as error:
        raise UserError(f"data.{error}") from None
    uncounted, old = read_uncounted(config.model_copy(update={"without": without})), read_uncounted(config)
    if unused := [name for name in uncounted if name not in config.trained]:
        raise UserError(f"{unused[0]}: the run does not train on this set, so its documents never counted")
    for name, of_set in uncounted.items():
        # Called for its errors.
        of_set.find_runs("the data" if name == SINGLE_SET else f"the set {name}", data.caches[f"{name}/train"])
    return {name: of_set.except_for(old[name]) if name in old else of_set for name, of_set in uncounted.items()}


def _find_first_step(config: RunConfig, data: Data, uncounted: Mapping[str, Uncounted]) -> int:
    """Returns the first step, counted from 1, whose batch contains a token of the documents."""
    trainer = config.trainer
    schedule, order = trainer.batch_schedule, data.train_order(trainer.batch_schedule)
    stop = schedule.rows_before(trainer.num_train_steps)
    stop = stop if order.length is None else min(stop, order.length)
    positions = [
        position
        for index, train in enumerate(order.sets)
        if train.name in uncounted
        for position in _iter_first_positions(data, index, uncounted[train.name], stop, order)
    ]
    if not positions:
        names = ", ".join(f"{name}:{number}" for name, x in uncounted.items() for number in x.documents.documents_N[:4])
        raise UserError(
            f"no step of the run counts a token of {names or ', '.join(uncounted)}: they are held out, left out by "
            "data.exclude or data.without, or in rows after the last step, so there is nothing to do"
        )
    steps = range(trainer.num_train_steps + 1)
    return bisect.bisect_right(steps, min(positions), key=schedule.rows_before)


def _iter_first_positions(data: Data, index: int, uncounted: Uncounted, stop: int, order: TrainOrder) -> Iterator[int]:
    """Yields the positions, before `stop`, of the first epoch in which rows of a set contain the documents."""
    train = order.sets[index]
    starts_N, ends_N = uncounted.find_runs(train.name, data.caches[f"{train.name}/train"])
    # The token before a document has the document's first token as its target.
    runs = [
        train.rows.rows_containing(max(start - 1, 0), end)
        for start, end in zip(starts_N.tolist(), ends_N.tolist(), strict=True)
    ]
    rows_N = np.unique(np.concatenate([np.zeros(0, np.int64), *runs]))
    first_epoch = None
    for position, _, epoch in order.find_positions(index, rows_N[rows_N < train.num_rows], stop):
        if first_epoch is not None and epoch > first_epoch:
            return
        first_epoch = epoch
        yield position


def _count(data: Data, name: str, uncounted: Uncounted) -> int:
    ledger = data.caches[f"{name}/train"].ledger
    return ledger.num_documents if uncounted.whole_set else len(uncounted.documents.documents_N)


def _locate(data: Data, uncounted: Mapping[str, Uncounted], limit: int = 5) -> list[str]:
    """Returns the places of the text and of its tokens."""
    origins, lines = Origins(data), []
    for name, of_set in uncounted.items():
        numbers = [] if of_set.whole_set else of_set.documents.documents_N.tolist()
        lines += [f"text of {name}:{number}: {origins.find_passage(name, number, 0)[0]}" for number in numbers[:limit]]
        if len(numbers) > limit:
            lines.append(f"text of {len(numbers) - limit} more documents of {name}")
        lines.append(f"tokens: the cache {data.caches[f'{name}/train'].store.url}")
    return lines


def _describe(without: WithoutConfig) -> str:
    """Returns a short name for the documents, which can be a part of a run ID."""
    names = [*map(str, without.documents), *without.sets]
    if len(names) == 1 and not without.files:
        return names[0].replace(":", "-")
    return hashlib.sha256(without.model_dump_json().encode()).hexdigest()[:8]


def _find_start(record: RunRecord, first_step: int) -> int:
    """Returns the step of the newest checkpoint before the first use, or 0 for the start of the run."""
    if first_step - 1 < record.start:
        if record.branch is not None:
            parent = record.branch.parent
            raise UserError(
                f"step {first_step} counts the documents, before {record.id} began at step {record.start} as a branch "
                f"of {parent}: make `lmt without {parent}` first, then the branch of the result with the same settings"
            )
        raise UserError(
            f"step {first_step} counts the documents, but {record.id} began at step {record.start}, from the "
            "checkpoint of another run: begin with that run"
        )
    start = max(step for step in (record.start, *record.checkpoint_steps()) if step < first_step)
    if change := next((change["step"] for change in record.changes if change["step"] > start), None):
        raise UserError(
            f"the configuration of {record.id} changed after step {change}, so the steps from {start} on have no one "
            "configuration; make a branch up to there, and repeat the change"
        )
    return start


def _find_holders(record: RunRecord, config: RunConfig, first_step: int) -> list[str]:
    """Returns the checkpoints, exports and runs that were computed with the documents."""
    steps = [step for step in record.checkpoint_steps() if step >= first_step]
    lines = [f"checkpoint: {record.checkpoints}/{step}" for step in steps]
    if config.hf_save_path is not None:
        lines.append(f"exports: {config.hf_save_path}")
    affected = {record.id}
    listings = list_runs([record.path.parent])
    # A branch of a branch is affected if its parent is.
    while branches := [
        run
        for run in listings
        if run.id not in affected and run.parent in affected and (run.branched_at or 0) >= first_step
    ]:
        affected |= {run.id for run in branches}
        lines += [
            f"branch of {run.parent} at step {run.branched_at}: {run.id}, with its checkpoints" for run in branches
        ]
    if isinstance(config.data.tokenizer_config, TrainedBpe):
        lines.append("tokenizer: trained on all of the text, and unchanged")
    return lines
