"""Supervised format: prompts with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from lm_trainer.data.formats.base import EncodedDocument, FormatConfig, PreparedRow, UnusableRow
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import kind_of, replace_surrogates
from lm_trainer.data.tokenizer import Tokenizer


class SupervisedFormat(FormatConfig):
    """Every row is a prompt and its answer; the loss counts only the answer and the end of the document.

    Prompt and answer are tokenised apart, as they are when a model is asked.
    """

    type: Literal["supervised"] = "supervised"
    input_field: str = "prompt"
    """The field with the prompt."""
    output_field: str = "response"
    """The field with the answer."""
    separate_with: str = ""
    """Text between the two; it belongs to the prompt."""
    mask_inputs: bool = True
    """True to leave the prompt out of the loss."""

    has_loss_mask: ClassVar[bool] = True

    @model_validator(mode="after")
    def _two_fields(self) -> Self:
        if self.input_field == self.output_field:
            raise ValueError(f"input_field and output_field are both {self.input_field!r}; name two fields")
        return self

    def fields(self) -> tuple[str, ...]:
        return self.input_field, self.output_field

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        del tokenizer
        return self.model_dump()

    def prepare(self, row: Row) -> PreparedRow:
        record = row.record or {}
        for field in self.fields():
            if not isinstance(record[field], str):
                raise UnusableRow(f"the field {field!r} is {kind_of(record[field])}, not a string")
        prompt, answer = (replace_surrogates(record[field]) for field in self.fields())
        # An empty row is passed over like an empty text, but a prompt that nobody answers is a mistake.
        if not answer:
            if not prompt:
                return PreparedRow(None, 0)
            raise UnusableRow(f"the field {self.output_field!r} is empty")
        replaced = prompt is not record[self.input_field] or answer is not record[self.output_field]
        prompt += self.separate_with
        return PreparedRow((prompt, answer), len(prompt.encode("utf-8")) + len(answer.encode("utf-8")), replaced)

    def encode(self, values: Sequence[Any], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        prompts = tokenizer.encode_batch([prompt for prompt, _ in values])
        answers = tokenizer.encode_batch([answer for _, answer in values])
        return [self._join(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def _join(self, prompt: Any, answer: Any) -> EncodedDocument:
        mask_T = np.ones(len(prompt) + len(answer), bool)
        if self.mask_inputs:
            mask_T[: len(prompt)] = False
        return EncodedDocument(np.concatenate([np.asarray(prompt, np.int64), np.asarray(answer, np.int64)]), mask_T)
