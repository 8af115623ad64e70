"""Measurements to which a law is fitted."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.ladder.fit.chance import chance_of
from lm_trainer.ladder.fit.law import Law, training_flops

_ALIASES = {"num_params": ("num_params", "params", "N"), "tokens": ("tokens", "D"), "unique": ("unique_tokens", "U")}
_DEFAULT_METRICS = ("eval/loss", "loss")
_UNDECAYED = re.compile(r"(pre-decay|^initialization|^step \d+)$")
_FACTS = frozenset({"ladder", "size", "seed", "name", "step", "flops", "run", *sum(_ALIASES.values(), ())})


@dataclass(frozen=True)
class Points:
    """Losses of one recipe at several sizes and run lengths. The arrays have one element per measurement."""

    num_params: np.ndarray
    """N as the ladder counts it, without the token embedding."""
    tokens: np.ndarray
    """D: number of training tokens."""
    loss: np.ndarray
    labels: tuple[str, ...]
    """Names of the points."""
    runs: tuple[str, ...]
    """Identifier of each point's run. Points of the same run share its noise."""
    metric: str = "loss"
    task: np.ndarray | None = None
    """Accuracy at the same checkpoints, if any."""
    task_metric: str | None = None
    chance: float = 0.0
    """Accuracy that guessing gives, from 0 to 1."""
    unique_tokens: np.ndarray | None = None
    """U: number of distinct tokens in the training text of each point; None if no text is repeated."""
    source: str = ""
    """Origin of the points, shown in messages."""
    notes: tuple[str, ...] = ()
    """One sentence for each group of omitted or missing points."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def flops(self) -> np.ndarray:
        """Compute (6 N D) of each point."""
        return training_flops(self.num_params, self.tokens)

    def with_chance(self, chance: float) -> Points:
        """Returns the same points with another accuracy of guessing.

        Raises:
            UserError: if it is not from 0 to below 1.
        """
        if not 0 <= chance < 1:
            raise UserError(f"--chance {chance:g}: it has to be at least 0 and below 1, such as 0.25 for four choices")
        return replace(self, chance=chance)

    def with_unique_tokens(self, unique_tokens: float) -> Points:
        """Returns the same points, all with `unique_tokens` distinct tokens in their training text.

        Raises:
            UserError: if the number is not positive.
        """
        if not (math.isfinite(unique_tokens) and unique_tokens > 0):
            raise UserError(f"--unique-tokens {unique_tokens:g}: it has to be finite and above 0")
        return replace(self, unique_tokens=np.full(len(self), float(unique_tokens)))

    def fitted_loss(self, law: Law) -> np.ndarray:
        """Computes the loss of every point (P,) by a law."""
        return law.loss(self.num_params, self.tokens, self.unique_tokens)

    @property
    def sizes(self) -> np.ndarray:
        """The distinct values of N in ascending order."""
        return np.unique(self.num_params)

    def select(self, mask: np.ndarray) -> Points:
        """Returns the points that a boolean mask selects."""
        chosen = np.flatnonzero(mask)
        return Points(
            self.num_params[chosen],
            self.tokens[chosen],
            self.loss[chosen],
            tuple(self.labels[i] for i in chosen),
            tuple(self.runs[i] for i in chosen),
            self.metric,
            None if self.task is None else self.task[chosen],
            self.task_metric,
            self.chance,
            None if self.unique_tokens is None else self.unique_tokens[chosen],
            self.source,
            self.notes,
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the points as plain data, for `from_dict`."""
        arrays = {name: getattr(self, name).tolist() for name in ("num_params", "tokens", "loss")}
        task = None if self.task is None else self.task.tolist()
        texts = {"labels": list(self.labels), "runs": list(self.runs), "notes": list(self.notes)}
        names = {"metric": self.metric, "task_metric": self.task_metric, "source": self.source}
        # The key is absent without repeated text, so that the hash of such a fit does not depend on this version.
        unique = {} if self.unique_tokens is None else {"unique_tokens": self.unique_tokens.tolist()}
        chance = {} if self.task is None else {"chance": self.chance}
        return {**names, **arrays, **unique, **chance, "task": task, **texts}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Points:
        """Reads the result of `as_dict`."""
        arrays = {name: np.asarray(plain[name], float) for name in ("num_params", "tokens", "loss")}
        task = None if plain["task"] is None else np.asarray(plain["task"], float)
        texts = {name: tuple(plain[name]) for name in ("labels", "runs", "notes")}
        names = {name: plain[name] for name in ("metric", "task_metric", "source")}
        unique = None if "unique_tokens" not in plain else np.asarray(plain["unique_tokens"], float)
        return cls(**arrays, **texts, **names, task=task, unique_tokens=unique, chance=plain.get("chance", 0.0))


def points_from_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    source: str,
    metric: str | None = None,
    task: str | None = None,
    pre_decay: bool = False,
    without: Sequence[str] = (),
) -> Points:
    """Makes points from rows of `lm_trainer.ladder.metrics.collect_rows`, or of a table with the same columns.

    Checkpoints before a decay have a higher loss than checkpoints after it, so they are not on the same curve. Unless
    `pre_decay` is set, checkpoints whose names end in `pre-decay` are left out, as well as checkpoints between the
    ladder's own.

    Args:
        rows: rows with `num_params` (or `params`, `N`), `tokens` (or `D`), a metric, and, if known, `size`, `seed`,
            `name`, `ladder` and `unique_tokens` (or `U`).
        source: origin of the rows, shown in messages.
        metric: name of the loss column. By default `eval/loss` if it exists, otherwise `loss`.
        task: name of a column with an accuracy.
        pre_decay: keeps measurements from before a decay.
        without: sizes to leave out.

    Raises:
        UserError: for missing or damaged data, or rows of several ladders.
    """
    columns = sorted({key for row in rows for key in row})
    metric = metric or next((name for name in _DEFAULT_METRICS if name in columns), None)
    for column, option in ((metric, "--metric"), (task, "--task")):
        if (column is None and option == "--metric") or (column is not None and column not in columns):
            metrics = ", ".join(name for name in columns if name not in _FACTS) or "none"
            raise UserError(
                f"{source}: has no metric {column or 'eval/loss'}; choose one with {option} (has {metrics})"
            )
    _check_ladder(rows, source)
    if unknown := set(without) - {str(row.get("size")) for row in rows}:
        raise UserError(f"--without {', '.join(sorted(unknown))}: {source} has no points of such a size")
    names = {key: next((a for a in aliases if a in columns), key) for key, aliases in _ALIASES.items()}
    assert metric is not None
    selected, notes = _select_rows(rows, metric, pre_decay=pre_decay, without=without)
    seeded = len({row.get("seed") for _, row in selected}) > 1
    numbers = [
        [_parse_positive(row, key, f"{source}, row {number}") for key in (names["num_params"], names["tokens"], metric)]
        for number, row in selected
    ]
    num_params, tokens, loss = np.asarray(numbers, float).reshape(-1, 3).T
    return Points(
        num_params,
        tokens,
        loss,
        tuple(_point_label(row, number, seeded=seeded) for number, row in selected),
        tuple(_run_id(row, n) for (_, row), n in zip(selected, num_params, strict=True)),
        metric,
        None if task is None else np.asarray([_parse_accuracy(row, task, source, number) for number, row in selected]),
        task,
        chance_of(task),
        _unique_tokens(selected, names["unique"], source) if names["unique"] in columns else None,
        source,
        tuple(notes),
    )


def _unique_tokens(selected: Sequence[tuple[int, Mapping[str, Any]]], column: str, source: str) -> np.ndarray:
    return np.asarray([_parse_positive(row, column, f"{source}, row {number}") for number, row in selected])


def _check_ladder(rows: Sequence[Mapping[str, Any]], source: str) -> None:
    ladders = sorted({str(row["ladder"]) for row in rows if row.get("ladder") not in (None, "")})
    if len(ladders) > 1:
        raise UserError(
            f"{source}: holds points of several ladders ({', '.join(ladders)}), which have no law in common; keep the "
            "rows of one, or give each a file of its own to `lmt ladder compare`"
        )


def _select_rows(
    rows: Sequence[Mapping[str, Any]], metric: str, *, pre_decay: bool, without: Sequence[str]
) -> tuple[list[tuple[int, Mapping[str, Any]]], list[str]]:
    selected, undecayed, unmeasured = [], 0, []
    for number, row in enumerate(rows, 1):
        if str(row.get("size")) in without:
            continue
        if not pre_decay and _UNDECAYED.search(str(row.get("name") or "")):
            undecayed += 1
        elif row.get(metric) in (None, ""):
            unmeasured.append(_point_label(row, number))
        else:
            selected.append((number, row))
    notes = [f"left out {undecayed} points measured before a decay; --pre-decay keeps them"] if undecayed else []
    if unmeasured:
        notes.append(f"{metric} was not measured at {', '.join(unmeasured)}")
    if without:
        notes.append(f"left out on request: {', '.join(without)}")
    return selected, notes


def _parse_number(row: Mapping[str, Any], key: str, location: str) -> float:
    try:
        return float(row[key])
    except KeyError:
        raise UserError(f"{location}: has no {key}") from None
    except (TypeError, ValueError):
        raise UserError(f"{location}: {key} is {row[key]!r}, which is no number") from None


def _parse_positive(row: Mapping[str, Any], key: str, location: str) -> float:
    value = _parse_number(row, key, location)
    if not (math.isfinite(value) and value > 0):
        raise UserError(
            f"{location}: {key} is {value:g}; it has to be finite and above 0 (leave the row out if it failed)"
        )
    return value


def _parse_accuracy(row: Mapping[str, Any], key: str, source: str, number: int) -> float:
    value = _parse_number(row, key, f"{source}, row {number}")
    if not 0 <= value <= 1:
        raise UserError(f"{source}, row {number}: {key} is {value:g}; an accuracy lies between 0 and 1")
    return value


def _point_label(row: Mapping[str, Any], number: int, *, seeded: bool = True) -> str:
    name = re.sub(r"^period \d+, | post-decay$", "", str(row.get("name") or row.get("run") or ""))
    seed = f" seed {row['seed']}" if seeded and row.get("seed") not in (None, "") else ""
    return (f"{row.get('size') or ''} {name}".strip() or f"row {number}") + seed


def _run_id(row: Mapping[str, Any], num_params: float) -> str:
    return f"{row.get('size') or num_params}/{row.get('seed') or 0}"


def read_table(path: AnyPath) -> list[dict[str, Any]]:
    """Reads the rows of a CSV, JSON (a list of objects) or Parquet file.

    Raises:
        UserError: if the file is missing or damaged, or has another format.
    """
    path = local_path(path)
    readers: dict[str, Callable[[Path], Any]] = {".csv": _read_csv, ".json": _read_json, ".parquet": _read_parquet}
    reader = readers.get(path.suffix)
    if reader is None:
        raise UserError(f"{path}: points are read from .csv, .json and .parquet, or from a ladder's .yaml")
    if not path.is_file():
        raise UserError(f"{path}: no such file; write one with: lmt ladder metrics LADDER --out {path.name}")
    try:
        rows = reader(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if isinstance(rows, dict) and "law" in rows:
        raise UserError(f"{path}: is a fit, not points; its commands are predict, compare, register and report")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: holds no rows; write one with: lmt ladder metrics LADDER --out {path.name}")
    return rows


def _read_csv(path: Path) -> Any:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()
