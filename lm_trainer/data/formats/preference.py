"""The preference formats: pairs of a chosen and a rejected answer, and single answers with a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from lm_trainer.core.data_content import DataContent
from lm_trainer.data.formats.answers import (
    Answer,
    AnswerFormat,
    Words,
    as_messages,
    common_prompt,
    read_words,
    require_answer,
    without_lone_surrogates,
)
from lm_trainer.data.formats.base import EncodedDocument, PreparedRow, UnusableRow
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import json_type_name
from lm_trainer.data.tokenizer import Tokenizer


class PreferenceFormat(AnswerFormat):
    """Every row is a prompt with a chosen and a rejected answer, as texts or as lists of messages.

    Without a prompt field, the prompt is the common beginning of the two answers. If the answers are messages that
    repeat a prompt which is also given as text, the messages are used. A pair is never split over training rows.
    """

    type: Literal["preference"] = "preference"
    chosen_field: str = "chosen"
    """The field with the better answer."""
    rejected_field: str = "rejected"
    """The field with the worse answer."""

    content: ClassVar[DataContent] = "pairs"

    @model_validator(mode="after")
    def _check_fields_differ(self) -> Self:
        if len(set(self.fields())) < len(self.fields()):
            raise ValueError("prompt_field, chosen_field and rejected_field must be different fields")
        return self

    def fields(self) -> tuple[str, ...]:
        prompt = () if self.prompt_field is None else (self.prompt_field,)
        return (*prompt, self.chosen_field, self.rejected_field)

    def prepare(self, row: Row) -> PreparedRow:
        record = dict(row.record or {})
        chosen, rejected = (read_words(record, field) for field in (self.chosen_field, self.rejected_field))
        if type(chosen) is not type(rejected):
            raise UnusableRow(f"one of {self.chosen_field!r} and {self.rejected_field!r} is a text, the other messages")
        if chosen == rejected:
            raise UnusableRow(
                f"{self.chosen_field!r} and {self.rejected_field!r} are equal, so neither is better; remove the row"
            )
        prompt = None if self.prompt_field is None else read_words(record, self.prompt_field)
        pair = [as_messages(*parts) for parts in self._split(prompt, chosen, rejected)]
        for part, field in zip(pair, (self.chosen_field, self.rejected_field), strict=True):
            require_answer(part.answer, field)
        values, size, replaced = without_lone_surrogates([list(part) for part in pair])
        return PreparedRow([Answer(*value) for value in values], size, replaced)

    def _split(self, prompt: Words | None, chosen: Words, rejected: Words) -> list[tuple[Words, Words]]:
        """Returns the prompt and the rest of each answer."""
        repeated: Words = "" if isinstance(chosen, str) else []
        if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
            repeated = common_prompt(chosen, rejected)
        return [(repeated or prompt or "", answer[len(repeated) :]) for answer in (chosen, rejected)]

    def encode(self, values: Sequence[list[Answer]], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        encoded = self.encode_answers([answer for pair in values for answer in pair], tokenizer)
        return [_join_pair(*encoded[index : index + 2]) for index in range(0, len(encoded), 2)]


def _join_pair(
    chosen: EncodedDocument | UnusableRow, rejected: EncodedDocument | UnusableRow
) -> EncodedDocument | UnusableRow:
    if isinstance(chosen, UnusableRow):
        return chosen
    if isinstance(rejected, UnusableRow):
        return rejected
    if np.array_equal(chosen.ids, rejected.ids):
        return UnusableRow("the two answers have the same tokens, so neither is better; remove the row")
    return chosen._replace(partner=rejected)


class UnpairedPreferenceFormat(AnswerFormat):
    """Every row is a prompt with one answer and a label that says whether the answer is desirable.

    Prompt and answer are texts or lists of messages. Without a prompt field, the answer must be a list of messages,
    whose last one is the answer.
    """

    type: Literal["unpaired_preference"] = "unpaired_preference"
    completion_field: str = "completion"
    """The field with the answer."""
    label_field: str = "label"
    """The field with the label: true or 1 for a desirable answer, false or 0 for an undesirable one."""

    content: ClassVar[DataContent] = "examples"

    @model_validator(mode="after")
    def _check_fields_differ(self) -> Self:
        if len(set(self.fields())) < len(self.fields()):
            raise ValueError("prompt_field, completion_field and label_field must be different fields")
        return self

    def fields(self) -> tuple[str, ...]:
        prompt = () if self.prompt_field is None else (self.prompt_field,)
        return (*prompt, self.completion_field, self.label_field)

    def prepare(self, row: Row) -> PreparedRow:
        record = dict(row.record or {})
        label = record[self.label_field]
        if label not in (0, 1) or isinstance(label, str):
            actual = label if isinstance(label, int | float) else json_type_name(label)
            raise UnusableRow(f"the field {self.label_field!r} is {actual}, not true or false")
        answer = read_words(record, self.completion_field)
        if self.prompt_field is not None:
            prompt = read_words(record, self.prompt_field)
        elif isinstance(answer, list):
            prompt, answer = answer[:-1], answer[-1:]
        else:
            raise UnusableRow(
                f"the field {self.completion_field!r} is a text without a prompt; name the field of the prompt as "
                f"data.format.prompt_field"
            )
        require_answer(answer, self.completion_field)
        words, size, replaced = without_lone_surrogates(list(as_messages(prompt, answer)))
        return PreparedRow((Answer(*words), bool(label)), size, replaced)

    def encode(
        self, values: Sequence[tuple[Answer, bool]], tokenizer: Tokenizer
    ) -> list[EncodedDocument | UnusableRow]:
        encoded = self.encode_answers([answer for answer, _ in values], tokenizer)
        labels = [label for _, label in values]
        return [
            document if isinstance(document, UnusableRow) else _place_by_label(document, label)
            for document, label in zip(encoded, labels, strict=True)
        ]


def _place_by_label(document: EncodedDocument, desirable: bool) -> EncodedDocument:
    """Returns a pair in which the answer is the chosen one if it is desirable; the other document is empty."""
    empty = EncodedDocument(np.zeros(0, np.int64), np.zeros(0, bool))
    return document._replace(partner=empty) if desirable else empty._replace(partner=document)
