"""Formats chats. The result is byte-identical to lm-evaluation-harness with transformers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from datetime import datetime

from lm_trainer.core.errors import UserError
from lm_trainer.data.formats.template import import_jinja, refuse_addresses, template_environment
from lm_trainer.data.tokenizer import HfTokenizer

logger = logging.getLogger(__name__)

_MARK = "\ufdd3 "
"""Marks the end of a message to continue, with a Unicode noncharacter and a space that some templates trim."""


class TaskTemplate:
    """The chat template of a tokenizer, for formatting the questions of tasks.

    Raises:
        UserError: if the tokenizer has no template or an invalid template.
    """

    def __init__(self, tokenizer: HfTokenizer):
        if tokenizer.chat_template is None:
            raise UserError("the model's tokenizer has no chat template")
        self.source, self._variables = tokenizer.chat_template, tokenizer.named_tokens()
        # Templates may insert the current date, as in transformers.
        environment = template_environment(now=datetime.now)
        try:
            self._template = environment.from_string(self.source)
        except import_jinja().TemplateError as error:
            raise UserError(f"the chat template of the model's tokenizer is wrong: {error}") from None

    def format_messages(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """Formats messages, ending with the start of an answer or with the open end of the last message.

        If the template rejects the messages, they are formatted without the system messages.

        Raises:
            UserError: if the template also rejects these, or drops the message to continue.
        """
        errors = import_jinja()
        try:
            return self._format_messages(messages, add_generation_prompt=add_generation_prompt)
        except errors.TemplateError as error:
            without_system = [message for message in messages if message["role"] != "system"]
            _warn_once(str(error))
        try:
            return self._format_messages(without_system, add_generation_prompt=add_generation_prompt)
        except errors.TemplateError as error:
            raise UserError(f"the chat template does not take a question: {error}") from None

    def _format_messages(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        if add_generation_prompt:
            return self._render(messages, add_generation_prompt=True)
        *history, last = messages
        text = self._render([*history, {**last, "content": last["content"] + _MARK}], add_generation_prompt=False)
        start, mark, tail = text.rpartition(_MARK.strip())
        if not mark or last["content"].strip() not in text:
            raise UserError(
                f"the chat template leaves the beginning of an answer away, which a task gives: {last['content']!r}"
            )
        # A template that trims content has trimmed the space of the mark, and would also trim spaces before it.
        return start if tail.startswith(_MARK[-1]) else start.rstrip()

    def _render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
            refuse_addresses(text, messages)
            return text
        except import_jinja().TemplateError:
            raise
        except Exception as error:  # a template is a program, and may raise anything
            raise UserError(f"the chat template fails at a question: {error}") from None


# Cached, because every question may be rejected, and each reason deserves only one warning.
@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("the chat template refuses a question (%s); it is asked without the system's message", reason)
