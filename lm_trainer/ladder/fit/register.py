"""Predictions that are registered before a run starts, and their scores after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.core.registration import read_registered, write_registered
from lm_trainer.core.safe_names import path_inside
from lm_trainer.ladder.checkpoints import find_checkpoints
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.fit.fitting import Fit
from lm_trainer.ladder.fit.predict import Prediction, Range
from lm_trainer.ladder.metrics import collect_rows
from lm_trainer.ladder.rungs import count_params, run_folder

_FORMAT = "lm_trainer ladder prediction 1"


@dataclass(frozen=True)
class ScoredPrediction:
    """A registered prediction of one measurement, and the measurement itself."""

    name: str
    written: str
    """Time of registration, ISO 8601 in UTC."""
    metric: str
    predicted: Range
    level: float
    measured: float | None
    """Measured loss; None until the run reaches the checkpoint."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; positive if the prediction was too high."""
        return None if self.measured is None else self.predicted.value / self.measured - 1

    def line(self) -> str:
        """Formats the score as a line for the terminal."""
        predicted = f"{self.name}: {self.metric} predicted {self.predicted.value:.4f} ({self.predicted.low:.4f} to "
        predicted += f"{self.predicted.high:.4f}) on {self.written[:10]}"
        if self.measured is None or self.error is None:
            return f"{predicted}, not measured yet"
        verdict = "inside" if self.predicted.contains(self.measured) else "outside"
        return f"{predicted}, measured {self.measured:.4f}: {self.error:+.2%}, {verdict} the {self.level:.0%} interval"

    def as_dict(self) -> dict[str, Any]:
        """Returns the score as plain data."""
        return {**vars(self), "predicted": vars(self.predicted), "error": self.error}


def targets_to_predict(ladder: LadderConfig, size_spec: str) -> list[tuple[str, int, int]]:
    """Lists the checkpoints of a size to predict: (name, number of parameters, number of tokens) after each decay.

    Raises:
        UserError: if a run of this size has already started.
    """
    for seed in ladder.seeds:
        folder = run_folder(ladder, size_spec, seed)
        if (folder / "run.json").exists():
            raise UserError(
                f"{folder} has been started, and a prediction has to be written before; register one of a size that "
                "has not been run"
            )
    num_params = count_params(ladder, size_spec)
    return [
        (f"{size_spec} {checkpoint.name.removesuffix(' post-decay').split(', ')[-1]}", num_params, checkpoint.tokens)
        for checkpoint in find_checkpoints(ladder, size_spec)
        if checkpoint.name.endswith("post-decay")
    ]


def registration_path(ladder: LadderConfig, size_spec: str) -> Path:
    """Returns the path of the file for the prediction of a size.

    Raises:
        UserError: if the name of the size would lead out of the directory of predictions.
    """
    return path_inside(local_path(ladder.dir) / "predictions", f"{size_spec}.json", "model_configurator")


def write_registration(
    path: AnyPath, fit: Fit, predictions: Sequence[tuple[str, Prediction]], *, size: str | None = None
) -> str:
    """Writes predictions with the time, their fit and a hash over all of these. Returns the hash.

    Raises:
        UserError: if the file exists.
    """
    content = {
        "size": size,
        "predictions": [{"name": name, **prediction.as_dict()} for name, prediction in predictions],
        "fit": {"sha256": fit.digest(), "law": fit.law.as_dict(), "points": fit.points.as_dict()},
    }
    return write_registered(path, _FORMAT, content)


def read_registration(path: AnyPath) -> dict[str, Any]:
    """Reads a registered prediction.

    Raises:
        UserError: if the file is not a registered prediction, or was changed after registration.
    """
    return read_registered(path, _FORMAT)


def score_registrations(ladder: LadderConfig) -> list[ScoredPrediction]:
    """Returns every registered prediction of the ladder with its measurement, one entry per seed.

    Raises:
        UserError: if a prediction was changed after registration.
    """
    results = []
    for path in sorted((local_path(ladder.dir) / "predictions").glob("*.json")):
        content = read_registration(path)
        size = content["size"]
        rows = collect_rows(ladder, size) if size else []
        for item in content["predictions"]:
            measured_rows = [row for row in rows if row["tokens"] == item["tokens"] and item["metric"] in row]
            written = content["written"]
            # Each seed is a separate measurement. Without any measurement, the prediction is shown as open.
            for row in measured_rows or [None]:
                name = item["name"] + (f" seed {row['seed']}" if row and ladder.num_seeds > 1 else "")
                measured = float(row[item["metric"]]) if row else None
                results.append(
                    ScoredPrediction(name, written, item["metric"], Range(**item["run"]), item["level"], measured)
                )
    return results
