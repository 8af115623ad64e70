"""Chat templates: Jinja, run in a sandbox with the names that templates of the Hugging Face ecosystem expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.data.formats.base import UnusableRow

_OPEN, _CLOSE, _QUOTE = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters of Unicode: they mark places in a text while it is being written out, and belong to no text."""
# After a _QUOTE, a character of the private use area stands for a special token by its number.
_FIRST = 0xE000


@dataclass(frozen=True)
class Rendered:
    """A conversation written out."""

    text: str
    answers: list[tuple[int, int]]
    """The characters [start, end) that the template marks as the assistant's."""
    quoted: list[tuple[int, int]]
    """The characters [start, end) where a message has the name of a special token in its own words."""

    def pieces(self, special: Mapping[str, int]) -> Iterator[tuple[int, str, int | None]]:
        """Splits the text at the special tokens of the template: (start, piece, id of a special token or None)."""
        # Longer names first, since one may begin with another.
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
        source: Jinja, with `{% generation %}` around the assistant's words.
        variables: names that the template may use, such as `bos_token`.
        special: the special tokens of the tokenizer.

    Raises:
        UserError: if it is no template.
    """

    def __init__(self, source: str, variables: Mapping[str, str], special: Sequence[str]):
        jinja2 = jinja()
        self.source, self._variables = source, dict(variables)
        self._special = sorted(special, key=len, reverse=True)
        try:
            # A template that asks for today's date would give other tokens tomorrow.
            now = datetime(2000, 1, 1)
            environment = template_environment(now=lambda: now, answer=(_OPEN, _CLOSE), finalize=_refuse_null)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"data.format.chat_template: the template is wrong: {error}") from None

    def render(
        self, messages: list[Any], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> Rendered:
        """Writes messages out, and the tools that they may call; perhaps with the beginning of an answer.

        Raises:
            UnusableRow: if the template refuses them.
        """
        try:
            text = self._template.render(
                messages=self._quote(messages),
                tools=self._quote(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except UnusableRow:
            raise
        except Exception as error:  # a template is a program, and may fail in any way
            reason = str(error) or type(error).__name__
            raise UnusableRow(f"the chat template does not take this conversation: {reason}") from None
        return self._resolve(text)

    def _quote(self, value: Any) -> Any:
        """Hides special tokens in the words of messages, so that they can be told from the template's."""
        if isinstance(value, dict):
            return {key: self._quote(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._quote(item) for item in value]
        if not isinstance(value, str):
            return value
        if any(mark in value for mark in (_OPEN, _CLOSE, _QUOTE)):
            raise UnusableRow("a message holds a noncharacter of Unicode (U+FDD0 to U+FDD2)")
        # Longer names first, as they are sorted: one name may be a part of another.
        for index, name in enumerate(self._special):
            value = value.replace(name, f"{_QUOTE}{chr(_FIRST + index)}")
        return value

    def _resolve(self, text: str) -> Rendered:
        """Takes the marks out of a text and notes where they were."""
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


def jinja() -> Any:
    """The package jinja2, imported when a template is used."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    return jinja2


def template_environment(
    *,
    now: Callable[[], datetime],
    answer: tuple[str, str] = ("", ""),
    finalize: Callable[[Any], Any] | None = None,
) -> Any:
    """Makes a sandbox in which chat templates run as in transformers.

    Args:
        now: the time that `strftime_now` tells.
        answer: written before and after what `{% generation %}` marks as the assistant's.
        finalize: of Jinja: changes each value before it is written out.
    """
    jinja2 = jinja()

    class Generation(jinja2.ext.Extension):
        """`{% generation %} ... {% endgeneration %}`: writes `answer` around the text between."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return answer[0] + caller() + answer[1]

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # Jinja's own filter escapes letters for HTML, which would then be tokens.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    # Blanks are trimmed as transformers does it, for which templates are written.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, finalize=finalize, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: now().strftime(format)
    return environment


def _refuse_null(value: Any) -> Any:
    # Jinja would write `None`, and the model would learn to say it.
    if value is None:
        raise jinja().TemplateError("it would write out a null as the word None")
    return value
