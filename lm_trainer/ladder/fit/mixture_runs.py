"""Reads runs that differ in the weights of their mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.mixture import MixtureRuns
from lm_trainer.ladder.fit.run_values import read_run_values

_WEIGHTS = "data.train_weights"


def read_mixture_runs(names: Sequence[str], metrics: Sequence[str] = ()) -> MixtureRuns:
    """Reads the weights and the last losses of runs.

    Args:
        names: run IDs or run directories.
        metrics: names of the losses; none means the losses of all held-out sets, or `eval/loss` if there is one set.

    Raises:
        UserError: if a run does not exist, has no mixture of constant weights, lacks a metric, has another number of
            steps, or differs from the first run in more than its weights and its seed.
    """
    runs = read_run_values(names, "a law of mixtures", (_WEIGHTS, "trainer.seed"))
    first = runs[0]
    for run in runs:
        if run.step != first.step:
            raise UserError(
                f"{run.name} has {run.step:,} steps and {first.name} {first.step:,}; finish the runs, so that all have "
                "the same number"
            )
    weights = [_constant_weights(run.name, run.settings) for run in runs]
    sets = tuple(sorted({key for of_run in weights for key, weight in of_run.items() if weight > 0}))
    if len(sets) < 2:
        raise UserError("the runs train on one set; a law of mixtures needs data.train_weights of two or more")
    chosen = tuple(metrics) or _held_out_losses(first.metrics)
    loss_PV = np.array([[run.positive(metric) for metric in chosen] for run in runs])
    weights_PM = np.array([[of_run.get(key, 0.0) for key in sets] for of_run in weights])
    return MixtureRuns(sets, chosen, weights_PM / weights_PM.sum(axis=1, keepdims=True), loss_PV, tuple(names))


def _constant_weights(name: str, identity: Mapping[str, Any]) -> dict[str, float]:
    weights = identity["data"].get("train_weights")
    if not isinstance(weights, Mapping):
        kind = "weights that change during the run" if weights else "no data.train_weights"
        raise UserError(f"{name} has {kind}; a law of mixtures is of runs with constant weights")
    return {key: float(value) for key, value in weights.items()}


def _held_out_losses(row: Mapping[str, Any]) -> tuple[str, ...]:
    by_set = sorted(key for key in row if key.startswith("eval/") and key.endswith("/loss"))
    return tuple(by_set) or ("eval/loss",)
