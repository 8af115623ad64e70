"""Sources of points and fits: a ladder's directory, a table of points, or a saved fit."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.ladder.checkpoints import find_checkpoints
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.fit.fitting import Fit, fit, from_dict, is_fit
from lm_trainer.ladder.fit.points import Points, points_from_rows, read_table
from lm_trainer.ladder.fit.same_conditions import code_notes
from lm_trainer.ladder.metrics import collect_rows
from lm_trainer.ladder.rungs import run_name


def ladder_points(
    ladder: LadderConfig,
    *,
    metric: str | None = None,
    task: str | None = None,
    pre_decay: bool = False,
    without: Sequence[str] = (),
) -> Points:
    """Returns the points of a ladder's runs, as `points_from_rows`. Their notes name rungs without a measurement.

    Args:
        ladder: the ladder.
        metric: name of the loss column.
        task: name of a column with an accuracy.
        pre_decay: keeps measurements from before a decay.
        without: sizes to leave out.

    Raises:
        UserError: for the same reasons as in `lm_trainer.ladder.metrics.collect_rows`, or if there is no measurement.
    """
    rows = [row for size in ladder.sizes for row in collect_rows(ladder, size)]
    if not rows:
        raise UserError(f"{ladder.dir} has no metrics of ladder {ladder.name} yet; run it with: lmt ladder run")
    for size in without:
        if size not in ladder.sizes:
            raise UserError(f"--without {size}: the ladder has {', '.join(ladder.sizes)}")
    points = points_from_rows(
        rows, source=ladder.dir, metric=metric, task=task, pre_decay=pre_decay, without=[s for s in without if s]
    )
    measured = {(row["size"], row["seed"], row["step"]) for row in rows if row.get(points.metric) is not None}
    missing = [
        f"{run_name(ladder, size, seed)} {checkpoint.name.removesuffix(' post-decay').split(', ')[-1]}"
        for size in ladder.sizes
        if size not in without
        for seed in ladder.seeds
        for checkpoint in find_checkpoints(ladder, size, seed=seed)
        if checkpoint.name.endswith("post-decay") and (size, seed, checkpoint.step) not in measured
    ]
    notes = (f"rungs without {points.metric}: {', '.join(missing)}",) if missing else ()
    return Points(**{**vars(points), "notes": (*points.notes, *notes, *code_notes(ladder))})


def table_points(
    path: AnyPath,
    *,
    metric: str | None = None,
    task: str | None = None,
    pre_decay: bool = False,
    without: Sequence[str] = (),
) -> Points:
    """Returns the points in a CSV, JSON or Parquet file, as `points_from_rows`."""
    rows = read_table(path)
    return points_from_rows(rows, source=str(path), metric=metric, task=task, pre_decay=pre_decay, without=without)


def read_fit(path: AnyPath) -> Fit | None:
    """Reads a fit that was written by `lmt ladder fit --out`. Returns None for any other file.

    Raises:
        UserError: if the fit is damaged.
    """
    path = local_path(path)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        plain = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return from_dict(plain, str(path)) if is_fit(plain) else None


def read_or_fit(path: AnyPath) -> Fit:
    """Reads a saved fit, or fits a table of points with default settings."""
    return read_fit(path) or fit(table_points(path))
