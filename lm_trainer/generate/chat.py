"""Conversation with a model, using the chat template of its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lm_trainer.core.errors import UserError
from lm_trainer.data.formats.base import UnusableRow
from lm_trainer.data.formats.chat import compile_template, tokenize_rendered
from lm_trainer.generate.engine import generate_stream
from lm_trainer.generate.layout import to_decoding_layout
from lm_trainer.generate.text import Sampling, stream_tokens

if TYPE_CHECKING:
    from lm_trainer.data.tokenizer import HfTokenizer
    from lm_trainer.nn.decoder import Decoder

Message = dict[str, str]
"""Message with the keys `role` and `content`."""

_MARK = "an answer"


class Chat:
    """A conversation.

    Args:
        model: generates the answers.
        tokenizer: must have a chat template.
        context: maximum context length of the model, in tokens.
        sampling: sampling settings. Their end tokens end an answer in addition to the end token of the template.
        system: instructions at the beginning of the conversation (system prompt).
        stop: texts that end an answer. They are not included in it.

    Raises:
        UserError: if there is no chat template, or the template rejects the instructions.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: HfTokenizer,
        *,
        context: int,
        sampling: Sampling,
        system: str | None = None,
        stop: Sequence[str] = (),
    ):
        self._model, self._tokenizer, self._context = to_decoding_layout(model, sampling.dtype), tokenizer, context
        self._template = compile_template(tokenizer)
        self._start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages, self._stop = list(self._start), tuple(stop)
        self._sampling = replace(sampling, eos_id=(*sampling.end_ids, tokenizer.eos_id, *self._turn_end_ids()))

    def reset(self) -> None:
        """Starts a new conversation with the same instructions."""
        self.messages = list(self._start)

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to the user's message piece by piece, and adds message and answer to the conversation.

        Raises:
            UserError: if the conversation no longer fits into the model's context. The conversation is then unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._encode_messages(messages)
        if len(ids) >= self._context:
            raise UserError(
                f"the conversation has {len(ids)} tokens, but the model reads {self._context}; begin anew with /reset"
            )
        answer_pieces: list[str] = []
        pieces = stream_tokens(generate_stream, self._model, self._tokenizer, ids, self._sampling, stop=self._stop)
        try:
            for piece in pieces:
                answer_pieces.append(piece)
                yield piece
        finally:
            # If an answer is interrupted, the part that was generated is stored.
            self.messages = [*messages, {"role": "assistant", "content": "".join(answer_pieces)}]

    def _encode_messages(self, messages: Sequence[Message]) -> list[int]:
        try:
            rendered = self._template.render(list(messages), add_generation_prompt=True)
        except UnusableRow as error:
            raise UserError(str(error)) from None
        ids = tokenize_rendered(rendered, self._tokenizer)[0]
        bos = self._tokenizer.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _turn_end_ids(self) -> list[int]:
        """Returns the special token that the template writes after an answer, if any. Some models end a turn with a
        different token than a document.
        """
        messages: list[Any] = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self._template.render([*self._start, *messages]).text
        except UnusableRow as error:
            raise UserError(str(error)) from None
        suffix = text.rpartition(_MARK)[2].lstrip()
        special = self._tokenizer.special_tokens()
        end_tokens = [name for name in special if name and suffix.startswith(name)]
        return [special[max(end_tokens, key=len)]] if end_tokens else []
