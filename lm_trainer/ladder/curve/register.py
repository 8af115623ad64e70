"""Curves that are registered before a run, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.core.registration import write_registered
from lm_trainer.core.safe_names import path_inside
from lm_trainer.health.alerts.predicted_curve import (
    CURVE_FORMAT,
    CurveScore,
    RegisteredCurve,
    read_curve,
    score_curve,
)
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.curve.fitting import CurveFit
from lm_trainer.ladder.curve.predict import CurvePrediction
from lm_trainer.ladder.metrics import check_owner
from lm_trainer.ladder.rungs import run_folder
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.records import RUN
from lm_trainer.trackers.jsonl import METRICS
from lm_trainer.trackers.metric_columns import read_metric_columns


def curve_path(ladder: LadderConfig, size: str) -> Path:
    """Returns the path of the file for the predicted curve of a size.

    Raises:
        UserError: if there is no such size, or its name would lead out of the directory of curves.
    """
    ladder.model_configurator.check(size)
    return path_inside(local_path(ladder.dir) / "predictions" / "curves", f"{size}.json", "model_configurator")


def refuse_started_run(config: RunConfig) -> None:
    """Raises `UserError` if a run with this configuration has started."""
    folder = local_path(config.trainer.log_dir) / (config.trainer.id or "run")
    if (folder / RUN).exists():
        raise UserError(
            f"{folder} has been started, and a prediction has to be written before; give the run another trainer.id"
        )


def write_curve(path: AnyPath, fit: CurveFit, prediction: CurvePrediction) -> str:
    """Writes a predicted curve with the time, the law and a hash over all of these. Returns the hash.

    Raises:
        UserError: if the file exists.
    """
    content = {
        **prediction.as_dict(),
        "identity": prediction.run.identity,
        "fit": fit.as_dict(),
    }
    return write_registered(path, CURVE_FORMAT, content)


def score_curves(ladder: LadderConfig) -> list[tuple[RegisteredCurve, CurveScore]]:
    """Returns every registered curve of the ladder's sizes, compared with the run of the first seed.

    Raises:
        UserError: if a prediction was changed after registration, or a run is of another ladder.
    """
    scores = []
    for path in sorted((local_path(ladder.dir) / "predictions" / "curves").glob("*.json")):
        registered = read_curve(path)
        folder = run_folder(ladder, path.stem)
        empty: Sequence[float] = ()
        steps, losses = read_metric_columns(folder / METRICS).curves.get(
            registered.curve.metric, (np.array(empty), np.array(empty))
        )
        if len(steps):
            check_owner(ladder, path.stem, ladder.seed, folder)
        scores.append((registered, score_curve(registered.curve, steps, losses)))
    return scores
