"""Loss curves of a ladder's runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.curve.areas import RatePlan, Windows, plan_rates
from lm_trainer.ladder.metrics import check_owner
from lm_trainer.ladder.rungs import count_params, run_config, run_folder, run_name
from lm_trainer.trackers.jsonl import METRICS
from lm_trainer.trackers.metric_columns import read_metric_columns

TRAIN_LOSS = "train/loss"


@dataclass(frozen=True)
class RungCurve:
    """The training loss of one run, as means over windows of steps. W is the number of windows."""

    name: str
    size: str
    plan: RatePlan
    windows: Windows
    loss_W: np.ndarray
    """Mean loss of each window."""
    noise: float
    """Standard deviation of the relative error of a single step's loss."""


def read_curves(ladder: LadderConfig, *, without: Sequence[str] = ()) -> tuple[list[RungCurve], list[str]]:
    """Reads the curve of every run of a ladder. Returns also a note about each run without a whole curve.

    Args:
        ladder: the ladder.
        without: sizes to leave out.

    Raises:
        UserError: if a directory contains a run of another ladder, or the form of the law cannot take a schedule.
    """
    curves, notes = [], []
    for size in ladder.sizes:
        for seed in ladder.seeds if size not in without else ():
            curve = _read_curve(ladder, size, seed)
            if isinstance(curve, str):
                notes.append(curve)
            else:
                curves.append(curve)
    return curves, notes


def _read_curve(ladder: LadderConfig, size: str, seed: int) -> RungCurve | str:
    """Returns the curve of a run, or a sentence that says what is missing."""
    folder, name = run_folder(ladder, size, seed), run_name(ladder, size, seed)
    steps, losses = read_metric_columns(folder / METRICS).curves.get(TRAIN_LOSS, (np.array([]), np.array([])))
    if not len(steps):
        return f"{name} has no curve of {TRAIN_LOSS} in {folder}; train it with: lmt ladder run --size {size}"
    check_owner(ladder, size, seed, folder)
    plan = plan_rates(run_config(ladder, size, seed), count_params(ladder, size), name)
    windows = plan.windows()
    if steps[-1] < plan.steps:
        last = f"{name} ends at step {int(steps[-1])} of {plan.steps}"
        return f"{last}; train it to its end with: lmt ladder run --size {size}"
    loss_S = np.full(plan.steps, np.nan)
    # A run of a longer form of the ladder has the same losses up to this length.
    within = steps <= plan.steps
    loss_S[steps[within] - 1] = losses[within]
    return _cut_into_windows(name, size, plan, windows, loss_S)


def _cut_into_windows(name: str, size: str, plan: RatePlan, windows: Windows, loss_S: np.ndarray) -> RungCurve | str:
    first = int(windows.last_W[0]) - windows.length
    loss_WS = loss_S[first:].reshape(-1, windows.length)
    logged_W = np.isfinite(loss_WS).sum(-1)
    if not logged_W.all():
        return f"{name} has windows of {windows.length} steps without a finite loss; set trainer.steps_per_log to 1"
    values = loss_WS[np.isfinite(loss_WS)]
    # Neighbouring steps share everything but the noise of their batches, so the variance of the noise is
    # half the variance of their differences.
    noise = float(np.std(np.diff(np.log(values))) / np.sqrt(2))
    return RungCurve(name, size, plan, windows, np.nanmean(loss_WS, -1), noise)
