"""Probabilities of the tokens of a few documents over the steps of a run: their file, and a page that shows them.

Shape letters: S tokens of a document that are predicted, K likeliest tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import append_line
from lm_trainer.core.page import write_page

FILE, PAGE = "token-probabilities.jsonl", "token-probabilities.html"
"""Names in the run directory."""

MAX_STEPS = 40
"""Evaluations on a page: the first, the last, and those between evenly."""


@dataclass(frozen=True)
class Scored:
    """A document at a step; hundredths of nats, so that files stay small."""

    nll_S: list[int]
    """-log p of each token but the first."""
    rank_S: list[int]
    """Number of tokens that were likelier."""
    top_SK: list[list[tuple[int, int]]]
    """Id and -log p of the likeliest tokens."""

    @classmethod
    def of(cls, nll_S: np.ndarray, rank_S: np.ndarray, ids_SK: np.ndarray, nll_SK: np.ndarray) -> Scored:
        """Rounds what a program has computed."""
        top = [
            [(int(i), int(n)) for i, n in zip(ids, nlls, strict=True)]
            for ids, nlls in zip(ids_SK, _hundredths(nll_SK), strict=True)
        ]
        return cls(_hundredths(nll_S).tolist(), rank_S.astype(int).tolist(), top)


def _hundredths(nll: np.ndarray) -> np.ndarray:
    # A loss that is not finite is as bad as any.
    return np.rint(np.nan_to_num(nll.astype(np.float64), nan=1e4, posinf=1e4) * 100).astype(int)


@dataclass
class TokenHistory:
    """The documents of a run, and their probabilities at each evaluation."""

    documents: list[list[int]]
    """Token ids."""
    tokens: dict[int, str]
    """Text of every token that occurs."""
    steps: dict[int, list[Scored]] = field(default_factory=dict)
    """Step -> each document."""

    @classmethod
    def read(cls, directory: Path) -> TokenHistory:
        """Reads the file of a run directory; a line that was cut off is left out.

        Raises:
            UserError: where there is none.
        """
        history = cls([], {})
        try:
            content = (directory / FILE).read_bytes()
        except OSError:
            raise UserError(
                f"{directory}: there is no {FILE}; a run writes it with every evaluation, unless "
                "trainer.token_probabilities is 0"
            ) from None
        # Bytes, since a line may be cut off inside a character, and only the line feed ends one.
        for line in content.split(b"\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                history._take(record)
        return history

    def _take(self, record: Mapping[str, Any]) -> None:
        self.tokens |= {int(index): text for index, text in record.get("tokens", {}).items()}
        if "documents" in record:
            # A run that was begun anew, or with other documents, begins its history anew.
            self.documents, self.steps = record["documents"], {}
        if "step" in record:
            # A step that was done again replaces what was after it.
            self.steps = {step: scored for step, scored in self.steps.items() if step < record["step"]}
            columns = zip(record["nll"], record["rank"], record["top"], strict=True)
            self.steps[record["step"]] = [
                Scored(nll, rank, [[(i, n) for i, n in each] for each in top]) for nll, rank, top in columns
            ]


class TokenFile:
    """The file of a run directory, written line by line."""

    def __init__(self, directory: Path, documents: Sequence[Sequence[int]], texts: Any):
        self._path, self._texts = directory / FILE, texts
        self.history = TokenHistory([list(each) for each in documents], {})
        try:
            before = TokenHistory.read(directory)
        except UserError:
            before = self.history
        if before.documents == self.history.documents and before.steps:
            self.history = before
        else:
            self._write({"documents": self.history.documents, "tokens": self._new_tokens(_ids(documents))})

    def add(self, step: int, scored: Sequence[Scored]) -> None:
        """Writes the probabilities at a step."""
        self.history.steps = {s: each for s, each in self.history.steps.items() if s < step}
        self.history.steps[step] = list(scored)
        ids = (index for each in scored for top in each.top_SK for index, _ in top)
        self._write(
            {
                "step": step,
                "nll": [each.nll_S for each in scored],
                "rank": [each.rank_S for each in scored],
                "top": [each.top_SK for each in scored],
                "tokens": self._new_tokens(ids),
            }
        )

    def _new_tokens(self, ids: Iterable[int]) -> dict[int, str]:
        new = {index: self._texts(index) for index in sorted({*ids} - self.history.tokens.keys())}
        self.history.tokens |= new
        return new

    def _write(self, record: dict[str, Any]) -> None:
        # On the disk before the checkpoint of this step, which a power cut does not take back.
        append_line(self._path, json.dumps(record, separators=(",", ":")).encode())


def _ids(documents: Sequence[Sequence[int]]) -> Iterable[int]:
    return (index for each in documents for index in each)


def token_page(runs: Mapping[str, TokenHistory]) -> str:
    """A page, complete in itself, with the documents of one run, or of two side by side.

    Raises:
        UserError: for two runs with other documents, and for one that was not evaluated yet.
    """
    histories = list(runs.values())
    for name, history in runs.items():
        if not history.steps:
            raise UserError(f"{name}: this run was not evaluated yet")
    if any(each.documents != histories[0].documents for each in histories):
        raise UserError(
            f"{' and '.join(runs)} have other documents or another tokenizer; only the same tokens can be compared"
        )
    tokens = {index: text for history in histories for index, text in history.tokens.items()}
    documents = [
        {"title": " ".join("".join(tokens[i] for i in ids[:24]).split())[:40], "ids": ids}
        for ids in histories[0].documents
    ]
    data = {
        "documents": documents,
        "tokens": tokens,
        "runs": [{"name": name, "steps": _page_steps(history)} for name, history in runs.items()],
    }
    return write_page("lm_trainer.trackers", "token_page.html", data=data)


def _page_steps(history: TokenHistory) -> list[dict[str, Any]]:
    steps = sorted(history.steps)
    chosen = {steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS))}
    return [
        {
            "step": step,
            "nll": [each.nll_S for each in history.steps[step]],
            "rank": [each.rank_S for each in history.steps[step]],
            "top": [each.top_SK for each in history.steps[step]],
        }
        for step in sorted(chosen)
    ]
