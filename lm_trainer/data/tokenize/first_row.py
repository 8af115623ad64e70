"""Notes about the data of a cache that is about to be built, from the first rows of its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.formats import UnusableRow
from lm_trainer.data.sources import Row, Shard
from lm_trainer.data.sources.base import ALL_FIELDS
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.data.tokenizer.brackets import decode_with_brackets

_ROWS, _SHOWN_CHARS = 100, 400
"""Number of rows that are looked at, and of characters that are shown."""


def build_notes(builds: Mapping[str, object]) -> list[str]:
    """Returns notes for the user about sets with prompts and answers whose first cache is still to be built.

    They name fields of the first records that hold text and are not read, and what the format warns of.

    Args:
        builds: builds by `NAME/train` and `NAME/validation`. Everything but a `Build` is ignored.
    """
    sets: dict[str, Build] = {}
    for name, build in builds.items():
        if isinstance(build, Build):
            sets.setdefault(name.rpartition("/")[0], build)
    return [note for build in sets.values() for note in _notes_of_build(build)]


def _notes_of_build(build: Build) -> list[str]:
    if not build.format.has_prompts or not build.shards or build.read_ledger().finished:
        return []
    try:
        unread = _find_unread_fields(build.shards[0], build.format.fields())
        example = _show_row(build, min(unread.values())) if unread else None
    except UserError:
        # The build will report it.
        return []
    notes = build.format.notes(build.tokenizer)
    if example is not None:
        named = " and ".join(map(repr, unread))
        notes.append(
            f"note: {build.name}: records also have text under {named}, which is not read. The model will see the "
            f"first of them as follows; what counts in the loss is between ⟦ and ⟧:\n{example}"
        )
    return notes


def _find_unread_fields(shard: Shard, read_fields: tuple[str, ...]) -> dict[str, int]:
    """Returns the fields that hold words or messages and are not among `read_fields`, each with its first row.

    Only the beginning of the shard is read. It takes several rows, because a field may be empty in many records.
    """
    if not hasattr(shard, "fields"):
        return {}
    # Shards whose rows are records are dataclasses with the fields to read.
    record_shard: Any = shard
    read = {*read_fields, *(field.partition(".")[0] for field in read_fields)}
    unread: dict[str, int] = {}
    for index, row in enumerate(islice(replace(record_shard, fields=ALL_FIELDS).rows(), _ROWS)):
        record = row.record if isinstance(row, Row) else None
        for name, value in (record or {}).items():
            if name not in read and _holds_words(value):
                unread.setdefault(name, index)
    return unread


def _holds_words(value: object) -> bool:
    """Returns True for a text of several words, or a list of objects, such as messages or tools."""
    if isinstance(value, str):
        return len(value.split()) > 1
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _show_row(build: Build, index: int) -> str | None:
    """Returns the beginning of a document as the model sees it; None if its row is bad or empty."""
    row = next(islice(build.shards[0].rows(), index, None), None)
    if not isinstance(row, Row):
        return None
    try:
        prepared = build.format.prepare(row)
    except UnusableRow:
        return None
    document = build.format.encode([prepared.value], build.tokenizer)[0] if prepared.size else None
    if document is None or isinstance(document, UnusableRow):
        return None
    tokenizer = build.tokenizer
    decode = tokenizer.decode_all if isinstance(tokenizer, HfTokenizer) else tokenizer.decode
    mask = np.ones(len(document.ids), bool) if document.loss_mask is None else document.loss_mask
    text = decode_with_brackets(decode, np.asarray(document.ids), mask)
    return text[:_SHOWN_CHARS] + (" ..." if len(text) > _SHOWN_CHARS else "")
