"""The tracker protocol, and the composite of several trackers."""

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
    """Facts about a run for opening a tracker."""

    dir: Path
    """The run directory; it exists."""
    id: str
    resume_step: int
    """Finished steps to keep: later steps in the logs are logged a second time. 0 means all are."""
    series: Mapping[str, Plain] = field(default_factory=dict)
    """Expected lines by file name of the run: the lines present when the checkpoint of `resume_step` was saved."""


class Tracker(Protocol):
    """A destination of metrics.

    Steps count finished optimizer steps, from 0. They never decrease while a tracker is open, but the same step may be
    logged more than once, with other metrics. All methods are called from one thread. Every method may raise: the
    tracker is then reported and switched off, and training continues.
    """

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Logs values of this step: Python floats and ints, possibly NaN or infinite."""
        ...

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        """Logs strings of a step, such as a fingerprint."""
        ...

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Logs the resolved configuration, as JSON-compatible values."""
        ...

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Logs facts about the entire run; later calls add to and replace earlier ones."""
        ...

    def log_text(self, name: str, text: str, *, step: int) -> None: ...

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        """Logs `counts` (int64 [bins]) between neighbouring `edges` (float64 [bins + 1], finite, ascending)."""
        ...

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        """Logs an alert of the run, such as `loss_spike`, for the people who watch it."""
        ...

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        """Logs a complete file or directory of the run; logging the same name twice creates a newer version.

        Args:
            name: such as `config`, of letters, digits, `.`, `_` and `-`.
            path: an existing path, which may change or disappear after this call.
            type: its kind, such as `config`, `environment`, `program` or `profile`.
        """
        ...

    def missing_lines(self, lines: Mapping[str, Series]) -> Missing:
        """The expected lines that were missing when the tracker was opened; empty if this cannot be determined.

        Args:
            lines: by file, the lines of finished steps in the run's own files.
        """
        ...

    def insert_missing(self, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Inserts missing lines: by file of the run, records of finished steps, in order."""
        ...

    def sync(self) -> None:
        """Flushes logged data to disk, to survive a power cut, as far as it is kept on this machine.

        Called before a checkpoint appears, after which these steps will not be logged a second time.
        """
        ...

    def close(self) -> None:
        """Writes out all buffered data."""
        ...


class RunFile(Tracker, Protocol):
    """The tracker of every run: its own files."""

    def read_records(self, file: str) -> Sequence[Mapping[str, Any]]:
        """The records of one of the files, in order."""
        ...

    @property
    def lines(self) -> Mapping[str, Plain]:
        """The lines of each file at opening."""
        ...

    @property
    def series(self) -> Mapping[str, Plain]:
        """The lines of each file, for `TrackedRun.series` of the next attempt."""
        ...

    @property
    def gaps(self) -> Sequence[str]:
        """A message about each file with missing lines."""
        ...


class TrackerConfig(Config):
    """An entry of `trainer.tracker`; each kind adds its `type` and fields."""

    @abstractmethod
    def open(self, run: TrackedRun) -> Tracker:
        """Starts or resumes tracking `run`.

        Raises:
            UserError: if the user has to change something first: a missing package, an unwritable directory.
        """


def require_package(package: str, extra: str) -> None:
    """Checks, in the validator of a tracker's configuration, that its package is installed.

    Raises:
        ValueError: if it is missing; the message names the extra to install.
    """
    # Without importing it, which takes seconds for some packages.
    if find_spec(package) is None:
        raise ValueError(
            f"the package {package} is not installed; run `pip install 'lm_trainer[{extra}]'`, or choose another "
            f"tracker, for example `type: tensorboard`"
        )


class Composite:
    """The run's own files and the configured trackers, as one tracker.

    Errors of the run's own files are raised to the caller. Other trackers are reported once and dropped if they raise.

    Attributes:
        notes: messages about trackers with lines inserted later.
    """

    def __init__(self, run_file: RunFile, trackers: Sequence[tuple[str, Tracker]]):
        self._run_file = run_file
        self._trackers = list(trackers)
        self.notes: list[str] = []

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Records the values of a step; scalars of NumPy and JAX are accepted, and waited for.

        Raises:
            TypeError: for a value that is not a single number.
            MachineError: if the run's own file cannot be written.
        """
        numbers = {name: to_number(name, value) for name, value in metrics.items()}
        self._call_each_tracker(lambda tracker: tracker.log(numbers, step=step))

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        """Records strings of a step, such as a fingerprint.

        Raises:
            MachineError: if the file cannot be written.
        """
        self._call_each_tracker(lambda tracker: tracker.log_record(record, step=step))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Records the resolved configuration; passwords inside URLs are blanked."""
        clean = without_credentials(to_json_value(config))
        self._call_each_tracker(lambda tracker: tracker.log_config(clean))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Records facts about the entire run; scalars of NumPy and JAX are accepted."""
        clean = without_credentials(to_json_value(summary))
        self._call_each_tracker(lambda tracker: tracker.log_summary(clean))

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Records a text, such as a sample of the model."""
        self._call_each_tracker(lambda tracker: tracker.log_text(name, text, step=step))

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        """Records a histogram; arguments as for `Tracker`.

        Raises:
            MachineError: if the run's own file cannot be written.
        """
        self._call_each_tracker(lambda tracker: tracker.log_histogram(name, counts, edges, step=step))

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        """Records an alert, and sends it through services with notifications; arguments as for `Tracker`.

        Raises:
            MachineError: if the run's own file cannot be written.
        """
        self._call_each_tracker(lambda tracker: tracker.log_alert(kind, message, step=step))

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        """Passes a file or directory of the run to the trackers that store artifacts; arguments as for `Tracker`.

        Other characters of the name become `-`.
        """
        clean = re.sub(r"[^A-Za-z0-9._-]", "-", name)
        self._call_each_tracker(lambda tracker: tracker.log_artifact(clean, path, type=type))

    def catch_up(self) -> None:
        """Inserts missing lines of finished steps into each tracker, and adds a note about them."""
        for name, tracker in tuple(self._trackers):
            self._call_or_remove(
                name, tracker, lambda tracker, name=name: self._note(catch_up(name, tracker, self._run_file))
            )

    def _note(self, note: str | None) -> None:
        self.notes += [note] if note else []

    def sync(self) -> Mapping[str, Plain]:
        """Flushes logged data to disk before a checkpoint appears; returns the lines for the checkpoint to remember.

        Raises:
            MachineError: if the run's own files cannot be written, or were removed.
        """
        self._call_each_tracker(lambda tracker: tracker.sync())
        return self._run_file.series

    @property
    def gaps(self) -> Sequence[str]:
        """A message about each of the run's own files with missing lines of finished steps."""
        return self._run_file.gaps

    def close(self) -> None:
        """Closes every tracker, even if one of them fails; safe to call twice."""
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
        # The file first: it is complete even if a tracker hangs. A copy, because failing trackers are removed.
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
    """Reports in one line that a tracker is switched off; the traceback is logged at level DEBUG."""
    reason = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    logger.warning("the %s tracker failed and is switched off, training goes on: %s", name, reason)
    logger.debug("what the %s tracker raised", name, exc_info=error)


def to_number(name: str, value: Any) -> float | int:
    """Converts a Python, NumPy or JAX scalar to a Python number; floats keep their exact value.

    Raises:
        TypeError: for anything else.
    """
    # `item` of a JAX array waits for the device.
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "size", 1) == 1:
        value = item()
    # A bool is an int to Python, but some trackers would draw it as text.
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float):
        return value
    # `item` of a bfloat16 is not a Python float.
    if type(value).__module__ == "ml_dtypes":
        return float(value)
    raise TypeError(f"metric {name!r}: expected a number, got {type(value).__name__}: {value!r}"[:200])


def to_json_value(value: Any) -> Any:
    """Converts a value for JSON: scalars to numbers, containers element by element, anything else to text."""
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
