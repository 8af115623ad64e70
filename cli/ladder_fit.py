"""`lmt ladder fit | predict | compare | register | report`: what the runs of a ladder say about larger ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common import OVERRIDES, OverridesArgument, load_ladder

if TYPE_CHECKING:
    from lm_trainer.ladder.fit.fitting import Fit

_SOURCES = "A ladder's YAML file, a table of points (.csv, .json, .parquet), or what `lmt ladder fit --out` wrote."
SourceArgument = Annotated[Path, typer.Argument(metavar="SOURCE", help=_SOURCES, show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON with all digits.")]
MaxOption = Annotated[
    float,
    typer.Option("--max-extrapolation", min=1, help="Refuse beyond this many times the compute of the largest rung."),
]
ExtrapolateOption = Annotated[bool, typer.Option("--extrapolate", help="Predict beyond --max-extrapolation as well.")]


def add_commands(app: typer.Typer) -> None:
    """Puts the commands of this file beside the others of `lmt ladder`."""
    for command in (fit, predict):
        app.command(context_settings=OVERRIDES)(command)


def _points(ctx: typer.Context, source: Path, overrides: list[str] | None, **options: Any) -> Any:
    """The points of a ladder or a table."""
    from lm_trainer.core.errors import UserError
    from lm_trainer.core.runtime import prepare_process

    prepare_process()  # before anything imports jax

    from lm_trainer.ladder.fit.sources import ladder_points, table_points

    if source.suffix in (".yaml", ".yml"):
        return ladder_points(load_ladder(ctx, source, overrides), **options)
    if overrides:
        raise UserError(f"{overrides[0]}: settings are for a ladder's YAML file; {source} has none")
    return table_points(source, **options)


def _fit(ctx: typer.Context, source: Path, overrides: list[str] | None = None) -> "Fit":
    """A fit that was written, or the fit of a ladder or a table with default settings."""
    points = None
    if source.suffix in (".yaml", ".yml"):
        points = _points(ctx, source, overrides)

    from lm_trainer.core.runtime import prepare_process

    prepare_process()  # before anything imports jax

    from lm_trainer.ladder.fit.fitting import fit as fit_points
    from lm_trainer.ladder.fit.sources import fit_of

    return fit_of(source) if points is None else fit_points(points)


def fit(
    ctx: typer.Context,
    source: SourceArgument,
    overrides: OverridesArgument = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="The loss to fit. Default: eval/loss, else loss.", show_default=False)
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="An accuracy to predict from the loss by a sigmoid.", show_default=False),
    ] = None,
    method: Annotated[
        str, typer.Option("--method", help="vp: variable projection; huber: Huber on log L by L-BFGS-B, as the papers.")
    ] = "vp",
    start: Annotated[
        str, typer.Option("--start", help="Of --method huber: hoffmann (a grid) or olmo (a single point).")
    ] = "hoffmann",
    resample: Annotated[
        str, typer.Option("--resample", help="What the bootstrap draws: residuals, points or runs.")
    ] = "residuals",
    draws: Annotated[int, typer.Option("--draws", help="Of the bootstrap.")] = 500,
    seed: Annotated[int, typer.Option("--bootstrap-seed", min=0, help="Of the bootstrap.")] = 0,
    level: Annotated[float, typer.Option("--level", help="Of the intervals.")] = 0.9,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="SIZE", help="Leave a size out; repeatable."),
    ] = None,
    pre_decay: Annotated[
        bool,
        typer.Option("--pre-decay", help="Keep points before a decay, which lie above the others."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FIT.json", help="Write the fit for the other commands.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta, with intervals, a back-test and what the points do not determine.

    Examples:
        lmt ladder fit configs/ladder_nano.yaml --out fit.json

        lmt ladder fit points.csv --method huber --start olmo --metric eval/loss
    """
    import json

    points = _points(ctx, source, overrides, metric=metric, task=task, pre_decay=pre_decay, without=without or ())

    from lm_trainer.ladder.fit.diagnostics import backtest, influence, notes
    from lm_trainer.ladder.fit.fitting import Settings, save
    from lm_trainer.ladder.fit.fitting import fit as fit_points
    from lm_trainer.ladder.fit.isoflop import fit_isoflop
    from lm_trainer.ladder.fit.tables import fit_text

    found = fit_points(points, Settings(method, start, resample, draws, seed, level))
    if out:
        save(found, out)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
        return
    effect = influence(found)
    typer.echo(fit_text(found, backtest(found), effect, notes(found, effect), fit_isoflop(points)))


def predict(
    ctx: typer.Context,
    source: SourceArgument,
    overrides: OverridesArgument = None,
    params: Annotated[
        float | None,
        typer.Option("--params", metavar="N", help="Of the run, such as 7e9.", show_default=False),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option("--tokens", metavar="D", help="Of the run, such as 4e12.", show_default=False)
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option("--flops", metavar="C", help="Instead: the best N and D for this compute.", show_default=False),
    ] = None,
    max_extrapolation: MaxOption = 100,
    extrapolate: ExtrapolateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Say what a run that was not made would measure, or how to spend a compute, with intervals.

    Examples:
        lmt ladder predict fit.json --params 7e9 --tokens 4e12

        lmt ladder predict configs/ladder_nano.yaml --flops 1e15
    """
    import json

    from lm_trainer.core.errors import UserError

    if (flops is None) == (params is None) or (params is None) != (tokens is None):
        raise UserError("predict needs --params and --tokens, or --flops alone")
    found = _fit(ctx, source, overrides)

    from lm_trainer.ladder.fit import predict as law

    limits = {"max_extrapolation": max_extrapolation, "extrapolate": extrapolate}
    if flops is not None:
        best = law.optimum(found, flops, **limits)
        typer.echo(json.dumps(best.as_dict(), indent=1) if as_json else "\n".join(law.optimum_lines(found, best)))
        return
    assert params is not None
    assert tokens is not None
    prediction = law.predict(found, params, tokens, **limits)
    typer.echo(json.dumps(prediction.as_dict(), indent=1) if as_json else "\n".join(law.lines(prediction)))
