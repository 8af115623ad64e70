"""Rules of a speech model for transcripts: initial tokens, forbidden tokens and timestamps.

Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from lm_trainer.core.errors import UserError

_NEVER = -jnp.inf


@dataclass(frozen=True, kw_only=True)
class SpeechRules:
    """Special tokens of a speech model, as named in its `generation_config.json`."""

    start_id: int
    """Token at the beginning of every text."""
    eos_id: int
    """Token at the end of every text."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never generated."""
    begin_suppressed: tuple[int, ...] = ()
    """Tokens that are never generated as the first token."""
    languages: Mapping[str, int] = field(default_factory=dict)
    """Token of each language by its name, such as `<|en|>`; empty for a monolingual model."""
    tasks: Mapping[str, int] = field(default_factory=dict)
    """Token of each task by its name: `transcribe` or `translate`."""
    language: str | None = None
    """Default language; None: the language is detected."""
    task: str | None = None
    """Default task."""
    forced: tuple[int | None, ...] = ()
    """Tokens after the first token, from files written before `language` and `task` existed; None: detected
    language."""
    no_timestamps_id: int | None = None
    """Token that disables timestamps; None: no timestamps. The timestamp tokens, one per 0.02 s, have the ids after
    it."""
    max_initial_timestamp: int | None = None
    """Maximum of the first timestamp of a text, in steps of 0.02 s."""
    length_penalty: float = 1.0
    """Exponent of the length penalty: beam search divides a text's log-probability by its length to this power."""

    early_stopping: bool | str = False
    """End condition of beam search. False: ends when no text can improve. Other values are refused."""

    @property
    def has_timestamps(self) -> bool:
        """True if the model can generate timestamps."""
        return self.no_timestamps_id is not None

    @property
    def first_stamp(self) -> int | None:
        """The token of 0 s; None for a model without timestamps."""
        return None if self.no_timestamps_id is None else self.no_timestamps_id + 1

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], *, start_id: int | None, eos_id: int | None) -> Self:
        """Reads the rules from the content of a generation_config.json.

        Args:
            raw: content of the file; may be empty, or contain keys that are not rules.
            start_id: start token of the model, used if the file has no start token.
            eos_id: end token of the tokenizer, used if the file has no end token.

        Raises:
            UserError: if there is no start or end token, or forced tokens do not directly follow the first token.
        """
        start, end = raw.get("decoder_start_token_id", start_id), raw.get("eos_token_id", eos_id)
        # Some files contain a list with one token.
        end = end[0] if isinstance(end, list) and len(end) == 1 else end
        for name, value in (("decoder_start_token_id", start), ("eos_token_id", end)):
            if not isinstance(value, int):
                raise UserError(f"model.generation_config: {name} is {value!r}; write the id of that token")
        penalty = raw.get("length_penalty")
        forced = raw.get("forced_decoder_ids") or []
        if [position for position, _ in forced] != list(range(1, len(forced) + 1)):
            raise UserError(
                f"model.generation_config.forced_decoder_ids: {forced} does not give the tokens at 1, 2, ... in order"
            )
        return cls(
            start_id=start,  # pyright: ignore[reportArgumentType]
            eos_id=end,  # pyright: ignore[reportArgumentType]
            suppressed=tuple(raw.get("suppress_tokens") or ()),
            begin_suppressed=tuple(raw.get("begin_suppress_tokens") or ()),
            languages=raw.get("lang_to_id") or {},
            tasks=raw.get("task_to_id") or {},
            language=raw.get("language"),
            task=raw.get("task"),
            forced=tuple(token for _, token in forced),
            no_timestamps_id=raw.get("no_timestamps_token_id"),
            max_initial_timestamp=raw.get("max_initial_timestamp_index"),
            length_penalty=1.0 if penalty is None else penalty,
            early_stopping=raw.get("early_stopping") or False,
        )

    def check_beams(self, beams: int) -> None:
        """Raises `UserError` if results with more than one beam would differ from transformers."""
        if beams > 1 and self.early_stopping:
            raise UserError(
                f"generation_config.early_stopping is {self.early_stopping!r}, by which no beam search ends here; "
                "write false"
            )

    def language_id(self, language: str) -> int:
        """Returns the token of a language, given as `en` or `<|en|>`.

        Raises:
            UserError: for an unsupported language.
        """
        name = language.lower() if language.startswith("<|") else f"<|{language.lower()}|>"
        if name not in self.languages:
            names = ", ".join(sorted(key.strip("<|>") for key in self.languages)) or "none, it has no such tokens"
            raise UserError(f"language {language!r} is unknown to the model; it knows: {names}")
        return self.languages[name]

    def prompt_tokens(self, language: str | None, task: str | None, *, timestamps: bool) -> list[int | None]:
        """Returns the tokens at the beginning of a text, as in transformers. None represents the detected language.

        Raises:
            UserError: for an unsupported language or task, or timestamps for a model without them.
        """
        language, task = language or self.language, task or self.task
        tokens: list[int | None] = [self.start_id]
        if language is None and task is None:
            tokens += self.forced
        if language is not None:
            tokens.append(self.language_id(language))
        elif self.languages and len(tokens) == 1:
            tokens.append(None)
        if task is not None:
            if task not in self.tasks:
                raise UserError(f"task {task!r} is unknown to the model; it knows: {', '.join(self.tasks) or 'none'}")
            tokens.append(self.tasks[task])
        elif language is not None and "transcribe" in self.tasks:
            tokens.append(self.tasks["transcribe"])
        if timestamps and self.no_timestamps_id is None:
            raise UserError("the model has no timestamps: its generation_config names no no_timestamps_token_id")
        if self.no_timestamps_id is not None and not timestamps and tokens[-1] != self.no_timestamps_id:
            tokens.append(self.no_timestamps_id)
        if timestamps and tokens[-1] == self.no_timestamps_id:
            tokens.pop()
        return tokens


class TimestampState(NamedTuple):
    """State of the timestamp rules after the tokens so far; int32 [B] each."""

    last_B: jax.Array
    """The last token; -1 if there is none."""
    before_last_B: jax.Array
    stamp_B: jax.Array
    """The last timestamp token; -1 if there is none."""

    @classmethod
    def start(cls, rows: int) -> Self:
        """Returns the state before the first token."""
        none_B = jnp.full(rows, -1, jnp.int32)
        return cls(none_B, none_B, none_B)

    def advance(self, token_B: jax.Array, first_stamp: jax.Array) -> TimestampState:
        """Returns the state after one more token."""
        return TimestampState(token_B, self.last_B, jnp.where(token_B >= first_stamp, token_B, self.stamp_B))


def mask_by_timestamp_rules(
    logits_BV: jax.Array, state: TimestampState, eos_id: jax.Array, first_stamp: jax.Array, latest_first: jax.Array
) -> jax.Array:
    """Sets logits of tokens that the timestamp rules forbid to -inf (Radford et al. 2022, section 4.5).

    Timestamps come in pairs, and never decrease. The first token is a timestamp. If all timestamps together are more
    likely than any single word token, a timestamp is generated.

    Args:
        logits_BV: float32.
        state: state after the tokens so far.
        eos_id: int32 scalar.
        first_stamp: the token of 0 s, int32 scalar. The token before it is the one that disables timestamps.
        latest_first: the latest first timestamp token, int32 scalar.
    """
    ids_1V = jnp.arange(logits_BV.shape[-1], dtype=jnp.int32)[None]
    first_B1, after_stamp_B1 = state.last_B[:, None] < 0, state.last_B[:, None] >= first_stamp
    after_pair_B1 = after_stamp_B1 & (
        (state.before_last_B[:, None] < 0) | (state.before_last_B[:, None] >= first_stamp)
    )
    open_B1 = after_stamp_B1 & ~after_pair_B1
    is_stamp_1V = ids_1V >= first_stamp
    least_B1 = jnp.where(state.stamp_B < 0, first_stamp, state.stamp_B + 1)[:, None]
    # The end of an open pair may equal its start.
    least_B1 = jnp.where(open_B1, state.stamp_B[:, None], least_B1)
    forbidden_BV = (
        (ids_1V == first_stamp - 1)
        | (after_pair_B1 & is_stamp_1V)
        | (open_B1 & (ids_1V < eos_id))
        | (is_stamp_1V & (ids_1V < least_B1))
        | (first_B1 & (~is_stamp_1V | (ids_1V > latest_first)))
    )
    logits_BV = jnp.where(forbidden_BV, _NEVER, logits_BV)
    stamps_B1 = jax.nn.logsumexp(jnp.where(is_stamp_1V, logits_BV, _NEVER), axis=-1, keepdims=True)
    words_B1 = jnp.max(jnp.where(is_stamp_1V, _NEVER, logits_BV), axis=-1, keepdims=True)
    return jnp.where((stamps_B1 > words_B1) & ~is_stamp_1V, _NEVER, logits_BV)
