"""The runs of a sweep: every combination of the values of its keys, each with a run ID."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lm_trainer.core.errors import UserError

_KEY = re.compile(r"(?:--)?([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_UNSAFE = re.compile(r"[^\w.-]+")
_MAX_ID = 96
"""Maximum number of characters of a run ID. The names of longer ones end with a hash instead."""
_SEED = "trainer.seed"


@dataclass(frozen=True)
class SweptKey:
    """A key with several values."""

    key: str
    values: tuple[str, ...]
    """The values as the user has written them."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    run_id: str
    settings: tuple[tuple[str, str], ...]
    """The swept keys with the values of this run."""
    overrides: tuple[str, ...]
    """All overrides of the configuration, including the run ID."""


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[SweptKey]]:
    """Separates overrides with one value from keys with several values.

    A comma separates two values, unless it is inside brackets, braces or quotes.

    Args:
        words: words of the form `key=value`, or `--key` and `value`.

    Raises:
        UserError: if a key is swept twice, a value is empty, or a word is not a setting.
    """
    fixed: list[str] = []
    swept: list[SweptKey] = []
    for word in _join_options(words):
        setting = _KEY.fullmatch(word)
        if setting is None:
            raise UserError(f"{word}: expected a setting, KEY=VALUE or KEY=VALUE,VALUE,...")
        key, text = setting.groups()
        values = split_values(text)
        if key == "trainer.id":
            raise UserError("trainer.id: a sweep names its runs itself; choose the beginning of the names with --name")
        if len(values) == 1:
            fixed.append(f"{key}={text}")
            continue
        if any(not value for value in values):
            raise UserError(f"{word}: one of the values is empty; write a list of one key as {key}='[a, b]'")
        if len({*values}) < len(values):
            raise UserError(f"{word}: a value occurs twice; remove one of them")
        if any(other.key == key for other in swept):
            raise UserError(f"{key} occurs twice; write all of its values after one =")
        swept.append(SweptKey(key, tuple(values)))
    return fixed, swept


def _join_options(words: Sequence[str]) -> list[str]:
    """Joins `--key` and `value` to `key=value`."""
    remaining = iter(words)
    return [
        f"{word[2:]}={next(remaining, '')}" if word.startswith("--") and "=" not in word else word for word in remaining
    ]


def split_values(text: str) -> list[str]:
    """Splits at commas that are not inside brackets, braces or quotes."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and not depth and not quote:
            values.append("")
            continue
        values[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "[{(") - (character in "]})")
    return [value.strip() for value in values]


def plan_runs(
    name: str, fixed: Sequence[str], swept: Sequence[SweptKey], *, seeds: Sequence[str] = (), paired: bool = False
) -> list[SweepRun]:
    """Returns the runs of a sweep, in the order in which they are trained.

    Args:
        name: beginning of the run IDs.
        fixed: overrides of all runs.
        swept: the keys with several values.
        seeds: values of `trainer.seed`, each of which is combined with every setting.
        paired: combine the first values of all keys, then the second ones, and so on, instead of all values with one
            another.

    Raises:
        UserError: if no key has several values, or if paired keys have different numbers of values.
    """
    if not swept and len(seeds) < 2:
        raise UserError("no key has several values; write for example optimizer.learning_rate=1e-4,3e-4,1e-3")
    if seeds and any(key.key == _SEED for key in swept):
        raise UserError("trainer.seed has several values, and --seeds too; remove one of them")
    if paired and len({len(key.values) for key in swept}) > 1:
        counts = ", ".join(f"{key.key} has {len(key.values)}" for key in swept)
        raise UserError(f"--paired combines values by their position, but {counts} values; give all keys as many")
    names = [key.key for key in swept]
    columns = [key.values for key in swept]
    combinations = zip(*columns, strict=True) if paired and swept else itertools.product(*columns)
    settings = [tuple(zip(names, values, strict=True)) for values in combinations]
    if seeds:
        settings = [(*setting, (_SEED, seed)) for setting in settings for seed in seeds]
    ids = _run_ids(name, settings)
    return [
        SweepRun(run_id, setting, (*fixed, *(f"{key}={value}" for key, value in setting), f"trainer.id={run_id}"))
        for run_id, setting in zip(ids, settings, strict=True)
    ]


def _run_ids(name: str, settings: Sequence[tuple[tuple[str, str], ...]]) -> list[str]:
    """Returns names such as `my-learning_rate-1e-4-seed-0`. They depend only on the run's own settings."""
    keys = [key for key, _ in settings[0]]
    last = [key.rpartition(".")[2] for key in keys]
    short = {key: part if last.count(part) == 1 else key for key, part in zip(keys, last, strict=True)}
    ids = [
        "-".join([name, *(f"{short[key]}-{_UNSAFE.sub('-', value).strip('-')}" for key, value in setting)])
        for setting in settings
    ]
    return [
        run_id if len(run_id) <= _MAX_ID and ids.count(run_id) == 1 else f"{run_id[:_MAX_ID]}-{_hash(setting)}"
        for run_id, setting in zip(ids, settings, strict=True)
    ]


def _hash(setting: tuple[tuple[str, str], ...]) -> str:
    return hashlib.sha256(repr(setting).encode()).hexdigest()[:8]
