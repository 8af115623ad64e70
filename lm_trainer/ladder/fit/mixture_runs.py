"""Reads runs that differ in the weights of their mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.mixture import MixtureRuns
from lm_trainer.ladder.metrics import read_metrics_by_step
from lm_trainer.run.config.run_config import changed_keys
from lm_trainer.run.files.find_run import find_run
from lm_trainer.run.files.records import read_run_record, recorded_identity

_WEIGHTS, _SEED = "data.train_weights", "trainer.seed"


def read_mixture_runs(names: Sequence[str], metrics: Sequence[str] = ()) -> MixtureRuns:
    """Reads the weights and the last losses of runs.

    Args:
        names: run IDs or run directories.
        metrics: names of the losses; none means the losses of all held-out sets, or `eval/loss` if there is one set.

    Raises:
        UserError: if a run does not exist, has no mixture of constant weights, lacks a metric, has another number of
            steps, or differs from the first run in more than its weights and its seed.
    """
    identities, rows = {}, {}
    for name in names:
        directory = find_run(name)
        identities[name] = recorded_identity(read_run_record(directory), directory)
        rows[name] = _last_values(directory)
    first, *later_names = names
    for name in later_names:
        _check_same(first, name, identities[first], identities[name])
        if rows[name]["step"] != rows[first]["step"]:
            raise UserError(
                f"{name} has {rows[name]['step']:,} steps and {first} {rows[first]['step']:,}; finish the runs, so "
                "that all have the same number"
            )
    weights = {name: _constant_weights(name, identity) for name, identity in identities.items()}
    sets = tuple(sorted({key for of_run in weights.values() for key, weight in of_run.items() if weight > 0}))
    if len(sets) < 2:
        raise UserError("the runs train on one set; a law of mixtures needs data.train_weights of two or more")
    chosen = tuple(metrics) or _held_out_losses(rows[first])
    for name, row in rows.items():
        for metric in chosen:
            value = row.get(metric)
            if not isinstance(value, int | float) or not np.isfinite(value) or value <= 0:
                losses = ", ".join(sorted(key for key in row if key.startswith("eval/"))) or "none"
                raise UserError(f"{name} has no positive number {metric}; choose others with --metric (has {losses})")
    weights_PM = np.array([[weights[name].get(key, 0.0) for key in sets] for name in names])
    loss_PV = np.array([[rows[name][metric] for metric in chosen] for name in names])
    return MixtureRuns(sets, chosen, weights_PM / weights_PM.sum(axis=1, keepdims=True), loss_PV, tuple(names))


def _last_values(directory: Path) -> dict[str, Any]:
    """Returns the last value of each metric of a run, and the last step as `step`."""
    by_step = read_metrics_by_step(directory / "metrics.jsonl")
    values = {key: value for _, row in sorted(by_step.items()) for key, value in row.items()}
    return {**values, "step": max(by_step, default=0)}


def _check_same(first: str, other: str, identity: Mapping[str, Any], other_identity: Mapping[str, Any]) -> None:
    differences = changed_keys(identity, other_identity)
    unexpected = [key for key in differences if key != _SEED and not key.startswith(_WEIGHTS)]
    if unexpected:
        raise UserError(
            f"{other} and {first} differ in {', '.join(unexpected[:4])}; a law of mixtures is of runs that differ in "
            f"{_WEIGHTS} and {_SEED} alone"
        )


def _constant_weights(name: str, identity: Mapping[str, Any]) -> dict[str, float]:
    weights = identity["data"].get("train_weights")
    if not isinstance(weights, Mapping):
        kind = "weights that change during the run" if weights else "no data.train_weights"
        raise UserError(f"{name} has {kind}; a law of mixtures is of runs with constant weights")
    return {key: float(value) for key, value in weights.items()}


def _held_out_losses(row: Mapping[str, Any]) -> tuple[str, ...]:
    by_set = sorted(key for key in row if key.startswith("eval/") and key.endswith("/loss"))
    return tuple(by_set) or ("eval/loss",)
