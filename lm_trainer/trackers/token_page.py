"""Token probabilities of a few documents over the steps of a run: the file that stores them, and an HTML page.

Shape letters: S is the number of predicted tokens in a document, K the number of most likely tokens.
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
from lm_trainer.core.html_page import render_page

FILE, PAGE = "token-probabilities.jsonl", "token-probabilities.html"
"""Names of the file and of the page in the run directory."""

MAX_STEPS = 40
"""Maximum number of evaluations on a page. They are evenly spaced and include the first and the last evaluation."""


@dataclass(frozen=True)
class TokenScores:
    """Token scores of a document at a step. Log probabilities are in hundredths of nats, to keep files small."""

    nll_S: list[int]
    """-log p of each token except the first, in hundredths of nats."""
    rank_S: list[int]
    """Number of tokens of the vocabulary that are more likely than the token in the document, at each position."""
    top_SK: list[list[tuple[int, int]]]
    """ID and -log p of each of the most likely tokens, at each position."""

    @classmethod
    def from_outputs(cls, nll_S: np.ndarray, rank_S: np.ndarray, ids_SK: np.ndarray, nll_SK: np.ndarray) -> TokenScores:
        """Creates the scores from the outputs of the compiled program, rounded to hundredths of nats."""
        top = [
            [(int(i), int(n)) for i, n in zip(ids, nlls, strict=True)]
            for ids, nlls in zip(ids_SK, _round_to_hundredths(nll_SK), strict=True)
        ]
        return cls(_round_to_hundredths(nll_S).tolist(), rank_S.astype(int).tolist(), top)


def _round_to_hundredths(nll: np.ndarray) -> np.ndarray:
    # Non-finite losses become a large finite value.
    return np.rint(np.nan_to_num(nll.astype(np.float64), nan=1e4, posinf=1e4) * 100).astype(int)


@dataclass
class TokenHistory:
    """The documents of a run, and their probabilities at each evaluation."""

    documents: list[list[int]]
    """Token IDs of each document."""
    tokens: dict[int, str]
    """Text of every token that occurs, by token ID."""
    steps: dict[int, list[TokenScores]] = field(default_factory=dict)
    """Scores of each document, by step."""

    @classmethod
    def read(cls, directory: Path) -> TokenHistory:
        """Reads the file in a run directory. Incomplete lines are left out.

        Raises:
            UserError: if the file does not exist.
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
                history._add_record(record)
        return history

    def _add_record(self, record: Mapping[str, Any]) -> None:
        self.tokens |= {int(index): text for index, text in record.get("tokens", {}).items()}
        if "documents" in record:
            # A run started from scratch, or with other documents, starts a new history.
            self.documents, self.steps = record["documents"], {}
        if "step" in record:
            # If a step is repeated, the scores at all later steps are dropped.
            self.steps = {step: scored for step, scored in self.steps.items() if step < record["step"]}
            columns = zip(record["nll"], record["rank"], record["top"], strict=True)
            self.steps[record["step"]] = [
                TokenScores(nll, rank, [[(i, n) for i, n in pairs] for pairs in top]) for nll, rank, top in columns
            ]


class TokenFile:
    """The file with token probabilities in a run directory, written line by line."""

    def __init__(self, directory: Path, documents: Sequence[Sequence[int]], texts: Any):
        self._path, self._texts = directory / FILE, texts
        self.history = TokenHistory([list(document) for document in documents], {})
        try:
            previous = TokenHistory.read(directory)
        except UserError:
            previous = self.history
        if previous.documents == self.history.documents and previous.steps:
            self.history = previous
        else:
            self._write(
                {"documents": self.history.documents, "tokens": self._add_new_tokens(_all_token_ids(documents))}
            )

    def add(self, step: int, scored: Sequence[TokenScores]) -> None:
        """Adds the scores of all documents at a step, and writes them to the file."""
        self.history.steps = {s: document_scores for s, document_scores in self.history.steps.items() if s < step}
        self.history.steps[step] = list(scored)
        ids = (index for document_scores in scored for top in document_scores.top_SK for index, _ in top)
        self._write(
            {
                "step": step,
                "nll": [document_scores.nll_S for document_scores in scored],
                "rank": [document_scores.rank_S for document_scores in scored],
                "top": [document_scores.top_SK for document_scores in scored],
                "tokens": self._add_new_tokens(ids),
            }
        )

    def _add_new_tokens(self, ids: Iterable[int]) -> dict[int, str]:
        new = {index: self._texts(index) for index in sorted({*ids} - self.history.tokens.keys())}
        self.history.tokens |= new
        return new

    def _write(self, record: dict[str, Any]) -> None:
        # The line is flushed to disk before the checkpoint of this step, because it must survive a power cut if the
        # checkpoint does.
        append_line(self._path, json.dumps(record, separators=(",", ":")).encode())


def _all_token_ids(documents: Sequence[Sequence[int]]) -> Iterable[int]:
    return (index for document in documents for index in document)


def render_token_page(runs: Mapping[str, TokenHistory]) -> str:
    """Renders a self-contained HTML page with the documents of one run, or of two runs side by side.

    Raises:
        UserError: if two runs have different documents, or a run has not been evaluated yet.
    """
    histories = list(runs.values())
    for name, history in runs.items():
        if not history.steps:
            raise UserError(f"{name}: this run was not evaluated yet")
    if any(other.documents != histories[0].documents for other in histories):
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
        "runs": [{"name": name, "steps": _select_page_steps(history)} for name, history in runs.items()],
    }
    return render_page("lm_trainer.trackers", "token_page.html", data=data)


def _select_page_steps(history: TokenHistory) -> list[dict[str, Any]]:
    steps = sorted(history.steps)
    chosen = {steps[round(i)] for i in np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS))}
    return [
        {
            "step": step,
            "nll": [document.nll_S for document in history.steps[step]],
            "rank": [document.rank_S for document in history.steps[step]],
            "top": [document.top_SK for document in history.steps[step]],
        }
        for step in sorted(chosen)
    ]
