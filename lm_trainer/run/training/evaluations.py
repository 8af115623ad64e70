"""Evaluates the model on held-out sets during training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.health.watchdog import Watchdog
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.training.batches import DataWait, EvalData
from lm_trainer.run.training.eval_groups import group_by_tag, group_metrics
from lm_trainer.run.training.hooks import is_due
from lm_trainer.run.training.token_probabilities import TokenProbabilities, find_first_text_set
from lm_trainer.step.evaluate import means_from_sums
from lm_trainer.step.state.train_state import TrainState
from lm_trainer.trackers import Progress

EvalSets = list[tuple[str | None, EvalData]]
"""Held-out sets with their names. The name of a single set is None."""


def name_eval_sets(sets: Mapping[str, EvalData]) -> EvalSets:
    """Returns the sets from `lm_trainer.data` with their names. The name of a single set is None."""
    return [(name if len(sets) > 1 else None, held_out) for name, held_out in sets.items()]


class EvaluationLog(Protocol):
    """The part of `MetricLogger` that evaluations use."""

    def flush(self) -> None: ...

    def pause(self) -> None: ...

    def log_evaluation(self, step: int, name: str, means: Mapping[str, float]) -> None: ...

    def log_group_evaluation(self, step: int, name: str, means: Mapping[str, float], /) -> None: ...


class Evaluations:
    """Evaluates the held-out sets of a run, with the current weights and with their average if the run keeps one.

    Args:
        sets: held-out sets with their names.
        config: trainer section of the run.
        setup: model, optimizer, shardings and compiled functions of the run.
        metrics: receives the results.
        data_wait: waits for sets that are being tokenised.
        watchdog: watchdog that times each batch.
        progress: progress display in the terminal.
        open_tokens: creates the writer of token probabilities, which are computed with the trained weights. Called at
            the first evaluation, when the sets are tokenised. None writes no token probabilities.
    """

    def __init__(  # noqa: PLR0913 - an evaluation uses all of them
        self,
        sets: EvalSets,
        config: TrainerConfig,
        setup: TrainingSetup,
        metrics: EvaluationLog,
        data_wait: DataWait,
        watchdog: Watchdog,
        progress: Progress,
        open_tokens: Callable[[EvalSet], TokenProbabilities] | None = None,
    ):
        self._every, self._max_batches = config.steps_per_eval, config.max_eval_batches
        self._program, self._metrics, self._data_wait = setup, metrics, data_wait
        self._watchdog, self._progress = watchdog, progress
        self._sets = sets
        self._tokens: TokenProbabilities | None = None
        self._open_tokens = open_tokens

    def is_due(self, step: int) -> bool:
        """Returns True if an evaluation is due after `step` steps."""
        return is_due(self._every, step)

    def run(self, state: TrainState) -> None:
        """Evaluates all sets, and then reports the means over groups. Waits until each set is tokenised.

        Raises:
            UserError: if a set will never be available.
            Preempted: if a stop signal arrives while waiting.
        """
        sums: dict[str, dict[str, dict[str, float]]] = {}
        for name, data in self._sets:
            for weights, sums_of_set in self._run_set(state, data, name).items():
                sums.setdefault(weights, {})[name or ""] = sums_of_set
        if self._tokens is None and self._open_tokens is not None and (held_out := find_first_text_set(self._sets)):
            self._tokens = self._open_tokens(held_out)
        if self._tokens is not None:
            self._progress.phase("computing the probabilities of tokens")
            self._tokens.record(state.step, self._program.weights_to_evaluate(state)[""])
            self._metrics.pause()
        groups = group_by_tag({name: getattr(data, "tags", ()) for name, data in self._sets if name is not None})
        for weights, sums_by_set in sums.items():
            for group, members in groups.items():
                if evaluated := [member for member in members if member in sums_by_set]:
                    means = group_metrics(sums_by_set, evaluated)
                    self._metrics.log_group_evaluation(state.step, _join_names(weights, group), means)

    def _run_set(self, state: TrainState, data: EvalData, name: str | None) -> dict[str, dict[str, float]]:
        # Logs the step before its evaluation.
        self._metrics.flush()
        self._data_wait.wait(data, state)
        evaluate = self._program.evaluate
        self._progress.phase(f"evaluating{f' on {name}' if name else ''}")
        results = {}
        for weights, params in self._program.weights_to_evaluate(state).items():
            batches = data.batches(evaluate.batch_size, rows=evaluate.local_rows, max_batches=self._max_batches)
            timed_batches = self._watchdog.time_items(batches, f"the evaluation after step {state.step}")
            sums = evaluate.compute_sums(params, timed_batches, _byte_counter(data))
            if not sums.get("weight"):
                self._progress.note(
                    f"warning: step {state.step}: no token of {name or 'the held-out set'} has a loss, so that "
                    f"nothing is evaluated"
                )
                break
            results[weights] = sums
            self._metrics.log_evaluation(state.step, _join_names(weights, name), _compute_means(sums))
        return results


def _join_names(weights: str, name: str | None) -> str:
    return "/".join(filter(None, (weights, name)))


def _compute_means(sums: dict[str, float]) -> dict[str, float]:
    """Returns the means over tokens.

    If the number of text bytes is known, also `bpb`, the bits of all targets per byte.
    """
    token_means = means_from_sums({name: x for name, x in sums.items() if name != "bytes"})
    if not sums.get("bytes"):
        return token_means
    return {**token_means, "bpb": sums["loss"] / math.log(2) / sums["bytes"]}


def _byte_counter(data: EvalData) -> Callable[[Batch], dict[str, float]]:
    """Returns a function that counts the text bytes of the targets in a batch, if the held-out set knows them."""
    bytes_V = getattr(data, "token_bytes", None)
    if bytes_V is None:
        return lambda _: {}
    return lambda batch: {"bytes": float(np.sum(bytes_V[batch.targets] * batch.weights))}
