"""The protocol of a tracker, and several trackers as one."""

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
    """The facts about a run that a tracker needs when it is opened."""

    dir: Path
    """The run directory; it exists."""
    id: str
    resume_step: int
    """Steps that are done and stay: later ones that were logged come again. 0: all of them come again."""
    series: Mapping[str, Plain] = field(default_factory=dict)
    """By the name of a file of the run, the lines that it must have: those that were there when the checkpoint of
    `resume_step` was saved."""


class Tracker(Protocol):
    """A destination of metrics.

    Steps count optimizer steps that are done, from 0. They never decrease while a tracker is open, but the same step
    may be logged more than once, with other metrics. All methods are called from one thread. Every method may raise:
    the tracker is then reported and switched off, and training goes on.
    """

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Values of this step: Python floats and ints, possibly NaN or infinite."""
        ...

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        """Texts that belong to a step as its metrics do, such as a fingerprint."""
        ...

    def log_config(self, config: Mapping[str, Any]) -> None:
        """The resolved configuration, as plain values that JSON can hold."""
        ...

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Facts about the run as a whole; later calls add to and replace earlier ones."""
        ...

    def log_text(self, name: str, text: str, *, step: int) -> None: ...

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        """`counts` (int64 [bins]) of values between neighbours of `edges` (float64 [bins + 1], finite, ascending)."""
        ...

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        """An alert of the run, such as `loss_spike`, for the people who watch it."""
        ...

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        """A file or directory that belongs to the run and is complete; the same name again is a newer version.

        Args:
            name: such as `config`, of letters, digits, `.`, `_` and `-`.
            path: it exists, and may change or go once this returns.
            type: its kind, such as `config`, `environment`, `program` or `profile`.
        """
        ...

    def lacks(self, lines: Mapping[str, Series]) -> Missing:
        """The lines that it should have and had not when it was opened; empty where that cannot be found out.

        Args:
            lines: by file, the lines of steps that are done which the run's own files have.
        """
        ...

    def put_back(self, records: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Takes the lines that it lacks: by file of the run, records of steps that are done, in order."""
        ...

    def sync(self) -> None:
        """Returns when what was logged would outlast a power cut, as far as it is kept on this machine: a checkpoint is
        about to appear, whose steps will not be logged again.
        """
        ...

    def close(self) -> None:
        """Writes out everything that is still buffered."""
        ...


class RunFile(Tracker, Protocol):
    """The tracker that every run has: its own file."""

    def records(self, file: str) -> Sequence[Mapping[str, Any]]:
        """The records of one of the files, in order."""
        ...

    @property
    def lines(self) -> Mapping[str, Plain]:
        """The lines that each file had when it was opened."""
        ...

    @property
    def series(self) -> Mapping[str, Plain]:
        """The lines of each file, for `TrackedRun.series` of the next attempt."""
        ...

    @property
    def gaps(self) -> Sequence[str]:
        """A line for people about each file that lacks lines which it must have."""
        ...


class TrackerConfig(Config):
    """An entry of `trainer.tracker`; each kind adds its `type` and fields."""

    @abstractmethod
    def open(self, run: TrackedRun) -> Tracker:
        """Starts or resumes tracking `run`.

        Raises:
            UserError: when the user has to change something first: a missing package, an unwritable directory.
        """


def require_package(package: str, extra: str) -> None:
    """Checks, in the validator of a tracker's configuration, that its package is installed.

    Raises:
        ValueError: when it is not, naming the extra that installs it.
    """
    # Without importing it, which takes seconds for some.
    if find_spec(package) is None:
        raise ValueError(
            f"the package {package} is not installed; run `pip install 'lm_trainer[{extra}]'`, or choose another "
            f"tracker, for example `type: tensorboard`"
        )


class Composite:
    """The file that every run writes and the configured trackers, as one.

    The file must succeed: its errors go to the caller. A tracker that raises is reported once and dropped.

    Attributes:
        notes: lines for people about trackers that had to catch up.
    """

    def __init__(self, always: RunFile, others: Sequence[tuple[str, Tracker]]):
        self._always = always
        self._others = list(others)
        self.notes: list[str] = []

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Records the values of a step; scalars of NumPy and JAX are accepted, and waited for.

        Raises:
            TypeError: for a value that is not one number.
            MachineError: when the run's own file cannot be written.
        """
        numbers = {name: as_number(name, value) for name, value in metrics.items()}
        self._each(lambda tracker: tracker.log(numbers, step=step))

    def log_record(self, record: Mapping[str, str], *, step: int) -> None:
        """Records texts that belong to a step, such as a fingerprint.

        Raises:
            MachineError: when the file cannot be written.
        """
        self._each(lambda tracker: tracker.log_record(record, step=step))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Records the resolved configuration; passwords inside URLs are blanked."""
        clean = without_credentials(as_plain(config))
        self._each(lambda tracker: tracker.log_config(clean))

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Records facts about the run as a whole; scalars of NumPy and JAX are accepted."""
        clean = without_credentials(as_plain(summary))
        self._each(lambda tracker: tracker.log_summary(clean))

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Records a text, such as a sample of the model."""
        self._each(lambda tracker: tracker.log_text(name, text, step=step))

    def log_histogram(self, name: str, counts: np.ndarray, edges: np.ndarray, *, step: int) -> None:
        """Records a histogram; arguments as for `Tracker`.

        Raises:
            MachineError: when the run's own file cannot be written.
        """
        self._each(lambda tracker: tracker.log_histogram(name, counts, edges, step=step))

    def log_alert(self, kind: str, message: str, *, step: int) -> None:
        """Records an alert, and has services that can tell people do so; arguments as for `Tracker`.

        Raises:
            MachineError: when the run's own file cannot be written.
        """
        self._each(lambda tracker: tracker.log_alert(kind, message, step=step))

    def log_artifact(self, name: str, path: Path, *, type: str) -> None:
        """Hands a file or directory of the run to the trackers that keep such; arguments as for `Tracker`.

        Other characters of the name become `-`.
        """
        clean = re.sub(r"[^A-Za-z0-9._-]", "-", name)
        self._each(lambda tracker: tracker.log_artifact(clean, path, type=type))

    def catch_up(self) -> None:
        """Hands each tracker the lines that it lacks of steps that are done, and notes which."""
        for name, tracker in tuple(self._others):
            self._try(name, tracker, lambda tracker, name=name: self._note(catch_up(name, tracker, self._always)))

    def _note(self, note: str | None) -> None:
        self.notes += [note] if note else []

    def sync(self) -> Mapping[str, Plain]:
        """Puts on disk what was logged, before a checkpoint appears; returns what the checkpoint is to remember of it.

        Raises:
            MachineError: when the run's own files cannot be written, or are gone.
        """
        self._each(lambda tracker: tracker.sync())
        return self._always.series

    @property
    def gaps(self) -> Sequence[str]:
        """A line for people about each of the run's own files that lacks lines of steps that are done."""
        return self._always.gaps

    def close(self) -> None:
        """Closes every tracker, even where one of them fails; safe to call twice."""
        others, self._others = self._others, []
        try:
            for name, tracker in others:
                try:
                    tracker.close()
                except Exception as error:
                    report(name, error)
        finally:
            self._always.close()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        # First the file: it is complete even if a tracker hangs. A copy of the list, because failing trackers leave it.
        call(self._always)
        for name, tracker in tuple(self._others):
            self._try(name, tracker, call)

    def _try(self, name: str, tracker: Tracker, call: Callable[[Tracker], None]) -> None:
        try:
            call(tracker)
        except Exception as error:
            self._others.remove((name, tracker))
            report(name, error)
            with contextlib.suppress(Exception):
                tracker.close()


def report(name: str, error: Exception) -> None:
    """Reports in one line that a tracker is switched off; the traceback comes at level DEBUG."""
    reason = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    logger.warning("the %s tracker failed and is switched off, training goes on: %s", name, reason)
    logger.debug("what the %s tracker raised", name, exc_info=error)


def as_number(name: str, value: Any) -> float | int:
    """Converts a Python, NumPy or JAX scalar to a Python number; a float keeps its exact value.

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
    # `item` of a bfloat16 is no Python float.
    if type(value).__module__ == "ml_dtypes":
        return float(value)
    raise TypeError(f"metric {name!r}: expected a number, got {type(value).__name__}: {value!r}"[:200])


def as_plain(value: Any) -> Any:
    """Converts a value to one that JSON can hold: scalars to numbers, containers element by element, others to text."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): as_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_plain(v) for v in value]
    try:
        return as_number("", value)
    except TypeError:
        return str(value)
