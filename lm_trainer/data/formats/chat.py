"""The chat format, which renders conversations with a chat template. Only the assistant's words count in the loss.

Shape letters: T tokens of a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from lm_trainer.core.config import LocalPath
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path
from lm_trainer.data.formats.base import EncodedDocument, PreparedRow, UnusableRow
from lm_trainer.data.formats.template import ChatTemplate, Rendered
from lm_trainer.data.formats.too_long import ConversationFormat
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import json_type_name, replace_surrogates
from lm_trainer.data.tokenizer import HfTokenizer, Tokenizer

_CONTENT_KEYS = ("content", "tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields of a message that may hold the assistant's words."""

_MAX_DEPTH = 100
"""Maximum depth of nesting in a conversation. Every Python version can traverse it, so bad rows are the same in all."""

Message = dict[str, object]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class ChatFormat(ConversationFormat):
    """Every row is a list of messages with a `role` and a `content`.

    The chat template renders them as one text and marks the assistant's words with `{% generation %}`.
    """

    type: Literal["chat"] = "chat"
    messages_field: str = "messages"
    """The field with the list of messages."""
    role_field: str = "role"
    """The field of a message with the role of its author, such as `from` in ShareGPT records."""
    content_field: str = "content"
    """The field of a message with its text, such as `value` in ShareGPT records."""
    roles: dict[str, str] = {}
    """Maps role names in the records to template roles. If `role_field` is not `role`, `human` and `gpt` are mapped to
    `user` and `assistant`."""
    tools_field: str | None = None
    """The field with the list of a conversation's tools; null passes no tools to the template."""
    chat_template: LocalPath | None = None
    """A Jinja template, the path of a template file, or the name of one of the tokenizer's templates, such as
    `tool_use`. The default is the template of the tokenizer."""
    mask_user_turns: bool = True
    """True to exclude all tokens from the loss except those the template marks as the assistant's."""
    last_turn_only: bool = False
    """True to count only the assistant's messages after the last message of the user."""
    turn_mask_field: str | None = None
    """The field of an assistant's message that tells whether it counts, such as `weight` in OpenAI's records, or
    `train`: true or 1, or false or 0. Messages without the field count."""

    # Templates write the BOS token themselves.
    adds_bos: ClassVar[bool] = False
    later_keys: ClassVar[frozenset[str]] = frozenset(
        {"role_field", "content_field", "roles", "last_turn_only", "turn_mask_field"}
    )
    refused_keys: ClassVar[Mapping[str, str]] = {
        "train_on_inputs": "true is mask_user_turns: false, with which every token counts; false is the default"
    }

    @model_validator(mode="after")
    def _check_fields_differ(self) -> Self:
        if self.messages_field == self.tools_field:
            raise ValueError(f"messages_field and tools_field are both {self.tools_field!r}; name two fields")
        if not self.mask_user_turns and (self.last_turn_only or self.turn_mask_field is not None):
            key = "last_turn_only" if self.last_turn_only else "turn_mask_field"
            raise ValueError(f"{key} has no effect with mask_user_turns: false, with which every token counts")
        return self

    def fields(self) -> tuple[str, ...]:
        return (self.messages_field,) if self.tools_field is None else (self.messages_field, self.tools_field)

    def identity(self, tokenizer: Tokenizer) -> dict[str, object] | None:
        unused = ({"tools_field", *self.later_keys} - self.changed_fields) | self.row_keys
        return {**self.model_dump(exclude=unused), "chat_template": self._compile_template(tokenizer).source}

    def prepare(self, row: Row) -> PreparedRow:
        value = (row.record or {})[self.messages_field]
        if not isinstance(value, list):
            raise UnusableRow(f"the field {self.messages_field!r} is {json_type_name(value)}, not a list of messages")
        locations = [f"message {i} of {self.messages_field!r}" for i in range(len(value))]
        messages = [
            check_message(self._rename_fields(item), location) for item, location in zip(value, locations, strict=True)
        ]
        if self.mask_user_turns and not _has_answer(messages):
            raise UnusableRow("the assistant says nothing in this conversation")
        counts = [0, 0]
        conversation = [replace_surrogates_deep(part, counts) for part in (messages, self._read_tools(row))]
        return PreparedRow(conversation, counts[0], replaced=bool(counts[1]))

    def _rename_fields(self, message: object) -> object:
        """Returns the message with the field names and role names that templates expect."""
        if not {"role_field", "content_field", "roles"} & self.changed_fields or not isinstance(message, dict):
            return message
        names = {self.role_field: "role", self.content_field: "content"}
        message = {names.get(key, key): value for key, value in message.items()}
        roles = self.roles if self.role_field == "role" else {**_SHAREGPT_ROLES, **self.roles}
        role = message.get("role")
        return {**message, "role": roles.get(role, role)} if isinstance(role, str) else message

    def _read_tools(self, row: Row) -> list[Message] | None:
        tools = None if self.tools_field is None else (row.record or {})[self.tools_field]
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise UnusableRow(
                f"the field {self.tools_field!r} holds something else than a list of tools, each an object"
            )
        return tools

    def encode(self, values: Sequence[list[Any]], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        template = self._compile_template(tokenizer)
        return [self._encode(template, conversation, tokenizer) for conversation in values]

    def _encode(
        self, template: ChatTemplate, conversation: list[Any], tokenizer: Tokenizer
    ) -> EncodedDocument | UnusableRow:
        assert isinstance(tokenizer, HfTokenizer)
        try:
            rendered = template.render(*conversation)
        except UnusableRow as error:
            return error
        ids, spans = tokenize_rendered(rendered, tokenizer)
        in_loss_T = np.ones(len(ids), bool)
        if self.mask_user_turns:
            try:
                answers = self._select_turns(conversation[0], rendered.answers)
            except UnusableRow as error:
                return error
            in_loss_T = mark_answer_tokens(spans, answers)
            if not in_loss_T.any():
                return UnusableRow("the assistant says nothing in this conversation")
        return EncodedDocument(ids, in_loss_T)

    def _select_turns(self, messages: list[Message], answers: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the answers that count.

        Args:
            messages: the messages of a conversation.
            answers: ranges of characters that the template marks, one for each message of the assistant.

        Raises:
            UnusableRow: if answers cannot be assigned to messages, or a mask is neither true nor false.
        """
        if not self.last_turn_only and self.turn_mask_field is None:
            return answers
        roles = [message["role"] for message in messages]
        indices = [index for index, role in enumerate(roles) if role == "assistant"]
        if len(indices) != len(answers):
            raise UnusableRow(
                f"the chat template marks {len(answers)} answers in a conversation with {len(indices)} messages of the "
                f"assistant, so that they cannot be told apart"
            )
        first = len(roles) - roles[::-1].index("user") if self.last_turn_only and "user" in roles else 0
        return [
            span
            for index, span in zip(indices, answers, strict=True)
            if index >= first and self._counts(messages[index], f"message {index} of {self.messages_field!r}")
        ]

    def _counts(self, message: Message, location: str) -> bool:
        value = True if self.turn_mask_field is None else message.get(self.turn_mask_field)
        if value is None:
            return True
        if value not in (0, 1) or isinstance(value, str):
            raise UnusableRow(f"the field {self.turn_mask_field!r} of {location} is {value!r}, not true or false")
        return bool(value)

    def notes(self, tokenizer: Tokenizer) -> list[str]:
        if not self.mask_user_turns:
            return []
        end = find_unmarked_end(self._compile_template(tokenizer))
        if end is None:
            return []
        return [
            f"warning: the chat template writes {end!r} after an answer, but not between {{% generation %}} and "
            f"{{% endgeneration %}}: the model will not learn to end turns; move {{% endgeneration %}} behind it in "
            f"your own template, data.format.chat_template"
        ]

    def _compile_template(self, tokenizer: Tokenizer) -> ChatTemplate:
        assert isinstance(tokenizer, HfTokenizer)
        template = compile_format_template(self.chat_template, tokenizer)
        if self.mask_user_turns and not marks_answers(template):
            raise UserError(
                "data.format.chat_template: the template does not mark what the assistant says; put {% generation %} "
                "before and {% endgeneration %} after it, or set mask_user_turns: false"
            )
        return template


def compile_format_template(source: str | None, tokenizer: HfTokenizer) -> ChatTemplate:
    """Compiles the chat template of a format: a Jinja template, the path of one, the name of one of the tokenizer's
    templates, or None for the tokenizer's default template.

    Raises:
        UserError: if there is no template, or it cannot be read.
    """
    if source is None:
        source = tokenizer.chat_template
    elif source in tokenizer.named_chat_templates:
        source = tokenizer.named_chat_templates[source]
    # A text with a Jinja tag is a template, and any other text is a path.
    elif not re.search(r"\{[%{]", source):
        source = _read_template_file(source)
    if source is None:
        raise UserError("data.format.chat_template: the tokenizer has no chat template; name one")
    return _cached_chat_template(source, tuple(tokenizer.named_tokens().items()), tuple(tokenizer.special_tokens()))


def find_unmarked_end(template: ChatTemplate) -> str | None:
    """Returns the text that a template writes after an answer, if the template does not mark any of it.

    None if the end of an answer is marked, if nothing follows the answer, or if the template rejects the conversation
    with which this is tried.
    """
    answer = "An answer."
    messages = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": answer}]
    try:
        rendered = template.render(messages)
    except UnusableRow:
        return None
    end = rendered.text.rfind(answer) + len(answer)
    marked_end = max((stop for start, stop in rendered.answers if start < end), default=0)
    unmarked = rendered.text[marked_end:]
    return unmarked if marked_end and unmarked and not rendered.text[end:marked_end].strip() else None


def marks_answers(template: ChatTemplate) -> bool:
    """Returns True if the template marks what the assistant says."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template.source) is not None


def compile_template(tokenizer: HfTokenizer) -> ChatTemplate:
    """Compiles the chat template of a tokenizer.

    Raises:
        UserError: if the tokenizer has no template.
    """
    source = tokenizer.chat_template
    if source is None:
        raise UserError("the model's tokenizer has no chat template")
    return _cached_chat_template(source, tuple(tokenizer.named_tokens().items()), tuple(tokenizer.special_tokens()))


# Cached, since every batch needs the template, and compiling it takes longer than rendering a conversation.
@lru_cache(maxsize=8)
def _cached_chat_template(
    source: str, variables: tuple[tuple[str, str], ...], special: tuple[str, ...]
) -> ChatTemplate:
    return ChatTemplate(source, dict(variables), special)


def _read_template_file(path: str) -> str:
    try:
        return local_path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.format.chat_template: {path} is no template, and cannot be read: {error}") from None


def check_message(message: object, location: str) -> Message:
    """Checks a message, and joins its content to one text if the content is a list of texts.

    Without this, a template would render the list itself.

    Raises:
        UnusableRow: if the message has no role, or its content is not text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        other = isinstance(message, dict) and {"from", "value"} <= message.keys()
        hint = "; set role_field: from and content_field: value" if other else ""
        raise UnusableRow(f"{location} is no object with a role and a content{hint}")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if isinstance(content, list):
        return {**message, "content": "".join(_content_item_text(item, location) for item in content)}
    if content is None:
        kind = "null" if "content" in message else "missing"
        raise UnusableRow(f"the content of {location} is {kind}, which it may only be beside tool_calls")
    raise UnusableRow(f"the content of {location} is {json_type_name(content)}, not a string")


def _content_item_text(item: object, location: str) -> str:
    if not isinstance(item, dict):
        raise UnusableRow(
            f"the content of {location} is a list with {json_type_name(item)} in it; it may hold objects of type text"
        )
    if item.get("type") != "text":
        raise UnusableRow(
            f"the content of {location} is a list with an item of type {item.get('type')!r}; only text is read"
        )
    if not isinstance(text := item.get("text"), str):
        raise UnusableRow(
            f"the content of {location} is a list with an item whose text is {json_type_name(text)}, not a string"
        )
    return text


def _has_answer(messages: list[Message]) -> bool:
    """Returns True if an assistant message has content, or no message has this role, so only the template can tell."""
    answers = [message for message in messages if message["role"] == "assistant"]
    return not answers or any(message.get(key) for message in answers for key in _CONTENT_KEYS)


def replace_surrogates_deep(value: object, counts: list[int], levels: int = _MAX_DEPTH) -> object:
    """Copies a value without lone surrogates. Adds the number of text bytes and of replacements to `counts`.

    Raises:
        UnusableRow: if the value is nested deeper than `levels`.
    """
    if isinstance(value, str):
        text = replace_surrogates(value)
        counts[0] += len(text.encode("utf-8"))
        counts[1] += text is not value
        return text
    if not isinstance(value, dict | list):
        return value
    if not levels:
        raise UnusableRow(f"the conversation is nested too deeply, in more than {_MAX_DEPTH} levels")
    if isinstance(value, dict):
        return {key: replace_surrogates_deep(item, counts, levels - 1) for key, item in value.items()}
    return [replace_surrogates_deep(item, counts, levels - 1) for item in value]


def tokenize_rendered(rendered: Rendered, tokenizer: HfTokenizer) -> tuple[list[int], np.ndarray]:
    """Returns the ids, and the range of characters [start, end) of every token in the text: int [T, 2].

    Special tokens are recognised only in text that the template writes, and never in the text of a message.
    """
    # If no message contains the name of a special token, all special tokens in the text come from the template.
    if not rendered.quoted:
        return tokenizer.encode_template(rendered.text)
    ids: list[int] = []
    spans = [np.zeros((0, 2), np.int64)]
    for start, piece, special in rendered.split_at_special_tokens(tokenizer.special_tokens()):
        if special is not None:
            ids.append(special)
            spans.append(np.array([[start, start + len(piece)]]))
        elif piece:
            piece_ids, offsets = tokenizer.encode_plain(piece)
            ids += piece_ids
            spans.append(offsets + start)
    return ids, np.concatenate(spans)


def mark_answer_tokens(spans_T2: np.ndarray, answers: list[tuple[int, int]]) -> np.ndarray:
    """Returns bool [T], True for tokens with at least one character in an answer. This agrees with transformers."""
    found_T = np.zeros(len(spans_T2), bool)
    for start, end in answers:
        found_T |= (spans_T2[:, 0] < end) & (spans_T2[:, 1] > start)
    return found_T
