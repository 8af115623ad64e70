"""Predicts a task's accuracy by two steps or directly, and chooses the form by held-out rungs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.fit.accuracy import FORMS, DirectFit, fit_direct
from lm_trainer.ladder.fit.chain import AccuracySigmoid, fit_accuracy_sigmoid, search_sigmoid
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.search import search_law
from lm_trainer.ladder.fit.settings import FitSettings

TWO_STEP = "two steps"
_DRAWS = 200
"""Maximum number of resamples."""
_LEVEL = 0.95
"""Confidence with which held-out accuracies have to exclude a form."""
_RISE = 0.05
"""Probability that accuracies without any trend pass for a rise."""


@dataclass(frozen=True)
class TaskFit:
    """All forms of a task's accuracy, and the chosen one."""

    chain: AccuracySigmoid
    """The sigmoid from the loss to the accuracy, the second of two steps."""
    chain_draws: AccuracySigmoid
    chain_noise: float
    """Standard deviation of a single accuracy about the sigmoid."""
    direct: tuple[DirectFit, ...]
    """The direct forms."""
    form: str
    """The chosen form: `two steps`, `compute` or `size and tokens`."""
    held_out: int
    """Number of held-out accuracies by which the form was chosen."""
    errors: Mapping[str, float]
    """Root mean square error of each form at the held-out accuracies."""

    @property
    def plausible(self) -> tuple[str, ...]:
        """The forms that the held-out accuracies do not tell from the chosen one, beginning with it.

        The ratio of two mean squares is below the 95 % quantile of Fisher's F for as many accuracies.
        """
        names = (TWO_STEP, *(direct.form for direct in self.direct))
        if self.errors:
            bound = float(np.sqrt(stats.f.ppf(_LEVEL, self.held_out, self.held_out)))
            names = [name for name, error in self.errors.items() if error <= bound * self.errors[self.form]]
        return tuple(sorted(names, key=lambda name: name != self.form))

    def reason(self) -> str:
        """Returns in one line which form is chosen, and why."""
        if not self.errors:
            return (
                f"form: {self.form}, because no rung could be held out; it takes another size to choose a form by its "
                "predictions"
            )
        ordered = sorted(self.errors.items(), key=lambda item: item[1])
        shown = ", ".join(f"{name} {error:.4f}" for name, error in ordered)
        other_forms = " and ".join(self.plausible[1:])
        doubt = f", which do not exclude {other_forms}" if other_forms else ""
        return f"form: {self.form}, by the errors at {self.held_out} accuracies of held-out rungs ({shown}){doubt}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the fit as plain data at full precision, without the sigmoid."""
        return {
            "form": self.form,
            "held_out": self.held_out,
            "errors": dict(self.errors),
            "chain_noise": self.chain_noise,
            "direct": [direct.as_dict() for direct in self.direct],
        }


def fit_task(points: Points, settings: FitSettings) -> TaskFit:
    """Fits all forms to the accuracies of the points, and chooses one.

    Raises:
        UserError: if there are too few points, or the accuracies do not rise with compute.
    """
    assert points.task is not None
    draws = min(settings.draws, _DRAWS)
    chain, chain_draws = fit_accuracy_sigmoid(points.loss, points.task, settings, draws=draws)
    _check_rise(points)
    errors = points.task - chain.accuracy(points.loss)
    held = _held_out_errors(points, settings)
    rms = {name: float(np.sqrt(np.mean(values**2))) for name, values in held.items()}
    return TaskFit(
        chain,
        chain_draws,
        # The sigmoid has four constants.
        float(np.sqrt((errors**2).sum() / max(len(errors) - 4, 1))),
        # Six points are enough for each direct form, and the sigmoid has refused fewer.
        tuple(fit_direct(points, form, settings, draws=draws) for form in FORMS),
        min(rms, key=lambda name: rms[name]) if rms else TWO_STEP,
        len(held.get(TWO_STEP, ())),
        rms,
    )


def _check_rise(points: Points) -> None:
    """Refuses accuracies that do not rise with compute, as of a task at chance."""
    assert points.task is not None
    # The correlation of accuracies without a trend has Student's distribution.
    count, r = len(points), float(np.corrcoef(np.log(points.flops), points.task)[0, 1])
    if r * np.sqrt((count - 2) / max(1 - r**2, 1e-300)) > stats.t.ppf(1 - _RISE, count - 2):
        return
    low, high = points.task.min(), points.task.max()
    chance = f" of a task with chance {points.chance:.3g}" if points.chance else ""
    # Twice the spread above the highest of the measured noise.
    enough = high + 2 * float(points.task.std())
    raise UserError(
        f"--task {points.task_metric}: the accuracies ({low:.3g} to {high:.3g}){chance} do not rise with compute, so "
        f"that no law follows; it takes rungs that reach about {enough:.3g}, more examples, or the task's loss as "
        "--metric"
    )


def _held_out_errors(points: Points, settings: FitSettings) -> dict[str, np.ndarray]:
    """Returns the errors of each form at the accuracies of the largest size, and of the two largest, by smaller sizes.

    Only forms that can be fitted to the smaller sizes of every split are compared.
    """
    splits: list[dict[str, np.ndarray]] = []
    for held_P in _splits(points):
        try:
            splits.append(_errors_of_split(points, held_P, settings))
        except UserError:
            # Too few sizes or points are left for the two steps.
            continue
    names = set.intersection(*map(set, splits)) if splits else set()
    # In a fixed order, so that equal errors have the same choice.
    return {name: np.concatenate([s[name] for s in splits]) for name in (TWO_STEP, *FORMS) if name in names}


def _splits(points: Points) -> Iterator[np.ndarray]:
    for count in (1, 2):
        if len(points.sizes) > count:
            yield points.num_params >= points.sizes[-count]


def _errors_of_split(points: Points, held_P: np.ndarray, settings: FitSettings) -> dict[str, np.ndarray]:
    smaller, target = points.select(~held_P), points.select(held_P)
    assert smaller.task is not None
    assert target.task is not None
    law = search_law(smaller, settings)
    sigmoid = AccuracySigmoid(*search_sigmoid(smaller.loss, smaller.task))
    errors = {TWO_STEP: sigmoid.accuracy(target.fitted_loss(law)) - target.task}
    for form in FORMS:
        try:
            direct = fit_direct(smaller, form, settings, draws=0)
        except UserError:
            continue
        predicted = [direct.accuracy(n, d) for n, d in zip(target.num_params, target.tokens, strict=True)]
        errors[form] = np.array(predicted) - target.task
    return errors
