"""`lmt ladder mixture`: a law of the loss in the weights of a mixture."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.ladder.fit.mixture import BestMixture, MixtureFit
    from lm_trainer.ladder.fit.predict import Range


def add_mixture_command(app: typer.Typer) -> None:
    """Adds the command to the command group."""
    app.command("mixture")(mixture)


def mixture(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run IDs or directories.", show_default=False)],
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", help="A loss to fit; repeat it for several. Default: all held-out sets.", show_default=False
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="SET=W,...", help="Predict the losses of this mixture.", show_default=False),
    ] = None,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="Allow weights outside of the runs'.")] = False,
    draws: Annotated[int, typer.Option("--draws", min=50, help="Resamples of the intervals.")] = 500,
    level: Annotated[float, typer.Option("--level", help="Confidence level of the intervals.")] = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with full precision.")] = False,
) -> None:
    """Fit the loss as a function of the weights of a mixture, and find the best weights.

    The runs differ in data.train_weights and trainer.seed alone.

    Examples:
        lmt ladder mixture mix-0 mix-1 mix-2 mix-3 mix-4 mix-5

        lmt ladder mixture logs/mix-* --metric eval/code/loss --weights web=0.6,code=0.4
    """
    import json
    from dataclasses import asdict

    from lm_trainer.ladder.fit.mixture import find_best_mixture, fit_mixture, left_out_errors, parse_weights
    from lm_trainer.ladder.fit.mixture_runs import read_mixture_runs
    from lm_trainer.ladder.fit.settings import check_level

    check_level(level)
    proportions = None if weights is None else _parse(weights)
    fit = fit_mixture(read_mixture_runs(runs, metrics or ()), draws=draws, level=level)
    weights_M = None if proportions is None else parse_weights(fit, proportions, extrapolate=extrapolate)
    names = fit.runs.metrics
    predicted = {} if weights_M is None else {m: fit.predict_run(i, weights_M) for i, m in enumerate(names)}
    best, errors_PV = find_best_mixture(fit), left_out_errors(fit.runs)
    if not as_json:
        clean.echo(_describe(fit, best, predicted, errors_PV))
        return
    laws = [
        {"metric": name, "E": law.floor, "t": dict(zip(fit.runs.sets, law.slopes_M.tolist(), strict=True))}
        for name, law in zip(names, fit.laws, strict=True)
    ]
    plain = {
        "laws": laws,
        "level": level,
        "best": {**asdict(best), "weights": dict(zip(fit.runs.sets, map(asdict, best.weights), strict=True))},
        "predicted": {name: asdict(loss) for name, loss in predicted.items()},
        # JSON has no NaN.
        "left_out_errors": [[None if x != x else x for x in row] for row in errors_PV.tolist()],
    }
    clean.echo(json.dumps(plain, indent=1))


def _parse(text: str) -> dict[str, float]:
    parts = [part.partition("=") for part in text.split(",")]
    try:
        return {name.strip(): float(value) for name, _, value in parts}
    except ValueError:
        raise UserError(f"--weights {text}: write the weight of every set, such as web=0.6,code=0.4") from None


def _describe(fit: "MixtureFit", best: "BestMixture", predicted: "dict[str, Range]", errors_PV: Any) -> str:
    import numpy as np

    from lm_trainer.ladder.tables import format_table

    runs = fit.runs
    rows = []
    for index, (metric, law) in enumerate(zip(runs.metrics, fit.laws, strict=True)):
        errors_P = np.abs(errors_PV[:, index])
        left_out = f"{np.nanmax(errors_P):.2%}" if np.isfinite(errors_P).any() else "-"
        constants = [f"{law.floor:.4f}", *(f"{t:+.3f}" for t in law.slopes_M)]
        rows.append([metric, *constants, f"{fit.noise_V[index]:.2%}", left_out])
    head = ["loss", "E", *(f"t of {name}" for name in runs.sets), "noise of a run", "largest error left out"]
    lines = [f"L(r) = E + exp(t . r), {len(runs.labels)} runs", format_table(head, rows)]
    if predicted:
        lines.append(f"\nA run with these weights, {fit.level:.0%}:")
        lines += [f"  {name}: {loss}" for name, loss in predicted.items()]
    lines.append(f"\nBest weights within the range of the runs, {fit.level:.0%}:")
    lines += [f"  {name}: {weight}" for name, weight in zip(runs.sets, best.weights, strict=True)]
    lines.append(f"  mean of the losses: {best.loss}, lower than the best mixture of the runs by {best.gain}")
    if best.gain.low <= 0:
        lines.append("The interval of the gain contains 0: these runs do not show that other weights are better.")
    return "\n".join(lines)
