"""Generation from text to text: reads and tokenises prompts, generates continuations and decodes them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.generate.sampling import GenerateSettings

if TYPE_CHECKING:
    from lm_trainer.data.tokenizer import Tokenizer
    from lm_trainer.export.huggingface import TextModel

MAX_PROMPT_BYTES = 16 * 2**20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True, kw_only=True)
class Sampling(GenerateSettings):
    """Settings of `lmt generate`, whose names the messages have.

    Raises:
        UserError: when a value is out of its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8

    def __post_init__(self) -> None:
        rules = [
            ("max-new-tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (the likeliest token) or more"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1 (all tokens)"),
            ("seed", self.seed, 0 <= self.seed < 2**32, "from 0 to 4294967295"),
        ]
        for name, value, ok, expected in rules:
            if not ok:
                raise UserError(f"--{name} {value}: must be {expected}")


@dataclass(frozen=True)
class Sample:
    """One continuation of one prompt."""

    prompt: str
    text: str
    """The continuation alone."""
    tokens: list[int]
    """The ids behind `text`, without the end of the document."""
    finish: Literal["document_end", "length"]
    """The end: of the document by the model, or by a limit of length."""


def read_prompts(texts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Reads the prompts of the command line: texts first, then each file without its last line break.

    No prompt at all is one empty prompt, the start of a document.

    Raises:
        UserError: for a text or a file that is not UTF-8, and for a file that cannot be read.
    """
    for text in texts:
        # Bytes of an argument that are no UTF-8 come as surrogates, which no tokenizer takes.
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"--prompt {text!r}: not UTF-8 text")
    prompts = [*texts, *(_read(path) for path in files)]
    return prompts or [""]


def _read(path: Path) -> str:
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise UserError(f"--prompt-file {path}: cannot be read ({error.strerror})") from None
    if len(data) > MAX_PROMPT_BYTES:
        raise UserError(f"--prompt-file {path}: more than {MAX_PROMPT_BYTES} bytes are no prompt")
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt-file {path}: not UTF-8 at byte {error.start}") from None


def continue_texts(
    source: TextModel,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    num_samples: int = 1,
    devices: Sequence[Any] | None = None,
) -> Iterator[Sample]:
    """Yields `num_samples` continuations of each prompt, in order, with `devices` as for `TextModel.build`.

    Raises:
        UserError: when `num_samples` is below 1, or a prompt is longer than the model's context.
    """
    # Imports JAX, which other commands that print text do not need.
    from lm_trainer.generate.engine import generate

    if num_samples < 1:
        raise UserError(f"--num-samples {num_samples}: must be at least 1")
    tokenizer, context = source.tokenizer, source.config.seq_len
    rows = []
    for prompt in prompts:
        ids = _encode(tokenizer, prompt)
        if len(ids) > context:
            start = prompt if len(prompt) <= 40 else prompt[:40] + "..."
            raise UserError(
                f"the prompt {start!r} has {len(ids)} tokens, but the model's context is {context}; shorten it"
            )
        rows += [(prompt, ids)] * num_samples
    # All rows together: a batch takes little longer than one row.
    outputs = generate(source.build(devices), [ids for _, ids in rows], replace(sampling, eos_id=tokenizer.eos_id))
    for (prompt, ids), new in zip(rows, outputs, strict=True):
        yield _sample(tokenizer, prompt, ids, new)


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt as token ids, as training has seen the start of a document: behind its start token, if there is one,
    else, for an empty prompt, behind the end of the document before it.
    """
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.eos_id]


def _sample(tokenizer: Tokenizer, prompt: str, ids: Sequence[int], new: Sequence[int]) -> Sample:
    ended = tokenizer.eos_id in new
    tokens = list(new[: new.index(tokenizer.eos_id)] if ended else new)
    # Decoded together: a character or a space may be spread over the last token before and the first one after.
    before, whole = tokenizer.decode(ids), tokenizer.decode([*ids, *tokens])
    text = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(tokens)
    return Sample(prompt, text, tokens, "document_end" if ended else "length")


def for_terminal(text: str) -> str:
    """Replaces each control character of a text, because a model may write commands that terminals obey."""
    return _CONTROL.sub("\ufffd", text)
