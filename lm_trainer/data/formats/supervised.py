"""The supervised format, for prompts with answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from lm_trainer.data.formats.base import EncodedDocument, PreparedRow, TokenIds, UnusableRow
from lm_trainer.data.formats.too_long import ConversationFormat
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import json_type_name, replace_surrogates
from lm_trainer.data.tokenizer import Tokenizer


class SupervisedFormat(ConversationFormat):
    """Every row is a prompt with its answer. Only the answer and the end-of-document token count in the loss.

    Prompt and answer are tokenised separately, as they are when the model is used.
    """

    type: Literal["supervised"] = "supervised"
    input_field: str = "prompt"
    """The field with the prompt."""
    output_field: str = "response"
    """The field with the answer."""
    context_field: str | None = None
    """An optional field with text to append to the prompt unless it is empty, such as the `input` of Alpaca records."""
    separate_context: str = "\n\n"
    """Text between the prompt and the context."""
    separate_with: str = ""
    """Text between the prompt and the answer. It belongs to the prompt."""
    mask_inputs: bool = True
    """True to exclude the prompt from the loss."""

    later_keys: ClassVar[frozenset[str]] = frozenset({"context_field", "separate_context"})
    refused_keys: ClassVar[Mapping[str, str]] = {
        "train_on_inputs": "true is mask_inputs: false, with which every token counts; false is the default"
    }

    @model_validator(mode="after")
    def _check_fields_differ(self) -> Self:
        if self.input_field == self.output_field:
            raise ValueError(f"input_field and output_field are both {self.input_field!r}; name two fields")
        if self.context_field in (self.input_field, self.output_field):
            raise ValueError(f"context_field is {self.context_field!r} as well; name another field")
        return self

    def fields(self) -> tuple[str, ...]:
        context = () if self.context_field is None else (self.context_field,)
        return self.input_field, self.output_field, *context

    def identity(self, tokenizer: Tokenizer) -> dict[str, object] | None:
        del tokenizer
        unused = {"context_field", "separate_context"} if self.context_field is None else set()
        return self.model_dump(exclude={*unused, *self.row_keys})

    def prepare(self, row: Row) -> PreparedRow:
        record = row.record or {}
        # A record without context may hold null.
        values = [record[field] or "" if field == self.context_field else record[field] for field in self.fields()]
        for field, value in zip(self.fields(), values, strict=True):
            if not isinstance(value, str):
                raise UnusableRow(f"the field {field!r} is {json_type_name(value)}, not a string")
        prompt, answer, *context = map(replace_surrogates, values)
        # An empty row is skipped like an empty text, but a prompt without an answer is an error.
        if not answer:
            if not prompt:
                return PreparedRow(None, 0)
            raise UnusableRow(f"the field {self.output_field!r} is empty")
        replaced = any(new is not old for new, old in zip((prompt, answer, *context), values, strict=True))
        if context and context[0]:
            prompt += self.separate_context + context[0]
        prompt += self.separate_with
        return PreparedRow((prompt, answer), len(prompt.encode("utf-8")) + len(answer.encode("utf-8")), replaced)

    def encode(self, values: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        prompts = tokenizer.encode_batch([prompt for prompt, _ in values])
        answers = tokenizer.encode_batch([answer for _, answer in values])
        return [self._join_prompt_and_answer(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def _join_prompt_and_answer(self, prompt: TokenIds, answer: TokenIds) -> EncodedDocument:
        mask_T = np.ones(len(prompt) + len(answer), bool)
        if self.mask_inputs:
            mask_T[: len(prompt)] = False
        return EncodedDocument(np.concatenate([np.asarray(prompt, np.int64), np.asarray(answer, np.int64)]), mask_T)
