"""Lines of steps that are done, handed to a tracker that has not got them: its process was killed, or it was switched
off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_trainer.trackers.json_lines import HISTOGRAMS, METRICS, TEXTS, decode
from lm_trainer.trackers.series import Series, describe, line_name

if TYPE_CHECKING:
    from lm_trainer.trackers.base import RunFile, Tracker

FINGERPRINT = "fingerprint"
"""The name of lines that are no numbers, which services do not take."""

Missing = Mapping[str, Mapping[str, Collection[int]]]
"""File -> name of the line -> steps."""


def catch_up(name: str, tracker: Tracker, own: RunFile) -> str | None:
    """Hands a tracker the lines that it lacks of those of the run's own files.

    Returns:
        A line for people that names them; None where nothing is missing.
    """
    missing = tracker.lacks({file: Series(plain) for file, plain in own.lines.items()})
    if not missing:
        return None
    tracker.put_back(
        {
            file: [record for record in own.records(file) if record["step"] in lost.get(line_name(record), ())]
            for file, lost in missing.items()
        }
    )
    named = [f"{kind} of {describe(sorted(steps))}" for lost in missing.values() for kind, steps in lost.items()]
    shown = "; ".join(named[:6]) + (f"; {len(named) - 6} more" if len(named) > 6 else "")
    return f"the {name} tracker lacked lines of steps that are done, and now has them from {METRICS}: {shown}"


def lacking(lines: Mapping[str, Series], there: Mapping[str, Iterable[int]]) -> Missing:
    """The lines that a service lacks.

    Args:
        lines: by file, those that it should have.
        there: the steps of each of its metrics, texts and histograms, in any order.
    """
    wanted = {file: {name: {*series.steps(name)} for name in series.names} for file, series in lines.items()}
    missing = {
        file: {
            name: lost
            for name, steps in names.items()
            if name != FINGERPRINT and (lost := steps.difference(there.get(name, ())))
        }
        for file, names in wanted.items()
    }
    return {file: names for file, names in missing.items() if names}


def log_again(tracker: Tracker, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Logs records of the run's files, by file, as they were logged first: step by step."""
    every = ((file, record) for file, of_file in records.items() for record in of_file)
    for file, record in sorted(every, key=lambda line: line[1]["step"]):
        step, content = record["step"], {k: decode(v) for k, v in record.items() if k not in ("step", "time")}
        if file == TEXTS:
            tracker.log_text(content["name"], content["text"], step=step)
        elif file == HISTOGRAMS:
            counts, edges = np.array(content["counts"], np.int64), np.array(content["edges"], np.float64)
            tracker.log_histogram(content["name"], counts, edges, step=step)
        else:
            tracker.log(content, step=step)
