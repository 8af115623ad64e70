"""`lmt ladder rate`: a law of the best learning rate in the tokens of a run and of a batch."""

from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.ladder.fit.predict import Range
    from lm_trainer.ladder.fit.rate import RateFit


def add_rate_command(app: typer.Typer) -> None:
    """Adds the command to the command group."""
    app.command("rate")(rate)


def rate(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Run IDs or directories.", show_default=False)],
    metric: Annotated[str, typer.Option("--metric", help="The loss.")] = "eval/loss",
    tokens: Annotated[
        float | None,
        typer.Option("--tokens", min=1, help="Predict the best rate of a run of this length.", show_default=False),
    ] = None,
    batch_size: Annotated[
        float | None,
        typer.Option(
            "--batch-size",
            min=1,
            help="Tokens of a batch of this run. Default: the mean of the runs.",
            show_default=False,
        ),
    ] = None,
    tokens_exponent: Annotated[
        float | None,
        typer.Option("--tokens-exponent", help="Do not fit it: -0.32 for HyperP, 0 for none.", show_default=False),
    ] = None,
    batch_exponent: Annotated[
        float | None,
        typer.Option("--batch-exponent", help="Do not fit it: 0.5 for the square-root rule.", show_default=False),
    ] = None,
    level: Annotated[float, typer.Option("--level", help="Confidence level of the intervals.")] = 0.9,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with full precision.")] = False,
) -> None:
    """Fit the best learning rate to the tokens of a run and of a batch.

    The runs have at least three rates for each length and batch size, and otherwise the same settings.

    Examples:
        lmt sweep my.yaml optimizer.learning_rate=2e-3,4e-3,8e-3,16e-3 trainer.num_train_steps=250,500,1000 --name rates

        lmt ladder rate logs/rates-* --tokens 1e9
    """
    import json

    from lm_trainer.ladder.fit.rate import QUANTITIES, fit_rate_law, read_best_rates
    from lm_trainer.ladder.fit.settings import check_level

    check_level(level)
    if batch_size is not None and tokens is None:
        raise UserError("--batch-size: the predicted run also needs --tokens")
    exponents = zip(QUANTITIES, (tokens_exponent, batch_exponent), strict=True)
    fixed = {name: exponent for name, exponent in exponents if exponent is not None}
    fit = fit_rate_law(read_best_rates(runs, metric), fixed=fixed, level=level)
    point = None if tokens is None else (tokens, batch_size or fit.law.reference["batch_size"])
    if not as_json:
        clean.echo(_describe(fit, point))
        return
    ranges = {name: fit.exponent(name) for name in QUANTITIES}
    interval = None if point is None else fit.predict(*point)
    predicted = None if point is None else {"rate": fit.law.rate(*point), "interval": interval and vars(interval)}
    plain = {
        "best": [vars(group) for group in fit.best],
        "learning_rate_law": fit.law.model_dump(mode="json"),
        "level": level,
        "exponents": {name: bounds and vars(bounds) for name, bounds in ranges.items()},
        "predicted": predicted,
    }
    clean.echo(json.dumps(plain, indent=1))


def _describe(fit: "RateFit", point: tuple[float, float] | None) -> str:
    from lm_trainer.ladder.tables import format_table

    heads = ["tokens", "batch", "best rate", "by the law", "lowest loss", "runs"]
    rows = [
        [
            *(f"{number:,}" for number in (group.tokens, group.batch_size)),
            *(f"{rate:.4g}" for rate in (group.rate, fit.law.rate(group.tokens, group.batch_size))),
            f"{group.loss:.4f}",
            str(group.num_runs),
        ]
        for group in fit.best
    ]
    lines = [format_table(heads, rows), ""]
    for name, exponent in fit.law.exponents.items():
        if name in fit.fitted:
            interval = fit.exponent(name)
            shown = f"{exponent:.3f} (add groups of runs for an interval)" if interval is None else str(interval)
        else:
            shown = f"{exponent:g}, not fitted"
        lines.append(f"exponent of {name}, {fit.level:.0%}: {shown}")
    if point is not None:
        lines.append(_describe_prediction(fit.law.rate(*point), fit.predict(*point), point))
    lines += ["", "For a ladder:", "", "run_configurator:", "  learning_rate_law:"]
    lines += [f"    {key}: {value:.6g}" for key, value in fit.law.model_dump(mode="json").items()]
    return "\n".join(lines)


def _describe_prediction(rate: float, interval: "Range | None", point: tuple[float, float]) -> str:
    shown = f"{rate:.4g}" if interval is None else str(interval)
    return f"best rate of {point[0]:,.0f} tokens with a batch of {point[1]:,.0f}: {shown}"
