"""Coverage of the intervals of `lmt ladder` over simulated ladders.

    python -m benchmarks.ladder_coverage --ladders 500 --results benchmarks/results

Writes ladder_coverage.md. Every ladder has losses of a known law and accuracies of a known form, with noise of runs and
of a finite number of examples. A 90 % interval should hold the truth in 90 % of the ladders.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.setting import markdown_table
from lm_trainer.ladder.fit.fitting import Fit, fit
from lm_trainer.ladder.fit.law import Law, training_flops
from lm_trainer.ladder.fit.points import Points
from lm_trainer.ladder.fit.predict import Range, predict
from lm_trainer.ladder.fit.repeats import RepeatLaw
from lm_trainer.ladder.fit.settings import FitSettings

LAW = Law(1.69, 406.4, 410.7, 0.34, 0.28)
"""Constants of Hoffmann et al. 2022."""
REPEATED, UNIQUE = RepeatLaw(**vars(LAW), repeats=15.0), 8e9
NOISE, EXAMPLES, CHANCE = 0.003, 2000, 0.25
"""Noise of log L of a run, examples of the task, and its accuracy of guessing."""
LADDERS = {"12 points of 4 sizes": (4, (5, 20, 80)), "24 points of 6 sizes": (6, (5, 20, 80, 320))}
TARGETS = {"10 times": 10.0, "100 times": 100.0}
"""Compute of the predicted run, in multiples of the largest rung's, half of it in size and half in length."""
LEVEL = 0.9

Accuracy = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""The true accuracy for N, D and the loss of the run."""
FORMS: dict[str, Accuracy] = {
    "two steps": lambda n, d, loss: 0.73 / (1 + np.exp(3.0 * (loss - 2.9))) + 0.27,
    "compute": lambda n, d, loss: CHANCE + (1 - CHANCE) * np.exp(-((training_flops(n, d) / 2e20) ** -0.2)),
    "size and tokens": lambda n, d, loss: (
        CHANCE + (1 - CHANCE) * np.exp(-((n / 3e8) ** -0.35) * 0.6 - 0.6 * (d / 2e10) ** -0.3)
    ),
}


def make_points(shape: str, seed: int, *, form: str | None = None, repeated: bool = False) -> Points:
    """Simulates a ladder: losses with noise, and accuracies with the noise of the losses and of the examples."""
    rng = np.random.default_rng([seed, len(shape), len(form or "")])
    sizes, multiples = LADDERS[shape]
    n, multiple = (x.ravel() for x in np.meshgrid(1e8 * 2.0 ** np.arange(sizes), np.asarray(multiples, float)))
    d = n * multiple
    unique = np.full(len(n), UNIQUE) if repeated else None
    law = REPEATED if repeated else LAW
    loss = law.loss(n, d, unique) * np.exp(NOISE * rng.standard_normal(len(n)))
    labels = tuple(map(str, range(len(n))))
    points = Points(n, d, loss, labels, labels, unique_tokens=unique)
    if form is None:
        return points
    task = rng.binomial(EXAMPLES, FORMS[form](n, d, loss)) / EXAMPLES
    return replace(points, task=task, task_metric="accuracy", chance=CHANCE)


def _target(fitted: Fit, multiple: float) -> tuple[float, float]:
    largest = int(np.argmax(fitted.points.flops))
    root = math.sqrt(multiple)
    return float(fitted.points.num_params[largest] * root), float(fitted.points.tokens[largest] * root)


class Tally:
    """Counts how often intervals hold the truth, how wide they are, and which forms were chosen."""

    def __init__(self) -> None:
        self.hits: dict[tuple[str, ...], list[bool]] = defaultdict(list)
        self.widths: dict[tuple[str, ...], list[float]] = defaultdict(list)
        self.chosen: dict[str, list[str]] = defaultdict(list)

    def add(self, key: tuple[str, ...], interval: Range, truth: float) -> None:
        self.hits[key].append(interval.contains(truth))
        self.widths[key].append((interval.high - interval.low) / 2)

    def merge(self, part: Tally) -> None:
        for name in ("hits", "widths", "chosen"):
            for key, values in getattr(part, name).items():
                getattr(self, name)[key] += values

    def rows(self) -> list[list[str]]:
        return [[*key, f"{np.mean(hits):.1%}", f"{np.median(self.widths[key]):.4g}"] for key, hits in self.hits.items()]

    def choices(self) -> list[list[str]]:
        return [
            [key, *(f"{np.mean([name == form for name in names]):.0%}" for form in FORMS)]
            for key, names in self.chosen.items()
        ]


def simulate(ladder: tuple[str, int]) -> Tally:
    """Simulates the ladders of one shape and seed."""
    tally = Tally()
    simulate_losses(tally, *ladder, repeated=False)
    simulate_losses(tally, *ladder, repeated=True)
    for form in FORMS:
        simulate_task(tally, form, *ladder)
    return tally


def simulate_losses(tally: Tally, shape: str, seed: int, *, repeated: bool) -> None:
    """Fits a ladder's losses, and compares constants and predictions with the truth."""
    fitted = fit(make_points(shape, seed, repeated=repeated), FitSettings(draws=200, seed=seed, level=LEVEL))
    truth, unique = (REPEATED, UNIQUE) if repeated else (LAW, None)
    name = "repeated text" if repeated else "loss"
    for constant in ("E", "alpha", "beta", *(["repeats"] if repeated else [])):
        value = getattr(fitted.law, constant)
        tally.add((name, shape, constant), Range(value, *fitted.interval(constant)), getattr(truth, constant))
    for label, multiple in TARGETS.items():
        n, d = _target(fitted, multiple)
        prediction = predict(fitted, n, d, unique_tokens=unique, extrapolate=True)
        loss = float(truth.loss(n, d, unique))
        tally.add((name, shape, f"loss at {label}"), prediction.law, loss)
        noise = NOISE * np.random.default_rng([seed, 7]).standard_normal()
        tally.add((name, shape, f"single run at {label}"), prediction.run, loss * math.exp(noise))


def simulate_task(tally: Tally, form: str, shape: str, seed: int) -> None:
    """Fits a ladder's accuracies, and compares the predictions of the true and of the chosen form with the truth."""
    fitted = fit(make_points(shape, seed, form=form), FitSettings(draws=200, seed=seed, level=LEVEL))
    assert fitted.task is not None
    tally.chosen[f"{form}, {shape}"].append(fitted.task.form)
    rng = np.random.default_rng([seed, 8])
    for label, multiple in TARGETS.items():
        n, d = _target(fitted, multiple)
        loss = float(LAW.loss(n, d))
        truth = float(FORMS[form](np.asarray(n), np.asarray(d), np.asarray(loss)))
        noisy = FORMS[form](np.asarray(n), np.asarray(d), np.asarray(loss * math.exp(NOISE * rng.standard_normal())))
        measured = float(rng.binomial(EXAMPLES, noisy)) / EXAMPLES
        prediction = predict(fitted, n, d, extrapolate=True)
        accuracies = prediction.accuracies
        of_form = next(accuracy for accuracy in accuracies if accuracy.form == form)
        tally.add((f"accuracy by {form}", shape, f"accuracy at {label}"), of_form.law, truth)
        tally.add((f"accuracy by {form}", shape, f"single run at {label}"), of_form.run, measured)
        tally.add((f"accuracy by {form}", shape, f"chosen form alone at {label}"), accuracies[0].law, truth)
        assert prediction.accuracy is not None
        tally.add((f"accuracy by {form}", shape, f"all forms left at {label}"), prediction.accuracy, truth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladders", type=int, default=500)
    parser.add_argument("--shape", choices=list(LADDERS), action="append", help="only this ladder; repeatable")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    tally = Tally()
    ladders = [(shape, seed) for shape in arguments.shape or LADDERS for seed in range(arguments.ladders)]
    with ProcessPoolExecutor(arguments.processes) as pool:
        for part in pool.map(simulate, ladders, chunksize=4):
            tally.merge(part)
    shapes = "".join(f' --shape "{shape}"' for shape in arguments.shape or ())
    error = math.sqrt(LEVEL * (1 - LEVEL) / arguments.ladders)
    text = [
        "# Coverage of the intervals of a ladder",
        f"`python -m benchmarks.ladder_coverage --ladders {arguments.ladders}{shapes}`: {arguments.ladders} simulated "
        f"ladders per row, noise of a run {NOISE:.1%} of its loss, {EXAMPLES:,} examples of a task with chance "
        f"{CHANCE}. Intervals of {LEVEL:.0%}; a rate has the standard deviation {error:.1%}. Half-widths are medians.",
        markdown_table(["truth", "ladder", "quantity", "held", "half-width"], tally.rows()),
        "How often each form of the accuracy was chosen by held-out rungs:",
        markdown_table(["truth", *FORMS], tally.choices()),
    ]
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "ladder_coverage.md").write_text("\n\n".join(text) + "\n")


if __name__ == "__main__":
    main()
