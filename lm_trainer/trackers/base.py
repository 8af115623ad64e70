"""The tracker protocol, and a composite of several trackers."""

from __future__ import annotations

import contextlib
import logging
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lm_trainer.core.config import Config
from lm_trainer.core.credentials import without_credentials
from lm_trainer.trackers.catch_up import Missing, catch_up
from lm_trainer.trackers.series import Plain, Series

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """Information about a run that is needed to open a tracker."""

    dir: Path
    """The run directory, which must exist."""
    id: str
    resume_step: int
    """Number of completed steps whose logs are kept. Later steps are logged a second time. 0 means that no steps are
    kept."""
    series: Mapping[str, Plain] = field(default_factory=dict)
    """Expected lines in each file of the run, by file name: those that existed when the checkpoint of `resume_step` was
    saved."""


class Tracker(Protocol):
    """A destination of metrics.

    A step is the number of completed optimizer steps, starting from 0. Steps never decrease while a tracker is open,
    but the same step may be logged more than once with different metrics. All methods are called in the same thread. If
    a method raises an exception, the tracker is reported and switched off, and training continues.
    """

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Logs metrics of a step, which are Python floats and ints and may be NaN or infinite."""
        ...

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        """Logs strings of a step, such as a fingerprint."""
        ...

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Logs the resolved configuration, as JSON-compatible values."""
        ...

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Logs facts about the entire run. Later calls add values and replace earlier values of the same name."""
        ...

    def log_text(self, name: str, text: str, *, step: int) -> None: ...

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        """Logs a histogram.

        Args:
            name: name of the histogram.
            counts: number of values in each bin, int64 [bins].
            edges: edges of the bins in ascending order, float64 [bins + 1], all finite.
            step: number of completed steps.
        """
        ...

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        """Logs an alert of the run, such as `loss_spike`, for the people who watch it."""
        ...

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        """Logs a complete file or directory of the run. Logging the same name a second time creates a newer version.

        Args:
            name: name of the artifact, such as `config`. It consists of letters, digits, `.`, `_` and `-`.
            path: path of the file or directory, which may change or disappear after this call.
            type: kind of the artifact, such as `config`, `environment`, `program` or `profile`.
        """
        ...

    def missing_lines(self, lines: Mapping[str, Series]) -> Missing:
        """Returns the expected lines that were missing when the tracker was opened.

        The result is empty if this cannot be determined.

        Args:
            lines: the lines of completed steps in the run's own files, by file name.
        """
        ...

    def insert_missing(self, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Inserts missing lines.

        Args:
            records: maps each file name to its records of completed steps, in the order of the steps.
        """
        ...

    def sync(self) -> None:
        """Flushes the logged data on this machine to disk, so that it survives a power cut.

        This method is called before a checkpoint is committed, because the steps up to the checkpoint are not logged a
        second time.
        """
        ...

    def close(self) -> None:
        """Writes out all buffered data."""
        ...


class RunFile(Tracker, Protocol):
    """The tracker that every run has, which writes the run's own files."""

    def read_records(self, file: str) -> Sequence[Mapping[str, Any]]:
        """Returns the records in one of the files, in order."""
        ...

    @property
    def lines(self) -> Mapping[str, Plain]:
        """Lines that each file contained when it was opened, by file name."""
        ...

    @property
    def series(self) -> Mapping[str, Plain]:
        """Lines of each file by file name, for `TrackedRun.series` of the next attempt."""
        ...

    @property
    def gaps(self) -> Sequence[str]:
        """Messages about the files with missing lines, one per file."""
        ...


class TrackerConfig(Config):
    """An entry of `trainer.tracker`. Each kind of tracker adds its `type` and its own fields."""

    @abstractmethod
    def open(self, run: TrackedRun) -> Tracker:
        """Starts or resumes tracking `run`.

        Raises:
            UserError: if the user has to change something first, for example install a package or make a directory
                writable.
        """


def require_package(package: str, extra: str) -> None:
    """Checks that a package is installed. Called in the validator of a tracker's configuration.

    Raises:
        ValueError: if the package is missing. The message names the extra of lm_trainer to install.
    """
    # Does not import the package, because that takes seconds for some packages.
    if find_spec(package) is None:
        raise ValueError(
            f"the package {package} is not installed; run `pip install 'lm_trainer[{extra}]'`, or choose another "
            f"tracker, for example `type: tensorboard`"
        )


class Composite:
    """Combines the run's own files and the configured trackers in one tracker.

    Errors of the run's own files are raised to the caller. If another tracker raises an exception, it is reported once
    and dropped.

    Attributes:
        notes: messages about trackers into which missing lines were inserted.
    """

    def __init__(self, run_file: RunFile, trackers: Sequence[tuple[str, Tracker]]):
        self._run_file = run_file
        self._trackers = list(trackers)
        self.notes: list[str] = []

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Records the metrics of a step.

        Scalars of NumPy and JAX are accepted; for JAX arrays this waits for the device.

        Raises:
            TypeError: for a value that is not a single number.
            MachineError: if the run's own file cannot be written.
        """
        numbers = {name: to_number(name, value) for name, value in metrics.items()}
        self._call_each_tracker(lambda tracker: tracker.log(numbers, step=step))

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        """Records strings of a step, such as a fingerprint.

        Raises:
            MachineError: if the run's own file cannot be written.
        """
        self._call_each_tracker(lambda tracker: tracker.log_record(record, step=step))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Records the resolved configuration, with the passwords inside URLs removed."""
        clean = without_credentials(to_json_value(config))
        self._call_each_tracker(lambda tracker: tracker.log_config(clean))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Records facts about the entire run. Scalars of NumPy and JAX are accepted."""
        clean = without_credentials(to_json_value(summary))
        self._call_each_tracker(lambda tracker: tracker.log_summary(clean))

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Records a text, such as a sample that the model has generated."""
        self._call_each_tracker(lambda tracker: tracker.log_text(name, text, step=step))

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        """Records a histogram. The arguments are the same as for `Tracker`.

        Raises:
            MachineError: if the run's own file cannot be written.
        """
        self._call_each_tracker(lambda tracker: tracker.log_histogram(name, counts, edges, step=step))

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        """Records an alert, which some services also send as a notification.

        The arguments are the same as for `Tracker`.

        Raises:
            MachineError: if the run's own file cannot be written.
        """
        self._call_each_tracker(lambda tracker: tracker.log_alert(kind, message, step=step))

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        """Passes a file or directory of the run to the trackers that store artifacts.

        The arguments are the same as for `Tracker`, except that `name` may contain any characters. Those that trackers
        do not allow become `-`.
        """
        clean = re.sub(r"[^A-Za-z0-9._-]", "-", name)
        self._call_each_tracker(lambda tracker: tracker.log_artifact(clean, path, type=type))

    def catch_up(self) -> None:
        """Inserts the missing lines of completed steps into each tracker, and adds a note about them."""
        for name, tracker in tuple(self._trackers):
            self._call_or_remove(
                name, tracker, lambda tracker, name=name: self._note(catch_up(name, tracker, self._run_file))
            )

    def _note(self, note: str | None) -> None:
        self.notes += [note] if note else []

    def sync(self) -> Mapping[str, Plain]:
        """Flushes logged data to disk before a checkpoint is committed. Returns the lines to record in the checkpoint.

        Raises:
            MachineError: if the run's own files cannot be written, or were removed.
        """
        self._call_each_tracker(lambda tracker: tracker.sync())
        return self._run_file.series

    @property
    def gaps(self) -> Sequence[str]:
        """Messages about the run's own files in which lines of completed steps are missing, one per file."""
        return self._run_file.gaps

    def close(self) -> None:
        """Closes every tracker, even if one of them fails. Calling it twice is safe."""
        trackers, self._trackers = self._trackers, []
        try:
            for name, tracker in trackers:
                try:
                    tracker.close()
                except Exception as error:
                    report_failure(name, error)
        finally:
            self._run_file.close()

    def _call_each_tracker(self, call: Callable[[Tracker], None]) -> None:
        # The run's own file comes first, so that it is complete even if a tracker hangs. The loop uses a copy of the
        # list, because trackers that fail are removed from it.
        call(self._run_file)
        for name, tracker in tuple(self._trackers):
            self._call_or_remove(name, tracker, call)

    def _call_or_remove(self, name: str, tracker: Tracker, call: Callable[[Tracker], None]) -> None:
        try:
            call(tracker)
        except Exception as error:
            self._trackers.remove((name, tracker))
            report_failure(name, error)
            with contextlib.suppress(Exception):
                tracker.close()


def report_failure(name: str, error: Exception) -> None:
    """Reports in one line that a tracker is switched off. The traceback is logged at level DEBUG."""
    reason = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    logger.warning("the %s tracker failed and is switched off, training goes on: %s", name, reason)
    logger.debug("what the %s tracker raised", name, exc_info=error)


def to_number(name: str, value: Any) -> float | int:
    """Converts a Python, NumPy or JAX scalar to a Python number. Floats keep their exact value.

    Raises:
        TypeError: for anything else.
    """
    # `item` of a JAX array waits for the device.
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "size", 1) == 1:
        value = item()
    # A bool is an int in Python, but some trackers would show it as text.
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        return value
    # `item` of a bfloat16 array does not return a Python float.
    if type(value).__module__ == "ml_dtypes":
        return float(value)
    raise TypeError(f"metric {name!r}: expected a number, got {type(value).__name__}: {value!r}"[:200])


def to_json_value(value: Any) -> Any:
    """Converts a value for JSON.

    Scalars become numbers, containers are converted recursively, and other values become text.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json_value(v) for v in value]
    try:
        return to_number("", value)
    except TypeError:
        return str(value)
