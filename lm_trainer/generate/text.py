"""Text-to-text generation: reads and tokenises prompts, generates continuations and decodes them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lm_trainer.core.errors import UserError
from lm_trainer.generate.sampling import GenerateSettings

if TYPE_CHECKING:
    from lm_trainer.data.tokenizer import Tokenizer
    from lm_trainer.export.huggingface import TextModel
    from lm_trainer.nn.decoder import Decoder

MAX_PROMPT_BYTES = 16 * 2**20
CHUNK = 4
"""Number of new tokens between two checks for stop texts."""


@dataclass(frozen=True, kw_only=True)
class Sampling(GenerateSettings):
    """Settings of `lmt generate`. Error messages contain the option names of the command.

    Raises:
        UserError: if a value is out of its range.
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
    """The continuation, without the prompt."""
    tokens: list[int]
    """Token ids of `text`, without the end-of-document token."""
    finish: Literal["document_end", "stop", "length"]
    """Reason why the continuation ended: a token that ends documents or answers, a stop text, or a length limit."""
    logprobs: list[float] | None = None
    """Log p of each of `tokens` in nats, under the model's unfiltered distribution; None unless requested."""


def read_prompts(texts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Reads the prompts of the command line: first the texts, then the content of each file without its last line
    break.

    Without any prompt, returns one empty prompt, which means the start of a document.

    Raises:
        UserError: for a text or a file that is not UTF-8, and for a file that cannot be read.
    """
    for text in texts:
        # Python turns bytes of an argument that are not UTF-8 into surrogates, which no tokenizer accepts.
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"--prompt {text!r}: not UTF-8 text")
    prompts = [*texts, *(_read_prompt_file(path) for path in files)]
    return prompts or [""]


def _read_prompt_file(path: Path) -> str:
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


@dataclass(frozen=True)
class Prompts:
    """Prompts as token ids."""

    texts: Sequence[str]
    ids: Sequence[list[int]]
    """Token ids of each text."""
    end_ids: tuple[int, ...]
    """Tokens that end a continuation."""


def encode_prompts(source: TextModel, texts: Sequence[str], *, chat: bool = False) -> Prompts:
    """Encodes prompts for a model.

    Args:
        source: the model.
        texts: texts to continue, or to answer.
        chat: True if the texts are messages of the user, which the chat template formats.

    Raises:
        UserError: if a prompt is longer than the model's context, or there is no chat template that takes it.
    """
    end_ids = source.end_ids
    if chat:
        from lm_trainer.generate.questions import Questions

        questions = Questions(source.tokenizer)
        rows, end_ids = [questions.encode_question(text) for text in texts], (*end_ids, *questions.end_ids)
    else:
        rows = [encode_prompt(source.tokenizer, text) for text in texts]
    context = source.config.seq_len
    for text, ids in zip(texts, rows, strict=True):
        if len(ids) > context:
            start = text if len(text) <= 40 else text[:40] + "..."
            raise UserError(
                f"the prompt {start!r} has {len(ids)} tokens, but the model's context is {context}; shorten it"
            )
    return Prompts(texts, rows, end_ids)


def continue_texts(
    source: TextModel,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    num_samples: int = 1,
    stop: Sequence[str] = (),
    devices: Sequence[Any] | None = None,
) -> Iterator[Sample]:
    """Yields `num_samples` continuations of each prompt, in order.

    Args:
        source: the model.
        prompts: texts to continue.
        sampling: end conditions and sampling settings.
        num_samples: number of continuations per prompt.
        stop: texts that end a continuation, in addition to the model's own. They are not included in it.
        devices: as for `TextModel.build`.

    Raises:
        UserError: if `num_samples` is below 1, a text in `stop` is empty, or a prompt is longer than the model's
            context.
    """
    encoded = encode_prompts(source, prompts)
    yield from continue_prompts(source, encoded, sampling, num_samples=num_samples, stop=stop, devices=devices)


def continue_prompts(
    source: TextModel,
    prompts: Prompts,
    sampling: Sampling,
    *,
    num_samples: int = 1,
    stop: Sequence[str] = (),
    devices: Sequence[Any] | None = None,
) -> Iterator[Sample]:
    """Like `continue_texts`, for prompts that `encode_prompts` has encoded for this model."""
    # Imported here because it imports JAX, which some users of this module do not need.
    from lm_trainer.generate.engine import generate_stream
    from lm_trainer.generate.layout import to_decoding_layout

    if num_samples < 1:
        raise UserError(f"--num-samples {num_samples}: must be at least 1")
    _check_stop(stop)
    stop, tokenizer = (*stop, *source.stop_texts), source.tokenizer
    rows = [row for pair in zip(prompts.texts, prompts.ids, strict=True) for row in [pair] * num_samples]
    # All rows together, because a batch takes little longer than one row.
    *_, outputs = generate_stream(
        to_decoding_layout(source.build(devices), sampling.dtype),
        [ids for _, ids in rows],
        replace(sampling, eos_id=prompts.end_ids),
        stop=lambda _, tokens: truncate_at_stop(tokenizer.decode(tokens), stop)[1],
        chunk=CHUNK if stop else sampling.max_new_tokens,
    )
    for (prompt, ids), continuation in zip(rows, outputs, strict=True):
        end = _end_index(continuation.tokens, prompts.end_ids)
        text, tokens, stopped = _decode_continuation(tokenizer, ids, list(continuation.tokens[:end]), stop)
        finish = "stop" if stopped else "length" if end is None else "document_end"
        log_probs = continuation.log_probs[: len(tokens)] if continuation.log_probs else None
        yield Sample(prompt, text, tokens, finish, log_probs)


def stream_text(
    source: TextModel,
    prompts: Prompts,
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    devices: Sequence[Any] | None = None,
) -> Iterator[str]:
    """Yields the continuation of a single prompt piece by piece. Arguments and errors are as for `continue_texts`."""
    from lm_trainer.generate.engine import generate_stream
    from lm_trainer.generate.layout import to_decoding_layout

    _check_stop(stop)
    stop, settings = (*stop, *source.stop_texts), replace(sampling, eos_id=prompts.end_ids)
    model = to_decoding_layout(source.build(devices), settings.dtype)
    (ids,) = prompts.ids
    yield from stream_tokens(generate_stream, model, source.tokenizer, ids, settings, stop=stop)


def stream_tokens(
    generate_stream: Any,
    model: Decoder,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    settings: GenerateSettings,
    *,
    stop: Sequence[str],
) -> Iterator[str]:
    """Yields the text that continues a prompt while it is generated.

    Holds back text that may be the beginning of a stop text or an incomplete character, until later tokens decide.

    Args:
        generate_stream: `lm_trainer.generate.engine.generate_stream`.
        model: the decoder.
        tokenizer: tokenizer of the model.
        ids: token ids of the prompt.
        settings: end conditions and sampling settings.
        stop: texts that end the continuation.
    """
    shown, prompt_text = 0, tokenizer.decode(ids)

    def decode_new(tokens: Sequence[int]) -> tuple[str, bool]:
        end = _end_index(tokens, settings.end_ids)
        full_text = tokenizer.decode([*ids, *tokens[:end]])
        text, stopped = truncate_at_stop(
            full_text[len(prompt_text) :] if full_text.startswith(prompt_text) else tokenizer.decode(tokens[:end]), stop
        )
        return text, stopped or end is not None

    text = ""
    for (row,) in generate_stream(model, [ids], settings, stop=lambda _, tokens: decode_new(tokens)[1], chunk=CHUNK):
        text, ended = decode_new(row.tokens)
        stable = len(text) if ended else _stable_length(text, stop)
        if stable > shown:
            yield text[shown:stable]
            shown = stable
    if len(text) > shown:
        yield text[shown:]


def truncate_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Truncates a text before the first stop text in it. The second result is True if there was a stop text."""
    positions = [position for stop_text in stop if (position := text.find(stop_text)) >= 0]
    return (text[: min(positions)], True) if positions else (text, False)


def _stable_length(text: str, stop: Sequence[str]) -> int:
    """Returns the length of the prefix that later tokens cannot change or turn into a part of a stop text."""
    stable = len(text.rstrip("\ufffd"))
    for stop_text in stop:
        for size in range(min(len(stop_text) - 1, stable), 0, -1):
            if text[:stable].endswith(stop_text[:size]):
                stable -= size
                break
    return stable


def _check_stop(stop: Sequence[str]) -> None:
    if "" in stop:
        raise UserError("--stop '': an empty text would end everything; leave it away")


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Encodes a prompt like the start of a document in training: it begins with the start token, if the tokenizer has
    one. Otherwise an empty prompt becomes the end token of the previous document.
    """
    ids = tokenizer.encode(prompt)
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.eos_id]


def _end_index(tokens: Sequence[int], end_ids: Collection[int]) -> int | None:
    """Returns the index of the token that ends a continuation; None if there is none."""
    return next((index for index, token in enumerate(tokens) if token in end_ids), None)


def _decode_continuation(
    tokenizer: Tokenizer, ids: Sequence[int], tokens: list[int], stop: Sequence[str]
) -> tuple[str, list[int], bool]:
    """Returns the text of a continuation before a stop text, its tokens, and True if there was a stop text.

    Args:
        tokenizer: tokenizer of the model.
        ids: token ids of the prompt.
        tokens: token ids of the continuation.
        stop: texts that end it.
    """
    # Decoded together, because a character or a space may be split between the last prompt token and the first new
    # token.
    prompt_text, full_text = tokenizer.decode(ids), tokenizer.decode([*ids, *tokens])
    text, stopped = truncate_at_stop(
        full_text[len(prompt_text) :] if full_text.startswith(prompt_text) else tokenizer.decode(tokens), stop
    )
    if stopped:
        # The shortest sequence of tokens that contains the stop text.
        tokens = tokens[
            : next(n for n in range(len(tokens) + 1) if truncate_at_stop(tokenizer.decode(tokens[:n]), stop)[1])
        ]
    return text, tokens, stopped
