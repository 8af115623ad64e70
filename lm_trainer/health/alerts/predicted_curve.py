"""A loss curve that was predicted and registered before a run, and its comparison with the run.

Shape letters: W is the number of windows of the curve, N the number of logged steps.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath
from lm_trainer.core.registration import read_registered

CURVE_FORMAT = "lm_trainer ladder curve 1"


@dataclass(frozen=True)
class PredictedCurve:
    """Predicted means of a metric over windows of steps, with their band."""

    metric: str
    level: float
    """Fraction of the windows of a run that the band is expected to contain, each by itself."""
    window: int
    """Number of steps in each window."""
    last_steps: Sequence[int]
    """Last step of each window, counted from 1, in ascending order (W,)."""
    value: Sequence[float]
    """Predicted mean of each window (W,)."""
    low: Sequence[float]
    """Lower end of the band (W,)."""
    high: Sequence[float]
    """Upper end of the band (W,)."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the curve as JSON values."""
        return asdict(self)

    def window_of(self, step: int) -> int | None:
        """Returns the index of the window that contains a step, counted from 1; None outside of all windows."""
        index = bisect.bisect_left(self.last_steps, step)
        if index == len(self.last_steps) or step <= self.last_steps[index] - self.window:
            return None
        return index

    def contains(self, index: int, mean: float) -> bool:
        """Returns True if the mean of a window is in the band."""
        # False for NaN.
        return self.low[index] <= mean <= self.high[index]


@dataclass(frozen=True)
class RegisteredCurve:
    """A predicted curve with its registration."""

    curve: PredictedCurve
    written: str
    """Time of the registration, ISO 8601 in UTC."""
    sha256: str
    name: str
    """The predicted run."""
    identity: Mapping[str, Any]
    """Part of the configuration of the predicted run that determines its curve."""


@dataclass(frozen=True)
class CurveScore:
    """A predicted curve compared with the losses of a run, as far as they reach."""

    windows: int
    """Number of windows that the run has passed."""
    inside: int
    """Number of windows whose mean is in the band."""
    first_outside: int | None
    """Last step of the first window outside the band."""
    step: int | None
    """Last step of the last window; None if the run has not passed a window."""
    measured: float | None
    """Mean of the last window."""
    predicted: float | None
    """Predicted mean of the last window."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction at the last window; positive if the prediction was too high."""
        return None if self.measured is None or self.predicted is None else self.predicted / self.measured - 1

    def as_dict(self) -> dict[str, Any]:
        """Returns the score as JSON values."""
        return {**asdict(self), "error": self.error}

    def describe(self, registered: RegisteredCurve) -> str:
        """Returns the score as a sentence."""
        curve = registered.curve
        head = f"{registered.name}: {curve.metric} by step, predicted on {registered.written[:10]}"
        if self.error is None:
            return f"{head}, not measured yet"
        outside = "" if self.first_outside is None else f", outside first at step {self.first_outside}"
        return (
            f"{head}: {self.inside} of {self.windows} windows inside the {curve.level:.0%} band{outside}; at step "
            f"{self.step} predicted {self.predicted:.4f}, measured {self.measured:.4f}: {self.error:+.2%}"
        )


def read_curve(path: AnyPath) -> RegisteredCurve:
    """Reads a registered curve.

    Raises:
        UserError: if the file is not a registered curve, or was changed after registration.
    """
    content = read_registered(path, CURVE_FORMAT)
    try:
        curve = PredictedCurve(**{field.name: content["curve"][field.name] for field in fields(PredictedCurve)})
        return RegisteredCurve(curve, content["written"], content["sha256"], content["name"], content["identity"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: a registered curve without {error}; register it again with this version") from None


def score_curve(curve: PredictedCurve, steps_N: np.ndarray, losses_N: np.ndarray) -> CurveScore:
    """Compares a curve with the logged losses of a run. Windows without a logged step do not count.

    Args:
        curve: the predicted curve.
        steps_N: logged steps in ascending order.
        losses_N: loss of each of these steps.
    """
    windows = inside = 0
    first_outside = step = measured = predicted = None
    for index, last in enumerate(curve.last_steps):
        # A window that is still in progress does not count.
        if not len(steps_N) or last > steps_N[-1]:
            break
        values = losses_N[(steps_N > last - curve.window) & (steps_N <= last)]
        if not len(values):
            continue
        mean = float(values.mean())
        windows += 1
        if curve.contains(index, mean):
            inside += 1
        elif first_outside is None:
            first_outside = int(last)
        if math.isfinite(mean):
            step, measured, predicted = int(last), mean, float(curve.value[index])
    return CurveScore(windows, inside, first_outside, step, measured, predicted)
