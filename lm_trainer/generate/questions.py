"""Questions to a model, formatted with the chat template of its tokenizer like the rows of its training."""

from __future__ import annotations

from collections.abc import Sequence

from lm_trainer.core.errors import UserError
from lm_trainer.data.formats.base import UnusableRow
from lm_trainer.data.formats.chat import compile_template, tokenize_rendered
from lm_trainer.data.tokenizer import HfTokenizer

Message = dict[str, str]
"""Message with the keys `role` and `content`."""

_ANSWER = "an answer"


class Questions:
    """Formats conversations that end with a message to answer.

    The tokens are those at the beginning of a training row with the same conversation, and of `apply_chat_template` in
    transformers: a beginning-of-text token is only added by the template.

    Args:
        tokenizer: must have a chat template.
        system: instructions at the beginning of every conversation (system prompt).

    Raises:
        UserError: if there is no chat template, or the template rejects the instructions.
    """

    def __init__(self, tokenizer: HfTokenizer, system: str | None = None):
        self._tokenizer, self._template = tokenizer, compile_template(tokenizer)
        self.start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        """The messages before the first question."""
        self.end_ids = self._find_end_ids()
        """The special token that the template writes after an answer, if any. Some models end a turn with a different
        token than a document."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of a conversation, up to the place where the answer begins.

        Raises:
            UserError: if the template rejects the messages, or writes nothing.
        """
        try:
            rendered = self._template.render(list(messages), add_generation_prompt=True)
        except UnusableRow as error:
            raise UserError(str(error)) from None
        ids = tokenize_rendered(rendered, self._tokenizer)[0]
        if not ids:
            raise UserError("the chat template writes nothing of the conversation; correct it in the tokenizer")
        return ids

    def encode_question(self, text: str) -> list[int]:
        """Returns the token ids of a conversation with one message of the user. Raises like `encode`."""
        return self.encode([*self.start, {"role": "user", "content": text}])

    def _find_end_ids(self) -> tuple[int, ...]:
        messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self._template.render([*self.start, *messages]).text
        except UnusableRow as error:
            raise UserError(str(error)) from None
        suffix = text.rpartition(_ANSWER)[2].lstrip()
        special = self._tokenizer.special_tokens()
        end_tokens = [name for name in special if name and suffix.startswith(name)]
        return (special[max(end_tokens, key=len)],) if end_tokens else ()
