"""Conversation with a model, using the chat template of its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lm_trainer.core.errors import UserError
from lm_trainer.generate.engine import generate_stream
from lm_trainer.generate.layout import to_decoding_layout
from lm_trainer.generate.questions import Questions
from lm_trainer.generate.text import Sampling, stream_tokens

if TYPE_CHECKING:
    from lm_trainer.data.tokenizer import HfTokenizer
    from lm_trainer.nn.decoder import Decoder


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
        self._questions = Questions(tokenizer, system)
        self.messages, self._stop = list(self._questions.start), tuple(stop)
        self._sampling = replace(sampling, eos_id=(*sampling.end_ids, tokenizer.eos_id, *self._questions.end_ids))

    def reset(self) -> None:
        """Starts a new conversation with the same instructions."""
        self.messages = list(self._questions.start)

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to the user's message piece by piece, and adds message and answer to the conversation.

        Raises:
            UserError: if the conversation no longer fits into the model's context. The conversation is then unchanged.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._questions.encode(messages)
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
