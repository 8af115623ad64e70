"""`lmt ladder fit | predict | register | report`: fit scaling laws to the runs of a ladder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import OVERRIDES, OverridesArgument, path_option, source_argument
from cli.ladder_curve import load_curve_ladder, predict_one_curve, print_prediction, register_curve
from cli.ladder_file import load_ladder
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.ladder.fit.fitting import Fit

_POINTS = "A ladder's YAML file, or a table of points (.csv, .json, .parquet)"
SOURCES = f"{_POINTS}, or a fit saved by `lmt ladder fit --out`."
SourceArgument = Annotated[Path, source_argument(metavar="SOURCE", help=SOURCES, show_default=False)]
FitOption = Annotated[
    Path | None,
    path_option(
        "--fit", metavar="FIT.json", help="A saved fit. Default: fit SOURCE with default settings.", show_default=False
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON with full precision.")]
UniqueOption = Annotated[
    float | None,
    typer.Option(
        "--unique-tokens",
        metavar="U",
        help="Number of distinct tokens in the training text, if it is read more than once.",
        show_default=False,
    ),
]
MaxOption = Annotated[
    float,
    typer.Option(
        "--max-extrapolation", min=1, help="Maximum extrapolation, as a multiple of the largest rung's compute."
    ),
]
CurveOption = Annotated[
    bool, typer.Option("--curve", help="Predict the training loss by step, from the loss curves of the ladder's runs.")
]
CurveRunOption = Annotated[
    Path | None,
    path_option(
        "--run",
        metavar="CONFIG",
        help="With --curve, instead of --size: the YAML file of a run with a model or schedule of its own.",
        show_default=False,
    ),
]
LevelOption = Annotated[
    float, typer.Option("--level", help="With --curve: fraction of the windows that the band is to contain.")
]
ExtrapolateOption = Annotated[bool, typer.Option("--extrapolate", help="Allow predictions beyond --max-extrapolation.")]


def add_commands(app: typer.Typer) -> None:
    """Adds the commands of this file to `lmt ladder`."""
    for command in (fit, predict, register, report):
        app.command(context_settings=OVERRIDES)(command)


def is_ladder(source: Path) -> bool:
    """Returns True for the YAML file of a ladder."""
    return source.suffix in (".yaml", ".yml")


def _load_points(ctx: typer.Context, source: Path, overrides: list[str] | None, **options: Any) -> Any:
    """Loads the measured points of a ladder or a table."""
    from lm_trainer.ladder.fit.sources import ladder_points, table_points

    if is_ladder(source):
        return ladder_points(load_ladder(ctx, source, overrides), **options)
    _refuse_settings(source, overrides)
    return table_points(source, **options)


def load_fit(ctx: typer.Context, source: Path, overrides: list[str] | None = None) -> "Fit":
    """Loads a saved fit, or fits a ladder or table with default settings."""
    from lm_trainer.ladder.fit.fitting import fit as fit_points
    from lm_trainer.ladder.fit.sources import read_or_fit

    if is_ladder(source):
        return fit_points(_load_points(ctx, source, overrides))
    _refuse_settings(source, overrides)
    return read_or_fit(source)


def _refuse_settings(source: Path, overrides: list[str] | None) -> None:
    if overrides:
        raise UserError(f"{overrides[0]}: settings are for a ladder's YAML file; {source} has none")


def _refuse_options(reason: str, **options: object) -> None:
    """Raises UserError if an option is set that has no effect here."""
    for name, value in options.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} {value}: {reason} no {option}; remove it")


def fit(
    ctx: typer.Context,
    source: Annotated[Path, source_argument(metavar="SOURCE", help=f"{_POINTS}.", show_default=False)],
    overrides: OverridesArgument = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="Loss to fit. Default: eval/loss, else loss.", show_default=False)
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", help="Accuracy to predict as well, from the loss and directly from compute.", show_default=False
        ),
    ] = None,
    chance: Annotated[
        float | None,
        typer.Option(
            "--chance",
            help="Accuracy of guessing, such as 0.25 for four choices. Default: known for common tasks, else 0.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            "--method", help="vp: variable projection; huber: Huber loss on log L with L-BFGS-B, as in the papers."
        ),
    ] = "vp",
    start: Annotated[
        str,
        typer.Option("--start", help="Initial values for --method huber: hoffmann (a grid) or olmo (a single point)."),
    ] = "hoffmann",
    resample: Annotated[
        str, typer.Option("--resample", help="Unit resampled by the bootstrap: residuals, points or runs.")
    ] = "residuals",
    draws: Annotated[int, typer.Option("--draws", help="Number of bootstrap fits.")] = 500,
    seed: Annotated[int, typer.Option("--bootstrap-seed", min=0, help="Seed of the bootstrap.")] = 0,
    level: Annotated[float, typer.Option("--level", help="Confidence level of the intervals.")] = 0.9,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="SIZE", help="Exclude a size; repeatable."),
    ] = None,
    pre_decay: Annotated[
        bool,
        typer.Option("--pre-decay", help="Keep points from before the learning-rate decay, whose losses are higher."),
    ] = False,
    unique_tokens: UniqueOption = None,
    out: Annotated[
        Path | None, path_option("--out", metavar="FIT.json", help="Save the fit for the other commands.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta, with intervals, a back-test and notes on undetermined parameters.

    Examples:
        lmt ladder fit configs/ladder_nano.yaml --out fit.json

        lmt ladder fit points.csv --method huber --start olmo --metric eval/loss

        lmt ladder fit points.csv --task lm_eval/arc_easy/acc --chance 0.25

        lmt ladder fit points.csv --unique-tokens 4e9
    """
    import json

    points = _load_points(ctx, source, overrides, metric=metric, task=task, pre_decay=pre_decay, without=without or ())
    if chance is not None:
        if task is None:
            raise UserError("--chance is the accuracy of guessing in a task; name the task with --task")
        points = points.with_chance(chance)
    if unique_tokens is not None:
        points = points.with_unique_tokens(unique_tokens)

    from lm_trainer.ladder.fit.diagnostics import backtest, collect_caveats, measure_influence
    from lm_trainer.ladder.fit.fitting import FitSettings, save
    from lm_trainer.ladder.fit.fitting import fit as fit_points
    from lm_trainer.ladder.fit.isoflop import fit_isoflop
    from lm_trainer.ladder.fit.tables import fit_text

    law_fit = fit_points(points, FitSettings(method, start, resample, draws, seed, level))
    if out:
        save(law_fit, out)
    if as_json:
        clean.echo(json.dumps(law_fit.as_dict(), indent=1))
        return
    effect = measure_influence(law_fit)
    clean.echo(fit_text(law_fit, backtest(law_fit), effect, collect_caveats(law_fit, effect), fit_isoflop(points)))


def predict(
    ctx: typer.Context,
    source: SourceArgument,
    overrides: OverridesArgument = None,
    params: Annotated[
        float | None,
        typer.Option("--params", metavar="N", help="Number of parameters of the run, such as 7e9.", show_default=False),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option("--tokens", metavar="D", help="Training tokens of the run, such as 4e12.", show_default=False),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(
            "--flops",
            metavar="C",
            help="Instead of N and D: find the best N and D for this compute budget.",
            show_default=False,
        ),
    ] = None,
    curve: CurveOption = False,
    size: Annotated[
        str | None,
        typer.Option("--size", help="With --curve: a size that the ladder's models define.", show_default=False),
    ] = None,
    run: CurveRunOption = None,
    level: LevelOption = 0.9,
    unique_tokens: UniqueOption = None,
    max_extrapolation: MaxOption = 100,
    extrapolate: ExtrapolateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict, with intervals, the metrics of a run that has not been trained, or the best use of a compute budget.

    With --curve, predicts the training loss by step with a band.

    Examples:
        lmt ladder predict fit.json --params 7e9 --tokens 4e12

        lmt ladder predict configs/ladder_nano.yaml --flops 1e15

        lmt ladder predict configs/ladder_nano.yaml --curve --size 273k
    """
    import json

    if curve:
        _refuse_options(
            "--curve takes --size or --run, and", params=params, tokens=tokens, flops=flops, unique_tokens=unique_tokens
        )
        ladder = load_curve_ladder(ctx, source, overrides)
        limits = {"max_extrapolation": max_extrapolation, "extrapolate": extrapolate}
        print_prediction(
            *predict_one_curve(ladder, size=size, run=run, level=level, registers=False, **limits), as_json=as_json
        )
        return
    _refuse_options("without --curve,", size=size, run=run)
    if (flops is None) == (params is None) or (params is None) != (tokens is None):
        raise UserError("predict needs --params and --tokens, or --flops alone")
    law_fit = load_fit(ctx, source, overrides)

    from lm_trainer.ladder.fit import predict as law

    limits: dict[str, Any] = {
        "unique_tokens": unique_tokens,
        "max_extrapolation": max_extrapolation,
        "extrapolate": extrapolate,
    }
    if flops is not None:
        best = law.find_optimum(law_fit, flops, **limits)
        clean.echo(json.dumps(best.as_dict(), indent=1) if as_json else "\n".join(law.optimum_lines(law_fit, best)))
        return
    assert params is not None
    assert tokens is not None
    prediction = law.predict(law_fit, params, tokens, **limits)
    clean.echo(json.dumps(prediction.as_dict(), indent=1) if as_json else "\n".join(law.prediction_lines(prediction)))


def register(
    ctx: typer.Context,
    source: SourceArgument,
    overrides: OverridesArgument = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            help="A size of the ladder that has not been trained: predicts all of its checkpoints.",
            show_default=False,
        ),
    ] = None,
    params: Annotated[
        float | None,
        typer.Option(
            "--params", metavar="N", help="Instead of --size: number of parameters of the run.", show_default=False
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            "--tokens", metavar="D", help="Instead of --size: training tokens of the run.", show_default=False
        ),
    ] = None,
    unique_tokens: UniqueOption = None,
    fitted: FitOption = None,
    curve: CurveOption = False,
    run: CurveRunOption = None,
    level: LevelOption = 0.9,
    out: Annotated[
        Path | None,
        path_option(
            "--out",
            metavar="FILE",
            help="File to write. Default: predictions/SIZE.json in the ladder's directory; with --curve "
            "predictions/curves/SIZE.json.",
        ),
    ] = None,
    max_extrapolation: MaxOption = 100,
    extrapolate: ExtrapolateOption = False,
) -> None:
    """Record a dated and hashed prediction before a run is trained; `lmt ladder status` scores it later.

    With --curve, records the training loss by step with a band, for `trainer.alerts.off_prediction` and `lmt report`.

    Examples:
        lmt ladder register configs/ladder_nano.yaml --size 273k

        lmt ladder register fit.json --params 7e9 --tokens 4e12 --out 7b.json

        lmt ladder register configs/ladder_nano.yaml --curve --size 273k
    """
    if curve:
        _refuse_options(
            "--curve takes --size or --run, and", params=params, tokens=tokens, unique_tokens=unique_tokens, fit=fitted
        )
        ladder = load_curve_ladder(ctx, source, overrides)
        limits = {"max_extrapolation": max_extrapolation, "extrapolate": extrapolate}
        law, prediction = predict_one_curve(ladder, size=size, run=run, level=level, registers=True, **limits)
        register_curve(ladder, law, prediction, size=size, out=out)
        return
    _refuse_options("without --curve,", run=run)
    if (size is None) == (params is None) or (params is None) != (tokens is None):
        raise UserError("register needs --size, or --params and --tokens")
    if size is not None and not is_ladder(source):
        raise UserError(f"--size {size}: {source} is no ladder's YAML file; give --params and --tokens")
    if size is None and out is None:
        raise UserError("--params and --tokens: say where to write the prediction with --out FILE")
    law_fit = load_fit(ctx, fitted or source, None if fitted else overrides)

    from lm_trainer.ladder.fit import register as registry
    from lm_trainer.ladder.fit.predict import predict as predict_run

    targets: list[tuple[str, float, float]] = []
    if size is not None:
        ladder = load_ladder(ctx, source, overrides)
        targets = [*registry.targets_to_predict(ladder, size)]
        out = out or registry.registration_path(ladder, size)
    elif params is not None and tokens is not None:
        targets = [(f"N {params:g}, D {tokens:g}", params, tokens)]
    limits: dict[str, Any] = {
        "unique_tokens": unique_tokens,
        "max_extrapolation": max_extrapolation,
        "extrapolate": extrapolate,
    }
    predictions = [(name, predict_run(law_fit, n, d, **limits)) for name, n, d in targets]
    assert out is not None
    digest = registry.write_registration(out, law_fit, predictions, size=size)
    for name, prediction in predictions:
        loss = prediction.run
        clean.echo(f"{name}: {prediction.metric} {loss.value:.4f} ({loss.low:.4f} to {loss.high:.4f})")
    clean.echo(f"{out}: registered, sha256 {digest}")


def report(
    ctx: typer.Context,
    source: SourceArgument,
    overrides: OverridesArgument = None,
    params: Annotated[
        float | None,
        typer.Option(
            "--params",
            metavar="N",
            help="Number of parameters of a run whose prediction is included.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option("--tokens", metavar="D", help="Training tokens of that run.", show_default=False)
    ] = None,
    fitted: FitOption = None,
    out: Annotated[Path, path_option("--out", metavar="FILE.html", help="File to write.")] = Path("ladder.html"),
    max_extrapolation: MaxOption = 100,
    extrapolate: ExtrapolateOption = False,
) -> None:
    """Write one HTML file with all plots: fit, residuals, isoFLOP curves, back-test and schedules.

    Examples:
        lmt ladder report configs/ladder_nano.yaml --out ladder.html

        lmt ladder report fit.json --params 7e9 --tokens 4e12
    """
    if (params is None) != (tokens is None):
        raise UserError("--params and --tokens belong together")
    law_fit = load_fit(ctx, fitted or source, None if fitted else overrides)

    from lm_trainer.ladder.fit.predict import predict as predict_run
    from lm_trainer.ladder.fit.report import write_report

    ladder = load_ladder(ctx, source, overrides) if is_ladder(source) else None
    target = None
    if params is not None and tokens is not None:
        target = predict_run(law_fit, params, tokens, max_extrapolation=max_extrapolation, extrapolate=extrapolate)
    write_report(out, law_fit, title=ladder.name if ladder else source.stem, ladder=ladder, target=target)
    clean.echo(f"{out}: written")
