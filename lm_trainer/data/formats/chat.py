"""Chat format: conversations, written out by a chat template. The loss counts the assistant's words alone.

Shape letters: T tokens of a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from lm_trainer.core.config import LocalPath
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path
from lm_trainer.data.formats.base import EncodedDocument, FormatConfig, PreparedRow, UnusableRow
from lm_trainer.data.formats.template import ChatTemplate, Rendered
from lm_trainer.data.sources import Row
from lm_trainer.data.sources.base import kind_of, replace_surrogates
from lm_trainer.data.tokenizer import HfTokenizer, Tokenizer

_SAYING = ("content", "tool_calls", "reasoning_content", "reasoning", "thinking")
"""Fields of a message in which the assistant's words may stand."""

_LEVELS = 100
"""Nesting that every version of Python can walk through, so that the same rows are bad under each."""


_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class ChatFormat(FormatConfig):
    """Every row is a list of messages, each with a `role` and a `content`.

    The template writes them out as one text, in which it marks the assistant's words with `{% generation %}`.
    """

    type: Literal["chat"] = "chat"
    messages_field: str = "messages"
    """The field with the list of messages."""
    role_field: str = "role"
    """The field of a message that names who speaks: `from` in ShareGPT's records."""
    content_field: str = "content"
    """The field of a message with what is said: `value` in ShareGPT's records."""
    roles: dict[str, str] = {}
    """Roles by the names that stand for them in the records; `human` and `gpt` are `user` and `assistant` where
    `role_field` is not `role`."""
    tools_field: str | None = None
    """The field with the list of tools that a conversation may call, or null; the template gets none, if absent."""
    chat_template: LocalPath | None = None
    """A Jinja template, or the path of a file that holds one; the tokenizer's own, if absent."""
    mask_user_turns: bool = True
    """True to leave out of the loss all that the template does not mark as the assistant's."""

    has_loss_mask: ClassVar[bool] = True
    is_answered: ClassVar[bool] = True
    # A template that wants a start-of-document token writes it itself.
    adds_bos: ClassVar[bool] = False
    later: ClassVar[frozenset[str]] = frozenset({"role_field", "content_field", "roles"})

    @model_validator(mode="after")
    def _two_fields(self) -> Self:
        if self.messages_field == self.tools_field:
            raise ValueError(f"messages_field and tools_field are both {self.tools_field!r}; name two fields")
        return self

    def fields(self) -> tuple[str, ...]:
        return (self.messages_field,) if self.tools_field is None else (self.messages_field, self.tools_field)

    def identity(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        unused = {"tools_field", *self.later} - self.changed_fields
        return {**self.model_dump(exclude=unused), "chat_template": self._template(tokenizer).source}

    def prepare(self, row: Row) -> PreparedRow:
        value = (row.record or {})[self.messages_field]
        if not isinstance(value, list):
            raise UnusableRow(f"the field {self.messages_field!r} is {kind_of(value)}, not a list of messages")
        wheres = [f"message {i} of {self.messages_field!r}" for i in range(len(value))]
        messages = [_checked(self._named(each), where) for each, where in zip(value, wheres, strict=True)]
        if self.mask_user_turns and not _has_answer(messages):
            raise UnusableRow("the assistant says nothing in this conversation")
        counts = [0, 0]
        conversation = [_cleaned(part, counts) for part in (messages, self._tools(row))]
        return PreparedRow(conversation, counts[0], replaced=bool(counts[1]))

    def _named(self, message: Any) -> Any:
        """Returns a message whose fields and role have the names that templates know."""
        if not {"role_field", "content_field", "roles"} & self.changed_fields or not isinstance(message, dict):
            return message
        names = {self.role_field: "role", self.content_field: "content"}
        message = {names.get(key, key): value for key, value in message.items()}
        roles = self.roles if self.role_field == "role" else {**_SHAREGPT_ROLES, **self.roles}
        role = message.get("role")
        return {**message, "role": roles.get(role, role)} if isinstance(role, str) else message

    def _tools(self, row: Row) -> list[Any] | None:
        tools = None if self.tools_field is None else (row.record or {})[self.tools_field]
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise UnusableRow(
                f"the field {self.tools_field!r} holds something else than a list of tools, each an object"
            )
        return tools

    def encode(self, values: Sequence[Any], tokenizer: Tokenizer) -> list[EncodedDocument | UnusableRow]:
        template = self._template(tokenizer)
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
            in_loss_T = _overlaps(spans, rendered.answers)
            if not in_loss_T.any():
                return UnusableRow("the assistant says nothing in this conversation")
        return EncodedDocument(ids, in_loss_T)

    def _template(self, tokenizer: Tokenizer) -> ChatTemplate:
        assert isinstance(tokenizer, HfTokenizer)
        source = self.chat_template
        if source is None:
            source = tokenizer.chat_template
        # Text with a tag of Jinja in it is a template, any other is a path.
        elif not re.search(r"\{[%{]", source):
            source = _read(source)
        if source is None:
            raise UserError("data.format.chat_template: the tokenizer has no chat template; name one")
        if self.mask_user_turns and not re.search(r"\{%-?\s*generation\s*-?%\}", source):
            raise UserError(
                "data.format.chat_template: the template does not mark what the assistant says; put {% generation %} "
                "before and {% endgeneration %} after it, or set mask_user_turns: false"
            )
        return _compile(source, tuple(tokenizer.named_tokens().items()), tuple(tokenizer.special_tokens()))


def compile_template(tokenizer: HfTokenizer) -> ChatTemplate:
    """Compiles the chat template that came with a tokenizer.

    Raises:
        UserError: if there is none.
    """
    source = tokenizer.chat_template
    if source is None:
        raise UserError("the model's tokenizer has no chat template")
    return _compile(source, tuple(tokenizer.named_tokens().items()), tuple(tokenizer.special_tokens()))


# Compiling takes longer than writing out a conversation, and each batch of rows asks for the template anew.
@lru_cache(maxsize=8)
def _compile(source: str, variables: tuple[tuple[str, str], ...], special: tuple[str, ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(variables), special)


def _read(path: str) -> str:
    try:
        return local_path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.format.chat_template: {path} is no template, and cannot be read: {error}") from None


def _checked(message: Any, where: str) -> dict[str, Any]:
    """Returns the message, its content as one text where it is a list of texts.

    A template would write out the list itself.

    Raises:
        UnusableRow: if it has no role, or a content that is no text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        other = isinstance(message, dict) and {"from", "value"} <= message.keys()
        hint = "; set role_field: from and content_field: value" if other else ""
        raise UnusableRow(f"{where} is no object with a role and a content{hint}")
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if isinstance(content, list):
        return {**message, "content": "".join(_text_of(item, where) for item in content)}
    if content is None:
        kind = "null" if "content" in message else "missing"
        raise UnusableRow(f"the content of {where} is {kind}, which it may only be beside tool_calls")
    raise UnusableRow(f"the content of {where} is {kind_of(content)}, not a string")


def _text_of(item: Any, where: str) -> str:
    if not isinstance(item, dict):
        raise UnusableRow(
            f"the content of {where} is a list with {kind_of(item)} in it; it may hold objects of type text"
        )
    if item.get("type") != "text":
        raise UnusableRow(
            f"the content of {where} is a list with an item of type {item.get('type')!r}; only text is read"
        )
    if not isinstance(text := item.get("text"), str):
        raise UnusableRow(f"the content of {where} is a list with an item whose text is {kind_of(text)}, not a string")
    return text


def _has_answer(messages: list[dict[str, Any]]) -> bool:
    """Tells if the assistant says anything; True where no message has that role, and only the template can tell."""
    said = [message for message in messages if message["role"] == "assistant"]
    return not said or any(message.get(key) for message in said for key in _SAYING)


def _cleaned(value: Any, counts: list[int], levels: int = _LEVELS) -> Any:
    """Copies a value without lone surrogates; adds bytes of text and replacements to `counts`.

    Raises:
        UnusableRow: if it is nested in more than so many levels.
    """
    if isinstance(value, str):
        text = replace_surrogates(value)
        counts[0] += len(text.encode("utf-8"))
        counts[1] += text is not value
        return text
    if not isinstance(value, dict | list):
        return value
    if not levels:
        raise UnusableRow(f"the conversation is nested too deeply, in more than {_LEVELS} levels")
    if isinstance(value, dict):
        return {key: _cleaned(item, counts, levels - 1) for key, item in value.items()}
    return [_cleaned(item, counts, levels - 1) for item in value]


def tokenize_rendered(rendered: Rendered, tokenizer: HfTokenizer) -> tuple[list[int], np.ndarray]:
    """Returns ids, and int [T, 2]: the characters [start, end) of the text that each stands for.

    Special tokens are recognised where the template wrote them, never in the words of a message.
    """
    # Without a name of a special token in any message, all that look special are the template's.
    if not rendered.quoted:
        return tokenizer.encode_template(rendered.text)
    ids: list[int] = []
    spans = [np.zeros((0, 2), np.int64)]
    for start, piece, special in rendered.pieces(tokenizer.special_tokens()):
        if special is not None:
            ids.append(special)
            spans.append(np.array([[start, start + len(piece)]]))
        elif piece:
            more, places = tokenizer.encode_plain(piece)
            ids += more
            spans.append(places + start)
    return ids, np.concatenate(spans)


def _overlaps(spans_T2: np.ndarray, answers: list[tuple[int, int]]) -> np.ndarray:
    """Returns bool [T]: the tokens of which any character is in an answer, as transformers counts them."""
    found_T = np.zeros(len(spans_T2), bool)
    for start, end in answers:
        found_T |= (spans_T2[:, 0] < end) & (spans_T2[:, 1] > start)
    return found_T
