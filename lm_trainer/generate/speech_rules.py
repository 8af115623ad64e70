"""Rules by which a model writes what it hears: tokens that begin a text, tokens that are forbidden, timestamps.

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
    """Special tokens of a model that hears, as its `generation_config.json` names them."""

    start_id: int
    """Begins every text."""
    eos_id: int
    """Ends it."""
    suppressed: tuple[int, ...] = ()
    """Never written."""
    begin_suppressed: tuple[int, ...] = ()
    """Never written first."""
    languages: Mapping[str, int] = field(default_factory=dict)
    """Token of each language, by names such as `<|en|>`; empty for a model of one language."""
    tasks: Mapping[str, int] = field(default_factory=dict)
    """Token of each task: `transcribe`, `translate`."""
    language: str | None = None
    """The language that is assumed where none is asked for; None: it is heard."""
    task: str | None = None
    """The task where none is asked for."""
    forced: tuple[int | None, ...] = ()
    """Tokens after the first, in files that are older than `language` and `task`; None: the language that is heard."""
    no_timestamps_id: int | None = None
    """Says that no timestamps are written; those follow it in the vocabulary, every 0.02 s. None: there are none."""
    max_initial_timestamp: int | None = None
    """The latest first timestamp, in steps of 0.02 s."""
    length_penalty: float = 1.0
    """The power of its length that the sum of a text's log-probabilities is divided by in beam search."""

    early_stopping: bool | str = False
    """The time at which beam search ends: False, when no text may become better; other rules are refused."""

    @property
    def has_timestamps(self) -> bool:
        """True if the model can write timestamps."""
        return self.no_timestamps_id is not None

    @property
    def first_stamp(self) -> int | None:
        """The token of 0 s; None for a model without timestamps."""
        return None if self.no_timestamps_id is None else self.no_timestamps_id + 1

    @classmethod
    def from_config(cls, raw: Mapping[str, Any], *, start_id: int | None, eos_id: int | None) -> Self:
        """Reads the content of a generation_config.json.

        Args:
            raw: may be empty, and have keys that are no rules.
            start_id: of the model, where the file names none.
            eos_id: of the tokenizer, where the file names none.

        Raises:
            UserError: where neither names them, or tokens are forced that do not follow the first one.
        """
        start, end = raw.get("decoder_start_token_id", start_id), raw.get("eos_token_id", eos_id)
        # Some files list the only token there is.
        end = end[0] if isinstance(end, list) and len(end) == 1 else end
        for name, value in (("decoder_start_token_id", start), ("eos_token_id", end)):
            if not isinstance(value, int):
                raise UserError(f"model.generation_config: {name} is {value!r}; write the id of that token")
        penalty = raw.get("length_penalty")
        forced = raw.get("forced_decoder_ids") or []
        if [place for place, _ in forced] != list(range(1, len(forced) + 1)):
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
        """Raises `UserError` where a search of more than one beam would not be that of transformers."""
        if beams > 1 and self.early_stopping:
            raise UserError(
                f"generation_config.early_stopping is {self.early_stopping!r}, by which no beam search ends here; "
                "write false"
            )

    def language_id(self, language: str) -> int:
        """The token of a language, given as `en` or `<|en|>`.

        Raises:
            UserError: for one that the model lacks.
        """
        name = language.lower() if language.startswith("<|") else f"<|{language.lower()}|>"
        if name not in self.languages:
            known = ", ".join(sorted(key.strip("<|>") for key in self.languages)) or "none, it has no such tokens"
            raise UserError(f"language {language!r} is unknown to the model; it knows: {known}")
        return self.languages[name]

    def prompt(self, language: str | None, task: str | None, *, timestamps: bool) -> list[int | None]:
        """The tokens that a text begins with, as transformers chooses them; None stands for the language that is heard.

        Raises:
            UserError: for a language or task that the model lacks, or timestamps where it has none.
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
    """The tokens so far, as the rules of timestamps read them; int32 [B] each."""

    last_B: jax.Array
    """The token before, -1 for none."""
    before_last_B: jax.Array
    stamp_B: jax.Array
    """The last timestamp, -1 for none."""

    @classmethod
    def start(cls, rows: int) -> Self:
        """The state before the first token."""
        none_B = jnp.full(rows, -1, jnp.int32)
        return cls(none_B, none_B, none_B)

    def after(self, token_B: jax.Array, first_stamp: jax.Array) -> TimestampState:
        """The state after one more token."""
        return TimestampState(token_B, self.last_B, jnp.where(token_B >= first_stamp, token_B, self.stamp_B))


def timestamps_only(
    logits_BV: jax.Array, state: TimestampState, eos_id: jax.Array, first_stamp: jax.Array, latest_first: jax.Array
) -> jax.Array:
    """The logits with -inf for what the rules of timestamps forbid (Radford et al. 2022, section 4.5).

    They come in pairs that do not decrease; the first token is one; where all timestamps together are likelier than
    every word, one of them is written.

    Args:
        logits_BV: float32.
        state: of the tokens so far.
        eos_id: int32 scalar.
        first_stamp: the token of 0 s, int32 scalar; that before it says that there are no timestamps.
        latest_first: the latest token for the first one, int32 scalar.
    """
    ids_1V = jnp.arange(logits_BV.shape[-1], dtype=jnp.int32)[None]
    first_B1, after_stamp_B1 = state.last_B[:, None] < 0, state.last_B[:, None] >= first_stamp
    after_pair_B1 = after_stamp_B1 & (
        (state.before_last_B[:, None] < 0) | (state.before_last_B[:, None] >= first_stamp)
    )
    open_B1 = after_stamp_B1 & ~after_pair_B1
    is_stamp_1V = ids_1V >= first_stamp
    least_B1 = jnp.where(state.stamp_B < 0, first_stamp, state.stamp_B + 1)[:, None]
    # An open pair may end where it began.
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
