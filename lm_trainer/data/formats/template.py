"""Runs chat templates: Jinja in a sandbox, with the functions that Hugging Face templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lm_trainer.core.errors import UserError
from lm_trainer.data.formats.base import UnusableRow

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_OPEN, _CLOSE, _QUOTE = "\ufdd0", "\ufdd1", "\ufdd2"
"""Unicode noncharacters, which no text contains. They mark positions in a text while it is rendered."""
# After _QUOTE, a character of the private use area encodes the index of a special token.
_FIRST = 0xE000
_ADDRESS = re.compile(r"<[^<>\n]* at 0x[0-9a-f]{6,}>")
"""Matches the text that Python gives to functions, generators and most other objects."""


@dataclass(frozen=True)
class Rendered:
    """A rendered conversation."""

    text: str
    answers: list[tuple[int, int]]
    """Characters [start, end) that the template marks as the assistant's."""
    quoted: list[tuple[int, int]]
    """Characters [start, end) at which the text of a message contains the name of a special token."""

    def split_at_special_tokens(self, special: Mapping[str, int]) -> Iterator[tuple[int, str, int | None]]:
        """Splits the text at the template's special tokens. Yields (start, piece, id of a special token or None)."""
        # Longer names come first, since a name may be a prefix of another.
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
        done = 0
        for match in re.finditer(names, self.text):
            if any(start < match.end() and match.start() < end for start, end in self.quoted):
                continue
            yield done, self.text[done : match.start()], None
            yield match.start(), match[0], special[match[0]]
            done = match.end()
        yield done, self.text[done:], None


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source, with `{% generation %}` around the assistant's words.
        variables: variables for the template, such as `bos_token`.
        special: the special tokens of the tokenizer.

    Raises:
        UserError: if the source is not a valid template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], special: Sequence[str]):
        jinja2 = import_jinja()
        self.source, self._variables = source, dict(variables)
        self._special = sorted(special, key=len, reverse=True)
        try:
            # A fixed date, since otherwise a template that writes the date would give different tokens every day.
            date = datetime(2000, 1, 1)
            environment = template_environment(now=lambda: date, answer=(_OPEN, _CLOSE), finalize=_refuse_null)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"data.format.chat_template: the template is wrong: {error}") from None

    def render(
        self,
        messages: Sequence[object],
        tools: Sequence[object] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Renders messages and their tools, optionally followed by the start of the next answer.

        Raises:
            UnusableRow: if the template rejects the conversation.
        """
        try:
            text = self._template.render(
                messages=self._mark_special_tokens(messages),
                tools=self._mark_special_tokens(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
            refuse_addresses(text, (messages, tools))
        except UnusableRow:
            raise
        except Exception as error:  # a template is a program and may raise anything
            reason = str(error) or type(error).__name__
            raise UnusableRow(f"the chat template does not take this conversation: {reason}") from None
        return self._remove_markers(text)

    def _mark_special_tokens(self, value: object) -> object:
        """Replaces special tokens in messages by markers, to distinguish them from the template's special tokens."""
        if isinstance(value, dict):
            return {key: self._mark_special_tokens(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._mark_special_tokens(item) for item in value]
        if not isinstance(value, str):
            return value
        if any(mark in value for mark in (_OPEN, _CLOSE, _QUOTE)):
            raise UnusableRow("a message holds a noncharacter of Unicode (U+FDD0 to U+FDD2)")
        # The names are sorted by length, longest first, since a name may be part of another.
        for index, name in enumerate(self._special):
            value = value.replace(name, f"{_QUOTE}{chr(_FIRST + index)}")
        return value

    def _remove_markers(self, text: str) -> Rendered:
        """Removes the markers from a text and records their positions."""
        out: list[str] = []
        length, start = 0, 0
        answers: list[tuple[int, int]] = []
        quoted: list[tuple[int, int]] = []
        pieces = re.split(f"({_OPEN}|{_CLOSE}|{_QUOTE}.)", text)
        for piece in pieces:
            if piece == _OPEN:
                start = length
                continue
            if piece == _CLOSE:
                answers.append((start, length))
                continue
            shown = piece
            if piece.startswith(_QUOTE):
                shown = self._special[ord(piece[1]) - _FIRST]
                quoted.append((length, length + len(shown)))
            out.append(shown)
            length += len(shown)
        return Rendered("".join(out), answers, quoted)


def import_jinja() -> ModuleType:
    """Returns the package jinja2, which is imported only when a template is used."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    return jinja2


def template_environment(
    *,
    now: Callable[[], datetime],
    answer: tuple[str, str] = ("", ""),
    finalize: Callable[[object], object] | None = None,
) -> ImmutableSandboxedEnvironment:
    """Makes a sandbox that runs chat templates in the same way as transformers.

    Args:
        now: returns the time for `strftime_now`.
        answer: text to insert before and after every `{% generation %}` block.
        finalize: an option of Jinja, which transforms every value before it is rendered.
    """
    jinja2 = import_jinja()

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %} ... {% endgeneration %}`, which surrounds the enclosed text with `answer`."""

        tags = frozenset({"generation"})

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return answer[0] + caller() + answer[1]

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def refuse_chance(*_: object, **__: object) -> None:
        raise jinja2.TemplateError("it draws by chance, by `random` or `lipsum`, so one text would differ each time")

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # Jinja's built-in filter escapes characters for HTML, and the escapes would become tokens.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    # Trims blanks in the same way as transformers, for which templates are written.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, finalize=finalize, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    # Chance would give one conversation other tokens each time.
    environment.filters["random"] = environment.globals["lipsum"] = refuse_chance
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


def refuse_addresses(text: str, messages: object) -> None:
    """Raises Jinja's TemplateError if a rendered text has the address of an object, which differs in each process.

    Args:
        text: the rendered text.
        messages: everything that the template was given, in which such a text may occur.
    """
    for match in _ADDRESS.findall(text):
        if not any(match in part for part in _texts(messages)):
            name = match.partition(" at 0x")[0].removeprefix("<")
            raise import_jinja().TemplateError(
                f"it writes out the address of an object in memory ({name}); a call lacks its brackets, or `| join` is "
                f"missing"
            )


def _texts(value: object) -> Iterator[str]:
    """Yields every text in nested containers."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _refuse_null(value: object) -> object:
    # Jinja would render `None`, and the model would learn to write it.
    if value is None:
        raise import_jinja().TemplateError("it would write out a null as the word None")
    return value
