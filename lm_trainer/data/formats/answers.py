"""Prompts with an answer, as texts or as messages: how they are read from records and encoded.

Shape letters: T tokens of a prompt and its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from lm_trainer.core.config import LocalPath
from lm_trainer.data.formats.base import EncodedDocument, FormatConfig, UnusableRow
from lm_trainer.data.formats.chat import (
    Message,
    check_message,
    compile_format_template,
    mark_answer_tokens,
    marks_answers,
    replace_surrogates_deep,
    tokenize_rendered,
)
from lm_trainer.data.sources.base import json_type_name
from lm_trainer.data.tokenizer import HfTokenizer, Tokenizer

Words = str | list[Message]
"""A text, or a list of messages."""


class Answer(NamedTuple):
    """A prompt with one answer. Both are texts, or both are lists of messages."""

    prompt: Words
    answer: Words


class AnswerFormat(FormatConfig):
    """Base of formats whose rows have a prompt and one or more answers. Only answers count in the loss."""

    prompt_field: str | None = "prompt"
    """The field with the prompt: a text, or a list of messages. null takes the prompt from the answers' fields."""
    chat_template: LocalPath | None = None
    """A Jinja template, or the path of a template file, for messages. The default is the template of the tokenizer. If
    it marks what the assistant says with `{% generation %}`, only these tokens of an answer count; otherwise all do."""
    on_too_long: Literal["skip", "raise"] = "skip"
    """Treatment of a row that is longer than `model.seq_len`: `skip` leaves it out and reports the number of such rows,
    and `raise` stops with an error. It is never cut."""

    has_loss_mask: ClassVar[bool] = True
    has_prompts: ClassVar[bool] = True
    # Added by `encode` to texts. Templates write it themselves.
    adds_bos: ClassVar[bool] = False
    row_keys: ClassVar[frozenset[str]] = frozenset({"on_too_long"})

    def identity(self, tokenizer: Tokenizer) -> dict[str, object] | None:
        assert isinstance(tokenizer, HfTokenizer)
        if self.chat_template is None and tokenizer.chat_template is None:
            return self.settings_for_cache()
        source = compile_format_template(self.chat_template, tokenizer).source
        return {**self.settings_for_cache(), "chat_template": source}

    def encode_answers(self, answers: Sequence[Answer], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        """Encodes prompts with their answers. Returns one result per answer."""
        texts = [number for number, answer in enumerate(answers) if isinstance(answer.prompt, str)]
        encoded: dict[int, EncodedDocument | UnusableRow] = {}
        prompts, replies = (
            tokenizer.encode_batch([str(answers[number][part]) for number in texts]) if texts else [] for part in (0, 1)
        )
        start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        for number, prompt, reply in zip(texts, prompts, replies, strict=True):
            encoded[number] = _join_ids([*start, *prompt], reply)
        for number, answer in enumerate(answers):
            if number not in encoded:
                encoded[number] = self._encode_messages(answer, tokenizer)
        return [encoded[number] for number in range(len(answers))]

    def _encode_messages(self, answer: Answer, tokenizer: Tokenizer) -> EncodedDocument | UnusableRow:
        assert isinstance(tokenizer, HfTokenizer)
        assert isinstance(answer.prompt, list)
        assert isinstance(answer.answer, list)
        template = compile_format_template(self.chat_template, tokenizer)
        try:
            rendered = template.render([*answer.prompt, *answer.answer])
            if marks_answers(template):
                in_prompt = len(template.render(answer.prompt).answers) if answer.prompt else 0
                counted = rendered.answers[in_prompt:]
            else:
                start = template.render(answer.prompt, add_generation_prompt=True).text
                if not rendered.text.startswith(start):
                    return UnusableRow(
                        "the chat template writes the prompt differently when an answer follows, so that the answer "
                        "cannot be told from it; mark answers with {% generation %} in data.format.chat_template"
                    )
                counted = [(len(start), len(rendered.text))]
        except UnusableRow as error:
            return error
        ids, spans = tokenize_rendered(rendered, tokenizer)
        in_loss_T = mark_answer_tokens(spans, counted)
        if not in_loss_T[1:].any():
            return UnusableRow("the chat template writes nothing of the answer that counts in the loss")
        return EncodedDocument(ids, in_loss_T)


def _join_ids(prompt: Sequence[int], reply: Sequence[int] | np.ndarray) -> EncodedDocument | UnusableRow:
    # The first token of a document has no context to be predicted from.
    if not len(prompt):
        return UnusableRow("the prompt is empty, and the tokenizer has no token for the beginning of a text")
    ids = np.concatenate([np.asarray(prompt, np.int64), np.asarray(reply, np.int64)])
    return EncodedDocument(ids, np.arange(len(ids)) >= len(prompt))


def read_words(record: dict[str, Any], field: str) -> Words:
    """Returns a text or the checked messages of a field of a record.

    Raises:
        UnusableRow: if the field contains something else.
    """
    value = record[field]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UnusableRow(f"the field {field!r} is {json_type_name(value)}, not a string or a list of messages")
    return [check_message(message, f"message {number} of {field!r}") for number, message in enumerate(value)]


def require_answer(words: Words, field: str) -> None:
    """Raises `UnusableRow` if there is no answer: no text, or no message of the assistant with text or calls."""
    if isinstance(words, str):
        if not words:
            raise UnusableRow(f"the field {field!r} is empty; remove the row")
    elif not any(message["role"] == "assistant" and _says_something(message) for message in words):
        raise UnusableRow(f"the assistant says nothing in the answer of {field!r}; remove the row")


def _says_something(message: Message) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))


def as_messages(prompt: Words, answer: Words) -> Answer:
    """Makes both parts texts or both parts messages. A text becomes a message of the user or of the assistant."""
    if isinstance(prompt, str) and isinstance(answer, str):
        return Answer(prompt, answer)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    return Answer(prompt, answer)


def common_prompt(one: Words, other: Words) -> Words:
    """Returns the common beginning of two answers, which is their prompt. It leaves at least one item of each.

    Like TRL, a text is compared character by character, and a blank before the answers belongs to the answers.
    """
    longest = max(min(len(one), len(other)) - 1, 0)
    length = next((i for i in range(longest) if one[i] != other[i]), longest)
    if isinstance(one, str) and length and one[length - 1] == " ":
        length -= 1
    return one[:length]


def without_lone_surrogates(words: Any) -> tuple[Any, int, bool]:
    """Returns a copy without lone surrogates, the number of its text bytes, and True if any surrogate was replaced."""
    counts = [0, 0]
    copy = replace_surrogates_deep(words, counts)
    return copy, counts[0], bool(counts[1])
