"""Conversation with a model by the chat template of its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lm_trainer.core.errors import UserError
from lm_trainer.data.formats.base import UnusableRow
from lm_trainer.data.formats.chat import compile_template, tokenize_rendered
from lm_trainer.generate.engine import generate_stream
from lm_trainer.generate.layout import for_decoding
from lm_trainer.generate.text import Sampling, stream_tokens

if TYPE_CHECKING:
    from lm_trainer.data.tokenizer import HfTokenizer
    from lm_trainer.nn.decoder import Decoder

Message = dict[str, str]
"""`role` and `content`."""

_MARK = "an answer"


class Chat:
    """A conversation.

    Args:
        model: writes the answers.
        tokenizer: has a chat template.
        context: tokens that the model reads at most.
        sampling: the choice of tokens, and those that end an answer beside that of the template.
        system: instructions at the beginning.

    Raises:
        UserError: if there is no chat template, or it does not take the instructions.
    """

    def __init__(
        self, model: Decoder, tokenizer: HfTokenizer, *, context: int, sampling: Sampling, system: str | None = None
    ):
        self._model, self._tokenizer, self._context = for_decoding(model, sampling.dtype), tokenizer, context
        self._template = compile_template(tokenizer)
        self._start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._start)
        self._sampling = replace(sampling, eos_id=(*sampling.end_ids, tokenizer.eos_id, *self._ends_of_turns()))

    def reset(self) -> None:
        """Begins anew, with the same instructions."""
        self.messages = list(self._start)

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to what the user says, piece by piece; both are then a part of the conversation.

        Raises:
            UserError: if the conversation does not fit into the model's context any more; it is as before then.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._ids(messages)
        if len(ids) >= self._context:
            raise UserError(
                f"the conversation has {len(ids)} tokens, but the model reads {self._context}; begin anew with /reset"
            )
        said: list[str] = []
        pieces = stream_tokens(generate_stream, self._model, self._tokenizer, ids, self._sampling, stop=())
        try:
            for piece in pieces:
                said.append(piece)
                yield piece
        finally:
            # An answer that is broken off is what the model has said.
            self.messages = [*messages, {"role": "assistant", "content": "".join(said)}]

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        try:
            rendered = self._template.render(list(messages), add_generation_prompt=True)
        except UnusableRow as error:
            raise UserError(str(error)) from None
        ids = tokenize_rendered(rendered, self._tokenizer)[0]
        bos = self._tokenizer.bos_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _ends_of_turns(self) -> list[int]:
        """The special token that the template writes behind an answer, if it does: some models end turns by another
        one than documents.
        """
        messages: list[Any] = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self._template.render([*self._start, *messages]).text
        except UnusableRow as error:
            raise UserError(str(error)) from None
        after = text.rpartition(_MARK)[2].lstrip()
        special = self._tokenizer.special_tokens()
        found = [name for name in special if name and after.startswith(name)]
        return [special[max(found, key=len)]] if found else []
