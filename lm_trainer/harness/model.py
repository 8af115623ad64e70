"""Adapter from a decoder to a model of lm-evaluation-harness, with log-likelihoods and generation."""

from __future__ import annotations

import bisect
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.export.huggingface import all_end_ids
from lm_trainer.export.settings import HfSettings
from lm_trainer.generate.engine import generate_stream
from lm_trainer.generate.layout import to_decoding_layout
from lm_trainer.generate.sampling import GenerateSettings
from lm_trainer.generate.score import Context, Score, score
from lm_trainer.harness.chat import TaskTemplate
from lm_trainer.models.generation_fields import describe_unsupported
from lm_trainer.nn.decoder import Decoder

logger = logging.getLogger(__name__)

MAX_GEN_TOKS = 256
"""Default number of new tokens, as in the harness."""

_DEFAULTS = {"top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
"""Defaults of transformers' `generate`, which apply if neither the task nor the model sets them."""
_GENERATED_TOGETHER = 8
_CHUNK = 16
"""Number of new tokens between two checks for the end of an answer."""


class _Query(NamedTuple):
    """A continuation with its context, which is the key of its score."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class HarnessModel(TemplateLM):
    """Adapts a decoder of this package to `lm_eval.api.model.LM`.

    Formats and encodes texts in the same way as `lm_eval`'s model for transformers, so that results are comparable.
    Special tokens in a text are recognised, and the tokenizer adds its own special tokens.

    Args:
        model: the decoder with its parameters.
        tokenizer: tokenizer of the model.
        settings: settings of the published model, which may name additional end tokens.
        dtype: compute dtype.
        max_length: maximum number of tokens that the model reads; None means its context length.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: HfTokenizer,
        *,
        settings: HfSettings | None = None,
        dtype: Any = jnp.float32,
        max_length: int | None = None,
    ):
        super().__init__()
        self._model, self._tokenizer, self._dtype = model, tokenizer, jnp.dtype(dtype)
        self._end_ids = all_end_ids(tokenizer, settings)
        self._generation = settings.generation if settings else {}
        self._generation_note = describe_unsupported(self._generation)
        self._stop_texts = list(settings.stop_texts) if settings else []
        self.max_length = min(max_length or model.spec.num_positions, model.spec.num_positions)

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context, which is the start token or the end of a previous document."""
        named = self._tokenizer.named_tokens().get("bos_token")
        special_tokens = self._tokenizer.special_tokens()
        start = self._tokenizer.eos_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id
        return start if named is None else special_tokens.get(named, start)

    @property
    def tokenizer_name(self) -> str:
        """A unique name of the tokenizer."""
        return str(self._tokenizer.identity()["sha256"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encodes a text in the same way as transformers' tokenizer."""
        del kwargs
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._tokenizer.decode_all([self.prefix_token_id]))
        return self._tokenizer.encode_special(string, add_special_tokens=add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Returns the log probability of each continuation, and True if greedy decoding gives the same continuation."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del kwargs
        # A multiple-choice question makes several requests, but each context is computed only once.
        queries = [self._truncated_query(context, continuation) for _, context, continuation in requests]
        answers: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for query in queries:
            answers.setdefault(query.context, {})[query.continuation] = None
        contexts = [Context(tokens, list(continuations)) for tokens, continuations in answers.items()]
        by_query: dict[_Query, Score] = {}
        for number, scores in score(self._model, contexts, dtype=self._dtype):
            context = contexts[number]
            for continuation, value in zip(context.continuations, scores, strict=True):
                by_query[_Query(tuple(context.tokens), tuple(continuation))] = value
        results = [(by_query[query].log_prob, by_query[query].is_greedy) for query in queries]
        for (key, _, _), result in zip(requests, results, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _truncated_query(self, context: Sequence[int], continuation: Sequence[int]) -> _Query:
        # The last token is predicted but never read. Texts that are too long are truncated at the beginning.
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise UserError(
                f"a task asks for an answer of {len(continuation)} tokens, but the model reads at most "
                f"{self.max_length}; leave the task away, or take a model with a longer context"
            )
        return _Query(tuple(context[-room:]), tuple(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log probabilities of full texts, computed in windows of the model's maximum length."""
        del disable_tqdm
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            text_windows = [(None, *utils.make_disjoint_window(window)) for window in rolling]
            windows += text_windows
            counts.append(len(text_windows))
        scores = iter(self._loglikelihood_tokens(windows))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues each context until one of its stop texts."""
        del disable_tqdm
        if self._generation_note:
            logger.warning("%s", self._generation_note)
        results: list[str] = [""] * len(requests)
        arguments: list[Any] = [request.args for request in requests]
        groups: dict[str, list[int]] = {}
        for index, of_request in enumerate(arguments):
            groups.setdefault(repr(of_request[1]), []).append(index)
        for group in groups.values():
            lengths = {index: len(self.tok_encode(arguments[index][0])) for index in group}
            ordered = sorted(group, key=lambda index: -lengths[index])
            for first in range(0, len(ordered), _GENERATED_TOGETHER):
                batch = ordered[first : first + _GENERATED_TOGETHER]
                texts = self._generate([str(arguments[index][0]) for index in batch], arguments[batch[0]][1])
                for index, text in zip(batch, texts, strict=True):
                    results[index] = text
                    self.cache_hook.add_partial("generate_until", arguments[index], text)
        return results

    def _generate(self, contexts: Sequence[str], gen_kwargs: dict[str, Any]) -> list[str]:
        kwargs: Any = normalize_gen_kwargs(gen_kwargs, MAX_GEN_TOKS)
        until = [*handle_stop_sequences(kwargs.get("until"), eos=self._eos_text()), *self._stop_texts]
        max_new_tokens = self._max_new_tokens(int(kwargs["max_gen_toks"]))
        settings = GenerateSettings(
            max_new_tokens=max_new_tokens,
            temperature=float(kwargs.get("temperature") or 0.0) if kwargs.get("do_sample") else 0.0,
            top_k=int(self._generation_setting("top_k", kwargs)),
            top_p=float(self._generation_setting("top_p", kwargs)),
            repetition_penalty=float(self._generation_setting("repetition_penalty", kwargs)),
            eos_id=self._end_ids,
            dtype=self._dtype,
        )
        prompts = [self.tok_encode(context)[-(self.max_length - max_new_tokens) :] for context in contexts]

        def has_ended(tokens: Sequence[int]) -> bool:
            # Special tokens stay visible, because a stop text may be the name of one.
            text = self._tokenizer.decode_all(tokens)
            return any(term and term in text for term in until)

        # Pads the batch, so that the last batch needs no separate program.
        padded_prompts = prompts + [prompts[-1]] * (_GENERATED_TOGETHER - len(prompts))
        *_, written = generate_stream(
            self._decoding_model, padded_prompts, settings, stop=lambda _, tokens: has_ended(tokens), chunk=_CHUNK
        )
        # Cuts after the token that completes the stop text, as more may have been generated since the last check.
        answers = [row.tokens[: _shortest_true_prefix(has_ended, row.tokens)] for row in written[: len(prompts)]]
        return [
            postprocess_generated_text(self._tokenizer.decode(tokens), stop=until, think_end_token=None)
            for tokens in answers
        ]

    def _generation_setting(self, name: str, kwargs: Mapping[str, Any]) -> Any:
        """Returns a setting of the task, or else of the model, or else of transformers."""
        values = (kwargs.get(name), self._generation.get(name), _DEFAULTS[name])
        return next(value for value in values if value is not None)

    @functools.cached_property
    def _decoding_model(self) -> Decoder:
        return to_decoding_layout(self._model, self._dtype)

    def _max_new_tokens(self, requested: int) -> int:
        """Returns the number of new tokens that fit: half of the context if they leave no room for the question."""
        room = requested if requested < self.max_length else max(self.max_length // 2, 1)
        if room < requested:
            logger.warning(
                "a task asks for up to %d new tokens, but the model reads %d; it writes up to %d",
                *(requested, self.max_length, room),
            )
        return room

    def _eos_text(self) -> str:
        return self._tokenizer.decode_all([self.eot_token_id])

    @functools.cached_property
    def _template(self) -> TaskTemplate:
        return TaskTemplate(self._tokenizer)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Formats a conversation. Without a generation prompt, the last message stays open."""
        return self._template.format_messages(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the source code of the tokenizer's chat template."""
        return self._template.source if chat_template else None


def _shortest_true_prefix(holds: Callable[[Sequence[int]], bool], tokens: Sequence[int]) -> int:
    """Returns the length of the shortest prefix for which `holds`, which must be monotonic, or else the full length."""
    return bisect.bisect_left(range(len(tokens)), True, key=lambda count: holds(tokens[:count]))
