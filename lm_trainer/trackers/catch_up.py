"""Inserts lines of completed steps that a tracker is missing because its process was killed or it was switched off."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_trainer.trackers.json_lines import HISTOGRAMS, METRICS, TEXTS, decode_non_finite
from lm_trainer.trackers.series import Series, format_steps, line_name

if TYPE_CHECKING:
    from lm_trainer.trackers.base import RunFile, Tracker

FINGERPRINT = "fingerprint"
"""Name of the lines with a fingerprint, which are not numeric and which services do not accept."""

Missing = Mapping[str, Mapping[str, Collection[int]]]
"""Steps of the missing lines, by file name and by name of the line."""


def catch_up(name: str, tracker: Tracker, run_file: RunFile) -> str | None:
    """Inserts the lines of the run's own files that a tracker is missing.

    Args:
        name: name of the tracker.
        tracker: the tracker.
        run_file: the run's own files.

    Returns:
        A message that names the inserted lines; None if the tracker is complete.
    """
    missing = tracker.missing_lines({file: Series(plain) for file, plain in run_file.lines.items()})
    if not missing:
        return None
    tracker.insert_missing(
        {
            file: [
                record for record in run_file.read_records(file) if record["step"] in names.get(line_name(record), ())
            ]
            for file, names in missing.items()
        }
    )
    descriptions = [
        f"{kind} of {format_steps(sorted(steps))}" for names in missing.values() for kind, steps in names.items()
    ]
    summary = "; ".join(descriptions[:6]) + (f"; {len(descriptions) - 6} more" if len(descriptions) > 6 else "")
    return f"the {name} tracker lacked lines of steps that are done, and now has them from {METRICS}: {summary}"


def find_missing_lines(lines: Mapping[str, Series], recorded: Mapping[str, Iterable[int]]) -> Missing:
    """Returns the lines that are missing in a tracking service.

    Args:
        lines: the expected lines, by file name.
        recorded: the steps that the service has recorded of each metric, text and histogram, in any order.
    """
    expected = {file: {name: {*series.steps(name)} for name in series.names} for file, series in lines.items()}
    missing = {
        file: {
            name: absent
            for name, steps in names.items()
            if name != FINGERPRINT and (absent := steps.difference(recorded.get(name, ())))
        }
        for file, names in expected.items()
    }
    return {file: names for file, names in missing.items() if names}


def log_records(tracker: Tracker, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Logs records of the run's files in their original order, which is by step.

    Args:
        tracker: the tracker that receives the records.
        records: records by file name.
    """
    lines = ((file, record) for file, file_records in records.items() for record in file_records)
    for file, record in sorted(lines, key=lambda line: line[1]["step"]):
        step = record["step"]
        content = {k: decode_non_finite(v) for k, v in record.items() if k not in ("step", "time")}
        if file == TEXTS:
            tracker.log_text(content["name"], content["text"], step=step)
        elif file == HISTOGRAMS:
            counts, edges = np.array(content["counts"], np.int64), np.array(content["edges"], np.float64)
            tracker.log_histogram(content["name"], counts, edges, step=step)
        else:
            tracker.log(content, step=step)
