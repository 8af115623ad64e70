"""Computes the probabilities of the tokens in a few held-out documents at every evaluation.

Shape letters: B is the number of rows of this process, S the number of positions, and T = S + 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.core.files import write_atomically
from lm_trainer.data.rows.chunks import make_batch
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.parallel.mesh import batch_shards
from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.build.model import TokenNll
from lm_trainer.run.build.setup import TrainingSetup, split_loss_into_stages
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.dispatch.model_parallel_limits import ROW_AXES
from lm_trainer.step.evaluate import Evaluator
from lm_trainer.step.state.model_def import Params
from lm_trainer.trackers.base import Composite
from lm_trainer.trackers.token_page import PAGE, TokenFile, TokenScores, render_token_page

MAX_TOKENS, TOP = 256, 3
"""Maximum number of tokens per document, and number of most likely tokens to record at each position."""
_SEARCHED_TOKENS, _MIN_TOKENS = 1 << 16, 16
"""Number of tokens in which documents are searched, and minimum number of tokens per document."""


class TokenProbabilities:
    """Computes and writes the token probabilities of the first documents of a held-out set, with an HTML page.

    Args:
        config: configuration of the run.
        setup: model, optimizer, shardings and compiled functions of the run.
        held_out: the held-out set.
        directory: run directory.
        tracker: tracker to send the page to.
    """

    def __init__(self, config: RunConfig, setup: TrainingSetup, held_out: EvalSet, directory: Path, tracker: Composite):
        trainer, mesh = config.trainer, setup.sharding.mesh
        loss = TokenNll(trainer.mp.compute_dtype, config.model.cross_entropy_block_size, TOP)
        staged = split_loss_into_stages(loss, setup.model, mesh) if setup.gathers_layers else None
        self._documents = _read_first_documents(held_out, trainer.token_probabilities)
        # Uses the smallest number of rows that the devices can share.
        rows, shards = math.prod(mesh.shape[axis] for axis in ROW_AXES), batch_shards(mesh)
        count = shards * math.ceil(len(self._documents) / (rows * shards))
        plan = MicrobatchPlan(count * rows, count, rows)
        self._evaluate = Evaluator(setup.model, loss, setup.step.devices, plan, staged=staged)
        # The first process writes the file, and only its local rows.
        self._local = [row for row in self._evaluate.local_rows if row < len(self._documents)]
        length = min(config.model.seq_len, MAX_TOKENS)
        self._batch = _build_batch(self._documents, self._evaluate.local_rows, length, held_out.eos_id)
        self._directory, self._tracker = directory, tracker
        self._file: TokenFile | None = None
        if is_lead() and self._local:
            tokenizer = held_out.tokenizer
            documents = [self._documents[row][: length + 1].tolist() for row in self._local]
            self._file = TokenFile(directory, documents, lambda index: tokenizer.decode([index]))

    def record(self, step: int, params: Params) -> None:
        """Computes the probabilities with the given weights, and writes the file and the page."""
        (probabilities,) = self._evaluate.compute_row_values(params, [self._batch])
        if self._file is None:
            return
        indices = {row: index for index, row in enumerate(self._evaluate.local_rows)}
        scored = []
        for row, ids in zip(self._local, self._file.history.documents, strict=True):
            values = {name: x[indices[row], : len(ids) - 1] for name, x in probabilities.items()}
            scored.append(TokenScores.from_outputs(values["nll"], values["rank"], values["top_ids"], values["top_nll"]))
        self._file.add(step, scored)
        write_atomically(self._directory / PAGE, render_token_page({self._directory.name: self._file.history}))
        self._tracker.log_artifact("token-probabilities", self._directory / PAGE, type="html")


def _read_first_documents(held_out: EvalSet, count: int) -> list[np.ndarray]:
    """Returns the first documents of a set that are not too short, as int32 arrays. Returns at least one document."""
    start = np.array([held_out.first_token])
    tokens = held_out.stream.read(start, min(_SEARCHED_TOKENS, held_out.num_tokens))[0]
    ends = np.flatnonzero(tokens == held_out.eos_id) + 1
    pieces = np.split(tokens, ends)
    long_enough = [piece for piece in pieces if len(piece) >= _MIN_TOKENS]
    return (long_enough or [tokens])[:count]


def _build_batch(documents: Sequence[np.ndarray], rows: Sequence[int], length: int, eos_id: int) -> Batch:
    """Builds the rows of this process in the batch. Each row is a document followed by padding."""
    tokens_BT = np.full((len(rows), length + 1), eos_id, np.int32)
    available_B = np.zeros(len(rows), np.int64)
    for index, row in enumerate(rows):
        if row < len(documents):
            ids = documents[row][: length + 1]
            tokens_BT[index, : len(ids)], available_B[index] = ids, len(ids)
    return make_batch(tokens_BT, available_B, eos_id)


def find_first_text_set(sets: Sequence[tuple[str | None, Any]]) -> EvalSet | None:
    """Returns the first held-out set of text, once it is tokenised; None if there is no such set."""
    for _, held_out in sets:
        completed = getattr(held_out, "wait_until_complete", lambda held_out=held_out: held_out)()
        if isinstance(completed, EvalSet) and not completed.has_features:
            return completed
    return None
